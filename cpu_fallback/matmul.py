"""NumPy kernels of the matrix products."""

from __future__ import annotations

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.precision import Array, Arrays, matmul, sum_dtype
from gpunet.kernels import KernelContext, kernel
from gpunet.operators.matmul import as_matrix


def _matrix(array: Array, axis: int) -> Array:
    if array.ndim == 2 and axis == 1:
        return array
    return array.reshape(as_matrix(array.shape, axis if axis >= 0 else axis + array.ndim))


def _forward(inputs: Arrays, outputs: Arrays, args: Arguments, transposed: bool) -> None:
    x, w, b = inputs
    rows, weights = _matrix(x, args.axis), _matrix(w, args.axis_w)
    y = outputs[0].reshape(len(rows), b.size)
    matmul(rows, weights if transposed else weights.T, y)
    np.add(y, b, out=y)


def _backward(inputs: Arrays, outputs: Arrays, args: Arguments, transposed: bool) -> None:
    x, w = _matrix(inputs[0], args.axis), _matrix(inputs[1], args.axis_w)
    dw, db = _matrix(outputs[0], args.axis_w), outputs[1]
    dy = inputs[2].reshape(len(x), db.size)
    if transposed:
        matmul(x.T, dy, dw)
    else:
        matmul(dy.T, x, dw)
    db[...] = np.add.reduce(dy, axis=0, dtype=sum_dtype(dy.dtype))
    if len(outputs) > 2:
        matmul(dy, w.T if transposed else w, _matrix(outputs[2], args.axis))


@kernel("FC")
def fc(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``Y = X W^T + b``."""
    _forward(inputs, outputs, args, transposed=False)


@kernel("FCTransposed")
def fc_transposed(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``Y = X W + b``."""
    _forward(inputs, outputs, args, transposed=True)


@kernel("FCGradient")
def fc_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dW = dY^T X``, ``db`` the sum of the rows of dY, ``dX = dY W``."""
    _backward(inputs, outputs, args, transposed=False)


@kernel("FCTransposedGradient")
def fc_transposed_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dW = X^T dY``, ``db`` the sum of the rows of dY, ``dX = dY W^T``."""
    _backward(inputs, outputs, args, transposed=True)


@kernel("MatMul")
def mat_mul(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``Y = op(A) op(B)`` of matrices."""
    a, b = _matrix(inputs[0], args.axis_a), _matrix(inputs[1], args.axis_b)
    a, b = a.T if args.trans_a else a, b.T if args.trans_b else b
    matmul(a, b, outputs[0].reshape(a.shape[0], b.shape[1]))


@kernel("BatchMatMul")
def batch_mat_mul(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``Y[i] = op(A[i]) op(B[i])``; vectors are a row in A, a column in B."""
    a, b = inputs
    a = a[None, :] if a.ndim == 1 else a.swapaxes(-1, -2) if args.trans_a else a
    b = b[:, None] if b.ndim == 1 else b.swapaxes(-1, -2) if args.trans_b else b
    y = outputs[0]
    if inputs[0].ndim > 1 and inputs[1].ndim > 1:
        matmul(a, b, y)
    else:
        batch = a.shape[:-2] if a.ndim > b.ndim else b.shape[:-2]
        matmul(a, b, y.reshape(*batch, a.shape[-2], b.shape[-1]))
