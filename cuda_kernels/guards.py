"""Guards of operators that have no finite value at 0: a copy of the operand that keeps away from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gpunet.arguments import Arguments
from gpunet.cuda_kernels.launch import in_order
from gpunet.cuda_kernels.pieces import Buffers, Launch, argument_dtype, map_launch, nothing
from gpunet.cuda_kernels.signature import FLOATS, Kernel
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.guards import DIVIDES, guarded_input
from gpunet.specs import TensorSpec

_RAISED = Kernel("unary", "raised_fwd", "const T* x, T* y, int64 n, double epsilon", T=FLOATS)
_APART = Kernel("unary", "apart_fwd", "const T* x, T* y, int64 n, double epsilon, double infinity", T=FLOATS)


def guard_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    """Scratch for the guarded copy; none where ``epsilon`` is not above 0."""
    return [] if op.args.epsilon <= 0 else [inputs[guarded_input(op)]]


def guarded_kernel(type: str, declared: Kernel) -> None:
    """Registers ``Y = f(X)``, or of the guarded copy of X."""

    @kernel(type, device="cuda", binds=True, scratch=guard_scratch)
    def bind(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
        guarding, (x,) = guard(inputs, ctx)
        return behind(guarding, map_launch(ctx, declared, (x, outputs[0])))


def behind(guarding: Launch, launch: Launch) -> Launch:
    """A launch behind that of a guard, if there is one."""
    return launch if guarding is nothing else in_order(guarding, launch)


def guard(inputs: Buffers, ctx: KernelContext) -> tuple[Launch, Buffers]:
    """The launch that makes the guarded copy in the last scratch, and the inputs with it in place of the
    operand; nothing and the inputs as they are where ``epsilon`` is not above 0.
    """
    epsilon = ctx.op.args.epsilon
    if epsilon <= 0:
        return nothing, inputs
    index = guarded_input(ctx.op)
    x, copy = inputs[index], ctx.scratch[-1]
    # Rounded to the type of the data, as on the CPU.
    low = float(argument_dtype(x.dtype).type(epsilon))
    if ctx.op.type in DIVIDES:
        launch = map_launch(ctx, _APART, (x, copy), low, math.inf)
    else:
        launch = map_launch(ctx, _RAISED, (x, copy), low)
    return launch, (*inputs[:index], copy, *inputs[index + 1 :])
