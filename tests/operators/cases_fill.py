"""Rows for the fills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, KernelError, SchemaError, ShapeError
from gpunet.proto import TensorProto
from tests.op_check import OpCase

rng = np.random.default_rng(11)
X = rng.standard_normal((3, 4)).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def full(*args: Any) -> Callable[..., np.ndarray]:
    return lambda *_: np.full(*args)


def uniform_in(low: float, high: float) -> Callable[[list[Any], list[Any]], None]:
    def check(outputs: list[Any], inputs: list[Any]) -> None:
        (y,) = outputs
        assert low <= y.min()
        assert y.max() < high
        spread = (high - low) / np.sqrt(12)
        assert abs(y.mean(dtype=np.float64) - (low + high) / 2) < 4 * spread / np.sqrt(y.size)
        assert abs(y.std(dtype=np.float64) - spread) < 0.05 * spread
        assert np.unique(y).size > 0.5 * min(y.size, 1000)

    return check


def normal_like(mean: float, std: float) -> Callable[[list[Any], list[Any]], None]:
    def check(outputs: list[Any], inputs: list[Any]) -> None:
        (y,) = outputs
        assert abs(y.mean(dtype=np.float64) - mean) < 4 * std / np.sqrt(y.size)
        assert abs(y.std(dtype=np.float64) - std) < 0.05 * std
        # 68.27 % of normal numbers lie within one standard deviation, 95.45 % within two.
        for reach, share in ((1, 0.6827), (2, 0.9545)):
            assert abs((np.abs(y - mean) < reach * std).mean() - share) < 0.03

    return check


def integers_in(low: int, high: int) -> Callable[[list[Any], list[Any]], None]:
    def check(outputs: list[Any], inputs: list[Any]) -> None:
        found, counts = np.unique(outputs[0], return_counts=True)
        assert found.tolist() == list(range(low, high + 1))
        fair = outputs[0].size / found.size
        assert np.all(np.abs(counts - fair) < 5 * np.sqrt(fair))

    return check


def shape_is(*shape: int) -> Callable[[list[Any], list[Any]], None]:
    def check(outputs: list[Any], inputs: list[Any]) -> None:
        assert outputs[0].shape == shape

    return check


# Rows whose input holds the shape do not run with that input emptied (`empty=False`): it would be the shape
# of a scalar, which other rows have. Neither do rows whose reference has a fixed shape.
CASES = [
    OpCase("ConstantFill", [], {"shape": [2, 3], "value": 1.5}, reference=full((2, 3), 1.5)),
    OpCase("ConstantFill", [], {"shape": [4]}, reference=full(4, 0.0), id="default"),
    OpCase("ConstantFill", [], {"value": 7}, reference=full((), 7, np.int64), id="int_scalar"),
    OpCase("ConstantFill", [], {"shape": [0, 3], "value": 2.0}, reference=full((0, 3), 2.0), id="empty"),
    OpCase(
        "ConstantFill",
        [],
        {"shape": [2], "dtype": TensorProto.STRING, "value": "ab"},
        reference=lambda: np.array([b"ab", b"ab"], object),
        id="string",
    ),
    OpCase(
        "ConstantFill",
        [],
        {"shape": [2], "dtype": TensorProto.STRING},
        reference=lambda: np.array([b"", b""], object),
        id="string_default",
    ),
    OpCase("ConstantFill", [X], {"value": 2.0}, reference=full((3, 4), 2.0), empty=False, id="like"),
    OpCase("ConstantFill", [X], {"extra_shape": [2, 1]}, reference=full((3, 4, 2, 1), 0.0), empty=False),
    OpCase(
        "ConstantFill",
        [ints(2, 0, 5)],
        {"input_as_shape": 1, "extra_shape": [3], "value": 4},
        reference=full((2, 0, 5, 3), 4),
        empty=False,
    ),
    OpCase("ConstantFill", [ints()], {"input_as_shape": 1, "value": 4.0}, reference=full((), 4.0)),
    OpCase(
        "ConstantFill",
        [X, np.array([9], np.int64)],
        {"dtype": TensorProto.INT64},
        reference=full((3, 4), 9),
        empty=False,
        id="value_input",
    ),
    OpCase(
        "ConstantFill",
        [X.astype(np.float64)],
        {"value": 2.0, "input_as_type": 1},
        reference=full((3, 4), 2.0),
        empty=False,
        id="like_type",
    ),
    OpCase("Float16ConstantFill", [], {"shape": [2, 3], "value": 1.5}, reference=full((2, 3), 1.5)),
    OpCase("Float16ConstantFill", [], {"shape": [5]}, reference=full(5, 0.0)),
    OpCase(
        "Float16ConstantFill",
        [],
        {"shape": [5], "value": 1 / 3, "dtype": "bfloat16"},
        reference=full(5, 0.333984375),
    ),
    OpCase("Float16ConstantFill", [], {"shape": [], "value": -2.0}, reference=full((), -2.0)),
    OpCase("DiagonalFill", [], {"shape": [3, 3], "value": 2.5}, reference=lambda: 2.5 * np.eye(3)),
    OpCase("DiagonalFill", [], {"shape": [2, 4], "value": 3}, reference=lambda: 3 * np.eye(2, 4, dtype=int)),
    OpCase(
        "DiagonalFill",
        [],
        {"shape": [5, 2], "value": 1.0},
        reference=lambda: np.array([[1, 0], [0, 1], [0, 0], [1, 0], [0, 1]]),
        id="tall",
    ),
    OpCase(
        "DiagonalFill",
        [],
        {"shape": [3, 3, 3], "value": 1.0},
        reference=lambda: np.array(
            [[[float(i == j == k) for k in range(3)] for j in range(3)] for i in range(3)]
        ),
        id="cube",
    ),
    OpCase(
        "DiagonalFill",
        [ints(2, 2)],
        {"input_as_shape": 1, "value": 1},
        reference=lambda x: np.eye(2, dtype=int),
        empty=False,
    ),
    OpCase("RangeFill", [], {"shape": [5]}, reference=lambda: np.arange(5.0)),
    OpCase("RangeFill", [], {"shape": [2, 3]}, reference=lambda: np.array([[0, 1, 2], [3, 4, 5]])),
    OpCase("RangeFill", [X], reference=lambda x: np.arange(x.size).reshape(x.shape)),
    OpCase("GaussianFill", [], {"shape": [50, 80], "mean": 1.0, "std": 0.5}, check=normal_like(1.0, 0.5)),
    OpCase("GaussianFill", [], {"shape": [3999]}, check=normal_like(0.0, 1.0)),
    OpCase("GaussianFill", [], {"shape": [4], "mean": 3.0, "std": 0.0}, reference=full(4, 3.0)),
    OpCase("GaussianFill", [ints(0, 4)], {"input_as_shape": 1}, check=shape_is(0, 4), empty=False),
    OpCase("UniformFill", [], {"shape": [50, 80], "min": -1.0, "max": 3.0}, check=uniform_in(-1, 3)),
    OpCase("UniformFill", [], {"shape": [3999]}, check=uniform_in(0, 1)),
    OpCase(
        "UniformFill",
        [ints(63, 64), np.float32([2]), np.float32([4])],
        {"input_as_shape": 1},
        check=uniform_in(2, 4),
        empty=False,
    ),
    OpCase(
        "UniformFill",
        [X, np.float32([2]), np.float32([1])],
        check=shape_is(0, 4),
        id="empty_range",
        empty=False,
    ),
    OpCase("UniformIntFill", [], {"shape": [40, 100], "min": -2, "max": 5}, check=integers_in(-2, 5)),
    OpCase("UniformIntFill", [], {"shape": [1999]}, check=integers_in(0, 1)),
    OpCase(
        "UniformIntFill",
        [ints(1000), np.int32([3]), np.int32([3])],
        {"input_as_shape": 1},
        reference=lambda *_: np.full(1000, 3),
        empty=False,
    ),
    OpCase("Float16UniformFill", [], {"shape": [50, 80], "min": 1.0, "max": 2.0}, check=uniform_in(1, 2)),
    OpCase("Float16UniformFill", [], {"shape": [3999]}, check=uniform_in(0, 1)),
    OpCase("Float16UniformFill", [], {"shape": [0, 2]}, check=shape_is(0, 2)),
    OpCase("Float16UniformFill", [], {"shape": [50, 80], "dtype": "bfloat16"}, check=uniform_in(0, 1)),
    OpCase(
        "Float16UniformFill",
        [],
        {"shape": [2], "dtype": "float"},
        raises=(ArgumentError, "argument 'dtype' is float32, wanted float16 or bfloat16"),
    ),
    OpCase("XavierFill", [], {"shape": [40, 75]}, check=uniform_in(-0.2, 0.2)),
    OpCase("XavierFill", [], {"shape": [50, 3, 5, 5]}, check=uniform_in(-0.2, 0.2)),
    OpCase("XavierFill", [], {"shape": [0, 3]}, check=shape_is(0, 3)),
    OpCase("MSRAFill", [], {"shape": [50, 80]}, check=normal_like(0.0, 0.2)),
    OpCase("MSRAFill", [], {"shape": [8, 40, 5, 5]}, check=normal_like(0.0, 0.1)),
    OpCase("MSRAFill", [], {"shape": [3, 0]}, check=shape_is(3, 0)),
    OpCase(
        "GivenTensorFill",
        [],
        {"shape": [2, 2], "values": [1.0, 2.5, -3.0, 4.0]},
        reference=lambda: [np.array([[1, 2.5], [-3, 4]])],
    ),
    OpCase("GivenTensorFill", [], {"shape": [0, 3], "values": []}, reference=full((0, 3), 0.0)),
    OpCase(
        "GivenTensorFill",
        [],
        {"shape": [2], "values": [1, 2], "dtype": TensorProto.INT32},
        reference=lambda: np.array([1, 2]),
    ),
    OpCase(
        "GivenTensorFill",
        [],
        {"shape": [2], "values": ["a", "bc"], "dtype": TensorProto.STRING},
        reference=lambda: np.array([b"a", b"bc"], object),
    ),
    OpCase(
        "GivenTensorFill",
        [ints(2, 1)],
        {"input_as_shape": 1, "values": [3.0, 4.0]},
        reference=lambda x: [np.array([[3], [4]])],
        empty=False,
    ),
    OpCase(
        "GivenTensorDoubleFill",
        [],
        {"shape": [2], "values": [0.5, 1.5]},
        reference=lambda: np.array([0.5, 1.5]),
    ),
    OpCase(
        "GivenTensorDoubleFill",
        [],
        {"shape": [1, 2], "values": [1, 2]},
        reference=lambda: np.array([[1.0, 2.0]]),
    ),
    OpCase("GivenTensorDoubleFill", [], {"shape": [], "values": [4.0]}, reference=lambda: np.array(4.0)),
    OpCase(
        "GivenTensorStringFill",
        [],
        {"shape": [2, 1], "values": ["a", "bc"]},
        reference=lambda: np.array([[b"a"], [b"bc"]], object),
    ),
    OpCase("GivenTensorStringFill", [], {"shape": [0], "values": []}, reference=lambda: np.array([], object)),
    OpCase(
        "GivenTensorStringFill",
        [],
        {"shape": [], "values": [b"\xff\x00"]},
        reference=lambda: np.array(b"\xff\x00", object),
    ),
    OpCase(
        "GivenTensorBoolFill",
        [],
        {"shape": [3], "values": [1, 0, 1]},
        reference=lambda: np.array([True, False, True]),
    ),
    OpCase(
        "GivenTensorBoolFill", [], {"shape": [1, 1], "values": [True]}, reference=lambda: np.array([[True]])
    ),
    OpCase("GivenTensorBoolFill", [], {"shape": [0], "values": []}, reference=full(0, True)),
    *(
        OpCase(
            f"GivenTensor{name}Fill",
            [],
            {"shape": shape, "values": values},
            reference=lambda v=values, s=shape: np.array(v).reshape(s),
        )
        for name in ("Int16", "Int", "Int64")
        for shape, values in (([2, 2], [1, -2, 3, 2**15 - 1]), ([], [5]), ([3, 0], []))
    ),
    OpCase(
        "GivenTensorByteStringToUInt8Fill",
        [],
        {"shape": [2, 2], "values": [b"\x00\x01\xfe\xff"]},
        reference=lambda: np.array([[0, 1], [254, 255]]),
    ),
    OpCase("GivenTensorByteStringToUInt8Fill", [], {"shape": [0], "values": [b""]}, reference=full(0, 0)),
    OpCase("GivenTensorByteStringToUInt8Fill", [], {"shape": [], "values": [b"A"]}, reference=full((), 65)),
    # What is refused.
    OpCase("ConstantFill", [X], {"shape": [2]}, raises=(ArgumentError, "although an input gives the shape")),
    OpCase(
        "ConstantFill",
        [],
        {"extra_shape": [2]},
        raises=(ArgumentError, "wanted an input whose shape it extends"),
    ),
    OpCase(
        "ConstantFill",
        [],
        {"input_as_shape": 1},
        raises=(ArgumentError, "wanted an input that holds the shape"),
    ),
    OpCase("ConstantFill", [], {"shape": [-2]}, raises=(ArgumentError, "wanted no negative dimension")),
    OpCase("ConstantFill", [], {"shape": 2}, raises=(ArgumentError, "wanted a list of whole numbers")),
    OpCase("ConstantFill", [X], {"input_as_shape": 1}, raises=(DataTypeError, "cannot be a shape")),
    OpCase("ConstantFill", [ints(2, -1)], {"input_as_shape": 1}, raises=(KernelError, "holds [2, -1]")),
    OpCase(
        "ConstantFill", [], {"shape": [1], "value": "x"}, raises=(ArgumentError, "wanted a value of float32")
    ),
    OpCase(
        "ConstantFill",
        [],
        {"shape": [1], "dtype": TensorProto.UINT8, "value": 256},
        raises=(ArgumentError, "argument 'value' is 256, wanted a value of uint8"),
    ),
    OpCase("ConstantFill", [X, X], {"value": 1.0}, raises=(DataTypeError, "wanted one element of float32")),
    OpCase("ConstantFill", [X, X, X], raises=(SchemaError, "has 3 inputs, wanted 0 or 1 or 2")),
    OpCase("DiagonalFill", [], {"shape": [3], "value": 1.0}, raises=(ShapeError, "wanted at least 2")),
    OpCase("DiagonalFill", [], {"shape": [3, 3, 2]}, raises=(ShapeError, "unequal dimensions")),
    OpCase("GaussianFill", [], {"shape": [3], "std": -1.0}, raises=(ArgumentError, "argument 'std' is -1")),
    OpCase(
        "UniformFill",
        [],
        {"shape": [3], "min": 1.0, "max": 1.0},
        raises=(ArgumentError, "wanted min below max"),
    ),
    OpCase(
        "UniformFill",
        [X, np.float32([0]), np.float32([1])],
        {"min": 0.0},
        raises=(ArgumentError, "although input min is too"),
    ),
    OpCase("UniformFill", [X, X], raises=(SchemaError, "has 2 inputs, wanted 0 or 1 or 3")),
    OpCase("MSRAFill", [], {"shape": [3]}, raises=(ShapeError, "wanted at least 2")),
    OpCase(
        "GivenTensorFill",
        [],
        {"shape": [3], "values": [1.0, 2.0]},
        raises=(ArgumentError, "has 2 elements, wanted 3"),
    ),
    OpCase(
        "GivenTensorFill",
        [],
        {"shape": [1], "values": ["a"]},
        raises=(ArgumentError, "wanted values of float32"),
    ),
    OpCase(
        "GivenTensorInt16Fill", [], {"shape": [1], "values": [2**15]}, raises=(ArgumentError, "holds 32768")
    ),
    OpCase("GivenTensorIntFill", [], {"shape": [1], "values": [1.5]}, raises=(ArgumentError, "'values'")),
    OpCase(
        "GivenTensorByteStringToUInt8Fill",
        [],
        {"shape": [1], "values": [b"a", b"b"]},
        raises=(ArgumentError, "wanted one that holds all bytes"),
    ),
]
for _name, _value in (
    ("BOOL", 1), ("UINT8", 200), ("INT8", -5), ("UINT16", 65535), ("INT16", -300), ("INT32", 2**31 - 1),
    ("INT64", 2**62), ("FLOAT16", 0.5), ("FLOAT", 0.1), ("DOUBLE", 0.1),
):  # fmt: skip
    CASES.append(
        OpCase(
            "ConstantFill",
            [],
            {"shape": [2, 1], "dtype": TensorProto.DataType.Value(_name), "value": _value},
            reference=lambda v=_value: np.array([[v], [v]]),
            id=_name,
        )
    )
