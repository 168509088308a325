"""Table rows of gradient compression."""

from __future__ import annotations

import numpy as np

from gpunet.dtypes import bfloat16
from gpunet.errors import ArgumentError, KernelError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(32)


def vector(size: int) -> np.ndarray:
    return rng.normal(size=size).astype(np.float32)


def rounded(dtype):
    def reference(bucket, error):
        wanted = (bucket.astype(np.float32) + error.astype(np.float32)).astype(np.float32)
        sent = wanted.astype(dtype).astype(np.float32)
        return sent, np.where(np.isfinite(sent), wanted - sent, 0)

    return reference


# A matrix of rank 2, three elements sent as they are, and another matrix.
LAYOUT = {"rank": 2, "rows": [6, 3, 4], "columns": [5, 0, 7]}
LOW = [
    (rng.normal(size=(6, 2)) @ rng.normal(size=(2, 5))).astype(np.float32),
    vector(3),
    (rng.normal(size=(4, 2)) @ rng.normal(size=(2, 7))).astype(np.float32),
]
BUCKET = np.concatenate([np.ravel(x) for x in LOW])
SIZE, LEFT, RIGHT = 6 * 5 + 3 + 4 * 7, 2 * (6 + 4) + 3, 2 * (5 + 7)


def left_of(bucket, error, right):
    bucket = bucket + error
    a, b = right[:10].reshape(5, 2), right[10:].reshape(7, 2)
    first, second = bucket[:30].reshape(6, 5) @ a, bucket[33:].reshape(4, 7) @ b
    return bucket, np.concatenate([first.ravel(), second.ravel(), bucket[30:33]])


def check_right(outputs, inputs):
    """Orthonormal factors, and as error what they leave of the matrices: nothing along them."""
    left, error, right = outputs
    bucket = inputs[0]
    for at, rows, columns, i, j in ((0, 6, 5, 0, 0), (33, 4, 7, 12, 10)):
        p, q = left[i : i + 2 * rows].reshape(rows, 2), right[j : j + 2 * columns].reshape(columns, 2)
        matrix, rest = (x[at : at + rows * columns].reshape(rows, columns) for x in (bucket, error))
        np.testing.assert_allclose(p.T @ p, np.eye(2), atol=1e-5)
        np.testing.assert_allclose(p @ q.T + rest, matrix, atol=1e-5)
        np.testing.assert_allclose(p.T @ rest, np.zeros((2, columns)), atol=1e-5)
    np.testing.assert_array_equal(error[30:33], np.zeros(3))
    np.testing.assert_array_equal(left[20:], inputs[1][20:])


def check_dependent(outputs, inputs):
    """A column that depends on the one before becomes 0."""
    p = outputs[0][:12].reshape(6, 2)
    np.testing.assert_allclose(p.T @ p, np.diag([1.0, 0.0]), atol=1e-5)


def check_low_rank(outputs, inputs):
    """The rows are of rank 2, so two columns represent them exactly and leave no error."""
    left, error, right = outputs
    bucket = inputs[0]
    p, q = left[:12].reshape(6, 2), right[:10].reshape(5, 2)
    np.testing.assert_allclose(p.T @ p, np.eye(2), atol=1e-5)
    np.testing.assert_allclose(p @ q.T, bucket[:30].reshape(6, 5), atol=1e-4)
    np.testing.assert_allclose(error, np.zeros(SIZE), atol=1e-4)
    np.testing.assert_array_equal(left[20:], inputs[1][20:])


def restored(left, right):
    p, q = left[:12].reshape(6, 2), right[:10].reshape(5, 2)
    u, v = left[12:20].reshape(4, 2), right[10:].reshape(7, 2)
    return np.concatenate([(p @ q.T).ravel(), left[20:], (u @ v.T).ravel()])


def largest(bucket, velocity, error, *, count, momentum):
    velocity = momentum * velocity + bucket
    error = error + velocity
    chosen = np.sort(np.argsort(-np.abs(error), kind="stable")[:count])
    values = error[chosen].copy()
    velocity[chosen] = error[chosen] = 0
    return chosen, values, velocity, error


