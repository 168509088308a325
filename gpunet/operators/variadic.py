"""Elementwise combinations of any number of tensors: Sum, Max, Min, WeightedSum and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from gpunet.arguments import Bool
from gpunet.errors import DataTypeError, SchemaError, ShapeError
from gpunet.gradient_maker import GradientBuilder
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from gpunet.rules import describe, want_same_type, want_shape
from gpunet.schema import FLOATS, NOT_DIFFERENTIABLE, NUMBERS, FlopsFunction, Input, Output, register
from gpunet.specs import TensorSpec


def _infer_equal(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs)
    for i in range(1, len(inputs)):
        want_shape(op, inputs, i, inputs[0].shape, "the shape of the first input")
    return [inputs[0]]


def _flops_per_input_element(count: int) -> FlopsFunction:
    def flops(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        return count * inputs[0].size * max(len(inputs) - 1, 0)

    return flops


def _sum_gradient(g: GradientBuilder) -> list[OperatorDef]:
    """Every summand's gradient is that of the sum itself."""
    for i in range(g.num_inputs):
        g.set_dense(i, g.output_grad(0))
    return []


for _type, _types in (("Sum", NUMBERS), ("SumInt", frozenset(NUMBERS - FLOATS))):
    register(
        _type,
        inputs=[Input("X", "summands of one shape and type", _types, variadic=True)],
        outputs=[Output("Y", "sum, of the shape and type of the first input")],
        inplace=[(0, 0)] if _type == "Sum" else [],
        infer=_infer_equal,
        gradient=_sum_gradient if _type == "Sum" else NOT_DIFFERENTIABLE,
        flops=_flops_per_input_element(1),
        elementwise=True,
        doc="Elementwise sum of any number of tensors" + ("." if _type == "Sum" else " of whole numbers."),
    )


def _check_extremum_gradient(op: Operator) -> None:
    if len(op.outputs) != len(op.inputs) - 2:
        raise SchemaError(f"has {len(op.outputs)} outputs, wanted {len(op.inputs) - 2}: one for each X")


def _infer_extremum_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return _infer_equal(op, inputs) * len(op.outputs)


def _extremum(type: str, word: str) -> None:
    def gradient(g: GradientBuilder) -> list[OperatorDef]:
        inputs = [g.input(i) for i in range(g.num_inputs)]
        outputs = [g.input_grad(i) for i in range(g.num_inputs)]
        return g.single(f"{type}Gradient", [g.output(0), g.output_grad(0), *inputs], outputs)

    register(
        type,
        inputs=[Input("X", "tensors of one shape and type", NUMBERS, variadic=True)],
        outputs=[Output("Y", f"the {word} at each position")],
        inplace=[(0, 0)],
        infer=_infer_equal,
        gradient=gradient,
        flops=_flops_per_input_element(1),
        elementwise=True,
        doc=f"Elementwise {word} of any number of tensors.",
    )
    register(
        f"{type}Gradient",
        inputs=[
            Input("Y", "output of the forward operator", FLOATS),
            Input("dY", "gradient of Y", FLOATS),
            Input("X", "inputs of the forward operator", FLOATS, variadic=True),
        ],
        outputs=[Output("dX", "gradient of each X", variadic=True)],
        infer=_infer_extremum_gradient,
        compares=True,
        check=_check_extremum_gradient,
        flops=_flops_per_input_element(1),
        doc=f"``dX = dY`` where X is the {word}, else 0. Inputs that share it all get the whole gradient.",
    )


_extremum("Max", "largest value")
_extremum("Min", "smallest value")


def _want_weights(op: Operator, inputs: Sequence[TensorSpec], first: int) -> None:
    """From input ``first`` on, tensors of one shape and type, each followed by one weight."""
    example = describe(op, first, inputs[first])
    for i in range(first, len(inputs), 2):
        if inputs[i].dtype != inputs[first].dtype:
            raise DataTypeError(f"input {i} ({inputs[i]}) differs in type from {example}, wanted one type")
        if inputs[i].shape != inputs[first].shape:
            raise ShapeError(f"input {i} ({inputs[i]}) differs in shape from {example}, wanted one shape")
        if inputs[i + 1].size != 1:
            raise ShapeError(f"input {i + 1} ({inputs[i + 1]}) is not one weight, wanted one element")


def _check_pairs(op: Operator) -> None:
    if len(op.inputs) % 2:
        raise SchemaError(f"has {len(op.inputs)} inputs, wanted pairs of a tensor and a weight")


def _infer_weighted_sum(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    _want_weights(op, inputs, 0)
    return [inputs[0]]


def _weighted_sum_gradient(g: GradientBuilder) -> list[OperatorDef]:
    inputs = [g.input(i) for i in range(g.num_inputs)]
    outputs = [g.input_grad(i) for i in range(0, g.num_inputs, 2)]
    if g.args.grad_on_w:
        outputs += [g.input_grad(i) for i in range(1, g.num_inputs, 2)]
    return g.single("WeightedSumGradient", [g.output_grad(0), *inputs], outputs)


def _check_weighted_sum_gradient(op: Operator) -> None:
    tensors = (len(op.inputs) - 1) // 2
    wanted = 2 * tensors if op.args.grad_on_w else tensors
    if len(op.inputs) % 2 == 0 or len(op.outputs) != wanted:
        raise SchemaError(
            f"has {len(op.inputs)} inputs and {len(op.outputs)} outputs, "
            "wanted dY with pairs of a tensor and a weight, "
            f"and a gradient for each tensor{' and each weight' if op.args.grad_on_w else ''}"
        )


def _infer_weighted_sum_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    _want_weights(op, inputs, 1)
    want_same_type(op, inputs, 0, 1)
    want_shape(op, inputs, 0, inputs[1].shape, "the shape of the sum")
    return [*inputs[1::2], *inputs[2::2]]


_GRAD_ON_W = Bool("grad_on_w", False, "make gradients of the weights too")

register(
    "WeightedSum",
    inputs=[
        Input("X", "tensors of one shape and type, each followed by its weight", FLOATS),
        Input("w", "a weight: one element", FLOATS, variadic=True),
    ],
    outputs=[Output("Y", "weighted sum, of the shape and type of the first input")],
    args=[_GRAD_ON_W],
    inplace=[(0, 0)],
    infer=_infer_weighted_sum,
    check=_check_pairs,
    gradient=_weighted_sum_gradient,
    flops=_flops_per_input_element(1),
    doc="``Y = w0 X0 + w1 X1 + ...`` for inputs X0, w0, X1, w1, ...",
)

register(
    "WeightedSumGradient",
    inputs=[
        Input("dY", "gradient of Y", FLOATS),
        Input("X", "tensors of the forward operator, each followed by its weight", FLOATS),
        Input("w", "a weight: one element", FLOATS, variadic=True),
    ],
    outputs=[Output("dX", "gradients of all X, then (with grad_on_w) of all weights", variadic=True)],
    args=[_GRAD_ON_W],
    inplace=[(0, 0)],
    infer=_infer_weighted_sum_gradient,
    check=_check_weighted_sum_gradient,
    flops=_flops_per_input_element(1),
    doc="``dX_i = w_i dY`` and ``dw_i = sum(dY X_i)``.",
)
