"""Table rows of the sums over all elements."""

from __future__ import annotations

import math

import numpy as np

from gpunet.errors import DataTypeError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(17)


def normal(*shape: int) -> np.ndarray:
    return np.asarray(rng.standard_normal(shape) + 0.3, np.float32)


def total(x: np.ndarray) -> np.ndarray:
    return np.array(math.fsum(x.ravel().tolist()))


def mean(x: np.ndarray) -> np.ndarray:
    return np.array(math.fsum(x.ravel().tolist()) / max(x.size, 1))


def squares(x: np.ndarray) -> np.ndarray:
    return np.array(math.fsum(v * v for v in x.ravel().tolist()))


def mean_square(x: np.ndarray) -> np.ndarray:
    return squares(x) / max(x.size, 1)


SHAPES = [(), (7,), (3, 1, 5), (20, 30, 4)]
CASES: list[OpCase] = []
for _type, _whole, _average in (("SumElements", total, mean), ("SumSqrElements", squares, mean_square)):
    for _reference, _args in ((_whole, {}), (_average, {"average": 1})):
        CASES += [OpCase(_type, [normal(*s)], _args, reference=_reference, rtol=1e-4) for s in SHAPES]
        CASES.append(
            OpCase(
                _type,
                [np.ones((40, 100), np.float16)],  # beyond 2048 float16 alone cannot count
                _args,
                reference=_reference,
                id=f"half-{len(_args)}",
            )
        )
    CASES.append(OpCase(_type, [np.arange(3)], raises=(DataTypeError, "is int64 3"), id="whole"))

CASES += [
    *(
        OpCase(
            "SumElementsInt",
            [rng.integers(-50, 50, s).astype(dtype)],
            reference=lambda x: np.array(sum(x.ravel().tolist())),
            id=f"{dtype}-{len(s)}d",
        )
        for dtype in ("int32", "int64")
        for s in SHAPES
    ),
    OpCase("SumElementsInt", [normal(3)], raises=(DataTypeError, "is float32 3"), id="float"),
    OpCase(
        "SumElementsGradient",
        [normal(3, 2), np.array([1.5], np.float32)],
        {"average": 1},
        reference=lambda x, dy: np.full(x.shape, dy.item() / max(x.size, 1)),
        id="one-element",
    ),
    OpCase(
        "SumElementsGradient",
        [normal(3, 2), normal(2)],
        raises=(ShapeError, "input dY (float32 2) has 2 elements, wanted 1"),
        id="shapes",
    ),
]
