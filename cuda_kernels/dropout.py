"""Launchers of Dropout."""

from __future__ import annotations

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cuda_kernels.fill import constant_launch, key
from gpunet.cuda_kernels.launch import elementwise, in_order, prepare
from gpunet.cuda_kernels.pieces import Buffers, Launch, copy_launch
from gpunet.cuda_kernels.signature import FLOATS, Kernel
from gpunet.kernels import KernelContext, kernel
from gpunet.philox import bernoulli_threshold

_FWD = Kernel(
    "dropout",
    "dropout_fwd",
    "const T* x, T* y, uint8* mask, int64 n, double scale, uint64 threshold, "
    "uint64 seed, uint32 operator_id, const uint64* step",
    T=FLOATS,
)
_BWD = Kernel(
    "dropout", "dropout_bwd", "const T* dy, const uint8* mask, T* dx, int64 n, double scale", T=FLOATS
)


@kernel("Dropout", device="cuda", binds=True)
def dropout(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = X mask / (1 - ratio)`` with a random mask."""
    x, y = inputs[0], outputs[0]
    if args.is_test:
        return in_order(copy_launch(ctx, x, y), *(constant_launch(ctx, mask, True) for mask in outputs[1:]))
    mask = outputs[1].view(outputs[1].shape, np.uint8)
    threshold = bernoulli_threshold(1.0 - args.ratio)
    arguments = (x, y, mask, x.size, 1.0 / (1.0 - args.ratio), threshold, *key(ctx))
    return prepare(ctx, _FWD, (x.dtype,), arguments, elementwise(x.size, per_thread=4))


@kernel("DropoutGrad", device="cuda", binds=True)
def dropout_grad(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dX = dY mask / (1 - ratio)``."""
    dy, dx = inputs[0], outputs[0]
    if args.is_test:
        return copy_launch(ctx, dy, dx)
    mask = inputs[1].view(inputs[1].shape, np.uint8)
    arguments = (dy, mask, dx, dy.size, 1.0 / (1.0 - args.ratio))
    return prepare(
        ctx, _BWD, (dy.dtype,), arguments, elementwise(dy.size, per_thread=16 // dy.dtype.itemsize)
    )
