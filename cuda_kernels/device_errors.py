"""Errors that kernels find in their data: a label out of range, a negative probability.

A kernel cannot raise. It writes a code, the index of the bad element and its value to a small buffer of the
device (``report_error`` of include/errors.cuh); whoever copies results to the host looks there and raises. A
kernel that checks declares ``uint64* errors, uint64 code`` among its parameters, and its launcher passes
``*device_errors.report(ctx, "label {index} is {value}, wanted ...")``.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpunet.buffers import Buffer
from gpunet.errors import KernelError
from gpunet.specs import TensorSpec

if TYPE_CHECKING:
    from gpunet.backends import Backend, Stream
    from gpunet.kernels import KernelContext

#: A lock, the code (0: no error), the index, the bits of the value.
_SPEC: Final = TensorSpec((4,), np.dtype(np.uint64))


class DeviceErrors:
    """The error buffer of one device, and what its codes mean.

    Attributes:
        buffer: where kernels report; ``None`` until one is bound that can.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.buffer: Buffer | None = None
        self._messages: list[tuple[str, str, int]] = []
        self._codes: dict[tuple[str, str, int], int] = {}
        self._lock = threading.Lock()

    def code(self, where: str, message: str, columns: int) -> tuple[Buffer, int]:
        """The buffer, and the code for a message at an operator; codes count from 1."""
        key = (where, message, columns)
        with self._lock:
            if self.buffer is None:
                buffer = Buffer.empty(self._backend, _SPEC, "errors")
                self._backend.fill(buffer, 0, self._backend.stream)
                # Kernels on other streams may report before the main stream comes to it.
                self._backend.stream.synchronize()
                self.buffer = buffer
            found = self._codes.get(key)
            if found is None:
                self._messages.append(key)
                found = self._codes[key] = len(self._messages)
            return self.buffer, found

    def check(self, stream: Stream) -> None:
        """Waits for ``stream`` and raises :class:`KernelError` if a kernel reported an error.

        It is located at the operator, and raised once.
        """
        if self.buffer is None or stream.capturing:
            return
        found = np.empty(_SPEC.shape, _SPEC.dtype)
        self._backend.copy_out(found, self.buffer, stream)
        code = int(found[1])
        if code == 0:
            return
        self._backend.fill(self.buffer, 0, stream)
        where, message, columns = self._messages[code - 1]
        index = int(found[2])
        row, column = divmod(index, columns)
        value, real = int(found[3:].view(np.int64)[0]), float(found[3:].view(np.float64)[0])
        text = message.format(index=index, row=row, column=column, value=value, real=real)
        raise KernelError(text).locate(where)


def report(ctx: KernelContext, message: str, *, columns: int = 1) -> tuple[Buffer, int]:
    """The arguments ``errors`` and ``code`` of a kernel that checks its data.

    Args:
        ctx: the context of the operator.
        message: what :class:`KernelError` says, with ``{index}``, ``{value}`` (an integer) or ``{real}`` (a
            number with a fraction), and ``{row}`` and ``{column}`` where the index is that of an element of a
            matrix.
        columns: of that matrix.
    """
    errors: DeviceErrors = ctx.backend.errors
    return errors.code(ctx.op.where, message, max(1, columns))


def check(backend: Any, source: Buffer, stream: Stream) -> None:
    """To be called by backends behind a copy of ``source`` to the host: raises what kernels reported."""
    errors: DeviceErrors = backend.errors
    if source is not errors.buffer:
        errors.check(stream)
