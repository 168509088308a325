"""Launchers of the updates of single rows.

The indices are sorted, then each row is updated for each of its occurrences, in order, as on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.launch import elementwise, in_order, prepare, rows
from gpunet.cuda_kernels.optimizer import (
    square_sums_launch,
    square_sums_scratch,
    storm_total_launch,
    wngrad_scale_launch,
)
from gpunet.cuda_kernels.pieces import Buffers, Launch, nothing
from gpunet.cuda_kernels.signature import Kernel
from gpunet.cuda_kernels.sorting import Picks, against_picks, sort_launch, sort_scratch
from gpunet.kernels import KernelContext, ScratchFunction, SupportFunction, kernel
from gpunet.operator import Operator
from gpunet.specs import TensorSpec

_REALS: Final = ("float32", "float64")
_ROWS: Final = "const uint32* rows, const uint32* order, int64 n, int64 block, int64 row_count"


def _declare(name: str, parameters: str) -> Kernel:
    """A kernel with the types of the parameter and of the rate."""
    return Kernel("sparse_optimizer", name, f"{_ROWS}, {parameters}", T=_REALS, L=_REALS)


_MOMENTUM_SGD = _declare(
    "sparse_momentum_sgd_fwd",
    "const T* g, const L* lr, T* step, T* m, T* w, double momentum, int32 nesterov",
)
_ADAGRAD = _declare(
    "sparse_adagrad_fwd", "const T* g, const L* lr, T* w, T* h, double epsilon, double weight_decay"
)
_ROWWISE_ADAGRAD = _declare(
    "rowwise_adagrad_fwd", "const T* g, const L* lr, T* w, T* h, double epsilon, double weight_decay"
)
_ADADELTA = _declare(
    "sparse_adadelta_fwd", "const T* g, const L* lr, T* w, T* h, T* d, double epsilon, double decay"
)
_ADAM = _declare(
    "sparse_adam_fwd",
    "const T* g, const L* lr, const int64* iteration, T* w, T* m, T* v, T* effective, double beta1, "
    "double beta2, double epsilon, int32 rectified",
)
_ROWWISE_ADAM = _declare(
    "rowwise_adam_fwd",
    "const T* g, const L* lr, const int64* iteration, T* w, T* m, T* v, T* effective, double beta1, "
    "double beta2, double epsilon",
)
_FTRL = _declare(
    "sparse_ftrl_fwd",
    "const T* g, const L* rate, T* w, T* nz, double alpha, double beta, double lambda1, double lambda2",
)
_STORM = _declare(
    "sparse_storm_fwd",
    "const T* g, const L* lr, const T* total, T* w, T* m, double momentum, double beta",
)
_WNGRAD = _declare("sparse_wngrad_fwd", "const T* g, const L* lr, const T* scale, T* w, double epsilon")
_SCATTER_SCALE = _declare("scatter_scale", "const L* weight, T* w")
_SCATTER_ADD = _declare("scatter_add", "const T* x, const L* weight, T* w")


def _picks(param: Any, indices: Any) -> Picks:
    return Picks(1, math.prod(indices.shape), True, param.shape[0])


def _scratch(param: int, indices: int, squares: int | None = None) -> ScratchFunction:
    """Memory to sort input ``indices``, rows of input ``param``; then to sum squares of input ``squares``."""

    def scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
        found = sort_scratch(_picks(inputs[param], inputs[indices]))
        return found if squares is None else [*found, square_sums_scratch(inputs[squares])]

    return scratch


def _against(param: int, indices: int) -> SupportFunction:
    def against(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
        return against_picks(_picks(inputs[param], inputs[indices]))

    return against


class _Rows:
    """The sorted rows of one operator: what its launches begin with."""

    def __init__(self, ctx: KernelContext, param: Buffer, indices: Buffer) -> None:
        picks = _picks(param, indices)
        self._ctx = ctx
        self.sort, keys, order = sort_launch(ctx, picks, indices, ctx.scratch[:5])
        self.n, self.block = picks.count, math.prod(param.shape[1:])
        self._arguments = (keys, order, self.n, self.block, picks.rows)

    @property
    def empty(self) -> bool:
        return self.n * self.block == 0

    def update(self, kernel: Kernel, param: Buffer, rate: Buffer | None, *rest: Any) -> Launch:
        """The launch with a thread for each element."""
        types = (param.dtype, param.dtype if rate is None else rate.dtype)
        grid = elementwise(self.n * self.block)
        return prepare(self._ctx, kernel, types, (*self._arguments, *rest), grid)

    def update_blocks(self, kernel: Kernel, param: Buffer, rate: Buffer, *rest: Any) -> Launch:
        """The launch with a block for each row."""
        grid = rows(self.n, self.block)
        return prepare(self._ctx, kernel, (param.dtype, rate.dtype), (*self._arguments, *rest), grid)


@kernel("SparseMomentumSGDUpdate", device="cuda", binds=True, scratch=_scratch(3, 4), against=_against(3, 4))
def sparse_momentum_sgd_update(
    inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext
) -> Launch:
    """The step goes to the first output."""
    g, _, lr, _, indices = inputs
    step, m, w = outputs
    found = _Rows(ctx, w, indices)
    if found.empty:
        return nothing
    rest = (g, lr, step, m, w, args.momentum, int(args.nesterov))
    return in_order(found.sort, found.update(_MOMENTUM_SGD, w, lr, *rest))


@kernel("SparseAdagrad", device="cuda", binds=True, scratch=_scratch(0, 2), against=_against(0, 2))
def sparse_adagrad(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Adagrad without decay."""
    indices, g, lr = inputs[2:]
    found = _Rows(ctx, outputs[0], indices)
    if found.empty:
        return nothing
    rest = (g, lr, *outputs, args.epsilon, args.weight_decay)
    return in_order(found.sort, found.update(_ADAGRAD, outputs[0], lr, *rest))


