"""Launchers of Gather and its inverse, TopK, ArgMax and ArgMin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import device_errors
from gpunet.cuda_kernels.launch import elementwise, in_order, prepare, rows
from gpunet.cuda_kernels.pieces import Buffers, Launch, nothing
from gpunet.cuda_kernels.signature import FLOATS, INDICES, NUMBERS, Kernel
from gpunet.cuda_kernels.sorting import Picks, against_picks, sort_launch, sort_scratch
from gpunet.cuda_kernels.strided import MOVED, as_moved, widest
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.indexing import gather_axis, gather_wraps
from gpunet.rules import canonical_axis
from gpunet.specs import Shape, TensorSpec

_GATHER = Kernel(
    "indexing",
    "gather_fwd",
    "const T* data, const I* indices, T* y, uint64* errors, uint64 code, int64 count, int64 block, "
    "int64 picked, int64 outer_step, int64 size, int32 wrap",
    T=MOVED,
    I=INDICES,
)
_SUM_ROWS = Kernel(
    "indexing",
    "sum_rows",
    "const uint32* rows, const uint32* order, const T* values, T* y, int64 n, int64 block, int64 row_count",
    T=NUMBERS,
)
_ARG: Final = {
    (name, suffix): Kernel(
        "indexing",
        f"{name}_{suffix}",
        "const T* x, int64* y, int64 lines, int64 size, int64 inner",
        T=NUMBERS,
    )
    for name in ("arg_max", "arg_min")
    for suffix in ("fwd", "long")
}
_TOP_K: Final = {
    suffix: Kernel(
        "indexing",
        f"top_k_{suffix}",
        "const T* x, T* values, int64* indices, int64* flat, int64 lines, int64 size, int64 inner, int64 k",
        T=NUMBERS,
    )
    for suffix in ("search", "sort")
}
_TOP_K_BWD = Kernel(
    "indexing",
    "top_k_bwd",
    "const T* dvalues, const I* indices, T* dx, uint64* errors, uint64 code, int64 n, int64 size, "
    "int64 inner, int64 k",
    T=FLOATS,
    I=INDICES,
)
#: From this many values on, sorting a line pays; and the longest line that fits (as in indexing.cu).
_SORTED_VALUES: Final = 8
_SORTED_SIZE: Final = 1024


def _gather_picks(op: Operator, data: Shape, indices: Shape) -> tuple[Picks, int]:
    """How the indices pick rows of the data, and the number of elements in a row."""
    axis = gather_axis(op, len(data))
    own = bool(op.args.match_outer)
    picked = math.prod(indices[axis:]) if own else math.prod(indices)
    picks = Picks(math.prod(data[:axis]), picked, own, data[axis], gather_wraps(op))
    return picks, math.prod(data[axis + 1 :])


@kernel("Gather", "BatchGather", device="cuda", binds=True)
def gather(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Parts of ``data`` along a dimension."""
    data, indices = inputs
    (y,) = outputs
    picks, block = _gather_picks(ctx.op, data.shape, indices.shape)
    if y.size == 0 or picks.size == 0:
        return nothing
    width = widest((data, y), (block,))
    moved, source, target = as_moved(width, data, y)
    block //= width
    arguments: tuple[Any, ...] = (source, indices, target, *picks.report(ctx), picks.count, block)
    arguments += (picks.picked, picks.outer_step, picks.size, int(picks.wrap))
    return prepare(ctx, _GATHER, (moved, indices.dtype), arguments, elementwise(picks.count * block))


def sum_rows_launch(
    ctx: KernelContext, picks: Picks, indices: Buffer, values: Buffer, y: Buffer, block: int
) -> Launch:
    """The launches that set ``y`` to the sums of the values in each row, in order; ``ctx.scratch`` sorts."""
    clear = partial(ctx.backend.fill, y, 0, ctx.stream)
    if y.size == 0:
        return nothing
    if values.size == 0:
        return clear
    sort, keys, order = sort_launch(ctx, picks, indices, ctx.scratch)
    arguments = (keys, order, values, y, picks.count, block, picks.rows)
    add = prepare(ctx, _SUM_ROWS, (y.dtype,), arguments, elementwise(picks.count * block))
    return in_order(clear, sort, add)


