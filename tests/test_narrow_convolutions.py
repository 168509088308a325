"""Convolutions with few elements in a window, gradients of those on narrow images and without steps."""

from __future__ import annotations

import numpy as np
import pytest

from gpunet.cpu_fallback import convolution, direct, mirrored, taps
from gpunet.definitions import make_operator
from gpunet.operator import Operator
from tests.op_check import execute
from tests.test_convolution import (
    Case,
    arrays,
    assert_same_bits_of_threads,
    definition,
    expected,
)

#: Images, filters, steps, padding, dilation; the last two numbers are about paths that are tested elsewhere.
DIRECT = {
    "plain": Case((5, 1, 14, 13), (20, 5, 5), (1, 1), (0, 0, 0, 0), (1, 1), True, True),
    "padded": Case((7, 3, 16, 9), (16, 3, 3), (1, 1), (1, 0, 1, 2), (1, 1), True, True),
    "steps": Case((4, 2, 19, 17), (12, 3, 2), (2, 1), (0, 0, 0, 0), (1, 1), True, True),
    "dilated": Case((3, 2, 19, 18), (12, 3, 3), (1, 2), (0, 0, 0, 0), (2, 1), True, True),
    "apart": Case((9, 16, 22, 14), (24, 1, 1), (2, 2), (0, 0, 0, 0), (1, 1), True, True),
    "pointwise": Case((8, 16, 12, 11), (32, 1, 1), (1, 1), (0, 0, 0, 0), (1, 1), False, True),
    "one": Case((1, 2, 9, 9), (8, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), False, True),
    "space": Case((2, 1, 7, 6, 9), (16, 2, 3, 3), (1, 1, 1), (1, 1, 1, 0, 1, 1), (1, 1, 1), True, True),
    "line": Case((3, 3, 64), (32, 5), (1,), (2, 2), (1,), False, True),
}


