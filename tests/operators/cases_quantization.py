"""Table rows of numbers of 8 bits. References count in Python's whole numbers, element by element."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(52)


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def whole(dtype: str, *shape: int) -> np.ndarray:
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def one(value: float, dtype: str = "float32") -> np.ndarray:
    return np.array(value, dtype)


def limited(value: float, dtype: str) -> int:
    """Half to even, then within the type."""
    limits = np.iinfo(dtype)
    return max(limits.min, min(limits.max, round(value)))


def quantized(dtype: str = "uint8", axis: int | None = None) -> Any:
    def reference(x: np.ndarray, scale: np.ndarray, zero: Any = None) -> Any:
        scales = np.broadcast_to(scale if axis is None else along(scale, x, axis), x.shape)
        zeros = np.zeros(x.shape) if zero is None else zero if axis is None else along(zero, x, axis)
        zeros = np.broadcast_to(zeros, x.shape)
        y = np.zeros(x.shape, dtype)
        for i in np.ndindex(*x.shape):
            y[i] = limited(round(x[i] / scales[i]) + int(zeros[i]), dtype)
        return y

    return reference


def along(values: np.ndarray, x: np.ndarray, axis: int) -> np.ndarray:
    return values.reshape(-1, *(1,) * (x.ndim - axis - 1))


def dequantized(x: np.ndarray, scale: np.ndarray, zero: Any = 0, axis: int = 0) -> Any:
    if np.ndim(scale):
        scale, zero = along(scale, x, axis), along(np.asarray(zero), x, axis)
    return (x.astype("int64") - np.asarray(zero).astype("int64")) * scale


def filtered(dtype: str, window: dict[str, Any] | None = None, group: int = 1, order: str = "NCHW") -> Any:
    """One output after the other."""
    given = {"stride": 1, "pad": 0, "dilation": 1} | (window or {})

    def reference(x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias=None):  # type: ignore[no-untyped-def]
        if order == "NHWC":
            x, w = np.moveaxis(x, -1, 1), np.moveaxis(w, -1, 1)
        stride, pad, dilation = given["stride"], given["pad"], given["dilation"]
        sizes = [
            (n + 2 * pad - dilation * (k - 1) - 1) // stride + 1
            for n, k in zip(x.shape[2:], w.shape[2:], strict=True)
        ]
        y = np.zeros((len(x), len(w), *sizes), dtype)
        per_group, channels = len(w) // group, w.shape[1]
        for n, m, *at in np.ndindex(*y.shape):
            total = 0 if bias is None else int(bias[m])
            for c, *k in np.ndindex(*w.shape[1:]):
                place = tuple(o * stride - pad + t * dilation for o, t in zip(at, k, strict=True))
                if all(0 <= p < size for p, size in zip(place, x.shape[2:], strict=True)):
                    left = int(x[(n, m // per_group * channels + c, *place)]) - int(x_zero.reshape(()))
                    total += left * (int(w[(m, c, *k)]) - int(w_zero.reshape(-1)[m % w_zero.size]))
            scale = np.float32(w_scale.reshape(-1)[m % w_scale.size])
            factor = np.float32(x_scale.reshape(())) * scale / np.float32(y_scale.reshape(()))
            y[(n, m, *at)] = limited(round(total * float(factor)) + int(y_zero.reshape(())), dtype)
        return y if order == "NCHW" else np.moveaxis(y, 1, -1)

    return reference


def convolution(
    x: tuple[int, ...],
    w: tuple[int, ...],
    types: tuple[str, str, str] = ("int8", "int8", "int8"),
    *,
    window: dict[str, Any] | None = None,
    bias: bool = False,
    each: bool = False,
    symmetric: bool = False,
    order: str = "NCHW",
    group: int = 1,
    spread: float = 0.002,
    **more: Any,
) -> OpCase:
    """Scales of such a size that most results are within their type, and some are not."""
    filters = w[0]
    scales = rng.uniform(0.5, 1.5, filters).astype("float32") if each else one(0.75)
    zeros = [np.zeros((), types[0]), np.zeros((), types[1])]
    if not symmetric:
        zeros = [one(3, types[0]), whole(types[1], filters) // 8 if each else one(5, types[1])]
    inputs = [
        *(whole(types[0], *x), one(spread), zeros[0], whole(types[1], *w), scales, zeros[1]),
        *(one(0.9), one(7, types[2])),
    ]
    if bias:
        inputs.append(rng.integers(-20_000, 20_000, filters).astype("int32"))
    args = {**(window or {}), "order": order, "group": group, "symmetric": int(symmetric)}
    reference = filtered(types[2], window, group, order)
    return OpCase("QLinearConv", inputs, args, reference=reference, **{"empty": (0,)} | more)


CONVOLUTIONS = [
    convolution((2, 3, 5, 6), (4, 3, 3, 3), window={"pad": 1}, bias=True),
    convolution((2, 4, 7, 7), (20, 4, 3, 3), ("uint8", "int8", "uint8"), window={"stride": 2}, each=True),
    convolution((1, 4, 6, 5), (6, 2, 3, 2), ("uint8", "uint8", "uint8"), group=2, bias=True),
    convolution((1, 2, 8, 8), (3, 2, 3, 3), ("int8", "uint8", "uint8"), window={"dilation": 2, "pad": 2}),
    convolution((2, 5, 6, 3), (4, 3, 3, 3), order="NHWC", window={"pad": 1}, each=True, bias=True),
    convolution((2, 5, 6, 8), (8, 2, 3, 8), order="NHWC", symmetric=True, spread=0.01),
    convolution((2, 8, 6, 6), (70, 8, 3, 3), symmetric=True, window={"pad": 1}, bias=True, each=True),
    convolution((3, 2, 9), (5, 2, 3), ("int8", "int8", "uint8"), window={"pad": 2}),
    convolution((1, 2, 4, 4, 3), (3, 2, 2, 2, 2), symmetric=True),
    convolution((1, 3, 4, 4), (2, 3, 1, 1), spread=1.0),  # nearly all beyond the type
]

CASES = [
    OpCase("QuantizeLinear", [normal(5, 7) * 20, one(0.25)], reference=quantized()),
    OpCase(
        "QuantizeLinear",
        # halves, which go to the even number; infinite and huge numbers
        [np.array([0.5, 1.5, 2.5, -0.5, -1.5, 1e9, -1e9], "float32"), one(1.0), one(0, "int8")],
        reference=quantized("int8"),
        id="halves",
    ),
    OpCase(
        "QuantizeLinear",
        [np.array([np.inf, -np.inf, np.nan], "float32"), one(1.0), one(-3, "int8")],
        reference=lambda *x: np.array([127, -128, -128], "int8"),
        empty=False,
        id="not_finite",
    ),
    OpCase(
        "QuantizeLinear",
        [normal(3, 4, 5) * 9, np.array([0.1, 0.3, 1.0, 7.0], "float32"), np.array([0, 9, 128, 255], "uint8")],
        reference=quantized("uint8", 1),
    ),
    OpCase(
        "QuantizeLinear",
        [normal(3, 4), np.array([0.1, 0.3, 0.25, 0.5], "float32"), np.array([0, -9, 3, 0], "int8")],
        {"axis": -1},
        reference=quantized("int8", 1),
        empty=(0,),
    ),
    OpCase(
        "QuantizeLinear",
        [normal(4, 0, 3), np.ones(4, "float32")],
        {"axis": 0},
        reference=lambda *x: np.zeros((4, 0, 3), "uint8"),
        empty=False,
        id="nothing_to_quantize",
    ),
    OpCase(
        "DequantizeLinear",
        [whole("int8", 0, 5), np.ones(0, "float32")],
        {"axis": 0},
        reference=lambda *x: np.zeros((0, 5), "float32"),
        empty=False,
        id="nothing_to_dequantize",
    ),
    OpCase("QuantizeLinear", [normal(5, 7, dtype="float16"), one(0.25)], reference=quantized()),
    OpCase("QuantizeLinear", [normal(5, 7, dtype="float64"), one(0.01)], reference=quantized()),
    OpCase(
        "QuantizeLinear", [normal(5, 7), np.ones(3, "float32")], raises=(ShapeError, "wanted 7 (one number")
    ),
    OpCase(
        "QuantizeLinear",
        [normal(5, 7), one(1.0), np.zeros(3, "int8")],
        raises=(ShapeError, "a zero point for each scale"),
    ),
    OpCase("DequantizeLinear", [whole("uint8", 4, 6), one(0.5), one(128, "uint8")], reference=dequantized),
    OpCase("DequantizeLinear", [whole("int8", 4, 6), one(0.3)], reference=dequantized),
    OpCase(
        "DequantizeLinear",
        [whole("int32", 4, 6, 2), np.array([1, 2, 3, 0.5, 0.1, 1e-9], "float32")],
        reference=lambda x, s: dequantized(x, s, np.zeros(6), 1),
        empty=(0,),
    ),
    OpCase(
        "DequantizeLinear",
        [whole("int8", 4, 6), np.array([1, 2, 3, 0.5], "float32"), np.array([0, 1, -128, 127], "int8")],
        {"axis": 0},
        reference=dequantized,
        empty=False,  # there are scales for four rows
    ),
    OpCase(
        "DequantizeLinear",
        [whole("int8", 4, 6), one(1.0), one(1, "uint8")],
        raises=(DataTypeError, "does not fit"),
    ),
    *CONVOLUTIONS,
    OpCase(
        "QLinearConv",
        [*CONVOLUTIONS[1].inputs[:3], *CONVOLUTIONS[0].inputs[3:8]],
        raises=(ShapeError, "channels"),
    ),
    OpCase(
        "QLinearConv",
        [*CONVOLUTIONS[0].inputs[:2], one(3, "uint8"), *CONVOLUTIONS[0].inputs[3:8]],
        raises=(DataTypeError, "X_zero_point"),
    ),
    OpCase(
        "QLinearConv",
        list(CONVOLUTIONS[2].inputs[:8]),
        {"group": 2, "symmetric": 1},
        raises=(DataTypeError, "cannot be symmetric, wanted int8"),
    ),
    OpCase(
        "QLinearConv",
        [*CONVOLUTIONS[0].inputs[:4], np.ones(3, "float32"), *CONVOLUTIONS[0].inputs[5:8]],
        raises=(ShapeError, "one number, or one an output channel"),
    ),
    OpCase(
        "QLinearConv", list(CONVOLUTIONS[0].inputs[:8]), {"group": 0}, raises=(ArgumentError, "'group' is 0")
    ),
]
