"""Table rows of further elementwise functions."""

from __future__ import annotations

import math

import numpy as np

from gpunet.errors import DataTypeError, ShapeError
from tests.op_check import OpCase
from tests.operators.naive import each

rng = np.random.default_rng(19)
SHAPES = [(), (7,), (3, 1, 5), (2, 3, 2, 2)]
POSITIVE = {"Rsqrt"}
FUNCTIONS = {
    "Sin": math.sin,
    "Cos": math.cos,
    "Tan": math.tan,
    "Asin": math.asin,
    "Acos": math.acos,
    "Atan": math.atan,
    "Sinh": math.sinh,
    "Cosh": math.cosh,
    "Cube": lambda x: x * x * x,
    "Cbrt": lambda x: math.copysign(abs(x) ** (1 / 3), x),
    "Rsqrt": lambda x: 1 / math.sqrt(x),
    "Reciprocal": lambda x: 1 / x,
    "Softplus": lambda x: math.log(1 + math.exp(x)),
    "Softsign": lambda x: x / (1 + abs(x)),
    "Floor": math.floor,
    "Ceil": math.ceil,
}


def inputs(type: str, *shape: int) -> np.ndarray:
    """Numbers within every function's domain and away from its poles."""
    x = rng.uniform(0.2, 0.9, shape) * (1 if type in POSITIVE else rng.choice([-1, 1], shape))
    return np.asarray(x * (4 if type in ("Floor", "Ceil") else 1), np.float32)


CASES: list[OpCase] = []
for _type, _function in FUNCTIONS.items():
    CASES += [OpCase(_type, [inputs(_type, *shape)], reference=each(_function)) for shape in SHAPES]
    CASES += [
        OpCase(
            _type,
            [inputs(_type, 4, 3).astype(dtype)],
            reference=each(_function),
            id=dtype,
        )
        for dtype in ("float16", "float64")
    ]
    CASES.append(OpCase(_type, [np.arange(3)], raises=(DataTypeError, "is int64 3"), id="whole"))

CASES += [
    OpCase(
        "Softplus",
        [np.array([-1e4, -50, 50, 1e4], np.float32)],
        reference=lambda x: np.array([0, math.exp(-50), 50, 1e4])[: len(x)],
        atol=0,
        id="extreme",
    ),
    OpCase(
        "SinGradient",
        [inputs("Sin", 3), inputs("Sin", 4)],
        raises=(ShapeError, "input dY (float32 4) does not fit, wanted 3"),
        id="shapes",
    ),
]
