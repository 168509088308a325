"""`--no-skips`: a skipped test or module fails the run. `--skipped-to`: a list of them to run elsewhere."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SKIPPED_TEST = "import pytest\n@pytest.mark.skip(reason='r')\ndef test_s(): pass\ndef test_p(): pass\n"
SKIPPED_MODULE = "import pytest\npytest.importorskip('no_such_module')\n"


def run(folder: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """pytest in a folder that has the same conftest.py."""
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "pytest.ini").write_text("[pytest]\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | env
    command = [sys.executable, "-m", "pytest", "-q", *options]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("text", "options", "status"),
    [
        (SKIPPED_TEST, [], pytest.ExitCode.OK),
        (SKIPPED_TEST, ["--no-skips"], pytest.ExitCode.TESTS_FAILED),
        (SKIPPED_TEST, ["--no-skips", "-n1"], pytest.ExitCode.TESTS_FAILED),
        ("def test_p(): pass\n", ["--no-skips"], pytest.ExitCode.OK),
        (SKIPPED_MODULE, ["--no-skips"], pytest.ExitCode.TESTS_FAILED),
    ],
    ids=["not asked", "skipped test", "skipped on a worker", "nothing skipped", "skipped module"],
)
def test_status(tmp_path: Path, text: str, options: list[str], status: pytest.ExitCode) -> None:
    (tmp_path / "test_it.py").write_text(text)
    (tmp_path / "test_other.py").write_text("def test_other(): pass\n")
    done = run(tmp_path, *options)
    assert done.returncode == status, done.stdout
    assert ("no-skips was given" in done.stdout) == (status != pytest.ExitCode.OK)


@pytest.mark.parametrize("options", [[], ["-n1"]], ids=["alone", "on a worker"])
def test_the_skipped_tests_run_from_their_list(tmp_path: Path, options: list[str]) -> None:
    """Names with spaces, brackets and colons, and a whole module; nothing that has run."""
    (tmp_path / "test_named.py").write_text(
        "import os, pytest\n"
        "@pytest.mark.parametrize('name', ['a b', 'c[d]::e', 'f'])\n"
        "def test_named(name):\n"
        "    if name != 'f' and 'READY' not in os.environ: pytest.skip('r')\n"
    )
    (tmp_path / "test_module.py").write_text(
        "import os, pytest\n"
        "if 'READY' not in os.environ: pytest.skip('r', allow_module_level=True)\n"
        "def test_p(): pass\n"
    )
    assert "1 passed, 3 skipped" in run(tmp_path, *options, "--skipped-to", "skipped").stdout
    done = run(tmp_path, *options, "@skipped", READY="1")
    assert "3 passed" in done.stdout, done.stdout
    assert "skipped" not in done.stdout
