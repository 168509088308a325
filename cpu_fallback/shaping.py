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


def _in_place(x: Array, y: Array) -> bool:
    """Whether ``y`` is a view of all of ``x``."""
    return bool(x.__array_interface__["data"][0] == y.__array_interface__["data"][0])


def copy_elements(x: Array, y: Array) -> None:
    """Copies the elements of ``x``, in row-major order, to ``y``, unless they share memory."""
    if _in_place(x, y):
        return
    if y.flags.c_contiguous:
        np.copyto(y.reshape(x.shape), x)
    else:
        np.copyto(y, x.reshape(y.shape))


@kernel("Reshape")
def reshape(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Arrays | None:
    """The same elements in another shape, and the old shape."""
    x = inputs[0]
    if outputs:
        copy_elements(x, outputs[0])
        outputs[1][...] = x.shape
        return None
    shape = resolve_shape(x.shape, tuple(inputs[1].tolist()))
    in_place = ctx.op.inputs[0] == ctx.op.outputs[0]
    y = x.reshape(shape) if in_place else np.array(x, order="C").reshape(shape)
    return y, np.array(x.shape, np.int64)


@kernel("Flatten", "FlattenToVec", "ResizeLike", "Squeeze", "ExpandDims", "PrependDim", "MergeDim")
def same_elements(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """The same elements in the shape of the output."""
    copy_elements(inputs[0], outputs[0])


@kernel("Transpose", "NCHW2NHWC", "NHWC2NCHW", binds=True)
def transpose(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Callable[[], None]:
    """Another order of the dimensions."""
    y, view = outputs[0], inputs[0].transpose(transpose_axes(ctx.op, inputs[0].ndim))
    return lambda: np.copyto(y, view)


@kernel("Shape")
def shape(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """The dimensions of the input."""
    found = inputs[0].shape
    outputs[0][...] = [found[a] for a in args.axes] if args.axes else found


@kernel("Size")
def size(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """The number of elements of the input."""
    outputs[0][...] = inputs[0].size
