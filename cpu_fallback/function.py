"""NumPy kernels of further elementwise functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.guards import guard, guard_scratch
from gpunet.cpu_fallback.precision import Array, Arrays
from gpunet.cpu_fallback.steps import Step, constant, in_turn, input_scratch
from gpunet.kernels import KernelContext, kernel

#: From the operand (X or Y) and an array of its shape to the steps that write the derivative there.
Slope: TypeAlias = Callable[[Array, Array], list[Step]]


def _root_of_one_minus_square(v: Array, s: Array) -> list[Step]:
    return [partial(np.square, v, s), partial(np.subtract, constant(1, s), s, s), partial(np.sqrt, s, s)]


def _inverted(steps: list[Step], s: Array, numerator: float = 1) -> list[Step]:
    return [*steps, partial(np.divide, constant(numerator, s), s, s)]


#: The position of the operand among the inputs of the gradient operator (dY is the other), and its slope.
SLOPES: dict[str, tuple[int, Slope]] = {
    "Sin": (0, lambda v, s: [partial(np.cos, v, s)]),
    "Cos": (0, lambda v, s: [partial(np.sin, v, s), partial(np.negative, s, s)]),
    "Tan": (0, lambda v, s: _inverted([partial(np.cos, v, s), partial(np.square, s, s)], s)),
    "Asin": (0, lambda v, s: _inverted(_root_of_one_minus_square(v, s), s)),
    "Acos": (0, lambda v, s: _inverted(_root_of_one_minus_square(v, s), s, -1)),
    "Atan": (0, lambda v, s: _inverted([partial(np.square, v, s), partial(np.add, s, constant(1, s), s)], s)),
    "Sinh": (1, lambda v, s: [partial(np.cosh, v, s)]),
    "Cosh": (1, lambda v, s: [partial(np.sinh, v, s)]),
    "Cube": (1, lambda v, s: [partial(np.square, v, s), partial(np.multiply, s, constant(3, s), s)]),
    "Cbrt": (
        1,
        lambda v, s: _inverted([partial(np.square, v, s), partial(np.multiply, s, constant(3, s), s)], s),
    ),
    "Rsqrt": (
        1,
        lambda v, s: [
            partial(np.square, v, s),
            partial(np.multiply, s, v, s),
            partial(np.multiply, s, constant(-0.5, s), s),
        ],
    ),
    "Reciprocal": (0, lambda v, s: [partial(np.square, v, s), partial(np.negative, s, s)]),
    "Softplus": (
        0,
        lambda v, s: [partial(np.negative, v, s), partial(np.expm1, s, s), partial(np.negative, s, s)],
    ),
    "Softsign": (
        0,
        lambda v, s: _inverted(
            [partial(np.abs, v, s), partial(np.add, s, constant(1, s), s), partial(np.square, s, s)], s
        ),
    ),
}

FUNCTIONS: dict[str, np.ufunc] = {
    "Sin": np.sin,
    "Cos": np.cos,
    "Tan": np.tan,
    "Asin": np.arcsin,
    "Acos": np.arccos,
    "Atan": np.arctan,
    "Sinh": np.sinh,
    "Cosh": np.cosh,
    "Cbrt": np.cbrt,
    "Floor": np.floor,
    "Ceil": np.ceil,
}


def _function_kernel(type: str, function: np.ufunc) -> None:
    @kernel(type, binds=True)
    def bind(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
        return partial(function, inputs[0], outputs[0])


def _gradient_kernel(type: str, operand: int, slope: Slope) -> None:
    @kernel(type, binds=True, scratch=input_scratch)
    def bind(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
        (s,) = ctx.scratch
        return in_turn(*slope(inputs[operand], s), partial(np.multiply, s, inputs[1 - operand], outputs[0]))


for _type, _function in FUNCTIONS.items():
    _function_kernel(_type, _function)
for _type, (_operand, _slope) in SLOPES.items():
    _gradient_kernel(f"{_type}Gradient", _operand, _slope)


@kernel("Cube", binds=True)
def cube(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = X^3``."""
    x, (y,) = inputs[0], outputs
    return in_turn(partial(np.square, x, y), partial(np.multiply, y, x, y))


@kernel("Rsqrt", binds=True, scratch=guard_scratch)
def rsqrt(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = 1 / sqrt(X)``."""
    (y,) = outputs
    guarding, (x,) = guard(inputs, ctx)
    return in_turn(guarding, partial(np.sqrt, x, y), partial(np.reciprocal, y, y))


@kernel("Reciprocal", binds=True, scratch=guard_scratch)
def reciprocal(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = 1 / X``."""
    guarding, (x,) = guard(inputs, ctx)
    return in_turn(guarding, partial(np.reciprocal, x, outputs[0]))


@kernel("Softplus", binds=True)
def softplus(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = ln(1 + exp(X))``, with no overflow."""
    return partial(np.logaddexp, inputs[0], constant(0, inputs[0]), outputs[0])


@kernel("Softsign", binds=True, scratch=input_scratch)
def softsign(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = X / (1 + |X|)``."""
    x, (y,) = inputs[0], outputs
    (s,) = ctx.scratch
    return in_turn(partial(np.abs, x, s), partial(np.add, s, constant(1, s), s), partial(np.divide, x, s, y))