@kernel("RowWiseSparseAdagrad", device="cuda", binds=True, scratch=_scratch(0, 2), against=_against(0, 2))
def rowwise_sparse_adagrad(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """One sum of squares a row."""
    indices, g, lr = inputs[2:]
    found = _Rows(ctx, outputs[0], indices)
    if found.empty:
        return nothing
    rest = (g, lr, *outputs, args.epsilon, args.weight_decay)
    return in_order(found.sort, found.update_blocks(_ROWWISE_ADAGRAD, outputs[0], lr, *rest))


@kernel("SparseAdadelta", device="cuda", binds=True, scratch=_scratch(0, 3), against=_against(0, 3))
def sparse_adadelta(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Adadelta of the rows."""
    indices, g, lr = inputs[3:]
    found = _Rows(ctx, outputs[0], indices)
    if found.empty:
        return nothing
    rest = (g, lr, *outputs, args.epsilon, args.decay)
    return in_order(found.sort, found.update(_ADADELTA, outputs[0], lr, *rest))


def _adam(
    inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext
) -> tuple[_Rows, tuple[Any, ...]]:
    indices, g, lr, iteration = inputs[3:]
    effective = outputs[3] if len(outputs) > 3 else None
    rest = (g, lr, iteration, *outputs[:3], effective, args.beta1, args.beta2, args.epsilon)
    return _Rows(ctx, outputs[0], indices), rest


@kernel("SparseAdam", device="cuda", binds=True, scratch=_scratch(0, 3), against=_against(0, 3))
def sparse_adam(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Adam or rectified Adam of the rows."""
    found, rest = _adam(inputs, outputs, args, ctx)
    if found.empty:
        return nothing
    rectified = int(args.enableRAdam)
    return in_order(found.sort, found.update(_ADAM, outputs[0], inputs[5], *rest, rectified))


@kernel("RowWiseSparseAdam", device="cuda", binds=True, scratch=_scratch(0, 3), against=_against(0, 3))
def rowwise_sparse_adam(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Adam with one second moment a row."""
    found, rest = _adam(inputs, outputs, args, ctx)
    if found.empty:
        return nothing
    return in_order(found.sort, found.update_blocks(_ROWWISE_ADAM, outputs[0], inputs[5], *rest))


@kernel("SparseFtrl", device="cuda", binds=True, scratch=_scratch(0, 2), against=_against(0, 2))
def sparse_ftrl(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Ftrl of the rows."""
    indices, g = inputs[2:4]
    alpha = inputs[4] if len(inputs) > 4 else None
    found = _Rows(ctx, outputs[0], indices)
    if found.empty:
        return nothing
    rest = (g, alpha, *outputs, args.alpha, args.beta, args.lambda1, args.lambda2)
    return in_order(found.sort, found.update(_FTRL, outputs[0], alpha, *rest))


@kernel("SparseStorm", device="cuda", binds=True, scratch=_scratch(0, 4, 3), against=_against(0, 4))
def sparse_storm(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Storm of the rows; the sum of squares grows by all blocks."""
    _, _, total, g, indices, lr = inputs
    w, m, new_total = outputs
    found = _Rows(ctx, w, indices)
    if found.empty:
        return nothing
    partial = ctx.scratch[5]
    rest = (g, lr, new_total, w, m, args.momentum, args.beta)
    return in_order(
        square_sums_launch(ctx, g, partial),
        storm_total_launch(ctx, total, partial, new_total),
        found.sort,
        found.update(_STORM, w, lr, *rest),
    )


@kernel("SparseWngrad", device="cuda", binds=True, scratch=_scratch(0, 2, 3), against=_against(0, 2))
def sparse_wngrad(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Wngrad of the rows; the scale grows by all blocks, without epsilon."""
    _, scale, indices, g, lr = inputs
    w, new_scale = outputs
    found = _Rows(ctx, w, indices)
    if found.empty:
        return nothing
    partial = ctx.scratch[5]
    return in_order(
        square_sums_launch(ctx, g, partial),
        found.sort,
        found.update(_WNGRAD, w, lr, g, lr, scale, w, args.epsilon),
        wngrad_scale_launch(ctx, scale, lr, partial, new_scale, None, 0.0),
    )


@kernel("ScatterWeightedSum", device="cuda", binds=True, scratch=_scratch(0, 2), against=_against(0, 2))
def scatter_weighted_sum(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Scales the rows, then adds the blocks in order."""
    weight, indices = inputs[1], inputs[2]
    (w,) = outputs
    found = _Rows(ctx, w, indices)
    if found.empty:
        return nothing
    launches = [found.sort, found.update(_SCATTER_SCALE, w, weight, weight, w)]
    for x, factor in zip(inputs[3::2], inputs[4::2], strict=True):
        launches.append(found.update(_SCATTER_ADD, w, factor, x, factor, w))
    return in_order(*launches)
