"""Table rows of convolutions and fully connected layers with what follows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, SchemaError, ShapeError
from tests.op_check import OpCase
from tests.operators.cases_convolution import convolve

rng = np.random.default_rng(29)
BIAS, ADD, RELU, SIGMOID = "bias", "add", "relu", "sigmoid"


def normal(*shape: int) -> np.ndarray:
    return np.asarray(rng.normal(0.1, 1.0, shape), np.float32)


def finished(
    epilogue: list[str], convolved: Callable[..., np.ndarray], last: bool = False
) -> Callable[..., np.ndarray]:
    """The convolution, then each word in turn."""

    def reference(x: np.ndarray, w: np.ndarray, *operands: np.ndarray) -> np.ndarray:
        y, left = convolved(x, w), list(operands)
        for word in epilogue:
            if word == BIAS:
                y = y + (left.pop(0) if last else left.pop(0).reshape(-1, *(1,) * (y.ndim - 2)))
            elif word == ADD:
                y = y + left.pop(0)
            else:
                y = np.maximum(y, 0) if word == RELU else 1 / (1 + np.exp(-y))
        return y

    return reference


def row(
    x: np.ndarray,
    w: np.ndarray,
    y: tuple[int, ...],
    epilogue: list[str],
    convolved: Callable[..., np.ndarray],
    **options: Any,
) -> OpCase:
    """A row; ``y`` is the shape of the output."""
    operands = [
        normal(w.shape[0]) if word == BIAS else normal(*y) for word in epilogue if word in (BIAS, ADD)
    ]
    args = {"epilogue": "+".join(epilogue), **options.pop("args", {})}
    kind = "half" if x.dtype == np.float16 else args.get("order", "")
    return OpCase(
        "FusedConv",
        [x, w, *(o.astype(x.dtype) for o in operands)],
        args,
        reference=finished(epilogue, convolved, last="order" in args),
        rtol=options.pop("rtol", 1e-4),
        atol=options.pop("atol", 1e-5),
        id=options.pop("id", "-".join(filter(None, ["+".join(epilogue), kind]))),
        # The tensor that is added, and the filters' bias, keep their sizes.
        empty=(0, len(operands) + 1) if ADD in epilogue else True,
        **options,
    )


X, W, Y = normal(2, 3, 5, 6), normal(4, 3, 3, 2), (2, 4, 3, 5)
PLAIN = convolve((1, 1), (0, 0), (0, 0))
LAST, LAST_FILTER = normal(2, 5, 4, 4), normal(6, 3, 2, 4)
EPILOGUES = [[BIAS], [RELU], [BIAS, RELU], [ADD], [BIAS, ADD], [ADD, RELU], [BIAS, ADD, RELU]]
FEATURES, WEIGHTS, B = normal(5, 7), normal(3, 7), normal(3)

CASES: list[OpCase] = [
    *(row(X, W, Y, epilogue, PLAIN) for epilogue in [*EPILOGUES, [SIGMOID], [BIAS, ADD, SIGMOID]]),
    *(
        row(
            LAST,
            LAST_FILTER,
            (2, 3, 3, 6),
            epilogue,
            convolve((1, 1), (0, 0), (0, 0), last=True),
            args={"order": "NHWC"},
        )
        for epilogue in ([BIAS, RELU], [BIAS, ADD, RELU], [ADD, SIGMOID])
    ),
    row(
        X.astype(np.float16),
        W.astype(np.float16),
        Y,
        [BIAS, ADD, RELU],
        PLAIN,
        rtol=1e-2,
        atol=1e-2,
    ),
    # The three ways of the NumPy kernel: rows of outputs, Winograd's tiles, blocks of groups.
    row(
        normal(4, 12, 16, 16),
        normal(24, 12, 3, 3),
        (4, 24, 16, 16),
        [BIAS, ADD, RELU],
        lambda x, w: blas(x, w),
        args={"pad": 1},
        id="rows",
    ),
    row(
        normal(6, 48, 13, 14),
        normal(48, 48, 3, 3),
        (6, 48, 13, 14),
        [ADD, RELU],
        lambda x, w: blas(x, w),
        args={"pad": 1},
        id="winograd",
        rtol=1e-3,
        atol=1e-4,
    ),
    row(
        normal(2, 4, 6, 5),
        normal(4, 2, 3, 3),
        (2, 4, 4, 3),
        [BIAS, ADD, RELU],
        convolve((1, 1), (0, 0), (0, 0), group=2),
        args={"group": 2},
        id="groups",
    ),
    row(
        normal(2, 3, 9),
        normal(4, 3, 3),
        (2, 4, 4),
        [BIAS, RELU],
        convolve((2,), (0,), (0,)),
        args={"strides": [2]},
        id="signal",
    ),
    OpCase(
        "FusedFC",
        [FEATURES, WEIGHTS, B],
        reference=lambda x, w, b: np.maximum(x @ w.T + b, 0),
        rtol=1e-4,
    ),
    OpCase(
        "FusedFC",
        [normal(2, 3, 4), normal(5, 12), normal(5)],
        {"epilogue": RELU},
        reference=lambda x, w, b: np.maximum(x.reshape(2, 12) @ w.T + b, 0),
        rtol=1e-4,
    ),
    OpCase(
        "FusedFCTransposed",
        [FEATURES, np.ascontiguousarray(WEIGHTS.T), B],
        reference=lambda x, w, b: np.maximum(x @ w + b, 0),
        rtol=1e-4,
    ),
    OpCase(
        "FusedConv",
        [X, W],
        {"epilogue": ""},
        raises=(ArgumentError, "wanted some of bias, add, relu, sigmoid"),
    ),
    OpCase("FusedConv", [X, W], {"epilogue": "relu+sigmoid"}, raises=(ArgumentError, "one activation")),
    OpCase("FusedConv", [X, W, B], {"epilogue": "relu+bias"}, raises=(ArgumentError, "in this order")),
    OpCase("FusedConv", [X, W], {"epilogue": "swish"}, raises=(ArgumentError, "'swish'")),
    OpCase("FusedConv", [X, W], {"epilogue": BIAS}, raises=(SchemaError, "wanted 3 for epilogue bias")),
    OpCase("FusedConv", [X, W], {"epilogue": RELU, "group": 0}, raises=(ArgumentError, "at least 1")),
    OpCase("FusedConv", [X, W, normal(3)], {"epilogue": BIAS}, raises=(ShapeError, "output channel")),
    OpCase("FusedConv", [X, W, normal(2, 4, 3, 4)], {"epilogue": ADD}, raises=(ShapeError, "that of Y")),
    OpCase(
        "FusedConv",
        [X, W, normal(*Y).astype(np.float64)],
        {"epilogue": ADD},
        raises=(DataTypeError, "float64"),
    ),
    OpCase("FusedFC", [FEATURES, WEIGHTS, B], {"epilogue": ADD}, raises=(ArgumentError, "one of 'relu'")),
]


def blas(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """A 3x3 convolution with padding 1, as nine products."""
    padded = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)])
    height, width = x.shape[2:]
    return sum(
        np.einsum("nchw,mc->nmhw", padded[:, :, i : i + height, j : j + width], w[:, :, i, j])
        for i in range(3)
        for j in range(3)
    )
