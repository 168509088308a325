"""A checkout works uninstalled, installed and installed in editable mode, from its root and from elsewhere.

Each case runs on a copy of this checkout, in a virtual environment of its own that sees the packages of the
running one except gpunet, so nothing is built or installed here.
"""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOT_PACKAGES = {"tests", "examples", "docs", "tools"}
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "tests/conftest.py")

PROBE = """
from pathlib import Path
import gpunet, gpunet.cpu_fallback, gpunet.operators, gpunet.proto
gpunet.proto.NetDef()
print(Path(gpunet.__file__).resolve().parent)
"""
PROBE_TEST = """
from pathlib import Path
import gpunet, gpunet.cpu_fallback, gpunet.proto

def test_probe():
    assert Path(gpunet.__file__).resolve().parent == Path(__file__).resolve().parent.parent / "gpunet"
"""
# The `pytest` command; `python -m pytest` would add the working folder to sys.path.
PYTEST_COMMAND = "import sys\nimport pytest\nsys.exit(pytest.main())\n"


def _folders(root: Path) -> dict[str, Path]:
    """Import name to folder, of every package at the top of a checkout."""
    folders = [p.parent for p in root.glob("*/__init__.py") if p.parent.name not in NOT_PACKAGES]
    return {f.name if f.name == "gpunet" else f"gpunet.{f.name}": f for f in folders}


def _run(arguments: list[str | Path], cwd: Path, **env: str) -> str:
    """Standard output of a command which must succeed."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTEST_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(hidden)} | env
    command = [str(a) for a in arguments]
    done = subprocess.run(command, cwd=cwd, env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{command} in {cwd}: status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def _build(checkout: Path, hook: str, into: Path) -> Path:
    """The wheel that setuptools makes by `build_wheel` or `build_editable`."""
    into.mkdir()
    code = f"import setuptools.build_meta as b; b.{hook}({str(into)!r})"
    _run([sys.executable, "-c", code], checkout)
    (wheel,) = into.glob("*.whl")
    return wheel


class Places:
    """A copy of the checkout, its wheels, and a virtual environment for each way of installing it."""

    def __init__(self, base: Path) -> None:
        self.checkout = base / "checkout"
        self.elsewhere = base / "elsewhere"
        self.elsewhere.mkdir()
        for folder in _folders(ROOT).values():
            ignored = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(folder, self.checkout / folder.name, ignore=ignored)
        (self.checkout / "tests").mkdir()
        for name in FILES:
            shutil.copy(ROOT / name, self.checkout / name)
        (self.checkout / "tests" / "test_probe.py").write_text(PROBE_TEST)
        self.pytest = base / "bin" / "pytest"
        self.pytest.parent.mkdir()
        self.pytest.write_text(PYTEST_COMMAND)
        self.dependencies = base / "dependencies"
        self.dependencies.mkdir()
        for folder in map(Path, sys.path):
            if folder.name in ("site-packages", "dist-packages") and folder.is_dir():
                self._link(folder)
        left_over = self.checkout / "build" / "lib" / "gpunet" / "deleted_since.py"
        left_over.parent.mkdir(parents=True)
        left_over.touch()
        self.wheel = _build(self.checkout, "build_wheel", base / "wheel")
        editable = _build(self.checkout, "build_editable", base / "editable_wheel")
        self.environments = {
            "uninstalled": self._environment(base / "uninstalled", None),
            "plain": self._environment(base / "plain", self.wheel),
            "editable": self._environment(base / "editable", editable),
        }

    def _link(self, folder: Path) -> None:
        for entry in folder.iterdir():
            link = self.dependencies / entry.name
            if "gpunet" not in entry.name and entry.suffix != ".pth" and not link.exists():
                link.symlink_to(entry)

    def _environment(self, where: Path, wheel: Path | None) -> Path:
        venv.create(where, symlinks=True)
        (packages,) = where.glob("lib/python*/site-packages")
        (packages / "dependencies.pth").write_text(f"{self.dependencies}\n")
        if wheel:
            zipfile.ZipFile(wheel).extractall(packages)
        return where

    def gpunet(self, installed: str) -> Path:
        """The folder of the installed package."""
        (packages,) = self.environments[installed].glob("lib/python*/site-packages/gpunet")
        return packages.resolve()


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places(tmp_path_factory.mktemp("layout"))


class Case:
    """One way of installing and one working folder."""

    def __init__(self, places: Places, installed: str, where: str) -> None:
        self.places, self.installed, self.where = places, installed, where
        self.cwd = places.checkout if where == "root" else places.elsewhere
        # Uninstalled and elsewhere, Python has to be told of the checkout.
        told = (installed, where) == ("uninstalled", "elsewhere")
        self.told = {"PYTHONPATH": str(places.checkout)} if told else {}
        self.runs_checkout = installed != "plain" or where == "root"

    def python(self, *arguments: str | Path, **env: str) -> str:
        python = self.places.environments[self.installed] / "bin" / "python"
        return _run([python, *arguments], self.cwd, **env)


@pytest.fixture(
    params=product(("uninstalled", "plain", "editable"), ("root", "elsewhere")), ids="-".join, scope="session"
)
def case(request: pytest.FixtureRequest, places: Places) -> Case:
    return Case(places, *request.param)


def test_import(case: Case) -> None:
    wanted = case.places.checkout / "gpunet" if case.runs_checkout else case.places.gpunet(case.installed)
    assert case.python("-c", PROBE, **case.told).split() == [str(wanted.resolve())]


def test_command_line(case: Case) -> None:
    assert "train" in case.python("-m", "gpunet", "--help", **case.told)


def test_bench(case: Case) -> None:
    name = "bench" if case.where == "root" or case.told else "gpunet.bench"
    assert "--quick" in case.python("-m", name, "--help", **case.told)


def test_pytest(case: Case) -> None:
    """The tests test the checkout that they are in, whatever else is installed."""
    folder = Path() if case.where == "root" else case.places.checkout
    probe = folder / "tests" / "test_probe.py"
    assert "1 passed" in case.python(case.places.pytest, "-p", "no:cacheprovider", probe)


def test_script_starts(places: Places) -> None:
    """What the installed `gpunet` script does: load the entry point."""
    code = (
        "from importlib.metadata import entry_points\n"
        "(script,) = entry_points(group='console_scripts', name='gpunet')\n"
        "assert callable(script.load())"
    )
    _run([places.environments["plain"] / "bin" / "python", "-c", code], places.elsewhere)


def test_wheel_has_every_file_and_no_other(places: Places) -> None:
    # What was measured stays in the repository.
    wanted = {
        "/".join((*name.split("."), *path.relative_to(folder).parts))
        for name, folder in _folders(places.checkout).items()
        for path in folder.rglob("*")
        if path.is_file() and not {"__pycache__", "results"} & set(path.parts)
    }
    in_wheel = {name for name in zipfile.ZipFile(places.wheel).namelist() if ".dist-info/" not in name}
    assert in_wheel == wanted


def test_type_checker_sees_every_folder() -> None:
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^packages = \[(.*)\]$", settings, re.MULTILINE)
    for name, folder in _folders(ROOT).items():
        if name != "gpunet.bench":
            assert f'"{name}"' in listed
        if name not in ("gpunet", "gpunet.bench"):
            link = ROOT / "tools" / "mypy_path" / "gpunet" / folder.name
            assert link.is_symlink(), f"no link {link}"
            assert link.resolve() == folder
