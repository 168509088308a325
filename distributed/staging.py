"""Tensors on devices by way of the host, for communicators that do not reach the memory of devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpunet.buffers import Buffer
from gpunet.distributed.communicator import Array, Tensor
from gpunet.errors import DeviceError

if TYPE_CHECKING:
    from gpunet.backends import Event, Stream
    from gpunet.devices import Device


class Staging:
    """Page-locked memory that devices copy from and to, and that is worked on in place. It grows with the
    tensors and is kept; one thread uses it at a time.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[Device, int], Array] = {}
        #: Behind the last copy to a device.
        self._under_way: Event | None = None

    def run(
        self,
        work: Callable[..., None],
        tensors: Sequence[Tensor],
        stream: Stream | None,
        *,
        back: bool = True,
    ) -> None:
        """Runs ``work`` on host copies of buffers of one device.

        Waits for the stream. The first is read and, with ``back``, the last one written, in stream order.
        """
        buffers = [x for x in tensors if isinstance(x, Buffer)]
        if len(buffers) < len(tensors):
            raise DeviceError("one tensor is on a device and one on the host, wanted both in one place")
        backend = buffers[0].backend
        queue = stream or backend.stream
        self._finish()
        hosts = [self._place(number, buffer) for number, buffer in enumerate(buffers)]
        backend.copy_back(hosts[0], buffers[0], queue)
        work(*hosts)
        if back:
            self._under_way = backend.copy_later(buffers[-1], hosts[-1], queue)

    def _place(self, number: int, buffer: Buffer) -> Array:
        """Room for one of the tensors of an operation, of its type and shape."""
        key = (buffer.backend.device, number)
        memory = self._memory.get(key)
        if memory is None or memory.nbytes < buffer.nbytes:
            self._memory[key] = memory = buffer.backend.pinned(buffer.nbytes)
        return memory[: buffer.nbytes].view(buffer.dtype).reshape(buffer.shape)

    def _finish(self) -> None:
        if self._under_way is not None:
            self._under_way.synchronize()
            self._under_way = None

    def close(self) -> None:
        """Gives the memory back."""
        self._finish()
        self._memory.clear()
