"""Elementwise functions of one tensor: Sqr, Sqrt, Exp, Log, Abs, Sign, Negative, Scale, Clip."""

from __future__ import annotations

from collections.abc import Sequence

from gpunet.arguments import Arg, Float
from gpunet.gradient_maker import GradientBuilder
from gpunet.operators.guards import LOW_GUARD, guarded_operand
from gpunet.proto import OperatorDef
from gpunet.rules import flops_per_output, same_as_both, same_as_input
from gpunet.schema import (
    FLOATS,
    NOT_DIFFERENTIABLE,
    NUMBERS,
    GradientFunction,
    GradientRule,
    Input,
    Output,
    Types,
    register,
)


def _unary(
    type: str,
    formula: str,
    gradient: GradientFunction | GradientRule,
    *,
    flops: int = 1,
    types: Types = FLOATS,
    inplace: bool = True,
    args: Sequence[Arg] = (),
    doc: str = "",
) -> None:
    register(
        type,
        inputs=[Input("X", "tensor of any shape", types)],
        outputs=[Output("Y", "tensor of the shape and type of X")],
        args=args,
        inplace=[(0, 0)] if inplace else [],
        infer=same_as_input,
        gradient=gradient,
        flops=flops_per_output(flops) if flops else None,
        elementwise=True,
        doc=f"Elementwise ``Y = {formula}``.{' ' if doc else ''}{doc}",
    )


def _gradient_operator(
    type: str, first: Input, formula: str, *, inplace: bool, flops: int = 1, args: Sequence[Arg] = ()
) -> None:
    register(
        type,
        inputs=[first, Input("dY", "gradient of Y", FLOATS)],
        outputs=[Output("dX", "gradient of X")],
        args=args,
        inplace=[(1, 0)] if inplace else [],
        infer=same_as_both,
        flops=flops_per_output(flops),
        elementwise=True,
        doc=f"``dX = {formula}``.",
    )


def _sqr_gradient(g: GradientBuilder) -> list[OperatorDef]:
    """``dX = (2 dY) X``; like Caffe2's it doubles dY in place."""
    dy = g.output_grad(0)
    return [g.make("Scale", [dy], [dy], scale=2.0), g.make("Mul", [dy, g.input(0)], [g.input_grad(0)])]


def _sqrt_gradient(g: GradientBuilder) -> list[OperatorDef]:
    dx = g.input_grad(0)
    g.copy_arguments = g.args.epsilon <= 0
    _, before, after = guarded_operand(g)
    return [
        *before,
        g.make("Scale", [g.output_grad(0)], [dx], scale=0.5),
        g.make("Div", [dx, g.output(0)], [dx]),
        *after,
    ]


def _exp_gradient(g: GradientBuilder) -> list[OperatorDef]:
    return g.single("Mul", [g.output(0), g.output_grad(0)], [g.input_grad(0)])


def _log_gradient(g: GradientBuilder) -> list[OperatorDef]:
    """``dX = dY / X``; with a guard, that of ``ln(max(X, epsilon))``: 0 where X is not above epsilon."""
    g.copy_arguments = False
    x, before, after = guarded_operand(g)
    return [*before, g.make("Div", [g.output_grad(0), x], [g.input_grad(0)]), *after]


def _of_gradient(type: str) -> GradientFunction:
    """The gradient is a linear function of dY alone."""

    def gradient(g: GradientBuilder) -> list[OperatorDef]:
        return g.single(type, [g.output_grad(0)], [g.input_grad(0)])

    return gradient


def _abs_gradient(g: GradientBuilder) -> list[OperatorDef]:
    return g.single("AbsGradient", [g.input(0), g.output_grad(0)], [g.input_grad(0)])


def _clip_gradient(g: GradientBuilder) -> list[OperatorDef]:
    return g.single("ClipGradient", [g.output(0), g.output_grad(0)], [g.input_grad(0)])


_LIMITS = (
    Float("min", None, "lower limit; the lowest finite number of the type by default"),
    Float("max", None, "upper limit; the largest finite number of the type by default"),
)

_unary("Sqr", "X^2", _sqr_gradient)
_unary("Sqrt", "sqrt(X)", _sqrt_gradient, args=[LOW_GUARD])
_unary("Exp", "exp(X)", _exp_gradient, flops=4)
_unary(
    "Log",
    "ln(X)",
    _log_gradient,
    flops=4,
    args=[LOW_GUARD],
)
_unary("Abs", "|X|", _abs_gradient, inplace=False)
_unary("Sign", "-1, 0 or 1 by the sign of X", NOT_DIFFERENTIABLE, types=NUMBERS, inplace=False)
_unary("Negative", "-X", _of_gradient("Negative"), types=NUMBERS)
_unary(
    "NegateGradient",
    "X",
    _of_gradient("Negative"),
    types=NUMBERS,
    flops=0,
    doc="Its gradient is the negative of dY: what comes before it learns the opposite.",
)
_unary("Scale", "scale X", _of_gradient("Scale"), args=[Float("scale", 1.0, "the factor")])
_unary(
    "Clip",
    "min(max(X, min), max)",
    _clip_gradient,
    flops=2,
    args=_LIMITS,
    doc="Infinities are clipped by default.",
)

_gradient_operator(
    "AbsGradient", Input("X", "input of the forward operator", FLOATS), "dY sign(X)", inplace=False
)
_gradient_operator(
    "ClipGradient",
    Input("Y", "output of the forward operator", FLOATS),
    "dY where min < Y < max, else 0",
    inplace=True,
    flops=2,
    args=_LIMITS,
)
