"""Element types: NumPy's on one side, ``TensorProto.DataType`` on the other. The only such table in gpunet.

Tensors of byte strings are NumPy arrays of ``object`` whose elements are ``bytes``. NumPy has no bfloat16:
its type is that of the package ml_dtypes, and where that is not installed no tensor has it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np

from gpunet.errors import DataTypeError
from gpunet.proto import TensorProto

DTypeLike: TypeAlias = str | int | type | np.dtype


def _find_bfloat16() -> np.dtype | None:
    try:
        ml_dtypes: Any = importlib.import_module("ml_dtypes")
    except ImportError:
        return None
    found: np.dtype = np.dtype(ml_dtypes.bfloat16)
    return found


#: NumPy's type of bfloat16; ``None`` where ml_dtypes is not installed.
BFLOAT16: Final = _find_bfloat16()

_TABLE: dict[TensorProto.DataType, np.dtype] = {
    TensorProto.FLOAT: np.dtype(np.float32),
    TensorProto.INT32: np.dtype(np.int32),
    TensorProto.STRING: np.dtype(object),
    TensorProto.BOOL: np.dtype(np.bool_),
    TensorProto.UINT8: np.dtype(np.uint8),
    TensorProto.INT8: np.dtype(np.int8),
    TensorProto.UINT16: np.dtype(np.uint16),
    TensorProto.INT16: np.dtype(np.int16),
    TensorProto.INT64: np.dtype(np.int64),
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.DOUBLE: np.dtype(np.float64),
}
if BFLOAT16 is not None:
    _TABLE[TensorProto.BFLOAT16] = BFLOAT16

#: NumPy's type for each DataType that a tensor can have; BYTE reads as uint8.
PROTO_TO_NUMPY: Mapping[int, np.dtype] = MappingProxyType(
    dict([*_TABLE.items(), (TensorProto.BYTE, np.dtype(np.uint8))])
)

#: The inverse; uint8 is written as UINT8, never as BYTE.
NUMPY_TO_PROTO: Mapping[np.dtype, TensorProto.DataType] = MappingProxyType({d: t for t, d in _TABLE.items()})

_NAMES = {TensorProto.DataType.Name(number): dtype for number, dtype in PROTO_TO_NUMPY.items()}
_WANTED = "wanted one of " + ", ".join(sorted("string" if d.hasobject else d.name for d in NUMPY_TO_PROTO))


def bfloat16() -> np.dtype:
    """NumPy's type of bfloat16: float32 cut to its upper 16 bits, 8 of them significant.

    Raises:
        DataTypeError: the package ml_dtypes, which has it, is not installed.
    """
    if BFLOAT16 is None:
        raise DataTypeError(
            "element type bfloat16 needs the package ml_dtypes, which is not installed: "
            "pip install 'gpunet[bfloat16]', or use float16"
        )
    return BFLOAT16


def is_half(dtype: np.dtype) -> bool:
    """Whether ``dtype`` is float16 or bfloat16, which store numbers that are computed with in float32."""
    return dtype == np.float16 or is_bfloat16(dtype)


def is_bfloat16(dtype: np.dtype) -> bool:
    """Whether ``dtype`` is bfloat16; false for all types where ml_dtypes is not installed."""
    return BFLOAT16 is not None and dtype == BFLOAT16


def is_float(dtype: np.dtype) -> bool:
    """Whether ``dtype`` is a floating-point type; NumPy's ``kind`` does not count bfloat16 among them."""
    return dtype.kind == "f" or is_bfloat16(dtype)


def float_limits(dtype: np.dtype) -> np.finfo[Any]:
    """``numpy.finfo`` of a floating-point type, bfloat16 included."""
    if is_bfloat16(dtype):
        found: np.finfo[Any] = importlib.import_module("ml_dtypes").finfo(dtype)
        return found
    return np.finfo(dtype)


def dtype_from_proto(data_type: int) -> np.dtype:
    """NumPy's type for a ``TensorProto.DataType``.

    Raises:
        DataTypeError: no tensor has this type (UNDEFINED, the two states of containers, an unknown number;
            BFLOAT16 without ml_dtypes).
    """
    dtype = PROTO_TO_NUMPY.get(data_type)
    if data_type == TensorProto.BFLOAT16:
        return bfloat16()
    if dtype is None:
        known = data_type in TensorProto.DataType.values()
        name = f" ({TensorProto.DataType.Name(data_type)})" if known else ""
        raise DataTypeError(f"data type {data_type}{name} is not an element type, {_WANTED}")
    return dtype


def dtype_to_proto(dtype: np.dtype | type) -> TensorProto.DataType:
    """The ``TensorProto.DataType`` for NumPy's type; fixed-width strings ("S", "U") are STRING too.

    Raises:
        DataTypeError: the format has no such element type (complex numbers, say).
    """
    found = _numpy_dtype(dtype)
    if found.kind in "SU":
        return TensorProto.STRING
    data_type = NUMPY_TO_PROTO.get(found.newbyteorder("="))
    if data_type is None:
        raise DataTypeError(f"tensors cannot have element type {found}, {_WANTED}")
    return data_type


def as_dtype(value: DTypeLike) -> np.dtype:
    """The NumPy type, in native byte order, that ``value`` names.

    Accepts a NumPy type, a scalar type (``np.float32``, ``float``), a ``TensorProto.DataType`` as number or
    name in any case, or NumPy's own name of a type. Where the two disagree the name is the format's:
    "float" is float32 and "byte" is uint8.

    Raises:
        DataTypeError: ``value`` names no type, or none that a tensor can have.
    """
    if isinstance(value, str):
        named = _NAMES.get(value.upper())
        if named is not None:
            return named
        if value.lower() == "bfloat16":
            return bfloat16()
    elif isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return dtype_from_proto(int(value))
    elif not isinstance(value, (type, np.dtype)):
        raise DataTypeError(f"found {value!r} ({type(value).__name__}) as an element type, {_WANTED}")
    return PROTO_TO_NUMPY[dtype_to_proto(_numpy_dtype(value))]


def _numpy_dtype(value: str | type | np.dtype) -> np.dtype:
    try:
        dtype = np.dtype(value)
    except (TypeError, ValueError):
        raise DataTypeError(f"found {value!r} as an element type, {_WANTED}") from None
    # NumPy makes "object" of any class that it does not know.
    if (
        dtype.hasobject
        and isinstance(value, type)
        and not issubclass(value, np.generic)
        and value is not object
    ):
        raise DataTypeError(f"found the class {value.__name__} as an element type, {_WANTED}")
    return dtype
