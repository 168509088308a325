"""Table rows of the LAMB update."""

from __future__ import annotations

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(34)


def lamb(w, m, v, g, lr, iteration, *, beta1=0.9, beta2=0.999, epsilon=1e-6, weight_decay=0.0):
    t = max(1, int(iteration.ravel()[0]))
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    u = m / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + epsilon) + weight_decay * w
    norm, length = np.linalg.norm(w), np.linalg.norm(u)
    ratio = norm / length if norm and length else 1.0
    return w + lr.ravel()[0] * ratio * u, m, v


def row(
    *shape: int, iteration: int, dtype: str = "float32", w: float = 1.0, g: float = 1.0, **args
) -> OpCase:
    def normal(scale: float) -> np.ndarray:
        return (scale * rng.normal(size=shape)).astype(dtype)

    return OpCase(
        "Lamb",
        [
            normal(w),
            normal(g),
            np.abs(normal(g)),
            normal(g),
            np.array([-0.01], np.float32),
            np.array([iteration], np.int64),
        ],
        args,
        outputs=3,
        reference=lambda *inputs: lamb(*inputs, **args),
        rtol=1e-4,
        empty=(0, 1, 2, 3),
        id=f"{'x'.join(map(str, shape))}-{iteration}-{dtype}-{w:g}-{g:g}",
    )


CASES = [
    row(7, 300, iteration=1),
    row(7, 300, iteration=9, weight_decay=0.1, beta1=0.8, beta2=0.95, epsilon=0.01),
    row(5, iteration=0),
    row(40_000, iteration=3, dtype="float64", weight_decay=0.01),
    # Where a norm is 0 the ratio is 1.
    row(5, iteration=3, w=0.0),
    row(5, iteration=3, g=0.0),
    OpCase(
        "Lamb",
        [np.ones(3, np.float32)] * 4 + [np.ones(1, np.float32), np.ones(1, np.int64)],
        {"weight_decay": -1.0},
        outputs=3,
        raises=(ArgumentError, "'weight_decay' is -1"),
    ),
    OpCase(
        "Lamb",
        [np.ones(3, np.float32)] * 5 + [np.ones(1, np.int64)],
        outputs=3,
        raises=(ShapeError, "wanted 1"),
    ),
    OpCase(
        "Lamb",
        [np.ones(3, np.float32)] * 4 + [np.ones(1, np.float32), np.ones(1, np.float32)],
        outputs=3,
        raises=(DataTypeError, "input iter"),
    ),
]