def _against_batch_gather(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    return against_picks(_gather_picks(op, inputs[0].shape, inputs[1].shape)[0])


def _batch_gather_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    return sort_scratch(_gather_picks(op, inputs[0].shape, inputs[1].shape)[0])


@kernel(
    "BatchGatherGradient",
    device="cuda",
    binds=True,
    scratch=_batch_gather_scratch,
    against=_against_batch_gather,
)
def batch_gather_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Sums ``dY`` at the places that its parts were taken from."""
    data, indices, dy = inputs
    picks, block = _gather_picks(ctx.op, data.shape, indices.shape)
    return sum_rows_launch(ctx, picks, indices, dy, outputs[0], block)


def _dense_picks(indices: Any, y: Any) -> Picks:
    return Picks(1, math.prod(indices.shape), True, y.shape[0])


def _against_dense(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    if op.dynamic:
        return "its number of rows is data, which the host needs"
    return against_picks(_dense_picks(inputs[0], outputs[0]))


def _dense_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    return sort_scratch(_dense_picks(inputs[0], outputs[0]))


@kernel("SparseToDense", device="cuda", binds=True, scratch=_dense_scratch, against=_against_dense)
def sparse_to_dense(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Sums rows at indices."""
    indices, values = inputs[:2]
    (y,) = outputs
    return sum_rows_launch(ctx, _dense_picks(indices, y), indices, values, y, math.prod(y.shape[1:]))


def _lines(shape: Shape, axis: int) -> tuple[int, int, int]:
    """(lines, size, inner): how many lines run along a dimension, their length, and their step."""
    axis = canonical_axis(axis, len(shape))
    inner = math.prod(shape[axis + 1 :])
    return math.prod(shape[:axis]) * inner, shape[axis], inner


def _arg(name: str, inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    (x,), (y,) = inputs, outputs
    if y.size == 0:
        return nothing
    lines, size, inner = _lines(x.shape, args.axis)
    arguments = (x, y, lines, size, inner)
    # Neighbouring lines side by side are read well by one thread each, if there are enough.
    if size >= 32 and inner < 32:
        return prepare(ctx, _ARG[name, "long"], (x.dtype,), arguments, rows(lines, size))
    return prepare(ctx, _ARG[name, "fwd"], (x.dtype,), arguments, elementwise(lines))


@kernel("ArgMax", device="cuda", binds=True)
def arg_max(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Index of the largest value."""
    return _arg("arg_max", inputs, outputs, args, ctx)


@kernel("ArgMin", device="cuda", binds=True)
def arg_min(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Index of the smallest value."""
    return _arg("arg_min", inputs, outputs, args, ctx)


def _against_top_k(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    return "its number of values is data, which the host needs" if len(inputs) > 1 else None


@kernel("TopK", device="cuda", binds=True, against=_against_top_k)
def top_k(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The largest values along a dimension, their indices there and in the whole tensor."""
    x, values = inputs[0], outputs[0]
    lines, size, inner = _lines(x.shape, args.axis)
    if values.size == 0:
        return nothing
    flat = outputs[2] if len(outputs) > 2 else None
    arguments = (x, values, outputs[1], flat, lines, size, inner, args.k)
    sorts = args.k >= _SORTED_VALUES and 0 < size <= _SORTED_SIZE
    declared = _TOP_K["sort" if sorts else "search"]
    return prepare(ctx, declared, (x.dtype,), arguments, rows(lines, max(1, size // (1 + sorts))))


@kernel("TopKGradient", device="cuda", binds=True)
def top_k_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dvalues`` at the places of the values, 0 elsewhere."""
    dvalues, indices, x = inputs
    (dx,) = outputs
    clear = partial(ctx.backend.fill, dx, 0, ctx.stream)
    if dvalues.size == 0:
        return clear if dx.size else nothing
    _, size, inner = _lines(x.shape, args.axis)
    _, k, _ = _lines(indices.shape, args.axis)
    errors = device_errors.report(
        ctx, f"input indices holds {{value}} at position {{index}}, wanted {-size} to {size - 1}"
    )
    arguments = (dvalues, indices, dx, *errors, dvalues.size, size, inner, k)
    types = (dx.dtype, indices.dtype)
    put = prepare(ctx, _TOP_K_BWD, types, arguments, elementwise(dvalues.size))
    return in_order(clear, put) if dx.size else put
