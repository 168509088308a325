"""The communicator over NCCL on fake bindings, and these against the installed CuPy."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpunet.buffers import Buffer
from gpunet.cuda_kernels.cuda_backend import CudaBackend
from gpunet.devices import Device
from gpunet.distributed import CollectiveError, Place, SingleCommunicator, failure, nccl
from gpunet.distributed.nccl import REDUCTIONS, TYPES, NcclCommunicator
from gpunet.errors import ArgumentError, DataTypeError, DeviceError, ShapeError
from tests.test_cuda_backend import fake

#: Names of constants in CuPy, with the values of NCCL's headers.
CONSTANTS = {
    "NCCL_INT8": 0,
    "NCCL_UINT8": 1,
    "NCCL_INT32": 2,
    "NCCL_INT64": 4,
    "NCCL_FLOAT16": 6,
    "NCCL_FLOAT32": 7,
    "NCCL_FLOAT64": 8,
    "NCCL_BFLOAT16": 9,
    "NCCL_SUM": 0,
    "NCCL_MAX": 2,
    "NCCL_MIN": 3,
    "NCCL_AVG": 4,
}


class NcclError(RuntimeError):
    pass


class Comm:
    """NCCL's communicator; the other ranks have the same as this one. `calls` are (name, arguments)."""

    def __init__(self, ndev: int, commId: Any, rank: int) -> None:  # noqa: N803
        self.size, self.unique, self.rank = ndev, commId, rank
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.error = ""
        self.aborted = self.destroyed = False

    def check_async_error(self) -> None:
        if self.error:
            raise NcclError(self.error)

    def abort(self) -> None:
        self.aborted = True

    def destroy(self) -> None:
        self.destroyed = True

    def allReduce(  # noqa: N802
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None:
        self.calls.append(("allReduce", (sendbuf, recvbuf, count, datatype, op, stream)))

    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int
    ) -> None:
        self.calls.append(("reduce", (sendbuf, recvbuf, count, datatype, op, root, stream)))

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        self.calls.append(("broadcast", (sendbuff, recvbuff, count, datatype, root, stream)))

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:  # noqa: N802
        self.calls.append(("allGather", (sendbuf, recvbuf, count, datatype, stream)))

    def reduceScatter(  # noqa: N802
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        self.calls.append(("reduceScatter", (sendbuf, recvbuf, recvcount, datatype, op, stream)))

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self.calls.append(("send", (sendbuf, count, datatype, peer, stream)))

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self.calls.append(("recv", (recvbuf, count, datatype, peer, stream)))


class Module:
    """CuPy's module."""

    NcclError = NcclError
    NcclCommunicator = Comm

    def __init__(self, unique: Any = b"\x01\xff") -> None:
        self.unique = unique
        for name, value in CONSTANTS.items():
            setattr(self, name, value)

    def get_unique_id(self) -> Any:
        return self.unique

    def get_version(self) -> int:
        return 22000


class Control(SingleCommunicator):
    """Two ranks over MPI, of which the other gives what `other` makes of this one's."""

    def __init__(self, rank: int, other: Callable[[bytes], bytes] = lambda mine: mine) -> None:
        super().__init__()
        self.place = Place("test", rank, 2, rank, 2, "here")
        self.other = other
        self.reduced: list[Any] = []

    def _all_gather_bytes(self, text: bytes) -> list[bytes]:
        pair = [text, self.other(text)]
        return pair if self.rank == 0 else pair[::-1]

    def _all_reduce(self, x: Any, op: str, stream: Any) -> None:
        self.reduced.append(x)


def make(
    monkeypatch: pytest.MonkeyPatch, rank: int = 0, unique: Any = b"\x01\xff", other: Any = None
) -> tuple[NcclCommunicator, CudaBackend]:
    cuda = fake(memory=64 << 20)
    cuda.runtime.deviceGetPCIBusId = lambda device: f"0000:0{device}:00.0"
    device = CudaBackend(Device("cuda"), cuda)
    monkeypatch.setattr(nccl, "backend", lambda name: device)
    monkeypatch.setattr(failure, "_state", failure._State())
    swap = other or (lambda mine: mine.replace(b"0000:00", b"0000:01"))
    return NcclCommunicator(Control(rank, swap), Device("cuda"), Module(unique)), device


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    made, device = make(monkeypatch)
    yield made, device
    made.close()
    assert made._comm.destroyed or made._comm.aborted


def buffer(device: CudaBackend, *shape: int, dtype: str = "float32") -> Buffer:
    return Buffer.from_numpy(device, np.zeros(shape, dtype), "x")


@pytest.mark.parametrize("unique", [bytes(range(128)), tuple(range(-64, 64))], ids=["bytes", "tuple"])
def test_the_unique_id_travels_as_it_is(monkeypatch: pytest.MonkeyPatch, unique: Any) -> None:
    made, _ = make(monkeypatch, unique=unique)
    assert (made._comm.size, made._comm.unique, made._comm.rank) == (2, unique, 0)
    made.close()


def test_operations_go_to_the_stream(ranks: Any) -> None:
    made, device = ranks
    stream = device.new_stream()
    x, y = buffer(device, 3, 4), buffer(device, 24)
    half = buffer(device, 5, dtype="float16")
    made.all_reduce(x, "sum", stream)
    made.all_reduce(half, "mean")
    made.reduce(x, 1, "max", stream)
    made.broadcast(x, 1, stream)
    made.all_gather(x, y, stream)
    made.reduce_scatter(y, x, "min", stream)
    made.send(x, 1, stream=stream)
    made.recv(x, 1, stream=stream)
    queue, main = stream.pointer, device.stream.pointer
    at, to = x.pointer, y.pointer
    assert made._comm.calls == [
        ("allReduce", (at, at, 12, 7, 0, queue)),
        ("allReduce", (half.pointer, half.pointer, 5, 6, 4, main)),
        ("reduce", (at, at, 12, 7, 2, 1, queue)),
        ("broadcast", (at, at, 48, 1, 1, queue)),
        ("allGather", (at, to, 48, 1, queue)),
        ("reduceScatter", (to, at, 12, 7, 3, queue)),
        ("send", (at, 48, 1, 1, queue)),
        ("recv", (at, 48, 1, 1, queue)),
    ]


@pytest.mark.parametrize("dtype", sorted(TYPES))
def test_element_types(ranks: Any, dtype: str) -> None:
    made, device = ranks
    made.all_reduce(buffer(device, 2, dtype=dtype))
    assert made._comm.calls[-1][1][3] == CONSTANTS[TYPES[dtype]]


def test_what_is_refused(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, device = ranks
    with pytest.raises(DataTypeError, match="NCCL has no element type int16"):
        made.all_reduce(buffer(device, 2, dtype="int16"))
    with pytest.raises(DataTypeError, match="a mean of int32"):
        made.all_reduce(buffer(device, 2, dtype="int32"), "mean")
    with pytest.raises(ArgumentError, match="operation 'prod', wanted one of sum, mean, max, min"):
        made.all_reduce(buffer(device, 2), "prod")
    with pytest.raises(ShapeError, match="wanted 2 times as many"):
        made.all_gather(buffer(device, 2), buffer(device, 5))
    elsewhere = CudaBackend(Device("cuda", 0), fake())
    with pytest.raises(DeviceError, match="the communicator of this rank is on cuda:0"):
        made.all_reduce(buffer(elsewhere, 2))
    assert made._comm.calls == []


def test_tensors_on_the_host_go_over_mpi(ranks: Any) -> None:
    made, _ = ranks
    x = np.ones(3)
    made.all_reduce(x)
    made.barrier()
    assert made.control.reduced[0] is x
    assert made._comm.calls == []


def test_ranks_with_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"ranks 0 and 1 both have the GPU at 0000:00:00\.0 of host here"):
        make(monkeypatch, other=lambda mine: mine)


def test_captured_operations_are_not_watched(ranks: Any) -> None:
    made, device = ranks
    x = buffer(device, 4)
    device.capture(lambda: made.all_reduce(x), device.stream)
    assert not made._pending
    made.all_reduce(x)
    assert len(made._pending) == 1


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_error_aborts(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, device = ranks
    monkeypatch.setenv("GPUNET_ABORT", "0")
    made._comm.error = "unhandled system error"
    _until(lambda: bool(failure.news()))
    assert made._comm.aborted
    with pytest.raises(CollectiveError, match=r"NCCL failed on rank .*: unhandled system error"):
        made.all_reduce(buffer(device, 2))


def test_an_operation_that_does_not_end_aborts(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, device = ranks
    monkeypatch.setenv("GPUNET_ABORT", "0")
    monkeypatch.setenv("GPUNET_COLLECTIVE_TIMEOUT", "0.5")
    with failure.operator("[Allreduce] op 3 'g'", 7):
        made.all_reduce(buffer(device, 2))
    _until(lambda: bool(failure.news()))
    assert made._comm.aborted
    assert re.search(r"has waited \d+\.\d seconds .*, in \[Allreduce\] op 3 'g' .* over NCCL", failure.news())


def test_failure_of_another_rank_aborts(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = ranks
    monkeypatch.setenv("GPUNET_ABORT", "0")
    failure.announce("rank 1 has ended")
    _until(lambda: made._comm.aborted)


# ---- against CuPy ----


def cupy_nccl() -> Any:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed (extra cuda12)")
    return importlib.import_module("cupy.cuda.nccl")


METHODS = [
    name for name, value in vars(Comm).items() if inspect.isfunction(value) and not name.startswith("_")
]


@pytest.mark.parametrize("name", METHODS)
def test_cupy_takes_these_arguments(name: str) -> None:
    text = (getattr(cupy_nccl().NcclCommunicator, name).__doc__ or "").splitlines()[0]
    inside = text[text.index("(") + 1 : text.rindex(")")]
    names = [part.split("=")[0].split()[-1] for part in inside.split(",")]
    assert names == list(inspect.signature(getattr(Comm, name)).parameters), text


def test_constants_of_cupy() -> None:
    module = cupy_nccl()
    assert {name: getattr(module, name) for name in CONSTANTS} == CONSTANTS
    assert set(TYPES.values()) | set(REDUCTIONS.values()) <= set(CONSTANTS)
    assert issubclass(module.NcclError, RuntimeError)
    assert nccl.load_nccl() is module
    text = module.NcclCommunicator.__doc__.splitlines()[0]
    assert re.match(r"NcclCommunicator\(int ndev, bytes commId, int rank", text)
    runtime = importlib.import_module("cupy_backends.cuda.api.runtime")
    assert runtime.deviceGetPCIBusId.__doc__.startswith("deviceGetPCIBusId(int device)")


def test_every_call_is_one_of_these() -> None:
    source = inspect.getsource(nccl)
    assert set(re.findall(r"self\._comm\.(\w+)", source)) <= set(METHODS)
    assert set(re.findall(r"self\.nccl\.(\w+)", source)) <= set(vars(Module)) | set(CONSTANTS)


def test_without_cupy_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        DeviceError, match=r"NCCL cannot be used: No module named 'cupy\.cuda\.nccl'; pip install"
    ):
        nccl.load_nccl()
