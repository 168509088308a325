"""Reductions: over chosen dimensions, and over the first or last ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpunet.arguments import Bool, Int, Ints
from gpunet.errors import ArgumentError, DataTypeError, ShapeError
from gpunet.gradient_maker import GradientBuilder
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from gpunet.rules import (
    canonical_axis,
    describe,
    flops_per_input,
    flops_per_output,
    want_same_type,
    want_shape,
)
from gpunet.schema import FLOATS, NUMBERS, GradientFunction, Input, Output, register
from gpunet.specs import Shape, TensorSpec, format_shape

_INT32: Final = np.dtype(np.int32)


def reduced_axes(op: Operator, rank: int) -> tuple[int, ...]:
    """The dimensions that ReduceSum and the like, or their gradients, reduce: all where ``axes`` is empty."""
    axes = {canonical_axis(a, rank, "axes") for a in op.args.axes}
    return tuple(sorted(axes)) or tuple(range(rank))


def kept_shape(shape: Shape, axes: Sequence[int]) -> Shape:
    """``shape`` with size 1 in the reduced dimensions."""
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


def _reduced(op: Operator, x: TensorSpec) -> TensorSpec:
    axes = reduced_axes(op, x.rank)
    if op.args.keepdims:
        return x.with_shape(*kept_shape(x.shape, axes))
    return x.with_shape(*(n for i, n in enumerate(x.shape) if i not in axes))


def _infer_reduce_gradient(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    want_same_type(op, inputs)
    wanted = _reduced(op, inputs[1]).shape
    want_shape(op, inputs, 0, wanted, "the shape of Y")
    want_shape(op, inputs, 2, wanted, "the shape of Y")
    return [inputs[1]]


def _reduce_gradient(g: GradientBuilder) -> list[OperatorDef]:
    inputs = [g.output_grad(0), g.input(0), g.output(0)]
    return g.single(f"{g.op.type}Gradient", inputs, [g.input_grad(0)])


_REDUCE_ARGS: Final = (
    Ints("axes", (), "the dimensions to reduce, all where it is empty; negative ones count from the end"),
    Bool("keepdims", True, "keep the reduced dimensions, with size 1"),
)

for _name, _what, _derivative in (
    ("Sum", "The sum", "dY"),
    ("Mean", "The mean", "dY / n"),
    ("Max", "The largest value", "dY where X = Y, else 0"),
    ("Min", "The smallest value", "dY where X = Y, else 0"),
    ("L1", "The sum of the absolute values", "dY sign(X)"),
    ("L2", "The square root of the sum of the squares", "dY X / Y, or 0 where Y = 0"),
):
    register(
        f"Reduce{_name}",
        inputs=[Input("X", "tensor of any shape", NUMBERS if _name in ("Sum", "Max", "Min") else FLOATS)],
        outputs=[Output("Y", "the reduced tensor")],
        args=_REDUCE_ARGS,
        infer=lambda op, inputs: [_reduced(op, inputs[0])],
        gradient=_reduce_gradient,
        flops=flops_per_input(2 if _name in ("L1", "L2") else 1),
        total={"Sum": "sum", "Mean": "mean"}.get(_name, ""),
        doc=f"{_what} over dimensions.",
    )
    register(
        f"Reduce{_name}Gradient",
        inputs=[
            Input("dY", "gradient of Y", FLOATS),
            Input("X", "input of the forward operator", FLOATS),
            Input("Y", "output of the forward operator", FLOATS),
        ],
        outputs=[Output("dX", "gradient of X")],
        args=_REDUCE_ARGS,
        infer=_infer_reduce_gradient,
        flops=flops_per_input(1, 1),
        compares=_name in ("Max", "Min"),
        doc=f"``dX = {_derivative}``.",
    )


def split_at(op: Operator, rank: int) -> int:
    """How many dimensions lie before the place that a front or back reduction cuts the shape at."""
    n: int = op.args.num_reduce_dim
    if not 0 <= n <= rank:
        raise ArgumentError(f"argument 'num_reduce_dim' is {n}, wanted 0 to {rank} for {rank} dimensions")
    return n if "Front" in op.type else rank - n


def _parts(op: Operator, shape: Shape) -> tuple[Shape, Shape]:
    """The reduced dimensions and the others."""
    cut = split_at(op, len(shape))
    front, back = shape[:cut], shape[cut:]
    return (front, back) if "Front" in op.type else (back, front)


def _want_lengths(op: Operator, inputs: Sequence[Any], index: int, kept: Shape) -> None:
    lengths = inputs[index]
    wanted = TensorSpec(kept, _INT32).size
    if lengths.dtype != _INT32 or lengths.size != wanted:
        raise ShapeError(
            f"{describe(op, index, lengths)} does not fit, wanted int32, one length for each of {wanted}"
        )


def _infer_front_back(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    kept = _parts(op, inputs[0].shape)[1]
    if len(inputs) == 2:
        _want_lengths(op, inputs, 1, kept)
    return [inputs[0].with_shape(*kept)]


def _infer_sum_gradient(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec | None]:
    dy, x = inputs[0], inputs[1]
    if x.dtype.kind == "i":
        if x.dtype != np.int64 or x.rank != 1:
            raise DataTypeError(
                f"{describe(op, 1, x)} cannot be a shape, wanted a 1-dimensional int64 tensor"
            )
        return [None]
    want_same_type(op, inputs, 0, 1)
    kept = _parts(op, x.shape)[1]
    want_shape(op, inputs, 0, kept, "the shape of Y")
    if len(inputs) == 3:
        _want_lengths(op, inputs, 2, kept)
    return [dy.with_shape(*x.shape)]


def _infer_max_gradient(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    want_same_type(op, inputs, 0, 1, 2)
    kept = _parts(op, inputs[1].shape)[1]
    want_shape(op, inputs, 0, kept, "the shape of Y")
    want_shape(op, inputs, 2, kept, "the shape of Y")
    if len(inputs) == 4:
        _want_lengths(op, inputs, 3, kept)
    return [inputs[1]]


def check_gradient_shape(op: Operator, dy: Shape, shape: Shape) -> None:
    """Raises :class:`ShapeError` unless ``dy`` is what a front or back reduction makes of ``shape``."""
    kept = _parts(op, shape)[1]
    if dy != kept:
        raise ShapeError(
            f"gradient of {format_shape(dy)} does not fit {format_shape(shape)}, wanted {format_shape(kept)}"
        )


def _front_back_gradient(*, with_output: bool) -> GradientFunction:
    def gradient(g: GradientBuilder) -> list[OperatorDef]:
        forward = [g.input(0), *([g.output(0)] if with_output else [])]
        lengths = [g.input(1)] if g.num_inputs == 2 else []
        return g.single(f"{g.op.type}Gradient", [g.output_grad(0), *forward, *lengths], [g.input_grad(0)])

    return gradient


_LENGTHS: Final = Input(
    "lengths", "int32: for each element of Y how many elements, from the first on, count", optional=True
)
_COUNT: Final = (Int("num_reduce_dim", 1, "how many dimensions to reduce"),)

for _side in ("Front", "Back"):
    _where = "first" if _side == "Front" else "last"
    for _name, _what in (("Sum", "sum"), ("Mean", "mean"), ("Max", "largest value")):
        _is_max = _name == "Max"
        register(
            f"Reduce{_side}{_name}",
            inputs=[Input("X", "tensor of any shape", FLOATS if _name == "Mean" else NUMBERS), _LENGTHS],
            outputs=[Output("Y", f"tensor of the dimensions but the {_where} ones")],
            args=_COUNT,
            infer=_infer_front_back,
            gradient=_front_back_gradient(with_output=_is_max),
            flops=flops_per_input(),
            doc=f"The {_what} over the {_where} dimensions; 0 where there are no elements.",
        )
        _forward = (
            [
                Input("X", "input of the forward operator", FLOATS),
                Input("Y", "output of the forward operator", FLOATS),
            ]
            if _is_max
            else [Input("X", "input of the forward operator, or its shape as int64 vector")]
        )
        register(
            f"Reduce{_side}{_name}Gradient",
            inputs=[Input("dY", "gradient of Y", FLOATS), *_forward, _LENGTHS],
            outputs=[Output("dX", "gradient of X")],
            args=_COUNT,
            infer=_infer_max_gradient if _is_max else _infer_sum_gradient,
            # Old nets give the shape in place of X, and the definition does not tell which it is.
            dynamic=not _is_max,
            compares=_is_max,
            flops=flops_per_output(),
            doc=f"Gradient of Reduce{_side}{_name}: dY spread over the {_where} dimensions.",
        )
