"""Cases of the normalization of each example by itself."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, SchemaError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(41)


#: Type of the data, a type of means and deviations that does not fit, the one that does.
STATISTICS = [
    ("float16", "float16", "float32"),
    ("float32", "float64", "float32"),
    ("float64", "float32", "float64"),
]


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def positive(*shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.uniform(0.5, 2.0, shape).astype(dtype)


def normalized(values: np.ndarray, epsilon: float) -> tuple[np.ndarray, float, float]:
    mean = values.sum() / values.size
    deviation = (((values - mean) ** 2).sum() / values.size + epsilon) ** 0.5
    return (values - mean) / deviation, mean, deviation


def layer(axis: int = 1, epsilon: float = 1e-5) -> Any:
    """One example after the other."""

    def reference(x: np.ndarray, gamma: Any = 1.0, beta: Any = 0.0) -> Any:
        examples = x.reshape(*x.shape[:axis], -1)
        y, mean = np.zeros_like(examples), np.zeros((*x.shape[:axis], 1))
        deviation = np.zeros_like(mean)
        for index in itertools.product(*map(range, x.shape[:axis])):
            y[index], mean[index], deviation[index] = normalized(examples[index], epsilon)
        return y.reshape(x.shape) * gamma + beta, mean, deviation

    return reference


def layer_case(
    shape: tuple[int, ...], axis: int = 1, epsilon: float = 1e-3, affine: bool = True, **more: Any
) -> OpCase:
    dtype = more.pop("dtype", "float32")
    rest = shape[axis:]
    inputs = [normal(*shape, dtype=dtype) + np.asarray(more.pop("offset", 0), dtype)]
    if affine:
        inputs += [positive(*rest, dtype=dtype), normal(*rest, dtype=dtype)]
    args = {"axis": axis, "epsilon": epsilon, "elementwise_affine": int(affine)}
    return OpCase(
        "LayerNorm", inputs, args, outputs=3, reference=layer(axis, epsilon), **{"empty": (0,)} | more
    )


def channels(group: int, order: str, epsilon: float) -> Any:
    """One group of one image after the other; 0 groups are one for each channel."""

    def reference(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> Any:
        moved = x if order == "NCHW" else np.moveaxis(x, -1, 1)
        count = group or moved.shape[1]
        depth = moved.shape[1] // count
        y, mean = np.zeros_like(moved), np.zeros((len(x), count))
        inverse = np.zeros_like(mean)
        for n in range(len(x)):
            for g in range(count):
                own = slice(g * depth, (g + 1) * depth)
                y[n, own], mean[n, g], deviation = normalized(moved[n, own], epsilon)
                inverse[n, g] = 1 / deviation
            for c in range(moved.shape[1]):
                y[n, c] = y[n, c] * gamma[c] + beta[c]
        return (y if order == "NCHW" else np.moveaxis(y, 1, -1)), mean, inverse

    return reference


def channels_case(
    shape: tuple[int, ...],
    group: int = 0,
    order: str = "NCHW",
    epsilon: float = 1e-3,
    outputs: int = 3,
    **more: Any,
) -> OpCase:
    dtype = more.pop("dtype", "float32")
    count = shape[1] if order == "NCHW" else shape[-1]
    inputs = [normal(*shape, dtype=dtype), positive(count, dtype=dtype), normal(count, dtype=dtype)]
    args: dict[str, Any] = {"order": order, "epsilon": epsilon} | ({"group": group} if group else {})
    full = channels(group, order, epsilon)
    type = "GroupNorm" if group else "InstanceNorm"
    return OpCase(
        type,
        inputs,
        args,
        outputs=outputs,
        reference=lambda *x: full(*x)[:outputs],
        **{"empty": (0,)} | more,
    )


CASES = [
    layer_case((5, 12)),
    layer_case((3, 4, 5), axis=2, affine=False),
    layer_case((3, 4, 5), axis=1, epsilon=1e-5),
    layer_case((2, 3, 4), axis=0, empty=False),  # all is one example
    layer_case((2, 3, 7), axis=2),
    layer_case((3, 1), affine=False, rtol=1e-3),
    layer_case((2, 700), affine=True),
    layer_case((300, 6), affine=True),
    layer_case((4, 8), offset=1000, rtol=1e-3, atol=1e-3, gradient=()),
    layer_case((5, 24), dtype="float16"),
    layer_case((5, 9), dtype="float16", affine=False),
    OpCase(
        "LayerNorm",
        [normal(3, 4), positive(4)],
        {"elementwise_affine": 1},
        outputs=3,
        raises=(SchemaError, "2 inputs"),
    ),
    OpCase(
        "LayerNorm", [normal(3, 4), positive(4), positive(4)], outputs=3, raises=(SchemaError, "wanted 1")
    ),
    OpCase(
        "LayerNorm",
        [normal(3, 4), positive(3), positive(4)],
        {"elementwise_affine": 1},
        outputs=3,
        raises=(ShapeError, "wanted 4"),
    ),
    OpCase(
        "LayerNorm",
        [normal(3, 4), positive(4, dtype="float64"), positive(4)],
        {"elementwise_affine": 1},
        outputs=3,
        raises=(DataTypeError, "float64"),
    ),
    OpCase(
        "LayerNorm",
        [normal(3, 4)],
        {"epsilon": float("nan")},
        outputs=3,
        raises=(ArgumentError, "'epsilon' is nan"),
        id="nan",
    ),
    *[
        OpCase(
            "LayerNormGradient",
            [normal(3, 4, dtype=dtype)] * 2
            + [positive(3, 1, dtype=statistics)] * 2
            + [normal(3, 4, dtype=dtype)],
            raises=(DataTypeError, f"wanted {wanted} for X in {dtype}"),
            id=f"statistics_{dtype}",
        )
        for dtype, statistics, wanted in STATISTICS
    ],
    *[
        OpCase(
            "GroupNormGradient",
            [normal(2, 6, 3, dtype=dtype)] * 2
            + [positive(6, dtype=dtype)] * 2
            + [positive(2, 3, dtype=statistics)] * 2,
            {"group": 3},
            outputs=3,
            raises=(DataTypeError, f"wanted {wanted} for X in {dtype}"),
            id=f"statistics_{dtype}",
        )
        for dtype, statistics, wanted in STATISTICS
    ],
    *[
        OpCase(
            "InstanceNormGradient",
            [normal(2, 6, 3, dtype=dtype), *[positive(6, dtype=dtype)] * 2, normal(2, 6, 3, dtype=dtype)]
            + [positive(2, 6, dtype=statistics)] * 2,
            outputs=3,
            raises=(DataTypeError, f"wanted {wanted} for X in {dtype}"),
            id=f"statistics_{dtype}",
        )
        for dtype, statistics, wanted in STATISTICS
    ],
    OpCase("LayerNorm", [normal(3, 4)], {"axis": 2}, outputs=3, raises=(ArgumentError, "axis")),
    OpCase(
        "LayerNorm", [normal(3, 4)], {"epsilon": -1.0}, outputs=3, raises=(ArgumentError, "'epsilon' is -1")
    ),
    channels_case((2, 6, 3, 4), 3),
    channels_case((2, 6, 5), 2),
    channels_case((2, 3, 4, 6), 2, "NHWC"),
    channels_case((2, 3, 2, 2, 4), 4, "NHWC"),
    channels_case((3, 8), 2),
    channels_case((2, 4, 3, 3), 1, outputs=1, gradient=()),
    channels_case((2, 4, 20, 20), 4),
    channels_case((2, 6, 4, 4), 2, dtype="float16"),
    OpCase(
        "GroupNorm",
        [normal(2, 6, 3, 3), positive(6), normal(6)],
        {"group": 4},
        outputs=3,
        raises=(ArgumentError, "wanted a divisor of the 6 channels"),
    ),
    OpCase(
        "GroupNorm",
        [normal(2, 6, 3, 3), positive(5), normal(6)],
        {"group": 2},
        outputs=3,
        raises=(ShapeError, "wanted 6"),
    ),
    channels_case((2, 5, 3, 4)),
    channels_case((2, 3, 4, 5), order="NHWC"),
    channels_case((2, 5, 3, 4), outputs=1),
    channels_case((2, 3, 4, 5), order="NHWC", outputs=1),
    channels_case((2, 3, 17), epsilon=1e-5),
    channels_case((2, 3, 4, 5), dtype="float16"),
    OpCase(
        "InstanceNorm",
        [normal(4), positive(4), normal(4)],
        outputs=3,
        raises=(ShapeError, "has 1 dimensions, wanted at least 2"),
    ),
]
