"""Launchers of LRN and batch normalization."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cuda_kernels.launch import Grid, blocks, columns, elementwise, in_order, prepare, rows, slices
from gpunet.cuda_kernels.pieces import Buffers, Launch, nothing
from gpunet.cuda_kernels.signature import FLOATS, Kernel
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.specs import Shape, TensorSpec

_LRN = Kernel(
    "normalization",
    "lrn_fwd",
    "const T* x, T* y, T* scale, int64 n, int64 channels, int64 inner, int64 size, double alpha, "
    "double beta, double bias",
    T=FLOATS,
)
_LRN_BWD_RATIO = Kernel(
    "normalization",
    "lrn_bwd_ratio",
    "const T* x, const T* y, const T* dy, uint8* ratio, uint8* power, int64 n, int64 channels, int64 inner, "
    "int64 size, double alpha, double beta, double bias",
    T=FLOATS,
)
_LRN_BWD = Kernel(
    "normalization",
    "lrn_bwd",
    "const T* x, const T* dy, const uint8* ratio, const uint8* power, T* dx, int64 n, int64 channels, "
    "int64 inner, int64 size, double factor",
    T=FLOATS,
)
MOMENTS = Kernel(
    "normalization",
    "spatial_bn_moments",
    "const T* x, double* partial, int64 count, int64 channels, int64 pixels, int64 slices, int64 length, "
    "int32 across",
    T=FLOATS,
)
_TEST = Kernel(
    "normalization",
    "spatial_bn_test",
    "const T* scale, const T* bias, const T* mean, const T* var, uint8* factors, int64 channels, "
    "double epsilon, int32 inverted",
    T=FLOATS,
)
_STATISTICS = Kernel(
    "normalization",
    "spatial_bn_statistics",
    "const double* partial, const T* batch_sum, const T* batch_sumsq, const T* scale, const T* bias, "
    "T* running_mean, T* running_var, T* saved_mean, T* saved_inv_std, uint8* factors, int64 channels, "
    "int64 count, int64 slices, int64 length, double total, double epsilon, double momentum",
    T=FLOATS,
)
APPLY = Kernel(
    "normalization",
    "spatial_bn_apply",
    "const T* x, const uint8* factors, T* y, int64 n, int64 channels, int64 pixels",
    T=FLOATS,
)
BWD_SUMS = Kernel(
    "normalization",
    "spatial_bn_bwd_sums",
    "const T* x, const T* dy, const T* mean, const float* single_mean, double* partial, int64 count, "
    "int64 channels, int64 pixels, int64 slices, int64 length, int32 across",
    T=FLOATS,
)
_BWD_STATISTICS = Kernel(
    "normalization",
    "spatial_bn_bwd_statistics",
    "const double* partial, const T* dscale_sum, const T* dbias_sum, const T* scale, const T* mean, "
    "const T* inv_std, T* dscale, T* dbias, uint8* factors, int64 channels, int64 count, int64 slices, "
    "double batches",
    T=FLOATS,
)
BWD = Kernel(
    "normalization",
    "spatial_bn_bwd",
    "const T* x, const T* dy, const uint8* factors, T* dx, int64 n, int64 channels, int64 pixels",
    T=FLOATS,
)

#: Elements that a thread adds up at most, so that rounding errors stay small.
_LONGEST_RUN: Final = 128


def wide_bytes(dtype: np.dtype, count: int) -> TensorSpec:
    """Scratch for numbers of the type that this one is computed in."""
    return TensorSpec((count * (8 if dtype == np.float64 else 4),), np.dtype(np.uint8))


def _lrn_sizes(shape: Shape, args: Arguments) -> tuple[int, int, int, int]:
    """Elements, channels, elements from a channel to the next, channels in the window."""
    first = args.order == "NCHW"
    inner = math.prod(shape[2:]) if first else 1
    return math.prod(shape), shape[1 if first else 3], inner, args.size


@kernel("LRN", device="cuda", binds=True)
def lrn(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``scale = bias + alpha / size * window sum of X^2``, ``Y = X scale^-beta``."""
    (x,), y = inputs, outputs[0]
    if x.size == 0:
        return nothing
    scale = outputs[1] if len(outputs) > 1 else None
    arguments = (x, y, scale, *_lrn_sizes(x.shape, args), args.alpha, args.beta, args.bias)
    return prepare(ctx, _LRN, (x.dtype,), arguments, elementwise(x.size))


def _lrn_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    return [wide_bytes(inputs[0].dtype, inputs[0].size)] * 2


