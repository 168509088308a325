"""Table rows of the elementwise functions of one tensor."""

from __future__ import annotations

import math

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, ShapeError
from tests.op_check import OpCase
from tests.operators.naive import each

rng = np.random.default_rng(14)
SHAPES = [(), (6,), (3, 1, 4), (2, 2, 3, 2)]


def away(*shape: int) -> np.ndarray:
    """Numbers of both signs and not near 0."""
    return np.asarray(rng.uniform(0.3, 2, shape) * rng.choice([-1, 1], shape), np.float32)


FUNCTIONS = {
    "Sqr": lambda x: x * x,
    "Sqrt": math.sqrt,
    "Exp": math.exp,
    "Log": math.log,
    "Abs": lambda x: x if x > 0 else -x,
    "Sign": lambda x: (x > 0) - (x < 0),
    "Negative": lambda x: 0 - x,
    "NegateGradient": lambda x: x,
}
POSITIVE = {"Sqrt", "Log"}
WHOLE = {"Sign", "Negative", "NegateGradient"}


def inputs(type: str, *shape: int) -> np.ndarray:
    return np.asarray(np.abs(away(*shape))) if type in POSITIVE else away(*shape)


# NegateGradient's gradient is on purpose not the derivative of its output.
CASES: list[OpCase] = []
for _type, _function in FUNCTIONS.items():
    _gradient = () if _type == "NegateGradient" else None
    CASES += [
        OpCase(_type, [inputs(_type, *shape)], reference=each(_function), gradient=_gradient)
        for shape in SHAPES
    ]
    CASES += [
        OpCase(
            _type,
            [inputs(_type, 4, 3).astype(np.float16)],
            reference=each(_function),
            gradient=_gradient,
            id="half",
        ),
        OpCase(
            _type,
            [inputs(_type, 4, 3).astype(np.float64)],
            reference=each(_function),
            gradient=_gradient,
            rtol=1e-13,
            id="double",
        ),
    ]
    if _type in WHOLE:
        CASES += [
            OpCase(
                _type,
                [rng.integers(-9, 9, (3, 4)).astype(dtype)],
                reference=each(_function, dtype),
                gradient=(),  # no differences of whole numbers
                id=dtype,
            )
            for dtype in ("int32", "int64")
        ]
        CASES.append(OpCase(_type, [np.array([True])], raises=(DataTypeError, "is bool 1"), id="bool"))
    else:
        CASES.append(OpCase(_type, [np.arange(3)], raises=(DataTypeError, "is int64 3"), id="whole"))

CASES += [
    OpCase(
        "Sign",
        [np.array([np.nan, -0.0, -np.inf, np.inf], np.float32)],
        reference=lambda x: np.array([0, 0, -1, 1]),
        id="special",
    ),
    OpCase(
        "AbsGradient",
        [np.array([0, -1, 2, -0.0], np.float32), np.array([np.inf, 3, 4, np.nan], np.float32)],
        reference=lambda x, dy: np.array([0, -3, 4, 0])[: len(x)],
        id="at-zero",
    ),
    OpCase(
        "Log",
        [np.array([[0.0, -2.0, 1e-4], [0.5, 2.0, np.nan]], np.float32)],
        {"epsilon": 1e-3},
        reference=each(lambda x: math.log(max(x, 1e-3))),  # NaN comes first, so max keeps it
        gradient=(),  # no differences at NaN
        id="guarded",
    ),
    OpCase("Log", [away(3, 4)], {"epsilon": 0.1}, reference=each(lambda x: math.log(max(x, 0.1)))),
    OpCase(
        "Log",
        [away(3, 4).astype(np.float16)],
        {"epsilon": 0.125},
        reference=each(lambda x: math.log(max(x, 0.125))),
        id="guarded-half",
    ),
    OpCase("AbsGradient", [away(3), away(4)], raises=(ShapeError, "input dY (float32 4)"), id="shapes"),
    OpCase("Scale", [away(3, 2)], reference=lambda x: x, id="default"),
    *(OpCase("Scale", [away(*s)], {"scale": -2.5}, reference=each(lambda x: x * -2.5)) for s in SHAPES),
    OpCase("Scale", [away(3, 2)], {"scale": 3}, reference=each(lambda x: x * 3), id="whole-factor"),
    OpCase(
        "Scale",
        [np.full((2, 3), 2**-20, np.float16)],
        {"scale": 2.0**20},  # beyond float16's range, but the product is within it
        reference=lambda x: np.ones(x.shape),
        id="half",
    ),
    OpCase("Scale", [np.arange(3)], raises=(DataTypeError, "is int64 3"), id="whole"),
    OpCase("Scale", [away(3)], {"scale": "two"}, raises=(ArgumentError, "argument 'scale'"), id="text"),
]


def clipped(low: float, high: float):
    return each(lambda x: high if x > high else low if x < low else x)


LARGEST = float(np.finfo(np.float32).max)
INFINITE = np.array([np.inf, -np.inf, 1], np.float32)
CASES += [
    *(OpCase("Clip", [away(*s)], {"min": -0.9, "max": 1.1}, reference=clipped(-0.9, 1.1)) for s in SHAPES),
    OpCase("Clip", [away(3, 4)], {"min": 0.2}, reference=clipped(0.2, LARGEST)),
    OpCase("Clip", [away(3, 4)], {"max": -0.2}, reference=clipped(-LARGEST, -0.2)),
    OpCase(
        "Clip",
        [away(3, 4)],
        {"min": 0.5, "max": -0.5},
        reference=lambda x: np.full(x.shape, -0.5),
        id="crossed",
    ),
    OpCase(
        "Clip",
        [INFINITE],
        reference=clipped(-LARGEST, LARGEST),
        gradient=(),  # no differences at infinity
        id="infinite",
    ),
    OpCase(
        "Clip",
        [away(3, 4).astype(np.float16)],
        {"min": -0.5, "max": 1e9},
        reference=clipped(-0.5, 1e9),
        id="half",
    ),
    OpCase("Clip", [np.arange(3)], raises=(DataTypeError, "is int64 3"), id="whole"),
    OpCase(
        "ClipGradient",
        [np.array([-1, 0, 1, 2], np.float32), np.array([np.inf, 3, np.nan, np.inf], np.float32)],
        {"min": -1.0, "max": 1.0},
        reference=lambda y, dy: np.array([0, 3, 0, 0])[: len(y)],
        id="at-limits",
    ),
]
