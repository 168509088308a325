"""Convolution over any number of spatial dimensions: Conv, Conv1D, Conv2D, Conv3D and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpunet.arguments import Arg, Arguments, Bool, Int
from gpunet.errors import ArgumentError, SchemaError, ShapeError
from gpunet.gradient_maker import GradientBuilder
from gpunet.operator import Operator
from gpunet.operators.window import Window, resolve_window, window_arguments
from gpunet.proto import OperatorDef
from gpunet.rules import describe, want_same_type, want_shape
from gpunet.schema import FLOATS, FlopsFunction, InferFunction, Input, Output, Places, register
from gpunet.specs import TensorSpec, format_shape

#: Forward types with the number of spatial dimensions that they take; ``None`` takes any.
CONVOLUTIONS: Final[dict[str, int | None]] = {"Conv": None, "Conv1D": 1, "Conv2D": 2, "Conv3D": 3}


def convolution_window(args: Arguments, image: TensorSpec, filters: TensorSpec) -> Window:
    """The window of a convolution, from the arguments and the specs of X and W."""
    sizes = filters.shape[1:-1] if args.order == "NHWC" else filters.shape[2:]
    return resolve_window(args, image.shape, kernel=sizes if len(sizes) == image.rank - 2 else None)


def check_group(op: Operator) -> None:
    """Raises :class:`ArgumentError` for a number of groups that makes no sense."""
    if op.args.group < 1:
        raise ArgumentError(f"argument 'group' is {op.args.group}, wanted at least 1")


def want_ranks(op: Operator, x: TensorSpec, w: TensorSpec) -> None:
    """Raises :class:`ShapeError` unless X and W have as many dimensions, and at least a spatial one."""
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


def want_sizes(w: TensorSpec, window: Window) -> None:
    """Raises :class:`ShapeError` unless the filters are as large as the window."""
    sizes = w.shape[1:-1] if window.channels_last else w.shape[2:]
    if sizes != window.kernel:
        raise ShapeError(
            f"filter W ({format_shape(w.shape)}) is {format_shape(sizes)} in space, arguments want kernel "
            f"{format_shape(window.kernel)}"
        )


def _resolve(op: Operator, inputs: Sequence[TensorSpec]) -> tuple[Window, int]:
    """Checks X and W against each other; returns the window and the number of output channels."""
    want_same_type(op, inputs)
    x, w = inputs[0], inputs[1]
    rank = CONVOLUTIONS.get(op.type.removesuffix("Gradient"))
    if rank is not None and x.rank != rank + 2:
        raise ShapeError(f"{describe(op, 0, x)} has {x.rank} dimensions, wanted {rank + 2}")
    want_ranks(op, x, w)
    window = convolution_window(op.args, x, w)
    group = op.args.group
    axis = -1 if window.channels_last else 1
    channels, in_group = x.shape[axis], w.shape[axis]
    if channels != in_group * group:
        of = f" ({in_group} in each of {group} groups)" if group > 1 else ""
        raise ShapeError(
            f"{describe(op, 0, x)} has {channels} channels, filter W ({format_shape(w.shape)}) wants "
            f"{in_group * group}{of}"
        )
    want_sizes(w, window)
    if w.shape[0] % group:
        raise ShapeError(
            f"filter W ({format_shape(w.shape)}) has {w.shape[0]} output channels, wanted a multiple of "
            f"{group} groups"
        )
    return window, w.shape[0]


def infer_forward(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The spec of Y, from those of X, W and perhaps b."""
    window, filters = _resolve(op, inputs)
    if len(inputs) > 2:
        want_shape(op, inputs, 2, (filters,), "one number an output channel")
    return [inputs[0].with_shape(*window.shape(inputs[0].shape[0], filters))]


def _infer_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    window, filters = _resolve(op, inputs)
    x, w = inputs[0], inputs[1]
    want_shape(op, inputs, 2, window.shape(x.shape[0], filters), "the shape of the forward output")
    return [w, x] if op.args.no_bias else [w, w.with_shape(filters), x]


