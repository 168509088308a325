"""Launchers of copies and type conversions."""

from __future__ import annotations

from gpunet.arguments import Arguments
from gpunet.cuda_kernels.pieces import Buffers, Launch, copy_launch, map_launch, nothing
from gpunet.cuda_kernels.signature import FLOATS, NUMBERS, Conversion, Kernel
from gpunet.kernels import KernelContext, kernel

_ALL = (*NUMBERS, "bool")
_CAST = Conversion("copying", "cast_fwd", "const T* x, R* y, int64 n", T=_ALL, R=_ALL)
_LIMITED_HALF = Kernel("copying", "limited_half_fwd", "const T* x, float16* y, int64 n", T=FLOATS)


# EnsureCPUOutput, CopyCPUToGPU and CopyGPUToCPU have one end on the host: they run there.
@kernel("Copy", "CopyFromCPUInput", "CopyOnDeviceLike", "Alias", "StopGradient", device="cuda", binds=True)
def copy(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = X``."""
    return copy_launch(ctx, inputs[0], outputs[0])


@kernel("ZeroGradient", device="cuda", binds=True)
def zero_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Nothing."""
    return nothing


@kernel("Cast", "HalfToFloat", device="cuda", binds=True)
def cast(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = X`` in another element type."""
    x, y = inputs[0], outputs[0]
    return copy_launch(ctx, x, y) if x.dtype == y.dtype else map_launch(ctx, _CAST, (x, y))


@kernel("FloatToHalf", device="cuda", binds=True)
def float_to_half(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = X`` in float16."""
    if not args.clip:
        return cast(inputs, outputs, args, ctx)
    return map_launch(ctx, _LIMITED_HALF, (inputs[0], outputs[0]))
