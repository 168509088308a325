"""Launchers of the adaption of learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cuda_kernels.launch import THREADS, in_order, one_block, prepare, rows
from gpunet.cuda_kernels.optimizer import square_sums_scratch
from gpunet.cuda_kernels.pieces import Buffers, Launch
from gpunet.cuda_kernels.signature import Kernel
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.specs import TensorSpec, spec

_REALS: Final = ("float32", "float64")
_SUMS = Kernel(
    "learning_rate",
    "adaption_sums",
    "const T* g, const T* e, double* partial, int64 n, int64 count",
    T=_REALS,
)
_ADAPTION = Kernel(
    "learning_rate",
    "adaption_fwd",
    "const double* partial, const L* lr, L* new_lr, int64 count, double alpha, int32 normalized",
    L=_REALS,
)


def _scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    """Parts of three sums."""
    return [spec((3, square_sums_scratch(inputs[1]).size), np.float64)]


@kernel("LearningRateAdaption", device="cuda", binds=True, scratch=_scratch)
def learning_rate_adaption(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``lr - alpha g.e`` or ``lr (1 - alpha g.e / (|g| |e|))``."""
    lr, grad, effective = inputs
    (partial,) = ctx.scratch
    count = partial.shape[1]
    sums = (grad, effective, partial, grad.size, count)
    last = (partial, lr, outputs[0], count, args.lr_alpha, int(args.normalized_lr_adaption))
    return in_order(
        prepare(ctx, _SUMS, (grad.dtype,), sums, rows(count, THREADS)),
        prepare(ctx, _ADAPTION, (lr.dtype,), last, one_block(count)),
    )
