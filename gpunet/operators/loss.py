"""Losses and metrics of a batch: cross-entropies, squared distance, average, accuracy."""

from __future__ import annotations

from collections.abc import Sequence

from gpunet.arguments import Bool, Int
from gpunet.errors import ArgumentError, ShapeError
from gpunet.gradient_maker import GradientBuilder
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from gpunet.rules import describe, flops_per_input, want_rank, want_same_type, want_shape, want_size
from gpunet.schema import FLOATS, INDICES, GradientFunction, Input, Output, register
from gpunet.specs import Shape, TensorSpec, spec


def _examples(x: TensorSpec) -> int:
    """Dimension 0 counts the examples; a vector is one example."""
    return x.shape[0] if x.rank > 1 else 1


def _want_label(op: Operator, inputs: Sequence[TensorSpec], examples: int) -> None:
    label = inputs[1]
    if label.shape not in ((examples,), (examples, 1)):
        raise ShapeError(
            f"{describe(op, 1, label)} does not fit, wanted {examples} or {examples}x1 (one label an example)"
        )


def _want_classes(op: Operator, x: TensorSpec) -> None:
    if x.rank == 0:
        raise ShapeError(f"{describe(op, 0, x)} has 0 dimensions, wanted at least 1 (the classes)")


def _like_first(*order: int) -> GradientFunction:
    """The gradient of input 0, from the forward inputs ``order`` and the output's gradient (index -1)."""

    def gradient(g: GradientBuilder) -> list[OperatorDef]:
        names = [g.output_grad(0) if i < 0 else g.input(i) for i in order]
        return g.single(f"{g.op.type}Gradient", names, [g.input_grad(0)])

    return gradient


def _infer_label_cross_entropy(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    _want_classes(op, inputs[0])
    _want_label(op, inputs, _examples(inputs[0]))
    return [inputs[0].with_shape(_examples(inputs[0]))]


def _infer_label_cross_entropy_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs, 0, 2)
    _infer_label_cross_entropy(op, inputs)
    want_shape(op, inputs, 2, (_examples(inputs[0]),), "one loss an example")
    return [inputs[0]]


_PROBABILITIES = Input("X", "probabilities: examples x classes", FLOATS)
_LOSS_GRADIENT = Input("dY", "gradient of Y: examples", FLOATS)

register(
    "LabelCrossEntropy",
    inputs=[_PROBABILITIES, Input("label", "class of each example", INDICES)],
    outputs=[Output("Y", "loss of each example")],
    infer=_infer_label_cross_entropy,
    gradient=_like_first(0, 1, -1),
    flops=lambda op, inputs, outputs: 3 * outputs[0].size,
    doc="``Y[i] = -log max(X[i, label_i], 1e-20)``.",
)
register(
    "LabelCrossEntropyGradient",
    inputs=[_PROBABILITIES, Input("label", "class of each example", INDICES), _LOSS_GRADIENT],
    outputs=[Output("dX", "gradient of X")],
    infer=_infer_label_cross_entropy_gradient,
    flops=lambda op, inputs, outputs: 3 * inputs[2].size,
    doc="``dX[i, label_i] = -dY[i] / max(X[i, label_i], 1e-20)``, 0 elsewhere.",
)


def _infer_cross_entropy(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs)
    _want_classes(op, inputs[0])
    want_shape(op, inputs, 1, inputs[0].shape, "the shape of X")
    return [inputs[0].with_shape(_examples(inputs[0]))]


def _infer_cross_entropy_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    _infer_cross_entropy(op, inputs)
    want_shape(op, inputs, 2, (_examples(inputs[0]),), "one loss an example")
    return [inputs[0]]


_DISTRIBUTION = Input("label", "wanted probabilities, like X", FLOATS)

register(
    "CrossEntropy",
    inputs=[_PROBABILITIES, _DISTRIBUTION],
    outputs=[Output("Y", "loss of each example")],
    infer=_infer_cross_entropy,
    gradient=_like_first(0, 1, -1),
    flops=flops_per_input(4),
    doc="``Y[i] = -sum_j label_ij log max(X_ij, 1e-20)``.",
)
register(
    "CrossEntropyGradient",
    inputs=[_PROBABILITIES, _DISTRIBUTION, _LOSS_GRADIENT],
    outputs=[Output("dX", "gradient of X")],
    infer=_infer_cross_entropy_gradient,
    flops=flops_per_input(3),
    doc="``dX_ij = -dY_i label_ij / max(X_ij, 1e-20)``.",
)


def _infer_averaged_loss_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs)
    want_size(op, inputs, 1, 1, "the gradient of the average is a scalar")
    return [inputs[0]]


register(
    "AveragedLoss",
    inputs=[Input("X", "losses, of any shape", FLOATS)],
    outputs=[Output("Y", "their average, a scalar; 0 where there are none")],
    infer=lambda op, inputs: [inputs[0].with_shape()],
    gradient=_like_first(0, -1),
    flops=flops_per_input(1),
    total="mean",
    doc="``Y = mean X``.",
)
register(
    "AveragedLossGradient",
    inputs=[Input("X", "input of AveragedLoss", FLOATS), Input("dY", "gradient of the average", FLOATS)],
    outputs=[Output("dX", "gradient of X")],
    infer=_infer_averaged_loss_gradient,
    doc="``dX = dY / size of X``.",
)


