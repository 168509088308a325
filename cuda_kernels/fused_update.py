"""Launchers of the updates that add weight decay: one pass over parameter, gradient and state."""

from __future__ import annotations

from typing import Final

from gpunet.arguments import Arguments
from gpunet.cuda_kernels.optimizer import adam_launch, momentum_launch
from gpunet.cuda_kernels.pieces import Buffers, Launch
from gpunet.kernels import KernelContext, kernel
from gpunet.operators.fused_update import PLAIN_UPDATES

_UPDATES: Final = {"MomentumSGDUpdate": momentum_launch, "Adam": adam_launch}


@kernel(*PLAIN_UPDATES, device="cuda", binds=True)
def update(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The update with ``gradient_weight grad + param_weight param``."""
    *given, gradient_weight, param_weight = inputs
    launch = _UPDATES[PLAIN_UPDATES[ctx.op.type]]
    return launch(tuple(given), outputs, args, ctx, (gradient_weight, param_weight))
