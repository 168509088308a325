"""Shaping: operators that give a tensor another shape or order of dimensions, and those that tell shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpunet.arguments import REQUIRED, Int, Ints
from gpunet.errors import ArgumentError, DataTypeError, ShapeError
from gpunet.gradient_maker import GradientBuilder
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from gpunet.rules import canonical_axis, describe
from gpunet.schema import INDICES, NO_GRADIENT, GradientFunction, Input, Output, register
from gpunet.specs import Shape, TensorSpec, format_shape


def resolve_shape(found: Shape, wanted: Sequence[int]) -> Shape:
    """The shape after a Reshape of ``found`` to ``wanted``: 0 copies the dimension, one -1 is the rest.

    In an empty tensor, a 0 that cannot mean the dimension of the input at its place is taken as it stands.
    Raises :class:`ShapeError` where the elements do not fit.
    """
    size = math.prod(found)
    copied = [found[i] if n == 0 and i < len(found) else n for i, n in enumerate(wanted)]
    if size == 0 and 0 not in copied and -1 not in wanted:
        copied = list(wanted)
    if wanted.count(-1) > 1 or any(n < -1 for n in wanted):
        raise ShapeError(
            f"new shape {list(wanted)} is malformed, wanted dimensions of 0 or more and at most one -1"
        )
    if any(n == 0 and i >= len(found) for i, n in enumerate(wanted)) and size != 0:
        raise ShapeError(
            f"new shape {list(wanted)} copies a dimension that {format_shape(found)} does not have"
        )
    if -1 in copied:
        known = math.prod(n for n in copied if n != -1)
        rest = size // known if known else 0
        copied[copied.index(-1)] = rest
    if math.prod(copied) != size:
        raise ShapeError(
            f"new shape {list(wanted)} has no room for {format_shape(found)}, wanted {size} elements"
        )
    return tuple(copied)


def _infer_reshape(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec | None]:
    x = inputs[0]
    old_shape = TensorSpec((x.rank,), np.dtype(np.int64), x.shape)
    wanted = op.args.shape
    if len(inputs) == 2:
        if inputs[1].dtype not in INDICES or inputs[1].rank != 1:
            raise DataTypeError(
                f"{describe(op, 1, inputs[1])} cannot be a shape, wanted 1-dimensional int64 or int32"
            )
        if inputs[1].known is None:
            return [None, old_shape]
        wanted = inputs[1].known
    try:
        return [x.with_shape(*resolve_shape(x.shape, wanted)), old_shape]
    except ShapeError as error:
        raise ShapeError(f"{describe(op, 0, x)}: {error}") from None


def _check_reshape(op: Operator) -> None:
    if op.args.has("shape") == (len(op.inputs) == 2):
        found = "both" if op.args.has("shape") else "neither"
        raise ArgumentError(f"has {found} of argument 'shape' and input new_shape, wanted one")


def _reshape_gradient(g: GradientBuilder) -> list[OperatorDef]:
    g.copy_arguments = False
    dx = g.input_grad(0)
    return g.single("Reshape", [g.output_grad(0), g.output(1)], [dx, f"_{dx}_dims"])


register(
    "Reshape",
    inputs=[
        Input("X", "tensor of any shape"),
        Input("new_shape", "the new shape, as argument shape", INDICES, optional=True),
    ],
    outputs=[Output("Y", "the elements of X in the new shape"), Output("old_shape", "shape of X, int64")],
    args=[
        Ints(
            "shape", (), "new shape; 0 copies the dimension at its place, one -1 stands for all that is left"
        )
    ],
    inplace=[(0, 0)],
    view=True,
    infer=_infer_reshape,
    check=_check_reshape,
    gradient=_reshape_gradient,
    dynamic=lambda op: len(op.inputs) == 2,
    doc="The same elements, in row-major order, in another shape.",
)


def _gradient_like_input(g: GradientBuilder) -> list[OperatorDef]:
    return g.single("ResizeLike", [g.output_grad(0), g.input(0)], [g.input_grad(0)])


def _infer_flatten(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    shape = inputs[0].shape
    axis = canonical_axis(op.args.axis, len(shape), inclusive=True)
    return [inputs[0].with_shape(math.prod(shape[:axis]), math.prod(shape[axis:]))]


register(
    "Flatten",
    inputs=[Input("X", "tensor of any shape")],
    outputs=[Output("Y", "matrix with the elements of X")],
    args=[Int("axis", 1, "first dimension that counts as columns, 0 to the number of dimensions")],
    inplace=[(0, 0)],
    view=True,
    infer=_infer_flatten,
    gradient=_gradient_like_input,
    doc="A matrix whose rows run over the dimensions before ``axis`` and whose columns over the others.",
)
register(
    "FlattenToVec",
    inputs=[Input("X", "tensor of any shape")],
    outputs=[Output("Y", "vector with the elements of X")],
    inplace=[(0, 0)],
    view=True,
    infer=lambda op, inputs: [inputs[0].with_shape(inputs[0].size)],
    gradient=_gradient_like_input,
    doc="A vector of all elements.",
)


def _infer_resize_like(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    if inputs[0].size != inputs[1].size:
        raise ShapeError(
            f"{describe(op, 0, inputs[0])} and {describe(op, 1, inputs[1])} differ in size, wanted equal ones"
        )
    return [inputs[0].with_shape(*inputs[1].shape)]


register(
    "ResizeLike",
    inputs=[Input("X", "tensor of any shape"), Input("like", "tensor of the wanted shape and the same size")],
    outputs=[Output("Y", "the elements of X in the shape of like")],
    inplace=[(0, 0)],
    view=True,
    infer=_infer_resize_like,
    doc="The same elements, in row-major order, in the shape of another tensor.",
)


def _check_dims(op: Operator) -> None:
    if not op.args.dims or min(op.args.dims) < 0:
        raise ArgumentError(
            f"argument 'dims' is {list(op.args.dims)}, wanted at least one dimension, none negative"
        )


def _infer_squeeze(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    shape, dims = inputs[0].shape, set(op.args.dims)
    for d in sorted(dims):
        if d >= len(shape) or shape[d] != 1:
            found = f"no dimension {d}" if d >= len(shape) else f"{shape[d]} in dimension {d}"
            raise ShapeError(f"{describe(op, 0, inputs[0])} has {found}, wanted 1 to squeeze it")
    return [inputs[0].with_shape(*(n for i, n in enumerate(shape) if i not in dims))]


def _infer_expand_dims(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    shape = list(inputs[0].shape)
    for d in sorted(set(op.args.dims)):
        if d > len(shape):
            raise ShapeError(f"{describe(op, 0, inputs[0])} has too few dimensions to insert one at {d}")
        shape.insert(d, 1)
    return [inputs[0].with_shape(*shape)]


def _gradient_by(inverse: str) -> GradientFunction:
    """The gradient of a shape change is the inverse one, with the same arguments."""

    def gradient(g: GradientBuilder) -> list[OperatorDef]:
        return g.single(inverse, [g.output_grad(0)], [g.input_grad(0)])

    return gradient


register(
    "Squeeze",
    inputs=[Input("X", "tensor with dimensions of size 1")],
    outputs=[Output("Y", "X without the dimensions dims")],
    args=[Ints("dims", REQUIRED, "the dimensions to leave out, counted in X; repeated ones count once")],
    inplace=[(0, 0)],
    view=True,
    infer=_infer_squeeze,
    check=_check_dims,
    gradient=_gradient_by("ExpandDims"),
    doc="Leaves out dimensions of size 1.",
)
register(
    "ExpandDims",
    inputs=[Input("X", "tensor of any shape")],
    outputs=[Output("Y", "X with dimensions of size 1 put in")],
    args=[Ints("dims", REQUIRED, "the dimensions to put in, counted in Y; repeated ones count once")],
    inplace=[(0, 0)],
    view=True,
    infer=_infer_expand_dims,
    check=_check_dims,
    gradient=_gradient_by("Squeeze"),
    doc="Puts in dimensions of size 1.",
)


def _infer_prepend_dim(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    shape, n = inputs[0].shape, op.args.dim_size
    if not shape or n <= 0 or shape[0] % n:
        raise ShapeError(
            f"{describe(op, 0, inputs[0])} cannot be split in {n}, wanted a divisor of its first dimension"
        )
    return [inputs[0].with_shape(n, shape[0] // n, *shape[1:])]


def _infer_merge_dim(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    shape = inputs[0].shape
    if len(shape) < 2:
        raise ShapeError(f"{describe(op, 0, inputs[0])} has {len(shape)} dimensions, wanted at least 2")
    return [inputs[0].with_shape(shape[0] * shape[1], *shape[2:])]


def _prepend_dim_gradient(g: GradientBuilder) -> list[OperatorDef]:
    g.copy_arguments = False
    return g.single("MergeDim", [g.output_grad(0)], [g.input_grad(0)])


register(
    "PrependDim",
    inputs=[Input("X", "tensor of at least one dimension")],
    outputs=[Output("Y", "tensor of shape (dim_size, rows / dim_size, ...)")],
    args=[Int("dim_size", REQUIRED, "size of the new first dimension, a divisor of the old one")],
    inplace=[(0, 0)],
    view=True,
    infer=_infer_prepend_dim,
    gradient=_prepend_dim_gradient,
    doc="Splits the first dimension in two.",
)
register(
    "MergeDim",
    inputs=[Input("X", "tensor of at least two dimensions")],
    outputs=[Output("Y", "tensor whose first dimension is the product of the first two of X")],
    inplace=[(0, 0)],
    view=True,
    infer=_infer_merge_dim,
    doc="Merges the first two dimensions.",
)


def transpose_axes(op: Operator, rank: int) -> tuple[int, ...]:
    """The dimensions of the input in the order of the output, for Transpose and the order switches."""
    if op.type == "NCHW2NHWC":
        return (0, *range(2, rank), 1)
    if op.type == "NHWC2NCHW":
        return (0, rank - 1, *range(1, rank - 1))
    return tuple(op.args.axes) or tuple(range(rank))[::-1]


def _infer_transpose(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    x = inputs[0]
    if op.type != "Transpose" and x.rank < 3:
        raise ShapeError(f"{describe(op, 0, x)} has {x.rank} dimensions, wanted at least 3")
    axes = transpose_axes(op, x.rank)
    if sorted(axes) != list(range(x.rank)):
        raise ArgumentError(f"argument 'axes' is {list(axes)}, wanted a permutation for {describe(op, 0, x)}")
    return [x.with_shape(*(x.shape[a] for a in axes))]


def _transpose_gradient(g: GradientBuilder) -> list[OperatorDef]:
    g.copy_arguments = False
    made = g.make("Transpose", [g.output_grad(0)], [g.input_grad(0)])
    for arg in g.op.definition.arg:
        copy = made.arg.add()
        copy.CopyFrom(arg)
        if arg.name == "axes":
            copy.ints[:] = sorted(range(len(arg.ints)), key=arg.ints.__getitem__)
    return [made]


register(
    "Transpose",
    inputs=[Input("X", "tensor of any shape")],
    outputs=[Output("Y", "tensor with the dimensions of X in another order")],
    args=[Ints("axes", (), "dimension i of Y is dimension axes[i] of X; reversed order where it is empty")],
    infer=_infer_transpose,
    gradient=_transpose_gradient,
    doc="Changes the order of the dimensions.",
)
for _from, _to in (("NCHW", "NHWC"), ("NHWC", "NCHW")):
    register(
        f"{_from}2{_to}",
        inputs=[Input("X", f"images in {_from} order, with any number of spatial dimensions from 1")],
        outputs=[Output("Y", f"images in {_to} order")],
        infer=_infer_transpose,
        gradient=_gradient_by(f"{_to}2{_from}"),
        doc=f"From {_from} to {_to} order.",
    )


def _infer_shape(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    shape = inputs[0].shape
    chosen = tuple(shape[canonical_axis(axis, len(shape), "axes")] for axis in op.args.axes) or shape
    return [TensorSpec((len(chosen),), np.dtype(np.int64), chosen)]


register(
    "Shape",
    inputs=[Input("X", "tensor of any shape")],
    outputs=[Output("shape", "int64 vector")],
    args=[Ints("axes", (), "the dimensions to tell, all where it is empty")],
    infer=_infer_shape,
    doc="The shape of a tensor.",
)
register(
    "Size",
    inputs=[Input("X", "tensor of any shape")],
    outputs=[Output("size", "int64 scalar")],
    infer=lambda op, inputs: [TensorSpec((), np.dtype(np.int64), (inputs[0].size,))],
    gradient=NO_GRADIENT,
    doc="The number of elements of a tensor.",
)
