"""Launchers of the matrix products: FC, MatMul, BatchMatMul; see :mod:`gpunet.cuda_kernels.gemm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.broadcast import launch_sum, plan_sum
from gpunet.cuda_kernels.gemm import matmul
from gpunet.cuda_kernels.launch import in_order
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.matmul import as_matrix
from gpunet.specs import Shape, TensorSpec

Buffers = tuple[Buffer, ...]
Launch = Callable[[], None]


def _split(shape: Shape, axis: int) -> tuple[int, int]:
    return as_matrix(shape, axis if axis >= 0 else axis + len(shape))


def _matrix(buffer: Buffer, axis: int) -> Buffer:
    return buffer.view(_split(buffer.shape, axis))


def fully_connected(
    inputs: Buffers,
    outputs: Buffers,
    args: Arguments,
    ctx: KernelContext,
    trans_b: bool,
    *,
    relu: bool = False,
) -> Launch:
    """``Y = act(X op(W) + b)``."""
    x, w, bias = inputs
    x, w = _matrix(x, args.axis), _matrix(w, args.axis_w)
    y = outputs[0].view((x.shape[0], bias.size))
    return matmul(ctx, x, w, y, trans_b=trans_b, bias=bias, relu=relu)


@kernel("FC", device="cuda", binds=True)
def fc(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = X W^T + b``."""
    return fully_connected(inputs, outputs, args, ctx, trans_b=True)


@kernel("FCTransposed", device="cuda", binds=True)
def fc_transposed(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = X W + b``."""
    return fully_connected(inputs, outputs, args, ctx, trans_b=False)


def _bias_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    rows, columns = _split(inputs[0].shape, op.args.axis)[0], outputs[1].shape[0]
    partial = plan_sum((rows, columns), (1, columns)).partial
    return [] if partial is None else [partial]


def _bias_gradient(ctx: KernelContext, dy: Buffer, db: Buffer) -> Launch:
    """Sums the rows of dY, float32 in float64 as the CPU's kernel does."""
    rows, columns = dy.shape
    if rows == 1:
        return partial(ctx.backend.copy, db, dy, ctx.stream)
    scratch = ctx.scratch[0] if ctx.scratch else None
    return launch_sum(ctx, dy, db, (rows, columns), (1, columns), scratch, wide=True)


@kernel("FCGradient", device="cuda", binds=True, scratch=_bias_scratch)
def fc_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dW = dY^T X``, ``db`` the sum of the rows of dY, ``dX = dY W``."""
    x, w = _matrix(inputs[0], args.axis), _matrix(inputs[1], args.axis_w)
    dw, db = _matrix(outputs[0], args.axis_w), outputs[1]
    dy = inputs[2].view((x.shape[0], db.size))
    launches = [matmul(ctx, dy, x, dw, trans_a=True), _bias_gradient(ctx, dy, db)]
    if len(outputs) > 2:
        launches.append(matmul(ctx, dy, w, _matrix(outputs[2], args.axis)))
    return in_order(*launches)


@kernel("FCTransposedGradient", device="cuda", binds=True, scratch=_bias_scratch)
def fc_transposed_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dW = X^T dY``, ``db`` the sum of the rows of dY, ``dX = dY W^T``."""
    x, w = _matrix(inputs[0], args.axis), _matrix(inputs[1], args.axis_w)
    dw, db = _matrix(outputs[0], args.axis_w), outputs[1]
    dy = inputs[2].view((x.shape[0], db.size))
    launches = [matmul(ctx, x, dy, dw, trans_a=True), _bias_gradient(ctx, dy, db)]
    if len(outputs) > 2:
        launches.append(matmul(ctx, dy, w, _matrix(outputs[2], args.axis), trans_b=True))
    return in_order(*launches)


@kernel("MatMul", device="cuda", binds=True)
def mat_mul(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = op(A) op(B)`` of matrices."""
    a, b = _matrix(inputs[0], args.axis_a), _matrix(inputs[1], args.axis_b)
    y = outputs[0].view((a.shape[1 if args.trans_a else 0], b.shape[0 if args.trans_b else 1]))
    return matmul(ctx, a, b, y, trans_a=args.trans_a, trans_b=args.trans_b)


@kernel("BatchMatMul", device="cuda", binds=True)
def batch_mat_mul(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y[i] = op(A[i]) op(B[i])``; vectors are a row in A, a column in B."""
    a, b = inputs
    y = outputs[0]
    trans_a, trans_b = args.trans_a and a.ndim > 1, args.trans_b and b.ndim > 1
    batch = y.shape[: y.ndim - (a.ndim > 1) - (b.ndim > 1)]
    if a.ndim == 1 and b.ndim == 1:
        batch = ()
    a = a.view((1, a.size)) if a.ndim == 1 else a
    b = b.view((b.size, 1)) if b.ndim == 1 else b
    m, n = a.shape[-1 if trans_a else -2], b.shape[-2 if trans_b else -1]
    return matmul(ctx, a, b, y.view((*batch, m, n)), trans_a=trans_a, trans_b=trans_b)
