"""Launchers of the operators that change or tell shapes, or change the order of dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpunet.arguments import Arguments
from gpunet.cuda_kernels.launch import in_order
from gpunet.cuda_kernels.pieces import Buffers, Launch, copy_launch
from gpunet.cuda_kernels.strided import against_strided, contiguous, numbers_launch, strided_launch
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.shaping import transpose_axes


@kernel("Reshape", device="cuda", binds=True)
def reshape(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The same elements in another shape, and the old shape."""
    x, (y, old_shape) = inputs[0], outputs
    return in_order(copy_launch(ctx, x, y.view(x.shape)), numbers_launch(ctx, old_shape, x.shape))


@kernel(
    "Flatten",
    "FlattenToVec",
    "ResizeLike",
    "Squeeze",
    "ExpandDims",
    "PrependDim",
    "MergeDim",
    device="cuda",
    binds=True,
)
def same_elements(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The same elements in the shape of the output."""
    x, y = inputs[0], outputs[0]
    return copy_launch(ctx, x, y.view(x.shape))


def _against_transpose(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    x, y = inputs[0], outputs[0]
    strides = contiguous(x.shape)
    return against_strided(
        y.shape, [strides[a] for a in transpose_axes(op, len(x.shape))], contiguous(y.shape)
    )


@kernel("Transpose", "NCHW2NHWC", "NHWC2NCHW", device="cuda", binds=True, against=_against_transpose)
def transpose(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Another order of the dimensions."""
    x, y = inputs[0], outputs[0]
    strides = contiguous(x.shape)
    x_strides = [strides[a] for a in transpose_axes(ctx.op, x.ndim)]
    return strided_launch(ctx, x, y, y.shape, x_strides, contiguous(y.shape))


@kernel("Shape", device="cuda", binds=True)
def shape(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The dimensions of the input; on the host, this would cost a copy of the input."""
    found = inputs[0].shape
    return numbers_launch(ctx, outputs[0], [found[a] for a in args.axes] if args.axes else found)


@kernel("Size", device="cuda", binds=True)
def size(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The number of elements of the input."""
    return numbers_launch(ctx, outputs[0], [inputs[0].size])
