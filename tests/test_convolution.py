"""Convolutions and pooling large enough for blocks and lanes, against the plain definitions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from gpunet.cpu_fallback import convolution, lanes, pooling, threads
from gpunet.cpu_fallback.tiles import plan_tiles
from gpunet.definitions import make_operator
from gpunet.operator import Operator
from tests.op_check import execute


class Case(NamedTuple):
    """Images (batch, channels, *space), filters (output channels, *kernel), steps and padding."""

    image: tuple[int, ...]
    filters: tuple[int, ...]
    stride: tuple[int, ...]
    pads: tuple[int, ...]
    dilation: tuple[int, ...]
    rows: bool
    tiles: bool
    winograd: bool = False
    phases: bool = False  #: of dX; those of Winograd go before, in float32


CASES = {
    "overlapping": Case((5, 8, 13, 14), (16, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), True, True),
    "steps": Case((4, 16, 21, 18), (24, 3, 3), (2, 2), (1, 1, 1, 1), (1, 1), True, True, phases=True),
    "uneven": Case((6, 12, 19, 16), (10, 5, 2), (1, 2), (3, 0, 1, 1), (1, 1), True, True, phases=True),
    "no-padding": Case((4, 10, 20, 19), (25, 5, 5), (1, 1), (0, 0, 0, 0), (1, 1), True, True),
    "dilated": Case((4, 8, 18, 17), (16, 3, 3), (1, 1), (2, 2, 2, 2), (2, 2), True, True),
    "apart": Case((9, 16, 32, 30), (32, 1, 1), (2, 2), (0, 0, 0, 0), (1, 1), True, True, phases=True),
    "pointwise": Case((8, 16, 24, 20), (32, 1, 1), (1, 1), (0, 0, 0, 0), (1, 1), False, True),
    "space": Case((4, 8, 7, 6, 9), (16, 2, 3, 3), (1, 1, 1), (1, 1, 1, 0, 1, 1), (1, 1, 1), True, True),
    "line": Case((16, 16, 64), (32, 5), (1,), (2, 2), (1,), False, True, phases=True),
    "deep": Case((3, 96, 9, 9), (64, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), False, True),
    "winograd": Case((8, 64, 12, 14), (64, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), True, True, True),
    "winograd-odd": Case((7, 72, 13, 17), (56, 3, 3), (1, 1), (2, 0, 1, 3), (1, 1), False, True, True),
    "winograd-wide": Case(
        (4, 48, 8, 51), (128, 3, 3), (1, 1), (0, 1, 0, 1), (1, 1), True, True, True, phases=True
    ),
    "winograd-many": Case((17, 160, 8, 7), (224, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), False, False, True),
    "wide-window": Case((6, 24, 12, 9), (40, 5, 5), (1, 1), (0, 0, 1, 2), (1, 1), True, True, phases=True),
    "space-steps": Case(
        (4, 16, 7, 6, 9), (32, 2, 3, 2), (2, 1, 3), (1, 0, 1, 0, 1, 1), (1, 1, 1), True, True, phases=True
    ),
    "wide-filters": Case((2, 300, 5, 5), (256, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), False, False),
}


def windows(case: Case, padded: np.ndarray) -> np.ndarray:
    """(image, channel, *output, *kernel) views of padded images."""
    extents = [d * (k - 1) + 1 for d, k in zip(case.dilation, case.filters[1:], strict=True)]
    axes = tuple(range(2, padded.ndim))
    found = np.lib.stride_tricks.sliding_window_view(padded, extents, axes, writeable=True)
    steps = tuple(slice(None, None, s) for s in case.stride)
    inner = tuple(slice(None, None, d) for d in case.dilation)
    return found[(slice(None), slice(None), *steps, *inner)]


def arrays(case: Case, dtype: str) -> list[np.ndarray]:
    """X, W, b, dY."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal(case.image)
    w = rng.standard_normal((case.filters[0], case.image[1], *case.filters[1:])) / 10
    b = rng.standard_normal(case.filters[0])
    (y,) = Operator(definition(case)).infer([_spec(a) for a in (x, w, b)])
    dy = rng.standard_normal(y.shape)
    return [a.astype(dtype) for a in (x, w, b, dy)]


