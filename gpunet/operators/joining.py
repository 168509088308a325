"""Joining and cutting: Concat, Split, Slice, Tile and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpunet.arguments import Bool, Int, Ints, Str
from gpunet.errors import ArgumentError, ShapeError
from gpunet.gradient_maker import GradientBuilder
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from gpunet.rules import canonical_axis, describe, flops_per_input, want_rank, want_same_type
from gpunet.schema import INDICES, NUMBERS, GradientFunction, Input, Output, register
from gpunet.specs import Shape, TensorSpec, format_shape

_AXIS_ARGS: Final = (
    Int("axis", 1, "the dimension; negative values count from the end"),
    Str(
        "order",
        "NCHW",
        "instead of axis: the dimension of the channels in this order",
        choices=("NCHW", "NHWC"),
    ),
    Bool("add_axis", False, "join along a new dimension, or drop the one that was split"),
)


def join_axis(op: Operator, rank: int) -> int:
    """The dimension along which Concat joins to, or Split cuts, a tensor of ``rank`` dimensions."""
    if op.args.has("axis"):
        return canonical_axis(op.args.axis, rank)
    return canonical_axis(3 if op.args.order == "NHWC" else 1, rank, "order")


def _check_axis_or_order(op: Operator) -> None:
    if op.args.has("axis") and op.args.has("order"):
        raise ArgumentError("has both arguments 'axis' and 'order', wanted only one")


def _infer_concat(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    want_same_type(op, inputs)
    first, added = inputs[0], op.args.add_axis
    axis = join_axis(op, first.rank + added)
    sizes = tuple(1 if added else x.shape[axis] for x in inputs if x.rank == first.rank)
    for i, x in enumerate(inputs):
        fits = x.rank == first.rank and all(
            n == m for d, (n, m) in enumerate(zip(x.shape, first.shape, strict=True)) if added or d != axis
        )
        if not fits:
            other = "" if added else f" in all dimensions but {axis}"
            raise ShapeError(
                f"{describe(op, i, x)} does not fit {describe(op, 0, first)}, wanted equal sizes{other}"
            )
    rest = (*first.shape[:axis], sum(sizes), *first.shape[axis + (not added) :])
    return [first.with_shape(*rest), TensorSpec((len(inputs),), np.dtype(np.int32), sizes)]


def _concat_gradient(g: GradientBuilder) -> list[OperatorDef]:
    return g.single("Split", [g.output_grad(0), g.output(1)], [g.input_grad(i) for i in range(g.num_inputs)])


for _type in ("Concat", "DepthConcat"):
    register(
        _type,
        inputs=[Input("X", "tensors that agree in all other dimensions", variadic=True)],
        outputs=[Output("Y", "the joined tensor"), Output("split_info", "int32 vector: size of each input")],
        args=_AXIS_ARGS,
        infer=_infer_concat,
        check=_check_axis_or_order,
        gradient=_concat_gradient,
        joins=join_axis,
        doc="Joins tensors along a dimension, by default that of the channels.",
    )


def split_sizes(op: Operator, size: int, given: Sequence[int] | None) -> list[int]:
    """Sizes of the parts of a dimension of ``size``; ``given`` are those of the second input.

    Raises :class:`ShapeError` where they do not add up.
    """
    count = len(op.outputs)
    sizes = list(given if given is not None else op.args.split)
    if not sizes and given is None:
        if size % count:
            raise ShapeError(
                f"dimension of size {size} cannot be split equally in {count}, wanted a multiple"
            )
        return [size // count] * count
    if len(sizes) != count or sum(sizes) != size or min(sizes) < 0:
        raise ShapeError(f"split is {sizes}, wanted {count} sizes, none negative, that add up to {size}")
    if op.args.add_axis and any(n != 1 for n in sizes):
        raise ShapeError(f"split is {sizes}, wanted only 1 to drop the dimension (add_axis)")
    return sizes


def _infer_split(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec | None]:
    x = inputs[0]
    axis = join_axis(op, x.rank)
    given = inputs[1].known if len(inputs) == 2 else None
    if len(inputs) == 2 and given is None:
        return [None] * len(op.outputs)
    try:
        sizes = split_sizes(op, x.shape[axis], given)
    except ShapeError as error:
        raise ShapeError(f"{describe(op, 0, x)}, dimension {axis}: {error}") from None
    kept = [() if op.args.add_axis else (n,) for n in sizes]
    return [x.with_shape(*x.shape[:axis], *n, *x.shape[axis + 1 :]) for n in kept]


def _split_gradient(g: GradientBuilder) -> list[OperatorDef]:
    made, grads = [], []
    for o in range(g.num_outputs):
        if g.has_output_grad(o):
            grads.append(g.output_grad(o))
        else:
            # A part that nothing reads: its gradient is 0.
            zero = f"_{g.output(o)}_grad_zero"
            made.append(g.make("ConstantFill", [g.output(o)], [zero], value=0.0, input_as_type=1))
            grads.append(zero)
    dx = g.input_grad(0)
    return [*made, g.make("Concat", grads, [dx, f"_{dx}_dims"])]


for _type in ("Split", "DepthSplit"):
    register(
        _type,
        inputs=[
            Input("X", "the tensor to split"),
            Input("split", "sizes of the parts, as argument split", INDICES, optional=True),
        ],
        outputs=[Output("Y", "the parts", variadic=True)],
        args=[*_AXIS_ARGS, Ints("split", (), "sizes of the parts; equal ones where it is empty")],
        infer=_infer_split,
        check=_check_axis_or_order,
        gradient=_split_gradient,
        cuts=join_axis,
        dynamic=lambda op: len(op.inputs) == 2,
        doc="Splits a tensor along a dimension, by default that of the channels: the inverse of Concat.",
    )


def slice_ranges(shape: Shape, starts: Sequence[int], ends: Sequence[int]) -> tuple[slice, ...]:
    """The range of each dimension that a Slice takes.

    Negative bounds count from one behind the end (-1 is the size); bounds beyond the size mean the size;
    dimensions without bounds are taken whole. Raises :class:`ShapeError` where a range makes no sense.
    """
    if len(starts) != len(ends) or len(starts) > len(shape):
        raise ShapeError(
            f"starts {list(starts)} and ends {list(ends)} do not fit {format_shape(shape)}, "
            f"wanted equally many, at most {len(shape)}"
        )
    ranges = []
    for size, start, end in zip(shape, starts, ends, strict=False):
        first, last = (min(n + size + 1 if n < 0 else n, size) for n in (start, end))
        if not 0 <= first <= last:
            raise ShapeError(
                f"range {start}:{end} makes no sense in a dimension of size {size}, wanted start <= end"
            )
        ranges.append(slice(first, last))
    return tuple(ranges)


def _infer_slice(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec | None]:
    if len(inputs) == 3:
        want_rank(op, inputs, 1, 1)
        want_rank(op, inputs, 2, 1)
        return [None]
    x = inputs[0]
    ranges = slice_ranges(x.shape, op.args.starts, op.args.ends)
    return [x.with_shape(*(r.stop - r.start for r in ranges), *x.shape[len(ranges) :])]


def _slice_gradient(g: GradientBuilder) -> list[OperatorDef]:
    bounds = [g.input(i) for i in range(1, g.num_inputs)]
    return g.single("SliceGradient", [g.input(0), *bounds, g.output_grad(0)], [g.input_grad(0)])


def _infer_slice_gradient(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    want_same_type(op, inputs, 0, len(inputs) - 1)
    return [inputs[0]]


_SLICE_ARGS: Final = (
    Ints("starts", (), "first index in each dimension; negative values count from one behind the end"),
    Ints("ends", (), "index behind the last in each dimension; -1 is the end"),
)
register(
    "Slice",
    inputs=[
        Input("X", "tensor of any shape"),
        Input("starts", "as argument starts", INDICES, optional=True),
        Input("ends", "as argument ends", INDICES, optional=True),
    ],
    outputs=[Output("Y", "the part of X")],
    args=_SLICE_ARGS,
    input_counts=(1, 3),
    infer=_infer_slice,
    gradient=_slice_gradient,
    dynamic=lambda op: len(op.inputs) == 3,
    doc="A range in each dimension; dimensions without bounds are taken whole.",
)
register(
    "SliceGradient",
    inputs=[
        Input("X", "input of the forward operator"),
        Input("dY or starts", "gradient of Y, or the second input of the forward operator"),
        Input("ends", "third input of the forward operator", INDICES, optional=True),
        Input("dY", "gradient of Y", optional=True),
    ],
    outputs=[Output("dX", "gradient of X")],
    args=_SLICE_ARGS,
    input_counts=(2, 4),
    infer=_infer_slice_gradient,
    doc="dY at the place of the slice, 0 elsewhere.",
)


def _infer_tile(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec | None]:
    if len(inputs) > 1:
        return [None]
    x, tiles = inputs[0], op.args.tiles
    return [x.with_shape(*tile_shape(x.shape, tiles, op.args.axis))]


def tile_shape(shape: Shape, tiles: int, axis: int) -> Shape:
    """The shape after repeating dimension ``axis``; raises :class:`ArgumentError` for bad values."""
    axis = canonical_axis(axis, len(shape))
    if tiles < 0:
        raise ArgumentError(f"tiles is {tiles}, wanted 0 or more")
    return (*shape[:axis], shape[axis] * tiles, *shape[axis + 1 :])


def untile_shape(shape: Shape, tiles: int, axis: int) -> Shape:
    """The inverse of :func:`tile_shape`; raises :class:`ShapeError` where it does not exist."""
    axis = canonical_axis(axis, len(shape))
    if tiles < 1 or shape[axis] % tiles:
        raise ShapeError(
            f"dimension {axis} of {format_shape(shape)} is no multiple of tiles {tiles}, wanted one"
        )
    return (*shape[:axis], shape[axis] // tiles, *shape[axis + 1 :])


def _infer_tile_gradient(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec | None]:
    if len(inputs) > 1:
        return [None]
    dy, tiles = inputs[0], op.args.tiles
    return [dy.with_shape(*untile_shape(dy.shape, tiles, op.args.axis))]


def _gradient_with_inputs(type: str) -> GradientFunction:
    """The gradient reads the gradient of the output and all inputs but the first."""

    def gradient(g: GradientBuilder) -> list[OperatorDef]:
        others = [g.input(i) for i in range(1, g.num_inputs)]
        return g.single(type, [g.output_grad(0), *others], [g.input_grad(0)])

    return gradient


_TILE_ARGS: Final = (Int("tiles", 1, "number of repetitions"), Int("axis", 0, "the dimension that grows"))
_TILE_INPUTS: Final = (
    Input("tiles", "one element, instead of argument tiles", INDICES, optional=True),
    Input("axis", "one element, instead of argument axis", INDICES, optional=True),
)
register(
    "Tile",
    inputs=[Input("X", "tensor of at least one dimension"), *_TILE_INPUTS],
    outputs=[Output("Y", "X repeated")],
    args=_TILE_ARGS,
    infer=_infer_tile,
    gradient=_gradient_with_inputs("TileGradient"),
    dynamic=lambda op: len(op.inputs) > 1,
    doc="Repeats a tensor along one dimension.",
)
register(
    "TileGradient",
    inputs=[Input("dY", "gradient of Y", NUMBERS), *_TILE_INPUTS],
    outputs=[Output("dX", "gradient of X")],
    args=_TILE_ARGS,
    infer=_infer_tile_gradient,
    dynamic=lambda op: len(op.inputs) > 1,
    flops=flops_per_input(),
    doc="The sum of dY over the repetitions.",
)


def _infer_numpy_tile(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec | None]:
    if math.prod(inputs[1].shape) != inputs[0].rank:
        raise ShapeError(
            f"{describe(op, 1, inputs[1])} does not fit {describe(op, 0, inputs[0])}, wanted one a dimension"
        )
    return [None]


register(
    "NumpyTile",
    inputs=[
        Input("X", "tensor of any shape"),
        Input("repeats", "number of repetitions of each dimension", INDICES),
    ],
    outputs=[Output("Y", "X repeated")],
    infer=_infer_numpy_tile,
    dynamic=True,
    doc="Repeats a tensor along all dimensions.",
)
