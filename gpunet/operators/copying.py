"""Copies, type conversions, and operators that are a copy forward and something else backward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpunet.arguments import Bool, DataType
from gpunet.dtypes import dtype_to_proto
from gpunet.errors import GradientError
from gpunet.gradient_maker import GradientBuilder
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from gpunet.rules import same_as_input
from gpunet.schema import (
    BOOL,
    FLOATS,
    NO_GRADIENT,
    NOT_DIFFERENTIABLE,
    NUMBERS,
    GradientFunction,
    GradientRule,
    Input,
    Output,
    register,
)
from gpunet.specs import TensorSpec


def _copy(
    type: str,
    doc: str,
    gradient: GradientFunction | GradientRule,
    *,
    inplace: bool = False,
    elementwise: bool = False,
) -> None:
    register(
        type,
        inputs=[Input("X", "tensor of any shape and type")],
        outputs=[Output("Y", "tensor of the shape and type of X")],
        inplace=[(0, 0)] if inplace else [],
        infer=same_as_input,
        gradient=gradient,
        elementwise=elementwise,
        doc=doc,
    )


def _copy_gradient(g: GradientBuilder) -> list[OperatorDef]:
    return g.single("CopyOnDeviceLike", [g.output_grad(0), g.input(0)], [g.input_grad(0)])


def _copied_back_by(type: str) -> GradientFunction:
    """The gradient, dense or sparse, is copied the other way."""

    def gradient(g: GradientBuilder) -> list[OperatorDef]:
        if not g.is_sparse(0):
            return g.single(type, [g.output_grad(0)], [g.input_grad(0)])
        found, made = g.output_grad_slice(0), g.input_grad_slice(0)
        return [g.make(type, [found.indices], [made.indices]), g.make(type, [found.values], [made.values])]

    return gradient


def _pass_through(g: GradientBuilder) -> list[OperatorDef]:
    """The gradient of X is that of Y: no operator is needed."""
    g.set_dense(0, g.output_grad(0))
    return []


_copy("Copy", "Copies X.", _copy_gradient, elementwise=True)
_copy("CopyFromCPUInput", "Copies X from the CPU to the device of the operator.", NOT_DIFFERENTIABLE)
_copy("EnsureCPUOutput", "Copies X, wherever it is, to the CPU.", NO_GRADIENT)
_copy(
    "CopyCPUToGPU",
    "Copies X from the CPU to the GPU of the operator; on the CPU it is a plain copy.",
    _copied_back_by("CopyGPUToCPU"),
)
_copy(
    "CopyGPUToCPU",
    "Copies X from its GPU to the CPU; on the CPU it is a plain copy.",
    _copied_back_by("CopyCPUToGPU"),
)
_copy(
    "Alias",
    "Makes Y equal to X. Here it copies: the two share no memory, unlike in Caffe2.",
    _pass_through,
    elementwise=True,
)
_copy(
    "StopGradient",
    "Copies X; no gradient flows back through it.",
    NO_GRADIENT,
    inplace=True,
    elementwise=True,
)

register(
    "CopyOnDeviceLike",
    inputs=[
        Input("X", "tensor of any shape and type"),
        Input("like", "a blob on the device to copy to; its values are not read"),
    ],
    outputs=[Output("Y", "tensor of the shape and type of X")],
    infer=same_as_input,
    doc="Copies X to the device of another blob.",
)


def _infer_nothing(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return []


def _zero_gradient(g: GradientBuilder) -> list[OperatorDef]:
    return g.single("ConstantFill", [g.input(0)], [g.input_grad(0)], value=0.0)


register(
    "ZeroGradient",
    inputs=[Input("X", "tensor of any shape")],
    outputs=[],
    infer=_infer_nothing,
    gradient=_zero_gradient,
    doc="Does nothing forward; backward it gives X a gradient of zeros, for blobs that nothing else uses.",
)


def _infer_cast(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [inputs[0].with_dtype(op.args.to)]


def _cast_gradient(g: GradientBuilder) -> list[OperatorDef]:
    if g.args.from_type is None:
        raise GradientError(
            "argument 'from_type' is missing, wanted the element type of the input to make a gradient"
        )
    g.copy_arguments = False
    to, from_type = dtype_to_proto(g.args.from_type), dtype_to_proto(g.args.to)
    return g.single("Cast", [g.output_grad(0)], [g.input_grad(0)], to=int(to), from_type=int(from_type))


register(
    "Cast",
    inputs=[Input("X", "tensor of any shape", NUMBERS | BOOL)],
    outputs=[Output("Y", "tensor of the shape of X")],
    args=[
        DataType("to", np.float32, "element type of Y"),
        DataType("from_type", None, "element type of X; read only to make the gradient"),
    ],
    infer=_infer_cast,
    gradient=_cast_gradient,
    elementwise=True,
    doc="Converts the element type. Fractions are cut off, whole numbers wrap around, any number but 0 is "
    "true, floats become text with six decimals.",
)


def _infer_half(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [inputs[0].with_dtype(np.float16)]


def _infer_float(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [inputs[0].with_dtype(np.float32)]


def _converted_back_by(type: str) -> GradientFunction:
    def gradient(g: GradientBuilder) -> list[OperatorDef]:
        return g.single(type, [g.output_grad(0)], [g.input_grad(0)])

    return gradient


register(
    "FloatToHalf",
    inputs=[Input("X", "tensor of any shape", FLOATS)],
    outputs=[Output("Y", "float16 tensor of the shape of X")],
    args=[
        Bool("clip", False, "numbers beyond float16's range become its largest (65504) instead of infinite")
    ],
    infer=_infer_half,
    gradient=_converted_back_by("HalfToFloat"),
    elementwise=True,
    doc="Rounds to float16.",
)

register(
    "HalfToFloat",
    inputs=[Input("X", "float16 tensor of any shape", frozenset([np.dtype(np.float16)]))],
    outputs=[Output("Y", "float32 tensor of the shape of X")],
    infer=_infer_float,
    gradient=_converted_back_by("FloatToHalf"),
    elementwise=True,
    doc="Widens float16 to float32.",
)
