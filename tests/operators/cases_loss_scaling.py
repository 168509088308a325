"""Table rows of loss scaling."""

from __future__ import annotations

import numpy as np

from gpunet.errors import ArgumentError, SchemaError
from tests.op_check import OpCase

rng = np.random.default_rng(12)
SCALE = np.array(8.0, dtype=np.float32)


def gradients(*bad: float) -> list[np.ndarray]:
    found = [rng.normal(size=shape).astype(np.float32) for shape in [(3, 4), (5,), (), (2, 300)]]
    for value in bad:
        found[3][1, 17] = value
    return found


def one(value: float, dtype: str) -> np.ndarray:
    return np.array([value], dtype=dtype)


def unscaled(scale, *values):
    finite = int(all(abs(x) < float("inf") for v in values for x in np.ravel(v)))
    return [np.array([finite], dtype=np.int32), *[v / scale for v in values]]


def updated(scale, good, skipped, finite, *, interval=2000, backoff=0.5):
    if not finite[0]:
        return scale * backoff, good * 0, skipped + 1
    return (scale * 2, good * 0, skipped) if good[0] + 1 >= interval else (scale, good + 1, skipped)


def state(scale: float, good: int, skipped: int, finite: int) -> list[np.ndarray]:
    return [one(scale, "float32"), one(good, "int64"), one(skipped, "int64"), one(finite, "int32")]


CASES = [
    OpCase("UnscaleGradients", [SCALE, *gradients()], outputs=5, reference=unscaled, id="finite"),
    OpCase("UnscaleGradients", [SCALE, *gradients(np.inf)], outputs=5, reference=unscaled, id="inf"),
    OpCase("UnscaleGradients", [SCALE, *gradients(np.nan)], outputs=5, reference=unscaled, id="nan"),
    OpCase(
        "UnscaleGradients",
        [SCALE, gradients()[0].astype(np.float16)],
        outputs=2,
        reference=unscaled,
        id="half",
    ),
    # Counters and flags are one element: there is nothing to empty.
    OpCase("UpdateLossScale", state(64, 3, 1, 1), outputs=3, reference=updated, empty=False, id="good"),
    OpCase("UpdateLossScale", state(64, 3, 1, 0), outputs=3, reference=updated, empty=False, id="bad"),
    OpCase(
        "UpdateLossScale",
        state(64, 3, 1, 1),
        {"interval": 4},
        outputs=3,
        reference=lambda *x: updated(*x, interval=4),
        empty=False,
        id="grows",
    ),
    OpCase(
        "UpdateLossScale",
        state(1, 0, 0, 1),
        {"growth": 1.0},
        outputs=3,
        raises=(ArgumentError, "growth is 1.0"),
    ),
    OpCase("StopUnless", [one(1, "int32")], outputs=0, reference=lambda x: (), empty=False),
    OpCase("StopUnless", [np.array(7, dtype=np.int32)], outputs=0, reference=lambda x: (), empty=False),
    OpCase("StopUnless", [np.array([[2]], dtype=np.int32)], outputs=0, reference=lambda x: (), empty=False),
    OpCase(
        "StopUnless", [np.zeros(2, dtype=np.int32)], outputs=0, raises=(Exception, "2 elements, wanted 1")
    ),
]
# Unscaling works in place only: the rows name their outputs as the inputs.
for case in CASES:
    if case.type == "UnscaleGradients":
        count = len(case.inputs)
        case.definition = lambda inplace=None, case=case, count=count: OpCase.definition(
            case, {o: o for o in range(1, count)}
        )
CASES.append(
    OpCase("UnscaleGradients", [SCALE, *gradients()], outputs=5, raises=(SchemaError, "must be in place"))
)