@pytest.mark.parametrize("block_bytes", [1, 1 << 19])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 3e-6)])
@pytest.mark.parametrize("case", DIRECT.values(), ids=DIRECT)
def test_values(case: Case, dtype: str, tolerance: float, block_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(direct, "_BLOCK_BYTES", block_bytes)
    inputs = arrays(case, dtype)
    x, w, b, _ = inputs
    layout = convolution._layout(Operator(definition(case)).args, x, w)
    plan = direct.plan_direct(layout, x.dtype)
    assert plan is not None
    assert (plan.images == 1) == (block_bytes == 1 or len(x) < 3)
    (wanted, *_) = expected(case, *inputs)
    unbiased = wanted - b.reshape(-1, *(1,) * (x.ndim - 2))
    for operands, values in (((x, w, b), wanted), ((x, w), unbiased)):
        op = definition(case)
        op.input[:] = op.input[: len(operands)]
        (found,) = execute(op, list(operands))
        np.testing.assert_allclose(found, values, rtol=tolerance, atol=tolerance * np.abs(values).max())


@pytest.mark.parametrize("block_bytes", [1, 60_000, direct._GRADIENT_BYTES])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 3e-6)])
@pytest.mark.parametrize("name", [name for name in DIRECT if name not in ("one", "pointwise")])
def test_gradients_image_by_image(
    name: str, dtype: str, tolerance: float, block_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(direct, "_GRADIENT_BYTES", block_bytes)
    x, w, b, dy = arrays(DIRECT[name], dtype)
    layout = convolution._layout(Operator(definition(DIRECT[name])).args, x, w)
    assert isinstance(convolution._backward(layout, x.dtype, has_data=True).whole, direct.DirectPlan)
    _check_gradients(DIRECT[name], [x, w, b, dy], tolerance)


def test_what_is_not_contiguous():
    """Images, outputs and their gradients that are part of larger tensors."""
    for case in (DIRECT["pointwise"], DIRECT["padded"]):
        x, w, b, dy = arrays(case, "float32")
        wide, target = np.repeat(x, 2, axis=-1), np.full((*dy.shape[:-1], 2 * dy.shape[-1]), 7, np.float32)
        layout = convolution._layout(Operator(definition(case)).args, x, w)
        plan = direct.plan_direct(layout, x.dtype)
        scratch = [np.full(s.shape, np.nan, s.dtype) for s in plan.scratch()]
        direct.bind_direct(plan, wide[..., ::2], w, b, target[..., ::2], scratch)()
        wanted = expected(case, x, w, b, dy)[0]
        np.testing.assert_allclose(target[..., ::2], wanted, rtol=3e-6, atol=3e-6 * np.abs(wanted).max())
        np.testing.assert_array_equal(target[..., 1::2], 7)
    plan = direct.plan_direct_gradient(layout, x.dtype)
    scratch = [np.full(s.shape, np.nan, s.dtype) for s in plan.gradient_scratch()]
    dw, db, dx = np.empty_like(w), np.empty_like(b), np.full_like(wide, 7)
    apart = np.repeat(dy, 2, axis=-1)[..., ::2]
    direct.bind_direct_gradient(plan, wide[..., ::2], w, apart, dw, db, dx[..., ::2], scratch)()
    for found, value in zip((dw, db, dx[..., ::2]), expected(case, x, w, b, dy)[1:], strict=True):
        np.testing.assert_allclose(found, value, rtol=3e-6, atol=3e-6 * np.abs(value).max())
    np.testing.assert_array_equal(dx[..., 1::2], 7)


def test_where_it_is_not_taken():
    """Deep windows, small images, groups and the order NHWC are left to other ways."""
    for image, filters, args in (
        ((4, 16, 16, 16), (16, 16, 3, 3), {"kernel": 3}),
        ((4, 1, 6, 6), (16, 1, 3, 3), {"kernel": 3}),
        ((4, 4, 16, 16), (16, 2, 1, 1), {"kernel": 1, "group": 2}),
        ((4, 16, 16, 4), (16, 1, 1, 4), {"kernel": 1, "order": "NHWC"}),
    ):
        op = Operator(make_operator("Conv", ["x", "w"], ["y"], **args))
        x, w = np.zeros(image, np.float32), np.zeros(filters, np.float32)
        assert direct.plan_direct(convolution._layout(op.args, x, w), x.dtype) is None


#: Those whose gradients are made by rows of the window, with dX or without it.
TAPS = {
    "wide-window": Case((7, 20, 12, 11), (25, 5, 5), (1, 1), (0, 0, 0, 0), (1, 1), True, True),
    "steps": Case((13, 16, 9, 8), (32, 3, 3), (2, 2), (1, 0, 1, 1), (1, 1), True, True),
    "uneven": Case((6, 12, 19, 10), (20, 5, 2), (3, 1), (3, 0, 1, 1), (1, 1), True, True),
    "gaps": Case((25, 24, 13, 12), (32, 2, 2), (3, 3), (0, 0, 0, 0), (1, 1), True, True),
    "left-over": Case((16, 24, 12, 12), (32, 3, 3), (2, 4), (0, 0, 0, 0), (1, 1), True, True),
    "dilated": Case((8, 20, 11, 12), (24, 5, 3), (2, 3), (2, 2, 2, 2), (1, 2), True, True),
    "space": Case((5, 8, 7, 6, 9), (24, 3, 3, 4), (1, 2, 1), (1, 1, 1, 0, 1, 1), (1, 1, 1), True, True),
    "line": Case((32, 48, 12), (40, 5), (1,), (2, 2), (1,), False, True),
}


#: Those whose gradients are made from the columns of dY.
MIRRORED = {
    "padded": Case((7, 12, 13, 15), (16, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), True, True),
    "uneven": Case((5, 16, 14, 13), (24, 5, 2), (1, 1), (1, 1, 3, 0), (1, 1), True, True),
    "dilated": Case((4, 8, 18, 17), (20, 3, 3), (1, 1), (2, 1, 2, 2), (2, 2), True, True),
    "space": Case((4, 8, 7, 6, 9), (16, 3, 3, 3), (1, 1, 1), (1, 1, 1, 1, 1, 1), (1, 1, 1), True, True),
    "small": Case((67, 24, 4, 5), (16, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), True, True),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 3e-6), ("float16", 2e-3)])