FULL = vector(SIZE)
# So small that the error, which is that of rounding, is nothing to compare devices by.
LITTLE = BUCKET * np.float32(1e-3)
STATE = [np.zeros(SIZE, np.float32), vector(RIGHT)]
CASES = [
    OpCase(
        "RoundWithFeedback",
        [vector(1000), vector(1000) * np.float32(1e-4)],
        outputs=2,
        reference=rounded(np.float16),
        empty=(0, 1),
        id="small",
    ),
    OpCase(
        "RoundWithFeedback",
        [np.array([1e6, -1e6, 1.0001, np.inf], np.float32), np.zeros(4, np.float32)],
        outputs=2,
        reference=rounded(np.float16),
        empty=False,
        id="overflow",
    ),
    OpCase(
        "RoundWithFeedback",
        [vector(1000), vector(1000) * np.float32(1e-3)],
        {"dtype": "bfloat16"},
        outputs=2,
        reference=rounded(bfloat16()),
        empty=(0, 1),
        id="bfloat16",
    ),
    OpCase(
        "RoundWithFeedback",
        [vector(3), vector(3)],
        {"dtype": "float64"},
        outputs=2,
        raises=(ArgumentError, "argument 'dtype' is float64, wanted float16 or bfloat16"),
        id="wide",
    ),
    OpCase("RoundWithFeedback", [vector(3), vector(4)], outputs=2, raises=(ShapeError, "as the bucket")),
    OpCase(
        "PowerSgdLeft",
        [BUCKET, vector(SIZE), vector(RIGHT)],
        LAYOUT,
        outputs=2,
        reference=left_of,
        rtol=1e-4,
        atol=1e-5,
        empty=False,  # the sizes are arguments
    ),
    OpCase(
        "PowerSgdLeft",
        [vector(3), *(np.zeros(n, np.float32) for n in (3, 0))],
        {"rows": [3], "columns": [0]},
        outputs=2,
        reference=lambda b, e, q: (b, b),
        empty=False,
        id="plain",
    ),
    OpCase(
        "PowerSgdLeft",
        [BUCKET, *STATE],
        {**LAYOUT, "rank": 0},
        outputs=2,
        raises=(ArgumentError, "'rank' is 0"),
    ),
    OpCase(
        "PowerSgdLeft",
        [BUCKET, *STATE],
        {"rank": 2, "rows": [1], "columns": [1, 2]},
        outputs=2,
        raises=(ArgumentError, "wanted equal numbers"),
    ),
    OpCase(
        "PowerSgdRight",
        [LITTLE, left_of(LITTLE, STATE[0], STATE[1])[1].astype(np.float32), *STATE],
        LAYOUT,
        outputs=3,
        check=check_low_rank,
        empty=False,
        id="low_rank",
    ),
    OpCase(
        "PowerSgdRight",
        [FULL, left_of(FULL, STATE[0], STATE[1])[1].astype(np.float32), *STATE],
        LAYOUT,
        outputs=3,
        check=check_right,
        rtol=1e-4,
        empty=False,
    ),
    OpCase(
        "PowerSgdRight",
        [vector(SIZE), np.repeat(vector((LEFT - 3) // 2 + 2), 2)[:LEFT], *STATE],
        LAYOUT,
        outputs=3,
        check=check_dependent,
        rtol=1e-4,
        empty=False,
        id="dependent",
    ),
    OpCase(
        "PowerSgdRestore",
        [vector(LEFT), vector(RIGHT)],
        LAYOUT,
        reference=restored,
        rtol=1e-4,
        atol=1e-5,
        empty=False,
    ),
    OpCase(
        "LargestElements",
        [vector(200), vector(200), vector(200)],
        {"ratio": 0.05, "momentum": 0.5},
        outputs=4,
        reference=lambda *x: largest(*x, count=10, momentum=0.5),
        empty=(0, 1, 2),
    ),
    OpCase(
        "LargestElements",
        [vector(7), vector(7), vector(7)],
        {"ratio": 1.0},
        outputs=4,
        reference=lambda *x: largest(*x, count=7, momentum=0.0),
        empty=False,
        id="all",
    ),
    OpCase(
        "LargestElements",
        [vector(5000), np.zeros(5000, np.float32), np.zeros(5000, np.float32)],
        {"ratio": 0.25},
        outputs=4,
        reference=lambda *x: largest(*x, count=1250, momentum=0.0),
        empty=False,
        id="several_parts",
    ),
    OpCase(
        "LargestElements",
        [
            rng.integers(-3, 4, 3000).astype(np.float32),
            np.zeros(3000, np.float32),
            np.zeros(3000, np.float32),
        ],
        {"ratio": 0.5},
        outputs=4,
        reference=lambda *x: largest(*x, count=1500, momentum=0.0),
        empty=False,
        id="equal_ones",
    ),
    OpCase(
        "LargestElements",
        [vector(7), vector(7), vector(7)],
        {"ratio": 0.0},
        outputs=4,
        raises=(ArgumentError, "ratio is 0.0"),
    ),
    OpCase(
        "SumElementsAtPlaces",
        [np.array([4, 0, 4], np.int32), vector(3)],
        {"size": 6},
        reference=lambda p, v: np.bincount(p, v, minlength=6),
        empty=(0, 1),
    ),
    OpCase(
        "SumElementsAtPlaces",
        [rng.integers(0, 500, 3000).astype(np.int32), vector(3000)],
        {"size": 500},
        reference=lambda p, v: np.bincount(p, v, minlength=500),
        empty=False,
        id="many",
    ),
    OpCase(
        "SumElementsAtPlaces",
        [np.array([4], np.int32), vector(1)],
        {"size": 4},
        raises=(KernelError, "place 4 is outside"),
    ),
]
