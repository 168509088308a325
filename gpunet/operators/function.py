"""Further elementwise functions: trigonometric and hyperbolic ones, roots, rounding, Softplus."""

from __future__ import annotations

from collections.abc import Sequence

from gpunet.arguments import Arg
from gpunet.errors import GradientError
from gpunet.gradient_maker import GradientBuilder
from gpunet.operators.guards import DIVISOR_GUARD, LOW_GUARD, guarded_operand
from gpunet.proto import OperatorDef
from gpunet.rules import flops_per_output, same_as_both, same_as_input
from gpunet.schema import FLOATS, NOT_DIFFERENTIABLE, GradientFunction, GradientRule, Input, Output, register


def _function(
    type: str,
    formula: str,
    gradient: GradientFunction | GradientRule,
    inplace: bool,
    args: Sequence[Arg] = (),
) -> None:
    register(
        type,
        inputs=[Input("X", "tensor of any shape", FLOATS)],
        outputs=[Output("Y", "tensor of the shape and type of X")],
        args=args,
        inplace=[(0, 0)] if inplace else [],
        infer=same_as_input,
        gradient=gradient,
        flops=flops_per_output(4),
        doc=f"Elementwise ``Y = {formula}``.",
    )


def _differentiable(
    type: str,
    formula: str,
    slope: str,
    *,
    inputs: str = "X dY",
    inplace: bool = False,
    args: Sequence[Arg] = (),
) -> None:
    """A function and its gradient operator, whose inputs stand in Caffe2's order.

    The gradient operator may overwrite dY where the function itself may work in place.
    """
    order = inputs.split()

    def gradient(g: GradientBuilder) -> list[OperatorDef]:
        if "X" in order and g.input(0) == g.output(0):
            raise GradientError(
                f"{g.input(0)!r} is overwritten in place, wanted the input kept for the gradient"
            )
        names = {"X": g.input(0), "Y": g.output(0), "dY": g.output_grad(0)}
        made = g.single(f"{type}Gradient", [names[name] for name in order], [g.input_grad(0)])
        if LOW_GUARD not in args or g.args.epsilon <= 0:
            return made
        if g.input(0) == g.output(0):
            raise GradientError(
                f"{g.input(0)!r} is overwritten in place, wanted the input kept for the guarded gradient"
            )
        g.copy_arguments = False
        _, before, after = guarded_operand(g)
        return [*before, *made, *after]

    _function(type, formula, gradient, inplace, args)
    docs = {
        "X": "input of the forward operator",
        "Y": "output of the forward operator",
        "dY": "gradient of Y",
    }
    register(
        f"{type}Gradient",
        inputs=[Input(name, docs[name], FLOATS) for name in order],
        outputs=[Output("dX", "gradient of X")],
        inplace=[(order.index("dY"), 0)] if inplace else [],
        infer=same_as_both,
        flops=flops_per_output(5),
        doc=f"``dX = dY {slope}``.",
    )


_differentiable("Sin", "sin(X)", "cos(X)")
_differentiable("Cos", "cos(X)", "(-sin(X))")
_differentiable("Tan", "tan(X)", "/ cos(X)^2")
_differentiable("Asin", "arcsin(X)", "/ sqrt(1 - X^2)")
_differentiable("Acos", "arccos(X)", "/ -sqrt(1 - X^2)")
_differentiable("Atan", "arctan(X)", "/ (1 + X^2)")
_differentiable("Sinh", "sinh(X)", "cosh(X)", inputs="dY X")
_differentiable("Cosh", "cosh(X)", "sinh(X)", inputs="dY X")
_differentiable("Cube", "X^3", "3 X^2", inputs="dY X")
_differentiable("Cbrt", "X^(1/3), also of negative numbers", "/ (3 Y^2)", inputs="dY Y", inplace=True)
_differentiable("Rsqrt", "1 / sqrt(X)", "(-Y^3 / 2)", inputs="dY Y", inplace=True, args=[LOW_GUARD])
_differentiable("Reciprocal", "1 / X", "(-Y^2)", inputs="Y dY", inplace=True, args=[DIVISOR_GUARD])
_differentiable("Softplus", "ln(1 + exp(X))", "(1 - exp(-Y))", inputs="Y dY", inplace=True)
_differentiable("Softsign", "X / (1 + |X|)", "/ (1 + |X|)^2", inplace=True)

_function("Floor", "the largest whole number up to X", NOT_DIFFERENTIABLE, True)
_function("Ceil", "the smallest whole number from X on", NOT_DIFFERENTIABLE, True)
