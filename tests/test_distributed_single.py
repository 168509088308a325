"""What needs no MPI: a process that is alone, what launchers say, the monitor, `gpunet launch`."""

from __future__ import annotations

import gc
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import click.testing
import numpy as np
import pytest

from gpunet import cli, discovery, distributed, dtypes
from gpunet.cli import launch
from gpunet.discovery import Place, discover, local_device
from gpunet.distributed import communicator, failure, monitor, mpi, whereabouts
from gpunet.errors import ArgumentError, DataTypeError, DeviceError, ShapeError
from tests.mpi_jobs import LIMIT, ROOT

ALONE = distributed.SingleCommunicator()


class FakeMpi:
    """The module of mpi4py as :func:`gpunet.distributed.mpi.cuda_aware` uses it."""

    Exception = RuntimeError
    __file__ = "MPI.so"

    def __init__(self, kinds: str | None, *, fails: bool = False) -> None:
        self.kinds, self.fails = kinds, fails
        self.COMM_WORLD = self

    def Get_info(self) -> FakeMpi:  # noqa: N802
        if self.fails:
            raise RuntimeError("no such function")
        return self

    def Get(self, key: str) -> str | None:  # noqa: N802
        return self.kinds if key == "mpi_memory_alloc_kinds" else None


@pytest.mark.parametrize(
    ("told", "kinds", "fails", "function", "want"),
    [
        ("", "system,mpi,cuda:device", False, None, True),
        ("", "system,mpi", False, None, False),
        # Before MPI 4.1: the function of MPICH and Open MPI, if there is one.
        ("", None, False, 1, True),
        ("", None, True, 1, True),
        ("", None, False, 0, False),
        ("0", "system,cuda", False, 1, False),
        ("1", None, True, None, True),
    ],
)
def test_whether_mpi_takes_pointers_of_cuda(
    told: str,
    kinds: str | None,
    function: int | None,
    monkeypatch: pytest.MonkeyPatch,
    *,
    fails: bool,
    want: bool,
) -> None:
    class Library:
        def __init__(self, path: str) -> None:
            assert path == "MPI.so"
            if function is not None:
                self.MPIX_Query_cuda_support = type("Query", (), {"__call__": lambda _: function})()

    monkeypatch.setattr("ctypes.CDLL", Library)
    monkeypatch.setenv("GPUNET_CUDA_AWARE_MPI", told)
    assert mpi.cuda_aware(FakeMpi(kinds, fails=fails)) is want


@pytest.mark.parametrize("op", communicator.OPS)
def test_every_operation_of_one_rank(op: str) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    want = x.copy()
    ALONE.all_reduce(x, op)
    ALONE.reduce(x, 0, op)
    ALONE.broadcast(x)
    ALONE.barrier()
    out, part = np.empty((1, 2, 3), np.float32), np.empty(6, np.float32)
    ALONE.all_gather(x, out)
    ALONE.reduce_scatter(x, part, op)
    for got in (x, out[0], part.reshape(2, 3), ALONE.all_gather_rows(x)):
        np.testing.assert_array_equal(got, want)
    assert ALONE.all_gather_object([1, {"a": None}]) == [[1, {"a": None}]]
    assert ALONE.broadcast_object("x") == "x"


