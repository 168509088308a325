"""Table rows of the operators that passes add."""

from __future__ import annotations

import numpy as np

from gpunet.errors import ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(77)


def normal(*shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def statistics(channels: int) -> list[np.ndarray]:
    return [normal(channels), normal(channels), normal(channels), np.abs(normal(channels)) + 0.5]


def fold(w, scale, bias, mean, var, b=None, epsilon=1e-5):
    """Channel by channel, from what the two operators do to the output of one filter."""
    folded_w, folded_b = np.zeros_like(w), np.zeros_like(scale)
    for c in range(len(scale)):
        deviation = (var[c] + epsilon) ** 0.5
        folded_w[c] = scale[c] * w[c] / deviation
        folded_b[c] = scale[c] * ((0.0 if b is None else b[c]) - mean[c]) / deviation + bias[c]
    return folded_w, folded_b


CASES = [
    OpCase("FoldBatchNorm", [normal(4, 3, 3, 3), *statistics(4)], outputs=2, reference=fold, empty=False),
    OpCase(
        "FoldBatchNorm", [normal(1, 2, 5), *statistics(1), normal(1)], outputs=2, reference=fold, empty=False
    ),
    OpCase(
        "FoldBatchNorm",
        [normal(7, 1, 1, 2), *statistics(7), normal(7)],
        {"epsilon": 0.5},
        outputs=2,
        reference=lambda *x: fold(*x, epsilon=0.5),
        # Emptying W alone would leave the statistics without channels.
        empty=False,
    ),
    OpCase(
        "FoldBatchNorm",
        [normal(4, 3, 3, 3), *statistics(3)],
        outputs=2,
        raises=(ShapeError, "wanted 4 (one number an output channel of W)"),
    ),
]
