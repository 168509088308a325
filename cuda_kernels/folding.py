"""Launcher of FoldBatchNorm."""

from __future__ import annotations

from gpunet.arguments import Arguments
from gpunet.cuda_kernels.launch import elementwise, prepare
from gpunet.cuda_kernels.pieces import Buffers, Launch
from gpunet.cuda_kernels.signature import FLOATS, Kernel
from gpunet.kernels import KernelContext, kernel

_FOLD = Kernel(
    "folding",
    "fold_batch_norm",
    "const T* w, const T* scale, const T* bias, const T* mean, const T* var, const T* b, T* folded_w, "
    "T* folded_b, int64 channels, int64 inner, double epsilon",
    T=FLOATS,
)


@kernel("FoldBatchNorm", device="cuda", binds=True)
def fold_batch_norm(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``W f`` and ``(b - mean) f + bias``."""
    w, *vectors = inputs
    b = vectors[4] if len(vectors) > 4 else None
    channels = w.shape[0]
    sizes = (channels, w.size // max(1, channels))
    arguments = (w, *vectors[:4], b, *outputs, *sizes, args.epsilon)
    return prepare(ctx, _FOLD, (w.dtype,), arguments, elementwise(max(w.size, channels)))
