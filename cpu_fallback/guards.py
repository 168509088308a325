"""Guards of operators that have no finite value at 0: a copy of the operand that keeps away from it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from gpunet.cpu_fallback.precision import Array, Arrays
from gpunet.cpu_fallback.steps import Step, constant, in_turn
from gpunet.kernels import KernelContext
from gpunet.operator import Operator
from gpunet.operators.guards import DIVIDES, guarded_input
from gpunet.specs import TensorSpec


def guard_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    """Scratch for the guarded copy, and for a mask; none where ``epsilon`` is not above 0."""
    if op.args.epsilon <= 0:
        return []
    operand = inputs[guarded_input(op)]
    return [operand, operand.with_dtype(np.bool_)]


def guard(inputs: Arrays, ctx: KernelContext) -> tuple[Step | None, Arrays]:
    """The step that makes the guarded copy in the last scratch, and the inputs with it in place of the
    operand; no step and the inputs as they are where ``epsilon`` is not above 0.
    """
    epsilon = ctx.op.args.epsilon
    if epsilon <= 0:
        return None, inputs
    index = guarded_input(ctx.op)
    x = inputs[index]
    *_, copy, mask = ctx.scratch
    if ctx.op.type in DIVIDES:
        step = _apart(x, constant(epsilon, x), copy, mask)
    else:
        step = partial(np.maximum, x, constant(epsilon, x), out=copy)
    return step, (*inputs[:index], copy, *inputs[index + 1 :])


def _apart(x: Array, epsilon: Array, copy: Array, mask: Array) -> Step:
    """Infinite where x is not farther than epsilon from 0."""
    return in_turn(
        partial(np.abs, x, copy),
        partial(np.less_equal, copy, epsilon, mask),
        partial(np.copyto, copy, x),
        partial(np.copyto, copy, constant(np.inf, x), where=mask),
    )