def _distance_shape(x: TensorSpec) -> Shape:
    return (x.shape[0] if x.rank else 1,)


def _infer_distance(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs)
    want_shape(op, inputs, 1, inputs[0].shape, "the shape of X")
    return [inputs[0].with_shape(*_distance_shape(inputs[0]))]


def _infer_distance_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    _infer_distance(op, inputs)
    want_shape(op, inputs, 2, _distance_shape(inputs[0]), "one distance an example")
    return [inputs[0], inputs[0]]


def _distance_gradient(g: GradientBuilder) -> list[OperatorDef]:
    names = [g.input(0), g.input(1), g.output_grad(0)]
    return g.single("SquaredL2DistanceGradient", names, [g.input_grad(0), g.input_grad(1)])


register(
    "SquaredL2Distance",
    inputs=[
        Input("X", "points: dimension 0 counts them", FLOATS),
        Input("Y", "other points, like X", FLOATS),
    ],
    outputs=[Output("Z", "half of the squared distance of each pair")],
    infer=_infer_distance,
    gradient=_distance_gradient,
    flops=flops_per_input(3),
    doc="``Z[i] = 0.5 * sum (X[i] - Y[i])^2``.",
)
register(
    "SquaredL2DistanceGradient",
    inputs=[
        Input("X", "points", FLOATS),
        Input("Y", "other points", FLOATS),
        Input("dZ", "gradient of the distances", FLOATS),
    ],
    outputs=[Output("dX", "gradient of X"), Output("dY", "gradient of Y")],
    infer=_infer_distance_gradient,
    flops=flops_per_input(3),
    doc="``dX[i] = dZ[i] (X[i] - Y[i])``, ``dY = -dX``.",
)


_SIGMOID_ARGS = [
    Bool("log_D_trick", False, "the loss -log D for generators, (2 t - 1) log sigmoid(x)"),
    Bool("unjoined_lr_loss", False, "the loss for positives that also come as negatives"),
]


def _check_sigmoid(op: Operator) -> None:
    if op.args.log_D_trick and op.args.unjoined_lr_loss:
        raise ArgumentError("arguments 'log_D_trick' and 'unjoined_lr_loss' are both set, wanted at most one")


def _infer_sigmoid(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs)
    _want_classes(op, inputs[0])
    want_shape(op, inputs, 1, inputs[0].shape, "the shape of the logits")
    return [inputs[0].with_shape(*inputs[0].shape[:-1])]


def _infer_sigmoid_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs)
    want_shape(op, inputs, 2, inputs[1].shape, "the shape of the logits")
    want_shape(op, inputs, 0, inputs[1].shape[:-1], "the logits without their last dimension")
    return [inputs[1]]


register(
    "SigmoidCrossEntropyWithLogits",
    inputs=[
        Input("logits", "scores, of any shape with at least one dimension", FLOATS),
        Input("targets", "wanted probabilities, like the logits", FLOATS),
    ],
    outputs=[Output("Y", "loss, averaged over the last dimension, which it lacks")],
    args=_SIGMOID_ARGS,
    check=_check_sigmoid,
    infer=_infer_sigmoid,
    gradient=_like_first(-1, 0, 1),
    flops=flops_per_input(8),
    doc="``Y = -mean (t log sigmoid(x) + (1 - t) log(1 - sigmoid(x)))`` over the last dimension. With "
    "`log_D_trick`: "
    "``-mean (2 t - 1) log sigmoid(x)``; with `unjoined_lr_loss`: ``-mean (t x + (1 - t) log(1 - "
    "sigmoid(x)))``, "
    "where a positive example is corrected by a negative one of the same features.",
)
register(
    "SigmoidCrossEntropyWithLogitsGradient",
    inputs=[
        Input("dY", "gradient of the loss", FLOATS),
        Input("logits", "scores", FLOATS),
        Input("targets", "wanted probabilities, like the logits", FLOATS),
    ],
    outputs=[Output("dlogits", "gradient of the logits")],
    args=_SIGMOID_ARGS,
    check=_check_sigmoid,
    infer=_infer_sigmoid_gradient,
    flops=flops_per_input(8, 1),
    doc="``dlogits = dY (sigmoid(x) - t) / n``, with n the size of the last dimension, and the like for "
    "the other losses.",
)


def _check_accuracy(op: Operator) -> None:
    if op.args.top_k < 1:
        raise ArgumentError(f"argument 'top_k' is {op.args.top_k}, wanted at least 1")


def _infer_accuracy(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_rank(op, inputs, 0, 2)
    want_shape(op, inputs, 1, inputs[0].shape[:1], "one label an example")
    return [spec((), "float32")]


register(
    "Accuracy",
    inputs=[
        Input("predictions", "scores: examples x classes", FLOATS),
        Input("labels", "class of each example", INDICES),
    ],
    outputs=[Output("accuracy", "scalar, float32")],
    args=[Int("top_k", 1, "an example counts as right where its class is among this many best scores")],
    check=_check_accuracy,
    infer=_infer_accuracy,
    flops=flops_per_input(2),
    doc="Share of the examples whose class is among the `top_k` best scores; of equal scores the lower "
    "class is the better.",
)
