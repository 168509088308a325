"""Layer helpers of a model: each makes its parameters and adds its operators.

Names follow Caffe2: a layer ``name`` has weights ``name_w``, bias ``name_b``; batch norm has ``name_s``
(scale), ``name_b``, ``name_rm`` (running mean), ``name_riv`` (running variance, in spite of its name). The
output blob is the layer's name. All names are prefixed by the name scope.
"""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from gpunet.errors import ArgumentError, ShapeError
from gpunet.scope import scoped
from gpunet.specs import Shape


class Layers(ABC):
    """The helpers. :class:`gpunet.Model` supplies what they are made of."""

    @abstractmethod
    def add(self, type: str, inputs: Any = (), outputs: Any = None, **args: Any) -> Any:
        """Appends an operator."""

    @abstractmethod
    def add_parameter(
        self, name: str, shape: Shape, filler: str = "XavierFill", *, decay: bool = True, **args: Any
    ) -> str:
        """Makes a parameter."""

    @abstractmethod
    def add_statistic(self, name: str, shape: Shape, value: float) -> str:
        """Makes a running statistic."""

    @abstractmethod
    def shape_of(self, blob: str) -> Shape:
        """The inferred shape of a blob."""

    def conv(
        self,
        x: str,
        name: str,
        channels: int,
        kernel: int | Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        pad: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        group: int = 1,
        bias: bool = True,
        order: str = "NCHW",
        weight_filler: str = "XavierFill",
        **args: Any,
    ) -> str:
        """Convolution with ``channels`` filters.

        Args:
            x: input blob, ``[N, C, spatial...]`` (``[N, spatial..., C]`` with order NHWC).
            name: name of the output and prefix of the parameters.
            channels: number of output channels.
            kernel: window; one number for all spatial dimensions, or one for each.
            stride: steps between windows, likewise.
            dilation: steps between the elements of a window, likewise.
            pad: one number, or all leading then all trailing ones.
            group: number of groups that channels are split into.
            bias: whether to add a bias for each channel.
            order: NCHW or NHWC, with any number of spatial dimensions.
            weight_filler: the operator that fills the weights.
            args: further arguments of the operator.
        """
        inputs, window = self._filters(
            "Conv", x, name, channels, kernel, group, order, weight_filler, bias=bias
        )
        rank = len(window)
        return self._one(
            "Conv",
            inputs,
            name,
            kernels=list(window),
            strides=list(_spread(stride, rank, "stride", name)),
            pads=list(pad) if isinstance(pad, Sequence) else [pad] * (2 * rank),
            dilations=list(_spread(dilation, rank, "dilation", name)),
            group=group if group > 1 else None,
            order=order,
            **args,
        )

    def conv_transpose(
        self,
        x: str,
        name: str,
        channels: int,
        kernel: int | Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        pad: int | Sequence[int] = 0,
        adj: int | Sequence[int] = 0,
        group: int = 1,
        bias: bool = True,
        order: str = "NCHW",
        weight_filler: str = "XavierFill",
        **args: Any,
    ) -> str:
        """Transposed convolution to ``channels`` output channels, whose images are ``stride`` times larger.

        Args:
            x: input blob, ``[N, C, spatial...]`` (``[N, spatial..., C]`` with order NHWC).
            name: name of the output and prefix of the parameters.
            channels: number of output channels.
            kernel: size of a filter; one number for all spatial dimensions, or one for each.
            stride: steps between the places of two filters in the output, likewise.
            pad: what is cut from the output; one number, or all leading then all trailing ones.
            adj: further positions behind the output, at most a step; one number, or one for each dimension.
            group: number of groups that channels are split into.
            bias: whether to add a bias for each channel.
            order: NCHW or NHWC, with any number of spatial dimensions.
            weight_filler: the operator that fills the weights.
            args: further arguments of the operator.
        """
        inputs, window = self._filters(
            "ConvTranspose", x, name, channels, kernel, group, order, weight_filler, bias=bias
        )
        rank = len(window)
        return self._one(
            "ConvTranspose",
            inputs,
            name,
            kernels=list(window),
            strides=list(_spread(stride, rank, "stride", name)),
            pads=list(pad) if isinstance(pad, Sequence) else [pad] * (2 * rank),
            adjs=list(_spread(adj, rank, "adj", name, 0)),
            group=group if group > 1 else None,
            order=order,
            **args,
        )

    def fc(
        self,
        x: str,
        name: str,
        units: int,
        *,
        bias: bool = True,
        axis: int = 1,
        weight_filler: str = "XavierFill",
        **args: Any,
    ) -> str:
        """Fully connected layer: ``Y = X W^T + b`` with X flattened from ``axis`` on, W ``[units, K]``."""
        incoming = math.prod(self.shape_of(x)[axis:])
        units = _whole(units, "units", name)
        inputs = [x, self.add_parameter(f"{name}_w", (units, incoming), weight_filler)]
        # FC has three inputs always; a frozen zero bias would be a parameter in disguise.
        if not bias:
            return self._one("MatMul", inputs, name, trans_b=1, **args)
        inputs.append(self.add_parameter(f"{name}_b", (units,), "ConstantFill", decay=False))
        return self._one("FC", inputs, name, axis=axis if axis != 1 else None, **args)

    def max_pool(self, x: str, name: str, kernel: int | Sequence[int] = 2, **args: Any) -> str:
        """Maximum over windows; stride equals the kernel unless given."""
        return self._pool("MaxPool", x, name, kernel, **args)

    def average_pool(self, x: str, name: str, kernel: int | Sequence[int] | None = None, **args: Any) -> str:
        """Mean over windows; over the whole image where no kernel is given."""
        if kernel is None:
            return self._one("AveragePool", [x], name, global_pooling=1, **args)
        return self._pool("AveragePool", x, name, kernel, **args)

    def spatial_bn(
        self,
        x: str,
        name: str,
        *,
        epsilon: float = 1e-5,
        momentum: float = 0.9,
        order: str = "NCHW",
        **args: Any,
    ) -> str:
        """Batch normalisation of each channel, with a learned scale and shift.

        ``momentum`` is what the running statistics keep.
        """
        channels, scale, shift = self._scale_and_shift(x, name, order)
        mean = self.add_statistic(f"{name}_rm", channels, 0.0)
        variance = self.add_statistic(f"{name}_riv", channels, 1.0)
        outputs = [scoped(name), mean, variance, scoped(f"{name}_sm"), scoped(f"{name}_siv")]
        args |= {"epsilon": epsilon, "momentum": momentum, "order": order, "is_test": 0}
        return str(self.add("SpatialBN", [x, scale, shift, mean, variance], outputs, **args)[0])

    def layer_norm(
        self, x: str, name: str, *, axis: int = 1, epsilon: float = 1e-5, affine: bool = True, **args: Any
    ) -> str:
        """Normalisation of each example over its dimensions from ``axis`` on, with a learned scale and shift
        of each element unless ``affine`` is false.
        """
        shape = self.shape_of(x)
        rest = shape[axis:]
        inputs = [x]
        if affine:
            inputs.append(self.add_parameter(f"{name}_s", rest, "ConstantFill", decay=False, value=1.0))
            inputs.append(self.add_parameter(f"{name}_b", rest, "ConstantFill", decay=False))
        outputs = [scoped(name), scoped(f"{name}_mean"), scoped(f"{name}_std")]
        args |= {"axis": axis, "epsilon": epsilon, "elementwise_affine": int(affine)}
        return str(self.add("LayerNorm", inputs, outputs, **args)[0])

    def group_norm(
        self,
        x: str,
        name: str,
        groups: int = 32,
        *,
        epsilon: float = 1e-5,
        order: str = "NCHW",
        **args: Any,
    ) -> str:
        """Normalisation of groups of channels of each image, with a learned scale and shift of channels."""
        return self._norm_of_channels(
            "GroupNorm", x, name, epsilon=epsilon, order=order, group=groups, **args
        )

    def instance_norm(
        self, x: str, name: str, *, epsilon: float = 1e-5, order: str = "NCHW", **args: Any
    ) -> str:
        """Normalisation of each channel of each image, with a learned scale and shift of each channel."""
        return self._norm_of_channels("InstanceNorm", x, name, epsilon=epsilon, order=order, **args)

    def _norm_of_channels(self, type: str, x: str, name: str, **args: Any) -> str:
        _, scale, shift = self._scale_and_shift(x, name, args["order"])
        outputs = [scoped(name), scoped(f"{name}_mean"), scoped(f"{name}_inv_std")]
        return str(self.add(type, [x, scale, shift], outputs, **args)[0])

    def _scale_and_shift(self, x: str, name: str, order: str) -> tuple[Shape, str, str]:
        """Parameters for each channel of images: their shape, and their names."""
        shape = self.shape_of(x)
        channels = (shape[1] if order == "NCHW" else shape[-1],)
        scale = self.add_parameter(f"{name}_s", channels, "ConstantFill", decay=False, value=1.0)
        shift = self.add_parameter(f"{name}_b", channels, "ConstantFill", decay=False)
        return channels, scale, shift

    def relu(self, x: str, name: str | None = None) -> str:
        """``max(x, 0)``; in place where no name is given."""
        return str(self.add("Relu", [x], [x if name is None else scoped(name)]))

    def sigmoid(self, x: str, name: str) -> str:
        """``1 / (1 + exp(-x))``."""
        return self._one("Sigmoid", [x], name)

    def tanh(self, x: str, name: str) -> str:
        """Hyperbolic tangent."""
        return self._one("Tanh", [x], name)

    def lrn(
        self, x: str, name: str, *, size: int, alpha: float, beta: float, bias: float = 1.0, **args: Any
    ) -> str:
        """Local response normalisation across ``size`` neighbouring channels."""
        outputs = [scoped(name), scoped(f"_{name}_scale")]
        return str(self.add("LRN", [x], outputs, size=size, alpha=alpha, beta=beta, bias=bias, **args)[0])

    def dropout(self, x: str, name: str, ratio: float = 0.5) -> str:
        """Zeroes each element with probability ``ratio`` and scales the others by ``1 / (1 - ratio)``, in
        training.
        """
        return str(
            self.add("Dropout", [x], [scoped(name), scoped(f"_{name}_mask")], ratio=ratio, is_test=0)[0]
        )

    def softmax(self, x: str, name: str, **args: Any) -> str:
        """Softmax over everything from axis 1 on."""
        return self._one("Softmax", [x], name, **args)

    def softmax_with_loss(self, x: str, label: str, name: str = "loss", **args: Any) -> tuple[str, str]:
        """Softmax and the mean cross entropy against ``label``; returns the names of (probabilities,
        loss).
        """
        probabilities, loss = self.add(
            "SoftmaxWithLoss", [x, label], [scoped("softmax"), scoped(name)], **args
        )
        return probabilities, loss

    def accuracy(self, probabilities: str, label: str, name: str = "accuracy", top_k: int = 1) -> str:
        """The share of rows whose label is among the ``top_k`` largest."""
        return self._one("Accuracy", [probabilities, label], name, top_k=top_k)

    def sum(self, xs: Sequence[str], name: str) -> str:
        """Elementwise sum of blobs of one shape."""
        return self._one("Sum", list(xs), name)

    def concat(self, xs: Sequence[str], name: str, axis: int = 1) -> str:
        """Joins blobs along ``axis``."""
        return str(self.add("Concat", list(xs), [scoped(name), scoped(f"_{name}_dims")], axis=axis)[0])

    def flatten(self, x: str, name: str, axis: int = 1) -> str:
        """Two dimensions: everything before ``axis``, everything from it on."""
        return self._one("Flatten", [x], name, axis=axis)

    def _filters(
        self,
        type: str,
        x: str,
        name: str,
        channels: int,
        kernel: int | Sequence[int],
        group: int,
        order: str,
        weight_filler: str,
        *,
        bias: bool,
    ) -> tuple[list[str], tuple[int, ...]]:
        """The inputs of a convolution, its parameters among them, and the size of its window."""
        shape = self.shape_of(x)
        incoming = shape[1] if order == "NCHW" else shape[-1]
        channels, group = _whole(channels, "channels", name), _whole(group, "group", name)
        if incoming % group or channels % group:
            raise ShapeError(
                f"[{type}] {scoped(name)!r}: {incoming} input and {channels} output channels, wanted "
                f"multiples of group {group}"
            )
        window = _spread(kernel, len(shape) - 2, "kernel", name)
        # A transposed convolution has the filters of the convolution from its output to its input.
        first, second = (incoming, channels) if type == "ConvTranspose" else (channels, incoming)
        depth = second // group
        filters = (first, depth, *window) if order == "NCHW" else (first, *window, depth)
        inputs = [x, self.add_parameter(f"{name}_w", filters, weight_filler)]
        if bias:
            inputs.append(self.add_parameter(f"{name}_b", (channels,), "ConstantFill", decay=False))
        return inputs, window

    def _pool(
        self,
        type: str,
        x: str,
        name: str,
        kernel: int | Sequence[int],
        *,
        stride: int | Sequence[int] | None = None,
        **args: Any,
    ) -> str:
        rank = len(self.shape_of(x)) - 2
        window = list(_spread(kernel, rank, "kernel", name))
        strides = window if stride is None else list(_spread(stride, rank, "stride", name))
        return self._one(type, [x], name, kernels=window, strides=strides, **args)

    def _one(self, type: str, inputs: Sequence[str], name: str, **args: Any) -> str:
        return str(self.add(type, inputs, [scoped(name)], **args))


def _spread(value: int | Sequence[int], rank: int, what: str, name: str, least: int = 1) -> tuple[int, ...]:
    """A number for each of ``rank`` spatial dimensions of layer ``name``."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != rank:
            raise ShapeError(
                f"layer {scoped(name)!r}: {what} {list(value)} has {len(value)} numbers, wanted one for each "
                f"of {rank} spatial dimensions"
            )
        return tuple(_whole(number, what, name, least) for number in value)
    return (_whole(value, what, name, least),) * rank


def _whole(value: Any, what: str, name: str, least: int = 1) -> int:
    """A size that a layer is given."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ArgumentError(
            f"layer {scoped(name)!r}: {what} is {value!r}, wanted a whole number, {least} or more"
        )
    return int(value)
