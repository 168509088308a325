"""NCCL between several GPUs of one process: a communicator for each, whose calls are made as a group.

Work runs on a stream of its own on each GPU, and the host waits for it, asking NCCL for errors meanwhile;
what takes too long, or fails, is aborted.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from gpunet.backends import backend
from gpunet.buffers import Buffer
from gpunet.devices import Device
from gpunet.distributed import failure
from gpunet.distributed.communicator import MEAN
from gpunet.distributed.nccl import REDUCTIONS, TYPES, load_nccl
from gpunet.errors import DeviceError

if TYPE_CHECKING:
    from gpunet.cuda_kernels.cuda_backend import CudaBackend

#: How often streams are asked at once before the host sleeps, and for how long it does (seconds).
_SPINS: Final = 50
_SLEEP: Final = 5e-5


class DeviceGroup:
    """Communicators of the GPUs of one process; use :func:`group`.

    Args:
        devices: a different GPU for each tensor.
        nccl: CuPy's module, or one like it.

    Raises:
        DeviceError: NCCL is missing, or cannot start.
    """

    def __init__(self, devices: Sequence[Device], nccl: Any = None) -> None:
        self.devices = tuple(devices)
        self.nccl = load_nccl() if nccl is None else nccl
        self._backends = [cast("CudaBackend", backend(device)) for device in devices]
        self._streams = [found.new_stream() for found in self._backends]
        self._lock = threading.Lock()
        self._problem = ""
        try:
            self._comms = self.nccl.NcclCommunicator.initAll([device.index for device in devices])
        except self.nccl.NcclError as error:
            raise DeviceError(f"NCCL cannot start on {', '.join(map(str, devices))}: {error}") from error

    def all_reduce(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer], op: str) -> None:
        """Each output becomes the sum (mean, maximum, minimum) of all inputs."""
        self._run(
            "all_reduce",
            [*inputs, *outputs],
            lambda i, comm, stream: comm.allReduce(
                inputs[i].pointer, outputs[i].pointer, inputs[i].size, *self._codes(inputs[i], op), stream
            ),
        )

    def reduce(self, inputs: Sequence[Buffer], output: Buffer, op: str) -> None:
        """The output, on the GPU of the first input, becomes the sum of all inputs."""
        self._run(
            "reduce",
            [*inputs, output],
            lambda i, comm, stream: comm.reduce(
                # The others are told an address, and write nothing there.
                inputs[i].pointer,
                output.pointer if i == 0 else inputs[i].pointer,
                inputs[i].size,
                *self._codes(inputs[i], op),
                0,
                stream,
            ),
        )

    def broadcast(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer], root: int) -> None:
        """Each output becomes input number ``root``."""
        self._run(
            "broadcast",
            [*inputs, *outputs],
            lambda i, comm, stream: comm.broadcast(
                inputs[i].pointer, outputs[i].pointer, inputs[i].nbytes, self.nccl.NCCL_UINT8, root, stream
            ),
        )

    def all_gather(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        """Each output becomes the stack of all inputs."""
        self._run(
            "all_gather",
            [*inputs, *outputs],
            lambda i, comm, stream: comm.allGather(
                inputs[i].pointer, outputs[i].pointer, inputs[i].nbytes, self.nccl.NCCL_UINT8, stream
            ),
        )

    def reduce_scatter(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer], op: str) -> None:
        """Output ``i`` becomes row ``i`` of the sum of all inputs."""
        self._run(
            "reduce_scatter",
            [*inputs, *outputs],
            lambda i, comm, stream: comm.reduceScatter(
                inputs[i].pointer, outputs[i].pointer, outputs[i].size, *self._codes(inputs[i], op), stream
            ),
        )

    def _codes(self, x: Buffer, op: str) -> tuple[int, int]:
        return getattr(self.nccl, TYPES[x.dtype.name]), getattr(self.nccl, REDUCTIONS[op])

    def _run(self, what: str, buffers: Sequence[Buffer], call: Callable[[int, Any, int], None]) -> None:
        """Makes one call for each GPU, and waits until all of them are done."""
        with self._lock:
            if self._problem:
                raise DeviceError(self._problem)
            for buffer in buffers:
                place = self.devices.index(buffer.backend.device)
                buffer.memory.used_on(self._streams[place])
            try:
                self._issue(call)
                self._wait(what)
            except Exception as error:
                names = ", ".join(map(str, self.devices))
                self._problem = f"{what} over NCCL on {names} failed: {error}"
                for comm in self._comms:
                    comm.abort()
                raise DeviceError(self._problem) from error

    def _issue(self, call: Callable[[int, Any, int], None]) -> None:
        self.nccl.groupStart()
        try:
            for i, (found, comm, stream) in enumerate(
                zip(self._backends, self._comms, self._streams, strict=True)
            ):
                found.activate()
                call(i, comm, int(stream.pointer))
        finally:
            self.nccl.groupEnd()

    def _wait(self, what: str) -> None:
        events = [stream.record() for stream in self._streams]
        start, tries = time.monotonic(), 0
        while not all(event.done() for event in events):
            for comm in self._comms:
                comm.check_async_error()
            if time.monotonic() - start > failure.patience():
                raise DeviceError(
                    f"it has taken more than {failure.patience():.1f} seconds; "
                    f"{failure.TIMEOUT_VARIABLE} sets how long to wait"
                )
            tries += 1
            if tries > _SPINS:
                time.sleep(_SLEEP)


def why_not(dtype_name: str, op: str = "") -> str | None:
    """Why NCCL cannot take tensors of a type; ``None`` if it can."""
    if op and dtype_name not in TYPES:
        return f"NCCL has no element type {dtype_name}"
    if op == MEAN and "int" in dtype_name:
        return f"a mean of {dtype_name} would be rounded"
    return None


@functools.cache
def group(devices: tuple[Device, ...]) -> DeviceGroup:
    """The communicators of these GPUs, made on first use."""
    return DeviceGroup(devices)
