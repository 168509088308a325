"""Elementwise arithmetic of two tensors: Add, Sub, Mul, Div and their gradients, Pow, SumReduceLike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpunet.arguments import Float
from gpunet.broadcasting import AXIS_ARGS, BROADCAST_ARGS, align, legacy_shape
from gpunet.dtypes import is_float
from gpunet.errors import ArgumentError, GradientError, ShapeError
from gpunet.gradient_maker import GradientBuilder
from gpunet.operator import Operator
from gpunet.operators.guards import DIVISOR_GUARD, LOW_GUARD, guarded_operand
from gpunet.proto import OperatorDef
from gpunet.rules import describe, flops_per_input, flops_per_output, want_same_type, want_shape
from gpunet.schema import FLOATS, NUMBERS, Input, Output, register
from gpunet.specs import TensorSpec

_SUMMED = "each summed over the dimensions that its operand was broadcast along"
_INPUTS_DOC = ("first operand, of any shape", "second operand, of A's type")


def infer_binary(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The broadcast shape of two operands of one type."""
    want_same_type(op, inputs)
    a, b = inputs
    return [TensorSpec(align(op.args, a.shape, b.shape)[2], a.dtype)]


def _infer_div(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    found = infer_binary(op, inputs)
    if op.args.epsilon > 0 and not is_float(inputs[1].dtype):
        raise ArgumentError(
            f"argument 'epsilon' is {op.args.epsilon:g} and {describe(op, 1, inputs[1])}, "
            "wanted floats to guard"
        )
    return found


def _infer_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs)
    dc, a, b = inputs[0], inputs[1], inputs[2]
    shape = align(op.args, a.shape, b.shape)[2]
    want_shape(op, inputs, 0, shape, "the shape of the result")
    if len(inputs) > 3:
        want_shape(op, inputs, 3, shape, "the shape of the result")
    return [dc.with_shape(*a.shape), dc.with_shape(*b.shape)]


def _arithmetic(
    type: str, symbol: str, da: str, db: str, inplace: Sequence[tuple[int, int]], flops: int
) -> None:
    with_result = type == "Div"

    def gradient(g: GradientBuilder) -> list[OperatorDef]:
        inputs = [g.output_grad(0), g.input(0), g.input(1), *([g.output(0)] if with_result else [])]
        return g.single(f"{type}Gradient", inputs, [g.input_grad(0), g.input_grad(1)])

    register(
        type,
        inputs=[Input("A", _INPUTS_DOC[0], NUMBERS), Input("B", _INPUTS_DOC[1], NUMBERS)],
        outputs=[Output("C", "result, of the shape that A and B broadcast to")],
        args=(*BROADCAST_ARGS, *([DIVISOR_GUARD] if with_result else [])),
        inplace=inplace,
        infer=_infer_div if with_result else infer_binary,
        gradient=gradient,
        flops=flops_per_output(),
        elementwise=True,
        doc=f"Elementwise ``C = A {symbol} B``."
        + (" Whole numbers are divided towards zero; a zero divisor is an error." if with_result else ""),
    )
    if not with_result:
        register(
            f"{type}Gradient",
            inputs=[
                Input("dC", "gradient of C", NUMBERS),
                Input("A", "as forward", NUMBERS),
                Input("B", "as forward", NUMBERS),
            ],
            outputs=[
                Output("dA", "gradient of A, of its shape"),
                Output("dB", "gradient of B, of its shape"),
            ],
            args=BROADCAST_ARGS,
            inplace=[(0, 0), (0, 1)],
            infer=_infer_gradient,
            flops=flops_per_input(flops),
            doc=f"``dA = {da}``, ``dB = {db}``, {_SUMMED}.",
        )


_arithmetic("Add", "+", "dC", "dC", [(0, 0), (1, 0)], 1)
_arithmetic("Sub", "-", "dC", "-dC", [(0, 0), (1, 0)], 1)
_arithmetic("Mul", "*", "dC B", "dC A", [(0, 0), (1, 0)], 2)
_arithmetic("Div", "/", "dC / B", "-dC C / B", [(0, 0)], 4)


def _infer_div_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    if len(inputs) == 4:
        return _infer_gradient(op, inputs)
    want_same_type(op, inputs)
    b, c, _ = inputs
    want_shape(op, inputs, 2, c.shape, "the shape of C")
    if align(op.args, c.shape, b.shape)[2] != c.shape:
        raise ShapeError(f"B ({b}) is larger than C ({c}), wanted a shape that broadcasts to C's")
    return [c, b]


