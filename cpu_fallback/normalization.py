"""NumPy kernels of LRN and batch normalization."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.pieces import together
from gpunet.cpu_fallback.precision import Array, Arrays, widened
from gpunet.cpu_fallback.steps import Step
from gpunet.cpu_fallback.threads import cuts
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.specs import Shape, TensorSpec, spec


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


def _folded(shape: Shape, order: str) -> Shape:
    if order == "NHWC":
        return shape[0], math.prod(shape[1:-1]), shape[-1]
    if len(shape) == 2:
        return 1, *shape
    return *shape[:2], math.prod(shape[2:])


def fold(array: Array, order: str) -> Array:
    """The array as (images, channels, pixels), or (images, pixels, channels) where channels are last."""
    return array.reshape(_folded(array.shape, order))


def channels_last(array: Any, order: str) -> bool:
    """Whether :func:`fold` leaves the channels in the last dimension."""
    return order == "NHWC" or len(array.shape) == 2


#: Images up to this size are worth a copy of the channels' values for each pixel.
_REPEATED_BYTES = 1 << 18


def _item_bytes(x: Array) -> int:
    return math.prod(x.shape[1:]) * x.itemsize


def _bind_sums(a: Array, b: Array, last: bool, each: Array) -> Callable[[], Array]:
    """A step that gives the sums of ``a`` and of ``a * b`` over each channel, (2, channels) in float64.

    ``each``, (2, images, channels), takes those of the images.
    """
    layout = "npc" if last else "ncp"
    single, double = f"{layout}->nc", f"{layout},{layout}->nc"

    def work(begin: int, end: int) -> None:
        part = a[begin:end]
        np.einsum(single, part, out=each[0, begin:end])
        np.einsum(double, part, b[begin:end], out=each[1, begin:end])

    fill = together([partial(work, *ends) for ends in cuts(len(a), _item_bytes(a))])

    def run() -> Array:
        fill()
        total: Array = np.add.reduce(each, axis=1, dtype=np.float64)
        return total

    return run


def _sums(a: Array, b: Array, last: bool) -> Array:
    """The same at once."""
    return _bind_sums(a, b, last, np.empty((2, len(a), a.shape[2 if last else 1]), a.dtype))()


def _centered_variance(mean: Array, x: Array, last: bool) -> Array:
    """The variance of each channel, with the mean taken off before squares are summed."""
    values = mean.astype(x.dtype, copy=False)
    centered = np.subtract(x, values if last else values[:, None])
    variance: Array = _sums(centered, centered, last)[1] / (x.size // mean.size)
    return variance


class _Memory:
    """What is kept by image and by channel while a kernel runs, in scratch.

    Attributes:
        each: for sums over images, (2, images, channels).
        values: three values of each channel, in the type of the data, ready to broadcast against images.
    """

    def __init__(self, x: Array, last: bool, scratch: Sequence[Array]) -> None:
        images, channels = len(x), x.shape[2 if last else 1]
        each, values = scratch
        self.each = each[: 2 * images * channels].reshape(2, images, channels)
        repeated = _item_bytes(x) <= _REPEATED_BYTES
        shape = x.shape[1:] if repeated else (channels,) if last else (channels, 1)
        self.values = values[: 3 * math.prod(shape)].reshape(3, *shape)
        self._axis = () if last and not repeated else (0,) if last else (1,)

    def spread(self, *values: Array) -> None:
        """Writes values of the channels to the first of :attr:`values`.

        Written out for a whole image, where that is small, NumPy's inner loop runs over the image and not
        over the pixels of a channel.
        """
        for target, given in zip(self.values, values, strict=False):
            np.copyto(target, np.expand_dims(given, self._axis), casting="same_kind")


def _batch_norm_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    x = inputs[0]
    images, *item = _folded(x.shape, op.args.order)
    channels = item[1 if channels_last(x, op.args.order) else 0]
    dtype = np.dtype(np.float32) if x.dtype == np.float16 else x.dtype
    values = math.prod(item) if math.prod(item) * dtype.itemsize <= _REPEATED_BYTES else channels
    return [spec((2 * images * channels,), dtype), spec((3 * values,), dtype)]


def _in_float32(inputs: Arrays, outputs: Arrays, bind: Callable[[Arrays, Arrays], Step]) -> Step:
    """The bound kernel; of float16 it is bound to float32 copies in each run."""
    if outputs[0].dtype != np.float16:
        return bind(inputs, outputs)

    def run() -> None:
        wide = np.empty(outputs[0].shape, np.float32)
        bind(tuple(map(widened, inputs)), (wide, *outputs[1:]))()
        np.copyto(outputs[0], wide, casting="same_kind")

    return run


@kernel("SpatialBN", binds=True, scratch=_batch_norm_scratch)
def spatial_bn(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = scale (X - mean) / sqrt(var + epsilon) + bias`` by channel."""
    return _in_float32(inputs, outputs, lambda i, o: _bind_batch_norm(i, o, args, ctx.scratch))


