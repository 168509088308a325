"""NumPy kernels of the losses and metrics."""

from __future__ import annotations

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.labels import check_labels
from gpunet.cpu_fallback.precision import Array, Arrays, widened
from gpunet.kernels import KernelContext, kernel

#: Probabilities below this count as this in a logarithm.
_SMALLEST = 1e-20


def _examples(array: Array) -> Array:
    """Examples x everything else; a vector is one example."""
    if array.ndim < 2:
        return array.reshape(1, array.size)
    if array.ndim == 2:
        return array
    return array.reshape(array.shape[0], int(np.prod(array.shape[1:])))


@kernel("LabelCrossEntropy")
def label_cross_entropy(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``Y[i] = -log max(X[i, label_i], 1e-20)``."""
    x, label = _examples(inputs[0]), inputs[1].reshape(-1)
    check_labels(label, x.shape[1])
    chosen = widened(x[np.arange(len(x)), label])
    np.negative(np.log(np.maximum(chosen, _SMALLEST)), out=outputs[0])


@kernel("LabelCrossEntropyGradient")
def label_cross_entropy_gradient(
    inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext
) -> None:
    """``dX[i, label_i] = -dY[i] / max(X[i, label_i], 1e-20)``."""
    x, label, dx = _examples(inputs[0]), inputs[1].reshape(-1), _examples(outputs[0])
    check_labels(label, x.shape[1])
    rows = np.arange(len(x))
    dx.fill(0)
    dx[rows, label] = -inputs[2] / np.maximum(widened(x[rows, label]), _SMALLEST)


@kernel("CrossEntropy")
def cross_entropy(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``Y[i] = -sum_j label_ij log max(X_ij, 1e-20)``."""
    x, label = (widened(_examples(a)) for a in inputs)
    terms = np.log(np.maximum(x, _SMALLEST))
    terms *= label
    np.negative(np.add.reduce(terms, axis=1), out=outputs[0])


@kernel("CrossEntropyGradient")
def cross_entropy_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dX_ij = -dY_i label_ij / max(X_ij, 1e-20)``."""
    x, label = (widened(_examples(a)) for a in inputs[:2])
    factors = np.negative(inputs[2])[:, None] * label
    np.divide(factors, np.maximum(x, _SMALLEST), out=_examples(outputs[0]))


@kernel("AveragedLoss")
def averaged_loss(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``Y = mean X``."""
    x = inputs[0]
    outputs[0][...] = np.add.reduce(widened(x), axis=None) / x.size if x.size else 0


@kernel("AveragedLossGradient")
def averaged_loss_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dX = dY / size of X``."""
    dx = outputs[0]
    if dx.size:
        dx[...] = widened(inputs[1]).reshape(()) / dx.size


def _pairs(array: Array) -> Array:
    """Points x coordinates; dimension 0 counts the points."""
    return array.reshape(-1, 1) if array.ndim < 2 else _examples(array)


@kernel("SquaredL2Distance")
def squared_l2_distance(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``Z[i] = 0.5 * sum (X[i] - Y[i])^2``."""
    difference = _pairs(np.subtract(widened(inputs[0]), widened(inputs[1])))
    np.multiply(np.einsum("ij,ij->i", difference, difference), 0.5, out=outputs[0])


@kernel("SquaredL2DistanceGradient")
def squared_l2_distance_gradient(
    inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext
) -> None:
    """``dX[i] = dZ[i] (X[i] - Y[i])``, ``dY = -dX``."""
    dx, dy = outputs
    np.subtract(inputs[0], inputs[1], out=dx)
    np.multiply(dx, inputs[2].reshape(inputs[2].shape[: dx.ndim] + (1,) * (dx.ndim - 1)), out=dx)
    np.negative(dx, out=dy)


# Write s for log(1 + exp(-|x|)): then log sigmoid(x) = min(x, 0) - s and log(1 - sigmoid(x)) = -max(x, 0) -
# s, and no exponential overflows.


@kernel("SigmoidCrossEntropyWithLogits")
def sigmoid_cross_entropy_with_logits(
    inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext
) -> None:
    """``Y = -mean (t log sigmoid(x) + (1 - t) log(1 - sigmoid(x)))`` and variants."""
    x, t = (widened(a) for a in inputs)
    if x.size == 0:
        outputs[0].fill(0)
        return
    soft = np.log1p(np.exp(-np.abs(x)))
    if args.log_D_trick:
        values = (2 * t - 1) * (np.minimum(x, 0) - soft)
    elif args.unjoined_lr_loss:
        values = t * x - (1 - t) * (np.maximum(x, 0) + soft)
    else:
        values = t * x - np.maximum(x, 0) - soft
    outputs[0][...] = np.add.reduce(values, axis=-1) / -x.shape[-1]


@kernel("SigmoidCrossEntropyWithLogitsGradient")
def sigmoid_cross_entropy_with_logits_gradient(
    inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext
) -> None:
    """``dlogits = dY (sigmoid(x) - t) / n`` and variants."""
    dy, x, t = (widened(a) for a in inputs)
    if x.size == 0:
        return
    sigmoid = 0.5 * np.tanh(0.5 * x) + 0.5
    if args.log_D_trick:
        values = (1 - 2 * t) * (1 - sigmoid)
    elif args.unjoined_lr_loss:
        values = (1 - t) * sigmoid - t
    else:
        values = sigmoid - t
    np.multiply(values, dy[..., None] / x.shape[-1], out=outputs[0])


@kernel("Accuracy")
def accuracy(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Share of the examples whose class is among the ``top_k`` best scores."""
    x, labels = inputs
    examples, classes = x.shape
    check_labels(labels, classes)
    chosen = x[np.arange(examples), labels][:, None]
    better = (x > chosen) | ((x == chosen) & (np.arange(classes) < labels[:, None]))
    right = np.count_nonzero(np.count_nonzero(better, axis=1) < args.top_k)
    # Without examples the share does not exist.
    outputs[0][...] = right / examples if examples else np.nan
