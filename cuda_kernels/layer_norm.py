"""Launchers of the normalization of each example by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.launch import blocks, columns, elementwise, in_order, prepare, rows, slices
from gpunet.cuda_kernels.pieces import Buffers, Launch, nothing
from gpunet.cuda_kernels.signature import FLOATS, Kernel
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.layer_norm import Groups, groups_of, statistics_spec
from gpunet.specs import TensorSpec, spec

_ROWS: Final = "int64 columns, int64 groups, int64 depth, int64 inner, int32 last"
_FWD = Kernel(
    "layer_norm",
    "layer_norm_fwd",
    "const T* x, const T* gamma, const T* beta, T* y, uint8* means, uint8* deviations, int64 count, "
    f"{_ROWS}, double epsilon, int32 inverse",
    T=FLOATS,
)
_BWD = Kernel(
    "layer_norm",
    "layer_norm_bwd",
    "const T* x, const T* dy, const T* gamma, const uint8* means, const uint8* deviations, T* dx, "
    f"int64 count, {_ROWS}, int32 inverse",
    T=FLOATS,
)
_BWD_SUMS = Kernel(
    "layer_norm",
    "layer_norm_bwd_sums",
    "const T* x, const T* dy, const uint8* means, const uint8* deviations, double* partial, int64 elements, "
    f"{_ROWS}, int64 slices, int64 length, int32 across, int32 inverse",
    T=FLOATS,
)
_BWD_TOTAL = Kernel(
    "layer_norm",
    "layer_norm_bwd_total",
    "const double* partial, T* dgamma, T* dbeta, int64 channels, int64 slices",
    T=FLOATS,
)
#: Elements that a thread adds up at most, so that rounding errors stay small.
_LONGEST_RUN: Final = 128


def _sizes(groups: Groups) -> tuple[int, ...]:
    return groups.columns, groups.groups, groups.depth, groups.inner, int(groups.last)


def _bytes(statistics: Buffer) -> Buffer:
    """Statistics as kernels take them: of the type that the data is computed in."""
    return statistics.view((statistics.nbytes,), np.uint8)


def _moments(
    ctx: KernelContext,
    groups: Groups,
    x: Buffer,
    affine: Sequence[Buffer],
    y: Buffer | None,
    statistics: Sequence[Buffer],
) -> Launch:
    gamma, beta = affine or (None, None)
    means, deviations = map(_bytes, statistics) if statistics else (None, None)
    inverse = int(not ctx.op.type.startswith("LayerNorm"))
    arguments = (x, gamma, beta, y, means, deviations, groups.rows, *_sizes(groups), ctx.op.args.epsilon)
    return prepare(ctx, _FWD, (x.dtype,), (*arguments, inverse), rows(groups.rows, groups.columns))


@kernel("LayerNorm", "GroupNorm", "InstanceNorm", device="cuda", binds=True)
def normalize(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = (X - mean) / std * gamma + beta``."""
    x, *affine = inputs
    groups = groups_of(ctx.op.type, args, x.shape)
    return nothing if groups.rows == 0 else _moments(ctx, groups, x, affine, outputs[0], outputs[1:])


def _plan(groups: Groups) -> tuple[int, int, int, int]:
    """How the sums of the channels are shared among blocks: slices, their length, channels of a block that
    are beside each other, threads.
    """
    count = groups.batch * groups.inner
    across, threads = columns(groups.channels, count)
    if groups.inner > 1 and not groups.last:
        across, threads = 1, rows(1, count)[1]  # neighbouring elements are of one channel
    deep = threads // across
    wanted = max(slices(-(-groups.channels // across), count, deep), -(-count // (deep * _LONGEST_RUN)))
    length = max(1, -(-count // max(1, wanted)))
    return max(1, -(-count // length)), length, across, threads


def _gradients(
    ctx: KernelContext,
    groups: Groups,
    x: Buffer,
    dy: Buffer,
    gamma: Buffer | None,
    statistics: Sequence[Buffer],
    outputs: Buffers,
) -> list[Launch]:
    """dX, and dgamma and dbeta if they are wanted; the first scratch is for their sums."""
    inverse, saved = int(not ctx.op.type.startswith("LayerNorm")), [_bytes(s) for s in statistics]
    launches = []
    if x.size:
        arguments = (x, dy, gamma, *saved, outputs[0], groups.rows, *_sizes(groups), inverse)
        grid = rows(groups.rows, groups.columns)
        launches.append(prepare(ctx, _BWD, (x.dtype,), arguments, grid))
    if len(outputs) > 1 and groups.channels:
        cuts, length, across, threads = _plan(groups)
        partial, count = ctx.scratch[0], groups.batch * groups.inner
        sums = (x, dy, *saved, partial, count, *_sizes(groups), cuts, length, across, inverse)
        grid = blocks(-(-groups.channels // across) * cuts, threads)
        total = (partial, *outputs[1:], groups.channels, cuts)
        launches += [
            prepare(ctx, _BWD_SUMS, (x.dtype,), sums, grid),
            prepare(ctx, _BWD_TOTAL, (x.dtype,), total, elementwise(groups.channels)),
        ]
    return launches


def _partial(groups: Groups, wanted: bool) -> TensorSpec:
    return spec((2 * _plan(groups)[0] * groups.channels if wanted else 0,), np.float64)


def gradient_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    """Sums of the channels; for InstanceNorm statistics that are not given."""
    x: Any = inputs[{"LayerNormGradient": 4, "GroupNormGradient": 1}.get(op.type, 0)]
    groups = groups_of(op.type, op.args, x.shape)
    found = [_partial(groups, len(outputs) > 1)]
    if op.type == "InstanceNormGradient" and len(inputs) == 4:
        found += [statistics_spec(spec(x.shape, x.dtype), (groups.rows,))] * 2
    return found


@kernel("LayerNormGradient", device="cuda", binds=True, scratch=gradient_scratch)
def layer_norm_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dX = (g - sum(g) / n - xhat sum(g xhat) / n) / std``, ``g = dY gamma``."""
    dy, _, mean, deviation, x, *gamma = inputs
    groups = groups_of(ctx.op.type, args, x.shape)
    given = gamma[0] if gamma else None
    return in_order(*_gradients(ctx, groups, x, dy, given, (mean, deviation), outputs))


@kernel("GroupNormGradient", device="cuda", binds=True, scratch=gradient_scratch)
def group_norm_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dX = inv_std (g - sum(g) / n - xhat sum(g xhat) / n)``, ``g = dY gamma``."""
    dy, x, gamma, _, mean, inverse = inputs
    groups = groups_of(ctx.op.type, args, x.shape)
    return in_order(*_gradients(ctx, groups, x, dy, gamma, (mean, inverse), outputs))


@kernel("InstanceNormGradient", device="cuda", binds=True, scratch=gradient_scratch)
def instance_norm_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """As that of GroupNorm; statistics that are not given are computed again."""
    x, gamma, _, dy, *statistics = inputs
    groups = groups_of(ctx.op.type, args, x.shape)
    launches = []
    if not statistics:
        statistics = list(ctx.scratch[1:3])
        if groups.rows:
            launches.append(_moments(ctx, groups, x, (), None, statistics))
    launches += _gradients(ctx, groups, x, dy, gamma, statistics, outputs)
    return in_order(*launches)