@kernel("LRNGradient", device="cuda", binds=True, scratch=_lrn_scratch)
def lrn_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dX = dY scale^-beta - 2 alpha beta / size * X * window sum of (dY Y / scale)``."""
    (x, y, dy), (dx,), (ratio, power) = inputs, outputs, ctx.scratch
    if x.size == 0:
        return nothing
    sizes, grid = _lrn_sizes(x.shape, args), elementwise(x.size)
    first = (x, y, dy, ratio, power, *sizes, args.alpha, args.beta, args.bias)
    second = (x, dy, ratio, power, dx, *sizes, 2 * args.alpha * args.beta / args.size)
    return in_order(
        prepare(ctx, _LRN_BWD_RATIO, (x.dtype,), first, grid),
        prepare(ctx, _LRN_BWD, (x.dtype,), second, grid),
    )


@dataclass(frozen=True)
class ReductionPlan:
    """How the elements of the channels are shared among blocks.

    Attributes:
        count: elements a channel.
        channels: channels.
        pixels: elements of a channel that are neighbours.
        slices: pieces that the elements of a channel are cut into.
        length: elements of a piece.
        across: channels that a block takes at a time.
        threads: threads of a block.
    """

    count: int
    channels: int
    pixels: int
    slices: int
    length: int
    across: int
    threads: int

    @property
    def grid(self) -> Grid:
        """Blocks and threads of a kernel that takes a slice of some channels at a time."""
        return blocks(-(-self.channels // self.across) * self.slices, self.threads)

    @property
    def sizes(self) -> tuple[int, ...]:
        """What such a kernel is told."""
        return (self.count, self.channels, self.pixels, self.slices, self.length, self.across)


def reduction_plan(shape: Shape, order: str) -> ReductionPlan:
    """The plan for sums over the channels of a tensor."""
    if order == "NCHW":
        channels, pixels = shape[1], math.prod(shape[2:])
    else:
        channels, pixels = shape[-1], 1
    count = math.prod(shape) // max(1, channels)
    if pixels > 1:
        across, threads = 1, rows(1, count)[1]
    else:
        across, threads = columns(channels, count)
    deep = threads // across
    wanted = max(slices(-(-channels // across), count, deep), -(-count // (deep * _LONGEST_RUN)))
    length = max(1, -(-count // wanted))
    return ReductionPlan(count, channels, pixels, max(1, -(-count // length)), length, across, threads)


def _scratch(values: int, op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    """Two numbers a channel and slice, and ``values`` a channel for the last step."""
    x, scale = inputs[0], inputs[1]
    plan = reduction_plan(x.shape, op.args.order)
    partial = 0 if op.args.is_test and op.type == "SpatialBN" else 2 * plan.slices * plan.channels
    return [
        TensorSpec((partial,), np.dtype(np.float64)),
        wide_bytes(scale.dtype, values * plan.channels),
    ]


def _bn_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    return _scratch(2, op, inputs)


@kernel("SpatialBN", device="cuda", binds=True, scratch=_bn_scratch)
def spatial_bn(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = scale (X - mean) / sqrt(var + epsilon) + bias`` by channel."""
    x, scale, bias, running_mean, running_var = inputs[:5]
    partial, factors = ctx.scratch
    y, plan = outputs[0], reduction_plan(x.shape, args.order)
    of_channels, channels = elementwise(plan.channels), plan.channels
    apply = (x, factors, y, x.size, channels, plan.pixels)
    grid = elementwise(x.size, per_thread=max(1, 16 // x.dtype.itemsize))
    launches: list[Launch] = []
    if x.size == 0:
        backend, stream = ctx.backend, ctx.stream
        # Without data the running statistics stay (they are updated in place).
        return (
            nothing
            if args.is_test
            else in_order(
                lambda: backend.fill(outputs[3], 0, stream), lambda: backend.fill(outputs[4], 0, stream)
            )
        )
    if args.is_test:
        data = (scale, bias, running_mean, running_var, factors, channels, args.epsilon, args.inverted)
        launches.append(prepare(ctx, _TEST, (scale.dtype,), data, of_channels))
    else:
        sums: tuple[Any, Any] = (None, None)
        if args.num_batches > 1:
            sums = (inputs[5], inputs[6])
        else:
            launches.append(prepare(ctx, MOMENTS, (x.dtype,), (x, partial, *plan.sizes), plan.grid))
        statistics = (
            *(partial, *sums, scale, bias, *outputs[1:5], factors, channels),
            *(plan.count, plan.slices, plan.length),
            *(args.num_batches * plan.count, args.epsilon, args.momentum),
        )
        launches.append(prepare(ctx, _STATISTICS, (scale.dtype,), statistics, of_channels))
    return in_order(*launches, prepare(ctx, APPLY, (x.dtype,), apply, grid))


def _bn_gradient_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    return _scratch(3, op, inputs)


@kernel("SpatialBNGradient", device="cuda", binds=True, scratch=_bn_gradient_scratch)
def spatial_bn_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dX = scale inv_std (dY - dbias / n - xhat dscale / n)``."""
    x, scale, dy, mean, inv_std = inputs[:5]
    (dx, dscale, dbias), (partial, factors) = outputs, ctx.scratch
    plan = reduction_plan(x.shape, args.order)
    if x.size == 0:
        backend, stream = ctx.backend, ctx.stream
        return in_order(lambda: backend.fill(dscale, 0, stream), lambda: backend.fill(dbias, 0, stream))
    launches: list[Launch] = []
    sums: tuple[Any, Any] = (None, None)
    if args.num_batches > 1:
        sums = (inputs[5], inputs[6])
    else:
        means = (mean, None) if mean.dtype == x.dtype else (None, mean)
        arguments = (x, dy, *means, partial, *plan.sizes)
        launches.append(prepare(ctx, BWD_SUMS, (x.dtype,), arguments, plan.grid))
    statistics = (
        *(partial, *sums, scale, mean, inv_std, dscale, dbias, factors),
        *(plan.channels, plan.count, plan.slices, args.num_batches),
    )
    apply = (x, dy, factors, dx, x.size, plan.channels, plan.pixels)
    grid = elementwise(x.size, per_thread=max(1, 16 // x.dtype.itemsize))
    return in_order(
        *launches,
        prepare(ctx, _BWD_STATISTICS, (scale.dtype,), statistics, elementwise(plan.channels)),
        prepare(ctx, BWD, (x.dtype,), apply, grid),
    )
