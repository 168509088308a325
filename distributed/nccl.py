"""The communicator over NCCL, by CuPy's bindings: for tensors on GPUs; those on the host go over MPI.

One communicator a process, for its one GPU. Operations are put on the stream that they are given, so they run
beside other work and can be captured. NCCL adds float16 in float16: divide before the sum
(:mod:`gpunet.distributed.compression`) where that may overflow. Ranks meet over MPI, which also carries the
checks; on the way a thread asks NCCL for errors, and how long the oldest operation has been under way: when
it has been too long, or another rank has failed, it aborts the communicator, so that nothing hangs on it.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from gpunet.backends import Event, backend
from gpunet.buffers import Buffer
from gpunet.devices import Device
from gpunet.distributed import failure
from gpunet.distributed.communicator import MAX, MEAN, MIN, SUM, Array, Communicator, Tensor
from gpunet.errors import DataTypeError, DeviceError

if TYPE_CHECKING:
    from gpunet.backends import Stream
    from gpunet.cuda_kernels.cuda_backend import CudaBackend

#: Names of NCCL's constants in CuPy.
TYPES: Final = {
    "float16": "NCCL_FLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
    "bfloat16": "NCCL_BFLOAT16",
    "int8": "NCCL_INT8",
    "uint8": "NCCL_UINT8",
    "int32": "NCCL_INT32",
    "int64": "NCCL_INT64",
}
REDUCTIONS: Final = {SUM: "NCCL_SUM", MEAN: "NCCL_AVG", MAX: "NCCL_MAX", MIN: "NCCL_MIN"}
#: The first version with NCCL_AVG.
_OLDEST: Final = 21000
_POLL_SECONDS: Final = 0.5


def load_nccl() -> Any:
    """CuPy's module of NCCL.

    Raises :class:`DeviceError` with what is missing and how to get it.
    """
    try:
        nccl = importlib.import_module("cupy.cuda.nccl")
        version = int(nccl.get_version())
    except (ImportError, AttributeError, RuntimeError) as error:
        raise DeviceError(
            f"NCCL cannot be used: {error}; pip install 'gpunet[cuda12]' (or cuda13) brings CuPy and NCCL"
        ) from error
    if version < _OLDEST:
        raise DeviceError(f"NCCL {version} is too old, wanted {_OLDEST} (2.10) or newer")
    return nccl


class NcclCommunicator(Communicator):
    """All ranks of a job, each with a GPU of its own.

    Args:
        control: the same ranks over MPI.
        device: the GPU of this rank.
        nccl: CuPy's module, or one like it.

    Raises:
        DeviceError: two ranks have one GPU, or NCCL cannot start.
    """

    name = "NCCL"

    def __init__(self, control: Communicator, device: Device, nccl: Any = None) -> None:
        super().__init__(control.place)
        self.control = control
        self.nccl = load_nccl() if nccl is None else nccl
        self.backend = cast("CudaBackend", backend(device))
        self.backend.activate()
        self._check_own_gpu(device)
        self._comm = self._start()
        self._pending: deque[tuple[float, str, Event]] = deque()
        self._progress = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="gpunet NCCL watch", daemon=True).start()

    def _check_own_gpu(self, device: Device) -> None:
        bus = str(self.backend.cuda.runtime.deviceGetPCIBusId(device.index))
        seen: dict[tuple[str, str], int] = {}
        for rank, place in enumerate(self.control.all_gather_object([self.place.host, bus])):
            other = seen.setdefault((place[0], place[1]), rank)
            if other != rank:
                raise DeviceError(
                    f"ranks {other} and {rank} both have the GPU at {place[1]} of host {place[0]}, wanted "
                    "one for each rank: start as many ranks as there are GPUs, or use the backend mpi"
                )

    def _start(self) -> Any:
        made = self.nccl.get_unique_id() if self.rank == 0 else b""
        # Bytes since CuPy 14, before that a tuple of numbers, some of them negative.
        kind, values = self.control.broadcast_object([type(made).__name__, list(made)])
        unique = tuple(values) if kind == "tuple" else bytes(values)
        try:
            return self.nccl.NcclCommunicator(self.size, unique, self.rank)
        except self.nccl.NcclError as error:
            raise DeviceError(
                f"NCCL cannot start on {failure.who()}, {self.backend.device}: {error}"
            ) from error

    # ---- what is under way ----

    def _watch(self) -> None:
        """Aborts the communicator, and then the job, when NCCL reports an error or nothing moves."""
        while not self._closed.wait(_POLL_SECONDS):
            reason = self._trouble()
            if reason:
                self._closed.set()
                self._comm.abort()
                failure.announce(reason)
                return

    def _trouble(self) -> str:
        if failure.news():
            return failure.news()
        try:
            self.backend.activate()
            self._comm.check_async_error()
            while self._pending and self._pending[0][2].done():
                self._pending.popleft()
                self._progress = time.monotonic()
        except Exception as error:
            return f"NCCL failed on {failure.who()}, {failure.at()}: {error}"
        if self._pending:
            begun, what, _ = self._pending[0]
            waited = time.monotonic() - max(begun, self._progress)
            if waited > failure.patience():
                return str(failure.late(waited, f"in {what} over NCCL"))
        return ""

    def _queue(self, x: Buffer, stream: Stream | None) -> tuple[Stream, int]:
        """The stream to use, and its handle; makes its device the current one."""
        failure.check()
        if x.backend is not self.backend:
            raise DeviceError(
                f"{x} is on {x.backend.device}, the communicator of this rank is on {self.backend.device}"
            )
        self.backend.activate()
        queue = stream or self.backend.stream
        x.memory.used_on(queue)
        return queue, int(queue.pointer)  # type: ignore[attr-defined]

    def _queued(self, stream: Stream) -> None:
        """Notes an operation that was put on a stream."""
        if not stream.capturing:
            self._pending.append((time.monotonic(), failure.what(), stream.record()))

    def _type(self, x: Tensor) -> int:
        name = TYPES.get(x.dtype.name)
        if name is None:
            raise DataTypeError(f"NCCL has no element type {x.dtype.name}, wanted one of {', '.join(TYPES)}")
        return int(getattr(self.nccl, name))

    def _op(self, op: str) -> int:
        return int(getattr(self.nccl, REDUCTIONS[op]))

    def _agree(self, kind: str, x: Tensor | None, op: str, root: int) -> None:
        if not isinstance(x, Buffer):
            self.control._agree(kind, x, op, root)

    # ---- operations ----

    def _all_reduce(self, x: Tensor, op: str, stream: Stream | None) -> None:
        if not isinstance(x, Buffer):
            self.control._all_reduce(x, op, stream)
            return
        queue, handle = self._queue(x, stream)
        self._comm.allReduce(x.pointer, x.pointer, x.size, self._type(x), self._op(op), handle)
        self._queued(queue)

    def _reduce(self, x: Tensor, root: int, op: str, stream: Stream | None) -> None:
        if not isinstance(x, Buffer):
            self.control._reduce(x, root, op, stream)
            return
        queue, handle = self._queue(x, stream)
        self._comm.reduce(x.pointer, x.pointer, x.size, self._type(x), self._op(op), root, handle)
        self._queued(queue)

    def _broadcast(self, x: Tensor, root: int, stream: Stream | None) -> None:
        if not isinstance(x, Buffer):
            self.control._broadcast(x, root, stream)
            return
        queue, handle = self._queue(x, stream)
        self._comm.broadcast(x.pointer, x.pointer, x.nbytes, self.nccl.NCCL_UINT8, root, handle)
        self._queued(queue)

    def _all_gather(self, x: Tensor, out: Tensor, stream: Stream | None) -> None:
        if not isinstance(x, Buffer) or not isinstance(out, Buffer):
            self.control._all_gather(x, out, stream)
            return
        queue, handle = self._queue(x, stream)
        self._queue(out, stream)
        self._comm.allGather(x.pointer, out.pointer, x.nbytes, self.nccl.NCCL_UINT8, handle)
        self._queued(queue)

    def _reduce_scatter(self, x: Tensor, out: Tensor, op: str, stream: Stream | None) -> None:
        if not isinstance(x, Buffer) or not isinstance(out, Buffer):
            self.control._reduce_scatter(x, out, op, stream)
            return
        queue, handle = self._queue(x, stream)
        self._queue(out, stream)
        self._comm.reduceScatter(x.pointer, out.pointer, out.size, self._type(x), self._op(op), handle)
        self._queued(queue)

    def _send(self, x: Tensor, to: int, tag: int, stream: Stream | None) -> None:
        if not isinstance(x, Buffer):
            self.control._send(x, to, tag, stream)
            return
        queue, handle = self._queue(x, stream)
        self._comm.send(x.pointer, x.nbytes, self.nccl.NCCL_UINT8, to, handle)
        self._queued(queue)

    def _recv(self, x: Tensor, source: int, tag: int, stream: Stream | None) -> None:
        if not isinstance(x, Buffer):
            self.control._recv(x, source, tag, stream)
            return
        queue, handle = self._queue(x, stream)
        self._comm.recv(x.pointer, x.nbytes, self.nccl.NCCL_UINT8, source, handle)
        self._queued(queue)

    def _all_gather_rows(self, x: Array, counts: Sequence[int]) -> Array:
        return self.control._all_gather_rows(x, counts)

    def _barrier(self) -> None:
        self.control._barrier()

    def _all_gather_bytes(self, text: bytes) -> list[bytes]:
        return self.control._all_gather_bytes(text)

    def close(self) -> None:
        """Ends the watch and gives the communicator back."""
        if not self._closed.is_set():
            self._closed.set()
            self._comm.destroy()
        self.control.close()
