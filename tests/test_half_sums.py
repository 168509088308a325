"""Gradients in half types sum products and quotients that are not rounded: only the result is, once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpunet.cuda_kernels.sim import toolchain
from gpunet.dtypes import BFLOAT16, float_limits
from gpunet.gradient_check import run
from tests.op_check import make_operator

HALVES = [np.dtype(np.float16), *([] if BFLOAT16 is None else [BFLOAT16])]
DEVICES = [
    "cpu",
    pytest.param(
        "sim:0", marks=pytest.mark.skipif(toolchain.find() is None, reason=toolchain.MISSING), id="sim"
    ),
]
#: Operands that broadcast: rows, columns, scalars, in turns, in slices of sums.
SHAPES = [
    ((300, 40), (40,)),
    ((40,), (30, 40)),
    ((6, 7), (6, 1)),
    ((1,), (500,)),
    ((3, 1, 5, 1), (1, 4, 1, 6)),
    ((6, 70, 9), (1, 70, 1)),
    ((20_000, 1), (1, 3)),
]


def summed(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    padded = (1,) * (x.ndim - len(shape)) + shape
    axes = tuple(i for i, (m, n) in enumerate(zip(x.shape, padded, strict=True)) if m != n)
    return np.asarray(x.sum(axis=axes, keepdims=True)).reshape(shape)


def assert_rounded_once(got: np.ndarray, want: np.ndarray) -> None:
    """Off by half a unit in the last place, and by what sums in float32 lose."""
    assert got.shape == want.shape
    limit = 0.51 * float(float_limits(got.dtype).eps) * np.abs(want) + 1e-6 * np.abs(want).max()
    assert (np.abs(got.astype(np.float64) - want) <= limit).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
@pytest.mark.parametrize("type", ["AddGradient", "MulGradient", "DivGradient"])
def test_broadcast_operands(
    type: str, a: tuple[int, ...], b: tuple[int, ...], dtype: np.dtype, device: str
) -> None:
    rng = np.random.default_rng(3)
    full = np.broadcast_shapes(a, b)
    x, y = ((1 + rng.random(shape)).astype(dtype) for shape in (a, b))
    dc = (0.5 + rng.random(full)).astype(dtype)
    c = (x / y).astype(dtype)
    exact: dict[str, np.ndarray] = {
        name: v.astype(np.float64) for name, v in (("x", x), ("y", y), ("dc", dc), ("c", c))
    }
    quotient = exact["dc"] / exact["y"]
    da, db = {
        "AddGradient": (exact["dc"], exact["dc"]),
        "MulGradient": (exact["dc"] * exact["y"], exact["dc"] * exact["x"]),
        "DivGradient": (quotient, -quotient * exact["c"]),
    }[type]
    inputs: list[Any] = [dc, x, y, *([c] if type == "DivGradient" else [])]
    names = ["dc", "a", "b", "c"][: len(inputs)]
    in_place = [["dc", "db"]] if a == full and type != "AddGradient" else []
    for outputs in (["da", "db"], *in_place):
        got = run(make_operator(type, names, outputs), inputs, device)
        assert_rounded_once(got[0], summed(da, a))
        assert_rounded_once(got[1], summed(db, b))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("type", ["ConvGradient", "ConvTransposeGradient"])
def test_bias_of_a_convolution(type: str, dtype: np.dtype, device: str) -> None:
    rng = np.random.default_rng(4)
    x, w, dy = (rng.random(shape).astype(dtype) for shape in ((5, 3, 9, 9), (3, 3, 1, 1), (5, 3, 9, 9)))
    definition = make_operator(type, ["x", "w", "dy"], ["dw", "db", "dx"], kernel=1, engine="DIRECT")
    got = run(definition, [x, w, dy], device)
    assert_rounded_once(got[1], dy.astype(np.float64).sum(axis=(0, 2, 3)))
