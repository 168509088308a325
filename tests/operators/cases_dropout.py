"""Cases of dropout."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, SchemaError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(15)


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def dropped(ratio: float) -> Any:
    """The share of dropped elements is within 5 standard deviations, what is kept is scaled."""

    def check(outputs: list[Any], inputs: list[Any]) -> None:
        (x,), (y, mask) = inputs, outputs
        share = 1 - mask.mean()
        assert abs(share - ratio) <= 5 * np.sqrt(ratio * (1 - ratio) / x.size)
        wanted = np.where(mask, x.astype(np.float64) / (1 - ratio), 0)
        np.testing.assert_allclose(y, wanted, rtol=2e-3 if x.dtype == np.float16 else 1e-6)

    return check


def passed(x: np.ndarray) -> Any:
    return x, np.ones(x.shape, bool)


CASES = [
    OpCase(
        "Dropout", [normal(40, 30)], {"ratio": 0.3}, outputs=2, check=dropped(0.3), gradient=()
    ),  # a new mask at every run
    OpCase("Dropout", [normal(4000)], {"is_test": 0}, outputs=2, check=dropped(0.5), gradient=()),  # as above
    OpCase(
        "Dropout",
        [normal(20, 5, 7, dtype="float16")],
        {"ratio": 0.9},
        outputs=2,
        check=dropped(0.9),
        gradient=(),
    ),  # as above
    OpCase("Dropout", [normal(3, 4)], {"ratio": 0.0}, outputs=2, reference=passed),
    OpCase("Dropout", [normal(3, 4)], {"ratio": 0.7, "is_test": 1}, reference=lambda x: x),
    OpCase("Dropout", [normal(2, 3, 2)], {"ratio": 0.7, "is_test": 1}, outputs=2, reference=passed),
    OpCase("Dropout", [np.array(1.5, np.float32)], {"is_test": 1}, reference=lambda x: x),
    OpCase(
        "Dropout",
        [normal(3, 4)],
        {"ratio": 1.0},
        outputs=2,
        raises=(ArgumentError, "argument 'ratio' is 1.0"),
    ),
    OpCase(
        "Dropout",
        [normal(3, 4)],
        {"ratio": 0.5},
        outputs=1,
        raises=(SchemaError, "wanted 2 to train (Y, mask)"),
    ),
    OpCase("Dropout", [np.ones(3, np.int32)], outputs=2, raises=(DataTypeError, "input X")),
    OpCase(
        "DropoutGrad",
        [normal(3, 4), rng.random((3, 4)) < 0.5],
        {"ratio": 0.2},
        reference=lambda dy, mask: np.where(mask, dy / 0.8, 0),
        gradient=(),
    ),
    OpCase("DropoutGrad", [normal(3, 4)], {"is_test": 1}, reference=lambda dy: dy),
    OpCase("DropoutGrad", [normal(3, 4)], raises=(SchemaError, "wanted 2 in training (dY, mask)")),
    OpCase(
        "DropoutGrad",
        [normal(3, 4), np.ones((4, 3), bool)],
        raises=(ShapeError, "input mask (bool 4x3) does not fit, wanted 3x4"),
    ),
]