def _spec(array: np.ndarray):
    from gpunet.specs import spec

    return spec(array.shape, array.dtype)


def definition(case: Case, gradient: bool = False):
    args = {
        "kernels": list(case.filters[1:]),
        "strides": list(case.stride),
        "pads": list(case.pads),
        "dilations": list(case.dilation),
    }
    if gradient:
        return make_operator("ConvGradient", ["x", "w", "dy"], ["dw", "db", "dx"], **args)
    return make_operator("Conv", ["x", "w", "b"], ["y"], **args)


def expected(case: Case, x: np.ndarray, w: np.ndarray, b: np.ndarray, dy: np.ndarray) -> list[np.ndarray]:
    """Y, dW, db, dX in float64."""
    x, w, b, dy = (a.astype(np.float64) for a in (x, w, b, dy))
    rank = len(case.stride)
    pads = list(zip(case.pads[:rank], case.pads[rank:], strict=True))
    padded = np.pad(x, [(0, 0), (0, 0), *pads])
    cut = windows(case, padded)
    outputs, kernel = "ijk"[:rank], "uvw"[:rank]
    y = np.einsum(f"nc{outputs}{kernel},mc{kernel}->nm{outputs}", cut, w, optimize=True)
    dw = np.einsum(f"nc{outputs}{kernel},nm{outputs}->mc{kernel}", cut, dy, optimize=True)
    spread = np.zeros_like(padded)
    parts = np.einsum(f"nm{outputs},mc{kernel}->nc{outputs}{kernel}", dy, w, optimize=True)
    for at in np.ndindex(*case.filters[1:]):
        windows(case, spread)[(..., *at)] += parts[(..., *at)]
    inside = tuple(slice(head, head + n) for (head, _), n in zip(pads, x.shape[2:], strict=True))
    bias = b.reshape(-1, *(1,) * rank)
    return [y + bias, dw, dy.sum(axis=(0, *range(2, dy.ndim))), spread[(..., *inside)]]


