"""NumPy kernels of the operators that change or tell shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.kernels import KernelContext, kernel
from gpunet.operators.shaping import resolve_shape, transpose_axes

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]


def _nothing() -> None:
    """What is left to do where the output is the input's memory in another shape."""


def _copy_elements(x: Array, y: Array) -> Callable[[], None]:
    """Copies the elements of ``x``, in row-major order, to ``y``, unless they share memory."""
    if x.__array_interface__["data"][0] == y.__array_interface__["data"][0]:
        return _nothing
    if y.flags.c_contiguous:
        view = y.reshape(x.shape)
        return lambda: np.copyto(view, x)
    return lambda: np.copyto(y, x.reshape(y.shape))


@kernel("Reshape", binds=True, bfloat16=True)
def reshape(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Callable[[], Any]:
    """The same elements in another shape, and the old shape."""
    x = inputs[0]
    if not outputs:
        return lambda: _reshape_by_input(inputs, ctx)
    copy, old_shape, dims = _copy_elements(x, outputs[0]), outputs[1], x.shape

    def run() -> None:
        copy()
        old_shape[...] = dims

    return run


def _reshape_by_input(inputs: Arrays, ctx: KernelContext) -> Arrays:
    x, new_shape = inputs
    shape = resolve_shape(x.shape, tuple(new_shape.tolist()))
    in_place = ctx.op.inputs[0] == ctx.op.outputs[0]
    y = x.reshape(shape) if in_place else np.array(x, order="C").reshape(shape)
    return y, np.array(x.shape, np.int64)


@kernel(
    "Flatten",
    "FlattenToVec",
    "ResizeLike",
    "Squeeze",
    "ExpandDims",
    "PrependDim",
    "MergeDim",
    binds=True,
    bfloat16=True,
)
def same_elements(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Callable[[], None]:
    """The same elements in the shape of the output."""
    return _copy_elements(inputs[0], outputs[0])


@kernel("Transpose", "NCHW2NHWC", "NHWC2NCHW", binds=True, bfloat16=True)
def transpose(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Callable[[], None]:
    """Another order of the dimensions."""
    y, view = outputs[0], inputs[0].transpose(transpose_axes(ctx.op, inputs[0].ndim))
    return lambda: np.copyto(y, view)


@kernel("Shape", bfloat16=True)
def shape(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """The dimensions of the input."""
    found = inputs[0].shape
    outputs[0][...] = [found[a] for a in args.axes] if args.axes else found


@kernel("Size", bfloat16=True)
def size(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """The number of elements of the input."""
    outputs[0][...] = inputs[0].size
