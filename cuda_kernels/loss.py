"""Launchers of the losses and metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.labels import report_labels
from gpunet.cuda_kernels.launch import elementwise, in_order, one_block, prepare, rows
from gpunet.cuda_kernels.pieces import Buffers, Launch, nothing
from gpunet.cuda_kernels.reduction import reduction_launch, reduction_scratch
from gpunet.cuda_kernels.signature import FLOATS, INDICES, Kernel
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.specs import TensorSpec

_LABEL_FWD = Kernel(
    "loss",
    "label_cross_entropy_fwd",
    "const T* x, const I* label, T* y, uint64* errors, uint64 code, int64 examples, int64 classes",
    T=FLOATS,
    I=INDICES,
)
_LABEL_BWD = Kernel(
    "loss",
    "label_cross_entropy_bwd",
    "const T* x, const I* label, const T* dy, T* dx, uint64* errors, uint64 code, int64 examples, "
    "int64 classes",
    T=FLOATS,
    I=INDICES,
)
_CROSS_FWD = Kernel(
    "loss",
    "cross_entropy_fwd",
    "const T* x, const T* label, T* y, int64 examples, int64 classes",
    T=FLOATS,
)
_CROSS_BWD = Kernel(
    "loss",
    "cross_entropy_bwd",
    "const T* x, const T* label, const T* dy, T* dx, int64 examples, int64 classes",
    T=FLOATS,
)
_AVERAGE_BWD = Kernel("loss", "averaged_loss_bwd", "const T* dy, T* dx, int64 n", T=FLOATS)
_DISTANCE_FWD = Kernel(
    "loss",
    "squared_l2_distance_fwd",
    "const T* x, const T* y, T* z, int64 examples, int64 columns",
    T=FLOATS,
)
_DISTANCE_BWD = Kernel(
    "loss",
    "squared_l2_distance_bwd",
    "const T* x, const T* y, const T* dz, T* dx, T* dy, int64 examples, int64 columns",
    T=FLOATS,
)
_SIGMOID_FWD = Kernel(
    "loss",
    "sigmoid_cross_entropy_fwd",
    "const T* x, const T* t, T* y, int64 examples, int64 columns, int32 kind",
    T=FLOATS,
)
_SIGMOID_BWD = Kernel(
    "loss",
    "sigmoid_cross_entropy_bwd",
    "const T* dy, const T* x, const T* t, T* dx, int64 examples, int64 columns, int32 kind",
    T=FLOATS,
)
_ACCURACY = Kernel(
    "loss",
    "accuracy_fwd",
    "const T* x, const I* label, int32* right, uint64* errors, uint64 code, int64 examples, int64 classes, "
    "int64 top_k",
    T=FLOATS,
    I=INDICES,
)
_SHARE = Kernel("loss", "accuracy_share", "const int32* right, float* y, int64 examples")


def _examples(x: Buffer) -> tuple[int, int]:
    """Examples and everything else; a vector is one example."""
    return (1, x.size) if x.ndim < 2 else (x.shape[0], math.prod(x.shape[1:]))


@kernel("LabelCrossEntropy", device="cuda", binds=True)
def label_cross_entropy(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y[i] = -log max(X[i, label_i], 1e-20)``."""
    (x, label), (y,) = inputs, outputs
    examples, classes = _examples(x)
    arguments = (x, label, y, *report_labels(ctx, classes), examples, classes)
    return prepare(ctx, _LABEL_FWD, (x.dtype, label.dtype), arguments, elementwise(examples))


@kernel("LabelCrossEntropyGradient", device="cuda", binds=True)
def label_cross_entropy_gradient(
    inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext
) -> Launch:
    """``dX[i, label_i] = -dY[i] / max(X[i, label_i], 1e-20)``."""
    (x, label, dy), (dx,) = inputs, outputs
    examples, classes = _examples(x)
    arguments = (x, label, dy, dx, *report_labels(ctx, classes), examples, classes)
    return prepare(ctx, _LABEL_BWD, (x.dtype, label.dtype), arguments, rows(examples, classes))


