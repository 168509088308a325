"""Table rows of the activation functions."""

from __future__ import annotations

import math

import numpy as np

from gpunet.dtypes import BFLOAT16
from gpunet.errors import DataTypeError, SchemaError, ShapeError
from tests.op_check import OpCase
from tests.operators.naive import each

HALVES = [np.dtype("float16"), *([] if BFLOAT16 is None else [BFLOAT16])]
rng = np.random.default_rng(11)
SHAPES = [(), (7,), (3, 1, 5), (2, 3, 4, 3)]


def normal(*shape: int) -> np.ndarray:
    return np.asarray(rng.normal(0.1, 1.5, shape), np.float32)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


FUNCTIONS = {"Relu": lambda x: x if x > 0 else 0.0, "Sigmoid": sigmoid, "Tanh": math.tanh}
EXTREME = np.array([-np.inf, -1e4, -90, -20, -1e-30, 0, 1e-30, 20, 90, 1e4, np.inf], np.float32)
MASKED = np.array([np.inf, -np.inf, np.nan, 3, np.nan, -2], np.float32)

CASES: list[OpCase] = []
for _type, _function in FUNCTIONS.items():
    CASES += [OpCase(_type, [normal(*shape)], reference=each(_function)) for shape in SHAPES]
    CASES += [
        OpCase(_type, [normal(4, 3).astype(np.float16)], reference=each(_function), id="half"),
        OpCase(_type, [normal(2, 5).astype(np.float64)], reference=each(_function), id="double", rtol=1e-12),
        # No differences can be taken at infinity, nor at Relu's corner.
        OpCase(_type, [EXTREME], reference=each(_function), gradient=(), id="extreme", atol=1e-37),
        OpCase(_type, [np.arange(3)], raises=(DataTypeError, "input X ('in0') is int64 3"), id="whole"),
        OpCase(_type, [normal(3), normal(3)], raises=(SchemaError, "has 2 inputs, wanted 1"), id="two"),
    ]

CASES += [
    OpCase(
        "ReluGradient",
        [np.array([0, -1, np.nan, 1, -0.0, 2], np.float32), MASKED],
        reference=each(lambda y, dy: dy if y > 0 else 0.0),
        id="masks-infinities",
    ),
    OpCase(
        "ReluGradient",
        [normal(3, 5).astype(np.float16), normal(3, 5).astype(np.float16)],
        reference=each(lambda y, dy: dy if y > 0 else 0.0),
        id="half",
    ),
    OpCase(
        "SigmoidGradient",
        [np.abs(np.tanh(normal(3, 2))), normal(3, 2)],
        reference=each(lambda y, dy: dy * y * (1 - y)),
    ),
    OpCase(
        "TanhGradient", [np.tanh(normal(3, 2)), normal(3, 2)], reference=each(lambda y, dy: dy * (1 - y * y))
    ),
]

for _type in FUNCTIONS:
    CASES += [
        OpCase(
            f"{_type}Gradient",
            [normal(2, 3).astype(_half), normal(2, 3)],
            raises=(
                DataTypeError,
                f"input dY (float32 2x3) differs in type from input Y ({_half} 2x3), wanted one type",
            ),
            id=f"{_half}-and-float32",
        )
        for _half in HALVES
    ]
    CASES += [
        OpCase(
            f"{_type}Gradient",
            [normal(2, 3), normal(2, 3).astype(np.float16)],
            raises=(DataTypeError, "input dY (float16 2x3) differs in type from input Y (float32 2x3)"),
            id="float32-and-float16",
        ),
        OpCase(
            f"{_type}Gradient",
            [normal(2, 3), normal(3, 2)],
            raises=(ShapeError, "input dY (float32 3x2) does not fit, wanted 2x3"),
            id="shapes",
        ),
    ]
