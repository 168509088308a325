"""NumPy kernels of LRN and batch normalization."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.precision import Array, Arrays, widened
from gpunet.cpu_fallback.threads import split
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.specs import TensorSpec


def _windows(source: Array, before: int, after: int, order: str, out: Array) -> None:
    """Sums of ``source`` over the channels from ``before`` before to ``after`` after each, into ``out``."""
    axis = 1 if order == "NCHW" else 3
    a, b = np.moveaxis(source, axis, 0), np.moveaxis(out, axis, 0)
    b[...] = a
    for shift in range(1, min(before, len(a) - 1) + 1):
        b[shift:] += a[:-shift]
    for shift in range(1, min(after, len(a) - 1) + 1):
        b[:-shift] += a[shift:]


def _lrn_scale(x: Array, args: Arguments, squares: Array, out: Array) -> None:
    np.multiply(x, x, out=squares)
    _windows(squares, (args.size - 1) // 2, args.size // 2, args.order, out)
    np.multiply(out, args.alpha / args.size, out=out)
    np.add(out, args.bias, out=out)


def _lrn_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    x: TensorSpec = inputs[0]
    return [x if x.dtype != np.float16 else x.with_dtype("float32")] * 2


@kernel("LRN", scratch=_lrn_scratch)
def lrn(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``scale = bias + alpha / size * window sum of X^2``, ``Y = X scale^-beta``."""
    x = widened(inputs[0])
    squares, scale = ctx.scratch
    _lrn_scale(x, args, squares, scale)
    if len(outputs) > 1:
        outputs[1][...] = scale
    np.power(scale, -args.beta, out=scale)
    np.multiply(x, scale, out=outputs[0])


