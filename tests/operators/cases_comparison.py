"""Table rows of comparisons and logic."""

from __future__ import annotations

import operator

import numpy as np

from gpunet.errors import DataTypeError, ShapeError
from tests.op_check import OpCase
from tests.operators.naive import along, each

rng = np.random.default_rng(15)
COMPARISONS = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "GT": operator.gt,
    "GE": operator.ge,
    "LT": operator.lt,
    "LE": operator.le,
}
LOGIC = {
    "And": lambda a, b: a and b,
    "Or": lambda a, b: a or b,
    "Xor": lambda a, b: a != b,
}


def few(*shape: int, dtype: str = "float32") -> np.ndarray:
    """Small whole numbers, so that many are equal."""
    return np.asarray(rng.integers(-1, 2, shape)).astype(dtype)


CASES: list[OpCase] = []
for _type, _function in {**COMPARISONS, **LOGIC}.items():
    _dtypes = ("bool",) if _type in LOGIC else ("float32", "int32", "int64", "float64", "bool", "float16")
    CASES += [
        OpCase(
            _type,
            [few(3, 4, dtype=dtype), few(3, 4, dtype=dtype)],
            reference=each(_function, bool),
            id=dtype,
        )
        for dtype in _dtypes
    ]
    CASES += [
        OpCase(
            _type,
            [few(*a, dtype=_dtypes[0]), few(*b, dtype=_dtypes[0])],
            reference=each(_function, bool),
            empty=empty,
        )
        for a, b, empty in [((), (), True), ((2, 3), (3,), True), ((1, 3), (4, 1), (1,))]
    ]
    CASES += [
        OpCase(
            _type,
            [few(2, 3, 4, dtype=_dtypes[0]), few(3, dtype=_dtypes[0])],
            {"broadcast": 1, "axis": 1},
            reference=along(_function, 1, bool),
            id="along",
        ),
        OpCase(
            _type,
            [few(3, dtype="bool"), few(2, dtype="bool")],
            raises=(ShapeError, "do not broadcast"),
            id="shapes",
        ),
        OpCase(
            _type,
            [few(3, dtype="bool"), few(3, dtype="int32")],
            raises=(DataTypeError, "int32" if _type in LOGIC else "differs in type"),
            id="types",
        ),
    ]

for _type in COMPARISONS:
    CASES.append(
        OpCase(
            _type,
            [
                np.array([np.nan, np.nan, 1, np.inf], np.float32),
                np.array([np.nan, 1, np.nan, np.inf], np.float32),
            ],
            reference=each(COMPARISONS[_type], bool),
            id="nan",
        )
    )

CASES += [
    *(
        OpCase("Not", [few(*s, dtype="bool")], reference=each(operator.not_, bool))
        for s in [(), (5,), (3, 1, 4)]
    ),
    OpCase("Not", [few(3)], raises=(DataTypeError, "is float32 3"), id="float"),
    *(OpCase("IsEmpty", [few(*s)], reference=lambda x: np.array(len(x) == 0)) for s in [(5,), (1, 3)]),
    OpCase("IsEmpty", [few(2, 0, 3)], reference=lambda x: np.array(True), id="inner"),
    OpCase("IsEmpty", [np.array(1, np.int64)], reference=lambda x: np.array(False), id="scalar"),
    OpCase("IsEmpty", [np.array([b"x"], dtype=object)], reference=lambda x: np.array(len(x) == 0), id="text"),
]