@pytest.mark.parametrize("case", MIRRORED.values(), ids=MIRRORED)
def test_gradients_from_the_columns_of_dy(case: Case, dtype: str, tolerance: float):
    inputs = arrays(case, dtype)
    layout = convolution._layout(Operator(definition(case)).args, *inputs[:2])
    assert isinstance(
        convolution._backward(layout, inputs[0].dtype, has_data=True).whole, mirrored.MirroredPlan
    )
    _check_gradients(case, inputs, tolerance)


#: Those that are made by rows, of narrow images with the image last.
TURNED = {name: {**TAPS, **MIRRORED}[name] for name in ("wide-window", "steps", "gaps", "left-over", "small")}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 3e-6), ("float16", 2e-3)])
@pytest.mark.parametrize("case", TURNED.values(), ids=TURNED)
def test_rows_of_narrow_images(case: Case, dtype: str, tolerance: float):
    inputs = arrays(case, dtype)
    plan = convolution._rows(Operator(definition(case)).args, *inputs[:2])
    assert plan is not None
    assert plan.turned
    (found,), (wanted, *_) = execute(definition(case), inputs[:3]), expected(case, *inputs)
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


def _scratch(case: Case, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> int:
    """Elements of scratch."""
    found = convolution._gradient_scratch(Operator(definition(case, gradient=True)), inputs, outputs)
    return sum(s.size for s in found)


@pytest.mark.parametrize("block_bytes", [1, 1 << 17, taps._BLOCK_BYTES])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 3e-6), ("float16", 2e-3)])
@pytest.mark.parametrize("case", TAPS.values(), ids=TAPS)
def test_gradients_of_narrow_images(
    case: Case, dtype: str, tolerance: float, block_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(taps, "_BLOCK_BYTES", block_bytes)
    x, w, b, dy = arrays(case, dtype)
    layout = convolution._layout(Operator(definition(case)).args, x, w)
    assert isinstance(convolution._backward(layout, x.dtype, has_data=True).whole, taps.TapPlan)
    assert _scratch(case, [x, w, dy], [w, b, x]) <= 2 * (2 * x.size + 2 * w.size + dy.size)
    _check_gradients(case, [x, w, b, dy], tolerance)


def _check_gradients(case: Case, inputs: list[np.ndarray], tolerance: float) -> None:
    """All gradients, and those of filters with the bias and alone."""
    x, w, b, dy = inputs
    op = definition(case, gradient=True)
    _, *wanted = expected(case, x, w, b, dy)
    for found, value in zip(execute(op, [x, w, dy]), wanted, strict=True):
        assert found.dtype == x.dtype
        np.testing.assert_allclose(found, value, rtol=tolerance, atol=tolerance * np.abs(value).max())
    for outputs, no_bias, values in ((["dw", "db"], 0, wanted[:2]), (["dw"], 1, wanted[:1])):
        op.output[:] = outputs
        del op.arg[:]
        op.arg.extend(definition(case, gradient=True).arg)
        op.arg.add(name="no_bias", i=no_bias)
        for found, value in zip(execute(op, [x, w, dy]), values, strict=True):
            np.testing.assert_allclose(found, value, rtol=tolerance, atol=tolerance * np.abs(value).max())


@pytest.mark.parametrize(
    "case", [*DIRECT.values(), *TAPS.values(), *MIRRORED.values()], ids=[*DIRECT, *TAPS, *MIRRORED]
)
def test_threads_do_not_change_a_bit(case: Case, monkeypatch: pytest.MonkeyPatch):
    assert_same_bits_of_threads(case, monkeypatch)
