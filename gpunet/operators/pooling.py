"""MaxPool, AveragePool, their 1D, 2D and 3D forms, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpunet.arguments import Arg, Bool
from gpunet.errors import ArgumentError, ShapeError
from gpunet.gradient_maker import GradientBuilder
from gpunet.operator import Operator
from gpunet.operators.window import LegacyPad, Window, resolve_window, window_arguments
from gpunet.proto import OperatorDef
from gpunet.rules import describe, want_same_type, want_shape
from gpunet.schema import FLOATS, Input, Output, register
from gpunet.specs import TensorSpec

#: Suffixes of the types with the number of spatial dimensions that they take; ``None`` takes any.
POOLING_RANKS: Final[dict[str, int | None]] = {"": None, "1D": 1, "2D": 2, "3D": 3}


def pooling_window(op: Operator, x: TensorSpec) -> Window:
    """The window of a pooling operator on an input X."""
    rank = POOLING_RANKS[
        op.type.removesuffix("Gradient").removeprefix("Max").removeprefix("Average").removeprefix("Pool")
    ]
    if x.rank < 3 if rank is None else x.rank != rank + 2:
        wanted = "at least 3: batch, channels and a spatial one" if rank is None else str(rank + 2)
        raise ShapeError(f"{describe(op, 0, x)} has {x.rank} dimensions, wanted {wanted}")
    window = resolve_window(op.args, x.shape)
    if any(d != 1 for d in window.dilation):
        raise ArgumentError(
            f"argument 'dilations' is {list(window.dilation)}, wanted 1: pooling windows have no gaps"
        )
    given = op.args.legacy_pad in (LegacyPad.NOTSET, LegacyPad.CAFFE_LEGACY_POOLING)
    if given and not op.args.global_pooling:
        # Caffe's rule may add to the padding behind the image.
        tails = window.head if op.args.legacy_pad else window.tail
        for head, tail, kernel in zip(window.head, tails, window.kernel, strict=True):
            if max(head, tail) >= kernel:
                raise ArgumentError(
                    f"argument 'pads' is {[*window.head, *window.tail]}, wanted less than the kernel "
                    f"{list(window.kernel)}"
                )
    return window


def _infer(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    x = inputs[0]
    window = pooling_window(op, x)
    return [x.with_shape(*window.shape(x.shape[0], x.shape[-1 if window.channels_last else 1]))]


def _infer_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs)
    (y,) = _infer(op, inputs)
    want_shape(op, inputs, 1, y.shape, "the shape of the forward output")
    want_shape(op, inputs, 2, y.shape, "the shape of the forward output")
    return [inputs[0]]


def _gradient(g: GradientBuilder) -> list[OperatorDef]:
    return g.single(f"{g.op.type}Gradient", [g.input(0), g.output(0), g.output_grad(0)], [g.input_grad(0)])


def _flops(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return outputs[0].size * pooling_window(op, inputs[0]).taps


def _flops_gradient(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return inputs[2].size * pooling_window(op, inputs[0]).taps


def _register(kind: str, suffix: str, formula: str, derivative: str, extra: Sequence[Arg]) -> None:
    rank = POOLING_RANKS[suffix]
    dimensions = "any number of" if rank is None else str(rank)
    args = [*window_arguments("window"), *extra]
    register(
        f"{kind}Pool{suffix}",
        inputs=[Input("X", f"images, {dimensions} spatial dimensions", FLOATS)],
        outputs=[Output("Y", "one number a window and channel")],
        infer=_infer,
        args=args,
        gradient=_gradient,
        flops=_flops,
        channels=((0,), (0,)),
        doc=formula,
    )
    register(
        f"{kind}Pool{suffix}Gradient",
        inputs=[
            Input("X", "input of the forward operator", FLOATS),
            Input("Y", "output of the forward operator", FLOATS),
            Input("dY", "gradient of Y", FLOATS),
        ],
        outputs=[Output("dX", "gradient of X")],
        infer=_infer_gradient,
        args=args,
        flops=_flops_gradient,
        channels=((0, 1, 2), (0,)),
        compares=kind == "Max",
        doc=derivative,
    )


for _suffix in POOLING_RANKS:
    _register(
        "Max",
        _suffix,
        "``Y`` is the largest number in each window; padding never wins.",
        "Each number that equals the largest one of a window gets that window's gradient, so ties get it "
        "several times.",
        (),
    )
    _register(
        "Average",
        _suffix,
        "``Y`` is the mean of each window: over the positions inside of the image, or over the whole window "
        "with ``count_include_pad``.",
        "Each number gets the gradients of the windows that it is in, divided by what they were divided by.",
        [Bool("count_include_pad", False, "padding counts in the divisor")],
    )
