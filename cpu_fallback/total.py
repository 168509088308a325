"""NumPy kernels of the sums over all elements."""

from __future__ import annotations

from functools import partial

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.precision import Array, Arrays, widened
from gpunet.cpu_fallback.steps import Step, constant, in_turn, wide_constant
from gpunet.kernels import KernelContext, kernel


def _averaged(step: Step, y: Array, args: Arguments, count: int) -> Step:
    return in_turn(step, partial(np.divide, y, constant(count, y), y) if args.average and count else None)


@kernel("SumElements", binds=True)
def sum_elements(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = sum(X)``."""
    x, (y,) = inputs[0], outputs
    if x.dtype == np.float16:

        def sum_wide() -> None:
            total = np.add.reduce(x, axis=None, dtype=np.float32)
            y[...] = total / x.size if args.average and x.size else total

        return sum_wide
    return _averaged(partial(np.add.reduce, x, axis=None, out=y), y, args, x.size)


@kernel("SumElementsInt", binds=True)
def sum_elements_int(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = sum(X)`` in X's type, with its overflow."""
    return partial(np.add.reduce, inputs[0], axis=None, dtype=inputs[0].dtype, out=outputs[0])


@kernel("SumSqrElements")
def sum_sqr_elements(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``Y = sum(X^2)``."""
    x = widened(inputs[0])
    total = np.vdot(x, x)
    outputs[0][...] = total / x.size if args.average and x.size else total


@kernel("SumElementsGradient", binds=True)
def sum_elements_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``dX = dY``, or ``dY / count``."""
    x, dy = inputs
    (dx,) = outputs
    value = dy.reshape(())
    if args.average and x.size:
        return partial(np.divide, value, wide_constant(x.size, x), dx)
    return partial(np.copyto, dx, value)
