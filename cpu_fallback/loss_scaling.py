"""NumPy kernels of loss scaling."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.kernels import KernelContext, StopNet, kernel

Arrays = tuple[npt.NDArray[Any], ...]
log = logging.getLogger("gpunet")


@kernel("UnscaleGradients")
def unscale_gradients(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Divides each gradient by the scale; the flag is 0 if any element is not finite."""
    scale = inputs[0].reshape(-1)[0]
    finite = True
    for gradient, result in zip(inputs[1:], outputs[1:], strict=True):
        np.divide(gradient, scale, out=result, casting="same_kind")
        finite = finite and bool(np.isfinite(result).all())
    outputs[0][...] = finite


@kernel("UpdateLossScale")
def update_loss_scale(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Lowers the scale after a bad step, and says so; raises it after a run of good ones."""
    scale, good, skipped = outputs
    if inputs[3].reshape(-1)[0]:
        good += 1
        if good.reshape(-1)[0] >= args.interval:
            np.minimum(scale * args.growth, args.maximum, out=scale, casting="same_kind")
            good[...] = 0
    else:
        scale *= args.backoff
        good[...] = 0
        skipped += 1
        log.warning(
            "%s: gradients are not finite, the step is skipped (%d so far); the scale of the loss is now %g",
            ctx.op.where,
            skipped.reshape(-1)[0],
            scale.reshape(-1)[0],
        )


@kernel("StopUnless")
def stop_unless(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> list[Any]:
    """Ends the run where the condition is 0."""
    if not inputs[0].reshape(-1)[0]:
        raise StopNet
    return []
