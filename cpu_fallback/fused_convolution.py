"""NumPy kernels of FusedConv and FusedFC: each part of the output is finished while it is in the cache.

The steps are those of the operators one by one, so that the results are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.activation import relu, sigmoid
from gpunet.cpu_fallback.columns import Index
from gpunet.cpu_fallback.convolution import Array, Arrays, Run, bind_convolution, forward_scratch
from gpunet.cpu_fallback.matmul import fc, fc_transposed
from gpunet.cpu_fallback.steps import Step, in_turn
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.fused_convolution import activation, operand
from gpunet.specs import TensorSpec
from gpunet.widening import is_narrow, wide_specs


def _scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    """Memory for the convolution; of bfloat16 also for all tensors in float32."""
    wide, made = wide_specs(inputs), wide_specs(outputs)
    own = forward_scratch(op, wide, made)
    return [*wide, *made, *own] if is_narrow(outputs[0]) else own


@kernel("FusedConv", binds=True, scratch=_scratch, bfloat16=True)
def fused_convolution(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Run:
    """``Y = act(W * X + b + R)``."""
    (y,) = outputs
    if not is_narrow(y):
        return _bind(inputs, y, None, ctx.scratch, args, ctx)
    count = len(inputs)
    wide, whole, *own = ctx.scratch[:count], *ctx.scratch[count:]
    run = _bind(wide, whole, y, own, args, ctx)

    def widen_and_run() -> None:
        for single, given in zip(wide, inputs, strict=True):
            np.copyto(single, given)
        run()

    return widen_and_run


def _bind(
    inputs: Arrays,
    y: Array,
    rounded: Array | None,
    scratch: Sequence[Array],
    args: Arguments,
    ctx: KernelContext,
) -> Run:
    """The convolution into ``y`` with its epilogue; each step is rounded to the type of ``rounded``."""
    bias, added = operand(args, inputs, "bias"), operand(args, inputs, "add")
    act = {"relu": relu, "sigmoid": sigmoid, "": None}[activation(args)]

    def after(index: Index) -> Step:
        part = y[index]
        steps: list[Step] = []
        if added is not None:
            steps.append(partial(np.add, part, added[index], out=part))
        if act is not None:
            steps.append(act((part,), (part,), args, ctx))
        if rounded is None:
            return in_turn(*steps)
        target = rounded[index]
        narrow: Step = partial(np.copyto, target, part, casting="same_kind")
        widen: Step = partial(np.copyto, part, target)
        return in_turn(narrow, *(piece for step in steps for piece in (widen, step, narrow)))

    return bind_convolution(inputs[0], inputs[1], bias, y, args, scratch, after)


@kernel("FusedFC", "FusedFCTransposed")
def fused_fc(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``Y = max(X W^T + b, 0)``, or with W as it is."""
    product = fc_transposed if ctx.op.type.endswith("Transposed") else fc
    product(inputs, outputs, args, ctx)
    np.maximum(outputs[0], 0, out=outputs[0])