@kernel("CrossEntropy", device="cuda", binds=True)
def cross_entropy(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y[i] = -sum_j label_ij log max(X_ij, 1e-20)``."""
    (x, label), (y,) = inputs, outputs
    sizes = _examples(x)
    return prepare(ctx, _CROSS_FWD, (x.dtype,), (x, label, y, *sizes), rows(*sizes))


@kernel("CrossEntropyGradient", device="cuda", binds=True)
def cross_entropy_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dX_ij = -dY_i label_ij / max(X_ij, 1e-20)``."""
    (x, label, dy), (dx,) = inputs, outputs
    sizes = _examples(x)
    return prepare(ctx, _CROSS_BWD, (x.dtype,), (x, label, dy, dx, *sizes), rows(*sizes))


def _all_axes_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    return reduction_scratch(inputs[0].shape, range(inputs[0].rank))


@kernel("AveragedLoss", device="cuda", binds=True, scratch=_all_axes_scratch)
def averaged_loss(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = mean X``."""
    (x,), (y,), (partial,) = inputs, outputs, ctx.scratch
    return reduction_launch(ctx, "Mean", x, y, range(x.ndim), partial)


@kernel("AveragedLossGradient", device="cuda", binds=True)
def averaged_loss_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dX = dY / size of X``."""
    dy, (dx,) = inputs[1], outputs
    return prepare(ctx, _AVERAGE_BWD, (dx.dtype,), (dy, dx, dx.size), elementwise(dx.size))


def _pairs(x: Buffer) -> tuple[int, int]:
    """Points and coordinates; dimension 0 counts the points."""
    return (x.size, 1) if x.ndim < 2 else _examples(x)


@kernel("SquaredL2Distance", device="cuda", binds=True)
def squared_l2_distance(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Z[i] = 0.5 * sum (X[i] - Y[i])^2``."""
    (x, y), (z,) = inputs, outputs
    sizes = _pairs(x)
    return prepare(ctx, _DISTANCE_FWD, (x.dtype,), (x, y, z, *sizes), rows(*sizes))


@kernel("SquaredL2DistanceGradient", device="cuda", binds=True)
def squared_l2_distance_gradient(
    inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext
) -> Launch:
    """``dX[i] = dZ[i] (X[i] - Y[i])``, ``dY = -dX``."""
    (x, y, dz), (dx, dy) = inputs, outputs
    sizes = _pairs(x)
    return prepare(ctx, _DISTANCE_BWD, (x.dtype,), (x, y, dz, dx, dy, *sizes), rows(*sizes))


def _sigmoid_kind(args: Arguments) -> int:
    return 1 if args.log_D_trick else 2 if args.unjoined_lr_loss else 0


def _averaged(x: Buffer) -> tuple[int, int]:
    """Losses, and scores that each is averaged over."""
    return math.prod(x.shape[:-1]), x.shape[-1]


@kernel("SigmoidCrossEntropyWithLogits", device="cuda", binds=True)
def sigmoid_cross_entropy_with_logits(
    inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext
) -> Launch:
    """``Y = -mean (t log sigmoid(x) + (1 - t) log(1 - sigmoid(x)))`` and variants."""
    (x, t), (y,) = inputs, outputs
    sizes = _averaged(x)
    return prepare(ctx, _SIGMOID_FWD, (x.dtype,), (x, t, y, *sizes, _sigmoid_kind(args)), rows(*sizes))


@kernel("SigmoidCrossEntropyWithLogitsGradient", device="cuda", binds=True)
def sigmoid_cross_entropy_with_logits_gradient(
    inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext
) -> Launch:
    """``dlogits = dY (sigmoid(x) - t) / n`` and variants."""
    (dy, x, t), (dx,) = inputs, outputs
    sizes = _averaged(x)
    return prepare(ctx, _SIGMOID_BWD, (x.dtype,), (dy, x, t, dx, *sizes, _sigmoid_kind(args)), rows(*sizes))


def _one_an_example(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    return [TensorSpec(inputs[0].shape[:1], np.dtype(np.int32))]


@kernel("Accuracy", device="cuda", binds=True, scratch=_one_an_example)
def accuracy(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Share of the examples whose class is among the ``top_k`` best scores."""
    (x, label), (y,), (right,) = inputs, outputs, ctx.scratch
    examples, classes = x.shape
    arguments = (x, label, right, *report_labels(ctx, classes), examples, classes, args.top_k)
    types = (x.dtype, label.dtype)
    each = prepare(ctx, _ACCURACY, types, arguments, rows(examples, classes)) if examples else nothing
    return in_order(each, prepare(ctx, _SHARE, (), (right, y, examples), one_block(examples)))
