"""Numbers of 8 bits: QuantizeLinear, DequantizeLinear, QLinearConv, as ONNX has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpunet.arguments import Bool, Int
from gpunet.errors import DataTypeError
from gpunet.operator import Operator
from gpunet.operators.convolution import GROUP, check_group, infer_forward, multiplications
from gpunet.operators.window import window_arguments
from gpunet.rules import canonical_axis, describe, flops_per_input, want_shape, want_size
from gpunet.schema import FLOATS, NOT_DIFFERENTIABLE, Input, Output, Types, register
from gpunet.specs import TensorSpec

_BYTES: Final[Types] = frozenset([np.dtype("int8"), np.dtype("uint8")])
_SINGLE: Final[Types] = frozenset([np.dtype("float32")])
_SUMS: Final[Types] = frozenset([np.dtype("int32")])
_AXIS: Final = Int(
    "axis", 1, "the dimension whose elements have scales of their own, where there are several"
)


def scale_steps(args: Any, x: Any, scale: Any) -> tuple[int, int]:
    """How many scales there are for X, and how many neighbouring elements share one."""
    if scale.size == 1:
        return 1, 1
    axis = canonical_axis(args.axis, len(x.shape))
    return x.shape[axis], int(np.prod(x.shape[axis + 1 :], dtype=np.int64))


def _want_scales(op: Operator, inputs: Sequence[TensorSpec]) -> None:
    x, scale = inputs[0], inputs[1]
    if scale.size != 1:
        axis = canonical_axis(op.args.axis, x.rank)
        want_shape(op, inputs, 1, (x.shape[axis],), f"one number, or one for each of dimension {axis} of X")
    if len(inputs) > 2:
        want_size(op, inputs, 2, scale.size, "a zero point for each scale")


def _infer_quantize(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    _want_scales(op, inputs)
    return [inputs[0].with_dtype(inputs[2].dtype if len(inputs) > 2 else "uint8")]


def _infer_dequantize(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    _want_scales(op, inputs)
    if len(inputs) > 2 and inputs[2].dtype != inputs[0].dtype:
        raise DataTypeError(f"{describe(op, 2, inputs[2])} does not fit {describe(op, 0, inputs[0])}")
    return [inputs[0].with_dtype("float32")]


register(
    "QuantizeLinear",
    inputs=[
        Input("X", "numbers, of any dimensions", FLOATS),
        Input(
            "Y_scale", "distance of neighbouring numbers: one, or one an element of dimension `axis`", _SINGLE
        ),
        Input(
            "Y_zero_point",
            "what stands for 0, and the type of Y: like Y_scale; uint8 0 if missing",
            _BYTES,
            optional=True,
        ),
    ],
    outputs=[Output("Y", "like X")],
    args=[_AXIS],
    infer=_infer_quantize,
    gradient=NOT_DIFFERENTIABLE,
    flops=flops_per_input(2),
    doc="``Y = saturate(round(X / Y_scale) + Y_zero_point)``, rounded half to even; NaN becomes the least "
    "number.",
)
register(
    "DequantizeLinear",
    inputs=[
        Input("X", "whole numbers, of any dimensions", _BYTES | _SUMS),
        Input(
            "X_scale", "distance of neighbouring numbers: one, or one an element of dimension `axis`", _SINGLE
        ),
        Input("X_zero_point", "what stands for 0: like X_scale; 0 if missing", _BYTES | _SUMS, optional=True),
    ],
    outputs=[Output("Y", "float32, like X")],
    args=[_AXIS],
    infer=_infer_dequantize,
    gradient=NOT_DIFFERENTIABLE,
    flops=flops_per_input(2),
    doc="``Y = (X - X_zero_point) X_scale``.",
)


def _infer_convolution(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    x, w, filters = inputs[0], inputs[3], inputs[3].shape[0] if inputs[3].rank else 0
    for index in (1, 2, 6, 7):
        want_size(op, inputs, index, 1, "one for the tensor")
    for index in (4, 5):
        if inputs[index].size != 1:
            want_shape(op, inputs, index, (filters,), "one number, or one an output channel")
    for zero, data in ((2, 0), (5, 3)):
        if inputs[zero].dtype != inputs[data].dtype:
            raise DataTypeError(
                f"{describe(op, zero, inputs[zero])} does not fit {describe(op, data, inputs[data])}"
            )
    if op.args.symmetric and {x.dtype, w.dtype} != {np.dtype("int8")}:
        raise DataTypeError(f"{describe(op, 0, x)} and {describe(op, 3, w)} cannot be symmetric, wanted int8")
    if len(inputs) > 8:
        want_shape(op, inputs, 8, (filters,), "one number an output channel")
    (y,) = infer_forward(op, [x, w.with_dtype(x.dtype)])
    return [y.with_dtype(inputs[7].dtype)]


def _flops(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return multiplications(inputs[3], outputs[0]) + 2 * outputs[0].size


register(
    "QLinearConv",
    inputs=[
        Input("X", "images, any number of spatial dimensions", _BYTES),
        Input("X_scale", "distance of neighbouring numbers of X: one", _SINGLE),
        Input("X_zero_point", "what stands for 0 in X: one", _BYTES),
        Input("W", "filters", _BYTES),
        Input("W_scale", "distance of neighbouring numbers of W: one, or one an output channel", _SINGLE),
        Input("W_zero_point", "what stands for 0 in W: one, or one an output channel", _BYTES),
        Input("Y_scale", "distance of neighbouring numbers of Y: one", _SINGLE),
        Input("Y_zero_point", "what stands for 0 in Y, and the type of Y: one", _BYTES),
        Input("B", "bias in steps of X_scale W_scale: one number an output channel", _SUMS, optional=True),
    ],
    outputs=[Output("Y", "filtered images")],
    args=[
        *window_arguments("filter"),
        GROUP,
        Bool(
            "symmetric",
            False,
            "the zero points of X and W are 0 and are not read: a GPU then takes cuDNN (of gpunet's own)",
        ),
    ],
    check=check_group,
    infer=_infer_convolution,
    gradient=NOT_DIFFERENTIABLE,
    flops=_flops,
    doc="``Y = saturate(round((sum (X - X_zero_point) (W - W_zero_point) + B) X_scale W_scale / Y_scale) "
    "+ Y_zero_point)``, the sums as of Conv in whole numbers of 32 bits, rounded half to even. Padding "
    "stands for 0. Shapes are those of Conv.",
)
