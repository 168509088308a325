"""Pieces that launchers of several families are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.launch import elementwise, prepare
from gpunet.cuda_kernels.signature import FLOATS, Kernel
from gpunet.dtypes import is_bfloat16
from gpunet.kernels import KernelContext, kernel

Buffers = tuple[Buffer, ...]
Launch = Callable[[], None]

#: Element types of kernels that add, subtract or multiply: with or without a sign the bits are the same.
SIGNLESS: Final = (*FLOATS, "int8", "int16", "int32", "int64")


def nothing() -> None:
    """The launch of an operator that has nothing to do."""


def is_same(a: Buffer, b: Buffer) -> bool:
    """Whether two buffers begin at one address."""
    return a.pointer == b.pointer


def signless(buffer: Buffer) -> Buffer:
    """The buffer, of one of the types :data:`SIGNLESS`."""
    if buffer.dtype.kind != "u":
        return buffer
    return buffer.view(buffer.shape, np.dtype(f"int{8 * buffer.dtype.itemsize}"))


def argument_dtype(dtype: np.dtype) -> np.dtype:
    """The type that numbers among the arguments are rounded to for data of ``dtype``.

    It is that of the CPU's kernels, which run in float32 for bfloat16.
    """
    return np.dtype(np.float32) if is_bfloat16(dtype) else dtype


def copy_launch(ctx: KernelContext, source: Buffer, target: Buffer) -> Launch:
    """A copy between buffers of one type and size; nothing where they are the same memory or empty."""
    if is_same(source, target) or source.nbytes == 0:
        return nothing
    backend, stream = ctx.backend, ctx.stream

    def launch() -> None:
        backend.copy(target, source, stream)

    return launch


def map_launch(ctx: KernelContext, declared: Kernel, buffers: Buffers, *scalars: Any) -> Launch:
    """The launch of an elementwise kernel: its buffers, the number of elements, scalars.

    Type parameters are, in order, the types of the first and (if there are two) of the last buffer.
    """
    ends = (buffers[0].dtype, buffers[-1].dtype)[: len(declared.types)]
    n = buffers[0].size
    grid = elementwise(n, per_thread=16 // max(b.dtype.itemsize for b in buffers))
    return prepare(ctx, declared, ends, (*buffers, n, *scalars), grid)


def unary_kernel(type: str, declared: Kernel) -> None:
    """Registers ``Y = f(X)``."""

    @kernel(type, device="cuda", binds=True)
    def bind(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
        return map_launch(ctx, declared, (inputs[0], outputs[0]))


def gradient_kernel(type: str, declared: Kernel, operand: int = 0) -> None:
    """Registers ``dX = f(V, dY)`` where V is input ``operand`` and dY the other."""

    @kernel(type, device="cuda", binds=True)
    def bind(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
        return map_launch(ctx, declared, (inputs[operand], inputs[1 - operand], outputs[0]))
