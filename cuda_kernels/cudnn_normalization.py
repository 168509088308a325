"""Batch normalization in training with engine ``CUDNN``; the kernels of :mod:`.normalization` where it has
no plan.

cuDNN wants channels that are a multiple of 4 (float32) or 8 (half types) and float32 statistics.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import cudnn_execution
from gpunet.cuda_kernels.cudnn import NoPlanError
from gpunet.cuda_kernels.cudnn_norm_graphs import BatchNorm
from gpunet.cuda_kernels.pieces import Buffers, Launch, is_same
from gpunet.cuda_kernels.reference import reference_launch
from gpunet.kernels import Kernel, KernelContext, find, kernel
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from gpunet.specs import TensorSpec

CUDNN: Final = "CUDNN"


def descriptor(op: Operator, x: Any, *, backward: bool) -> BatchNorm:
    """The graph of an operator on X, given as spec or buffer."""
    last = op.args.order == "NHWC" and len(x.shape) > 2
    channels = x.shape[-1] if last else x.shape[1]
    image = tuple(x.shape[1:-1] if last else x.shape[2:])
    image = (1,) * (2 - len(image)) + image
    return BatchNorm(x.dtype.name, (x.shape[0], channels, *image), last, backward)


def _against(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    x, scale = inputs[0], inputs[1]
    backward = op.type.endswith("Gradient")
    if op.args.is_test:
        return "cuDNN normalizes batches in training only"
    if op.args.num_batches > 1:
        return "cuDNN takes one batch at a time"
    if scale.dtype != "float32":
        return f"scale is {scale.dtype}, cuDNN wants float32"
    if not backward and len(outputs) < 5:
        return "cuDNN gives all of the statistics"
    graph = descriptor(op, x, backward=backward)
    if len(graph.x) > 5:
        return f"it has {len(graph.x) - 2} spatial dimensions, cuDNN takes 3"
    if math.prod(graph.x) == graph.x[1]:
        return "one value a channel has no variance"
    return graph.against()


def own_kernel(op: Operator) -> tuple[Operator, Kernel]:
    """The operator without an engine, and its kernel."""
    definition = OperatorDef()
    definition.CopyFrom(op.definition)
    definition.engine = ""
    plain = Operator(definition)
    return plain, find(plain, "cuda")


def _scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    graph = descriptor(op, inputs[0], backward=op.type.endswith("Gradient"))
    plain, own = own_kernel(op)
    wanted = [] if own.scratch is None else own.scratch(plain, inputs, outputs)
    return [*wanted, cudnn_execution.workspace(graph)]


def _launch(
    inputs: Buffers,
    outputs: Buffers,
    args: Arguments,
    ctx: KernelContext,
    operands: Mapping[str, Buffer],
    numbers: Mapping[str, float],
) -> Launch:
    if ctx.backend.simulated:
        return reference_launch(inputs, outputs, args, ctx)
    graph = descriptor(ctx.op, inputs[0], backward="dx" in operands)
    try:
        if any(is_same(operands["x"], operands[name]) for name in ("y", "dx") if name in operands):
            raise NoPlanError("cuDNN does not normalize in place")
        return cudnn_execution.prepare(ctx, graph, operands, ctx.scratch[-1], numbers)
    except NoPlanError as error:
        return own_launch(inputs, outputs, ctx, error, ctx.scratch[:-1])


def own_launch(
    inputs: Buffers, outputs: Buffers, ctx: KernelContext, error: NoPlanError, scratch: Buffers
) -> Launch:
    """The launch of the kernel without an engine; says once why cuDNN is not taken."""
    cudnn_execution.tell(ctx, error, "kernels of its own")
    plain, own = own_kernel(ctx.op)
    context = dataclasses.replace(ctx, op=plain, scratch=scratch)
    launch: Launch = own.function(inputs, outputs, plain.args, context)
    return launch


@kernel("SpatialBN", device="cuda", engine=CUDNN, binds=True, scratch=_scratch, against=_against)
def spatial_bn(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = scale (X - mean) / sqrt(var + epsilon) + bias`` by channel, and the statistics."""
    given = dict(zip(("x", "scale", "bias", "mean", "var"), inputs, strict=True))
    made = dict(zip(("y", "new_mean", "new_var", "saved_mean", "saved_inv_std"), outputs, strict=True))
    # cuDNN's momentum is the part of the batch, not the part that is kept.
    numbers = {"epsilon": args.epsilon, "momentum": 1.0 - args.momentum}
    return _launch(inputs, outputs, args, ctx, given | made, numbers)


@kernel("SpatialBNGradient", device="cuda", engine=CUDNN, binds=True, scratch=_scratch, against=_against)
def spatial_bn_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dX = scale inv_std (dY - dbias / n - xhat dscale / n)``."""
    given = dict(zip(("x", "scale", "dy", "mean", "inv_std"), inputs, strict=True))
    made = dict(zip(("dx", "dscale", "dbias"), outputs, strict=True))
    return _launch(inputs, outputs, args, ctx, given | made, {})
