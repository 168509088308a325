"""Cases of losses and metrics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, KernelError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(14)


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def probabilities(*shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.uniform(0.05, 0.95, shape).astype(dtype)


def labels(classes: int, *shape: int, dtype: str = "int32") -> np.ndarray:
    return rng.integers(0, classes, shape).astype(dtype)


def rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(1, -1) if x.ndim < 2 else x.reshape(x.shape[0], int(np.prod(x.shape[1:])))


def label_cross_entropy(x: np.ndarray, label: np.ndarray) -> np.ndarray:
    return np.array(
        [-math.log(max(row[k], 1e-20)) for row, k in zip(rows(x), label.reshape(-1), strict=True)]
    )


def cross_entropy(x: np.ndarray, label: np.ndarray) -> np.ndarray:
    pairs = zip(rows(x), rows(label), strict=True)
    return np.array([-sum(t * math.log(max(p, 1e-20)) for p, t in zip(*pair, strict=True)) for pair in pairs])


def average(x: np.ndarray) -> np.ndarray:
    return np.array(sum(x.reshape(-1).tolist()) / x.size if x.size else 0.0)


def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.array(
        [
            0.5 * np.linalg.norm(np.ravel(a - b)) ** 2
            for a, b in zip(np.atleast_1d(x), np.atleast_1d(y), strict=True)
        ]
    )


def sigmoid_loss(kind: str = "") -> Any:
    def one(x: float, t: float) -> float:
        p = 1 / (1 + math.exp(-x))
        if kind == "log_D_trick":
            return -(2 * t - 1) * math.log(p)
        if kind == "unjoined_lr_loss":
            return -(t * x + (1 - t) * math.log(1 - p))
        return -(t * math.log(p) + (1 - t) * math.log(1 - p))

    return lambda x, t: np.vectorize(one, otypes=[float])(x, t).sum(axis=-1) / x.shape[-1]


def accuracy(top_k: int = 1) -> Any:
    def reference(x: np.ndarray, label: np.ndarray) -> np.ndarray:
        best = [sorted(range(len(row)), key=lambda j, row=row: (-row[j], j))[:top_k] for row in x]
        return np.array(sum(k in b for k, b in zip(label, best, strict=True)) / len(x))

    return reference


FIRST = (0,)

ENTROPY_CASES = [
    OpCase(
        "LabelCrossEntropy", [probabilities(4, 5), labels(5, 4)], reference=label_cross_entropy, empty=(0, 1)
    ),
    OpCase(
        "LabelCrossEntropy",
        [probabilities(3, 2), labels(2, 3, 1, dtype="int64")],
        reference=label_cross_entropy,
        empty=(0, 1),
    ),
    OpCase(
        "LabelCrossEntropy",
        [probabilities(3, 2, 2), labels(4, 3)],
        reference=label_cross_entropy,
        empty=(0, 1),
    ),
    OpCase(
        "LabelCrossEntropy", [probabilities(4), labels(4, 1)], reference=label_cross_entropy, empty=False
    ),  # a vector is one example
    OpCase(
        "LabelCrossEntropy",
        [probabilities(4, 5, dtype="float16"), labels(5, 4)],
        reference=label_cross_entropy,
        empty=(0, 1),
    ),
    # Below the smallest probability the loss is flat.
    OpCase(
        "LabelCrossEntropy",
        [np.zeros((1, 2), np.float32), labels(2, 1)],
        reference=label_cross_entropy,
        gradient=(),
        empty=(0, 1),
    ),
    OpCase(
        "LabelCrossEntropy",
        [probabilities(4, 5), np.array([0, 4, 7, 1], np.int32)],
        raises=(KernelError, "label 2 is 7, wanted 0 to 4 (5 classes)"),
    ),
    OpCase("LabelCrossEntropy", [probabilities(4, 5), labels(5, 3)], raises=(ShapeError, "wanted 4 or 4x1")),
    OpCase("LabelCrossEntropy", [probabilities(4, 5), normal(4)], raises=(DataTypeError, "input label")),
    OpCase("LabelCrossEntropy", [probabilities(), labels(5, 1)], raises=(ShapeError, "has 0 dimensions")),
    OpCase(
        "CrossEntropy", [probabilities(4, 5), probabilities(4, 5)], reference=cross_entropy, gradient=FIRST
    ),
    OpCase(
        "CrossEntropy",
        [probabilities(3, 2, 2), probabilities(3, 2, 2)],
        reference=cross_entropy,
        gradient=FIRST,
    ),
    OpCase(
        "CrossEntropy", [probabilities(1, 1), probabilities(1, 1)], reference=cross_entropy, gradient=FIRST
    ),
    OpCase(
        "CrossEntropy",
        [probabilities(4, 5, dtype="float16"), probabilities(4, 5, dtype="float16")],
        reference=cross_entropy,
        gradient=FIRST,
    ),
    OpCase(
        "CrossEntropy",
        [probabilities(4, 5), probabilities(4, 6)],
        raises=(ShapeError, "input label (float32 4x6) does not fit, wanted 4x5"),
    ),
    OpCase(
        "CrossEntropyGradient",
        [probabilities(4, 5), probabilities(4, 5), normal(3)],
        raises=(ShapeError, "wanted 4 (one loss an example)"),
    ),
]

OTHER_CASES = [
    OpCase("AveragedLoss", [normal(7)], reference=average),
    OpCase("AveragedLoss", [normal(3, 1, 5)], reference=average),
    OpCase("AveragedLoss", [np.array(2.5, np.float32)], reference=average),
    OpCase("AveragedLoss", [normal(6, 5, dtype="float16")], reference=average),
    OpCase("AveragedLoss", [labels(5, 4)], raises=(DataTypeError, "input X")),
    OpCase("AveragedLossGradient", [normal(4), normal(2)], raises=(ShapeError, "has 2 elements, wanted 1")),
    OpCase("SquaredL2Distance", [normal(4, 5), normal(4, 5)], reference=distance),
    OpCase("SquaredL2Distance", [normal(3, 2, 4), normal(3, 2, 4)], reference=distance),
    OpCase("SquaredL2Distance", [normal(6), normal(6)], reference=distance),
    OpCase("SquaredL2Distance", [np.array(2.5, np.float32), np.array(1.0, np.float32)], reference=distance),
    OpCase(
        "SquaredL2Distance",
        [normal(4, 5, dtype="float16"), normal(4, 5, dtype="float16")],
        reference=distance,
    ),
    OpCase(
        "SquaredL2Distance",
        [normal(4, 5), normal(5, 4)],
        raises=(ShapeError, "input Y (float32 5x4) does not fit, wanted 4x5"),
    ),
    OpCase(
        "SigmoidCrossEntropyWithLogits",
        [normal(4, 5), probabilities(4, 5)],
        reference=sigmoid_loss(),
        gradient=FIRST,
    ),
    OpCase(
        "SigmoidCrossEntropyWithLogits",
        [normal(2, 3, 4), probabilities(2, 3, 4)],
        {"log_D_trick": 1},
        reference=sigmoid_loss("log_D_trick"),
        gradient=FIRST,
    ),
    OpCase(
        "SigmoidCrossEntropyWithLogits",
        [normal(4, 5), probabilities(4, 5)],
        {"unjoined_lr_loss": 1},
        reference=sigmoid_loss("unjoined_lr_loss"),
        gradient=FIRST,
    ),
    # Without elements there is nothing to average.
    OpCase(
        "SigmoidCrossEntropyWithLogits",
        [normal(5), probabilities(5)],
        reference=sigmoid_loss(),
        gradient=FIRST,
        empty=False,
    ),
    OpCase(
        "SigmoidCrossEntropyWithLogits",
        [normal(3, 4, dtype="float16"), probabilities(3, 4, dtype="float16")],
        reference=sigmoid_loss(),
        gradient=FIRST,
    ),
    # The exponential of such a score does not exist in single precision, and the derivative is 0 or 1.
    OpCase(
        "SigmoidCrossEntropyWithLogits",
        [np.array([[300.0, -300.0, -600.0]], np.float32), np.array([[0, 1, 1]], np.float32)],
        reference=lambda x, t: np.full(len(x), 400.0),
        gradient=FIRST,
    ),
    OpCase(
        "SigmoidCrossEntropyWithLogits",
        [normal(4, 5), probabilities(4, 1)],
        raises=(ShapeError, "input targets"),
    ),
    OpCase(
        "SigmoidCrossEntropyWithLogits",
        [normal(4, 5), probabilities(4, 5)],
        {"log_D_trick": 1, "unjoined_lr_loss": 1},
        raises=(ArgumentError, "are both set"),
    ),
    OpCase(
        "SigmoidCrossEntropyWithLogitsGradient",
        [normal(3), normal(4, 5), probabilities(4, 5)],
        raises=(ShapeError, "input dY (float32 3)"),
    ),
]

ACCURACY_CASES = [
    OpCase("Accuracy", [normal(20, 5), labels(5, 20)], reference=accuracy(), empty=(0, 1)),
    OpCase(
        "Accuracy",
        [normal(20, 5), labels(5, 20, dtype="int64")],
        {"top_k": 2},
        reference=accuracy(2),
        empty=(0, 1),
    ),
    OpCase("Accuracy", [normal(7, 3), labels(3, 7)], {"top_k": 5}, reference=accuracy(5), empty=(0, 1)),
    # Many equal scores: the lower class is the better one.
    OpCase(
        "Accuracy",
        [labels(2, 30, 4).astype("float32"), labels(4, 30)],
        {"top_k": 2},
        reference=accuracy(2),
        empty=(0, 1),
    ),
    OpCase("Accuracy", [normal(9, 4, dtype="float16"), labels(4, 9)], reference=accuracy(), empty=(0, 1)),
    OpCase(
        "Accuracy",
        [normal(2, 5), np.array([0, -3], np.int32)],
        raises=(KernelError, "label 1 is -3, wanted 0 to 4 (5 classes)"),
    ),
    OpCase(
        "Accuracy",
        [normal(2, 5), labels(5, 3)],
        raises=(ShapeError, "input labels (int32 3) does not fit, wanted 2"),
    ),
    OpCase("Accuracy", [normal(2, 5, 1), labels(5, 2)], raises=(ShapeError, "has 3 dimensions, wanted 2")),
    OpCase(
        "Accuracy",
        [normal(2, 5), labels(5, 2)],
        {"top_k": 0},
        raises=(ArgumentError, "argument 'top_k' is 0"),
    ),
]

CASES = ENTROPY_CASES + OTHER_CASES + ACCURACY_CASES
