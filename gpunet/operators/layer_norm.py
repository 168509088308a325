"""Normalization of each example by itself: LayerNorm, GroupNorm, InstanceNorm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpunet.arguments import Bool, Int
from gpunet.errors import ArgumentError, DataTypeError, GradientError, SchemaError
from gpunet.gradient_maker import GradientBuilder
from gpunet.operator import Operator
from gpunet.operators.normalization import EPSILON, ORDER, channels_of, check_epsilon
from gpunet.proto import OperatorDef
from gpunet.rules import canonical_axis, describe, flops_per_input, want_same_type, want_shape, want_size
from gpunet.schema import FLOATS, Input, Output, register
from gpunet.specs import Shape, TensorSpec, spec


@dataclass(frozen=True)
class Groups:
    """What is normalized together: a tensor as batch x groups x depth x inner elements, of which each group
    of each example has a mean and a variance, and each of ``groups * depth`` channels a factor and an offset.

    Attributes:
        batch: examples.
        groups: groups of an example.
        depth: channels of a group.
        inner: elements of a channel of an example.
        last: whether the tensor lies in memory as batch x inner x groups x depth.
    """

    batch: int
    groups: int
    depth: int
    inner: int
    last: bool = False

    @property
    def rows(self) -> int:
        """How many means there are."""
        return self.batch * self.groups

    @property
    def columns(self) -> int:
        """Elements of a group of an example."""
        return self.depth * self.inner

    @property
    def channels(self) -> int:
        """Channels of an example."""
        return self.groups * self.depth


def groups_of(type: str, args: Any, shape: Shape) -> Groups:
    """How the operator (or its gradient) cuts a tensor of this shape."""
    if type.startswith("LayerNorm"):
        axis = canonical_axis(args.axis, len(shape))
        return Groups(math.prod(shape[:axis]), 1, math.prod(shape[axis:]), 1)
    last = args.order == "NHWC"
    channels = shape[-1] if last else shape[1]
    groups = args.group if type.startswith("GroupNorm") else channels
    inner = math.prod(shape[1:-1] if last else shape[2:])
    return Groups(shape[0], groups, channels // max(1, groups), inner, last)


def statistics_spec(x: TensorSpec, shape: Shape) -> TensorSpec:
    """Means and deviations: those of two-byte types are in single precision."""
    return spec(shape, "float32" if x.dtype.itemsize == 2 else x.dtype)


# Layers.

_LAYER_ARGS: Final = [
    Int("axis", 1, "dimensions from here on are normalized together, those before it are the examples"),
    EPSILON,
    Bool("elementwise_affine", False, "whether there are inputs gamma and beta"),
]


def _check_layer(op: Operator) -> None:
    check_epsilon(op)
    gradient = op.type.endswith("Gradient")
    wanted = (6 if gradient else 3) if op.args.elementwise_affine else (5 if gradient else 1)
    if len(op.inputs) != wanted:
        raise SchemaError(
            f"has {len(op.inputs)} inputs with elementwise_affine={int(op.args.elementwise_affine)}, "
            f"wanted {wanted}"
        )
    results = 3 if op.args.elementwise_affine else 1
    if gradient and len(op.outputs) != results:
        raise SchemaError(
            f"has {len(op.outputs)} outputs with elementwise_affine={int(op.args.elementwise_affine)}, "
            f"wanted {results}"
        )


def _infer_layer(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs)
    x = inputs[0]
    axis = canonical_axis(op.args.axis, x.rank)
    for index in range(1, len(inputs)):
        want_size(op, inputs, index, math.prod(x.shape[axis:]), "one number an element of an example")
    statistics = statistics_spec(x, (*x.shape[:axis], 1))
    return [x, statistics, statistics]


def _want_statistics(op: Operator, inputs: Sequence[TensorSpec], x: TensorSpec, *indices: int) -> None:
    """The type of the forward pass: kernels read no other."""
    wanted = statistics_spec(x, ()).dtype
    for index in indices:
        if inputs[index].dtype != wanted:
            raise DataTypeError(
                f"{describe(op, index, inputs[index])} does not fit, wanted {wanted.name} "
                f"for X in {x.dtype.name}"
            )


def _infer_layer_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    x = inputs[4]
    groups = groups_of(op.type, op.args, x.shape)
    want_same_type(op, inputs, *(i for i in range(len(inputs)) if i not in (2, 3)))
    _want_statistics(op, inputs, x, 2, 3)
    for index in (0, 1):
        want_shape(op, inputs, index, x.shape, "the shape of X")
    for index in (2, 3):
        want_size(op, inputs, index, groups.rows, "one number an example")
    if len(inputs) < 6:
        return [x]
    want_size(op, inputs, 5, groups.columns, "one number an element of an example")
    return [x, inputs[5], inputs[5]]


def _layer_gradient(g: GradientBuilder) -> list[OperatorDef]:
    inputs = [g.output_grad(0), g.output(0), g.output(1), g.output(2), g.input(0)]
    if not g.args.elementwise_affine:
        return g.single("LayerNormGradient", inputs, [g.input_grad(0)])
    return g.single("LayerNormGradient", [*inputs, g.input(1)], [g.input_grad(i) for i in range(3)])


register(
    "LayerNorm",
    inputs=[
        Input("X", "examples, of any dimensions", FLOATS),
        Input("gamma", "factor of each element of an example", FLOATS, optional=True),
        Input("beta", "added to each element of an example", FLOATS, optional=True),
    ],
    outputs=[
        Output("Y", "normalized examples, like X"),
        Output("mean", "mean of each example"),
        Output("std", "sqrt(variance + epsilon) of each example"),
    ],
    args=_LAYER_ARGS,
    input_counts=[1, 3],
    check=_check_layer,
    infer=_infer_layer,
    gradient=_layer_gradient,
    flops=flops_per_input(8),
    doc="``Y = (X - mean) / std * gamma + beta``, with the mean and the (biased) variance over all "
    "dimensions from `axis` on. Source: J. Ba, J. R. Kiros, G. Hinton, Layer Normalization, 2016.",
)
register(
    "LayerNormGradient",
    inputs=[
        Input("dY", "gradient of Y", FLOATS),
        Input("Y", "output of LayerNorm", FLOATS),
        Input("mean", "mean of each example", FLOATS),
        Input("std", "sqrt(variance + epsilon) of each example", FLOATS),
        Input("X", "input of LayerNorm", FLOATS),
        Input("gamma", "factor of each element of an example", FLOATS, optional=True),
    ],
    outputs=[
        Output("dX", "gradient of X"),
        Output("dgamma", "gradient of gamma", optional=True),
        Output("dbeta", "gradient of beta", optional=True),
    ],
    args=_LAYER_ARGS,
    check=_check_layer,
    infer=_infer_layer_gradient,
    flops=flops_per_input(13),
    doc="With ``xhat = (X - mean) / std``, n elements an example and sums over them: ``dX = (g - sum(g) / n "
    "- xhat sum(g xhat) / n) / std``, ``g = dY gamma``; over the examples, ``dgamma = sum(dY xhat)``, "
    "``dbeta = sum(dY)``.",
)


# Groups of channels, and channels.

_GROUP_ARGS: Final = [Int("group", 32, "groups that the channels are cut into"), EPSILON, ORDER]
_INSTANCE_ARGS: Final = [EPSILON, ORDER]


def _channel_groups(op: Operator, inputs: Sequence[TensorSpec], index: int) -> Groups:
    x = inputs[index]
    channels = channels_of(op, x, index)
    groups = groups_of(op.type, op.args, x.shape)
    if groups.groups < 0 or groups.channels != channels:
        raise ArgumentError(
            f"argument 'group' is {op.args.group}, wanted a divisor of the {channels} channels of X"
        )
    return groups


def _infer_channels(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs)
    x, groups = inputs[0], _channel_groups(op, inputs, 0)
    for index in (1, 2):
        want_shape(op, inputs, index, (groups.channels,), "one number a channel of X")
    statistics = statistics_spec(x, (groups.batch, groups.groups))
    return [x, statistics, statistics]


def _infer_channels_gradient(
    op: Operator, inputs: Sequence[TensorSpec], x: int, dy: int, gamma: int
) -> list[TensorSpec]:
    want_same_type(op, inputs, *range(4))
    groups = _channel_groups(op, inputs, x)
    want_shape(op, inputs, dy, inputs[x].shape, "the shape of X")
    for index in (gamma, gamma + 1):
        want_shape(op, inputs, index, (groups.channels,), "one number a channel of X")
    if len(inputs) > 4:
        _want_statistics(op, inputs, inputs[x], 4, 5)
        for index in (4, 5):
            want_shape(op, inputs, index, (groups.batch, groups.groups), "that of the forward pass")
    return [inputs[x], inputs[gamma], inputs[gamma]]


def _check_group(op: Operator) -> None:
    check_epsilon(op)
    if op.args.group < 1:
        raise ArgumentError(f"argument 'group' is {op.args.group}, wanted at least 1")


def _group_gradient(g: GradientBuilder) -> list[OperatorDef]:
    if g.num_outputs < 3:
        raise GradientError("has no outputs mean and inv_std, which its gradient wants")
    inputs = [g.output_grad(0), g.input(0), g.input(1), g.input(2), g.output(1), g.output(2)]
    return g.single("GroupNormGradient", inputs, [g.input_grad(i) for i in range(3)])


def _instance_gradient(g: GradientBuilder) -> list[OperatorDef]:
    inputs = [g.input(0), g.input(1), g.input(2), g.output_grad(0)]
    if g.num_outputs == 3:
        inputs += [g.output(1), g.output(2)]
    return g.single("InstanceNormGradient", inputs, [g.input_grad(i) for i in range(3)])


_IMAGES: Final = Input("X", "N x C x any dimensions, or N x any dimensions x C", FLOATS)
_GAMMA: Final = Input("gamma", "factor of each channel: C", FLOATS)
_BETA: Final = Input("beta", "added to each channel: C", FLOATS)
_GRADIENTS: Final = [
    Output("dX", "gradient of X"),
    Output("dgamma", "gradient of gamma: C"),
    Output("dbeta", "gradient of beta: C"),
]
_SUMS: Final = (
    "With ``xhat = (X - mean) inv_std``, n elements that share a mean and sums over them: ``dX = inv_std (g "
    "- sum(g) / n - xhat sum(g xhat) / n)``, ``g = dY gamma``; over the elements of a channel, ``dgamma = "
    "sum(dY xhat)``, ``dbeta = sum(dY)``."
)
register(
    "GroupNorm",
    inputs=[_IMAGES, _GAMMA, _BETA],
    outputs=[
        Output("Y", "normalized images, like X"),
        Output("mean", "mean of each group of each image: N x group", optional=True),
        Output(
            "inv_std", "1 / sqrt(variance + epsilon) of each group of each image: N x group", optional=True
        ),
    ],
    args=_GROUP_ARGS,
    output_counts=[1, 3],
    check=_check_group,
    infer=_infer_channels,
    gradient=_group_gradient,
    flops=flops_per_input(8),
    doc="``Y = (X - mean) inv_std gamma + beta``, with the mean and the (biased) variance of `group` groups "
    "of neighbouring channels in each image. Source: Y. Wu, K. He, Group Normalization, ECCV 2018.",
)
register(
    "GroupNormGradient",
    inputs=[
        Input("dY", "gradient of Y", FLOATS),
        _IMAGES,
        _GAMMA,
        _BETA,
        Input("mean", "mean of each group: N x group", FLOATS),
        Input("inv_std", "1 / sqrt(variance + epsilon) of each group: N x group", FLOATS),
    ],
    outputs=_GRADIENTS,
    args=_GROUP_ARGS,
    check=_check_group,
    infer=lambda op, inputs: _infer_channels_gradient(op, inputs, 1, 0, 2),
    flops=flops_per_input(13),
    doc=f"Gradients of GroupNorm. {_SUMS}",
)
register(
    "InstanceNorm",
    inputs=[_IMAGES, _GAMMA, _BETA],
    outputs=[
        Output("Y", "normalized images, like X"),
        Output("mean", "mean of each channel of each image: N x C", optional=True),
        Output("inv_std", "1 / sqrt(variance + epsilon) of each channel of each image: N x C", optional=True),
    ],
    args=_INSTANCE_ARGS,
    output_counts=[1, 3],
    inplace=[(0, 0)],
    check=check_epsilon,
    infer=_infer_channels,
    gradient=_instance_gradient,
    flops=flops_per_input(8),
    doc="``Y = (X - mean) inv_std gamma + beta``, with the mean and the (biased) variance of each channel of "
    "each image. Source: D. Ulyanov, A. Vedaldi, V. Lempitsky, Instance Normalization, 2016.",
)
register(
    "InstanceNormGradient",
    inputs=[
        _IMAGES,
        _GAMMA,
        _BETA,
        Input("dY", "gradient of Y", FLOATS),
        Input(
            "mean", "mean of each channel: N x C; computed from X where it is missing", FLOATS, optional=True
        ),
        Input("inv_std", "1 / sqrt(variance + epsilon) of each channel: N x C", FLOATS, optional=True),
    ],
    outputs=_GRADIENTS,
    args=_INSTANCE_ARGS,
    input_counts=[4, 6],
    check=check_epsilon,
    infer=lambda op, inputs: _infer_channels_gradient(op, inputs, 0, 3, 1),
    flops=flops_per_input(13),
    doc=f"Gradients of InstanceNorm. {_SUMS}",
)
