"""Cases of softmax and softmax with loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, KernelError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(13)


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def labels(classes: int, *shape: int, dtype: str = "int32") -> np.ndarray:
    return rng.integers(0, classes, shape).astype(dtype)


def distribution(*shape: int) -> np.ndarray:
    values = rng.uniform(0.1, 1.0, shape)
    return (values / values.sum(axis=-1, keepdims=True)).astype("float32")


def softmax(axis: int = 1) -> Any:
    def reference(x: np.ndarray) -> np.ndarray:
        rows = x.reshape(int(np.prod(x.shape[:axis])), int(np.prod(x.shape[axis:])))
        largest = [max(row) for row in rows]
        result = [
            [math.exp(v - m) / sum(math.exp(u - m) for u in row) for v in row]
            for row, m in zip(rows, largest, strict=True)
        ]
        return np.array(result).reshape(x.shape)

    return reference


def loss(axis: int = 1, scale: float = 1.0, by_batch: bool = False) -> Any:
    def reference(x: np.ndarray, label: np.ndarray, weight: np.ndarray | None = None) -> Any:
        p = softmax(axis)(x)
        rows = p.reshape(int(np.prod(x.shape[:axis])), int(np.prod(x.shape[axis:])))
        if label.dtype.kind == "f":
            wanted = label.reshape(rows.shape)
        else:
            wanted = np.eye(rows.shape[1])[label.reshape(-1)]
        weights = np.ones(len(rows)) if weight is None else weight.reshape(-1)
        losses = [
            -sum(t * math.log(q) for t, q in zip(*pair, strict=True) if t)
            for pair in zip(wanted, rows, strict=True)
        ]
        total = len(rows) if by_batch else weights.sum()
        return p, np.array(
            scale * sum(w * v for w, v in zip(weights, losses, strict=True)) / total if weights.sum() else 0.0
        )

    return reference


FIRST = (0,)
LOSS = (1,)


def loss_case(
    x: np.ndarray, label: np.ndarray, *more: np.ndarray, args: dict[str, Any] | None = None, **case: Any
) -> OpCase:
    """The gradient is of the loss, by the scores alone."""
    case = {"outputs": 2, "gradient": FIRST, "grad_outputs": LOSS, **case}
    return OpCase("SoftmaxWithLoss", [x, label, *more], args or {}, **case)


SOFTMAX_CASES = [
    OpCase("Softmax", [normal(4, 5)], reference=softmax()),
    OpCase("Softmax", [normal(2, 3, 4)], {"axis": 1}, reference=softmax(1)),
    OpCase("Softmax", [normal(2, 3, 4)], {"axis": -1}, reference=softmax(2)),
    OpCase(
        "Softmax", [normal(3)], {"axis": 0}, reference=softmax(0), empty=False
    ),  # a row without classes has no softmax
    OpCase("Softmax", [normal(2, 1)], reference=softmax()),
    OpCase(
        "Softmax", [normal(3, 7) * 1000], reference=softmax(), gradient=(), id="large"
    ),  # steps of 0 and 1: too steep to measure
    OpCase("Softmax", [normal(3, 7, dtype="float16")], reference=softmax()),
    OpCase(
        "Softmax",
        [normal(4)],
        raises=(ArgumentError, "argument 'axis' is 1, wanted -1 to 0 for 1 dimensions"),
    ),
    OpCase(
        "SoftmaxGradient",
        [normal(4, 5), normal(4, 6)],
        raises=(ShapeError, "input dY (float32 4x6) does not fit, wanted 4x5"),
    ),
]

X = normal(6, 5)
LABEL = labels(5, 6)
WEIGHT = rng.uniform(0.5, 2.0, 6).astype("float32")

LOSS_CASES = [
    loss_case(X, LABEL, reference=loss(), empty=(0, 1)),
    loss_case(X, labels(5, 6, 1, dtype="int64"), reference=loss(), empty=(0, 1)),
    loss_case(X, LABEL, WEIGHT, args={"scale": 0.5}, reference=loss(scale=0.5), empty=(0, 1, 2)),
    loss_case(
        X, LABEL, WEIGHT, args={"average_by_batch_size": 1}, reference=loss(by_batch=True), empty=(0, 1, 2)
    ),
    loss_case(X, LABEL, np.zeros(6, np.float32), reference=loss(), empty=(0, 1, 2), id="no weight"),
    loss_case(normal(2, 3, 4), labels(4, 2, 3), args={"axis": 2}, reference=loss(2), empty=(0, 1)),
    loss_case(normal(2, 3, 4), labels(12, 2), args={"scale": 3.0}, reference=loss(1, 3.0), empty=(0, 1)),
    loss_case(X, distribution(6, 5), args={"label_prob": 1}, reference=loss(), empty=(0, 1)),
    loss_case(
        X,
        distribution(6, 5),
        WEIGHT,
        args={"label_prob": 1, "scale": 2.0},
        reference=loss(1, 2.0),
        empty=(0, 1, 2),
    ),
    loss_case(
        normal(2, 3, 4),
        distribution(2, 3, 4),
        args={"label_prob": 1, "axis": 2},
        reference=loss(2),
        empty=(0, 1),
    ),
    loss_case(normal(6, 5, dtype="float16"), LABEL, reference=loss(), empty=(0, 1)),
    # A class of probability 0 in single precision still has a finite loss, from the logarithm (written out by
    # hand, for this very input).
    loss_case(
        np.array([[0, 200]], np.float32),
        np.array([0], np.int32),
        reference=lambda x, t: (np.array([[0.0, 1.0]]), np.array(200.0)),
        empty=False,
    ),
    loss_case(
        X,
        np.array([0, 1, 5, 2, 3, 4], np.int32),
        raises=(KernelError, "label 2 is 5, wanted 0 to 4 (5 classes)"),
    ),
    loss_case(
        X,
        np.array([0, 1, 4, 2, 3, -1], np.int64),
        raises=(KernelError, "label 5 is -1, wanted 0 to 4 (5 classes)"),
    ),
    loss_case(X, labels(5, 5), raises=(ShapeError, "has 5 elements, wanted 6 (one label an example)")),
    loss_case(X, distribution(6, 5), raises=(DataTypeError, "holds no class numbers")),
    loss_case(X, LABEL, args={"label_prob": 1}, raises=(DataTypeError, "wanted one type")),
    loss_case(X, LABEL, WEIGHT[:3], raises=(ShapeError, "wanted 6 (one weight an example)")),
    loss_case(
        X,
        np.full((6, 5), 0.3, np.float32),
        args={"label_prob": 1},
        raises=(KernelError, "of example 0 sum to 1.5, wanted 1"),
    ),
    loss_case(
        X[:1],
        np.array([[1.5, -0.5, 0, 0, 0]], np.float32),
        args={"label_prob": 1},
        raises=(KernelError, "of example 0, class 1 is negative"),
    ),
]

CASES = SOFTMAX_CASES + LOSS_CASES
