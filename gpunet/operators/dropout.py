"""Dropout."""

from __future__ import annotations

from collections.abc import Sequence

from gpunet.arguments import Bool, Float
from gpunet.errors import ArgumentError, SchemaError
from gpunet.gradient_maker import GradientBuilder
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from gpunet.rules import flops_per_output, want_shape
from gpunet.schema import BOOL, FLOATS, Input, Output, register
from gpunet.specs import TensorSpec

_ARGS = [
    Float("ratio", 0.5, "probability that an element is dropped, from 0 to below 1"),
    Bool("is_test", False, "pass X through"),
]


def _check_ratio(op: Operator) -> None:
    if not 0 <= op.args.ratio < 1:
        raise ArgumentError(f"argument 'ratio' is {op.args.ratio}, wanted a probability from 0 to below 1")


def _check(op: Operator) -> None:
    _check_ratio(op)
    if not op.args.is_test and len(op.outputs) != 2:
        raise SchemaError("has 1 output with is_test=0, wanted 2 to train (Y, mask)")


def _check_gradient(op: Operator) -> None:
    _check_ratio(op)
    if not op.args.is_test and len(op.inputs) != 2:
        raise SchemaError("has 1 input with is_test=0, wanted 2 in training (dY, mask)")


def _infer(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [inputs[0], inputs[0].with_dtype("bool")]


def _infer_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    if len(inputs) > 1:
        want_shape(op, inputs, 1, inputs[0].shape, "the shape of dY")
    return [inputs[0]]


def _gradient(g: GradientBuilder) -> list[OperatorDef]:
    mask = [] if g.args.is_test else [g.output(1)]
    return g.single("DropoutGrad", [g.output_grad(0), *mask], [g.input_grad(0)])


register(
    "Dropout",
    inputs=[Input("X", "tensor of any shape", FLOATS)],
    outputs=[
        Output("Y", "like X"),
        Output("mask", "bool, like X: which elements are kept (all of them with is_test)", optional=True),
    ],
    args=_ARGS,
    inplace=[(0, 0)],
    check=_check,
    infer=_infer,
    gradient=_gradient,
    flops=flops_per_output(2),
    random=True,
    doc="``Y = X mask / (1 - ratio)``; ``Y = X`` with is_test. Source: N. "
    "Srivastava, G. Hinton, "
    "A. Krizhevsky, I. Sutskever, R. Salakhutdinov, Dropout, JMLR 15 (2014).",
)
register(
    "DropoutGrad",
    inputs=[Input("dY", "gradient of Y", FLOATS), Input("mask", "the mask of Dropout", BOOL, optional=True)],
    outputs=[Output("dX", "gradient of X")],
    args=_ARGS,
    inplace=[(0, 0)],
    check=_check_gradient,
    infer=_infer_gradient,
    flops=flops_per_output(2),
    doc="``dX = dY mask / (1 - ratio)``; ``dX = dY`` with is_test.",
)
