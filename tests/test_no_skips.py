"""`pytest --no-skips`: a skipped test or module fails the run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SKIPPED_TEST = "import pytest\n@pytest.mark.skip(reason='r')\ndef test_s(): pass\ndef test_p(): pass\n"
SKIPPED_MODULE = "import pytest\npytest.importorskip('no_such_module')\n"


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
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(text)
    (tmp_path / "test_other.py").write_text("def test_other(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", *options]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout
    assert ("no-skips was given" in done.stdout) == (status != pytest.ExitCode.OK)
