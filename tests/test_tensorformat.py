"""Element types, tensors and blobs: round trips, Caffe2's variants, and all that can be wrong with them."""

import contextlib
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunet.blobs import QuantizedTensor
from gpunet.dtypes import (
    NUMPY_TO_PROTO,
    PROTO_TO_NUMPY,
    as_dtype,
    bfloat16,
    dtype_from_proto,
    dtype_to_proto,
    is_bfloat16,
    is_float,
    is_half,
)
from gpunet.errors import DataTypeError, FormatError
from gpunet.proto import BlobProto, QTensorProto, TensorProto
from gpunet.schema import FLOATS
from gpunet.serialization import (
    blob_from_proto,
    blob_to_proto,
    parse,
    tensor_from_chunks,
    tensor_from_proto,
    tensor_to_chunks,
    tensor_to_proto,
)

# --- element types


def test_dtype_maps_are_inverse():
    for dtype, number in NUMPY_TO_PROTO.items():
        assert dtype_from_proto(number) == dtype
        assert dtype_to_proto(dtype) == number
    assert set(PROTO_TO_NUMPY) - set(NUMPY_TO_PROTO.values()) == {TensorProto.BYTE}


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("FLOAT", np.float32), ("float", np.float32), ("Int64", np.int64), ("byte", np.uint8),
        ("string", object), ("float64", np.float64), ("f2", np.float16), (">i4", np.int32),
        (np.uint16, np.uint16), (float, np.float64), (bool, np.bool_), (bytes, object),
        (np.dtype("S7"), object), (5, np.bool_), (np.int64(12), np.float16),
    ],
)  # fmt: skip
def test_as_dtype_takes_every_way_to_name_a_type(value, wanted):
    found = as_dtype(value)
    assert found == np.dtype(wanted)
    assert found.isnative


@pytest.mark.parametrize(
    "value", ["nope", "complex64", "uint32", 0, 11, 14, 99, -1, True, None, 1.0, complex, dict, []]
)
def test_as_dtype_refuses_everything_else(value):
    with pytest.raises(DataTypeError, match=r"wanted one of (bfloat16, )?bool, float16, float32"):
        as_dtype(value)


def test_bfloat16_is_that_of_ml_dtypes():
    wanted = np.dtype(ml_dtypes.bfloat16)
    for value in ("bfloat16", "BFLOAT16", 1016, TensorProto.BFLOAT16, ml_dtypes.bfloat16, wanted):
        assert as_dtype(value) == wanted
    assert bfloat16() == wanted
    assert is_float(wanted)
    assert is_half(wanted)
    assert is_bfloat16(wanted)
    assert not is_bfloat16(np.dtype(np.float16))
    assert wanted in FLOATS
    # One and the last bit of 8: 1 + 2^-7.
    message = tensor_to_proto(np.array([1 + 2**-7, -np.inf], wanted))
    assert list(message.int32_data) == [0x3F81, 0xFF80]


def test_without_ml_dtypes_only_bfloat16_is_missing():
    code = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "import gpunet; from gpunet import dtypes, errors\n"
        "print(dtypes.BFLOAT16, dtypes.as_dtype('float16'))\n"
        "for value in ('bfloat16', 1016):\n"
        "    try: dtypes.as_dtype(value)\n"
        "    except errors.DataTypeError as error: print(error)\n"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *errors = made.stdout.splitlines()
    assert first == "None float16"
    assert len(errors) == 2
    assert all("not installed: pip install 'gpunet[bfloat16]'" in error for error in errors)


# --- tensors

NUMERIC = [dtype for dtype in NUMPY_TO_PROTO if not dtype.hasobject]


def sample(dtype, shape):
    """Values that use all of the type's range."""
    size = int(np.prod(shape))
    raw = np.random.default_rng(size).integers(0, 256, size * dtype.itemsize, dtype=np.uint8)
    if dtype == np.bool_:
        return (raw % 2 == 0).reshape(shape)
    if is_float(dtype):
        return np.random.default_rng(size).standard_normal(shape).astype(dtype)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("holder", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 5), (300,)], ids=str)
