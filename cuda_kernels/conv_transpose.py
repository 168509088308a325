"""Transposed convolution: cuDNN's or our own kernels of the convolution from Y to X with the same filters.

Y is that convolution's gradient of images for X, dX its result on dY, and dW its gradient of filters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import conv_direct, cudnn_execution
from gpunet.cuda_kernels.conv_direct import DIRECT
from gpunet.cuda_kernels.convolution import descriptor, prepare_graph
from gpunet.cuda_kernels.launch import elementwise, in_order, prepare
from gpunet.cuda_kernels.pieces import Buffers, Launch
from gpunet.cuda_kernels.reference import reference_launch
from gpunet.cuda_kernels.signature import FLOATS, Kernel
from gpunet.cuda_kernels.window import against_window
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.conv_transpose import TRANSPOSED, transposed_window
from gpunet.specs import TensorSpec, spec

GRADIENT: Final = f"{TRANSPOSED}Gradient"
_BIAS: Final = Kernel(
    "conv_transpose",
    "conv_transpose_bias",
    "const T* bias, T* y, int64 n, int64 channels, int64 positions",
    T=FLOATS,
)


def against(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    """Why the kernels cannot run a transposed convolution."""
    x, w = inputs[0], inputs[1]
    window = transposed_window(op.args, spec(x.shape, x.dtype), spec(w.shape, w.dtype))
    return against_window(window, math.prod(w.shape[1:]))


def _add_bias(ctx: KernelContext, bias: Sequence[Buffer], y: Buffer) -> list[Launch]:
    """What adds the bias behind a graph of cuDNN, which has no sum behind a gradient."""
    if not bias:
        return []
    positions = 1 if ctx.op.args.order == "NHWC" else math.prod(y.shape[2:])
    arguments = (bias[0], y, y.size, bias[0].size, positions)
    return [prepare(ctx, _BIAS, (y.dtype,), arguments, elementwise(y.size))]


# Without a library.


@kernel(TRANSPOSED, device="cuda", engine=DIRECT, binds=True, against=against)
def conv_transpose_direct(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``columns(Y) = W^T X``, added up where columns meet; ``+ b``."""
    x, w, *bias = inputs
    y = outputs[0]
    return conv_direct.data_gradient(ctx, y, w, x, y, bias[0] if bias else None)


def _direct_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    _, w, dy = inputs
    return conv_direct.gradient_scratch(op, [dy, w], outputs)


@kernel(GRADIENT, device="cuda", engine=DIRECT, binds=True, scratch=_direct_scratch, against=against)
def conv_transpose_gradient_direct(
    inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext
) -> Launch:
    """``dW = X columns(dY)^T``, ``dX = W columns(dY)``, db the sum of dY."""
    x, w, dy = inputs
    dw, db, dx = conv_direct.gradient_outputs(args, outputs)
    launches = [conv_direct.filter_gradient(ctx, dy, w, x, dw)]
    if db is not None:
        launches.append(conv_direct.channel_sums(ctx, dy, db))
    if dx is not None:
        launches.append(conv_direct.convolution((dy, w), (dx,), args, ctx))
    return in_order(*launches)


# With cuDNN.


def _forward_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    return [cudnn_execution.workspace(descriptor("data", op, outputs[0], inputs[1]))]


@kernel(TRANSPOSED, device="cuda", binds=True, scratch=_forward_scratch, against=against)
def conv_transpose(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``columns(Y) = W^T X``, added up where columns meet; ``+ b``."""
    if ctx.backend.simulated:
        return reference_launch(inputs, outputs, args, ctx)
    x, w, *bias = inputs
    y = outputs[0]
    after = _add_bias(ctx, bias, y)

    def direct() -> Launch:
        after.clear()
        return conv_transpose_direct(inputs, outputs, args, ctx)

    launch = prepare_graph(ctx, descriptor("data", ctx.op, y, w), {"x": y, "w": w, "y": x}, direct)
    return in_order(launch, *after)


def _gradient_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    _, w, dy = inputs
    _, _, dx = conv_direct.gradient_outputs(op.args, outputs)
    graphs = [descriptor(kind, op, dy, w) for kind in ("filter", *["forward"] * (dx is not None))]
    return [*_direct_scratch(op, inputs, outputs), cudnn_execution.workspace(*graphs)]


@kernel(GRADIENT, device="cuda", binds=True, scratch=_gradient_scratch, against=against)
def conv_transpose_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dW = X columns(dY)^T``, ``dX = W columns(dY)``, db the sum of dY: a kernel of our own."""
    if ctx.backend.simulated:
        return reference_launch(inputs, outputs, args, ctx)
    x, w, dy = inputs
    dw, db, dx = conv_direct.gradient_outputs(args, outputs)
    launches = [
        prepare_graph(
            ctx,
            descriptor("filter", ctx.op, dy, w),
            {"x": dy, "w": dw, "y": x},
            lambda: conv_direct.filter_gradient(ctx, dy, w, x, dw),
        )
    ]
    if db is not None:
        launches.append(conv_direct.channel_sums(ctx, dy, db))
    if dx is not None:
        launches.append(
            prepare_graph(
                ctx,
                descriptor("forward", ctx.op, dy, w),
                {"x": dy, "w": w, "y": dx},
                lambda: conv_direct.convolution((dy, w), (dx,), args, ctx),
            )
        )
    return in_order(*launches)
