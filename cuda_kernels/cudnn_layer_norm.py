"""LayerNorm with engine ``CUDNN``; the kernels of :mod:`.layer_norm` where it has no plan.

cuDNN wants factors and offsets, and its statistics are ``1 / std``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpunet.arguments import Arguments
from gpunet.cuda_kernels import cudnn_execution
from gpunet.cuda_kernels.cudnn import NoPlanError
from gpunet.cuda_kernels.cudnn_norm_graphs import LayerNorm
from gpunet.cuda_kernels.cudnn_normalization import CUDNN, own_kernel, own_launch
from gpunet.cuda_kernels.launch import elementwise, in_order, prepare
from gpunet.cuda_kernels.pieces import Buffers, Launch
from gpunet.cuda_kernels.reference import reference_launch
from gpunet.cuda_kernels.signature import Kernel
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.layer_norm import groups_of
from gpunet.specs import TensorSpec, spec

_INVERSE = Kernel("layer_norm", "inverse_deviations", "const float* x, float* y, int64 n")


def descriptor(op: Operator, x: Any) -> LayerNorm:
    """The graph of an operator (or its gradient) on X, given as spec or buffer."""
    groups = groups_of(op.type, op.args, x.shape)
    return LayerNorm(x.dtype.name, groups.rows, groups.columns, op.type.endswith("Gradient"))


def _x(op: Operator, inputs: Sequence[Any]) -> Any:
    return inputs[4 if op.type.endswith("Gradient") else 0]


def _against(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    if not op.args.elementwise_affine:
        return "cuDNN wants factors and offsets"
    return descriptor(op, _x(op, inputs)).against()


def _scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    graph = descriptor(op, _x(op, inputs))
    plain, own = own_kernel(op)
    wanted = [] if own.scratch is None else own.scratch(plain, inputs, outputs)
    return [*wanted, spec((graph.rows,), "float32"), cudnn_execution.workspace(graph)]


@kernel("LayerNorm", device="cuda", engine=CUDNN, binds=True, scratch=_scratch, against=_against)
def layer_norm(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = (X - mean) / std * gamma + beta``."""
    if ctx.backend.simulated:
        return reference_launch(inputs, outputs, args, ctx)
    y, mean, deviation = outputs
    *own, inverse, workspace = ctx.scratch
    given = dict(zip(("x", "scale", "bias"), inputs, strict=True))
    operands = given | {"y": y, "mean": mean, "inv_std": inverse}
    numbers = {"epsilon": args.epsilon}
    try:
        launch = cudnn_execution.prepare(ctx, descriptor(ctx.op, inputs[0]), operands, workspace, numbers)
    except NoPlanError as error:
        return own_launch(inputs, outputs, ctx, error, tuple(own))
    arguments = (inverse, deviation, inverse.size)
    return in_order(launch, prepare(ctx, _INVERSE, (), arguments, elementwise(inverse.size)))


@kernel("LayerNormGradient", device="cuda", engine=CUDNN, binds=True, scratch=_scratch, against=_against)
def layer_norm_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dX = (g - sum(g) / n - xhat sum(g xhat) / n) / std``, ``g = dY gamma``."""
    if ctx.backend.simulated:
        return reference_launch(inputs, outputs, args, ctx)
    dy, _, mean, deviation, x, gamma = inputs
    *own, inverse, workspace = ctx.scratch
    given = {"x": x, "scale": gamma, "dy": dy, "mean": mean, "inv_std": inverse}
    operands = given | dict(zip(("dx", "dscale", "dbias"), outputs, strict=True))
    try:
        launch = cudnn_execution.prepare(ctx, descriptor(ctx.op, x), operands, workspace)
    except NoPlanError as error:
        return own_launch(inputs, outputs, ctx, error, tuple(own))
    arguments = (deviation, inverse, inverse.size)
    return in_order(prepare(ctx, _INVERSE, (), arguments, elementwise(inverse.size)), launch)
