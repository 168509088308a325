"""Table rows of buckets of gradients."""

from __future__ import annotations

import numpy as np

from gpunet.errors import DataTypeError, SchemaError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(31)


def tensors(dtype: str = "float32") -> list[np.ndarray]:
    return [rng.normal(size=shape).astype(dtype) for shape in [(3, 4), (5,), (), (0, 2), (2, 300)]]


def one(value: float) -> np.ndarray:
    return np.array([value], np.float32)


def packed(factor, *parts):
    return np.concatenate([np.ravel(p) for p in parts]) * factor


def unpacked(bucket, *parts):
    ends = np.cumsum([p.size for p in parts])
    return [piece.reshape(p.shape) for piece, p in zip(np.split(bucket, ends[:-1]), parts, strict=True)]


NOT_A_NUMBER = [np.full((2, 3), np.nan, np.float32), np.full(4, np.inf, np.float32)]
TENSORS = tensors()
SIZE = sum(t.size for t in TENSORS)
ROWS = np.array([4, 0, 4], np.int64)
VALUES = rng.normal(size=(3, 2)).astype(np.float32)
CASES = [
    OpCase("PackBucket", [one(0.25), *tensors()], reference=packed, empty=False, id="float32"),
    OpCase("PackBucket", [one(1), *tensors("float64")], reference=packed, empty=False, id="float64"),
    OpCase(
        "PackBucket", [one(0.5), *tensors("float16")], reference=packed, rtol=1e-3, empty=False, id="float16"
    ),
    OpCase(
        "PackBucket",
        [one(0.25), *tensors()],
        {"dtype": 12},
        reference=packed,
        rtol=1e-3,
        atol=1e-4,
        empty=False,
        id="rounded",
    ),
    # Without a factor nothing is read: no 0 times NaN.
    OpCase(
        "PackBucket", [one(0), *NOT_A_NUMBER], reference=lambda *x: np.zeros(10), empty=False, id="nothing"
    ),
    OpCase("PackBucket", [one(2), np.zeros(0, np.float32)], reference=packed, empty=False, id="empty"),
    OpCase(
        "PackBucket",
        [one(2), np.zeros(2, np.float32), np.zeros(2, np.float64)],
        raises=(DataTypeError, "one element type in a bucket"),
    ),
    OpCase(
        "PackBucket",
        [one(2), np.zeros(2, np.float32)],
        {"dtype": 2},
        raises=(DataTypeError, "wanted one of bfloat16, float16"),
    ),
    OpCase("PackBucket", [np.ones(2, np.float32), np.zeros(2, np.float32)], raises=(ShapeError, "wanted 1")),
    OpCase(
        "UnpackBucket",
        [rng.normal(size=SIZE).astype(np.float32), *TENSORS],
        outputs=5,
        reference=unpacked,
        empty=False,
        id="float32",
    ),
    OpCase(
        "UnpackBucket",
        [rng.normal(size=SIZE).astype(np.float16), *TENSORS],
        outputs=5,
        reference=unpacked,
        empty=False,
        id="rounded",
    ),
    OpCase(
        "UnpackBucket",
        [np.zeros(3, np.float32), np.zeros(2, np.float32)],
        outputs=1,
        raises=(ShapeError, "3 elements, wanted 2"),
    ),
    *(
        OpCase(
            "DrainBucket",
            [rng.normal(size=300).astype(dtype) for _ in range(2)],
            outputs=2,
            reference=lambda bucket, gathered: (bucket + gathered, gathered * 0),
            rtol=1e-3 if dtype == "float16" else 1e-6,
            empty=(0, 1),
            id=dtype,
        )
        for dtype in ("float16", "float32", "float64")
    ),
    OpCase(
        "DrainBucket",
        [np.zeros(2, np.float32), np.zeros(3, np.float32)],
        outputs=2,
        raises=(ShapeError, "3 elements, wanted 2"),
    ),
    OpCase(
        "AllgatherSlices",
        [one(0.5), ROWS, VALUES],
        outputs=2,
        reference=lambda f, i, v: (i, v * f),
        empty=(1, 2),
    ),
    OpCase(
        "AllgatherSlices",
        [one(0), ROWS.astype(np.int32), VALUES * np.float32(np.nan)],
        outputs=2,
        reference=lambda f, i, v: (i, np.zeros((3, 2))),
        empty=False,
        id="nothing",
    ),
]
# Unpacking works in place only: the rows name their outputs as the inputs.
for case in CASES:
    if case.type == "UnpackBucket":
        count = len(case.inputs)
        case.definition = lambda inplace=None, case=case, count=count: OpCase.definition(
            case, {o: o + 1 for o in range(count - 1)}
        )
CASES.append(
    OpCase(
        "UnpackBucket",
        [np.zeros(2, np.float32), np.zeros(2, np.float32)],
        raises=(SchemaError, "must be in place"),
    )
)
