"""NumPy kernels of numbers of 8 bits. Sums are exact: whole numbers in float64, below 2^53."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.precision import Array, Arrays, widened
from gpunet.kernels import KernelContext, kernel
from gpunet.operators.convolution import convolution_window
from gpunet.operators.quantization import scale_steps
from gpunet.operators.window import Window
from gpunet.specs import spec


def _saturate(values: Array, out: Array) -> None:
    """Whole numbers into a type of 8 bits; NaN becomes the least."""
    limits = np.iinfo(out.dtype)
    out[...] = np.where(values >= limits.min, np.minimum(values, limits.max), limits.min)


@kernel("QuantizeLinear")
def quantize(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``saturate(round(X / scale) + zero point)``."""
    if not inputs[0].size:
        return
    count, inner = scale_steps(args, inputs[0], inputs[1])
    x, y = (a.reshape(-1, count, inner) for a in (widened(inputs[0]), outputs[0]))
    values = np.rint(x / inputs[1].reshape(count, 1))
    if len(inputs) > 2:
        values += inputs[2].reshape(count, 1)
    _saturate(values, y)


@kernel("DequantizeLinear")
def dequantize(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``(X - zero point) scale``."""
    if not inputs[0].size:
        return
    count, inner = scale_steps(args, inputs[0], inputs[1])
    x = inputs[0].reshape(-1, count, inner).astype(np.int64)
    if len(inputs) > 2:
        x -= inputs[2].reshape(count, 1)
    np.multiply(x.astype(np.float32), inputs[1].reshape(count, 1), out=outputs[0].reshape(x.shape))


def _columns(image: Array, window: Window) -> Array:
    """What each window of an image (channels, *space) reads, 0 in the padding: (positions, elements)."""
    found: Array = image
    for d in range(window.rank):
        at = np.arange(window.output[d])[:, None] * window.stride[d] - window.head[d]
        at = at + np.arange(window.kernel[d]) * window.dilation[d]
        inside = (at >= 0) & (at < window.image[d])
        found = (
            np.take(found, np.where(inside, at, 0), axis=1 + 2 * d)
            if window.image[d]
            else np.zeros((*found.shape[: 1 + 2 * d], *at.shape, *found.shape[2 + 2 * d :]))
        )
        found = found * inside.reshape(*inside.shape, *(1,) * (found.ndim - 3 - 2 * d))
    # channels, then output and kernel of each dimension in turn
    outputs, taps = range(1, found.ndim, 2), range(2, found.ndim, 2)
    return found.transpose(*outputs, 0, *taps).reshape(window.positions, -1)


@kernel("QLinearConv")
def convolve(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``saturate(round((sum (X - x0) (W - w0) + B) X_scale W_scale / Y_scale) + y0)``."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, *bias = inputs
    window = convolution_window(args, spec(x.shape, x.dtype), spec(w.shape, w.dtype))
    filters, groups = w.shape[0], args.group
    images, weights = x.astype(np.float64), w.astype(np.float64)
    if not args.symmetric:
        images -= x_zero.reshape(())
        weights -= w_zero.reshape(-1, *(1,) * (w.ndim - 1))
    y = outputs[0]
    if window.channels_last:
        images, weights, y = (np.moveaxis(a, -1, 1) for a in (images, weights, y))
    depth = math.prod(weights.shape[1:])
    weights = weights.reshape(groups, filters // groups, depth)
    added: Any = bias[0].astype(np.int64)[:, None] if bias else 0
    factor = (x_scale.reshape(()) * w_scale.reshape(-1) / y_scale.reshape(())).astype(np.float64)[:, None]
    for image, result in zip(images, y, strict=True):
        parts = image.reshape(groups, -1, *image.shape[1:])
        sums = np.concatenate(
            [kernels @ _columns(part, window).T for kernels, part in zip(weights, parts, strict=True)]
        )
        # Wraps around as sums of 32 bits do.
        exact = (sums.astype(np.int64) + added).astype(np.int32)
        target = np.empty(exact.shape, y.dtype)
        _saturate(np.rint(exact * factor) + y_zero.reshape(()), target)
        result[...] = target.reshape(result.shape)