@pytest.mark.parametrize("dtype", NUMERIC, ids=str)
def test_tensor_round_trip(dtype, shape, holder):
    array = sample(dtype, shape)
    message = tensor_to_proto(array, "t", bytes_holder=holder)
    assert (message.name, tuple(message.dims), message.data_type) == ("t", shape, NUMPY_TO_PROTO[dtype])
    found = tensor_from_proto(parse(TensorProto, message.SerializeToString(), what="t"))
    assert (found.dtype, found.shape, found.flags.writeable) == (dtype, shape, True)
    assert found.tobytes() == array.tobytes()


def test_fields_are_those_that_caffe2_reads():
    def fields(array, **options):
        message = tensor_to_proto(array, **options)
        return {field.name for field, _ in message.ListFields()} - {"dims", "data_type"}

    for dtype in NUMERIC:
        own = {"float32": "float_data", "float64": "double_data", "int64": "int64_data"}.get(
            dtype.name, "int32_data"
        )
        assert fields(np.ones(2, dtype)) == {own}
        small = dtype.itemsize < 4
        assert fields(np.ones(2, dtype), bytes_holder=True) == ({"byte_data"} if small else {own})
    assert list(tensor_to_proto(np.float16([1.0, -2.0])).int32_data) == [0x3C00, 0xC000]
    assert list(tensor_to_proto(np.array([True, False])).int32_data) == [1, 0]
    assert list(tensor_to_proto(np.float32([0.5, 3])).float_data) == [0.5, 3]
    assert list(tensor_to_proto(np.float64([0.1])).double_data) == [0.1]


def test_layout_and_byte_order_of_the_array_do_not_matter():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    for variant in (array.T[::2, ::-1], array.T[::2, ::-1].astype(">f4"), array.T[::2, ::-1].astype(">f2")):
        assert np.array_equal(tensor_from_proto(tensor_to_proto(variant)), array.T[::2, ::-1])


def test_special_numbers_keep_their_bits():
    bits = np.array([0x7FC00001, 0xFF800000, 0x80000000, 0x00000001], np.uint32)
    assert np.array_equal(tensor_from_proto(tensor_to_proto(bits.view(np.float32))).view(np.uint32), bits)
    half = np.array([0x7E01, 0xFC00, 0x8000, 0x0001], np.uint16)
    assert np.array_equal(tensor_from_proto(tensor_to_proto(half.view(np.float16))).view(np.uint16), half)


@pytest.mark.parametrize(
    "array",
    [np.array([b"a\0", b"", b"\xff"], object), np.array([["é", b"x"]], object), np.array(["é", "bc"]),
     np.array([b"q"]), np.array(b"zero", object), np.empty((2, 0), object)],
    ids=["bytes", "mixed", "U", "S", "scalar", "empty"],
)  # fmt: skip
def test_string_tensors(array):
    message = tensor_to_proto(array)
    assert message.data_type == TensorProto.STRING
    found = tensor_from_proto(message)
    wanted = [x.encode() if isinstance(x, str) else x for x in array.reshape(-1).tolist()]
    assert (found.shape, found.dtype, found.reshape(-1).tolist()) == (array.shape, object, wanted)


def test_tensor_of_other_objects():
    with pytest.raises(DataTypeError, match="found an element of type int in a tensor of strings"):
        tensor_to_proto(np.array([b"a", 1], object))
    with pytest.raises(DataTypeError, match="complex64"):
        tensor_to_proto(np.ones(1, np.complex64))


@pytest.mark.parametrize("holder", ["byte_data", "raw_data"])
@pytest.mark.parametrize("dtype", NUMERIC, ids=str)
def test_every_type_is_read_from_plain_memory(dtype, holder):
    array = sample(dtype, (2, 3))
    data = array.astype(dtype.newbyteorder("<")).tobytes()
    message = TensorProto(dims=[2, 3], data_type=NUMPY_TO_PROTO[dtype], **{holder: data})
    assert tensor_from_proto(message).tobytes() == array.tobytes()
    setattr(message, holder, data[:-1])
    with pytest.raises(FormatError, match=f"found {len(data) - 1} bytes in {holder}, wanted {len(data)}"):
        tensor_from_proto(message)


