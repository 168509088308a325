"""Gradients of maxima over windows that do not overlap, against the plain definition."""

from __future__ import annotations

import numpy as np
import pytest

from gpunet import kernels
from gpunet.cpu_fallback import disjoint, lanes, threads
from gpunet.cpu_fallback.disjoint import plan_disjoint
from gpunet.definitions import make_operator
from gpunet.kernels import KernelContext
from gpunet.operator import Operator
from gpunet.operators.pooling import pooling_window
from gpunet.specs import spec
from tests.op_check import execute

#: Images and the window.
CASES = {
    "square": ((5, 3, 8, 10), (2, 2)),
    "tall": ((4, 2, 9, 5), (3, 1)),
    "wide": ((3, 4, 5, 12), (1, 4)),
    "whole": ((6, 5, 4, 6), (4, 6)),
    "line": ((4, 3, 12), (3,)),
    "space": ((3, 2, 4, 6, 8), (2, 3, 2)),
    "one": ((1, 1, 4, 4), (2, 2)),
}


def _operator(kernel: tuple[int, ...]) -> Operator:
    return Operator(
        make_operator("MaxPoolGradient", ["x", "y", "dy"], ["dx"], kernels=list(kernel), strides=list(kernel))
    )


def _arrays(image: tuple[int, ...], kernel: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    """X with ties, infinite values and signed zeros; Y; dY with infinite values; dX."""
    rng = np.random.default_rng(3)
    x = rng.integers(-4, 5, image).astype(dtype)
    x[x == 0] *= rng.choice([-1, 1], x[x == 0].shape)
    x.flat[::11] = np.inf
    split = [n for size, k in zip(image[2:], kernel, strict=True) for n in (size // k, k)]
    places = tuple(range(3, 3 + 2 * len(kernel), 2))
    y = x.reshape(*image[:2], *split).max(places)
    dy = rng.standard_normal(y.shape).astype(dtype)
    dy.flat[1::7] = -np.inf
    wide_y, wide_dy = y, dy
    for axis, k in enumerate(kernel, 2):
        wide_y, wide_dy = (a.repeat(k, axis) for a in (wide_y, wide_dy))
    return [x, y, dy, np.where(x == wide_y, wide_dy, 0)]


@pytest.mark.parametrize("block_bytes", [1, 300, 1 << 18])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("image", "kernel"), CASES.values(), ids=CASES)
def test_gradients(
    image: tuple[int, ...],
    kernel: tuple[int, ...],
    dtype: str,
    block_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(disjoint, "_BLOCK_BYTES", block_bytes)
    x, y, dy, wanted = _arrays(image, kernel, dtype)
    op = _operator(kernel)
    assert plan_disjoint(pooling_window(op, spec(x.shape, x.dtype)), *image[:2], x.dtype) is not None
    for count, work in (("1", 0), ("2", 0), ("2", lanes.THREAD_WORK)):
        monkeypatch.setattr(lanes, "THREAD_WORK", work)
        monkeypatch.setenv("OMP_NUM_THREADS", count)
        threads.thread_count.cache_clear()
        (found,) = execute(op.definition, [x, y, dy])
        np.testing.assert_array_equal(found, wanted)
    threads.thread_count.cache_clear()


def test_what_is_not_contiguous():
    """A part of larger tensors."""
    x, y, dy, wanted = _arrays((4, 3, 8, 6), (2, 2), "float32")
    op = _operator((2, 2))
    found = kernels.find(op, "cpu")
    specs = [spec(a.shape, a.dtype) for a in (x, y, dy)]
    scratch = tuple(np.zeros(s.shape, s.dtype) for s in found.scratch(op, specs, specs[:1]))
    dx = np.full((4, 3, 8, 12), 7, np.float32)
    inputs = tuple(a.repeat(2, -1)[..., ::2] for a in (x, y, dy))
    found.function(inputs, (dx[..., ::2],), op.args, KernelContext(op, scratch=scratch))()
    np.testing.assert_array_equal(dx[..., ::2], wanted)
    np.testing.assert_array_equal(dx[..., 1::2], 7)


@pytest.mark.parametrize(
    ("image", "args"),
    [
        ((2, 3, 9, 8), {"kernel": 2, "stride": 2}),
        ((2, 3, 9, 9), {"kernel": 3, "stride": 2}),
        ((2, 3, 8, 8), {"kernel": 2, "stride": 4}),
        ((2, 3, 8, 8), {"kernel": 2, "stride": 2, "pad": 1}),
        ((2, 8, 8, 3), {"kernel": 2, "stride": 2, "order": "NHWC"}),
    ],
    ids=["left-over", "overlapping", "gaps", "padded", "NHWC"],
)
def test_where_it_is_not_taken(image: tuple[int, ...], args: dict):
    op = Operator(make_operator("MaxPoolGradient", ["x", "y", "dy"], ["dx"], **args))
    window = pooling_window(op, spec(image, np.dtype("float32")))
    assert plan_disjoint(window, 2, 3, np.dtype("float32")) is None