@kernel("LRNGradient", scratch=_lrn_scratch)
def lrn_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dX = dY scale^-beta - 2 alpha beta / size * X * window sum of (dY Y / scale)``."""
    x, y, dy = (widened(a) for a in inputs)
    ratio, scale = ctx.scratch
    _lrn_scale(x, args, ratio, scale)
    np.multiply(dy, y, out=ratio)
    np.divide(ratio, scale, out=ratio)
    np.power(scale, -args.beta, out=scale)
    np.multiply(dy, scale, out=outputs[0])
    # The other way round: the channels in whose window this one is.
    _windows(ratio, args.size // 2, (args.size - 1) // 2, args.order, scale)
    np.multiply(scale, x, out=scale)
    np.multiply(scale, 2 * args.alpha * args.beta / args.size, out=scale)
    np.subtract(outputs[0], scale, out=outputs[0])


# Batch normalization sees its data as (images, channels, pixels), or as (images, pixels, channels) where the
# channels are last. A sum over a channel is made in two steps: over the pixels of an image in the type of the
# data, then over the images in float64.


def fold(array: Array, order: str) -> Array:
    """The array as (images, channels, pixels), or (images, pixels, channels) where channels are last."""
    n = array.shape[0]
    if order == "NHWC":
        return array.reshape(n, math.prod(array.shape[1:-1]), array.shape[-1])
    if array.ndim == 2:
        return array.reshape(1, n, array.shape[1])
    return array.reshape(n, array.shape[1], math.prod(array.shape[2:]))


def channels_last(array: Array, order: str) -> bool:
    """Whether :func:`fold` leaves the channels in the last dimension."""
    return order == "NHWC" or array.ndim == 2


#: Images up to this size are worth a copy of the channels' values for each pixel.
_REPEATED_BYTES = 1 << 18


def _item_bytes(x: Array) -> int:
    return x.nbytes // max(1, len(x))


def _sums(a: Array, b: Array, last: bool) -> tuple[Array, Array]:
    """Sums of ``a`` and of ``a * b`` over each channel, float64."""
    layout = "npc" if last else "ncp"
    single, double = f"{layout}->nc", f"{layout},{layout}->nc"
    each = np.empty((2, len(a), a.shape[2 if last else 1]), a.dtype)

    def work(begin: int, end: int) -> None:
        part = a[begin:end]
        np.einsum(single, part, out=each[0, begin:end])
        np.einsum(double, part, b[begin:end], out=each[1, begin:end])

    split(len(a), _item_bytes(a), work)
    total = np.add.reduce(each, axis=1, dtype=np.float64)
    return total[0], total[1]


def _moments(x: Array, last: bool) -> tuple[Array, Array]:
    """Mean and (biased) variance of each channel."""
    count = x.size // x.shape[2 if last else 1]
    sums, squares = _sums(x, x, last)
    mean = sums / count
    variance = squares / count - mean * mean
    if np.any(variance < 1e-2 * mean * mean):
        # The difference has lost digits: once more, about the mean.
        centered = np.subtract(x, _spread(mean, x, last))
        variance = _sums(centered, centered, last)[1] / count
    return mean, variance


def _spread(values: Array, x: Array, last: bool) -> Array:
    """Values of the channels in the type of ``x``, ready to broadcast against its images."""
    values = values.astype(x.dtype, copy=False)
    if _item_bytes(x) <= _REPEATED_BYTES:
        # Written out for a whole image, NumPy's inner loop runs over the image and not over the pixels of a
        # channel.
        return (
            np.tile(values, (x.shape[1], 1)) if last else np.repeat(values, x.shape[2]).reshape(x.shape[1:])
        )
    return values if last else values[:, None]


@kernel("SpatialBN")
def spatial_bn(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``Y = scale (X - mean) / sqrt(var + epsilon) + bias`` by channel."""
    scale, bias, running_mean, running_var = inputs[1:5]
    last = channels_last(inputs[0], args.order)
    x, y = widened(fold(inputs[0], args.order)), fold(outputs[0], args.order)
    if args.is_test:
        mean, inv_std = running_mean, running_var
        if not args.inverted:
            inv_std = 1.0 / np.sqrt(running_var.astype(np.float64) + args.epsilon)
    elif x.size == 0:
        # Without data the running statistics stay (they are updated in place).
        outputs[3][...] = outputs[4][...] = 0
        return
    else:
        count = args.num_batches * (x.size // scale.size)
        if args.num_batches == 1:
            mean, variance = _moments(x, last)
        else:
            mean = inputs[5].astype(np.float64) / count
            variance = np.maximum(inputs[6].astype(np.float64) / count - mean * mean, 0.0)
        unbiased = variance * (count / (count - 1) if count > 1 else math.inf)
        outputs[1][...] = args.momentum * running_mean + (1.0 - args.momentum) * mean
        outputs[2][...] = args.momentum * running_var + (1.0 - args.momentum) * unbiased
        inv_std = 1.0 / np.sqrt(variance + args.epsilon)
        outputs[3][...] = mean
        outputs[4][...] = inv_std
    factor = scale * inv_std
    factors, offsets = _spread(factor, x, last), _spread(bias - mean * factor, x, last)
    work = y if y.dtype == x.dtype else np.empty_like(x)

    def normalize(begin: int, end: int) -> None:
        part = work[begin:end]
        np.multiply(x[begin:end], factors, out=part)
        np.add(part, offsets, out=part)

    split(len(x), _item_bytes(x), normalize)
    if work is not y:
        y[...] = work


@kernel("SpatialBNGradient")
def spatial_bn_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dX = scale inv_std (dY - dbias / n - xhat dscale / n)``."""
    scale, mean, inv_std = inputs[1], inputs[3].astype(np.float64), inputs[4].astype(np.float64)
    last = channels_last(inputs[0], args.order)
    x, dy = (widened(fold(inputs[i], args.order)) for i in (0, 2))
    dx = fold(outputs[0], args.order)
    if x.size == 0:
        outputs[1][...] = outputs[2][...] = 0
        return
    if args.num_batches == 1:
        dbias, products = _sums(dy, x, last)
        dscale = (products - mean * dbias) * inv_std
    else:
        dscale, dbias = (inputs[i].astype(np.float64) / args.num_batches for i in (5, 6))
    outputs[1][...] = dscale
    outputs[2][...] = dbias
    # dX = factor (dY + slope X + offset), evaluated inside out so that dX itself is the only intermediate.
    count = x.size // scale.size
    slope = -dscale * inv_std / count
    offset = -slope * mean - dbias / count
    slopes, offsets = _spread(slope, x, last), _spread(offset, x, last)
    factors = _spread(scale * inv_std, x, last)
    work = dx if dx.dtype == x.dtype else np.empty_like(x)

    def combine(begin: int, end: int) -> None:
        part = work[begin:end]
        np.multiply(x[begin:end], slopes, out=part)
        np.add(part, dy[begin:end], out=part)
        np.add(part, offsets, out=part)
        np.multiply(part, factors, out=part)

    split(len(x), _item_bytes(x), combine)
    if work is not dx:
        dx[...] = work
