"""Launchers of batch normalization over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial as bound
from typing import Any, Final

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cuda_kernels.launch import elementwise, in_order, prepare
from gpunet.cuda_kernels.normalization import (
    APPLY,
    BWD,
    BWD_SUMS,
    MOMENTS,
    reduction_plan,
    wide_bytes,
)
from gpunet.cuda_kernels.pieces import Buffers, Launch
from gpunet.cuda_kernels.signature import Kernel
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.specs import TensorSpec

_REALS: Final = ("float32", "float64")
_MOMENTS: Final = Kernel(
    "sync_batch_norm",
    "sync_bn_moments",
    "const double* partial, double* moments, int64 channels, int64 count, int64 slices, int64 length",
)
_STATISTICS: Final = Kernel(
    "sync_batch_norm",
    "sync_bn_statistics",
    "const double* moments, const U* scale, const U* bias, U* running_mean, U* running_var, U* saved_mean, "
    "U* saved_inv_std, uint8* factors, int64 channels, double epsilon, double momentum",
    U=_REALS,
)
_LOCAL: Final = Kernel(
    "sync_batch_norm",
    "sync_bn_bwd_local",
    "const double* partial, const U* inv_std, const float* weight, U* dscale, U* dbias, double* sums, "
    "int64 channels, int64 count, int64 slices",
    U=_REALS,
)
_GLOBAL: Final = Kernel(
    "sync_batch_norm",
    "sync_bn_bwd_global",
    "const double* moments, const double* sums, const float* weight, const U* scale, const U* mean, "
    "const U* inv_std, uint8* factors, int64 channels",
    U=_REALS,
)


def _partial(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    """Two numbers a channel and slice."""
    plan = reduction_plan(inputs[0].shape, op.args.order)
    return [TensorSpec((2 * plan.slices * plan.channels,), np.dtype(np.float64))]


def _factors(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    """Three numbers a channel."""
    plan = reduction_plan(inputs[0].shape, op.args.order)
    return [wide_bytes(inputs[1].dtype, 3 * plan.channels)]


@kernel("SyncBatchNormMoments", device="cuda", binds=True, scratch=_partial)
def batch_moments(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Sums, sums of squares, and how many."""
    x, (sums,) = inputs[0], ctx.scratch
    plan = reduction_plan(x.shape, args.order)
    last = (sums, outputs[0], plan.channels, plan.count, plan.slices, plan.length)
    finish = prepare(ctx, _MOMENTS, (), last, elementwise(max(1, plan.channels)))
    if x.size == 0:
        return finish
    return in_order(prepare(ctx, MOMENTS, (x.dtype,), (x, sums, *plan.sizes), plan.grid), finish)


@kernel("SyncBatchNorm", device="cuda", binds=True, scratch=_factors)
def sync_batch_norm(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Statistics from the moments, then ``Y = scale (X - mean) inv_std + bias``."""
    x, scale, bias, _, _, moments = inputs[:6]
    y, (factors,) = outputs[0], ctx.scratch
    plan = reduction_plan(x.shape, args.order)
    data = (moments, scale, bias, *outputs[1:5], factors, plan.channels, args.epsilon, args.momentum)
    statistics = prepare(ctx, _STATISTICS, (scale.dtype,), data, elementwise(plan.channels))
    if x.size == 0:
        return statistics
    grid = elementwise(x.size, per_thread=max(1, 16 // x.dtype.itemsize))
    apply = (x, factors, y, x.size, plan.channels, plan.pixels)
    return in_order(statistics, prepare(ctx, APPLY, (x.dtype,), apply, grid))


@kernel("BatchNormSums", device="cuda", binds=True, scratch=_partial)
def batch_norm_sums(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dbias = sum dY``, ``dscale = sum dY xhat``."""
    x, dy, mean, inv_std, weight = inputs
    (sums,) = ctx.scratch
    plan = reduction_plan(x.shape, args.order)
    last = (sums, inv_std, weight, *outputs, plan.channels, plan.count, plan.slices)
    finish = prepare(ctx, _LOCAL, (inv_std.dtype,), last, elementwise(plan.channels))
    if x.size == 0:
        return finish
    means = (mean, None) if mean.dtype == x.dtype else (None, mean)
    return in_order(prepare(ctx, BWD_SUMS, (x.dtype,), (x, dy, *means, sums, *plan.sizes), plan.grid), finish)


@kernel("SyncBatchNormGradient", device="cuda", binds=True, scratch=_factors)
def sync_batch_norm_gradient(
    inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext
) -> Launch:
    """``dX = scale inv_std (dY - (dbias + xhat dscale) / (n weight))``."""
    x, scale, dy, mean, inv_std, moments, sums, weight = inputs
    dx, (factors,) = outputs[0], ctx.scratch
    plan = reduction_plan(x.shape, args.order)
    if x.size == 0:
        return bound(ctx.backend.fill, dx, 0, ctx.stream)
    data = (moments, sums, weight, scale, mean, inv_std, factors, plan.channels)
    grid = elementwise(x.size, per_thread=max(1, 16 // x.dtype.itemsize))
    return in_order(
        prepare(ctx, _GLOBAL, (scale.dtype,), data, elementwise(plan.channels)),
        prepare(ctx, BWD, (x.dtype,), (x, dy, factors, dx, x.size, plan.channels, plan.pixels), grid),
    )