def test_byte_and_bfloat16():
    message = TensorProto(dims=[2], data_type=TensorProto.BYTE, byte_data=b"\x01\xff")
    assert tensor_from_proto(message).tolist() == [1, 255]
    brain = TensorProto(dims=[2], raw_data=b"\x80\x3f\x20\xc1", data_format=TensorProto.FMT_BFLOAT16)
    assert tensor_from_proto(brain).tolist() == [1.0, -10.0]
    brain.data_format = 7
    with pytest.raises(FormatError, match="found data_format 7"):
        tensor_from_proto(brain)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (TensorProto(dims=[3], float_data=[1, 2]), r"found 2 elements in float_data, wanted 3 of shape"),
        (TensorProto(dims=[1], float_data=[1, 2]), "found 2 elements in float_data, wanted 1"),
        (TensorProto(dims=[2], int32_data=[1, 2]), "found 0 elements in float_data, wanted 2"),
        (TensorProto(), "found 0 elements in float_data, wanted 1"),
        (TensorProto(dims=[-1], float_data=[1]), r"found shape \[-1\], wanted no negative sizes"),
        (TensorProto(dims=[-1, -1], float_data=[1]), "no negative sizes"),
        (TensorProto(dims=[2**40], float_data=[1]), "wanted 1099511627776"),
        (TensorProto(dims=[2**62, 2**62], float_data=[1]), r"less than 2\^63 bytes"),
        (TensorProto(dims=[2**62, 2, 0]), r"less than 2\^63 bytes"),
        (TensorProto(dims=[1] * 40, float_data=[1]), "found 40 sizes"),
        (TensorProto(dims=[1], data_type=0, float_data=[1]), "UNDEFINED"),
        (TensorProto(dims=[1], data_type=14, int32_data=[1]), "ZERO_COLLISION_HASH"),
        (TensorProto(dims=[2], data_type=6, int32_data=[0, 256]), "values 0 to 256, wanted 0 to 255 for"),
        (TensorProto(dims=[1], data_type=12, int32_data=[65536]), "wanted 0 to 65535 for float16"),
        (TensorProto(dims=[1], data_type=4), "found 0 elements in string_data"),
    ],
    ids=range(15),
)  # fmt: skip
def test_malformed_tensors(message, error):
    message.name = "w"
    with pytest.raises(FormatError, match=f"^tensor 'w': .*{error}"):
        tensor_from_proto(message)


def test_pieces_of_a_tensor():
    array = np.arange(10, dtype=np.int64).reshape(2, 5)
    pieces = list(tensor_to_chunks(array, "t", elements=4))
    assert [(p.segment.begin, p.segment.end, tuple(p.dims)) for p in pieces] == [
        (0, 4, (2, 5)), (4, 8, (2, 5)), (8, 10, (2, 5))
    ]  # fmt: skip
    assert np.array_equal(tensor_from_chunks(pieces[::-1]), array)
    (whole,) = tensor_to_chunks(array)
    assert np.array_equal(tensor_from_proto(whole), array)
    (empty,) = tensor_to_chunks(np.zeros((0, 3), np.float32))
    assert tensor_from_proto(empty).shape == (0, 3)
    with pytest.raises(FormatError, match=r"tensor 't': found a piece 8 to 10, wanted one that starts at 4"):
        tensor_from_chunks([pieces[0], pieces[2]])
    with pytest.raises(FormatError, match="wanted one that starts at 4"):
        tensor_from_chunks([pieces[0], *pieces])
    with pytest.raises(FormatError, match=r"found elements 0 to 4, wanted all 10 of shape \[2, 5\]"):
        tensor_from_proto(pieces[0])
    with pytest.raises(FormatError, match="pieces differ in shape or type"):
        tensor_from_chunks([pieces[0], whole.__class__(dims=[2, 5])])
    with pytest.raises(FormatError, match="found no pieces"):
        tensor_from_chunks([])
    pieces[0].segment.end = -3
    with pytest.raises(FormatError, match="found a piece 0 to -3"):
        tensor_from_chunks(pieces[:1])


# --- blobs


@pytest.mark.parametrize("kind", ["Tensor", "TensorCPU", "TensorCUDA"])
def test_tensor_blob(kind):
    message = blob_to_proto("b", np.float32([[1, 2]]))
    assert (message.name, message.type, message.tensor.name) == ("b", "Tensor", "b")
    message.type = kind
    found = blob_from_proto(parse(BlobProto, message.SerializeToString(), what="b"))
    assert (found.tolist(), found.dtype) == ([[1, 2]], np.float32)


def test_string_blob():
    for value in (b"\xff\0", "größe", ""):
        message = blob_to_proto("s", value)
        assert message.type == "std::string"
        assert blob_from_proto(message) == (value.encode() if isinstance(value, str) else value)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32])
