"""Launchers of the elementwise combinations of any number of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.launch import elementwise, in_order, prepare
from gpunet.cuda_kernels.pieces import SIGNLESS, Buffers, Launch, copy_launch, map_launch, signless
from gpunet.cuda_kernels.signature import FLOATS, NUMBERS, Kernel
from gpunet.cuda_kernels.total import dot_launch, total_scratch
from gpunet.dtypes import is_float
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.specs import TensorSpec

Specs = Sequence[Any]

#: Tensors, and tensors with a weight, that one launch takes.
_TENSORS: Final = 8
_PAIRS: Final = 4
_RUN: Final = "T* y, uint8* carry, int64 n, int32 count, int32 first, int32 last"
_FOLDS = {
    name: Kernel(
        "variadic",
        f"{name}_fwd",
        ", ".join(f"const T* x{i}" for i in range(_TENSORS)) + f", {_RUN}",
        T=SIGNLESS if name == "sum" else NUMBERS,
    )
    for name in ("sum", "max", "min")
}
_EXTREMUM_BWD = Kernel(
    "variadic", "extremum_bwd", "const T* y, const T* dy, const T* x, T* dx, int64 n", T=FLOATS
)
_WEIGHTED_FWD = Kernel(
    "variadic",
    "weighted_sum_fwd",
    ", ".join(f"const T* x{i}, const W* w{i}" for i in range(_PAIRS)) + f", {_RUN}",
    T=FLOATS,
    W=FLOATS,
)
_WEIGHTED_BWD = Kernel(
    "variadic", "weighted_sum_bwd", "const T* dy, const W* w, T* dx, int64 n", T=FLOATS, W=FLOATS
)


def _carry(y: TensorSpec, count: int, at_once: int) -> list[TensorSpec]:
    """Room for what one launch hands on to the next, in the type that is computed in."""
    if count <= at_once:
        return []
    itemsize = max(y.dtype.itemsize, 4) if is_float(y.dtype) else y.dtype.itemsize
    return [TensorSpec((y.size * itemsize,), np.dtype(np.uint8))]


def _fold_scratch(op: Operator, inputs: Specs, outputs: Specs) -> Specs:
    return _carry(outputs[0], len(inputs), _TENSORS)


def _chunked(
    ctx: KernelContext,
    declared: Kernel,
    types: tuple[np.dtype, ...],
    pointers: Sequence[tuple[Buffer, ...]],
    y: Buffer,
    at_once: int,
) -> Launch:
    """Launches of ``at_once`` groups of pointers each that hand a carry on."""
    carry = ctx.scratch[0] if len(pointers) > at_once else None
    grid = elementwise(y.size, per_thread=16 // y.dtype.itemsize if carry is None else 1)
    launches = []
    for start in range(0, len(pointers), at_once):
        chunk = pointers[start : start + at_once]
        flat: list[Buffer | None] = [buffer for group in chunk for buffer in group]
        flat += [None] * (len(pointers[0]) * at_once - len(flat))
        last = start + at_once >= len(pointers)
        arguments = (*flat, y, carry, y.size, len(chunk), int(start == 0), int(last))
        launches.append(prepare(ctx, declared, types, arguments, grid))
    return in_order(*launches)


def _fold(ctx: KernelContext, name: str, inputs: Buffers, y: Buffer) -> Launch:
    if len(inputs) == 1:
        return copy_launch(ctx, inputs[0], y)
    return _chunked(ctx, _FOLDS[name], (y.dtype,), [(x,) for x in inputs], y, _TENSORS)


@kernel("Sum", "SumInt", device="cuda", binds=True, scratch=_fold_scratch)
def sum_all(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = X0 + X1 + ...``."""
    return _fold(ctx, "sum", tuple(map(signless, inputs)), signless(outputs[0]))


@kernel("Max", device="cuda", binds=True, scratch=_fold_scratch)
def maximum(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = max(X0, X1, ...)``."""
    return _fold(ctx, "max", inputs, outputs[0])


@kernel("Min", device="cuda", binds=True, scratch=_fold_scratch)
def minimum(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = min(X0, X1, ...)``."""
    return _fold(ctx, "min", inputs, outputs[0])


@kernel("MaxGradient", "MinGradient", device="cuda", binds=True)
def extremum_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dX = dY`` where X is the extremum, else 0."""
    y, dy, *tensors = inputs
    return in_order(
        *(map_launch(ctx, _EXTREMUM_BWD, (y, dy, x, dx)) for x, dx in zip(tensors, outputs, strict=True))
    )


def _against_weights(op: Operator, inputs: Specs, outputs: Specs) -> str | None:
    weights = inputs[2::2] if op.type == "WeightedSumGradient" else inputs[1::2]
    if len({w.dtype for w in weights}) > 1:
        return "its weights are of several types"
    if len(outputs) > len(weights) and weights[0].dtype != inputs[0].dtype:
        return "gradients of weights are made only where they have the type of the tensors"
    return None


def _weighted_scratch(op: Operator, inputs: Specs, outputs: Specs) -> Specs:
    return _carry(outputs[0], len(inputs) // 2, _PAIRS)


@kernel("WeightedSum", device="cuda", binds=True, scratch=_weighted_scratch, against=_against_weights)
def weighted_sum(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = w0 X0 + w1 X1 + ...``."""
    types = inputs[0].dtype, inputs[1].dtype
    pairs = list(zip(inputs[::2], inputs[1::2], strict=True))
    return _chunked(ctx, _WEIGHTED_FWD, types, pairs, outputs[0], _PAIRS)


@kernel("WeightedSumGradient", device="cuda", binds=True, scratch=total_scratch, against=_against_weights)
def weighted_sum_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dX_i = w_i dY``, ``dw_i = sum(dY X_i)``."""
    dy, *pairs = inputs
    tensors, weights = pairs[::2], pairs[1::2]
    dx, dw = outputs[: len(tensors)], outputs[len(tensors) :]
    launches = [dot_launch(ctx, dy, x, y, ctx.scratch[0]) for x, y in zip(tensors, dw, strict=False)]
    scaled = []
    for w, target in zip(weights, dx, strict=True):
        types, arguments = (dy.dtype, w.dtype), (dy, w, target, dy.size)
        grid = elementwise(dy.size, per_thread=16 // dy.dtype.itemsize)
        scaled.append(prepare(ctx, _WEIGHTED_BWD, types, arguments, grid))
    return in_order(*launches, *reversed(scaled))  # the first dX may be in place of dY
