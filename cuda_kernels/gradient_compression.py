"""Launchers of gradient compression."""

from __future__ import annotations

from gpunet.arguments import Arguments
from gpunet.cuda_kernels.launch import elementwise, prepare
from gpunet.cuda_kernels.pieces import Buffers, Launch, nothing
from gpunet.cuda_kernels.signature import Kernel
from gpunet.kernels import KernelContext, kernel

_ROUND = Kernel(
    "gradient_compression",
    "round_with_feedback",
    "const float* bucket, float* error, float16* rounded, int64 n",
)


@kernel("RoundWithFeedback", device="cuda", binds=True)
def round_with_feedback(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``rounded = half(bucket + error)``, ``error = bucket + error - rounded``."""
    rounded, error = outputs
    if rounded.size == 0:
        return nothing
    return prepare(ctx, _ROUND, (), (inputs[0], error, rounded, rounded.size), elementwise(rounded.size))
