"""Fills: operators that make tensors of constant, given or random values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from gpunet.arguments import Arg, Bool, DataType, Float, Int, Ints, Scalar, Strings, Values
from gpunet.dtypes import is_half
from gpunet.errors import ArgumentError, DataTypeError, ShapeError
from gpunet.operator import Operator
from gpunet.rules import describe
from gpunet.schema import ANY_TENSOR, NO_GRADIENT, Input, Output, register
from gpunet.specs import Shape, TensorSpec, format_shape

_SHAPE_INPUT: Final = Input(
    "shape",
    "a tensor whose shape is taken or, with input_as_shape, whose values (int64) are the shape",
    optional=True,
)
_SHAPE_ARGS: Final = (
    Ints("shape", (), "shape of the output; not together with an input"),
    Ints("extra_shape", (), "dimensions added behind the shape that the input gives"),
    Bool("input_as_shape", False, "read the shape from the values of the input, not from its shape"),
)
_FILLED: Final = Output("Y", "the filled tensor")

ShapeCheck = Callable[[Shape], None]


def fill_dtype(op: Operator) -> np.dtype:
    """Element type of the output of a fill."""
    fixed = _FIXED_TYPES.get(op.type)
    if fixed is not None:
        return fixed
    if op.args.dtype is not None:
        dtype: np.dtype = op.args.dtype
        return dtype
    if op.type != "GivenTensorFill" and op.args.has("value") and isinstance(op.args.value, int):
        return np.dtype(np.int64)
    return np.dtype(np.float32)


def check_values(op: Operator, shape: Shape) -> None:
    """Raises :class:`ArgumentError` unless a GivenTensor fill has as many values as ``shape`` wants."""
    values = op.args.values
    found = len(values[0]) if op.type == "GivenTensorByteStringToUInt8Fill" else len(values)
    wanted = TensorSpec(shape, fill_dtype(op)).size
    if found != wanted:
        raise ArgumentError(
            f"argument 'values' has {found} elements, wanted {wanted} for shape {format_shape(shape)}"
        )


def check_msra(shape: Shape) -> None:
    """Raises :class:`ShapeError` unless the shape has the second dimension that the fan-out needs."""
    if len(shape) < 2:
        raise ShapeError(f"shape {format_shape(shape)} has {len(shape)} dimensions, wanted at least 2")


def check_diagonal(shape: Shape) -> None:
    """Raises :class:`ShapeError` unless the shape is a matrix or has equal dimensions."""
    if len(shape) < 2:
        raise ShapeError(f"shape {format_shape(shape)} has {len(shape)} dimensions, wanted at least 2")
    if len(shape) > 2 and len(set(shape)) > 1:
        raise ShapeError(
            f"shape {format_shape(shape)} has unequal dimensions, wanted equal ones for more than 2"
        )


def _shape_from_values(op: Operator) -> bool:
    return bool(op.inputs) and op.args.input_as_shape


def _check_shape_arguments(op: Operator) -> None:
    args = op.args
    if op.inputs and args.shape:
        raise ArgumentError(
            f"argument 'shape' is {list(args.shape)} although an input gives the shape, wanted only one"
        )
    if not op.inputs and args.extra_shape:
        raise ArgumentError(
            f"argument 'extra_shape' is {list(args.extra_shape)}, wanted an input whose shape it extends"
        )
    if not op.inputs and args.input_as_shape:
        raise ArgumentError("argument 'input_as_shape' is set, wanted an input that holds the shape")
    for name in ("shape", "extra_shape"):
        if any(n < 0 for n in getattr(args, name)):
            raise ArgumentError(
                f"argument {name!r} is {list(getattr(args, name))}, wanted no negative dimension"
            )


def _register(
    type: str,
    doc: str,
    *,
    args: Iterable[Arg] = (),
    extra_inputs: Iterable[Input] = (),
    counts: tuple[int, ...] = (0, 1),
    random: bool = False,
    shape_check: ShapeCheck | None = None,
    check: Callable[[Operator], None] | None = None,
    dynamic: Callable[[Operator], bool] = _shape_from_values,
) -> None:
    def checks(op: Operator) -> None:
        _check_shape_arguments(op)
        if check is not None:
            check(op)

    def infer(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec | None]:
        if _shape_from_values(op) and (inputs[0].rank != 1 or inputs[0].dtype != np.int64):
            raise DataTypeError(
                f"{describe(op, 0, inputs[0])} cannot be a shape, wanted a 1-dimensional int64 tensor"
            )
        for i, found in enumerate(inputs[1:], 1):
            if found.size != 1 or found.dtype != fill_dtype(op):
                raise DataTypeError(
                    f"{describe(op, i, found)} does not fit, wanted one element of {fill_dtype(op)}"
                )
        if dynamic(op) and (not _shape_from_values(op) or inputs[0].known is None):
            return [None]
        shape = tuple(op.args.shape)
        if inputs:
            shape = inputs[0].known if _shape_from_values(op) else inputs[0].shape
            shape = (*shape, *op.args.extra_shape)
        if shape_check is not None:
            shape_check(shape)
        if hasattr(op.args, "values"):
            check_values(op, shape)
        typed = op.type == "ConstantFill" and op.args.input_as_type and bool(inputs)
        return [TensorSpec(shape, inputs[0].dtype if typed else fill_dtype(op))]

    register(
        type,
        inputs=[_SHAPE_INPUT, *extra_inputs],
        outputs=[_FILLED],
        input_counts=counts,
        args=[*_SHAPE_ARGS, *args],
        infer=infer,
        check=checks,
        inplace=[(0, 0)],
        gradient=NO_GRADIENT,
        random=random,
        dynamic=dynamic,
        doc=f"{doc} The shape is ``shape``, or that of the input (or its values) and ``extra_shape``.",
    )


def _check_value(op: Operator) -> None:
    dtype, value = fill_dtype(op), op.args.value
    if dtype.kind == "O":
        fits = isinstance(value, bytes) or not op.args.has("value")
    elif dtype.kind in "iu":
        limits = np.iinfo(dtype)
        fits = not isinstance(value, bytes) and value == value // 1 and limits.min <= value <= limits.max
    else:
        fits = not isinstance(value, bytes)
    if not fits:
        name = "string" if dtype.kind == "O" else dtype.name
        raise ArgumentError(
            f"argument 'value' is {value!r}, wanted a value of {name}, the element type of the output"
        )


_VALUE_TYPE: Final = DataType(
    "dtype", None, "element type of the output; without it that of value: float32, or int64"
)

_FIXED_TYPES: Final = {
    name: np.dtype(dtype)
    for name, dtype in {
        "GaussianFill": "float32",
        "UniformFill": "float32",
        "UniformIntFill": "int32",
        "XavierFill": "float32",
        "MSRAFill": "float32",
        "RangeFill": "float32",
        "GivenTensorDoubleFill": "float64",
        "GivenTensorBoolFill": "bool",
        "GivenTensorInt16Fill": "int16",
        "GivenTensorIntFill": "int32",
        "GivenTensorInt64Fill": "int64",
        "GivenTensorStringFill": "object",
        "GivenTensorByteStringToUInt8Fill": "uint8",
    }.items()
}

_register(
    "ConstantFill",
    "Every element is ``value``, or the single element of the second input.",
    args=[
        Scalar("value", 0, "the value"),
        _VALUE_TYPE,
        Bool("input_as_type", False, "take the element type of the first input too, not only its shape"),
    ],
    extra_inputs=[
        Input("value", "a tensor with one element, of the type of the output", ANY_TENSOR, optional=True)
    ],
    counts=(0, 1, 2),
    check=_check_value,
)
_HALF_TYPE: Final = DataType("dtype", np.float16, "element type of the output: float16 or bfloat16")


def _check_half(op: Operator) -> None:
    if not is_half(fill_dtype(op)):
        raise ArgumentError(f"argument 'dtype' is {fill_dtype(op)}, wanted float16 or bfloat16")


_register(
    "Float16ConstantFill",
    "Every element is ``value``, in a half type.",
    args=[Float("value", 0.0, "the value"), _HALF_TYPE],
    counts=(0,),
    check=_check_half,
)
_register(
    "DiagonalFill",
    "``value`` on the main diagonal, 0 elsewhere; a tall matrix has another one below the square.",
    args=[Scalar("value", 0, "the value"), _VALUE_TYPE],
    shape_check=check_diagonal,
    check=_check_value,
)
_register("RangeFill", "Element ``i``, counted in row-major order, is ``i``.")


def _check_std(op: Operator) -> None:
    if not op.args.std >= 0:
        raise ArgumentError(f"argument 'std' is {op.args.std:g}, wanted 0 or more")


def _check_range(op: Operator) -> None:
    if len(op.inputs) == 3:
        for name in ("min", "max"):
            if op.args.has(name):
                raise ArgumentError(
                    f"argument {name!r} is given although input {name} is too, wanted only one"
                )
    elif not op.args.min < op.args.max:
        raise ArgumentError(
            f"arguments 'min' {op.args.min:g} and 'max' {op.args.max:g} do not fit, wanted min below max"
        )


def _check_half_range(op: Operator) -> None:
    _check_half(op)
    _check_range(op)


def _uniform_dynamic(op: Operator) -> bool:
    # A range that is empty (min above max, known only from data) empties the output's first dimension.
    return len(op.inputs) == 3 or _shape_from_values(op)


_register(
    "GaussianFill",
    "Normal random numbers.",
    args=[Float("mean", 0.0, "mean"), Float("std", 1.0, "standard deviation, 0 or more")],
    random=True,
    check=_check_std,
)
for _type, _what, _kind in (
    ("UniformFill", "numbers in [min, max)", Float),
    ("UniformIntFill", "integers in [min, max]", Int),
):
    _register(
        _type,
        f"Uniform random {_what}. Where inputs give min above max, the first dimension is 0.",
        args=[_kind("min", 0, "lower bound"), _kind("max", 1, "upper bound")],
        extra_inputs=[
            Input("min", "a tensor with one element: the lower bound", optional=True),
            Input("max", "a tensor with one element: the upper bound", optional=True),
        ],
        counts=(0, 1, 3),
        random=True,
        check=_check_range,
        dynamic=_uniform_dynamic,
    )
_register(
    "Float16UniformFill",
    "Uniform random numbers in [min, max), in a half type.",
    args=[Float("min", 0.0, "lower bound"), Float("max", 1.0, "upper bound"), _HALF_TYPE],
    counts=(0,),
    random=True,
    check=_check_half_range,
)
_register(
    "XavierFill",
    "Uniform random numbers in [-s, s), ``s = sqrt(3 / fan_in)``, where fan_in is the size over the "
    "first dimension (Glorot and Bengio 2010, with the fan-in alone).",
    random=True,
)
_register(
    "MSRAFill",
    "Normal random numbers of mean 0 and standard deviation ``sqrt(2 / fan_out)``, where fan_out is the "
    "size over the second dimension (He et al. 2015).",
    random=True,
    shape_check=check_msra,
)


def _check_given(op: Operator) -> None:
    dtype, values = fill_dtype(op), op.args.values
    if dtype.kind in "iu" and values:
        limits = np.iinfo(dtype)
        for bad in (v for v in (min(values), max(values)) if not limits.min <= v <= limits.max):
            raise ArgumentError(
                f"argument 'values' holds {bad}, wanted {limits.min} to {limits.max} for {dtype}"
            )
    if op.type == "GivenTensorFill" and values and isinstance(values[0], bytes) != (dtype.kind == "O"):
        name = "string" if dtype.kind == "O" else dtype.name
        raise ArgumentError(f"argument 'values' holds {type(values[0]).__name__}, wanted values of {name}")


def _check_bytes(op: Operator) -> None:
    if len(op.args.values) != 1:
        raise ArgumentError(
            f"argument 'values' has {len(op.args.values)} strings, wanted one that holds all bytes"
        )


_register(
    "GivenTensorFill",
    "The values of ``values``, in row-major order.",
    args=[
        Values("values", (), "the values"),
        DataType("dtype", None, "element type of the output; float32 without it"),
    ],
    check=_check_given,
)
for _type in ("Double", "Bool", "Int16", "Int", "Int64", "String"):
    _number = Ints if _type in ("Bool", "Int16", "Int", "Int64") else Values if _type == "Double" else Strings
    _register(
        f"GivenTensor{_type}Fill",
        "The values of ``values``, in row-major order.",
        args=[_number("values", (), "the values")],
        check=_check_given,
    )
_register(
    "GivenTensorByteStringToUInt8Fill",
    "The bytes of the one string in ``values``, in row-major order.",
    args=[Strings("values", (), "one string that holds all bytes")],
    check=_check_bytes,
)
