"""Launchers of Concat, Split, Slice, Tile and their gradients: strided copies, and a sum.

Forms whose sizes are known only from data stay on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.broadcast import against_sum, launch_sum, plan_sum
from gpunet.cuda_kernels.launch import in_order
from gpunet.cuda_kernels.pieces import Buffers, Launch, copy_launch, nothing
from gpunet.cuda_kernels.strided import against_strided, contiguous, numbers_launch, strided_launch
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.joining import join_axis, slice_ranges
from gpunet.rules import canonical_axis
from gpunet.specs import Shape, TensorSpec


def _part_launch(
    ctx: KernelContext, part: Buffer, whole: Buffer, axis: int, first: int, size: int, *, join: bool
) -> Launch:
    """Copies ``part`` to ``whole``, from position ``first`` on along ``axis``, or (not ``join``) back."""
    outer, inner = math.prod(whole.shape[:axis]), math.prod(whole.shape[axis + 1 :])
    width = size * inner
    shape, small, large = (outer, width), (width, 1), (whole.shape[axis] * inner, 1)
    if join:
        return strided_launch(ctx, part, whole, shape, small, large, y_first=first * inner)
    return strided_launch(ctx, whole, part, shape, large, small, x_first=first * inner)


def _lies_in(part: Buffer, whole: Buffer, axis: int, first: int) -> bool:
    """Whether the memory plan has put a part where it is in the whole, which is then one behind the other."""
    start = first * math.prod(whole.shape[axis + 1 :]) * whole.dtype.itemsize
    return part.size > 0 and part.pointer == whole.pointer + start


@kernel("Concat", "DepthConcat", device="cuda", binds=True)
def concat(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The inputs one after the other along a dimension."""
    y, split_info = outputs
    axis = join_axis(ctx.op, y.ndim)
    sizes = [1 if args.add_axis else x.shape[axis] for x in inputs]
    launches, first = [], 0
    for x, size in zip(inputs, sizes, strict=True):
        if not _lies_in(x, y, axis, first):
            launches.append(_part_launch(ctx, x, y, axis, first, size, join=True))
        first += size
    return in_order(*launches, numbers_launch(ctx, split_info, sizes))


@kernel("Split", "DepthSplit", device="cuda", binds=True)
def split(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Parts of the input along a dimension; how large they are, the outputs tell."""
    x = inputs[0]
    axis = join_axis(ctx.op, x.ndim)
    launches, first = [], 0
    for y in outputs:
        size = 1 if args.add_axis else y.shape[axis]
        if not _lies_in(y, x, axis, first):
            launches.append(_part_launch(ctx, y, x, axis, first, size, join=False))
        first += size
    return in_order(*launches) if launches else nothing


def _slice_launch(ctx: KernelContext, part: Buffer, whole: Buffer, *, cut: bool) -> Launch:
    """Copies the range of ``whole`` that the arguments give to ``part``, or (not ``cut``) back."""
    strides = contiguous(whole.shape)
    ranges = slice_ranges(whole.shape, ctx.op.args.starts, ctx.op.args.ends)
    first = sum(r.start * stride for r, stride in zip(ranges, strides, strict=False))
    small = contiguous(part.shape)
    if cut:
        return strided_launch(ctx, whole, part, part.shape, strides, small, x_first=first)
    return strided_launch(ctx, part, whole, part.shape, small, strides, y_first=first)


def _against_slice(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    if len(inputs) > 2:
        return "its bounds are data, which the host needs"
    part = outputs[0] if op.type == "Slice" else inputs[1]
    whole = inputs[0]
    ranges = slice_ranges(whole.shape, op.args.starts, op.args.ends)
    found = (*(r.stop - r.start for r in ranges), *whole.shape[len(ranges) :])
    if tuple(part.shape) != found:
        return "the gradient has another shape than the slice"
    return against_strided(part.shape, contiguous(whole.shape), contiguous(part.shape))


@kernel("Slice", device="cuda", binds=True, against=_against_slice)
def slice_(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """A range in each dimension."""
    return _slice_launch(ctx, outputs[0], inputs[0], cut=True)


@kernel("SliceGradient", device="cuda", binds=True, against=_against_slice)
def slice_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dY`` in the range, 0 elsewhere."""
    (dx,) = outputs
    clear = partial(ctx.backend.fill, dx, 0, ctx.stream)
    return in_order(clear, _slice_launch(ctx, inputs[1], dx, cut=False)) if dx.size else nothing


def _tiled_shape(shape: Shape, axis: int, tiles: int) -> Shape:
    """The shape of the tiled tensor as (outer, tiles, inner); ``shape`` is that of the small one."""
    axis = canonical_axis(axis, len(shape))
    return math.prod(shape[:axis]), tiles, math.prod(shape[axis:])


def _against_tile(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    return "its number of tiles is data, which the host needs" if len(inputs) > 1 else None


@kernel("Tile", device="cuda", binds=True, against=_against_tile)
def tile(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The input several times along one dimension."""
    x, y = inputs[0], outputs[0]
    outer, tiles, inner = _tiled_shape(x.shape, args.axis, args.tiles)
    return strided_launch(ctx, x, y, (outer, tiles, inner), (inner, 0, 1), (tiles * inner, inner, 1))


def _tile_sum(op: Operator, dy: Any, dx: Any) -> tuple[Shape, Shape]:
    """Shapes of dY and of dX, of equal rank, between which the gradient sums."""
    outer, tiles, inner = _tiled_shape(dx.shape, op.args.axis, op.args.tiles)
    return (outer, tiles, inner), (outer, 1, inner)


def _against_tile_gradient(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    return _against_tile(op, inputs, outputs) or against_sum(*_tile_sum(op, inputs[0], outputs[0]))


def _tile_gradient_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    partial_sums = plan_sum(*_tile_sum(op, inputs[0], outputs[0])).partial
    return [] if partial_sums is None else [partial_sums]


@kernel(
    "TileGradient",
    device="cuda",
    binds=True,
    scratch=_tile_gradient_scratch,
    against=_against_tile_gradient,
)
def tile_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The sum over the repetitions."""
    dy, dx = inputs[0], outputs[0]
    full, kept = _tile_sum(ctx.op, dy, dx)
    if dx.size == 0:
        return nothing
    if full == kept:
        return copy_launch(ctx, dy, dx)
    if dy.dtype.kind == "u":
        # Sums that wrap around have the same bits with and without a sign.
        signed = f"i{dy.dtype.itemsize}"
        dy, dx = dy.view(dy.shape, signed), dx.view(dx.shape, signed)
    return launch_sum(ctx, dy, dx, full, kept, ctx.scratch[0] if ctx.scratch else None)