def _bind_batch_norm(inputs: Arrays, outputs: Arrays, args: Arguments, scratch: Sequence[Array]) -> Step:
    scale, bias, running_mean, running_var = inputs[1:5]
    last = channels_last(inputs[0], args.order)
    x, y = fold(inputs[0], args.order), fold(outputs[0], args.order)
    if x.size == 0:
        # Without data the running statistics stay (they are updated in place).
        return partial(_clear, outputs[3:])
    memory = _Memory(x, last, scratch)
    factors, offsets, _ = memory.values
    sums = _bind_sums(x, x, last, memory.each)
    count = args.num_batches * (x.size // scale.size)
    correction = count / (count - 1) if count > 1 else math.inf

    def moments() -> tuple[Array, Array]:
        """Mean and (biased) variance of each channel."""
        if args.num_batches > 1:
            mean = inputs[5].astype(np.float64) / count
            return mean, np.maximum(inputs[6].astype(np.float64) / count - mean * mean, 0.0)
        mean, squares = sums() / count
        square = mean * mean
        variance = squares - square
        if (variance < 1e-2 * square).any():
            # The difference has lost digits: once more, about the mean.
            variance = _centered_variance(mean, x, last)
        return mean, variance

    def statistics() -> tuple[Array, Array]:
        """Mean and 1 / standard deviation; running ones are updated."""
        if args.is_test:
            if args.inverted:
                return running_mean, running_var
            return running_mean, 1.0 / np.sqrt(running_var.astype(np.float64) + args.epsilon)
        mean, variance = moments()
        move(running_mean, mean, outputs[1])
        move(running_var, variance * correction, outputs[2])
        inv_std = 1.0 / np.sqrt(variance + args.epsilon)
        outputs[3][...] = mean
        outputs[4][...] = inv_std
        return mean, inv_std

    def move(old: Array, new: Array, result: Array) -> None:
        np.add(args.momentum * old, (1.0 - args.momentum) * new, out=result, casting="same_kind")

    def normalize(begin: int, end: int) -> None:
        part = y[begin:end]
        np.multiply(x[begin:end], factors, out=part)
        np.add(part, offsets, out=part)

    write = together([partial(normalize, *ends) for ends in cuts(len(x), _item_bytes(x))])

    def run() -> None:
        mean, inv_std = statistics()
        factor = scale * inv_std
        memory.spread(factor, bias - mean * factor)
        write()

    return run


def _clear(outputs: Arrays) -> None:
    for output in outputs:
        output.fill(0)


@kernel("SpatialBNGradient", binds=True, scratch=_batch_norm_scratch)
def spatial_bn_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``dX = scale inv_std (dY - dbias / n - xhat dscale / n)``."""
    return _in_float32(inputs, outputs, lambda i, o: _bind_batch_norm_gradient(i, o, args, ctx.scratch))


def _bind_batch_norm_gradient(
    inputs: Arrays, outputs: Arrays, args: Arguments, scratch: Sequence[Array]
) -> Step:
    scale = inputs[1]
    last = channels_last(inputs[0], args.order)
    x, dy, dx = (fold(a, args.order) for a in (inputs[0], inputs[2], outputs[0]))
    if x.size == 0:
        return partial(_clear, outputs[1:])
    memory = _Memory(x, last, scratch)
    slopes, offsets, factors = memory.values
    sums = _bind_sums(dy, x, last, memory.each)
    count = x.size // scale.size

    def combine(begin: int, end: int) -> None:
        part = dx[begin:end]
        np.multiply(x[begin:end], slopes, out=part)
        np.add(part, dy[begin:end], out=part)
        np.add(part, offsets, out=part)
        np.multiply(part, factors, out=part)

    write = together([partial(combine, *ends) for ends in cuts(len(x), _item_bytes(x), 2)])

    def run() -> None:
        mean, inv_std = inputs[3].astype(np.float64), inputs[4].astype(np.float64)
        if args.num_batches == 1:
            dbias, products = sums()
            dscale = (products - mean * dbias) * inv_std
        else:
            dscale, dbias = (inputs[i].astype(np.float64) / args.num_batches for i in (5, 6))
        outputs[1][...] = dscale
        outputs[2][...] = dbias
        # dX = factor (dY + slope X + offset), from the inside out: dX itself is the only intermediate.
        slope = -dscale * inv_std / count
        memory.spread(slope, -slope * mean - dbias / count, scale * inv_std)
        write()

    return run