register(
    "DivGradient",
    inputs=[
        Input("dC", "gradient of C (with three inputs: B)", FLOATS),
        Input("A", "as forward (with three inputs: C)", FLOATS),
        Input("B", "as forward (with three inputs: dC)", FLOATS),
        Input("C", "result of the forward operator", FLOATS, optional=True),
    ],
    outputs=[Output("dA", "gradient of A, of its shape"), Output("dB", "gradient of B, of its shape")],
    args=(*BROADCAST_ARGS, DIVISOR_GUARD),
    inplace=[(0, 0)],
    infer=_infer_div_gradient,
    flops=flops_per_input(4),
    doc=f"``dA = dC / B``, ``dB = -dC C / B``, {_SUMMED}. "
    "Nets of older Caffe2 give the three inputs B, C, dC, for an A of the shape of C.",
)


def _infer_sum_reduce_like(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs)
    legacy_shape(op.args, inputs[0].shape, inputs[1].shape)
    return [inputs[1]]


register(
    "SumReduceLike",
    inputs=[
        Input("A", "tensor to be summed", FLOATS),
        Input("B", "gives the shape of the result; its values are not read", FLOATS),
    ],
    outputs=[Output("C", "sums, of the shape of B")],
    args=AXIS_ARGS,
    infer=_infer_sum_reduce_like,
    flops=flops_per_input(),
    doc="Sums A over the dimensions that B would be broadcast along with ``broadcast=1``.",
)


def _check_pow(op: Operator) -> None:
    if len(op.inputs) == 1 and not op.args.has("exponent"):
        raise ArgumentError("argument 'exponent' is missing, wanted it or a second input")


def _infer_pow(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    if len(inputs) == 1:
        return [inputs[0]]
    if not op.args.broadcast and inputs[0].shape != inputs[1].shape:
        raise ShapeError(
            f"{describe(op, 1, inputs[1])} does not fit {describe(op, 0, inputs[0])}, "
            "wanted equal shapes or broadcast=1"
        )
    return infer_binary(op, inputs)


def _pow_gradient(g: GradientBuilder) -> list[OperatorDef]:
    """With a fixed exponent n, ``dX = n X^(n-1) dY``; else ``dX = E X^(E-1) dY`` and ``dE = ln(X) Y dY``."""
    g.copy_arguments = False
    y, dy, dx = g.output(0), g.output_grad(0), g.input_grad(0)
    if g.num_inputs == 2 and g.input(0) == g.input(1):
        raise GradientError(f"base and exponent are one blob {g.input(0)!r}, wanted a copy as one of them")
    x, before, after = guarded_operand(g)
    if g.num_inputs == 1:
        exponent = g.args.exponent
        return [
            *before,
            g.make("Pow", [x], [dx], exponent=float(exponent - 1)),
            g.make("Mul", [dx, dy], [dx]),
            g.make("Scale", [dx], [dx], scale=float(exponent)),
            *after,
        ]
    exponent, de = g.input(1), g.input_grad(1)
    axes: dict[str, Any] = {"axis": g.args.axis, "axis_str": g.args.axis_str, "order": g.args.order}
    reduces = g.args.has("broadcast")
    along = {"broadcast": int(g.args.broadcast), **axes} if reduces else {}
    product = f"{de}_autogen_pre_red"
    return [
        *before,
        g.make("ConstantFill", [exponent], [de], value=1.0),
        g.make("Sub", [exponent, de], [de]),
        g.make("Pow", [x, de], [dx], **along),
        g.make("Mul", [dx, dy], [dx]),
        g.make("Mul", [dx, exponent], [dx], **along),
        g.make("Log", [x], [product]),
        g.make("Mul", [product, y], [product]),
        g.make("Mul", [product, dy], [product if reduces else de]),
        *([g.make("SumReduceLike", [product, exponent], [de], **axes)] if reduces else []),
        *after,
    ]


register(
    "Pow",
    inputs=[
        Input("X", "base, of any shape", FLOATS),
        Input("E", "exponents, of X's shape, or along it with broadcast=1", FLOATS, optional=True),
    ],
    outputs=[Output("Y", "powers, of the shape and type of X")],
    args=[Float("exponent", 0.0, "the exponent, where there is no second input"), *BROADCAST_ARGS, LOW_GUARD],
    inplace=[(0, 0), (1, 0)],
    infer=_infer_pow,
    check=_check_pow,
    gradient=_pow_gradient,
    flops=flops_per_output(10),
    elementwise=lambda op: len(op.inputs) == 1,
    doc="Elementwise ``Y = X^E``, or ``X^exponent``.",
)
