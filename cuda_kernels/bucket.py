"""Launchers of buckets: one launch for all tensors (:mod:`gpunet.cuda_kernels.multi_tensor`)."""

from __future__ import annotations

import itertools

from gpunet.arguments import Arguments
from gpunet.cuda_kernels.multi_tensor import TensorList
from gpunet.cuda_kernels.pieces import Buffers, Launch, map_launch, nothing
from gpunet.cuda_kernels.signature import FLOATS, Kernel
from gpunet.kernels import KernelContext, kernel

_DRAIN = Kernel("bucket", "drain", "T* bucket, T* gathered, int64 n", T=FLOATS)


@kernel("PackBucket", device="cuda", binds=True)
def pack_bucket(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``bucket = factor * tensors``, some of which may lie in the bucket."""
    return TensorList(inputs[1:]).pack(ctx, outputs[0], inputs[0])


@kernel("UnpackBucket", device="cuda", binds=True)
def unpack_bucket(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The tensors from their places in the bucket, but for those that lie there."""
    bucket = inputs[0]
    starts = itertools.accumulate((t.size for t in outputs), initial=0)
    moved = [
        (t, start)
        for t, start in zip(outputs, starts, strict=False)
        if t.pointer != bucket.pointer + start * bucket.dtype.itemsize
    ]
    if not moved:
        return nothing
    return TensorList([t for t, _ in moved], [start for _, start in moved]).unpack(ctx, bucket)


@kernel("DrainBucket", device="cuda", binds=True)
def drain_bucket(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``bucket += gathered``, ``gathered = 0``."""
    return map_launch(ctx, _DRAIN, outputs) if outputs[0].size else nothing
