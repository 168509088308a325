"""NumPy kernels of the reductions. Sums of float16 run in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.errors import KernelError
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.reduction import check_gradient_shape, kept_shape, reduced_axes, split_at
from gpunet.specs import TensorSpec

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]


def _wide(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def _lowest(dtype: np.dtype) -> Any:
    return np.finfo(dtype).min if dtype.kind == "f" else np.iinfo(dtype).min


def _highest(dtype: np.dtype) -> Any:
    return np.finfo(dtype).max if dtype.kind == "f" else np.iinfo(dtype).max


@kernel("ReduceSum", "ReduceMean", binds=True)
def reduce_sum(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Callable[[], object]:
    """The sum, or the mean, over dimensions."""
    (x,), (y,) = inputs, outputs
    axes, keep, wide = reduced_axes(ctx.op, x.ndim), args.keepdims, _wide(x.dtype)
    if ctx.op.type == "ReduceSum":
        return lambda: np.add.reduce(x, axes, wide, out=y, keepdims=keep)
    count = max(math.prod(x.shape[a] for a in axes), 1)

    def mean() -> None:
        if y.dtype == wide:
            np.add.reduce(x, axes, wide, out=y, keepdims=keep)
            np.divide(y, count, out=y)
        else:
            np.divide(np.add.reduce(x, axes, wide, keepdims=keep), count, out=y, casting="same_kind")

    return mean


@kernel("ReduceMax", "ReduceMin", binds=True)
def reduce_max(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Callable[[], object]:
    """The largest, or the smallest, value over dimensions; of no values, the lowest or highest there is."""
    (x,), (y,) = inputs, outputs
    axes, keep = reduced_axes(ctx.op, x.ndim), args.keepdims
    function, initial = (
        (np.maximum, _lowest(x.dtype)) if ctx.op.type == "ReduceMax" else (np.minimum, _highest(x.dtype))
    )
    if not x.size:
        return lambda: y.fill(initial)
    return lambda: function.reduce(x, axes, out=y, keepdims=keep)


def _like_input(
    op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> list[TensorSpec]:
    return [inputs[0].with_dtype(_wide(inputs[0].dtype))]


@kernel("ReduceL1", "ReduceL2", scratch=_like_input)
def reduce_norm(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """The sum of the absolute values, or the root of the sum of the squares, over dimensions."""
    (x,), (y,), (terms,) = inputs, outputs, ctx.scratch
    axes = reduced_axes(ctx.op, x.ndim)
    if ctx.op.type == "ReduceL1":
        np.abs(x, out=terms)
        np.add.reduce(terms, axes, out=y, keepdims=args.keepdims)
    else:
        np.multiply(x, x, out=terms, dtype=terms.dtype)
        np.sqrt(np.add.reduce(terms, axes, keepdims=args.keepdims), out=y, casting="same_kind")


@kernel("ReduceSumGradient", "ReduceMeanGradient", binds=True)
def reduce_sum_gradient(
    inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext
) -> Callable[[], object]:
    """``dY``, or ``dY / n``, in all places that were summed."""
    dy, x, _ = inputs
    (dx,) = outputs
    axes = reduced_axes(ctx.op, x.ndim)
    spread = dy.reshape(kept_shape(x.shape, axes))
    if ctx.op.type == "ReduceSumGradient":
        return lambda: np.copyto(dx, spread)
    factor = dx.dtype.type(1 / max(math.prod(x.shape[a] for a in axes), 1))
    return lambda: np.multiply(spread, factor, out=dx)


def _mask_of_x(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [inputs[1].with_dtype(np.bool_)]


@kernel("ReduceMaxGradient", "ReduceMinGradient", scratch=_mask_of_x)
def reduce_max_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dY`` in all places that hold the extreme value, 0 elsewhere."""
    dy, x, y = inputs
    (dx,), (mask,) = outputs, ctx.scratch
    shape = kept_shape(x.shape, reduced_axes(ctx.op, x.ndim))
    np.equal(x, y.reshape(shape), out=mask)
    dx.fill(0)
    np.copyto(dx, dy.reshape(shape), where=mask)


@kernel("ReduceL1Gradient")
def reduce_l1_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dY sign(X)``."""
    dy, x, _ = inputs
    (dx,) = outputs
    np.sign(x, out=dx)
    np.multiply(dx, dy.reshape(kept_shape(x.shape, reduced_axes(ctx.op, x.ndim))), out=dx)


@kernel("ReduceL2Gradient")
def reduce_l2_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dY X / Y``, or 0 where Y is 0."""
    dy, x, y = inputs
    shape = kept_shape(x.shape, reduced_axes(ctx.op, x.ndim))
    factor = np.zeros_like(y)
    np.divide(dy, y, out=factor, where=y != 0)
    np.multiply(x, factor.reshape(shape), out=outputs[0])