def f(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ALONE.all_reduce(f(2), "prod"), ArgumentError, "operation 'prod', wanted one of sum, mean"),
        (
            lambda: ALONE.all_reduce(f(2).astype(int), "mean"),
            DataTypeError,
            "a mean of int64 would be rounded",
        ),
        (lambda: ALONE.all_reduce(np.array([True])), DataTypeError, "element type bool cannot be reduced"),
        (lambda: ALONE.all_reduce(f(2, 3).T), ShapeError, "float32 3x2 is not C-contiguous"),
        (lambda: ALONE.all_reduce([1.0]), DataTypeError, "found list, wanted a NumPy array or a buffer"),
        (lambda: ALONE.broadcast(np.array([b"a"], object)), DataTypeError, "strings and objects"),
        (lambda: ALONE.broadcast(f(2), 1), ArgumentError, "root is 1, wanted 0 to 0"),
        (lambda: ALONE.all_gather(f(2), f(3)), ShapeError, "out has 3 elements and x has 2, wanted 1 times"),
        (lambda: ALONE.all_gather(f(2), np.zeros(2)), DataTypeError, "out is float64 and x is float32"),
        (lambda: ALONE.all_gather_rows(f()), ShapeError, "at least one dimension"),
        (lambda: ALONE.all_gather_object({1, 2}), DataTypeError, "cannot send set as JSON"),
        (lambda: ALONE.send(f(2), 0), ArgumentError, "this rank itself"),
        (lambda: distributed.element_type("complex64"), DataTypeError, "complex64 cannot be reduced"),
        (lambda: distributed.element_type("quux"), DataTypeError, "found 'quux' as an element type"),
        (lambda: distributed.init("gloo"), ArgumentError, "backend 'gloo', wanted one of auto, mpi, nccl"),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)


def test_bfloat16_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "BFLOAT16", None)
    with pytest.raises(DataTypeError, match="bfloat16 needs the package ml_dtypes, which is not installed"):
        distributed.element_type("bfloat16")
    assert distributed.element_type("float16") == np.float16


def test_without_mpi_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(DeviceError, match=r"MPI cannot be used: .*; pip install 'gpunet\[mpi\]'"):
        mpi.load_mpi()


def test_the_example_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    example, *_ = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(example, "docs/distributed.md", "exec"), {})
    assert capsys.readouterr().out == "1 ranks, sum [0. 0. 0.]\n"


# ---- discovery ----

HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SRUN = {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "11",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURMD_NODENAME": "n7",
}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n7"}


@pytest.mark.parametrize(
    ("env", "want"),
    [
        (HYDRA, Place("Hydra", 3, 8, 1, 2)),
        (OPEN_MPI, Place("Open MPI", 3, 8, 1, 2)),
        (SRUN, Place("Slurm", 9, 11, 1, 3, "n7")),
        # Hydra and Open MPI inside of a job of Slurm.
        (SRUN | HYDRA, Place("Hydra", 3, 8, 1, 2, "n7")),
        (BATCH, Place(host="n7")),
        ({}, Place()),
    ],
)
def test_launchers(env: dict[str, str], want: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "")
    assert discover(env) == want


def test_variables_that_make_no_sense() -> None:
    with pytest.raises(DeviceError, match="the environment has PMI_RANK='x', wanted a whole number"):
        discover({"PMI_RANK": "x", "PMI_SIZE": "2"})
    with pytest.raises(DeviceError, match="PMI_RANK is 2 and PMI_SIZE is 2, wanted a rank below the size"):
        discover({"PMI_RANK": "2", "PMI_SIZE": "2"})


@pytest.mark.parametrize(("gpus", "want"), [(0, "cuda:5"), (1, "cuda:0"), (4, "cuda:1"), (8, "cuda:5")])
def test_the_gpu_of_a_local_rank(gpus: int, want: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "gpu_count", lambda: gpus)
    place = Place("Hydra", 13, 16, 5, 8)
    assert str(local_device("cuda", place)) == want
    assert str(local_device("sim", place)) == "sim:5"
    assert str(local_device("sim:2", place)) == "sim:2"
    assert str(local_device("cpu", place)) == "cpu"


# ---- failure ----


def test_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUNET_COLLECTIVE_TIMEOUT", raising=False)
    assert failure.timeout() == 30
    monkeypatch.setenv("GPUNET_COLLECTIVE_TIMEOUT", "0")
    assert failure.timeout() == float("inf")
    monkeypatch.setenv("GPUNET_COLLECTIVE_TIMEOUT", "soon")
    with pytest.raises(
        ArgumentError, match="GPUNET_COLLECTIVE_TIMEOUT is 'soon', wanted a number of seconds"
    ):
        failure.timeout()


