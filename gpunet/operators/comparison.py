"""Comparisons and logic: EQ, NE, GT, GE, LT, LE, And, Or, Xor, Not, IsEmpty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpunet.broadcasting import BROADCAST_ARGS
from gpunet.operator import Operator
from gpunet.operators.elementwise import infer_binary
from gpunet.rules import flops_per_output, same_as_input
from gpunet.schema import BOOL, NOT_DIFFERENTIABLE, NUMBERS, Input, Output, Types, register
from gpunet.specs import TensorSpec, spec


def _infer_comparison(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [infer_binary(op, inputs)[0].with_dtype(bool)]


def _binary(type: str, symbol: str, types: Types, inplace: Sequence[tuple[int, int]] = ()) -> None:
    register(
        type,
        inputs=[
            Input("A", "first operand, of any shape", types),
            Input("B", "second operand, of A's type", types),
        ],
        outputs=[Output("C", "bool tensor of the shape that A and B broadcast to")],
        args=BROADCAST_ARGS,
        inplace=inplace,
        infer=_infer_comparison,
        gradient=NOT_DIFFERENTIABLE,
        flops=flops_per_output(),
        elementwise=True,
        doc=f"Elementwise ``C = A {symbol} B``.",
    )


for _type, _symbol in (("EQ", "=="), ("NE", "!=")):
    _binary(_type, _symbol, NUMBERS | BOOL)
for _type, _symbol in (("GT", ">"), ("GE", ">="), ("LT", "<"), ("LE", "<=")):
    _binary(_type, _symbol, NUMBERS | BOOL)
for _type, _symbol in (("And", "and"), ("Or", "or"), ("Xor", "xor")):
    _binary(_type, _symbol, BOOL, [(0, 0)])

register(
    "Not",
    inputs=[Input("X", "bool tensor of any shape", BOOL)],
    outputs=[Output("Y", "bool tensor of the shape of X")],
    infer=same_as_input,
    gradient=NOT_DIFFERENTIABLE,
    flops=flops_per_output(),
    elementwise=True,
    doc="Elementwise ``Y = not X``.",
)


def _infer_is_empty(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    return [spec((), bool)]


register(
    "IsEmpty",
    inputs=[Input("X", "tensor of any shape")],
    outputs=[Output("is_empty", "bool scalar")],
    infer=_infer_is_empty,
    gradient=NOT_DIFFERENTIABLE,
    doc="Whether X has no elements.",
)
