"""Runs workers of `tests/distributed_workers/` as the ranks of a job, with a hard limit of time."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpunet.cli.launch import mpirun_options

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


@dataclasses.dataclass
class Job:
    """What a job left behind."""

    status: int
    output: str
    seconds: float

    def pids(self) -> list[int]:
        """Processes that said `pid N`; lines of two ranks may run into each other."""
        return [int(pid) for pid in re.findall(r"\bpid (\d+)", self.output)]


def run_ranks(ranks: int, worker: str, *arguments: str, limit: float = 60, **env: str) -> Job:
    """Runs `python -m tests.distributed_workers.<worker>` as so many ranks; fails where it takes too long."""
    if MISSING:
        pytest.skip(MISSING)
    assert MPIRUN is not None
    version = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, check=False).stdout
    module = f"tests.distributed_workers.{worker}"
    command = [MPIRUN, *mpirun_options(version, ranks, []), sys.executable, "-m", module, *arguments]
    hidden = ("PMI", "OMPI_", "SLURM_", "GPUNET_", "MPI_LOCAL")
    kept = {k: v for k, v in os.environ.items() if k == "GPUNET_CACHE_DIR" or not k.startswith(hidden)}
    environment = {**kept, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", **env}
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{command} did not end in {limit} seconds:\n{output}")
    return Job(process.returncode, output, time.monotonic() - start)


def succeed(ranks: int, worker: str, *arguments: str, **env: str) -> str:
    """The output of a job that must end well."""
    job = run_ranks(ranks, worker, *arguments, **env)
    assert job.status == 0, job.output
    return job.output
