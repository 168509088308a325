"""The argument ``epsilon`` of operators that have no finite value, or no finite gradient, at 0.

Its default, 0, is Caffe2's behaviour. Above 0 there are two forms, both with the gradient 0 where the guard
acts: functions of positive numbers (Log, Sqrt, Rsqrt, Pow) read ``max(X, epsilon)``; what divides (Div,
Reciprocal) gives 0 where the divisor is not farther than epsilon from 0.
"""

from __future__ import annotations

from typing import Final

from gpunet.arguments import Float
from gpunet.gradient_maker import GradientBuilder
from gpunet.operator import Operator
from gpunet.proto import OperatorDef

#: The argument of functions of positive numbers, and that of what divides.
LOW_GUARD: Final = Float(
    "epsilon", 0.0, "above 0: the function of max(X, epsilon), which is finite for X = 0"
)
DIVISOR_GUARD: Final = Float(
    "epsilon", 0.0, "above 0: the result is 0 where the divisor is not farther than this from 0"
)
#: Operators that divide.
DIVIDES: Final = frozenset(["Div", "DivGradient", "Reciprocal"])


def guarded_input(op: Operator) -> int:
    """The position of the operand that is guarded."""
    if op.type == "Div":
        return 1
    return 2 if op.type == "DivGradient" and len(op.inputs) == 4 else 0


def guarded_operand(g: GradientBuilder) -> tuple[str, list[OperatorDef], list[OperatorDef]]:
    """For the gradient of a function of ``max(X, epsilon)``: the blob to take for X, the operators that make
    it, and those that make its gradient the one of X. X itself and none where ``epsilon`` is not above 0.
    """
    x, dx, epsilon = g.input(0), g.input_grad(0), g.args.epsilon
    if epsilon <= 0:
        return x, [], []
    guarded = f"{dx}_autogen_guarded"
    return (
        guarded,
        [g.make("Clip", [x], [guarded], min=epsilon)],
        [g.make("ClipGradient", [guarded, dx], [dx], min=epsilon)],
    )
