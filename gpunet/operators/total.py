"""Sums over all elements: SumElements, SumElementsInt, SumSqrElements."""

from __future__ import annotations

from collections.abc import Sequence

from gpunet.arguments import Bool
from gpunet.gradient_maker import GradientBuilder
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from gpunet.rules import flops_per_input, want_same_type, want_size
from gpunet.schema import (
    FLOATS,
    INTEGERS,
    NOT_DIFFERENTIABLE,
    GradientFunction,
    GradientRule,
    Input,
    Output,
    Types,
    register,
)
from gpunet.specs import TensorSpec

_AVERAGE = Bool("average", False, "divide by the number of elements")


def _infer_scalar(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [inputs[0].with_shape()]


def _gradient(g: GradientBuilder) -> list[OperatorDef]:
    return g.single("SumElementsGradient", [g.input(0), g.output_grad(0)], [g.input_grad(0)])


def _total(
    type: str, types: Types, formula: str, flops: int, gradient: GradientFunction | GradientRule
) -> None:
    register(
        type,
        inputs=[Input("X", "tensor of any shape", types)],
        outputs=[Output("Y", "scalar of X's type")],
        args=[_AVERAGE] if types == FLOATS else [],
        infer=_infer_scalar,
        gradient=gradient,
        flops=flops_per_input(flops),
        total="sum" if formula == "sum(X)" else "",
        doc=f"``Y = {formula}`` over all elements{' or their mean' if types == FLOATS else ''}.",
    )


_total("SumElements", FLOATS, "sum(X)", 1, _gradient)
_total("SumElementsInt", INTEGERS, "sum(X)", 1, NOT_DIFFERENTIABLE)
_total("SumSqrElements", FLOATS, "sum(X^2)", 2, NOT_DIFFERENTIABLE)


def _infer_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs)
    want_size(op, inputs, 1, 1, "the gradient of a scalar")
    return [inputs[0]]


register(
    "SumElementsGradient",
    inputs=[
        Input("X", "input of the forward operator; only its shape is read", FLOATS),
        Input("dY", "gradient of Y, one element", FLOATS),
    ],
    outputs=[Output("dX", "gradient of X")],
    args=[_AVERAGE],
    infer=_infer_gradient,
    flops=flops_per_input(0),
    doc="Every element of dX is dY, or dY divided by their number.",
)
