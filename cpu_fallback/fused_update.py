"""NumPy kernels of the updates that add weight decay: the sum, then the update."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.cpu_fallback import optimizer
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.fused_update import FUSED_UPDATES, PLAIN_UPDATES
from gpunet.specs import TensorSpec

Arrays = tuple[npt.NDArray[Any], ...]
_UPDATES = {"MomentumSGDUpdate": optimizer.momentum_sgd_update, "Adam": optimizer.adam}


def _scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    """For the update, the sum, and the term of the parameter."""
    parameter = FUSED_UPDATES[PLAIN_UPDATES[op.type]][2]
    return [inputs[parameter]] * 3


@kernel(*PLAIN_UPDATES, scratch=_scratch)
def update(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """The update with ``gradient_weight grad + param_weight param``."""
    plain = PLAIN_UPDATES[ctx.op.type]
    _, gradient, parameter = FUSED_UPDATES[plain]
    *given, gradient_weight, param_weight = inputs
    own, total, term = ctx.scratch
    np.multiply(given[gradient], gradient_weight.reshape(()), out=total)
    np.multiply(given[parameter], param_weight.reshape(()), out=term)
    np.add(total, term, out=total)
    given[gradient] = total
    _UPDATES[plain](tuple(given), outputs, args, dataclasses.replace(ctx, scratch=(own,)))
