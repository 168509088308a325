"""Launchers of numbers of 8 bits.

Symmetric convolutions take cuDNN's sums in whole numbers of 32 bits, which a kernel of our own rounds to 8:
results are those of the other kernel and of the CPU, bit for bit. Where cuDNN has no plan, and where there
are zero points, that other kernel (engine ``DIRECT``) computes all of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cuda_kernels import cudnn_execution
from gpunet.cuda_kernels.conv_direct import DIRECT, INSTEAD, SIZES, forward_plan, window_of
from gpunet.cuda_kernels.convolution import descriptor as convolution_descriptor
from gpunet.cuda_kernels.cudnn import NoPlanError
from gpunet.cuda_kernels.cudnn_graphs import Convolution
from gpunet.cuda_kernels.launch import elementwise, in_order, prepare
from gpunet.cuda_kernels.pieces import Buffers, Launch, nothing
from gpunet.cuda_kernels.signature import FLOATS, Kernel
from gpunet.cuda_kernels.window import against_window
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.quantization import scale_steps
from gpunet.specs import TensorSpec, spec

_BYTES: Final = ("int8", "uint8")
_STEPS: Final = "int64 n, int64 count, int64 inner"
_QUANTIZE = Kernel(
    "quantization",
    "quantize_fwd",
    f"const T* x, const float* scale, const Q* zero, Q* y, {_STEPS}",
    T=FLOATS,
    Q=_BYTES,
)
_DEQUANTIZE = Kernel(
    "quantization",
    "dequantize_fwd",
    f"const Q* x, const float* scale, const Q* zero, float* y, {_STEPS}",
    Q=(*_BYTES, "int32"),
)
_CONVOLUTION = Kernel(
    "quantization",
    "qconv_fwd",
    "const X* x, const float* x_scale, const X* x_zero, const W* w, const float* w_scale, const W* w_zero, "
    "const float* y_scale, const Y* y_zero, const int32* bias, Y* y, int32 scale_step, int32 zero_step, "
    f"{SIZES}",
    X=_BYTES,
    W=_BYTES,
    Y=_BYTES,
)
_REQUANTIZE = Kernel(
    "quantization",
    "requantize",
    "const int32* sums, const float* x_scale, const float* w_scale, const float* y_scale, const Y* y_zero, "
    "const int32* bias, Y* y, int64 n, int64 filters, int64 inner, int32 scale_step",
    Y=_BYTES,
)


@kernel("QuantizeLinear", device="cuda", binds=True)
def quantize(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``saturate(round(X / scale) + zero point)``."""
    x, scale, *zero = inputs
    (y,) = outputs
    steps = scale_steps(args, x, scale)
    arguments = (x, scale, zero[0] if zero else None, y, x.size, *steps)
    return prepare(ctx, _QUANTIZE, (x.dtype, y.dtype), arguments, elementwise(x.size))


@kernel("DequantizeLinear", device="cuda", binds=True)
def dequantize(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``(X - zero point) scale``."""
    x, scale, *zero = inputs
    steps = scale_steps(args, x, scale)
    arguments = (x, scale, zero[0] if zero else None, outputs[0], x.size, *steps)
    return prepare(ctx, _DEQUANTIZE, (x.dtype,), arguments, elementwise(x.size))


def _against(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    x, w = inputs[0], inputs[3]
    size = int(np.prod(w.shape[1:], dtype=np.int64))
    return against_window(window_of(op, x, w), size)


@kernel("QLinearConv", device="cuda", engine=DIRECT, binds=True, against=_against)
def direct(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``saturate(round((sum (X - x0) (W - w0) + B) X_scale W_scale / Y_scale) + y0)``."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, *bias = inputs
    (y,) = outputs
    if y.size == 0:
        return nothing
    zeros = (None, None) if args.symmetric else (x_zero, w_zero)
    sizes, grid = forward_plan(ctx.op, x, w)
    arguments = (
        *(x, x_scale, zeros[0], w, w_scale, zeros[1], y_scale, y_zero, bias[0] if bias else None, y),
        *(int(w_scale.size > 1), int(w_zero.size > 1), *sizes),
    )
    return prepare(ctx, _CONVOLUTION, (x.dtype, w.dtype, y.dtype), arguments, grid)


def descriptor(op: Operator, x: Any, w: Any) -> Convolution:
    """The graph of the sums of a symmetric convolution on X and W, given as specs or buffers."""
    return dataclasses.replace(convolution_descriptor("forward", op, x, w), result="int32")


def _scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    """The sums, and a workspace."""
    if not op.args.symmetric:
        return []
    workspace = cudnn_execution.workspace(descriptor(op, inputs[0], inputs[3]))
    return [spec(outputs[0].shape, np.int32), workspace]


@kernel("QLinearConv", device="cuda", binds=True, scratch=_scratch, against=_against)
def convolve(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The sums by cuDNN in 32 bits and their rounding, or all by the other kernel."""
    (y,) = outputs
    if not args.symmetric or ctx.backend.simulated or y.size == 0:
        return direct(inputs, outputs, args, ctx)
    x, x_scale, _, w, w_scale, _, y_scale, y_zero, *bias = inputs
    sums, workspace = ctx.scratch
    try:
        add = cudnn_execution.prepare(ctx, descriptor(ctx.op, x, w), {"x": x, "w": w, "y": sums}, workspace)
    except NoPlanError as error:
        cudnn_execution.tell(ctx, error, INSTEAD)
        return direct(inputs, outputs, args, ctx)
    window, filters = window_of(ctx.op, x, w), w.shape[0]
    inner = 1 if window.channels_last else window.positions
    arguments = (
        *(sums, x_scale, w_scale, y_scale, y_zero, bias[0] if bias else None, y),
        *(y.size, filters, inner, int(w_scale.size > 1)),
    )
    return in_order(add, prepare(ctx, _REQUANTIZE, (y.dtype,), arguments, elementwise(y.size)))
