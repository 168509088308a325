"""Tensors and blobs as messages: where Caffe2's writers put the elements, and what its readers accept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpunet.dtypes import dtype_from_proto, dtype_to_proto, is_float, is_half
from gpunet.errors import DataTypeError, FormatError
from gpunet.proto import BlobProto, QTensorProto, TensorProto
from gpunet.specs import MAX_RANK, is_representable

if TYPE_CHECKING:
    from gpunet.blobs import QuantizedTensor

#: Elements in a piece of a large tensor, as Caffe2 writes them.
CHUNK_ELEMENTS = 1_000_000

# ---------------------------------------------------------------------------------------------------------
# Tensors

# Types with a field of their own; all others are in int32_data.
_FIELD_OF = {
    TensorProto.FLOAT: "float_data",
    TensorProto.DOUBLE: "double_data",
    TensorProto.INT64: "int64_data",
    TensorProto.STRING: "string_data",
}
# Their packed form is plain little-endian memory, which spares a Python number for each element.
_FIXED_WIDTH_FIELDS = {"float_data": "<f4", "double_data": "<f8"}


def tensor_to_proto(array: npt.ArrayLike, name: str = "", *, bytes_holder: bool = False) -> TensorProto:
    """A TensorProto with the elements, shape and type of ``array``.

    Args:
        array: any array of a type of :data:`gpunet.dtypes.NUMPY_TO_PROTO`; text is written as UTF-8.
        name: name of the tensor, left out when empty.
        bytes_holder: write bool and all types of 8 and 16 bits as plain memory in ``byte_data``, which is
            smaller, and not as one number an element in ``int32_data``.

    Raises:
        DataTypeError: the format has no such element type.
    """
    array = np.asarray(array)
    proto = TensorProto(dims=array.shape, data_type=dtype_to_proto(array.dtype))
    if name:
        proto.name = name
    _put_elements(proto, array.reshape(-1), bytes_holder)
    return proto


def tensor_from_proto(proto: TensorProto) -> npt.NDArray[Any]:
    """The array (C-contiguous, writable, its own memory) that a TensorProto holds.

    Elements are looked for in ``byte_data``, then ``raw_data``, then the field of their type: writers differ.
    Strings become an ``object`` array of ``bytes``.

    Raises:
        FormatError: the type is not an element type; sizes are negative, absurd, or do not match the number
            of elements; a number does not fit its type; the message holds only a piece of the tensor.
    """
    return tensor_from_chunks([proto])


def tensor_to_chunks(
    array: npt.ArrayLike, name: str = "", *, elements: int = CHUNK_ELEMENTS, bytes_holder: bool = False
) -> Iterator[TensorProto]:
    """One or more pieces of at most ``elements`` elements, each with the tensor's whole shape and a segment.

    Raises:
        DataTypeError: the format has no such element type.
    """
    array = np.asarray(array)
    flat = array.reshape(-1)
    step = max(1, elements)
    for begin in range(0, max(1, flat.size), step):
        piece = flat[begin : begin + step]
        proto = TensorProto(dims=array.shape, data_type=dtype_to_proto(array.dtype))
        proto.segment.begin, proto.segment.end = begin, begin + piece.size
        if name:
            proto.name = name
        _put_elements(proto, piece, bytes_holder)
        yield proto


def tensor_from_chunks(protos: Sequence[TensorProto]) -> npt.NDArray[Any]:
    """The array of which ``protos`` hold the pieces, in any order.

    Raises:
        FormatError: as :func:`tensor_from_proto`; pieces are missing, overlap, or are of different tensors.
    """
    if not protos:
        raise FormatError("found no pieces of a tensor, wanted at least one")
    first = protos[0]
    what = f"tensor {first.name!r}"
    try:
        dtype = dtype_from_proto(first.data_type)
    except DataTypeError as error:
        raise FormatError(f"{what}: {error}") from None
    shape, count = _checked_shape(first, dtype, what)
    pieces: list[tuple[int, int, TensorProto]] = []
    for proto in protos:
        if proto.data_type != first.data_type or tuple(proto.dims) != shape:
            raise FormatError(f"{what}: pieces differ in shape or type, wanted pieces of one tensor")
        whole = not proto.HasField("segment")
        pieces.append((0, count, proto) if whole else (proto.segment.begin, proto.segment.end, proto))
    pieces.sort(key=lambda piece: piece[:2])
    position = 0
    for begin, end, _ in pieces:
        if begin != position or end < begin:
            raise FormatError(f"{what}: found a piece {begin} to {end}, wanted one that starts at {position}")
        position = end
    if position != count:
        raise FormatError(
            f"{what}: found elements 0 to {position}, wanted all {count} of shape {list(shape)}"
        )
    arrays = [_elements(proto, dtype, end - begin, what) for begin, end, proto in pieces]
    flat = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return flat.reshape(shape)


def _checked_shape(
    proto: TensorProto | QTensorProto, dtype: np.dtype, what: str
) -> tuple[tuple[int, ...], int]:
    """Shape and number of elements, refusing what NumPy cannot represent."""
    shape = tuple(proto.dims)
    if any(size < 0 for size in shape):
        raise FormatError(f"{what}: found shape {list(shape)}, wanted no negative sizes")
    if not is_representable(shape, dtype):
        raise FormatError(
            f"{what}: found {len(shape)} sizes {list(shape[:8])}, wanted at most {MAX_RANK} and less than "
            "2^63 bytes"
        )
    return shape, math.prod(shape)


def _put_elements(proto: TensorProto, flat: npt.NDArray[Any], bytes_holder: bool) -> None:
    field = _FIELD_OF.get(proto.data_type, "int32_data")
    if field == "string_data":
        proto.string_data.extend(_as_bytes(element) for element in flat.tolist())
    elif field in _FIXED_WIDTH_FIELDS:
        data = flat.astype(_FIXED_WIDTH_FIELDS[field]).tobytes()
        number = TensorProto.DESCRIPTOR.fields_by_name[field].number
        proto.MergeFromString(_varint(number << 3 | 2) + _varint(len(data)) + data)
    elif bytes_holder and flat.dtype.itemsize < 4:
        proto.byte_data = flat.astype(flat.dtype.newbyteorder("<")).tobytes()
    else:
        if is_float(flat.dtype):
            flat = flat.astype(flat.dtype.newbyteorder("=")).view(np.uint16)
        elif flat.dtype.kind == "b":
            flat = flat.view(np.uint8)
        getattr(proto, field).extend(flat.tolist())


def _elements(proto: TensorProto, dtype: np.dtype, count: int, what: str) -> npt.NDArray[Any]:
    """The ``count`` elements of one message, flat."""
    if proto.data_format == TensorProto.FMT_BFLOAT16 and proto.data_type == TensorProto.FLOAT:
        upper = _from_memory(proto.raw_data, np.dtype(np.uint16), count, what, "raw_data")
        return (upper.astype(np.uint32) << 16).view(np.float32)
    if proto.data_format != TensorProto.FMT_PROTOBUF:
        raise FormatError(
            f"{what}: found data_format {proto.data_format} for {dtype}, wanted 0 (or 1 for float32)"
        )
    if not dtype.hasobject:
        for holder in ("byte_data", "raw_data"):
            if proto.HasField(holder):
                return _from_memory(getattr(proto, holder), dtype, count, what, holder)
    field = _FIELD_OF.get(proto.data_type, "int32_data")
    values = getattr(proto, field)
    if len(values) != count:
        raise FormatError(
            f"{what}: found {len(values)} elements in {field}, wanted {count} of shape {list(proto.dims)}"
        )
    if field in _FIXED_WIDTH_FIELDS:
        return _from_memory(_packed(proto, field), dtype, count, what, field)
    if dtype.hasobject:
        strings = np.empty(count, dtype=object)
        strings[:] = list(values)
        return strings
    numbers = np.fromiter(values, np.int64 if field == "int64_data" else np.int32, count=count)
    return _narrowed(numbers, dtype, what)


def _packed(proto: TensorProto, field: str) -> bytes:
    """The memory of a packed field of fixed width: the end of a message that has only this field."""
    alone = TensorProto()
    alone.CopyFrom(proto)
    alone.DiscardUnknownFields()
    for other, _ in alone.ListFields():
        if other.name != field:
            alone.ClearField(other.name)
    size = np.dtype(_FIXED_WIDTH_FIELDS[field]).itemsize * len(getattr(alone, field))
    return alone.SerializeToString()[-size:] if size else b""


def _from_memory(data: bytes, dtype: np.dtype, count: int, what: str, holder: str) -> npt.NDArray[Any]:
    if len(data) != count * dtype.itemsize:
        raise FormatError(
            f"{what}: found {len(data)} bytes in {holder}, wanted {count * dtype.itemsize} ({count} {dtype})"
        )
    if dtype == np.bool_:
        return np.frombuffer(data, np.uint8).astype(np.bool_)
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype)


def _narrowed(numbers: npt.NDArray[Any], dtype: np.dtype, what: str) -> npt.NDArray[Any]:
    """Integers of 32 or 64 bits as elements of ``dtype``; half types come as their 16 bits."""
    if dtype == np.bool_:
        return numbers.astype(np.bool_)
    bits = np.dtype(np.uint16) if is_half(dtype) else dtype
    if numbers.size and bits.itemsize < numbers.itemsize:
        limits = np.iinfo(bits)
        low, high = int(numbers.min()), int(numbers.max())
        if low < limits.min or high > limits.max:
            raise FormatError(
                f"{what}: found values {low} to {high}, wanted {limits.min} to {limits.max} for {dtype}"
            )
    return numbers.astype(bits).view(dtype)


def _as_bytes(element: object) -> bytes:
    if isinstance(element, str):
        return element.encode("utf-8")
    if isinstance(element, bytes):
        return element
    raise DataTypeError(
        f"found an element of type {type(element).__name__} in a tensor of strings, wanted bytes"
    )


def _varint(value: int) -> bytes:
    """Base 128, lowest group first, the top bit set in all bytes but the last (protobuf's encoding guide)."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# ---------------------------------------------------------------------------------------------------------
# Blobs

_TENSOR_TYPES = frozenset({"Tensor", "TensorCPU", "TensorCUDA"})


def blob_to_proto(name: str, value: object) -> BlobProto:
    """A BlobProto of a tensor (anything that NumPy makes an array of), a string, or a QuantizedTensor.

    Raises:
        DataTypeError: the format has no place for such a value.
    """
    from gpunet.blobs import QuantizedTensor

    if isinstance(value, (bytes, str)):
        return BlobProto(name=name, type="std::string", content=_as_bytes(value))
    if isinstance(value, QuantizedTensor):
        return BlobProto(name=name, type="Int8TensorCPU", qtensor=_quantized_to_proto(name, value))
    try:
        tensor = tensor_to_proto(np.asarray(value), name)
    except (DataTypeError, ValueError) as error:
        raise DataTypeError(f"blob {name!r}: {type(value).__name__} cannot be stored ({error})") from None
    return BlobProto(name=name, type="Tensor", tensor=tensor)


def blob_from_proto(proto: BlobProto) -> npt.NDArray[Any] | bytes | QuantizedTensor:
    """The value of a blob: an array, ``bytes`` of a string, or a QuantizedTensor.

    Raises:
        FormatError: a type that has no value here (DBReader, say), content that does not fit the type, or a
            piece of a larger blob.
    """
    what = f"blob {proto.name!r} of type {proto.type!r}"
    if proto.content_num_chunks > 1:
        raise FormatError(
            f"{what}: found piece {proto.content_chunk_id} of {proto.content_num_chunks}, wanted all"
        )
    if proto.type in _TENSOR_TYPES:
        field = "tensor"
    elif proto.type in ("Int8TensorCPU", "QTensor"):
        field = "qtensor"
    elif proto.type == "std::string":
        return proto.content
    else:
        raise FormatError(f"{what}: wanted one of Tensor, Int8TensorCPU, QTensor, std::string")
    if not proto.HasField(field):
        raise FormatError(f"{what}: the field {field} is not set")
    try:
        if field == "tensor":
            return tensor_from_proto(proto.tensor)
        return _quantized_from_proto(proto.qtensor, bit_planes=proto.type == "QTensor")
    except FormatError as error:
        raise error.locate(what) from None


def _quantized_to_proto(name: str, value: QuantizedTensor) -> QTensorProto:
    data = np.asarray(value.data)
    if data.dtype not in (np.uint8, np.int8, np.int32):
        raise DataTypeError(
            f"blob {name!r}: found a quantised tensor of {data.dtype}, wanted uint8, int8 or int32"
        )
    return QTensorProto(
        name=name,
        dims=data.shape,
        precision=8,
        scale=value.scale,
        bias=value.zero_point,
        is_signed=data.dtype == np.int8,
        data_type=dtype_to_proto(data.dtype),
        data=data.reshape(-1).tolist(),
    )


def _quantized_from_proto(proto: QTensorProto, *, bit_planes: bool) -> QuantizedTensor:
    """A quantised tensor with real values ``scale * (data - zero_point)``.

    An Int8TensorCPU has one number an element and the zero point as its bias. A QTensor has one bit an
    element in each of its planes, and real values ``scale * (data + bias)``.
    """
    from gpunet.blobs import QuantizedTensor

    what = f"quantised tensor {proto.name!r}"
    if proto.is_multiparam:
        raise FormatError(f"{what}: found a scale for each slice of axis {proto.axis}, wanted one scale")
    if not (proto.bias.is_integer() and abs(proto.bias) < 2**31):
        raise FormatError(f"{what}: found bias {proto.bias}, wanted a whole number of 32 bits")
    zero_point = int(-proto.bias if bit_planes else proto.bias)
    if bit_planes:
        data = _from_bit_planes(proto, what)
    else:
        if proto.data_type not in (TensorProto.UINT8, TensorProto.INT8, TensorProto.INT32):
            raise FormatError(
                f"{what}: found data type {proto.data_type}, wanted 2 (INT32), 6 (UINT8) or 7 (INT8)"
            )
        dtype = dtype_from_proto(proto.data_type)
        shape, count = _checked_shape(proto, dtype, what)
        if len(proto.data) != count:
            raise FormatError(
                f"{what}: found {len(proto.data)} elements, wanted {count} of shape {list(shape)}"
            )
        numbers = np.fromiter(proto.data, np.int32, count=count)
        data = _narrowed(numbers, dtype, what).reshape(shape)
    return QuantizedTensor(data, proto.scale, zero_point)


def _from_bit_planes(proto: QTensorProto, what: str) -> npt.NDArray[Any]:
    """Elements whose bit b is in plane b, eight elements a byte from the top bit down; signs come last."""
    if not 1 <= proto.precision <= 31:
        raise FormatError(f"{what}: found {proto.precision} bits an element, wanted 1 to 31")
    shape, count = _checked_shape(proto, np.dtype(np.int32), what)
    width = (count + 7) // 8
    planes = proto.precision + proto.is_signed
    if len(proto.data) != planes * width:
        raise FormatError(
            f"{what}: found {len(proto.data)} bytes, wanted {planes * width}: {planes} planes of {count} bits"
        )
    packed = _narrowed(np.fromiter(proto.data, np.int32, count=planes * width), np.dtype(np.uint8), what)
    bits = np.unpackbits(packed.reshape(planes, width), axis=1, count=count).astype(np.int32)
    weights = np.left_shift(1, np.arange(proto.precision, dtype=np.int32))
    values = np.tensordot(weights, bits[: proto.precision], axes=1).astype(np.int32)
    if proto.is_signed:
        values = np.where(bits[-1] == 1, -values, values)
    elif proto.precision <= 8:
        values = values.astype(np.uint8)
    return values.reshape(shape)
