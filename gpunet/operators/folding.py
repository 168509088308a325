"""FoldBatchNorm: what the pass ``batch_norm_folding`` makes of filters; nets do not contain it."""

from __future__ import annotations

from collections.abc import Sequence

from gpunet.arguments import Float, Str
from gpunet.operator import Operator
from gpunet.rules import flops_per_input, want_same_type, want_shape
from gpunet.schema import FLOATS, Input, Output, register
from gpunet.specs import TensorSpec


def _infer_fold(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs)
    channels = (inputs[0].shape[0],)
    for index in range(1, len(inputs)):
        want_shape(op, inputs, index, channels, "one number an output channel of W")
    return [inputs[0], inputs[1]]


register(
    "FoldBatchNorm",
    inputs=[
        Input("W", "filters of a convolution, output channels first", FLOATS),
        Input("scale", "scale of the batch norm behind it", FLOATS),
        Input("bias", "bias of the batch norm", FLOATS),
        Input("mean", "running mean", FLOATS),
        Input("var", "running variance", FLOATS),
        Input("b", "bias of the convolution", FLOATS, optional=True),
    ],
    outputs=[Output("folded_W", "filters, like W"), Output("folded_b", "bias, like scale")],
    args=[
        Float("epsilon", 1e-5, "added to the variance"),
        Str("order", "NCHW", "order of the convolution's dimensions; output channels come first in both"),
    ],
    infer=_infer_fold,
    flops=flops_per_input(),
    doc="Filters and bias with which a convolution alone gives what a convolution and a batch norm in test "
    "mode do: "
    "``folded_W = W f``, ``folded_b = (b - mean) f + bias``, ``f = scale / sqrt(var + epsilon)`` for each "
    "output channel.",
)