def _check_gradient(op: Operator) -> None:
    check_group(op)
    if op.args.no_bias and len(op.outputs) > 2:
        raise SchemaError(f"has {len(op.outputs)} outputs with no_bias, wanted 1 or 2 (dW, dX?)")


def make_gradient(g: GradientBuilder) -> list[OperatorDef]:
    """The gradient of a convolution, transposed or not: dW, db where there is a bias, and dX if wanted."""
    has_bias = len(g.op.inputs) > 2
    inputs = [g.input(0), g.input(1), g.output_grad(0)]
    outputs = [g.input_grad(1)]
    if has_bias:
        outputs.append(g.input_grad(2))
    if not g.op.args.no_gradient_to_input:
        outputs.append(g.input_grad(0))
    # Without a bias, the second output would read as the bias gradient.
    return g.single(f"{g.op.type}Gradient", inputs, outputs, no_bias=None if has_bias else 1)


def multiplications(w: TensorSpec, y: TensorSpec) -> int:
    """Floating-point operations of the products: a multiplication and an addition each."""
    return 2 * y.size * (w.size // max(w.shape[0], 1))


def _flops(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return multiplications(inputs[1], outputs[0]) + (outputs[0].size if len(inputs) > 2 else 0)


def _flops_gradient(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    dy = inputs[2]
    bias = 0 if op.args.no_bias else 1
    data = 1 if len(outputs) > 1 + bias else 0
    return multiplications(inputs[1], dy) * (1 + data) + bias * dy.size


GROUP: Final = Int(
    "group", 1, "number of groups: output channels see only the input channels of their own group"
)
NO_GRADIENT_TO_INPUT: Final = Bool("no_gradient_to_input", False, "the gradient of X is not wanted")
_DOC = (
    "``Y[n, m, o] = b[m] + sum over c and k of W[m, c, k] X[n, c, o * stride - pad + k * dilation]``: "
    "cross-correlation with zero padding. "
    "X is NxCx(spatial) and W is MxC/groupx(kernel); with order NHWC, Nx(spatial)xC and Mx(kernel)xC/group."
)


def _register(type: str, rank: int | None) -> None:
    dimensions = "any number of" if rank is None else str(rank)
    register(
        type,
        inputs=[
            Input("X", f"images, {dimensions} spatial dimensions", FLOATS),
            Input("W", "filters", FLOATS),
            Input("b", "bias, one number an output channel", FLOATS, optional=True),
        ],
        outputs=[Output("Y", "filtered images")],
        infer=infer_forward,
        args=[*window_arguments("filter"), GROUP, NO_GRADIENT_TO_INPUT],
        gradient=make_gradient,
        flops=_flops,
        channels=((0, 1), (0,)),
        check=check_group,
        doc=_DOC,
    )
    register_gradient(type, window_arguments("filter"), _infer_gradient, _flops_gradient)


def _gradient_channels(op: Operator) -> Places:
    data = len(op.outputs) == (2 if op.args.no_bias else 3)
    return (0, 1, 2), (0, *((len(op.outputs) - 1,) if data else ()))


def register_gradient(
    type: str, arguments: Sequence[Arg], infer: InferFunction, flops: FlopsFunction
) -> None:
    """Registers what :func:`make_gradient` makes for an operator type.

    Args:
        type: the forward type.
        arguments: of its window.
        infer: from X, W and dY to dW, db and dX, or dW and dX with ``no_bias``.
        flops: of the gradients that are asked for.
    """
    register(
        f"{type}Gradient",
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
        infer=infer,
        args=[
            *arguments,
            GROUP,
            Bool("no_bias", False, "the forward operator had no bias: outputs are dW and dX"),
        ],
        flops=flops,
        channels=_gradient_channels,
        check=_check_gradient,
        doc=f"Gradients of {type}: outputs dW, db, dX, or dW, dX with ``no_bias``; dX may be left out.",
    )


for _type, _rank in CONVOLUTIONS.items():
    _register(_type, _rank)
