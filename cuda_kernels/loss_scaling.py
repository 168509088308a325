"""Launchers of loss scaling."""

from __future__ import annotations

from gpunet.arguments import Arguments
from gpunet.cuda_kernels.launch import elementwise, in_order, prepare
from gpunet.cuda_kernels.pieces import Buffers, Launch
from gpunet.cuda_kernels.signature import FLOATS, Kernel
from gpunet.kernels import KernelContext, kernel

_SET = Kernel("loss_scaling", "finite_set", "int32* finite, int32 value")
_UNSCALE = Kernel(
    "loss_scaling", "unscale", "const float* scale, T* gradient, int32* finite, int64 n", T=FLOATS
)


@kernel("UnscaleGradients", device="cuda", binds=True)
def unscale_gradients(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Divides each gradient by the scale, in place; the flag is 0 if any element is not finite."""
    scale, finite = inputs[0], outputs[0]
    launches = [prepare(ctx, _SET, (), (finite, 1), (1, 32))]
    for gradient in outputs[1:]:
        arguments = (scale, gradient, finite, gradient.size)
        launches.append(prepare(ctx, _UNSCALE, (gradient.dtype,), arguments, elementwise(gradient.size)))
    return in_order(*launches)
