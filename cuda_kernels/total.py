"""Launchers of the sums over all elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.launch import THREADS, elementwise, in_order, prepare, rows
from gpunet.cuda_kernels.pieces import SIGNLESS, Buffers, Launch, signless
from gpunet.cuda_kernels.signature import FLOATS, Kernel
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.specs import TensorSpec

_TOTAL = Kernel("total", "total_fwd", "const T* x, T* y, uint8* partial, int64 n, double divisor", T=SIGNLESS)
_PARTIAL = Kernel(
    "total", "total_partial", "const uint8* partial, T* y, int64 count, double divisor", T=SIGNLESS
)
_DOT = Kernel(
    "total", "dot_fwd", "const T* a, const T* b, T* y, uint8* partial, int64 n, double divisor", T=FLOATS
)
_BWD = Kernel("total", "total_bwd", "const T* dy, T* dx, int64 n, double divisor", T=FLOATS)
#: Blocks at most: their totals are summed by one block more.
_MAX_TOTALS: Final = 1024
_PER_THREAD: Final = 16


def total_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[TensorSpec]:
    """Room for the totals of the blocks."""
    return [TensorSpec((_MAX_TOTALS * 8,), np.dtype(np.uint8))]


def _grid(n: int) -> tuple[int, int]:
    blocks, threads = elementwise(n, per_thread=_PER_THREAD)
    return min(blocks, _MAX_TOTALS), threads


def launch_total(
    ctx: KernelContext,
    declared: Kernel,
    types: tuple[np.dtype, ...],
    sources: Buffers,
    y: Buffer,
    partial: Buffer,
    n: int,
    *,
    divisor: float = 1,
    indexing: tuple[int, ...] = (),
) -> Launch:
    """A sum of ``n`` terms over ``divisor``, whose first kernel (a ``sum_grid`` of include/sums.cuh) takes
    ``sources, y, partial, n, *indexing, divisor``; ``partial`` is from :func:`total_scratch`.
    """
    grid = _grid(n)
    first = prepare(ctx, declared, types, (*sources, y, partial, n, *indexing, divisor), grid)
    if grid[0] == 1:
        return first
    rest = (partial, y, grid[0], divisor)
    return in_order(first, prepare(ctx, _PARTIAL, (y.dtype,), rest, rows(1, THREADS)))


def _summed(
    ctx: KernelContext, declared: Kernel, sources: Buffers, y: Buffer, partial: Buffer, divisor: float = 1
) -> Launch:
    return launch_total(ctx, declared, (y.dtype,), sources, y, partial, sources[0].size, divisor=divisor)


def dot_launch(
    ctx: KernelContext, a: Buffer, b: Buffer, y: Buffer, partial: Buffer, divisor: float = 1
) -> Launch:
    """The sum of products of all elements, over ``divisor``; ``partial`` is from :func:`total_scratch`."""
    return _summed(ctx, _DOT, (a, b), y, partial, divisor)


def _divisor(args: Arguments, x: Buffer) -> int:
    return x.size if args.average and x.size else 1


@kernel("SumElements", device="cuda", binds=True, scratch=total_scratch)
def sum_elements(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = sum(X)``."""
    return _summed(ctx, _TOTAL, inputs, outputs[0], ctx.scratch[0], _divisor(args, inputs[0]))


@kernel("SumElementsInt", device="cuda", binds=True, scratch=total_scratch)
def sum_elements_int(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = sum(X)`` in X's type, with its overflow."""
    return _summed(ctx, _TOTAL, (signless(inputs[0]),), signless(outputs[0]), ctx.scratch[0])


@kernel("SumSqrElements", device="cuda", binds=True, scratch=total_scratch)
def sum_sqr_elements(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = sum(X^2)``."""
    (x,) = inputs
    return dot_launch(ctx, x, x, outputs[0], ctx.scratch[0], _divisor(args, x))


@kernel("SumElementsGradient", device="cuda", binds=True)
def sum_elements_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dX = dY``, or ``dY / count``."""
    x, dy = inputs
    arguments = (dy, outputs[0], x.size, _divisor(args, x))
    return prepare(ctx, _BWD, (x.dtype,), arguments, elementwise(x.size))
