"""Launchers of the activation functions."""

from __future__ import annotations

from collections.abc import Callable

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.launch import elementwise, prepare
from gpunet.cuda_kernels.signature import FLOATS, Kernel
from gpunet.kernels import KernelContext, kernel

Buffers = tuple[Buffer, ...]

_RELU_FWD = Kernel("activation", "relu_fwd", "const T* x, T* y, int64 n", T=FLOATS)
_RELU_BWD = Kernel("activation", "relu_bwd", "const T* y, const T* dy, T* dx, int64 n", T=FLOATS)


@kernel("Relu", device="cuda", binds=True)
def relu(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Callable[[], None]:
    """``Y = max(X, 0)``."""
    (x,), (y,) = inputs, outputs
    return prepare(ctx, _RELU_FWD, (x.dtype,), (x, y, x.size), elementwise(x.size))


@kernel("ReluGradient", device="cuda", binds=True)
def relu_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Callable[[], None]:
    """``dX = dY where Y > 0, else 0``."""
    (y, dy), (dx,) = inputs, outputs
    return prepare(ctx, _RELU_BWD, (y.dtype,), (y, dy, dx, y.size), elementwise(y.size))
