"""NumPy kernels of softmax and of softmax with loss.

Sums are made in float64 and rounded once, so that their order, which is another one on a GPU, does not show.
"""

from __future__ import annotations

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.labels import check_labels
from gpunet.cpu_fallback.precision import Array, Arrays, exponential, logarithm, widened
from gpunet.errors import KernelError
from gpunet.kernels import KernelContext, kernel
from gpunet.operators.matmul import as_matrix


def _rows(array: Array, axis: int) -> Array:
    """Examples x classes."""
    if array.ndim == 2 and axis == 1:
        return array
    return array.reshape(as_matrix(array.shape, axis if axis >= 0 else axis + array.ndim))


def _shifted(x: Array, out: Array) -> None:
    """``x`` less the maximum of its row, so that no exponential overflows."""
    np.subtract(x, np.maximum.reduce(x, axis=1, keepdims=True), out=out)


def _normalized_exp(y: Array) -> Array:
    """Turns shifted scores into probabilities, in place; returns the sums of the exponentials."""
    exponential(y, out=y)
    sums = np.add.reduce(y, axis=1, keepdims=True, dtype=np.float64).astype(y.dtype)
    np.divide(y, sums, out=y)
    return sums


@kernel("Softmax")
def softmax(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``Y = exp(X - max X) / sum exp(X - max X)`` by row."""
    y = _rows(outputs[0], args.axis)
    if y.size == 0:
        return
    x = widened(_rows(inputs[0], args.axis))
    work = y if y.dtype == x.dtype else np.empty_like(x)
    _shifted(x, work)
    _normalized_exp(work)
    if work is not y:
        y[...] = work


@kernel("SoftmaxGradient")
def softmax_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dX = Y (dY - sum dY Y)`` by row."""
    y, dy = (widened(_rows(a, args.axis)) for a in inputs)
    dx = _rows(outputs[0], args.axis)
    dots = np.einsum("ij,ij->i", y, dy, dtype=np.float64, casting="same_kind").astype(y.dtype)
    if dx.dtype == y.dtype:
        np.subtract(dy, dots[:, None], out=dx)
        np.multiply(dx, y, out=dx)
    else:
        dx[...] = (dy - dots[:, None]) * y


@kernel("SoftmaxWithLoss")
def softmax_with_loss(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``loss = scale * sum w_i l_i / sum w_i``."""
    p, loss = _rows(outputs[0], args.axis), outputs[1]
    if p.size == 0:
        loss[...] = 0
        return
    x = widened(_rows(inputs[0], args.axis))
    work = p if p.dtype == x.dtype else np.empty_like(x)
    examples, classes = x.shape
    _shifted(x, work)
    if args.label_prob:
        _normalized_exp(work)
        wanted = widened(inputs[1]).reshape(examples, classes)
        _check_distribution(wanted)
        terms = logarithm(np.maximum(work, 1e-20))
        terms *= wanted
        losses: Array = -np.add.reduce(terms, axis=1, dtype=np.float64).astype(work.dtype)
    else:
        label = inputs[1].reshape(-1)
        check_labels(label, classes)
        chosen = work[np.arange(examples), label]
        losses = logarithm(_normalized_exp(work)[:, 0]) - chosen
    if work is not p:
        p[...] = work
    if len(inputs) > 2:
        weights = widened(inputs[2]).reshape(-1)
        total = np.add.reduce(weights, dtype=np.float64)
        losses *= weights
    else:
        total = examples
    divisor = examples if args.average_by_batch_size else total
    loss[...] = np.add.reduce(losses, dtype=np.float64) * (args.scale / divisor) if total != 0 else 0


def _check_distribution(label: Array) -> None:
    negative = label < 0
    if negative.any():
        i, j = (int(k) for k in np.argwhere(negative)[0])
        raise KernelError(f"label {label[i, j]} of example {i}, class {j} is negative, wanted a probability")
    wrong = np.abs(np.add.reduce(label, axis=1) - 1) > 1e-5
    if wrong.any():
        i = int(np.argmax(wrong))
        raise KernelError(
            f"the label probabilities of example {i} sum to {label[i].sum():.7g}, wanted 1 within 1e-5"
        )


@kernel("SoftmaxWithLossGradient")
def softmax_with_loss_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dX = dloss * scale * w_i (P - label) / sum w_i``."""
    dx = _rows(outputs[0], args.axis)
    if dx.size == 0:
        return
    examples, classes = dx.shape
    p, dloss = widened(inputs[-2]).reshape(examples, classes), widened(inputs[-1]).reshape(-1)[0]
    weights = widened(inputs[2]).reshape(examples, 1) if len(inputs) > 4 else None
    if weights is None or args.average_by_batch_size:
        total = float(examples)
    else:
        total = np.add.reduce(weights, axis=None, dtype=np.float64).item()
    factor = dloss * (args.scale / total) if total > 0 else dloss
    if weights is not None:
        factor = weights * factor
    work = dx if dx.dtype == p.dtype else np.empty_like(p)
    if args.label_prob:
        np.subtract(p, widened(inputs[1]).reshape(examples, classes), out=work)
        np.multiply(work, factor, out=work)
    else:
        label = inputs[1].reshape(-1)
        check_labels(label, classes)
        np.multiply(p, factor, out=work)
        work[np.arange(examples), label] -= factor if weights is None else factor[:, 0]
    if work is not dx:
        dx[...] = work