def _matrix(x: Array, op: Operator) -> Array:
    """``x`` as matrix whose first dimension is the one to reduce."""
    cut = split_at(op, x.ndim)
    flat = x.reshape(math.prod(x.shape[:cut]), math.prod(x.shape[cut:]))
    return flat if "Front" in op.type else flat.T


def _counted(lengths: Array, size: int) -> Array:
    """Mask of shape (size, number of lengths): True where an element is among the first ``length`` ones."""
    flat = lengths.reshape(-1)
    if flat.size and not (flat.min() >= 0 and flat.max() <= size):
        bad = int(np.flatnonzero((flat < 0) | (flat > size))[0])
        raise KernelError(f"input lengths holds {flat[bad]} at {bad}, wanted 0 to {size}")
    mask: Array = np.arange(size)[:, None] < flat
    return mask


@kernel("ReduceFrontSum", "ReduceBackSum", "ReduceFrontMean", "ReduceBackMean")
def reduce_front_back(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """The sum, or the mean, over the first or last dimensions."""
    (y,) = outputs
    x = _matrix(inputs[0], ctx.op)
    wide = _wide(x.dtype)
    count: Any = x.shape[0]
    if len(inputs) == 2:
        total = np.add.reduce(x, 0, wide, where=_counted(inputs[1], x.shape[0]))
        count = inputs[1].reshape(-1)
    else:
        total = np.add.reduce(x, 0, wide)
    if ctx.op.type.endswith("Mean"):
        total /= np.maximum(count, 1) if len(inputs) == 2 else max(count, 1)
    y[...] = total.reshape(y.shape)


@kernel("ReduceFrontMax", "ReduceBackMax")
def reduce_front_back_max(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """The largest value over the first or last dimensions; with lengths, the first element always counts."""
    (y,) = outputs
    x = _matrix(inputs[0], ctx.op)
    if not x.size:
        y.fill(0)
        return
    if len(inputs) == 2:
        mask = _counted(inputs[1], x.shape[0])
        mask[0] = True
        largest = np.maximum.reduce(x, 0, initial=_lowest(x.dtype), where=mask)
    else:
        largest = np.maximum.reduce(x, 0)
    y[...] = largest.reshape(y.shape)


@kernel(
    "ReduceFrontSumGradient", "ReduceBackSumGradient", "ReduceFrontMeanGradient", "ReduceBackMeanGradient"
)
def reduce_front_back_gradient(
    inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext
) -> Arrays:
    """``dY``, or ``dY / n``, in all places that were summed. The second input is X, or the shape of X."""
    dy, x = inputs[:2]
    shape = tuple(x.tolist()) if x.dtype == np.int64 else x.shape
    check_gradient_shape(ctx.op, dy.shape, shape)
    dx = np.empty(shape, dy.dtype)
    matrix = _matrix(dx, ctx.op)
    spread, count = dy.reshape(-1), matrix.shape[0]
    mask = None
    if len(inputs) == 3:
        mask = _counted(inputs[2], count)
        count = inputs[2].reshape(-1)
    if ctx.op.type.endswith("MeanGradient"):
        spread = (spread / np.maximum(count, 1)).astype(dy.dtype, copy=False)
    if mask is None:
        np.copyto(matrix, spread)
    else:
        matrix.fill(0)
        np.copyto(matrix, spread, where=mask)
    return (dx,)


@kernel("ReduceFrontMaxGradient", "ReduceBackMaxGradient")
def reduce_front_back_max_gradient(
    inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext
) -> None:
    """``dY`` in all places that count and hold the largest value, 0 elsewhere."""
    dy, x, y = inputs[:3]
    matrix = _matrix(x, ctx.op)
    mask = matrix == y.reshape(-1)
    if len(inputs) == 4:
        mask &= _counted(inputs[3], matrix.shape[0])
    (dx,) = outputs
    dx.fill(0)
    if "Back" in ctx.op.type:
        mask = mask.T
        spread = dy.reshape(*dy.shape, *(1,) * (dx.ndim - dy.ndim))
    else:
        spread = dy
    np.copyto(dx, spread, where=mask.reshape(dx.shape))
