"""NumPy kernels of Dropout."""

from __future__ import annotations

import numpy as np

from gpunet import philox
from gpunet.arguments import Arguments
from gpunet.cpu_fallback.precision import Array, Arrays
from gpunet.kernels import KernelContext, kernel


def _apply(x: Array, mask: Array, ratio: float, out: Array) -> None:
    np.multiply(x, 1.0 / (1.0 - ratio), out=out)
    np.multiply(out, mask, out=out)


@kernel("Dropout")
def dropout(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``Y = X mask / (1 - ratio)`` with a random mask."""
    x, y = inputs[0], outputs[0]
    if args.is_test:
        if y is not x:
            np.copyto(y, x)
        if len(outputs) > 1:
            outputs[1].fill(True)
        return
    mask = outputs[1]
    philox.bernoulli(mask, 1.0 - args.ratio, seed=ctx.seed, operator=ctx.operator_id, step=ctx.run.step)
    _apply(x, mask, args.ratio, y)


@kernel("DropoutGrad")
def dropout_grad(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dX = dY mask / (1 - ratio)``."""
    dy, dx = inputs[0], outputs[0]
    if not args.is_test:
        _apply(dy, inputs[1], args.ratio, dx)
    elif dx is not dy:
        np.copyto(dx, dy)
