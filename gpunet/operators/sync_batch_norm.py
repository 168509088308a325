"""Batch normalization over the batches of all ranks: SpatialBN in parts, with sums in between.

Forward: SyncBatchNormMoments, Allreduce of the moments, SyncBatchNorm. Backward: BatchNormSums, Allreduce of
the sums, SyncBatchNormGradient. Moments and sums are float64: the variance is a difference of large numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gpunet.arguments import Float
from gpunet.dtypes import is_half
from gpunet.errors import DataTypeError
from gpunet.gradient_maker import GradientBuilder
from gpunet.operator import Operator
from gpunet.operators.normalization import EPSILON, ORDER, channels_of, check_epsilon
from gpunet.proto import OperatorDef
from gpunet.rules import describe, flops_per_input, want_same_type, want_shape, want_size
from gpunet.schema import FLOATS, NO_GRADIENT, Input, Output, Types, register
from gpunet.specs import BlobSpec, TensorSpec, spec

_DOUBLE: Final[Types] = frozenset([spec((), "float64").dtype])
_SINGLE: Final[Types] = frozenset([spec((), "float32").dtype])
_REALS: Final[Types] = _SINGLE | _DOUBLE
_X: Final = Input("X", "N x C x any dimensions, or N x any dimensions x C", FLOATS)
_DY: Final = Input("dY", "gradient of Y", FLOATS)
_MEAN: Final = Input("saved_mean", "mean of all batches: C", _REALS)
_INV_STD: Final = Input("saved_inv_std", "1 / sqrt(variance of all batches + epsilon): C", _REALS)
_MOMENTS: Final = Input("moments", "of SyncBatchNormMoments, summed over the ranks: 2 C + 1", _DOUBLE)
_WEIGHT: Final = Input("weight", "this rank's share of all samples, one element", _SINGLE)


def _want_channels(op: Operator, inputs: Sequence[TensorSpec], *indices: int) -> int:
    channels = channels_of(op, inputs[0])
    for i in indices:
        want_shape(op, inputs, i, (channels,), f"one for each of the {channels} channels of X")
    want_same_type(op, inputs, *indices)
    x, parameter = inputs[0], inputs[indices[0]]
    # Half precision data comes with parameters in single precision.
    wanted = "float32" if is_half(x.dtype) else x.dtype.name
    if parameter.dtype.name != wanted:
        raise DataTypeError(
            f"{describe(op, indices[0], parameter)} does not fit {describe(op, 0, x)}, wanted {wanted}"
        )
    return channels


def _infer_moments(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    return [spec((2 * channels_of(op, inputs[0]) + 1,), "float64")]


register(
    "SyncBatchNormMoments",
    inputs=[_X],
    outputs=[Output("moments", "sums of X, then of X^2, of each channel, then elements a channel: 2 C + 1")],
    args=[ORDER],
    infer=_infer_moments,
    gradient=NO_GRADIENT,
    flops=flops_per_input(3),
    channels=((0,), ()),
    doc="What the mean and the variance of a batch follow from, and can be added over batches. The gradient "
    "of SyncBatchNorm covers this operator.",
)


def _infer_forward(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    channels = _want_channels(op, inputs, 1, 2, 3, 4)
    want_size(op, inputs, 5, 2 * channels + 1)
    want_size(op, inputs, 6, 1)
    return [inputs[0], *[inputs[1]] * 4]


def _gradient(g: GradientBuilder) -> list[OperatorDef]:
    x, scale, moments, weight = g.input(0), g.input(1), g.input(5), g.input(6)
    mean, inv_std, dy = g.output(3), g.output(4), g.output_grad(0)
    sums = f"{g.output(0)}_batch_sums"
    g.copy_arguments = False
    order = g.args.order
    dx, dscale, dbias = (g.input_grad(i) for i in range(3))
    return [
        g.make("BatchNormSums", [x, dy, mean, inv_std, weight], [dscale, dbias, sums], order=order),
        g.make("Allreduce", [sums], [sums]),
        g.make(
            "SyncBatchNormGradient",
            [x, scale, dy, mean, inv_std, moments, sums, weight],
            [dx],
            order=order,
        ),
    ]


register(
    "SyncBatchNorm",
    inputs=[
        _X,
        Input("scale", "factor of each channel: C", _REALS),
        Input("bias", "added to each channel: C", _REALS),
        Input("mean", "running mean: C", _REALS),
        Input("var", "running variance: C", _REALS),
        _MOMENTS,
        _WEIGHT,
    ],
    outputs=[
        Output("Y", "normalized X"),
        Output("running_mean", "the updated running mean"),
        Output("running_var", "the updated running variance"),
        Output("saved_mean", "mean of all batches"),
        Output("saved_inv_std", "1 / sqrt(variance of all batches + epsilon)"),
    ],
    args=[
        EPSILON,
        Float("momentum", 0.9, "part of the running statistics that is kept"),
        ORDER,
    ],
    inplace=[(0, 0)],
    enforce_inplace=[(3, 1), (4, 2)],
    check=check_epsilon,
    infer=_infer_forward,
    gradient=_gradient,
    flops=flops_per_input(2),
    channels=((0,), (0,)),
    doc="SpatialBN in training, with the mean and the variance of the batches of all ranks. Input weight is "
    "for the gradient: each rank's gradients are those of its own mean loss.",
)


def _infer_sums(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    channels = _want_channels(op, inputs, 2, 3)
    want_shape(op, inputs, 1, inputs[0].shape, "the shape of X")
    want_same_type(op, inputs, 0, 1)
    want_size(op, inputs, 4, 1)
    return [inputs[2], inputs[2], spec((2 * channels,), "float64")]


register(
    "BatchNormSums",
    inputs=[_X, _DY, _MEAN, _INV_STD, _WEIGHT],
    outputs=[
        Output("dscale", "gradient of scale, of this rank's loss: C"),
        Output("dbias", "gradient of bias, of this rank's loss: C"),
        Output("sums", "weight times dbias, then weight times dscale: 2 C"),
    ],
    args=[ORDER],
    infer=_infer_sums,
    flops=flops_per_input(4),
    channels=((0, 1), ()),
    doc="The sums that the gradient of SyncBatchNorm needs over all ranks.",
)


def _infer_backward(op: Operator, inputs: Sequence[Any]) -> list[BlobSpec]:
    channels = _want_channels(op, inputs, 1, 3, 4)
    want_shape(op, inputs, 2, inputs[0].shape, "the shape of X")
    want_same_type(op, inputs, 0, 2)
    want_size(op, inputs, 5, 2 * channels + 1)
    want_size(op, inputs, 6, 2 * channels)
    want_size(op, inputs, 7, 1)
    return [inputs[0]]


register(
    "SyncBatchNormGradient",
    inputs=[
        _X,
        Input("scale", "factor of each channel: C", _REALS),
        _DY,
        _MEAN,
        _INV_STD,
        _MOMENTS,
        Input("sums", "of BatchNormSums, summed over the ranks: 2 C", _DOUBLE),
        _WEIGHT,
    ],
    outputs=[Output("dX", "gradient of X, of this rank's loss")],
    args=[ORDER],
    infer=_infer_backward,
    flops=flops_per_input(6),
    channels=((0, 2), (0,)),
    doc="``dX = scale inv_std (dY - (dbias + xhat dscale) / (n weight))`` with the sums ``dbias`` and "
    "``dscale`` and the number ``n`` of elements a channel over all ranks.",
)