def test_quantised_blob(dtype):
    data = np.array([[0, 1, np.iinfo(dtype).max], [3, 4, np.iinfo(dtype).min]], dtype)
    message = blob_to_proto("q", QuantizedTensor(data, 0.25, 128))
    assert message.type == "Int8TensorCPU"
    assert (message.qtensor.precision, message.qtensor.bias, message.qtensor.name) == (8, 128, "q")
    found = blob_from_proto(message)
    assert (found.data.dtype, found.data.tolist(), found.scale, found.zero_point) == (
        dtype,
        data.tolist(),
        0.25,
        128,
    )


@pytest.mark.parametrize(
    ("signed", "data", "wanted", "dtype"),
    [
        (False, [0b10110000, 0, 0b01110000, 0x80, 0b00100000, 0], [1, 2, 7, 3, 0, 0, 0, 0, 2], np.uint8),
        (True, [0b10110000, 0, 0b01110000, 0, 32, 0, 0b11000000, 0], [-1, -2, 7, 3, 0, 0, 0, 0, 0], np.int32),
    ],
    ids=["unsigned", "signed"],
)  # fmt: skip
def test_bit_planes(signed, data, wanted, dtype):
    tensor = QTensorProto(dims=[9], precision=3, scale=0.5, bias=-4, is_signed=signed, data=data)
    found = blob_from_proto(BlobProto(name="q", type="QTensor", qtensor=tensor))
    assert (found.data.tolist(), found.data.dtype, found.scale, found.zero_point) == (wanted, dtype, 0.5, 4)


def quantised(kind="Int8TensorCPU", **fields):
    values = {
        "dims": [2],
        "precision": 8,
        "scale": 1,
        "bias": 0,
        "is_signed": False,
        "data_type": 6,
        "data": [1, 2],
    }
    return BlobProto(name="b", type=kind, qtensor=QTensorProto(**{**values, **fields}))


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (BlobProto(name="b", type="DBReader"), "wanted one of Tensor, Int8TensorCPU"),
        (BlobProto(name="b", type="Tensor"), "the field tensor is not set"),
        (BlobProto(name="b", type="Int8TensorCPU"), "the field qtensor is not set"),
        (BlobProto(name="b", type="std::string", content_num_chunks=3, content_chunk_id=1), "found piece 1"),
        (BlobProto(name="b", type="Tensor", tensor=TensorProto(dims=[4])), "found 0 elements in float_data"),
        (quantised(data=[1]), "found 1 elements, wanted 2"),
        (quantised(data=[1, 256]), "wanted 0 to 255 for uint8"),
        (quantised(data_type=1), "found data type 1, wanted 2"),
        (quantised(bias=0.5), "found bias 0.5, wanted a whole number"),
        (quantised(bias=float("nan")), "found bias nan"),
        (quantised(is_multiparam=True), "found a scale for each slice"),
        (quantised(dims=[2**62, 2**62]), r"less than 2\^63 bytes"),
        (quantised("QTensor", precision=0), "found 0 bits an element"),
        (quantised("QTensor", precision=2**30), "found 1073741824 bits an element"),
        (quantised("QTensor", dims=[2**40]), "found 2 bytes, wanted"),
        (quantised("QTensor", precision=2, data=[1, -1]), "wanted 0 to 255"),
    ],
    ids=range(16),
)  # fmt: skip
def test_malformed_blobs(message, error):
    with pytest.raises(FormatError, match=f"^blob 'b' of type {re.escape(repr(message.type))}: .*{error}"):
        blob_from_proto(message)


@pytest.mark.parametrize(
    "value", [object(), {"a": 1}, [[1], [2, 3]], 1j, QuantizedTensor(np.ones(2), 1.0, 0)]
)
def test_values_that_no_blob_can_hold(value):
    with pytest.raises(DataTypeError, match="blob 'x'"):
        blob_to_proto("x", value)


@given(st.binary(max_size=127))
def test_any_bytes_are_a_blob_or_give_a_format_error(data):
    message = b"\x12\x06Tensor\x1a" + bytes([len(data)]) + data
    with contextlib.suppress(FormatError):
        assert isinstance(blob_from_proto(parse(BlobProto, message, what="fuzz")), np.ndarray)
