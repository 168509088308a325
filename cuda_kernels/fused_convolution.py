"""FusedConv and FusedFC: the default kernels, and FusedConv with engine ``DIRECT``.

A GPU takes cuDNN's fused graph, else its convolution with the bias alone, else the kernels of
:mod:`.conv_direct`; what is left is done by one kernel of our own. The simulated device stands in for the
library with the CPU's convolution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import conv_direct, cudnn_execution, matmul
from gpunet.cuda_kernels.convolution import descriptor
from gpunet.cuda_kernels.cudnn import NoPlanError
from gpunet.cuda_kernels.cudnn_graphs import Convolution
from gpunet.cuda_kernels.launch import in_order
from gpunet.cuda_kernels.pieces import Buffers, Launch, map_launch
from gpunet.cuda_kernels.reference import reference_launch
from gpunet.cuda_kernels.signature import FLOATS, Kernel
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.fused_convolution import operand, words_of
from gpunet.proto import OperatorDef
from gpunet.specs import TensorSpec

#: Kernels by the words that they do; those that add a tensor read it second.
_KERNELS: Final[dict[tuple[str, ...], Kernel]] = {
    (word,): Kernel("fused_convolution", f"epilogue_{word}", "const T* x, T* y, int64 n", T=FLOATS)
    for word in ("relu", "sigmoid")
} | {
    words: Kernel(
        "fused_convolution",
        "_".join(("epilogue", *words)),
        "const T* a, const T* b, T* y, int64 n",
        T=FLOATS,
    )
    for words in (("add",), ("add", "relu"), ("add", "sigmoid"))
}


def graphs(op: Operator, x: Any, w: Any) -> list[Convolution]:
    """The graphs that cuDNN is asked for, the one with all of the epilogue first."""
    whole = words_of(op.args)
    parts = (whole, (*(word for word in whole if word == "bias"),))
    plain = descriptor("forward", op, x, w)
    return [dataclasses.replace(plain, epilogue=words) for words in dict.fromkeys(parts)]


def _rest(
    args: Arguments, inputs: Buffers, y: Buffer, done: Sequence[str], ctx: KernelContext
) -> list[Launch]:
    """What is left of the epilogue when the words ``done`` are."""
    left = tuple(word for word in words_of(args) if word not in done)
    if not left or not y.size:
        return []
    added = operand(args, inputs, "add")
    return [map_launch(ctx, _KERNELS[left], (y, y) if added is None else (y, added, y))]


def _by_parts(
    convolution: Callable[..., Launch], inputs: Buffers, y: Buffer, args: Arguments, ctx: KernelContext
) -> Launch:
    """The convolution with its bias, then what is left."""
    definition = OperatorDef()
    definition.CopyFrom(ctx.op.definition)
    definition.type = "Conv"
    given = inputs[: 3 if "bias" in words_of(args) else 2]
    del definition.input[len(given) :]
    plain = dataclasses.replace(ctx, op=Operator(definition))
    first = convolution(given, (y,), plain.op.args, plain)
    return in_order(first, *_rest(args, inputs, y, ("bias",), ctx))


@kernel("FusedConv", device="cuda", engine=conv_direct.DIRECT, binds=True, against=conv_direct.against)
def fused_convolution_direct(
    inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext
) -> Launch:
    """``Y = act(W * X + b + R)``."""
    return _by_parts(conv_direct.convolution, inputs, outputs[0], args, ctx)


def _scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    return [cudnn_execution.workspace(*graphs(op, inputs[0], inputs[1]))]


@kernel("FusedConv", device="cuda", binds=True, scratch=_scratch, against=conv_direct.against)
def fused_convolution(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = act(W * X + b + R)``."""
    y = outputs[0]
    if ctx.backend.simulated:
        return _by_parts(reference_launch, inputs, y, args, ctx)
    operands = {"x": inputs[0], "w": inputs[1], "y": y}
    operands |= {
        word: found for word in ("bias", "add") if (found := operand(args, inputs, word)) is not None
    }
    for graph in graphs(ctx.op, inputs[0], inputs[1]):
        buffers = {name: operands[name] for name in graph.operands()}
        try:
            first = cudnn_execution.prepare(ctx, graph, buffers, ctx.scratch[-1])
        except NoPlanError as error:
            reason = error
            continue
        return in_order(first, *_rest(args, inputs, y, graph.epilogue, ctx))
    if all(buffer.size for buffer in operands.values()):
        cudnn_execution.tell(ctx, reason, conv_direct.INSTEAD)
    return _by_parts(conv_direct.convolution, inputs, y, args, ctx)


def _product(type: str, trans_b: bool) -> Callable[..., Launch]:
    @kernel(type, device="cuda", binds=True)
    def fused(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
        """``Y = max(X op(W) + b, 0)``."""
        return matmul.fully_connected(inputs, outputs, args, ctx, trans_b, relu=True)

    return fused


_product("FusedFC", True)
_product("FusedFCTransposed", False)
