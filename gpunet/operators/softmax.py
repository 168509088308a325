"""Softmax and its fusion with the cross-entropy loss."""

from __future__ import annotations

from collections.abc import Sequence

from gpunet.arguments import Bool, Float, Int
from gpunet.errors import DataTypeError
from gpunet.gradient_maker import GradientBuilder
from gpunet.operator import Operator
from gpunet.operators.matmul import as_matrix
from gpunet.proto import OperatorDef
from gpunet.rules import canonical_axis, describe, flops_per_output, want_same_type, want_shape, want_size
from gpunet.schema import FLOATS, INDICES, Input, Output, register
from gpunet.specs import TensorSpec

_AXIS = Int("axis", 1, "dimensions from here on are the classes, those before it the examples")


def _infer_softmax(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    canonical_axis(op.args.axis, inputs[0].rank)
    return [inputs[0]]


def _infer_softmax_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs)
    want_shape(op, inputs, 1, inputs[0].shape, "the shape of Y")
    return _infer_softmax(op, inputs)


def _softmax_gradient(g: GradientBuilder) -> list[OperatorDef]:
    return g.single("SoftmaxGradient", [g.output(0), g.output_grad(0)], [g.input_grad(0)])


register(
    "Softmax",
    inputs=[Input("X", "scores: examples x classes", FLOATS)],
    outputs=[Output("Y", "probabilities, like X")],
    args=[_AXIS],
    infer=_infer_softmax,
    gradient=_softmax_gradient,
    flops=flops_per_output(5),
    doc="``Y = exp(X) / sum exp(X)``, the sum over all dimensions from `axis` on together.",
)
register(
    "SoftmaxGradient",
    inputs=[Input("Y", "output of Softmax", FLOATS), Input("dY", "gradient of Y", FLOATS)],
    outputs=[Output("dX", "gradient of X")],
    args=[_AXIS],
    infer=_infer_softmax_gradient,
    flops=flops_per_output(4),
    doc="``dX = Y (dY - sum dY Y)``, the sum over the classes.",
)


_LOSS_ARGS = [
    _AXIS,
    Bool("label_prob", False, "labels are probabilities of all classes rather than a class number"),
    Float("scale", 1.0, "factor of the loss"),
    Bool("average_by_batch_size", False, "divide by the number of examples, not by the sum of the weights"),
]


def _check_loss_inputs(op: Operator, inputs: Sequence[TensorSpec]) -> None:
    x, label = inputs[0], inputs[1]
    examples, classes = as_matrix(x.shape, canonical_axis(op.args.axis, x.rank))
    if op.args.label_prob:
        want_same_type(op, inputs, 0, 1)
        want_size(
            op,
            inputs,
            1,
            examples * classes,
            f"a probability for each of {classes} classes and {examples} examples",
        )
        return
    if label.dtype not in INDICES:
        raise DataTypeError(
            f"{describe(op, 1, label)} holds no class numbers, wanted int32 or int64 (or label_prob=1)"
        )
    want_size(op, inputs, 1, examples, "one label an example")


def _infer_loss(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    _check_loss_inputs(op, inputs)
    x = inputs[0]
    if len(inputs) > 2:
        _want_weights(op, inputs)
    return [x, x.with_shape()]


def _want_weights(op: Operator, inputs: Sequence[TensorSpec]) -> None:
    want_same_type(op, inputs, 0, 2)
    examples, _ = as_matrix(inputs[0].shape, canonical_axis(op.args.axis, inputs[0].rank))
    want_size(op, inputs, 2, examples, "one weight an example")


def _infer_loss_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    _check_loss_inputs(op, inputs)
    if len(inputs) > 4:
        _want_weights(op, inputs)
    p, d = len(inputs) - 2, len(inputs) - 1
    want_same_type(op, inputs, 0, p, d)
    want_size(op, inputs, p, inputs[0].size, "one probability for each score")
    want_size(op, inputs, d, 1, "the gradient of the loss is a scalar")
    return [inputs[0]]


def _loss_gradient(g: GradientBuilder) -> list[OperatorDef]:
    inputs = [g.input(i) for i in range(g.num_inputs)]
    return g.single("SoftmaxWithLossGradient", [*inputs, g.output(0), g.output_grad(1)], [g.input_grad(0)])


register(
    "SoftmaxWithLoss",
    inputs=[
        Input("X", "scores: examples x classes", FLOATS),
        Input(
            "label",
            "class of each example (int32 or int64), or with label_prob the wanted probabilities, like X",
            FLOATS | INDICES,
        ),
        Input("weight", "weight of each example", FLOATS, optional=True),
    ],
    outputs=[Output("P", "probabilities, like X"), Output("loss", "scalar")],
    args=_LOSS_ARGS,
    infer=_infer_loss,
    gradient=_loss_gradient,
    flops=flops_per_output(6),
    doc="Softmax and cross-entropy loss: ``loss = scale * sum w_i l_i / sum w_i`` with ``l_i = -log P[i, "
    "label_i]``, or "
    "``l_i = -sum_j label_ij log max(P_ij, 1e-20)`` with label_prob. The loss is 0 where the weights sum "
    "to 0.",
)
register(
    "SoftmaxWithLossGradient",
    inputs=[
        Input("X", "scores: examples x classes", FLOATS),
        Input("label", "class of each example, or with label_prob probabilities", FLOATS | INDICES),
        Input("weight_or_P", "the weights, where SoftmaxWithLoss had them, then the probabilities", FLOATS),
        Input("P_or_dloss", "the probabilities, or the gradient of the loss", FLOATS),
        Input("dloss", "gradient of the loss, where there are weights", FLOATS, optional=True),
    ],
    outputs=[Output("dX", "gradient of X")],
    args=_LOSS_ARGS,
    infer=_infer_loss_gradient,
    flops=flops_per_output(2),
    doc="``dX = dloss * scale * w_i (P - label) / sum w_i``, where label is 1 at the class of the example, "
    "else 0.",
)
