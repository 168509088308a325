"""Convolution: the default kernels.

A GPU takes cuDNN, or, where that has no plan, the kernels of :mod:`.conv_direct`; which is said once. The
simulated device stands in for the library with the CPU's kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import conv_direct, cudnn_execution
from gpunet.cuda_kernels.cudnn import NoPlanError
from gpunet.cuda_kernels.cudnn_graphs import Convolution
from gpunet.cuda_kernels.launch import in_order
from gpunet.cuda_kernels.pieces import Buffers, Launch
from gpunet.cuda_kernels.reference import reference_launch
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.specs import Shape, TensorSpec


def descriptor(kind: str, op: Operator, x: Any, w: Any, *, bias: bool = False) -> Convolution:
    """The graph of an operator on X and W, given as specs or buffers; of up to three spatial dimensions.

    ``kind`` is that of :class:`Convolution`. A signal becomes an image of height 1.
    """
    window = conv_direct.window_of(op, x, w)
    last = window.channels_last
    signal = window.rank == 1

    def spatial(values: Shape, missing: int) -> Shape:
        return ((missing,) if signal else ()) + tuple(values)

    channels, in_group = (x.shape[-1], w.shape[-1]) if last else (x.shape[1], w.shape[1])
    filters = w.shape[0]
    return Convolution(
        kind,
        x.dtype.name,
        (x.shape[0], channels, *spatial(window.image, 1)),
        (filters, in_group, *spatial(window.kernel, 1)),
        (x.shape[0], filters, *spatial(window.output, 1)),
        spatial(window.stride, 1),
        spatial(window.dilation, 1),
        spatial(window.head, 0),
        spatial(window.tail, 0),
        last,
        ("bias",) if bias else (),
    )


def _wanted(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Convolution]:
    """The graphs of a gradient."""
    _, _, dx = conv_direct.gradient_outputs(op.args, outputs)
    kinds = ["filter"] if dx is None else ["filter", "data"]
    return [descriptor(kind, op, inputs[0], inputs[1]) for kind in kinds]


def prepare_graph(
    ctx: KernelContext, graph: Convolution, buffers: Mapping[str, Buffer], direct: Callable[[], Launch]
) -> Launch:
    """The launch of a graph by cuDNN, or the direct one. The last scratch is the workspace."""
    try:
        return cudnn_execution.prepare(ctx, graph, buffers, ctx.scratch[-1])
    except NoPlanError as error:
        if all(buffer.size for buffer in buffers.values()):
            cudnn_execution.tell(ctx, error, conv_direct.INSTEAD)
        return direct()


def _forward_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    return [cudnn_execution.workspace(descriptor("forward", op, inputs[0], inputs[1], bias=len(inputs) > 2))]


@kernel(
    *conv_direct.FORWARD_TYPES,
    device="cuda",
    binds=True,
    scratch=_forward_scratch,
    against=conv_direct.against,
)
def convolution(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = W * X + b``."""
    if ctx.backend.simulated:
        return reference_launch(inputs, outputs, args, ctx)
    x, w, *bias = inputs
    buffers = {"x": x, "w": w, "y": outputs[0]} | ({"bias": bias[0]} if bias else {})
    graph = descriptor("forward", ctx.op, x, w, bias=bool(bias))
    return prepare_graph(ctx, graph, buffers, lambda: conv_direct.convolution(inputs, outputs, args, ctx))


def _gradient_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    partial = conv_direct.gradient_scratch(op, inputs, outputs)
    return [*partial, cudnn_execution.workspace(*_wanted(op, inputs, outputs))]


@kernel(
    *conv_direct.GRADIENT_TYPES,
    device="cuda",
    binds=True,
    scratch=_gradient_scratch,
    against=conv_direct.against,
)
def convolution_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dW = dY * X``, ``dX = dY * W``, db the sum of dY: a kernel of our own."""
    if ctx.backend.simulated:
        return reference_launch(inputs, outputs, args, ctx)
    x, w, dy = inputs
    dw, db, dx = conv_direct.gradient_outputs(args, outputs)
    graphs = _wanted(ctx.op, inputs, outputs)
    launches = [
        prepare_graph(
            ctx,
            graphs[0],
            {"x": x, "w": dw, "y": dy},
            lambda: conv_direct.filter_gradient(ctx, x, w, dy, dw),
        )
    ]
    if db is not None:
        launches.append(conv_direct.channel_sums(ctx, dy, db))
    if dx is not None:
        launches.append(
            prepare_graph(
                ctx,
                graphs[1],
                {"x": dx, "w": w, "y": dy},
                lambda: conv_direct.data_gradient(ctx, x, w, dy, dx),
            )
        )
    return in_order(*launches)
