"""Normalization: local response normalization (LRN) and batch normalization (SpatialBN)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpunet.arguments import Bool, Float, Int, Str
from gpunet.dtypes import is_half
from gpunet.errors import ArgumentError, DataTypeError, SchemaError, ShapeError
from gpunet.gradient_maker import GradientBuilder
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from gpunet.rules import describe, flops_per_input, want_rank, want_same_type, want_shape
from gpunet.schema import FLOATS, Input, Output, register
from gpunet.specs import TensorSpec

ORDER: Final = Str(
    "order",
    "NCHW",
    "where the channels are: dimension 1 (NCHW) or the last one (NHWC)",
    choices=("NCHW", "NHWC"),
)
EPSILON: Final = Float("epsilon", 1e-5, "added to the variance")


def channels_of(op: Operator, x: TensorSpec, index: int = 0) -> int:
    """The number of channels of images, which are input ``index``; raises :class:`ShapeError` where there is
    no dimension for them.
    """
    if x.rank < 2:
        raise ShapeError(
            f"{describe(op, index, x)} has {x.rank} dimensions, wanted at least 2 (batch and channels)"
        )
    return x.shape[1] if op.args.order == "NCHW" else x.shape[-1]


def check_epsilon(op: Operator) -> None:
    """Raises :class:`ArgumentError` for a number below 0."""
    if op.args.epsilon < 0:
        raise ArgumentError(f"argument 'epsilon' is {op.args.epsilon}, wanted 0 or more")


_LRN_ARGS = [
    Int(
        "size", 0, "channels in the window, at least 1; an even window has one channel more after than before"
    ),
    Float("alpha", 0.0, "factor of the mean of squares"),
    Float("beta", 0.0, "exponent"),
    Float("bias", 1.0, "added to the scaled mean of squares"),
    ORDER,
]


def _check_lrn(op: Operator) -> None:
    if op.args.size < 1:
        raise ArgumentError(f"argument 'size' is {op.args.size}, wanted at least 1 channel")


def _infer_lrn(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_rank(op, inputs, 0, 4)
    return [inputs[0], inputs[0]]


def _infer_lrn_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_rank(op, inputs, 0, 4)
    want_same_type(op, inputs)
    for i in (1, 2):
        want_shape(op, inputs, i, inputs[0].shape, "the shape of X")
    return [inputs[0]]


def _lrn_gradient(g: GradientBuilder) -> list[OperatorDef]:
    return g.single("LRNGradient", [g.input(0), g.output(0), g.output_grad(0)], [g.input_grad(0)])


def _lrn_flops(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    size: int = op.args.size
    return (size + 5) * inputs[0].size


register(
    "LRN",
    inputs=[Input("X", "images: N x C x H x W, or N x H x W x C", FLOATS)],
    outputs=[
        Output("Y", "normalized images, like X"),
        Output("scale", "bias + alpha / size * (sum of squares in the window), like X", optional=True),
    ],
    args=_LRN_ARGS,
    check=_check_lrn,
    infer=_infer_lrn,
    gradient=_lrn_gradient,
    flops=_lrn_flops,
    channels=((0,), (0, 1)),
    doc="Local response normalization across channels: ``Y = X scale^-beta`` with ``scale = bias + alpha / "
    "size * sum X^2``, "
    "the sum over the window of `size` channels around each (channels outside count as 0). Source: A. "
    "Krizhevsky, "
    "I. Sutskever, G. Hinton, ImageNet Classification with Deep Convolutional Neural Networks, NIPS 2012, "
    "section 3.3.",
)
register(
    "LRNGradient",
    inputs=[
        Input("X", "input of LRN", FLOATS),
        Input("Y", "output of LRN", FLOATS),
        Input("dY", "gradient of Y", FLOATS),
    ],
    outputs=[Output("dX", "gradient of X")],
    args=_LRN_ARGS,
    check=_check_lrn,
    infer=_infer_lrn_gradient,
    flops=_lrn_flops,
    channels=((0, 1, 2), (0,)),
    doc="Gradient of LRN: ``dX = dY scale^-beta - 2 alpha beta / size * X * sum (dY Y / scale)`` over the "
    "same window.",
)


_BN_ARGS = [
    Bool("is_test", False, "normalize with the running statistics and leave them alone"),
    EPSILON,
    Float(
        "momentum",
        0.9,
        "part of the running statistics that is kept: running = momentum * running + (1 - momentum) * batch",
    ),
    Int("num_batches", 1, "batches of this size whose sums are summed in the optional inputs"),
    ORDER,
    Bool(
        "inverted",
        False,
        "in test mode, input var is 1 / sqrt(variance + epsilon), as output saved_inv_std (of gpunet's own)",
    ),
]


def _want_parameters(op: Operator, inputs: Sequence[TensorSpec], *indices: int) -> None:
    channels = channels_of(op, inputs[0])
    for i in indices:
        want_shape(op, inputs, i, (channels,), f"one for each of the {channels} channels of X")
    want_same_type(op, inputs, *indices)
    x, parameter = inputs[0], inputs[indices[0]]
    # Half precision data comes with parameters in single precision, as in cuDNN.
    if parameter.dtype != x.dtype and not (is_half(x.dtype) and parameter.dtype == "float32"):
        wanted = f"{x.dtype.name} or float32" if is_half(x.dtype) else x.dtype.name
        raise DataTypeError(
            f"{describe(op, indices[0], parameter)} does not fit {describe(op, 0, x)}, wanted {wanted}"
        )


def _check_bn(op: Operator) -> None:
    wanted = 1 if op.args.is_test else 5
    if len(op.outputs) != wanted:
        mode = "to test" if op.args.is_test else "to train"
        raise SchemaError(
            f"has {len(op.outputs)} outputs with is_test={int(op.args.is_test)}, wanted {wanted} {mode}"
        )
    _check_num_batches(op)


def _check_num_batches(op: Operator) -> None:
    if op.args.num_batches < 1:
        raise ArgumentError(f"argument 'num_batches' is {op.args.num_batches}, wanted at least 1")
    if op.args.num_batches > 1 and not op.args.is_test and len(op.inputs) != 7:
        raise SchemaError(
            f"has {len(op.inputs)} inputs with num_batches={op.args.num_batches}, wanted 7 "
            "(the sums over all batches)"
        )
    check_epsilon(op)


def _infer_bn(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    _want_parameters(op, inputs, *range(1, len(inputs)))
    return [inputs[0], *[inputs[1]] * 4]


def _infer_bn_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs, 0, 2)
    want_shape(op, inputs, 2, inputs[0].shape, "the shape of X")
    _want_parameters(op, inputs, *(i for i in range(1, len(inputs)) if i != 2))
    return [inputs[0], inputs[1], inputs[1]]


def _bn_gradient(g: GradientBuilder) -> list[OperatorDef]:
    dx, dscale, dbias = (g.input_grad(i) for i in range(3))
    # At test the running statistics stand in for the saved ones, as Caffe2 has it.
    statistics = [g.input(3), g.input(4)] if g.args.is_test else [g.output(3), g.output(4)]
    inputs = [g.input(0), g.input(1), g.output_grad(0), *statistics]
    if g.args.num_batches > 1:
        inputs += [dscale, dbias]
    return g.single("SpatialBNGradient", inputs, [dx, dscale, dbias])


register(
    "SpatialBN",
    inputs=[
        Input("X", "N x C x any dimensions, or N x any dimensions x C", FLOATS),
        Input("scale", "factor of each channel: C", FLOATS),
        Input("bias", "added to each channel: C", FLOATS),
        Input("mean", "running mean: C", FLOATS),
        Input("var", "running variance: C", FLOATS),
        Input("batch_sum", "sum of X over num_batches batches: C", FLOATS, optional=True),
        Input("batch_sumsq", "sum of X^2 over num_batches batches: C", FLOATS, optional=True),
    ],
    outputs=[
        Output("Y", "normalized X"),
        Output("running_mean", "the updated running mean", optional=True),
        Output("running_var", "the updated running variance", optional=True),
        Output("saved_mean", "mean of the batch", optional=True),
        Output("saved_inv_std", "1 / sqrt(variance of the batch + epsilon)", optional=True),
    ],
    args=_BN_ARGS,
    input_counts=[5, 7],
    output_counts=[1, 5],
    inplace=[(0, 0), (5, 3), (6, 4)],
    enforce_inplace=[(3, 1), (4, 2)],
    check=_check_bn,
    infer=_infer_bn,
    gradient=_bn_gradient,
    flops=flops_per_input(6),
    channels=((0,), (0,)),
    doc="Batch normalization over all dimensions but the channels: ``Y = scale (X - mean) / sqrt(var + "
    "epsilon) + bias``, with the "
    "(biased) variance of the batch in training and the running statistics at test. The running variance "
    "takes the unbiased one, "
    "var n / (n - 1). Source: S. Ioffe, C. Szegedy, Batch Normalization, ICML 2015.",
)
register(
    "SpatialBNGradient",
    inputs=[
        Input("X", "input of SpatialBN", FLOATS),
        Input("scale", "factor of each channel: C", FLOATS),
        Input("dY", "gradient of Y", FLOATS),
        Input("mean", "saved mean: C", FLOATS),
        Input("inv_std", "saved 1 / sqrt(var + epsilon): C", FLOATS),
        Input(
            "dscale_sum", "sum of the gradients of scale over num_batches batches: C", FLOATS, optional=True
        ),
        Input("dbias_sum", "sum of the gradients of bias over num_batches batches: C", FLOATS, optional=True),
    ],
    outputs=[
        Output("dX", "gradient of X"),
        Output("dscale", "gradient of scale: C"),
        Output("dbias", "gradient of bias: C"),
    ],
    args=_BN_ARGS,
    input_counts=[5, 7],
    inplace=[(5, 1), (6, 2)],
    check=_check_num_batches,
    infer=_infer_bn_gradient,
    flops=flops_per_input(9),
    channels=((0, 2), (0,)),
    doc="Gradients of SpatialBN in training, with ``n`` elements a channel and ``xhat = (X - mean) "
    "inv_std``: ``dbias = sum dY``, "
    "``dscale = sum dY xhat``, ``dX = scale inv_std (dY - dbias / n - xhat dscale / n)``.",
)
