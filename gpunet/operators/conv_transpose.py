"""Transposed convolution: what a convolution's gradient of its images computes, as an operator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from gpunet.arguments import Arguments, Bool, Int
from gpunet.errors import ArgumentError, SchemaError, ShapeError
from gpunet.gradient_maker import GradientBuilder
from gpunet.operator import Operator
from gpunet.operators.window import Window, resolve_transposed, transposed_arguments
from gpunet.proto import OperatorDef
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


def _check(op: Operator) -> None:
    if op.args.group < 1:
        raise ArgumentError(f"argument 'group' is {op.args.group}, wanted at least 1")


def _resolve(op: Operator, inputs: Sequence[TensorSpec]) -> tuple[Window, int]:
    """Checks X and W against each other; returns the window and the number of output channels."""
    want_same_type(op, inputs)
    x, w = inputs[0], inputs[1]
    if x.rank < 3:
        raise ShapeError(
            f"{describe(op, 0, x)} has {x.rank} dimensions, wanted at least 3: batch, channels and a "
            "spatial one"
        )
    if w.rank != x.rank:
        raise ShapeError(
            f"filter W ({format_shape(w.shape)}) has {w.rank} dimensions, wanted {x.rank} as "
            f"{describe(op, 0, x)} has"
        )
    window = transposed_window(op.args, x, w)
    sizes = w.shape[1:-1] if window.channels_last else w.shape[2:]
    if sizes != window.kernel:
        raise ShapeError(
            f"filter W ({format_shape(w.shape)}) is {format_shape(sizes)} in space, arguments want kernel "
            f"{format_shape(window.kernel)}"
        )
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


def _check_gradient(op: Operator) -> None:
    _check(op)
    if op.args.no_bias and len(op.outputs) > 2:
        raise SchemaError(f"has {len(op.outputs)} outputs with no_bias, wanted 1 or 2 (dW, dX?)")


def _gradient(g: GradientBuilder) -> list[OperatorDef]:
    has_bias = len(g.op.inputs) > 2
    inputs = [g.input(0), g.input(1), g.output_grad(0)]
    outputs = [g.input_grad(1)]
    if has_bias:
        outputs.append(g.input_grad(2))
    if not g.op.args.no_gradient_to_input:
        outputs.append(g.input_grad(0))
    # Without a bias, the second output would read as the bias gradient.
    return g.single(f"{TRANSPOSED}Gradient", inputs, outputs, no_bias=None if has_bias else 1)


def _products(inputs: Sequence[TensorSpec]) -> int:
    """Each element of X meets each element of its channel's filters."""
    return inputs[0].size * math.prod(inputs[1].shape[1:])


def _flops(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return 2 * _products(inputs) + (outputs[0].size if len(inputs) > 2 else 0)


def _flops_gradient(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    bias = 0 if op.args.no_bias else 1
    data = 1 if len(outputs) > 1 + bias else 0
    return 2 * _products(inputs) * (1 + data) + bias * inputs[2].size


_GROUP = Int("group", 1, "number of groups: output channels see only the input channels of their own group")
register(
    TRANSPOSED,
    inputs=[
        Input("X", "images, any number of spatial dimensions", FLOATS),
        Input("W", "filters, as many as X has channels", FLOATS),
        Input("b", "bias, one number an output channel", FLOATS, optional=True),
    ],
    outputs=[Output("Y", "larger images")],
    infer=_infer,
    args=[
        *transposed_arguments(),
        _GROUP,
        Bool("no_gradient_to_input", False, "the gradient of X is not wanted"),
    ],
    gradient=_gradient,
    flops=_flops,
    check=_check,
    doc=(
        "Each element of X adds its filter, times itself, to Y: ``Y[n, m, o * stride - pad + k] += "
        "X[n, c, o] W[c, m, k]``, and b[m]. Y has ``(size - 1) * stride + kernel + adj - pads`` positions in "
        "a dimension. X is NxCx(spatial) and W is CxM/groupx(kernel); with order NHWC, Nx(spatial)xC and "
        "Cx(kernel)xM/group."
    ),
)
register(
    f"{TRANSPOSED}Gradient",
    inputs=[
        Input("X", "images", FLOATS),
        Input("W", "filters", FLOATS),
        Input("dY", "gradient of Y", FLOATS),
    ],
    outputs=[
        Output("dW", "gradient of W"),
        Output("db", "gradient of b; with no_bias, dX takes this place", optional=True),
        Output("dX", "gradient of X", optional=True),
    ],
    infer=_infer_gradient,
    args=[
        *transposed_arguments(),
        _GROUP,
        Bool("no_bias", False, "the forward operator had no bias: outputs are dW and dX"),
    ],
    flops=_flops_gradient,
    check=_check_gradient,
    doc=f"Gradients of {TRANSPOSED}: outputs dW, db, dX, or dW, dX with ``no_bias``; dX may be left out.",
)
