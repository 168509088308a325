"""NumPy kernels of Gather, TopK and the like."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.errors import KernelError
from gpunet.kernels import KernelContext, kernel
from gpunet.operators.indexing import gather_axis, gather_wraps

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]


def check_indices(indices: Array, size: int, *, wrap: bool = False, name: str = "indices") -> None:
    """Raises :class:`KernelError` with the first index outside 0..size-1 (with ``wrap``, -size..size-1)."""
    if not indices.size:
        return
    lowest = -size if wrap else 0
    if np.minimum.reduce(indices, None) < lowest or np.maximum.reduce(indices, None) >= size:
        bad = np.flatnonzero((indices < lowest) | (indices >= size))[0]
        place = tuple(int(i) for i in np.unravel_index(bad, indices.shape))
        allowed = f"{lowest} to {size - 1}" if size else "none: the dimension is empty"
        raise KernelError(f"input {name} holds {indices[place]} at {list(place)}, wanted {allowed}")


def add_rows(target: Array, rows: Array, values: Array) -> None:
    """``target[rows[i]] += values[i]`` for a matrix ``target``, in the order of ``i``; rows may repeat."""
    if not values.size:
        return
    order = np.argsort(rows, kind="stable")
    sorted_rows = rows[order]
    first = np.flatnonzero(np.concatenate(([True], sorted_rows[1:] != sorted_rows[:-1])))
    wide = np.dtype(np.float32) if values.dtype == np.float16 else values.dtype
    target[sorted_rows[first]] += np.add.reduceat(values[order], first, 0, wide)


@kernel("Gather", "BatchGather")
def gather(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Parts of ``data`` along a dimension."""
    data, indices = inputs
    (y,) = outputs
    axis = gather_axis(ctx.op, data.ndim)
    size = data.shape[axis]
    if not size:
        return
    wrap = gather_wraps(ctx.op)
    check_indices(indices, size, wrap=wrap)
    if not args.match_outer:
        np.take(data, indices, axis, out=y, mode="wrap" if wrap else "clip")
        return
    outer = math.prod(data.shape[:axis])
    blocks = data.reshape(outer, size, math.prod(data.shape[axis + 1 :]))
    picked = indices.reshape(outer, math.prod(indices.shape[axis:]))
    y[...] = blocks[np.arange(outer)[:, None], picked].reshape(y.shape)


@kernel("BatchGatherGradient")
def batch_gather_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Sums ``dY`` at the places that its parts were taken from; float16 is summed in float32."""
    data, indices, dy = inputs
    (ddata,) = outputs
    axis = gather_axis(ctx.op, data.ndim)
    outer, size, block = math.prod(data.shape[:axis]), data.shape[axis], math.prod(data.shape[axis + 1 :])
    if not ddata.size:
        return
    check_indices(indices, size, wrap=gather_wraps(ctx.op))
    if args.match_outer:
        picked = indices.reshape(outer, math.prod(indices.shape[axis:]))
    else:
        picked = indices.reshape(1, indices.size)
    rows = np.arange(outer, dtype=np.int64)[:, None] * size + picked % size
    total = np.zeros((outer * size, block), np.float32 if dy.dtype == np.float16 else dy.dtype)
    add_rows(total, rows.reshape(-1), dy.reshape(rows.size, block))
    ddata[...] = total.reshape(ddata.shape)


@kernel("SparseToDense")
def sparse_to_dense(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Arrays:
    """Sums rows at indices; float16 is summed in float32."""
    indices, values = inputs[:2]
    if outputs:
        y = outputs[0]
    else:
        rows = int(indices.max()) + 1 if indices.size else 0
        y = np.empty((max(rows, 0), *values.shape[indices.ndim :]), values.dtype)
    check_indices(indices, y.shape[0])
    block = math.prod(y.shape[1:])
    total = np.zeros((y.shape[0], block), np.float32 if values.dtype == np.float16 else values.dtype)
    add_rows(total, indices.reshape(-1), values.reshape(indices.size, block))
    y[...] = total.reshape(y.shape)
    return (y,)


def _top_k(x: Array, k: int) -> Array:
    """Indices of the ``k`` largest along the last dimension, largest first, of equal ones the first first."""
    n = x.shape[-1]
    if k == 1 and n:
        best: Array = x.argmax(-1, keepdims=True)
        return best
    if 4 * k >= n:
        return _descending(x)[..., :k]
    # Few of many: pick them unsorted, then sort them. Which of several equal ones are picked is open, so
    # where the smallest picked one has an equal left behind, sort all.
    picked = np.argpartition(x, n - k, axis=-1)[..., n - k :]
    picked.sort(axis=-1)
    values = np.take_along_axis(x, picked, -1)
    if np.any(np.count_nonzero(x >= values.min(-1, keepdims=True), -1) != k):
        return _descending(x)[..., :k]
    found: Array = np.take_along_axis(picked, _descending(values), -1)
    return found


def _descending(x: Array) -> Array:
    """Indices that sort the last dimension, largest first, equal ones in order."""
    # Ascending and stable, on the reversed data: read backwards, it is descending with ties in order.
    order: Array = np.argsort(x[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    order = x.shape[-1] - 1 - order
    return order


@kernel("TopK")
def top_k(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Arrays:
    """The largest values along a dimension, their indices there and in the whole tensor."""
    x, axis = inputs[0], args.axis
    k = int(inputs[1].reshape(-1)[0]) if len(inputs) == 2 else args.k
    if k < 1:
        raise KernelError(f"input k is {k}, wanted 1 or more")
    if not outputs:
        shape = list(x.shape)
        shape[axis] = k
        outputs = (np.empty(shape, x.dtype), np.empty(shape, np.int64), np.empty(math.prod(shape), np.int64))
        outputs = outputs[: len(ctx.op.outputs)]
    lines = np.moveaxis(x, axis, -1)
    found = _top_k(lines, k)
    there = found.shape[-1]
    values, indices = (np.moveaxis(y, axis, -1) for y in outputs[:2])
    values[..., :there] = np.take_along_axis(lines, found, -1)
    values[..., there:] = 0
    indices[..., :there] = found
    indices[..., there:] = -1
    if len(outputs) == 3:
        places = np.moveaxis(np.arange(x.size).reshape(x.shape), axis, -1)
        flat = np.full(outputs[1].shape, -1, np.int64)
        np.moveaxis(flat, axis, -1)[..., :there] = np.take_along_axis(places, found, -1)
        outputs[2][...] = flat.reshape(-1)
    return outputs


@kernel("TopKGradient")
def top_k_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dvalues`` at the places of the values, 0 elsewhere."""
    dvalues, indices, x = inputs
    (dx,) = outputs
    dx.fill(0)
    if indices.max(initial=-1) >= x.shape[args.axis]:
        check_indices(indices, x.shape[args.axis], wrap=True)
    picked = np.moveaxis(indices, args.axis, -1)
    *lines, k = np.nonzero(picked >= 0)
    np.moveaxis(dx, args.axis, -1)[(*lines, picked[(*lines, k)])] = np.moveaxis(dvalues, args.axis, -1)[
        (*lines, k)
    ]


@kernel("ArgMax")
def arg_max(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Index of the largest value."""
    if outputs[0].size:
        inputs[0].argmax(args.axis, outputs[0], keepdims=args.keepdims)


@kernel("ArgMin")
def arg_min(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Index of the smallest value."""
    if outputs[0].size:
        inputs[0].argmin(args.axis, outputs[0], keepdims=args.keepdims)