def compute(case: Case, x: np.ndarray, w: np.ndarray, b: np.ndarray, dy: np.ndarray) -> list[np.ndarray]:
    return [*execute(definition(case), [x, w, b]), *execute(definition(case, gradient=True), [x, w, dy])]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 3e-6), ("float16", 2e-3)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values(case: Case, dtype: str, tolerance: float):
    inputs = arrays(case, dtype)
    for found, wanted in zip(compute(case, *inputs), expected(case, *inputs), strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("name", ["winograd", "steps", "deep"])
def test_gradients_may_be_left_out(name: str):
    case = CASES[name]
    x, w, b, dy = arrays(case, "float32")
    _, dw, db, dx = expected(case, x, w, b, dy)
    for outputs, no_bias, wanted in (
        (["dw", "db"], 0, [dw, db]),
        (["dw", "dx"], 1, [dw, dx]),
        (["dw"], 1, [dw]),
    ):
        op = definition(case, gradient=True)
        op.output[:] = outputs
        op.arg.add(name="no_bias", i=no_bias)
        for found, value in zip(execute(op, [x, w, dy]), wanted, strict=True):
            np.testing.assert_allclose(found, value, rtol=3e-6, atol=3e-6 * np.abs(value).max())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_paths_are_taken(case: Case):
    x, w, _, _ = arrays(case, "float32")
    args = Operator(definition(case)).args
    assert (convolution._rows(args, x, w) is not None) == case.rows
    layout = convolution._layout(args, x, w)
    assert (plan_tiles(layout) is not None) == case.tiles
    assert (convolution._backward_phases(layout) is not None) == case.phases
    for find in (convolution._winograd, convolution._backward_winograd):
        assert (find(layout, x.dtype) is not None) == case.winograd


def assert_same_bits_of_threads(case: Case, monkeypatch: pytest.MonkeyPatch):
    """One thread and two give the same bits."""
    inputs = arrays(case, "float32")
    results = []
    monkeypatch.setattr(lanes, "THREAD_WORK", 0)
    for count in ("1", "2"):
        monkeypatch.setenv("OMP_NUM_THREADS", count)
        threads.thread_count.cache_clear()
        results.append(compute(case, *inputs))
    threads.thread_count.cache_clear()
    for alone, shared in zip(*results, strict=True):
        np.testing.assert_array_equal(alone, shared)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_threads_do_not_change_a_bit(case: Case, monkeypatch: pytest.MonkeyPatch):
    assert_same_bits_of_threads(case, monkeypatch)


@pytest.mark.parametrize(
    ("image", "filters"), [((64, 1, 28, 28), (20, 5, 5)), ((64, 20, 12, 12), (50, 5, 5))], ids=["1", "20"]
)
def test_scratch_is_no_larger_than_the_tensors(image: tuple[int, ...], filters: tuple[int, ...]):
    case = Case(image, filters, (1, 1), (0, 0, 0, 0), (1, 1), True, True)
    x, w, b, dy = (_spec(a) for a in arrays(case, "float32"))
    forward = convolution.forward_scratch(Operator(definition(case)), [x, w, b], [dy])
    backward = convolution._gradient_scratch(Operator(definition(case, True)), [x, w, dy], [w, b, x])
    for wanted, tensors in ((forward, (x, w, dy)), (backward, (x, w, dy, w, x))):
        assert 0 < sum(s.nbytes for s in wanted) < sum(s.nbytes for s in tensors)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize(
    ("kernel", "stride", "pads"),
    [
        ((2, 2), (2, 2), (0, 0, 0, 0)),
        ((3, 3), (2, 2), (1, 1, 1, 1)),
        ((3, 2), (1, 3), (2, 0, 1, 1)),
        ((5, 5), (2, 1), (0, 2, 1, 2)),
        ((1, 2), (3, 3), (0, 0, 0, 0)),
        ((13, 14), (1, 1), (0, 0, 0, 0)),
    ],
)
@pytest.mark.parametrize("phase_bytes", [1, 3000, 1 << 16])
def test_gradients_of_maxima_over_blocks(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    pads: tuple[int, ...],
    order: str,
    phase_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
):
    """Blocks of channels, of images and of all; with ties, and with infinite values and gradients."""
    monkeypatch.setattr(pooling, "PHASE_BYTES", phase_bytes)
    rng = np.random.default_rng(2)
    x = rng.integers(0, 9, (5, 3, 13, 14)).astype(np.float32)
    x[1, :, 3:5, 2] = np.inf
    padded = np.pad(x, [(0, 0), (0, 0), pads[::2], pads[1::2]], constant_values=-np.inf)
    axes = (2, 3)
    cut = np.lib.stride_tricks.sliding_window_view(padded, kernel, axes)[:, :, :: stride[0], :: stride[1]]
    y = cut.max((-2, -1))
    dy = rng.standard_normal(y.shape).astype(np.float32)
    dy[0, 1, 0, 0] = np.inf
    spread = np.zeros_like(padded)
    for at in np.ndindex(*kernel):
        into = np.lib.stride_tricks.sliding_window_view(spread, kernel, axes, writeable=True)
        np.add.at(into[:, :, :: stride[0], :: stride[1]], (..., *at), np.where(cut[(..., *at)] == y, dy, 0))
    wanted = spread[:, :, pads[0] : pads[0] + 13, pads[1] : pads[1] + 14]
    args = {"kernels": list(kernel), "strides": list(stride), "pads": list(pads), "order": order}
    definition = make_operator("MaxPoolGradient", ["x", "y", "dy"], ["dx"], **args)
    inputs = [x, y, dy]
    if order == "NHWC":
        inputs = [np.ascontiguousarray(np.moveaxis(a, 1, -1)) for a in inputs]
        wanted = np.moveaxis(wanted, 1, -1)
    (found,) = execute(definition, inputs)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-5)


def test_an_error_in_a_lane_is_raised():
    def fail() -> None:
        raise ValueError("lane")

    for work in (0, lanes.THREAD_WORK):
        with pytest.raises(ValueError, match="lane"):
            lanes.run_lanes([lambda: None, fail], work)
