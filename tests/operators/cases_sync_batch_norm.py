"""Table rows of batch normalization over all ranks; here with one."""

from __future__ import annotations

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(33)
ONE = np.ones(1, np.float32)


def array(*shape: int, dtype: str = "float32") -> np.ndarray:
    return (rng.normal(size=shape) + 2).astype(dtype)


def axes(x: np.ndarray, order: str) -> tuple[int, ...]:
    channel = 1 if order == "NCHW" or x.ndim == 2 else x.ndim - 1
    return tuple(a for a in range(x.ndim) if a != channel)


def spread(values: np.ndarray, x: np.ndarray, order: str) -> np.ndarray:
    return np.expand_dims(values, axes(x, order))


def moments(x, order="NCHW"):
    over = axes(x, order)
    x = x.astype(np.float64)
    count = x.size / x.sum(over).size if x.size else 0
    return np.concatenate([x.sum(over), (x * x).sum(over), [count]])


def forward(x, scale, bias, mean, var, sums, weight, *, order="NCHW"):
    c, n = scale.size, sums[-1]
    batch = sums[:c] / n
    variance = sums[c:-1] / n - batch**2
    inv_std = 1 / np.sqrt(variance + 1e-5)
    y = spread(scale * inv_std, x, order) * (x - spread(batch, x, order)) + spread(bias, x, order)
    kept = 0.9 * mean + 0.1 * batch, 0.9 * var + 0.1 * variance * n / (n - 1)
    return y, *kept, batch, inv_std


def sums(x, dy, mean, inv_std, weight, *, order="NCHW"):
    over = axes(x, order)
    normal = (x - spread(mean, x, order)) * spread(inv_std, x, order)
    dbias, dscale = dy.sum(over), (dy * normal).sum(over)
    return dscale, dbias, np.concatenate([dbias, dscale]) * weight


def backward(x, scale, dy, mean, inv_std, moments, sums, weight, *, order="NCHW"):
    c, n = scale.size, moments[-1] * weight
    normal = (x - spread(mean, x, order)) * spread(inv_std, x, order)
    inner = dy - spread(sums[:c] / n, x, order) - normal * spread(sums[c:] / n, x, order)
    return spread(scale * inv_std, x, order) * inner


def forward_row(x: np.ndarray, order: str = "NCHW", dtype: str = "float32", **options) -> OpCase:
    c = moments(x, order).size // 2
    parameters = [array(c, dtype=dtype) for _ in range(4)]
    return OpCase(
        "SyncBatchNorm",
        [x, *parameters, moments(x, order), ONE],
        {"order": order},
        outputs=5,
        reference=lambda *inputs: forward(*inputs, order=order),
        gradient=(),  # by X through the moments too, which is checked over several operators
        empty=False,  # with the moments of other data
        rtol=2e-3 if x.dtype == np.float16 else 1e-4,
        atol=1e-2 if x.dtype == np.float16 else 1e-5,
        **options,
    )


def backward_rows(x: np.ndarray, order: str = "NCHW") -> list[OpCase]:
    c = moments(x, order).size // 2
    dy, mean, inv_std, half = array(*x.shape), array(c), array(c), ONE / 2
    return [
        OpCase(
            "BatchNormSums",
            [x, dy, mean, inv_std, half],
            {"order": order},
            outputs=3,
            reference=lambda *inputs: sums(*inputs, order=order),
            rtol=1e-4,
            atol=1e-4,
            empty=False,
        ),
        OpCase(
            "SyncBatchNormGradient",
            [x, array(c), dy, mean, inv_std, moments(x, order), array(2 * c, dtype="float64"), half],
            {"order": order},
            reference=lambda *inputs: backward(*inputs, order=order),
            rtol=1e-4,
            atol=1e-5,
            empty=False,
        ),
    ]


CASES = [
    # Devices add up in the type of the data, then in float64.
    OpCase("SyncBatchNormMoments", [array(3, 4, 5, 2)], reference=moments, rtol=2e-5),
    OpCase("SyncBatchNormMoments", [array(6, 3)], reference=moments, rtol=2e-5),
    OpCase("SyncBatchNormMoments", [array(600, 3)], reference=moments, rtol=2e-5),
    OpCase(
        "SyncBatchNormMoments",
        [array(3, 5, 4)],
        {"order": "NHWC"},
        reference=lambda x: moments(x, "NHWC"),
        rtol=2e-5,
        id="last",
    ),
    OpCase("SyncBatchNormMoments", [array(3, 4, 5, dtype="float64")], reference=moments, id="double"),
    OpCase(
        "SyncBatchNormMoments", [array(3, 4, 5, dtype="float16")], reference=moments, rtol=1e-3, id="half"
    ),
    OpCase("SyncBatchNormMoments", [array(3)], raises=(ShapeError, "at least 2")),
    forward_row(array(3, 4, 5, 2)),
    forward_row(array(8, 3)),
    forward_row(array(3, 5, 4), "NHWC"),
    forward_row(array(3, 4, 5, dtype="float64"), dtype="float64", id="double"),
    forward_row(array(3, 4, 5, dtype="float16"), id="half"),
    *backward_rows(array(3, 4, 5, 2)),
    *backward_rows(array(3, 5, 4), "NHWC"),
    OpCase(
        "BatchNormSums",
        [array(2, 3, dtype="float16"), array(2, 3), array(3), array(3), ONE],
        outputs=3,
        raises=(DataTypeError, "input dY (float32 2x3) differs in type from input X (float16 2x3)"),
    ),
    OpCase(
        "SyncBatchNormGradient",
        [
            array(2, 3, dtype="float16"),
            array(3),
            array(2, 3),
            array(3),
            array(3),
            np.ones(7),
            np.ones(6),
            ONE,
        ],
        raises=(DataTypeError, "input dY (float32 2x3) differs in type from input X (float16 2x3)"),
    ),
    OpCase(
        "SyncBatchNorm",
        [array(2, 3), *(array(3) for _ in range(4)), np.ones(7), ONE],
        {"epsilon": -1.0},
        outputs=5,
        raises=(ArgumentError, "'epsilon' is -1"),
    ),
    OpCase(
        "SyncBatchNorm",
        [array(2, 3, dtype="float64"), *(array(3) for _ in range(4)), np.ones(7), ONE],
        outputs=5,
        raises=(DataTypeError, "wanted float64"),
    ),
    OpCase(
        "SyncBatchNorm",
        [array(2, 3), *(array(3) for _ in range(4)), np.ones(6), ONE],
        outputs=5,
        raises=(ShapeError, "6 elements, wanted 7"),
    ),
]
