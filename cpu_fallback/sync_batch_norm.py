"""NumPy kernels of batch normalization over all ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.normalization import channels_last, fold
from gpunet.kernels import KernelContext, kernel

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]


def _sums(a: Array, b: Array, last: bool) -> tuple[Array, Array]:
    """Sums of ``a`` and of ``a * b`` over each channel, all in float64."""
    layout = "npc" if last else "ncp"
    return (
        np.einsum(f"{layout}->c", a, dtype=np.float64),
        np.einsum(f"{layout},{layout}->c", a, b, dtype=np.float64),
    )


def _by_channel(values: Array, x: Array, last: bool) -> Array:
    """Values of the channels in the type that ``x`` is computed in, ready to broadcast against it."""
    values = values.astype(np.float32 if x.dtype == np.float16 else x.dtype, copy=False)
    return values if last else values[:, None]


@kernel("SyncBatchNormMoments")
def batch_moments(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Sums, sums of squares, and how many."""
    last = channels_last(inputs[0], args.order)
    x, result = fold(inputs[0], args.order), outputs[0]
    channels = (result.size - 1) // 2
    result[:channels], result[channels:-1] = _sums(x, x, last)
    result[-1] = x.size // channels if channels else 0


@kernel("SyncBatchNorm")
def sync_batch_norm(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Statistics from the moments, then ``Y = scale (X - mean) inv_std + bias``."""
    scale, bias, running_mean, running_var, moments = inputs[1:6]
    last = channels_last(inputs[0], args.order)
    x, y = fold(inputs[0], args.order), fold(outputs[0], args.order)
    count, channels = moments[-1], scale.size
    if count == 0:
        # No rank has data: the running statistics stay (they are updated in place).
        outputs[3][...] = outputs[4][...] = 0
        return
    mean = moments[:channels] / count
    variance = np.maximum(moments[channels:-1] / count - mean * mean, 0.0)
    unbiased = variance * (count / (count - 1) if count > 1 else math.inf)
    outputs[1][...] = args.momentum * running_mean + (1.0 - args.momentum) * mean
    outputs[2][...] = args.momentum * running_var + (1.0 - args.momentum) * unbiased
    inv_std = 1.0 / np.sqrt(variance + args.epsilon)
    outputs[3][...] = mean
    outputs[4][...] = inv_std
    factor = scale * inv_std
    scaled = x * _by_channel(factor, x, last)
    scaled += _by_channel(bias - mean * factor, x, last)
    y[...] = scaled


@kernel("BatchNormSums")
def batch_norm_sums(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dbias = sum dY``, ``dscale = sum dY xhat``."""
    mean, inv_std, weight = (a.astype(np.float64) for a in inputs[2:])
    last = channels_last(inputs[0], args.order)
    x, dy = (fold(inputs[i], args.order) for i in (0, 1))
    share, channels = weight.reshape(-1)[0], mean.size
    if share == 0 or x.size == 0:
        # A rank without samples has gradients of 0/0, which must not spread.
        for output in outputs:
            output.fill(0)
        return
    dbias, products = _sums(dy, x, last)
    dscale = (products - mean * dbias) * inv_std
    outputs[0][...] = dscale
    outputs[1][...] = dbias
    outputs[2][:channels] = share * dbias
    outputs[2][channels:] = share * dscale


@kernel("SyncBatchNormGradient")
def sync_batch_norm_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dX = scale inv_std (dY - (dbias + xhat dscale) / (n weight))``."""
    scale, mean, inv_std, moments, sums, weight = (inputs[i].astype(np.float64) for i in (1, 3, 4, 5, 6, 7))
    last = channels_last(inputs[0], args.order)
    x, dy = (fold(inputs[i], args.order) for i in (0, 2))
    dx, share = fold(outputs[0], args.order), weight.reshape(-1)[0]
    if share == 0 or x.size == 0:
        outputs[0].fill(0)
        return
    count = moments[-1] * share
    slope = -sums[scale.size :] * inv_std / count
    offset = -slope * mean - sums[: scale.size] / count
    work = x * _by_channel(slope, x, last)
    work += dy
    work += _by_channel(offset, x, last)
    work *= _by_channel(scale * inv_std, x, last)
    dx[...] = work
