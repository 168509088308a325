"""Table rows of the updates that add weight decay."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpunet.errors import DataTypeError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(61)


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def one(value: float, dtype: str = "float32") -> np.ndarray:
    return np.array([value], dtype)


def momentum(mu: float, nesterov: bool) -> Any:
    def reference(g, m, lr, w, a, b):  # type: ignore[no-untyped-def]
        g = a * g + b * w
        moment = mu * m + lr * g
        step = (1 + mu) * moment - mu * m if nesterov else moment
        return step, moment, w - step

    return reference


def adam(w, m, v, g, lr, i, a, b, beta1=0.9, beta2=0.999, epsilon=1e-5):  # type: ignore[no-untyped-def]
    g = a * g + b * w
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    step = np.sqrt(1 - beta2 ** (i + 1)) / (1 - beta1 ** (i + 1)) * m / (np.sqrt(v) + epsilon)
    return w + lr * step, m, v, step


def momentum_inputs(*shape: int, dtype: str = "float32") -> list[np.ndarray]:
    g, m, w = (normal(*shape, dtype=dtype) for _ in range(3))
    return [g, m, one(0.1, dtype), w, one(0.5, dtype), one(0.01, dtype)]


def adam_inputs(*shape: int, dtype: str = "float32") -> list[np.ndarray]:
    w, m, g = (normal(*shape, dtype=dtype) for _ in range(3))
    v, i = np.abs(normal(*shape, dtype=dtype)), np.array([3], "int64")
    return [w, m, v, g, one(-0.1, dtype), i, one(1.0, dtype), one(0.01, dtype)]


CASES = [
    OpCase(
        "FusedMomentumSGDUpdate",
        momentum_inputs(5, 7),
        {"momentum": 0.9},
        outputs=3,
        reference=momentum(0.9, False),
    ),
    OpCase(
        "FusedMomentumSGDUpdate",
        momentum_inputs(64, dtype="float64"),
        {"momentum": 0.9, "nesterov": 1},
        outputs=3,
        reference=momentum(0.9, True),
    ),
    OpCase("FusedAdam", adam_inputs(5, 7), outputs=3, reference=lambda *x: adam(*x)[:3], atol=1e-5),
    OpCase("FusedAdam", adam_inputs(40, dtype="float64"), outputs=4, reference=adam),
    OpCase(
        "FusedAdam",
        [*adam_inputs(5, 7)[:6], one(1.0, "float64"), one(1.0)],
        outputs=3,
        raises=(DataTypeError, "float64"),
    ),
    OpCase(
        "FusedMomentumSGDUpdate",
        [*momentum_inputs(3)[:5], normal(3)],
        outputs=3,
        raises=(ShapeError, "param_weight"),
    ),
]
