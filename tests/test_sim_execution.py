"""What kernels compute on the simulated device: barriers, shared memory, warps, atomics, numbers."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from tests.sim_kernels import Sim, needs_compiler

pytestmark = needs_compiler

ORDERS = pytest.mark.parametrize("order", ["forward", "reverse", "random"])
FULL = 0xFFFFFFFF


@ORDERS
@pytest.mark.parametrize("threads", [1, 2, 33, 256])
def test_shared_memory_and_barrier(order: str, threads: int) -> None:
    sim = Sim(order=order)
    x = np.arange(3 * threads, dtype="float32")
    y = sim.put(np.zeros_like(x), "y")
    sim.run("rotate", (sim.put(x, "x"), y), (3, threads))
    np.testing.assert_array_equal(y.numpy().reshape(3, -1), np.roll(x.reshape(3, -1), -1, axis=1))


@ORDERS
def test_dynamic_shared_memory_and_block_votes(order: str) -> None:
    sim = Sim(order=order, check_order=order == "forward")
    x = np.random.default_rng(0).integers(-3, 4, (4, 1024)).astype("float32")
    y, positive = sim.put(x, "y"), sim.put(np.zeros(4, "int32"), "positive")
    sim.run("tree", (y, positive), (4, 1024), shared=4096)
    np.testing.assert_array_equal(y.numpy()[:, 0], x.sum(axis=1))
    np.testing.assert_array_equal(positive.numpy(), 1000 + 1024 * (x.sum(axis=1) > 0))


def test_fresh_shared_memory_is_not_a_number_in_every_block() -> None:
    sim = Sim()
    y = sim.put(np.zeros(3, "float32"), "y")
    sim.run("unwritten", (y,), (3, 4))
    assert np.isnan(y.numpy()).all()


@ORDERS
def test_places_in_three_dimensions(order: str) -> None:
    sim = Sim(order=order)
    grid, block = (2, 3, 2), (4, 2, 3)
    y = sim.put(np.zeros(12 * 24, "int32"), "y")
    pointer = ctypes.c_void_p(y.pointer)
    params = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
    sim.function("place").launch(grid, block, 0, params, sim.backend.stream)
    expected = (1000 * np.arange(12)[:, None] + np.arange(24)).ravel()
    np.testing.assert_array_equal(y.numpy(), expected)


def shuffled(x: Any) -> list[Any]:
    lane = np.arange(32)
    up5 = np.where(lane < 5, lane, lane - 5)
    down7 = np.where(lane + 7 > 31, lane, lane + 7)
    segment = lane & ~7
    return [
        x[np.full(32, 3)],
        x[up5],
        x[down7],
        x[lane ^ 16],
        x[segment + 3],
        x[np.where(lane % 8 < 1, lane, lane - 1)],
        x[np.where(lane % 8 > 6, lane, lane + 1)],
        # A lane of a later segment is not read.
        x[np.where((lane ^ 9) // 8 > lane // 8, lane, lane ^ 9)],
    ]


@ORDERS
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_shuffles(order: str, dtype: str) -> None:
    sim = Sim(order=order)
    x = (np.arange(32) * 1_000_003 + 7).astype(dtype)
    y = sim.put(np.zeros(256, dtype), "y")
    sim.run("shuffles", (sim.put(x, "x"), y), (1, 32), types=(dtype,))
    np.testing.assert_array_equal(y.numpy().reshape(8, 32), shuffled(x))


@ORDERS
def test_shuffle_from_a_lane_that_is_not_there_is_not_a_number(order: str) -> None:
    sim = Sim(order=order)
    y = sim.put(np.zeros(256, "float32"), "y")
    sim.run("shuffles", (sim.put(np.ones(20, "float32"), "x"), y), (1, 20), types=("float32",))
    down = y.numpy().reshape(8, 32)[2, :20]
    np.testing.assert_array_equal(np.isnan(down), np.arange(20) + 7 >= 20)


@ORDERS
@pytest.mark.parametrize("x", [np.zeros(32), np.ones(32), np.arange(32) % 3], ids=["none", "all", "some"])
def test_votes(order: str, x: Any) -> None:
    sim = Sim(order=order)
    y = sim.put(np.zeros(160, "uint32"), "y")
    sim.run("votes", (sim.put(x.astype("int32"), "x"), y), (1, 32))
    ballot, some, every, match, halves = y.numpy().reshape(5, 32)

    def bits(values: Any) -> int:
        return sum(1 << i for i, value in enumerate(values) if value)

    assert (ballot == bits(x)).all()
    assert (some == x.any()).all()
    assert (every == x.all()).all()
    assert list(match) == [bits(x == value) for value in x]
    assert list(halves) == [bits(x[:16])] * 16 + [bits(np.r_[np.zeros(16), x[16:]])] * 16


@ORDERS
def test_block_reduction_does_not_depend_on_the_order(order: str) -> None:
    sim = Sim(order=order)
    x = np.random.default_rng(1).standard_normal((5, 256)).astype("float32")
    y, again = (sim.put(np.zeros(5, "float32"), name) for name in ("y", "again"))
    sim.run("sums", (sim.put(x, "x"), y), (5, 256))
    sim.backend.order = "forward"
    sim.backend.check_order = True
    sim.run("sums", (sim.put(x, "x"), again), (5, 256))
    np.testing.assert_array_equal(y.numpy(), again.numpy())
    np.testing.assert_allclose(y.numpy(), x.sum(axis=1), rtol=1e-5)


@ORDERS
def test_atomics(order: str) -> None:
    sim = Sim(order=order)
    i, u, w = np.zeros(5, "int32"), np.array([0, FULL, 0, 0], "uint32"), np.zeros(2, "uint64")
    names = ("i", "u", "w", "f", "d")
    buffers = [
        sim.put(a, n) for a, n in zip((i, u, w, np.zeros(1, "f4"), np.zeros(1, "f8")), names, strict=True)
    ]
    sim.run("atomics", tuple(buffers), (4, 50))
    t = np.arange(200)
    i, u, w, f, d = (b.numpy() for b in buffers)
    assert list(i) == [t.sum(), 199, -199, -200, 400]
    assert list(u) == [FULL, FULL & ~0xFF, np.bitwise_xor.reduce(t), 200 % 100]
    assert list(w) == [int(t.sum()) << 32, 199 << 40]
    assert (f[0], d[0]) == (200, 100)


def test_every_float16_to_float() -> None:
    sim = Sim()
    x = np.arange(65536, dtype=np.uint16).view(np.float16)
    y = sim.put(np.zeros(65536, "float32"), "y")
    sim.run("half_to_float", (sim.put(x, "x"), y, 65536), (16, 256))
    np.testing.assert_array_equal(y.numpy(), x.astype(np.float32))
    back = sim.put(np.zeros(65536, "float16"), "back")
    sim.run("float_to_half", (y, back, 65536), (16, 256))
    finite = ~np.isnan(x)
    np.testing.assert_array_equal(back.numpy().view(np.uint16)[finite], x.view(np.uint16)[finite])
    assert np.isnan(back.numpy()[~finite]).all()


def test_float_to_float16_rounds_to_nearest_even() -> None:
    """Every float16 value, the middle to the next one, and the neighbours of both."""
    sim = Sim()
    exact = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float32)
    exact[-1] = 65536
    middle = (exact[:-1] + exact[1:]) / 2
    x = np.concatenate([exact, middle])
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(0))])
    x = np.concatenate([x, -x, np.array([np.inf, -np.inf, 1e30, 1e-45, 3.4e38], "float32")])
    y = sim.put(np.zeros(x.size, "float16"), "y")
    sim.run("float_to_half", (sim.put(x, "x"), y, x.size), (64, 256))
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(y.numpy().view(np.uint16), expected.view(np.uint16))


def test_double_to_float16_rounds_once() -> None:
    sim = Sim()
    half = np.arange(0x7BFF, dtype=np.uint16).view(np.float16).astype(np.float64)
    middle = (half[:-1] + half[1:]) / 2
    x = np.concatenate([middle, middle * (1 + 1e-12), middle * (1 - 1e-12), -middle, half, [1e300, -1e-300]])
    y = sim.put(np.zeros(x.size, "float16"), "y")
    sim.run("double_to_half", (sim.put(x, "x"), y, x.size), (64, 256))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(y.numpy().view(np.uint16), x.astype(np.float16).view(np.uint16))


def test_float16_arithmetic_rounds_every_result() -> None:
    sim = Sim()
    bits = np.random.default_rng(2).integers(0, 65536, (2, 20000)).astype(np.uint16)
    x, y = bits.view(np.float16)
    z = sim.put(np.zeros((20000, 4), "float16"), "z")
    sim.run("half_sums", (sim.put(x, "x"), sim.put(y, "y"), z, 20000), (16, 256))
    with np.errstate(all="ignore"):
        expected = np.stack([x + y, x - y, x * y, x / y], axis=1)
    np.testing.assert_array_equal(z.numpy(), expected)


def test_bfloat16() -> None:
    sim = Sim()
    x = np.random.default_rng(3).integers(0, 2**32, 20000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate(
        [x[np.isfinite(x)], np.float32([0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8])]
    )
    y, back = sim.put(np.zeros(x.size, "uint16"), "y"), sim.put(np.zeros(x.size, "float32"), "back")
    sim.run("float_to_bfloat16", (sim.put(x, "x"), y, back, x.size), (16, 256))
    bits = x.view(np.uint32).astype(np.uint64)
    expected = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(y.numpy()[number], expected[number])
    np.testing.assert_array_equal(back.numpy().view(np.uint32), y.numpy().astype(np.uint32) << 16)
    assert np.isnan(back.numpy()[~number]).all()


def test_products_are_rounded_before_they_are_added() -> None:
    sim = Sim()
    x = np.random.default_rng(4).standard_normal(10000).astype("float32")
    y = sim.put(np.zeros((10000, 2), "float32"), "y")
    sim.run("multiply_add", (sim.put(x, "x"), y, x.size), (16, 256))
    exact = x.astype(np.float64)
    np.testing.assert_array_equal(y.numpy()[:, 0], x * x + -x)
    np.testing.assert_array_equal(y.numpy()[:, 1], (exact * exact - exact).astype(np.float32))


def test_intrinsics() -> None:
    sim = Sim()
    x = np.array([2, 0.5, 3, 2.5], "float32")
    y = sim.put(np.zeros(10, "float32"), "y")
    sim.run("intrinsics", (sim.put(x, "x"), y))
    expected = [
        2**-0.5,
        np.exp(0.5),
        np.log(3),
        1.25,
        np.nextafter(np.float32(2), np.float32(3)),
        2,
        2,
        3,
        2,
        8 + 31 / 64,
    ]
    np.testing.assert_allclose(y.numpy(), np.float32(expected), rtol=2e-7)


@pytest.mark.parametrize("numbers", [(3.0, 1.5, -2.5), (1.001, -0.333, 7.25)])
def test_intrinsics_of_half_types(numbers: tuple[float, float, float]) -> None:
    sim = Sim()
    x, y = np.array(numbers, "float32"), sim.put(np.zeros(30, "float32"), "y")
    sim.run("half_intrinsics", (sim.put(x, "x"), y), (1, 1))
    got = y.numpy()
    half = x.astype(np.float16).astype(np.float32)

    def expected(a: Any, b: Any, c: Any) -> list[float]:
        exact = [a + b, a - b, a * b, a / b, float(a) * float(b) + float(c), -abs(c), max(a, c), min(a, c)]
        compared = float(a < b) + 2 * float(a >= b) + 4
        return [*exact, compared, np.sqrt(a), np.exp(b), np.log(a), np.rint(c)]

    want = np.array(expected(*half))
    np.testing.assert_array_equal(got[:13], want.astype(np.float16).astype(np.float32))
    np.testing.assert_allclose(got[13:26], expected(*x), rtol=2**-6, atol=2**-6)
    a, c = half[:2].astype(np.float16), half[2].astype(np.float16)
    square = (a * a).astype(np.float64)
    pair = (a.astype(np.float64) * float(c) + square).astype(np.float16) + c
    np.testing.assert_array_equal(got[26:28], pair.astype(np.float32))
    np.testing.assert_allclose(got[28:], 2 * x[:2], rtol=2**-8)


def test_many_threads_and_barriers() -> None:
    """16,384 threads that meet 23 barriers each."""
    sim = Sim()
    x = np.ones((16, 1024), "float32")
    y, positive = sim.put(x, "y"), sim.put(np.zeros(16, "int32"), "positive")
    sim.run("tree", (y, positive), (16, 1024), shared=4096)
    assert (positive.numpy() == 2024).all()
