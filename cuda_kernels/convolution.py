"""Convolution: the default kernels.

The simulated device stands in for the library with the CPU's kernel; a device runs :mod:`.conv_direct`.
"""

from __future__ import annotations

from gpunet.arguments import Arguments
from gpunet.cuda_kernels import conv_direct
from gpunet.cuda_kernels.pieces import Buffers, Launch
from gpunet.cuda_kernels.reference import reference_launch
from gpunet.kernels import KernelContext, kernel


@kernel(*conv_direct.FORWARD_TYPES, device="cuda", binds=True, against=conv_direct.against)
def convolution(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = W * X + b``."""
    launcher = reference_launch if ctx.backend.simulated else conv_direct.convolution
    return launcher(inputs, outputs, args, ctx)


@kernel(
    *conv_direct.GRADIENT_TYPES,
    device="cuda",
    binds=True,
    scratch=conv_direct.gradient_scratch,
    against=conv_direct.against,
)
def convolution_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Gradients of the filters, of the bias and of the images."""
    launcher = reference_launch if ctx.backend.simulated else conv_direct.convolution_gradient
    return launcher(inputs, outputs, args, ctx)
