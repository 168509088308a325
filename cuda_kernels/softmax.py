"""Launchers of softmax and of softmax with loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cuda_kernels.device_errors import report
from gpunet.cuda_kernels.labels import report_labels
from gpunet.cuda_kernels.launch import in_order, one_block, prepare, rows
from gpunet.cuda_kernels.pieces import Buffers, Launch, nothing
from gpunet.cuda_kernels.signature import FLOATS, INDICES, Kernel
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.matmul import as_matrix
from gpunet.specs import TensorSpec

_FWD = Kernel("softmax", "softmax_fwd", "const T* x, T* y, int64 examples, int64 classes", T=FLOATS)
_BWD = Kernel(
    "softmax", "softmax_bwd", "const T* y, const T* dy, T* dx, int64 examples, int64 classes", T=FLOATS
)
_LOSS_FWD = Kernel(
    "softmax",
    "softmax_loss_fwd",
    "const T* x, const I* label, const T* weight, T* p, double* losses, uint64* errors, uint64 code, "
    "int64 examples, int64 classes",
    T=FLOATS,
    I=INDICES,
)
_PROB_LOSS_FWD = Kernel(
    "softmax",
    "softmax_prob_loss_fwd",
    "const T* x, const T* label, const T* weight, T* p, double* losses, uint64* errors, "
    "uint64 code_negative, uint64 code_sum, int64 examples, int64 classes",
    T=FLOATS,
)
_LOSS_SUM = Kernel(
    "softmax",
    "softmax_loss_sum",
    "const double* losses, const T* weight, T* loss, int64 examples, double scale, int32 by_batch",
    T=FLOATS,
)
_WEIGHT_SUM = Kernel(
    "softmax", "softmax_weight_sum", "const T* weight, double* total, int64 examples", T=FLOATS
)
_LOSS_BWD = Kernel(
    "softmax",
    "softmax_loss_bwd",
    "const I* label, const T* weight, const T* p, const T* dloss, const double* total, T* dx, "
    "uint64* errors, uint64 code, int64 examples, int64 classes, double scale",
    T=FLOATS,
    I=INDICES,
)
_PROB_LOSS_BWD = Kernel(
    "softmax",
    "softmax_prob_loss_bwd",
    "const T* label, const T* weight, const T* p, const T* dloss, const double* total, T* dx, "
    "int64 examples, int64 classes, double scale",
    T=FLOATS,
)


def _sizes(x: Any, args: Arguments) -> tuple[int, int]:
    """Examples and classes."""
    axis: int = args.axis
    return as_matrix(x.shape, axis if axis >= 0 else axis + len(x.shape))


@kernel("Softmax", device="cuda", binds=True)
def softmax(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = exp(X - max X) / sum exp(X - max X)`` by row."""
    (x,), (y,) = inputs, outputs
    if x.size == 0:
        return nothing
    examples, classes = _sizes(x, args)
    return prepare(ctx, _FWD, (x.dtype,), (x, y, examples, classes), rows(examples, classes))


@kernel("SoftmaxGradient", device="cuda", binds=True)
def softmax_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dX = Y (dY - sum dY Y)`` by row."""
    (y, dy), (dx,) = inputs, outputs
    examples, classes = _sizes(y, args)
    return prepare(ctx, _BWD, (y.dtype,), (y, dy, dx, examples, classes), rows(examples, classes))


def _loss_of_each(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[Any]) -> list[TensorSpec]:
    return [TensorSpec((_sizes(inputs[0], op.args)[0],), np.dtype(np.float64))]


@kernel("SoftmaxWithLoss", device="cuda", binds=True, scratch=_loss_of_each)
def softmax_with_loss(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``loss = scale * sum w_i l_i / sum w_i``: the losses of the examples, then their sum in one block."""
    x, label = inputs[:2]
    weight = inputs[2] if len(inputs) > 2 else None
    (p, loss), (losses,) = outputs, ctx.scratch
    examples, classes = _sizes(x, args)
    data, grid = (x, label, weight, p, losses), rows(examples, classes)
    launches: list[Launch] = []
    if x.size == 0:
        examples, weight = 0, None  # the sum of no losses: 0
    elif args.label_prob:
        errors, negative = report(
            ctx,
            "label {real:.7g} of example {row}, class {column} is negative, wanted a probability",
            columns=classes,
        )
        _, wrong = report(
            ctx, "the label probabilities of example {index} sum to {real:.7g}, wanted 1 within 1e-5"
        )
        arguments: tuple[Any, ...] = (*data, errors, negative, wrong, examples, classes)
        launches.append(prepare(ctx, _PROB_LOSS_FWD, (x.dtype,), arguments, grid))
    else:
        arguments = (*data, *report_labels(ctx, classes), examples, classes)
        launches.append(prepare(ctx, _LOSS_FWD, (x.dtype, label.dtype), arguments, grid))
    total = (losses, weight, loss, examples, args.scale, args.average_by_batch_size)
    launches.append(prepare(ctx, _LOSS_SUM, (x.dtype,), total, one_block(examples)))
    return in_order(*launches)


def _one_number(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    return [TensorSpec((1,), np.dtype(np.float64))]


@kernel("SoftmaxWithLossGradient", device="cuda", binds=True, scratch=_one_number)
def softmax_with_loss_gradient(
    inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext
) -> Launch:
    """``dX = dloss * scale * w_i (P - label) / sum w_i``."""
    label, p, dloss = inputs[1], inputs[-2], inputs[-1]
    weight = inputs[2] if len(inputs) > 4 else None
    (dx,), (total,) = outputs, ctx.scratch
    if dx.size == 0:
        return nothing
    examples, classes = _sizes(dx, args)
    grid = rows(examples, classes)
    launches: list[Launch] = []
    if weight is None or args.average_by_batch_size:
        total = None
    else:
        launches.append(
            prepare(ctx, _WEIGHT_SUM, (dx.dtype,), (weight, total, examples), one_block(examples))
        )
    data = (label, weight, p, dloss, total, dx)
    if args.label_prob:
        arguments: tuple[Any, ...] = (*data, examples, classes, args.scale)
        launches.append(prepare(ctx, _PROB_LOSS_BWD, (dx.dtype,), arguments, grid))
    else:
        arguments = (*data, *report_labels(ctx, classes), examples, classes, args.scale)
        launches.append(prepare(ctx, _LOSS_BWD, (dx.dtype, label.dtype), arguments, grid))
    return in_order(*launches)
