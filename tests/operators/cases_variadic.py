"""Table rows of the elementwise combinations of any number of tensors."""

from __future__ import annotations

import numpy as np

from gpunet.errors import DataTypeError, SchemaError, ShapeError
from tests.op_check import OpCase
from tests.operators.naive import each

rng = np.random.default_rng(13)


def normal(*shape: int) -> np.ndarray:
    return np.asarray(rng.standard_normal(shape), np.float32)


def some(count: int, *shape: int, dtype: str = "float32") -> list[np.ndarray]:
    return [np.asarray(10 * rng.standard_normal(shape)).astype(dtype) for _ in range(count)]


CASES: list[OpCase] = []
for _type, _function in (
    ("Sum", lambda *xs: sum(xs)),
    ("Max", lambda *xs: sorted(xs)[-1]),
    ("Min", lambda *xs: sorted(xs)[0]),
):
    CASES += [
        OpCase(_type, some(count, *shape), reference=each(_function), id=f"{count}-{len(shape)}d")
        for count, shape in [(1, (3, 2)), (2, (3, 1, 4)), (3, ()), (3, (5,)), (7, (2, 3))]
    ]
    CASES += [
        OpCase(
            _type,
            some(count, 3, 2, dtype=dtype),
            reference=each(_function, np.float64 if dtype == "float16" else dtype),
            gradient=() if dtype != "float16" else None,  # no differences of whole numbers
            id=f"{dtype}-{count}",
        )
        for dtype in ("int32", "int64", "float16")
        for count in (1, 2, 4)
    ]
    CASES += [
        OpCase(
            _type,
            [normal(2, 3), normal(2, 3), normal(3)],
            raises=(ShapeError, "input X[2] ('in2', float32 3) does not fit, wanted 2x3"),
            id="shapes",
        ),
        OpCase(_type, [normal(2), np.zeros(2)], raises=(DataTypeError, "differs in type"), id="types"),
        OpCase(_type, [], raises=(SchemaError, "has 0 inputs, wanted at least 1"), id="none"),
    ]

CASES += [
    OpCase(
        "Sum",
        [np.full(3, x, np.float16) for x in [2048, 1, 1, 1, 1]],
        reference=lambda *xs: sum(xs),
        id="half-carries",
    ),
    *(
        OpCase(
            "SumInt",
            some(count, *shape, dtype="int32"),
            reference=each(lambda *xs: sum(xs), "int32"),
            id=f"{count}-{len(shape)}d",
        )
        for count, shape in [(1, (3,)), (2, (2, 3)), (4, ())]
    ),
    OpCase("SumInt", some(2, 3), raises=(DataTypeError, "is float32 3"), id="float"),
    # The first input ties with the second at one place, and the gradient there is infinite.
    *(
        OpCase(
            f"{_type}Gradient",
            [
                np.array([0, y, 1], np.float32),
                np.array([np.inf, np.inf, 6], np.float32),
                np.array([0, 1, 1], np.float32),
                np.array([0, y, 5], np.float32),
            ],
            outputs=2,
            reference=lambda y, dy, a, b: (each(_chosen)(y, dy, a), each(_chosen)(y, dy, b)),
            id="ties",
        )
        for _type, y in (("Max", 2), ("Min", -2))
    ),
    OpCase(
        "MaxGradient",
        some(4, 3),
        outputs=1,
        raises=(SchemaError, "has 1 outputs, wanted 2: one for each X"),
        id="outputs",
    ),
]


def _chosen(y: float, dy: float, x: float) -> float:
    return dy if x == y else 0.0


def weighted(*inputs: np.ndarray) -> np.ndarray:
    return each(lambda *xs: sum(x * w.item() for x, w in zip(xs, inputs[1::2], strict=True)))(*inputs[::2])


def pairs(
    count: int, *shape: int, weight: tuple[int, ...] = (1,), dtype: str = "float32"
) -> list[np.ndarray]:
    return [normal(*s).astype(dtype) for _ in range(count) for s in (shape, weight)]


CASES += [
    OpCase("WeightedSum", pairs(count, *shape, weight=w), {"grad_on_w": g}, reference=weighted, atol=1e-5)
    for count, shape, w, g in [
        (1, (3, 2), (1,), 0),
        (2, (3, 1, 4), (), 1),
        (3, (), (1,), 1),
        (3, (5,), (1,), 0),
        (6, (2, 3), (1, 1), 1),
    ]
]
CASES += [
    OpCase("WeightedSum", pairs(3, 4, 2, dtype="float16"), {"grad_on_w": 1}, reference=weighted, id="half"),
    OpCase(
        "WeightedSum",
        [normal(4, 2), np.ones(1, np.float32), normal(4, 2), normal(1)],
        reference=weighted,
        id="weight-one",
    ),
    OpCase(
        "WeightedSum",
        [normal(3), normal(1), normal(3)],
        raises=(SchemaError, "has 3 inputs, wanted pairs of a tensor and a weight"),
        id="odd",
    ),
    OpCase(
        "WeightedSum",
        [normal(3), normal(2)],
        raises=(ShapeError, "input 1 (float32 2) is not one weight"),
        id="weights",
    ),
    OpCase(
        "WeightedSum",
        [normal(3), normal(1), normal(4), normal(1)],
        raises=(ShapeError, "input 2 (float32 4) differs in shape from input X (float32 3)"),
        id="shapes",
    ),
    OpCase(
        "WeightedSum",
        [normal(3), normal(1), np.zeros(3), normal(1)],
        raises=(DataTypeError, "input 2 (float64 3) differs in type from input X (float32 3)"),
        id="types",
    ),
    OpCase(
        "WeightedSumGradient",
        [normal(3, 2), *pairs(2, 3, 2)],
        {"grad_on_w": 1},
        outputs=4,
        reference=lambda dy, a, v, b, w: (dy * v.item(), dy * w.item(), _dot(dy, a), _dot(dy, b)),
        atol=1e-5,
    ),
    OpCase(
        "WeightedSumGradient",
        [normal(3), *pairs(2, 3)],
        outputs=4,
        raises=(SchemaError, "wanted dY with pairs of a tensor and a weight, and a gradient for each tensor"),
        id="outputs",
    ),
]


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.array([sum(x * y for x, y in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True))])
