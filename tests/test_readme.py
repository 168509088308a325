"""What README.md promises is there: two commands, the example, the commands, the folders, the extras."""

import re
import subprocess
import sys
from pathlib import Path

from gpunet.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FRESH = "python3 -m venv .venv && .venv/bin/pip install -q "


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def _first_column(heading: str) -> list[str]:
    """The code spans in the first column of the table under a heading."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [
        span
        for row in re.findall(r"^\|([^|]*)\|", section, re.MULTILINE)
        for span in re.findall("`(.*?)`", row)
    ]


def test_two_commands_each_complete() -> None:
    train, tests = _blocks("sh")
    assert train == FRESH + ". && .venv/bin/gpunet train lenet\n"
    assert re.fullmatch(re.escape(FRESH) + r"'\.\[test\]' && \.venv/bin/pytest( -\S+| auto)*\n", tests)


def test_example_is_the_file_and_learns(tmp_path: Path) -> None:
    example = ROOT / "examples" / "quickstart.py"
    assert _blocks("python") == [example.read_text(encoding="utf-8")]
    code = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); runpy.run_path({str(example)!r})"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (percent,) = re.fullmatch(r"right on ([\d.]+)% of \d+ digits\n", done.stdout).groups()
    assert float(percent) > 95


def test_folders_are_there_and_every_package_is_listed() -> None:
    listed = {folder.rstrip("/") for folder in _first_column("Folders")}
    assert listed >= {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert [folder for folder in listed if not (ROOT / folder).is_dir()] == []


def test_extras_are_those_of_the_package() -> None:
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = settings.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    assert sorted(_first_column("Extras")) == sorted(re.findall(r"^(\w+) = \[", table, re.MULTILINE))


def test_commands_are_those_that_there_are() -> None:
    assert sorted(_first_column("Commands")) == sorted(COMMANDS)
