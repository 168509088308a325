"""Launchers of loss scaling."""

from __future__ import annotations

import numpy as np

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.launch import in_order, prepare
from gpunet.cuda_kernels.multi_tensor import TensorList
from gpunet.cuda_kernels.pieces import Buffers, Launch
from gpunet.cuda_kernels.signature import Kernel
from gpunet.kernels import KernelContext, kernel

_SET = Kernel("loss_scaling", "finite_set", "int32* finite, int32 value")


@kernel("UnscaleGradients", device="cuda", binds=True)
def unscale_gradients(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Divides the gradients by the scale, in place, in one launch for each type of elements; the flag is 0 if
    any element is not finite.
    """
    scale, finite = inputs[0], outputs[0]
    groups: dict[np.dtype, list[Buffer]] = {}
    for gradient in outputs[1:]:
        groups.setdefault(gradient.dtype, []).append(gradient)
    return in_order(
        prepare(ctx, _SET, (), (finite, 1), (1, 32)),
        *(TensorList(group).unscale(ctx, scale, finite) for group in groups.values()),
    )
