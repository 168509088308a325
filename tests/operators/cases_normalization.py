"""Cases of LRN and batch normalization."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, SchemaError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(12)


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def positive(*shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.uniform(0.5, 2.0, shape).astype(dtype)


def lrn(size: int, alpha: float, beta: float, bias: float = 1.0, axis: int = 1, outputs: int = 2) -> Any:
    def reference(x: np.ndarray) -> Any:
        scale = np.empty_like(x)
        channels = x.shape[axis]
        for c in range(channels):
            window = [k for k in range(c - (size - 1) // 2, c + size // 2 + 1) if 0 <= k < channels]
            squares = sum(np.take(x, k, axis) ** 2 for k in window)
            scale[(slice(None),) * axis + (c,)] = bias + alpha / size * squares
        return [x / scale**beta, scale][:outputs]

    return reference


def lrn_case(
    shape: tuple[int, ...], size: int, alpha: float, beta: float, order: str = "NCHW", **more: Any
) -> OpCase:
    args = {"size": size, "alpha": alpha, "beta": beta, "order": order, **more.pop("args", {})}
    outputs = more.setdefault("outputs", 2)
    x = normal(*shape, dtype=more.pop("dtype", "float32"))
    axis = 1 if order == "NCHW" else 3
    return OpCase(
        "LRN", [x], args, reference=lrn(size, alpha, beta, args.get("bias", 1.0), axis, outputs), **more
    )


LRN_CASES = [
    lrn_case((2, 6, 3, 4), 5, 0.5, 0.75),
    lrn_case((2, 6, 3, 4), 3, 0.5, 0.75, outputs=1),
    lrn_case((2, 3, 4, 7), 5, 1.5, 0.5, "NHWC", args={"bias": 2.0}),
    lrn_case((1, 3, 1, 2), 1, 1.0, 1.0),
    lrn_case((2, 2, 3, 1), 7, 1.0, 0.75),
    lrn_case((2, 5, 2, 2), 4, 1.0, 0.75),
    lrn_case((2, 1, 1, 6), 2, 1.0, 0.75, "NHWC"),
    lrn_case((2, 6, 3, 4), 5, 0.5, 0.75, dtype="float16"),
    OpCase(
        "LRN",
        [normal(2, 6, 3)],
        {"size": 3, "alpha": 1.0, "beta": 1.0},
        raises=(ShapeError, "has 3 dimensions, wanted 4"),
    ),
    OpCase(
        "LRN",
        [normal(2, 6, 3, 3)],
        {"alpha": 1.0, "beta": 1.0},
        raises=(ArgumentError, "argument 'size' is 0"),
    ),
    OpCase(
        "LRN",
        [normal(2, 6, 3, 3)],
        {"size": 3, "order": "CHWN"},
        raises=(ArgumentError, "'CHWN', wanted one of 'NCHW', 'NHWC'"),
    ),
]


def channels_first(x: np.ndarray, order: str) -> np.ndarray:
    """C x everything else."""
    moved = np.moveaxis(x, 1 if order == "NCHW" else -1, 0)
    return moved.reshape(moved.shape[0], int(np.prod(moved.shape[1:])))


def along(values: np.ndarray, x: np.ndarray, order: str) -> np.ndarray:
    return values.reshape((1, -1) + (1,) * (x.ndim - 2)) if order == "NCHW" else values


def bn_train(order: str = "NCHW", epsilon: float = 1e-5, momentum: float = 0.9, num_batches: int = 1) -> Any:
    def reference(
        x: np.ndarray,
        scale: np.ndarray,
        bias: np.ndarray,
        mean: np.ndarray,
        var: np.ndarray,
        *sums: np.ndarray,
    ) -> Any:
        rows = channels_first(x, order)
        n = rows.shape[1] * num_batches
        if n == 0:
            return [x, mean, var, np.zeros_like(mean), np.zeros_like(var)]
        if num_batches == 1:
            batch_mean = np.array([row.sum() / n for row in rows])
            batch_var = np.array(
                [((row - m) ** 2).sum() / n for row, m in zip(rows, batch_mean, strict=True)]
            )
        else:
            batch_mean, batch_var = sums[0] / n, sums[1] / n - (sums[0] / n) ** 2
        inv_std = (batch_var + epsilon) ** -0.5
        y = (x - along(batch_mean, x, order)) * along(inv_std, x, order) * along(scale, x, order) + along(
            bias, x, order
        )
        unbiased = batch_var * n / (n - 1) if n > 1 else batch_var * np.inf
        return [
            y,
            momentum * mean + (1 - momentum) * batch_mean,
            momentum * var + (1 - momentum) * unbiased,
            batch_mean,
            inv_std,
        ]

    return reference


def bn_test(order: str = "NCHW", epsilon: float = 1e-5) -> Any:
    def reference(
        x: np.ndarray,
        scale: np.ndarray,
        bias: np.ndarray,
        mean: np.ndarray,
        var: np.ndarray,
        *sums: np.ndarray,
    ) -> Any:
        std = np.sqrt(along(var, x, order) + epsilon)
        return along(scale, x, order) * (x - along(mean, x, order)) / std + along(bias, x, order)

    return reference


def bn_inputs(
    shape: tuple[int, ...],
    order: str = "NCHW",
    offset: float = 0.0,
    dtype: str = "float32",
    parameters: str = "",
) -> list[np.ndarray]:
    channels = shape[1] if order == "NCHW" else shape[-1]
    p = parameters or dtype
    x = (normal(*shape) + offset).astype(dtype)
    return [
        x,
        positive(channels, dtype=p),
        normal(channels, dtype=p),
        normal(channels, dtype=p),
        positive(channels, dtype=p),
    ]


def bn_batches(shape: tuple[int, ...], order: str, num_batches: int) -> list[np.ndarray]:
    inputs = bn_inputs(shape, order)
    rows = np.concatenate([channels_first(normal(*shape), order) for _ in range(num_batches)], axis=1)
    return [*inputs, rows.sum(axis=1), (rows**2).sum(axis=1)]


TRAIN = {"is_test": 0}
TEST = {"is_test": 1}
DIFFERENTIABLE = (0, 1, 2)

BN_CASES = [
    OpCase(
        "SpatialBN", bn_inputs((4, 3, 5, 2)), TRAIN, outputs=5, reference=bn_train(), gradient=DIFFERENTIABLE
    ),
    OpCase(
        "SpatialBN",
        bn_inputs((3, 4, 2, 5), "NHWC"),
        {"order": "NHWC", "epsilon": 1e-3, "momentum": 0.6, **TRAIN},
        outputs=5,
        reference=bn_train("NHWC", 1e-3, 0.6),
        gradient=DIFFERENTIABLE,
    ),
    OpCase(
        "SpatialBN",
        bn_inputs((2, 3, 2, 2, 3)),
        TRAIN,
        outputs=5,
        reference=bn_train(),
        gradient=DIFFERENTIABLE,
    ),
    OpCase(
        "SpatialBN", bn_inputs((2, 4, 3)), TRAIN, outputs=5, reference=bn_train(), gradient=DIFFERENTIABLE
    ),
    OpCase("SpatialBN", bn_inputs((7, 4)), TRAIN, outputs=5, reference=bn_train(), gradient=DIFFERENTIABLE),
    OpCase(
        "SpatialBN",
        bn_inputs((7, 4), "NHWC"),
        {"order": "NHWC", **TRAIN},
        outputs=5,
        reference=bn_train("NHWC"),
        gradient=DIFFERENTIABLE,
    ),
    OpCase(
        "SpatialBN", bn_inputs((5, 3, 1, 1)), TRAIN, outputs=5, reference=bn_train(), gradient=DIFFERENTIABLE
    ),
    # One element a channel: the variance is 0, the unbiased one infinite, and no gradient can be measured.
    OpCase(
        "SpatialBN",
        bn_inputs((1, 3, 1, 1)),
        {"epsilon": 0.5, **TRAIN},
        outputs=5,
        reference=bn_train(epsilon=0.5),
        gradient=(),
    ),
    # A mean far above the deviation: the variance must not be the difference of two large numbers.
    OpCase(
        "SpatialBN",
        bn_inputs((4, 3, 5, 2), offset=1000.0),
        TRAIN,
        outputs=5,
        reference=bn_train(),
        rtol=1e-3,
        atol=1e-3,
        gradient=(),
        id="far from zero",
    ),
    OpCase(
        "SpatialBN",
        bn_inputs((4, 3, 5, 2), dtype="float16", parameters="float32"),
        TRAIN,
        outputs=5,
        reference=bn_train(),
        rtol=1e-4,
        atol=2e-3,
        gradient=DIFFERENTIABLE,
        id="half with single parameters",
    ),
    OpCase(
        "SpatialBN",
        bn_inputs((4, 3, 5, 2), dtype="float16"),
        TRAIN,
        outputs=5,
        reference=bn_train(),
        gradient=DIFFERENTIABLE,
        id="half",
    ),
    # The gradient operator takes blobs that only the gradients of the other batches make.
    OpCase(
        "SpatialBN",
        bn_batches((3, 2, 4, 3), "NCHW", 3),
        {"num_batches": 3, **TRAIN},
        outputs=5,
        reference=bn_train(num_batches=3),
        gradient=(),
        id="batches",
    ),
    OpCase(
        "SpatialBN",
        bn_batches((3, 4, 3, 2), "NHWC", 2),
        {"num_batches": 2, "order": "NHWC", **TRAIN},
        outputs=5,
        reference=bn_train("NHWC", num_batches=2),
        gradient=(),
        id="batches NHWC",
    ),
    # At test Caffe2's gradient takes the running statistics as if they were the saved ones: it is not the
    # derivative.
    OpCase("SpatialBN", bn_inputs((4, 3, 5, 2)), TEST, reference=bn_test(), gradient=()),
    OpCase(
        "SpatialBN",
        bn_inputs((3, 4, 2, 5), "NHWC"),
        {"order": "NHWC", "epsilon": 1e-2, **TEST},
        reference=bn_test("NHWC", 1e-2),
        gradient=(),
    ),
    OpCase("SpatialBN", bn_inputs((7, 4)), TEST, reference=bn_test(), gradient=()),
    OpCase(
        "SpatialBN",
        bn_inputs((4, 3, 5, 2), dtype="float16", parameters="float32"),
        TEST,
        reference=bn_test(),
        gradient=(),
    ),
    OpCase(
        "SpatialBN",
        bn_inputs((4, 3, 5, 2)),
        TEST,
        outputs=5,
        raises=(SchemaError, "has 5 outputs with is_test=1, wanted 1 to test"),
    ),
    OpCase(
        "SpatialBN",
        bn_inputs((4, 3, 5, 2)),
        TRAIN,
        outputs=1,
        raises=(SchemaError, "has 1 outputs with is_test=0, wanted 5 to train"),
    ),
    OpCase(
        "SpatialBN",
        bn_inputs((4, 3, 5, 2)),
        {"num_batches": 2, **TRAIN},
        outputs=5,
        raises=(SchemaError, "wanted 7"),
    ),
    OpCase(
        "SpatialBN",
        bn_inputs((4, 3, 5, 2)),
        {"num_batches": 0, **TRAIN},
        outputs=5,
        raises=(ArgumentError, "'num_batches' is 0"),
    ),
    OpCase(
        "SpatialBN",
        [normal(4, 3, 2), *(normal(2) for _ in range(4))],
        TEST,
        raises=(ShapeError, "one for each of the 3 channels of X"),
    ),
    OpCase(
        "SpatialBN",
        [normal(4), *(normal(4) for _ in range(4))],
        TEST,
        raises=(ShapeError, "has 1 dimensions, wanted at least 2"),
    ),
    OpCase(
        "SpatialBN",
        [normal(4, 3, 2, dtype="float64"), *(normal(3) for _ in range(4))],
        TEST,
        raises=(DataTypeError, "wanted float64"),
    ),
    OpCase(
        "SpatialBNGradient",
        [normal(4, 3, 2), normal(3), normal(4, 3, 1), normal(3), normal(3)],
        outputs=3,
        raises=(ShapeError, "input dY (float32 4x3x1) does not fit, wanted 4x3x2"),
    ),
]

CASES = LRN_CASES + BN_CASES
