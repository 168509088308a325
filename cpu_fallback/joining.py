"""NumPy kernels of the operators that join and cut tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.pieces import together
from gpunet.cpu_fallback.steps import Step, is_same
from gpunet.cpu_fallback.threads import cuts
from gpunet.errors import KernelError
from gpunet.kernels import KernelContext, kernel
from gpunet.operators.joining import join_axis, slice_ranges, split_sizes, tile_shape, untile_shape

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]


@kernel("Concat", "DepthConcat", binds=True)
def concat(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Callable[[], None]:
    """The inputs one after the other along a dimension."""
    y, split_info = outputs
    axis = join_axis(ctx.op, y.ndim)
    parts = [np.expand_dims(x, axis) for x in inputs] if args.add_axis else inputs
    sizes = [x.shape[axis] for x in parts]
    fill = together(_concat_pieces(parts, axis, y))

    def run() -> None:
        fill()
        split_info[...] = sizes

    return run


def _concat_pieces(parts: Sequence[Array], axis: int, y: Array) -> list[Step]:
    """Steps that fill y; a large one in ranges of dimension 0, or part by part where that is not possible.

    The memory plan may have put parts into y.
    """
    ends = itertools.accumulate((x.shape[axis] for x in parts), initial=0)
    before = (slice(None),) * axis
    pairs = [
        (y[(*before, slice(start, start + x.shape[axis]))], x) for start, x in zip(ends, parts, strict=False)
    ]
    moved = [(target, x) for target, x in pairs if not is_same(target, x)]
    if len(moved) < len(parts):
        return [partial(np.copyto, target, x) for target, x in moved]
    ranges = cuts(len(y), y.nbytes // max(1, len(y))) if axis > 0 else []
    if len(ranges) > 1:
        return [partial(np.concatenate, [x[b:e] for x in parts], axis, out=y[b:e]) for b, e in ranges]
    if len(cuts(y.nbytes, 1)) < 2:
        return [partial(np.concatenate, parts, axis, out=y)]
    return [partial(np.copyto, target, x) for target, x in moved]


@kernel("Split", "DepthSplit", binds=True)
def split(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Callable[[], Any]:
    """Parts of the input along a dimension."""
    if not outputs:
        return lambda: [np.array(part, order="C") for part in _parts(inputs, args, ctx)]
    parts = zip(outputs, _parts(inputs, args, ctx), strict=True)
    pairs = [(y, part) for y, part in parts if not is_same(y, part)]

    def run() -> None:
        for y, part in pairs:
            np.copyto(y, part)

    return run


def _parts(inputs: Arrays, args: Arguments, ctx: KernelContext) -> list[Array]:
    x = inputs[0]
    axis = join_axis(ctx.op, x.ndim)
    sizes = split_sizes(ctx.op, x.shape[axis], inputs[1].reshape(-1).tolist() if len(inputs) == 2 else None)
    before = (slice(None),) * axis
    parts = []
    start = 0
    for size in sizes:
        parts.append(x[(*before, start if args.add_axis else slice(start, start + size))])
        start += size
    return parts


def _ranges(inputs: Arrays, args: Arguments) -> tuple[slice, ...]:
    if len(inputs) > 2:
        return slice_ranges(inputs[0].shape, inputs[1].tolist(), inputs[2].tolist())
    return slice_ranges(inputs[0].shape, args.starts, args.ends)


@kernel("Slice", binds=True)
def slice_(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Callable[[], Any]:
    """A range in each dimension."""
    if not outputs:
        return lambda: (np.array(inputs[0][_ranges(inputs, args)], order="C"),)
    y, part = outputs[0], inputs[0][_ranges(inputs, args)]
    return lambda: np.copyto(y, part)


@kernel("SliceGradient")
def slice_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dY`` in the range, 0 elsewhere."""
    (dx,) = outputs
    target = dx[_ranges(inputs, args)]
    if target.shape != inputs[-1].shape:
        raise KernelError(
            f"input dY has shape {inputs[-1].shape}, wanted {target.shape}, the shape of the slice"
        )
    dx.fill(0)
    np.copyto(target, inputs[-1])


def _tiling(inputs: Arrays, args: Arguments) -> tuple[int, int]:
    """Number of repetitions, and the dimension counted from the front."""
    given = [x.reshape(-1).tolist() for x in inputs[1:]]
    for name, values in zip(("tiles", "axis"), given, strict=False):
        if len(values) != 1:
            raise KernelError(f"input {name} has {len(values)} elements, wanted 1")
    tiles = given[0][0] if given else args.tiles
    axis = given[1][0] if len(given) > 1 else args.axis
    return tiles, axis + inputs[0].ndim if axis < 0 else axis


def _split_axis(x: Array, axis: int, tiles: int, size: int) -> Array:
    """A view with dimension ``axis`` as ``tiles`` times ``size``."""
    return x.reshape(*x.shape[:axis], tiles, size, *x.shape[axis + 1 :])


@kernel("Tile")
def tile(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Arrays:
    """The input several times along one dimension."""
    x = inputs[0]
    tiles, axis = _tiling(inputs, args)
    y = outputs[0] if outputs else np.empty(tile_shape(x.shape, tiles, axis), x.dtype)
    np.copyto(_split_axis(y, axis, tiles, x.shape[axis]), np.expand_dims(x, axis))
    return (y,)


@kernel("TileGradient")
def tile_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Arrays:
    """The sum over the repetitions; float16 is summed in float32."""
    dy = inputs[0]
    tiles, axis = _tiling(inputs, args)
    dx = outputs[0] if outputs else np.empty(untile_shape(dy.shape, tiles, axis), dy.dtype)
    wide = np.dtype(np.float32) if dy.dtype == np.float16 else dy.dtype
    np.add.reduce(_split_axis(dy, axis, tiles, dx.shape[axis]), axis, wide, out=dx)
    return (dx,)


@kernel("NumpyTile")
def numpy_tile(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Arrays:
    """The input several times along all dimensions."""
    repeats = inputs[1].reshape(-1).tolist()
    if any(n < 0 for n in repeats):
        raise KernelError(f"input repeats holds {repeats}, wanted no negative number")
    return (np.tile(inputs[0], repeats),)