class Monitored:
    """A monitor in a thread, and connections of ranks to it."""

    def __init__(self, size: int, **limits: float) -> None:
        self.monitor = monitor.Monitor(size, "127.0.0.1", "secret", **limits)
        self.thread = threading.Thread(target=self.monitor.run)
        self.thread.start()

    def rank(self, number: int, token: str = "secret", host: str = "h", **more: Any) -> socket.socket:
        link = socket.create_connection(("127.0.0.1", self.monitor.port), timeout=60)
        say(link, **{"token": token, "rank": number, "host": host, "pid": 100 + number, **more})
        return link

    def end(self, *links: socket.socket) -> None:
        for link in links:
            link.close()
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.monitor.server.close()
        self.monitor.selector.close()


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def say(link: socket.socket, **message: Any) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")


def failed(link: socket.socket) -> str:
    return json.loads(link.makefile().readline())["failed"]


def test_the_monitor_tells_of_a_rank_that_ends(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = Monitored(2)
    first, second = jobs.rank(0), jobs.rank(1)
    say(second, count=4, within=True, at="in [Allreduce] op 2 'g', step 9")
    second.close()
    who = "rank 1 of 2 on host h (pid 101)"
    want = f"{who} has ended without a word (killed, or crashed), in [Allreduce] op 2 'g', step 9"
    assert failed(first) == want
    jobs.end(first)
    assert capsys.readouterr().err == f"gpunet: {want}\n"


def test_a_rank_that_comes_late_is_told_of_the_failure_too() -> None:
    jobs = Monitored(2)
    jobs.rank(1).close()
    wait_until(lambda: jobs.monitor.failed)
    late = jobs.rank(0)
    assert failed(late).startswith("rank 1 of 2 on host h (pid 101) has ended without a word")
    jobs.end(late)


def test_the_monitor_knows_whom_a_rank_waits_for() -> None:
    jobs = Monitored(3)
    first, second = jobs.rank(0), jobs.rank(1)
    say(second, count=3, within=False, at="last in b", now="in read, data.py:7")
    # Connections are read in any order.
    wait_until(lambda: 1 in jobs.monitor.ranks and jobs.monitor.ranks[1].now)
    say(first, late=4, seconds=27.0, count=4, within=True, at="in c")
    text = failed(first)
    assert "rank 0, in c, has waited 27 seconds for" in text
    assert "rank 1 of 3 on host h (pid 101), last in b, now in read, data.py:7; " in text
    assert "rank 2, which is unknown to the monitor" in text
    jobs.end(first, second, jobs.rank(2))


def test_the_monitor_ends_ranks_that_do_not() -> None:
    """Where one is silent at the end of the job, and all but that one have said good-bye; not elsewhere."""
    waiting = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    jobs = Monitored(3, silence=0.2, grace=0.2)
    links = [jobs.rank(0, pid=waiting[0].pid), jobs.rank(1), jobs.rank(2, host="other", pid=waiting[1].pid)]
    wait_until(lambda: len(jobs.monitor.ranks) == 3)
    time.sleep(0.5)
    assert not jobs.monitor.failed
    # Its process is none of this test.
    links.pop(1).close()
    assert waiting[0].wait() == -signal.SIGKILL
    assert waiting[1].poll() is None
    waiting[1].communicate()
    with waiting[0].stdin:
        jobs.end(*links)


def test_a_rank_that_is_silent_when_others_have_left() -> None:
    jobs = Monitored(2, silence=0.2)
    first, second = jobs.rank(0), jobs.rank(1)
    say(second, count=3, within=False, at="last in b")
    say(first, bye=3)
    text = failed(first)
    assert re.fullmatch(
        r"rank 1 of 2 on host h \(pid 101\), (last in b|it had .* yet), has not been heard of for \d+ "
        r"seconds, and rank 0 waits for it at the end of the job",
        text,
    )
    jobs.end(first, second)


def test_a_stranger_that_says_nothing_is_no_rank() -> None:
    """It neither fails a job of which a rank has left, nor keeps the monitor."""
    jobs = Monitored(2, silence=60)
    stranger = socket.create_connection(("127.0.0.1", jobs.monitor.port), timeout=60)
    first, second = jobs.rank(0), jobs.rank(1)
    say(first, bye=0)
    say(second, bye=0)
    wait_until(lambda: len([rank for rank in jobs.monitor.ranks.values() if rank.left]) == 2)
    silent = next(rank for rank in jobs.monitor.connections.values() if rank.rank < 0)
    silent.heard -= 61
    jobs.monitor._look()
    with stranger, silent.connection:
        jobs.end(first, second)
    assert not jobs.monitor.failed


@pytest.mark.parametrize("fails", [True, False])
def test_the_monitor_removes_the_memory_of_its_host_that_nobody_removes(fails: bool, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for path in (here, there):
        path.write_bytes(b"")
    jobs = Monitored(2)
    links = [jobs.rank(0, shared=[str(here)]), jobs.rank(1, host="other", shared=[str(there)])]
    wait_until(lambda: len(jobs.monitor.ranks) == 2)
    if not fails:
        for link in links:
            say(link, bye=0)
    jobs.end(*links)
    assert here.exists() != fails
    assert there.exists(), "a file of another host by the same name"


LIMITED = """
import sys, time
from gpunet.distributed.start import limited
with limited(float(sys.argv[1]), "rank 3"):
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("limit", "needed", "ends"), [("0.1", "1000", True), ("1000", "0", False), ("inf", "0", False)]
)
def test_a_start_has_a_limit_of_time(limit: str, needed: str, ends: bool) -> None:
    command = [sys.executable, "-c", LIMITED, limit, needed]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT)
    said = "gpunet: rank 3 has waited 0.1 seconds for the other ranks to start; GPUNET_COLLECTIVE_TIMEOUT"
    assert done.returncode == (-signal.SIGKILL if ends else 0)
    assert done.stderr.startswith(said) if ends else not done.stderr


def test_what_a_process_is_at() -> None:
    """The operator of a kernel that a thread is in, else the line of the main thread."""
    found: list[str] = []
    ask = threading.Thread(target=lambda: found.append(whereabouts.doing()))
    ask.start()
    ask.join()
    assert re.fullmatch(r"in test_what_a_process_is_at, test_distributed_single\.py:\d+", found[0])
    release, inside = threading.Event(), threading.Event()

    def kernel(ctx: Any) -> None:
        inside.set()
        release.wait()

    work = threading.Thread(target=kernel, args=(SimpleNamespace(op=SimpleNamespace(where="[Op] op 1")),))
    work.start()
    inside.wait()
    found[0] = whereabouts.doing()
    release.set()
    work.join()
    assert re.fullmatch(r"in \[Op\] op 1 \(kernel, test_distributed_single\.py:\d+\)", found[0])


def test_to_say_what_a_process_is_at_keeps_no_values() -> None:
    asked, gone, release = threading.Event(), threading.Event(), threading.Event()
    kept: list[weakref.ref[Any]] = []

    def loop() -> None:
        batch: Any = Mock()
        kept.append(weakref.ref(batch))
        asked.wait(LIMIT)
        batch = None
        gone.set()
        release.wait(LIMIT)

    work = threading.Thread(target=loop)
    work.start()
    wait_until(lambda: kept)
    whereabouts.doing()
    asked.set()
    gone.wait(LIMIT)
    gc.collect()
    assert kept[0]() is None
    release.set()
    work.join()


def test_the_monitor_wants_the_token() -> None:
    jobs = Monitored(1)
    stranger = jobs.rank(0, "guess")
    assert stranger.recv(1) == b""
    link = jobs.rank(0)
    say(link, bye=0)
    jobs.end(link, stranger)
    assert not jobs.monitor.failed


# ---- gpunet launch ----


def test_hosts_of_slurm() -> None:
    assert launch.slurm_hosts("a[1-3,07],b") == ["a1", "a2", "a3", "a07", "b"]
    assert launch.slurm_hosts("n[08-10]-ib,x3") == ["n08-ib", "n09-ib", "n10-ib", "x3"]
    assert launch.slurm_hosts("gpu-2") == ["gpu-2"]
    assert launch.slurm_hosts("") == []
    with pytest.raises(ArgumentError, match="cannot read the list of hosts"):
        launch.slurm_hosts("a[1-2")


HYDRA_VERSION = "HYDRA build details:\n    Version: 5.0.2"
OPEN_MPI_VERSION = "mpirun (Open MPI) 5.0.10"


@pytest.mark.parametrize(
    ("version", "hosts", "want"),
    [
        (HYDRA_VERSION, [], "-n 4"),
        (HYDRA_VERSION, ["a", "b"], "-n 4 -hosts a,b -ppn 2"),
        (OPEN_MPI_VERSION, [], "-n 4 --oversubscribe"),
        (OPEN_MPI_VERSION, ["a", "b"], "-n 4 --oversubscribe --host a:2,b:2"),
    ],
)
def test_options_of_mpirun(version: str, hosts: list[str], want: str) -> None:
    assert launch.mpirun_options(version, 4, hosts) == want.split()


def shown(arguments: list[str], monkeypatch: pytest.MonkeyPatch, **env: str) -> str:
    monkeypatch.setattr(launch, "find_mpirun", lambda env: "mpirun")
    monkeypatch.setattr(launch, "_version", lambda mpirun: HYDRA_VERSION)
    clean = dict.fromkeys(name for names in discovery._VARIABLES for name in names[1:] if name)
    done = click.testing.CliRunner().invoke(
        cli.main, ["launch", "--print", *arguments], env={**clean, "SLURM_NTASKS": None, **env}
    )
    return done.output.strip()


def test_launch_prints_what_it_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    python = sys.executable
    line = shown(["-n", "2", "--", "gpunet", "train", "lenet", "-h"], monkeypatch)
    assert line == f"mpirun -n 2 {python} -m gpunet train lenet -h"
    assert shown(["-n", "2", "x.py", "-n", "3"], monkeypatch) == f"mpirun -n 2 {python} x.py -n 3"
    assert "the number of ranks is missing, wanted -n N" in shown(["x"], monkeypatch)
    slurm = {"SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert shown(["x"], monkeypatch, **slurm) == "mpirun -n 4 -hosts n1,n2 -ppn 2 x"
    assert shown(["x"], monkeypatch, **SRUN) == "x"


LAUNCHER = """
import os, sys
from gpunet.cli.launch import run_with_time_to_save
sys.exit(run_with_time_to_save([sys.executable, "-c", sys.argv[1]], os.environ))
"""
MPIRUN = """
import signal, sys
def end(number, frame):
    print("save", flush=True)
    sys.exit(3)
signal.signal(signal.SIGUSR1, end)
print("started", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"])
def test_a_signal_to_the_launcher_leaves_no_mpirun_behind(name: str) -> None:
    command = [sys.executable, "-c", LAUNCHER, MPIRUN]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.Signals[name])
        assert process.wait(LIMIT) == 128 + signal.Signals[name]
        assert process.stdout.readline() == "save\n"


def test_importing_gpunet_imports_nothing_of_it() -> None:
    code = (
        "import sys, gpunet; gpunet.Workspace().run_operator(gpunet.proto.OperatorDef("
        "type='ConstantFill', output=['x']));"
        "print([m for m in sys.modules if 'mpi4py' in m or 'gpunet.distributed' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
