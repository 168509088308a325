"""Transposed convolution: what a convolution's gradient of its images computes, as an operator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from gpunet.arguments import Arguments
from gpunet.errors import ShapeError
from gpunet.operator import Operator
from gpunet.operators.convolution import (
    GROUP,
    NO_GRADIENT_TO_INPUT,
    check_group,
    make_gradient,
    register_gradient,
    want_ranks,
    want_sizes,
)
from gpunet.operators.window import Window, resolve_transposed, transposed_arguments
from gpunet.rules import describe, want_same_type, want_shape
from gpunet.schema import FLOATS, Input, Output, register
from gpunet.specs import TensorSpec, format_shape

TRANSPOSED: Final = "ConvTranspose"


def transposed_window(
    args: Arguments, images: TensorSpec, filters: TensorSpec, *, of_output: bool = False
) -> Window:
    """The window of the convolution from Y to X, from X (with ``of_output``, from Y) and the filters."""
    sizes = filters.shape[1:-1] if args.order == "NHWC" else filters.shape[2:]
    return resolve_transposed(args, images.shape, sizes, of_output=of_output)


def _resolve(op: Operator, inputs: Sequence[TensorSpec]) -> tuple[Window, int]:
    """Checks X and W against each other; returns the window and the number of output channels."""
    want_same_type(op, inputs)
    x, w = inputs[0], inputs[1]
    want_ranks(op, x, w)
    window = transposed_window(op.args, x, w)
    want_sizes(w, window)
    axis, group = (-1 if window.channels_last else 1), op.args.group
    channels = x.shape[axis]
    if w.shape[0] != channels:
        raise ShapeError(
            f"{describe(op, 0, x)} has {channels} channels, filter W ({format_shape(w.shape)}) wants "
            f"{w.shape[0]}"
        )
    if channels % group:
        raise ShapeError(f"{describe(op, 0, x)} has {channels} channels, wanted a multiple of {group} groups")
    return window, w.shape[axis] * group


def _output(window: Window, batch: int, channels: int) -> tuple[int, ...]:
    return (batch, *window.image, channels) if window.channels_last else (batch, channels, *window.image)


def _infer(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    window, channels = _resolve(op, inputs)
    if len(inputs) > 2:
        want_shape(op, inputs, 2, (channels,), "one number an output channel")
    return [inputs[0].with_shape(*_output(window, inputs[0].shape[0], channels))]


def _infer_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    window, channels = _resolve(op, inputs)
    x, w = inputs[0], inputs[1]
    want_shape(op, inputs, 2, _output(window, x.shape[0], channels), "the shape of the forward output")
    return [w, x] if op.args.no_bias else [w, w.with_shape(channels), x]


def _products(inputs: Sequence[TensorSpec]) -> int:
    """Each element of X meets each element of its channel's filters."""
    return inputs[0].size * math.prod(inputs[1].shape[1:])


def _flops(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return 2 * _products(inputs) + (outputs[0].size if len(inputs) > 2 else 0)


def _flops_gradient(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    bias = 0 if op.args.no_bias else 1
    data = 1 if len(outputs) > 1 + bias else 0
    return 2 * _products(inputs) * (1 + data) + bias * inputs[2].size


register(
    TRANSPOSED,
    inputs=[
        Input("X", "images, any number of spatial dimensions", FLOATS),
        Input("W", "filters, as many as X has channels", FLOATS),
        Input("b", "bias, one number an output channel", FLOATS, optional=True),
    ],
    outputs=[Output("Y", "larger images")],
    infer=_infer,
    args=[*transposed_arguments(), GROUP, NO_GRADIENT_TO_INPUT],
    gradient=make_gradient,
    flops=_flops,
    channels=((0, 1), (0,)),
    check=check_group,
    doc=(
        "Each element of X adds its filter, times itself, to Y: ``Y[n, m, o * stride - pad + k] += "
        "X[n, c, o] W[c, m, k]``, and b[m]. Y has ``(size - 1) * stride + kernel + adj - pads`` positions in "
        "a dimension. X is NxCx(spatial) and W is CxM/groupx(kernel); with order NHWC, Nx(spatial)xC and "
        "Cx(kernel)xM/group."
    ),
)
register_gradient(TRANSPOSED, transposed_arguments(), _infer_gradient, _flops_gradient)
