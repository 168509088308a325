"""Runs programs as the ranks of a job, with a hard limit of time."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from gpunet.cli.launch import is_open_mpi, mpirun_options

ROOT = Path(__file__).resolve().parent.parent
_BESIDE = Path(sys.executable).parent / "mpirun"
MPIRUN = str(_BESIDE) if _BESIDE.is_file() else shutil.which("mpirun")
MISSING = (
    "mpi4py is not installed (extra mpi)"
    if importlib.util.find_spec("mpi4py") is None
    else ""
    if MPIRUN
    else "there is no mpirun"
)
#: Seconds after which a job is taken for one that hangs: many times what one needs, also on a busy machine.
LIMIT = 300.0


@functools.cache
def version() -> str:
    """What ``mpirun`` says of its version."""
    if MISSING:
        pytest.skip(MISSING)
    assert MPIRUN is not None
    return subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, check=False).stdout


def open_mpi() -> bool:
    """Whether ``mpirun`` is Open MPI's."""
    return is_open_mpi(version())


def mpirun(ranks: int, module: str, *arguments: str) -> list[str]:
    """The command that runs a module of Python as so many ranks."""
    options = mpirun_options(version(), ranks, [])
    return [str(MPIRUN), *options, sys.executable, "-m", module, *arguments]


def environment(**env: str) -> dict[str, str]:
    """That of a job: this one's without what launchers and users have set for another one."""
    hidden = ("PMI", "OMPI_", "SLURM_", "GPUNET_", "MPI_LOCAL")
    kept = {k: v for k, v in os.environ.items() if k == "GPUNET_CACHE_DIR" or not k.startswith(hidden)}
    if os.geteuid() == 0:
        kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**kept, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", **env}


@dataclasses.dataclass
class Job:
    """What a job left behind; ``ended`` is on the clock of ``time.monotonic``, which all processes share."""

    status: int
    output: str
    ended: float

    def pids(self) -> list[int]:
        """Processes that said `pid N`; lines of two ranks may run into each other."""
        return [int(pid) for pid in re.findall(r"\bpid (\d+)", self.output)]


class Running:
    """A job under way, which is ended where it takes too long."""

    def __init__(self, command: Sequence[str], **env: str) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(**env),
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._late = False
        self._timer = threading.Timer(LIMIT, self._kill)
        self._timer.daemon = True
        self._timer.start()

    def _kill(self) -> None:
        self._late = True
        for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
            with suppress(ProcessLookupError):
                if os.getsid(pid) == self.process.pid:
                    os.kill(pid, signal.SIGKILL)
        self.process.kill()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match of what the job prints from here on."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            if found := re.search(pattern, line):
                return found
        pytest.fail(f"the job ended, and has not printed {pattern!r}:\n{self.end().output}")

    def end(self) -> Job:
        """Waits for its end."""
        assert self.process.stdout is not None
        with self.process.stdout:
            self._lines += self.process.stdout
        status, ended = self.process.wait(), time.monotonic()
        self._timer.cancel()
        output = "".join(self._lines)
        if self._late:
            pytest.fail(f"{self.process.args!r} did not end in {LIMIT} seconds:\n{output}")
        return Job(status, output, ended)


def run_ranks(ranks: int, worker: str, *arguments: str, **env: str) -> Job:
    """Runs `python -m tests.distributed_workers.<worker>` as so many ranks; fails where it takes too long."""
    return Running(mpirun(ranks, f"tests.distributed_workers.{worker}", *arguments), **env).end()


def succeed(ranks: int, worker: str, *arguments: str, **env: str) -> str:
    """The output of a job that must end well."""
    job = run_ranks(ranks, worker, *arguments, **env)
    assert job.status == 0, job.output
    return job.output


def check_nothing_is_left(pids: Sequence[int]) -> None:
    """Fails where one of the processes still runs: after the end of a job they have some time to go."""
    deadline = time.monotonic() + 30
    while alive := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"{alive} still run"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether there is such a process, and not just one that nobody has asked for its status."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
