"""The communicator of a process that is alone: every operation is the identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpunet.buffers import Buffer
from gpunet.discovery import Place
from gpunet.distributed.communicator import Array, Communicator, Tensor
from gpunet.errors import DeviceError

if TYPE_CHECKING:
    from gpunet.backends import Stream


class SingleCommunicator(Communicator):
    """One rank of one."""

    name = "single"

    def __init__(self) -> None:
        super().__init__(Place())

    def _all_reduce(self, x: Tensor, op: str, stream: Stream | None) -> None:
        pass

    def _reduce(self, x: Tensor, root: int, op: str, stream: Stream | None) -> None:
        pass

    def _broadcast(self, x: Tensor, root: int, stream: Stream | None) -> None:
        pass

    def _all_gather(self, x: Tensor, out: Tensor, stream: Stream | None) -> None:
        copy_tensor(out, x, stream)

    def _all_gather_rows(self, x: Array, counts: Sequence[int]) -> Array:
        return x.copy()

    def _reduce_scatter(self, x: Tensor, out: Tensor, op: str, stream: Stream | None) -> None:
        copy_tensor(out, x, stream)

    def _send(self, x: Tensor, to: int, tag: int, stream: Stream | None) -> None:
        raise DeviceError("a process that is alone has nobody to send to")

    def _recv(self, x: Tensor, source: int, tag: int, stream: Stream | None) -> None:
        raise DeviceError("a process that is alone has nobody to receive from")

    def _barrier(self) -> None:
        pass

    def _all_gather_bytes(self, text: bytes) -> list[bytes]:
        return [text]


def copy_tensor(target: Tensor, source: Tensor, stream: Stream | None) -> None:
    """Copies elements between two tensors of one place and type, whatever their shapes."""
    if isinstance(target, Buffer) and isinstance(source, Buffer):
        if (target.pointer, target.memory) != (source.pointer, source.memory):
            target.backend.copy(target, source, stream or target.backend.stream)
    elif isinstance(target, np.ndarray) and isinstance(source, np.ndarray):
        np.copyto(target.reshape(-1), source.reshape(-1))
    else:
        raise DeviceError("cannot copy between the host and a device here, wanted tensors of one place")
