"""NumPy kernels of the normalization of each example by itself.

Data is seen as (batch, groups, depth, inner), statistics as (batch, groups, 1, 1), factors and offsets of
channels as (groups, depth, 1).
"""

from __future__ import annotations

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.precision import Array, Arrays, widened
from gpunet.kernels import KernelContext, kernel
from gpunet.operators.layer_norm import Groups, groups_of

_OF_GROUP = (2, 3)
_OF_CHANNEL = (0, 3)


def _fold(array: Array, groups: Groups) -> Array:
    """A view; channels that are last come before the elements of each."""
    n, g, d, i = groups.batch, groups.groups, groups.depth, groups.inner
    return array.reshape(n, i, g, d).transpose(0, 2, 3, 1) if groups.last else array.reshape(n, g, d, i)


def _moments(x: Array, epsilon: float, columns: int) -> tuple[Array, Array, Array]:
    """Distances to the mean, the mean, and ``sqrt(variance + epsilon)``; sums in float64."""
    count = max(1, columns)
    mean = x.sum(_OF_GROUP, np.float64, keepdims=True) / count
    centered = x - mean.astype(x.dtype)
    # What the rounded mean lacks is the mean of the distances.
    lacking = centered.sum(_OF_GROUP, np.float64, keepdims=True) / count
    squares = np.square(centered).sum(_OF_GROUP, np.float64, keepdims=True) / count
    return centered, mean, np.sqrt(np.maximum(squares - lacking * lacking, 0) + epsilon)


def _per_channel(values: Array, groups: Groups) -> Array:
    return widened(values).reshape(groups.groups, groups.depth, 1)


@kernel("LayerNorm", "GroupNorm", "InstanceNorm")
def normalize(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``Y = (X - mean) / std * gamma + beta``."""
    groups = groups_of(ctx.op.type, args, inputs[0].shape)
    x, y = widened(_fold(inputs[0], groups)), _fold(outputs[0], groups)
    result, mean, deviation = _moments(x, args.epsilon, groups.columns)
    np.multiply(result, (1 / deviation).astype(x.dtype), out=result)
    if len(inputs) > 1:
        np.multiply(result, _per_channel(inputs[1], groups), out=result)
        np.add(result, _per_channel(inputs[2], groups), out=result)
    y[...] = result
    if len(outputs) > 1:
        outputs[1][...] = mean.reshape(outputs[1].shape)
        saved = deviation if ctx.op.type == "LayerNorm" else 1 / deviation
        outputs[2][...] = saved.reshape(outputs[2].shape)


def _gradients(
    x: Array, dy: Array, mean: Array, inverse: Array, gamma: Array | None, groups: Groups, outputs: Arrays
) -> None:
    x, dy = widened(_fold(x, groups)), widened(_fold(dy, groups))
    shape = (groups.batch, groups.groups, 1, 1)
    inverse = inverse.reshape(shape).astype(x.dtype)
    xhat = (x - mean.reshape(shape).astype(x.dtype)) * inverse
    product = dy * xhat
    if len(outputs) > 1:
        outputs[1][...] = product.sum(_OF_CHANNEL, np.float64).reshape(outputs[1].shape)
        outputs[2][...] = dy.sum(_OF_CHANNEL, np.float64).reshape(outputs[2].shape)
    if gamma is not None:
        factor = _per_channel(gamma, groups)
        dy, product = dy * factor, product * factor
    count = max(1, groups.columns)
    of_y = (dy.sum(_OF_GROUP, np.float64, keepdims=True) / count).astype(x.dtype)
    of_product = (product.sum(_OF_GROUP, np.float64, keepdims=True) / count).astype(x.dtype)
    _fold(outputs[0], groups)[...] = (dy - of_y - xhat * of_product) * inverse


@kernel("LayerNormGradient")
def layer_norm_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dX = (g - sum(g) / n - xhat sum(g xhat) / n) / std``, ``g = dY gamma``."""
    dy, _, mean, deviation, x, *gamma = inputs
    groups = groups_of(ctx.op.type, args, x.shape)
    _gradients(x, dy, mean, 1 / deviation, gamma[0] if gamma else None, groups, outputs)


@kernel("GroupNormGradient")
def group_norm_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dX = inv_std (g - sum(g) / n - xhat sum(g xhat) / n)``, ``g = dY gamma``."""
    dy, x, gamma, _, mean, inverse = inputs
    _gradients(x, dy, mean, inverse, gamma, groups_of(ctx.op.type, args, x.shape), outputs)


@kernel("InstanceNormGradient")
def instance_norm_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """As that of GroupNorm; statistics that are not given are computed again."""
    x, gamma, _, dy, *statistics = inputs
    groups = groups_of(ctx.op.type, args, x.shape)
    if not statistics:
        _, mean, deviation = _moments(widened(_fold(x, groups)), args.epsilon, groups.columns)
        statistics = [mean, 1 / deviation]
    _gradients(x, dy, statistics[0], statistics[1], gamma, groups, outputs)
