"""The random generator: published vectors, the documented mapping from words to values, statistics."""

from __future__ import annotations

import math
import zlib

import numpy as np
import pytest

from gpunet import philox
from gpunet.dtypes import bfloat16, float_limits
from gpunet.errors import ArgumentError, DataTypeError

KEY = {"seed": 0x299F31D0_A4093822, "operator": 77, "step": 5}


def words(count: int) -> np.ndarray:
    return philox.raw(KEY["seed"], KEY["operator"], KEY["step"], count)


def numbers(count: int) -> list[int]:
    w = words(2 * count).tolist()
    return [w[2 * i] + (w[2 * i + 1] << 32) for i in range(count)]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_published_vectors(counter, key, expected):
    """The known answers of Philox 4x32-10 that its authors publish with Random123."""
    block = counter[0] | counter[1] << 32
    got = philox.raw(key[0] | key[1] << 32, counter[2], counter[3], 4, offset=4 * block)
    assert tuple(got.tolist()) == expected


def reference_block(counter: list[int], key: list[int]) -> list[int]:
    """The paper's definition on Python integers."""
    for _ in range(10):
        p0, p1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        low = 0xFFFFFFFF
        counter = [(p1 >> 32) ^ counter[1] ^ key[0], p1 & low, (p0 >> 32) ^ counter[3] ^ key[1], p0 & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter


def test_words_are_those_of_the_definition():
    seed, operator, step, first = 0x0123456789ABCDEF, 0xDEADBEEF, 41, 3
    got = philox.raw(seed, operator, step, 40, offset=4 * first)
    want = [
        word
        for block in range(first, first + 10)
        for word in reference_block([block, 0, operator, step], [seed & 0xFFFFFFFF, seed >> 32])
    ]
    assert got.dtype == np.uint32
    assert got.tolist() == want


def test_block_number_carries_into_the_second_counter_word():
    edge = 1 << 32
    got = philox.raw(9, 8, 7, 16, offset=4 * (edge - 2))
    want = [
        word
        for block in range(edge - 2, edge + 2)
        for word in reference_block([block & 0xFFFFFFFF, block >> 32, 8, 7], [9, 0])
    ]
    assert got.tolist() == want


@pytest.mark.parametrize(
    ("offset", "count"), [(0, 1), (1, 2), (3, 9), (65535, 3), (65530, 70000), (5, 0), (140000, 7)]
)
def test_any_part_of_a_draw_has_the_same_words(offset, count):
    whole = philox.raw(1, 2, 3, 150_000)
    np.testing.assert_array_equal(philox.raw(1, 2, 3, count, offset), whole[offset : offset + count])


def test_seed_operator_and_step_each_change_the_words():
    keys = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (1 + (1 << 32), 2, 3)]
    assert len({philox.raw(*key, 4).tobytes() for key in keys}) == len(keys)


def test_wide_arguments_are_taken_modulo_their_field():
    np.testing.assert_array_equal(philox.raw(-1, -1, -1, 4), philox.raw(2**64 - 1, 2**32 - 1, 2**32 - 1, 4))


def test_raw_refuses_negative_ranges():
    with pytest.raises(ArgumentError, match="count -1"):
        philox.raw(0, 0, 0, -1)
    with pytest.raises(ArgumentError, match="offset -4"):
        philox.raw(0, 0, 0, 1, offset=-4)


FILLS = [
    pytest.param(np.float16, lambda out: philox.uniform(out, -1, 2, **KEY), id="uniform-float16"),
    pytest.param(bfloat16(), lambda out: philox.uniform(out, -1, 2, **KEY), id="uniform-bfloat16"),
    pytest.param(np.float32, lambda out: philox.uniform(out, -1, 2, **KEY), id="uniform-float32"),
    pytest.param(np.float64, lambda out: philox.uniform(out, -1, 2, **KEY), id="uniform-float64"),
    pytest.param(np.float16, lambda out: philox.normal(out, 1, 2, **KEY), id="normal-float16"),
    pytest.param(bfloat16(), lambda out: philox.normal(out, 1, 2, **KEY), id="normal-bfloat16"),
    pytest.param(np.float32, lambda out: philox.normal(out, 1, 2, **KEY), id="normal-float32"),
    pytest.param(np.float64, lambda out: philox.normal(out, 1, 2, **KEY), id="normal-float64"),
    pytest.param(np.int32, lambda out: philox.integers(out, -5, 900, **KEY), id="integers-int32"),
    pytest.param(np.int64, lambda out: philox.integers(out, -5, 1 << 40, **KEY), id="integers-int64"),
    pytest.param(np.bool_, lambda out: philox.bernoulli(out, 0.3, **KEY), id="bernoulli"),
]


@pytest.mark.parametrize(("dtype", "fill"), FILLS)
def test_a_shorter_draw_is_the_start_of_a_longer_one(dtype, fill):
    whole = np.zeros(140_001, dtype)
    fill(whole)
    for count in (1, 2, 3, 4, 5, 32768, 32769, 65537):
        part = np.zeros(count, dtype)
        fill(part)
        np.testing.assert_array_equal(part, whole[:count])


@pytest.mark.parametrize(("dtype", "fill"), FILLS)
def test_shape_and_strides_do_not_matter(dtype, fill):
    plain = np.zeros(300 * 251, dtype)
    fill(plain)
    want = plain.reshape(300, 251)
    shaped = np.zeros((300, 251), dtype)
    transposed = np.zeros((251, 300), dtype).T
    spaced = np.zeros((600, 753), dtype)
    for out in (shaped, transposed, spaced[::2, ::3]):
        fill(out)
        np.testing.assert_array_equal(out, want)
    assert not spaced[1::2].any()
    scalar = np.zeros((), dtype)
    fill(scalar)
    assert scalar == plain[0]
    fill(np.zeros((0, 3), dtype))


@pytest.mark.parametrize(("dtype", "fill"), FILLS)
def test_read_only_output_is_refused(dtype, fill):
    out = np.zeros(3, dtype)
    out.flags.writeable = False
    with pytest.raises(ArgumentError, match="read-only"):
        fill(out)


def test_uniform_follows_the_mapping():
    single, double = np.empty(5, np.float32), np.empty(5, np.float64)
    philox.uniform(single, 0, 1, **KEY)
    philox.uniform(double, 0, 1, **KEY)
    assert single.tolist() == [(int(w) >> 8) / 2**24 for w in words(5)]
    assert double.tolist() == [(v >> 11) / 2**53 for v in numbers(5)]


@pytest.mark.parametrize("dtype", [np.float16, bfloat16().type, np.float32])
def test_uniform_never_reaches_its_upper_bound(dtype):
    """[1, 1 + 4 eps) has four values, and the plain formula rounds an eighth of the draws up to the bound."""
    low, step = dtype(1), float_limits(np.dtype(dtype)).eps
    high = low + dtype(4) * step
    out = np.empty(4000, dtype)
    philox.uniform(out, float(low), float(high), **KEY)
    assert set(out.tolist()) == {float(low + dtype(i) * step) for i in range(4)}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 3), (10, 10.5), (-1000, -999)])
def test_uniform_distribution(dtype, low, high):
    out = np.empty(40_000, dtype)
    philox.uniform(out, low, high, **KEY)
    wide = np.sort((out.astype(np.float64) - low) / (high - low))
    assert wide[0] >= 0
    assert out.max() < high
    # Kolmogorov-Smirnov at significance 0.001, plus the largest step between two numbers of the type.
    distance = np.abs(wide - (np.arange(out.size) + 0.5) / out.size).max()
    step = float(np.spacing(dtype(max(abs(low), abs(high))))) / (high - low)
    assert distance < 1.95 / math.sqrt(out.size) + step


def test_uniform_of_an_empty_interval_is_constant():
    out = np.empty(10, np.float32)
    philox.uniform(out, 2.5, 2.5, **KEY)
    assert (out == 2.5).all()


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        (np.float32, 1, 0),
        (np.float32, 0, math.inf),
        (np.float32, math.nan, 1),
        (np.float16, 0, 1e6),
        (np.float64, -1.7e308, 1.7e308),
    ],
)
def test_uniform_refuses_bad_bounds(dtype, low, high):
    with pytest.raises(ArgumentError, match="must be finite"):
        philox.uniform(np.empty(3, dtype), low, high, **KEY)


def box_muller(u1: float, u2: float) -> tuple[float, float]:
    radius = math.sqrt(-2 * math.log(u1))
    return radius * math.cos(2 * math.pi * u2), radius * math.sin(2 * math.pi * u2)


def test_normal_follows_the_mapping():
    w, v = words(6).tolist(), numbers(6)
    single, double = np.empty(5, np.float32), np.empty(5, np.float64)
    philox.normal(single, 0, 1, **KEY)
    philox.normal(double, 0, 1, **KEY)
    want32 = [z for p in range(3) for z in box_muller((w[2 * p] + 1) / 2**32, w[2 * p + 1] / 2**32)]
    v53 = [x >> 11 for x in v]
    want64 = [z for p in range(3) for z in box_muller((v53[2 * p] + 1) / 2**53, v53[2 * p + 1] / 2**53)]
    np.testing.assert_allclose(single, want32[:5], rtol=1.2e-7)
    np.testing.assert_allclose(double, want64[:5], rtol=1e-13)


def test_normal_in_its_far_tail_follows_the_mapping():
    """Word 9138 of this draw is only 113: in the tail the 1 that keeps u1 above 0 shows in the value."""
    key = {"seed": 1, "operator": 2, "step": 646}
    w = philox.raw(**key, count=2, offset=9138).tolist()
    assert w[0] == 113
    out = np.empty(9140, np.float32)
    philox.normal(out, 0, 1, **key)
    np.testing.assert_allclose(out[-2:], box_muller(114 / 2**32, w[1] / 2**32), rtol=1.2e-7)


def test_bfloat16_is_float32_rounded():
    for draw, limits in ((philox.normal, (3.0, 0.5)), (philox.uniform, (-2.0, 6.0))):
        single, narrow = np.empty(10_000, np.float32), np.empty(10_000, bfloat16())
        draw(single, *limits, **KEY)
        draw(narrow, *limits, **KEY)
        rounded = single.astype(bfloat16())
        if draw is philox.uniform:  # 6 itself is not in the interval
            rounded = np.minimum(rounded, np.nextafter(bfloat16().type(6), bfloat16().type(0)))
        np.testing.assert_array_equal(narrow, rounded)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_normal_distribution(dtype):
    out = np.empty(100_000, dtype)
    philox.normal(out, 3.0, 0.5, **KEY)
    z = (out.astype(np.float64) - 3.0) / 0.5
    # Five standard errors of each moment.
    error = 5 / math.sqrt(z.size)
    assert abs(z.mean()) < error
    assert abs((z**2).mean() - 1) < error * math.sqrt(2)
    assert abs((z**3).mean()) < error * math.sqrt(15)
    assert abs((z**4).mean() - 3) < error * math.sqrt(96)
    assert abs(np.corrcoef(z[0::2], z[1::2])[0, 1]) < error * math.sqrt(2)
    ordered = np.sort(z)[50::100]
    cdf = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in ordered])
    distance = np.abs(cdf - (np.arange(ordered.size) + 0.5) / ordered.size).max()
    assert distance < 1.95 / math.sqrt(z.size) + 1e-3


def test_normal_with_no_spread_is_the_mean():
    out = np.empty(7, np.float32)
    philox.normal(out, 1.25, 0.0, **KEY)
    assert (out == 1.25).all()


@pytest.mark.parametrize(("mean", "std"), [(0, -1), (math.nan, 1), (0, math.inf)])
def test_normal_refuses_bad_parameters(mean, std):
    with pytest.raises(ArgumentError, match="std not negative"):
        philox.normal(np.empty(3, np.float32), mean, std, **KEY)


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        (np.int32, 0, 9),
        (np.int32, -(2**31), 2**31 - 1),
        (np.int32, -7, -7),
        (np.uint8, 0, 255),
        (np.int64, -(2**63), 2**63 - 1),
        (np.int64, 0, 2**33 + 12345),
        (np.int64, -(2**62), 2**61),
        (np.uint64, 0, 2**64 - 1),
        (np.uint64, 1, 2**64 - 1),
    ],
)
def test_integers_follow_the_mapping(dtype, low, high):
    out = np.empty(50, dtype)
    philox.integers(out, low, high, **KEY)
    assert out.tolist() == [low + (v * (high - low + 1) >> 64) for v in numbers(50)]


def test_integers_are_evenly_spread():
    out = np.empty(70_000, np.int32)
    philox.integers(out, -3, 3, **KEY)
    counts = np.bincount(out + 3, minlength=7)
    assert counts.size == 7
    # Chi-square with 6 degrees of freedom: 22.5 is exceeded with probability 0.001.
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 22.5


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [(np.int32, 3, 2), (np.int32, 0, 2**31), (np.uint8, -1, 5)]
)
def test_integers_refuse_bad_ranges(dtype, low, high):
    with pytest.raises(ArgumentError, match="is empty or does not fit"):
        philox.integers(np.empty(3, dtype), low, high, **KEY)


@pytest.mark.parametrize("keep", [0.0, 1e-3, 0.5, 0.7, 1 - 2.0**-32, 1.0])
def test_bernoulli_compares_words_with_a_threshold(keep):
    out = np.zeros(50_000, np.bool_)
    philox.bernoulli(out, keep, **KEY)
    np.testing.assert_array_equal(out, words(out.size).astype(np.int64) < round(keep * 2**32))
    assert abs(out.mean() - keep) <= 5 * math.sqrt(keep * (1 - keep) / out.size)


@pytest.mark.parametrize("keep", [-0.1, 1.5, math.nan])
def test_bernoulli_refuses_what_is_no_probability(keep):
    with pytest.raises(ArgumentError, match="wanted 0 to 1"):
        philox.bernoulli(np.zeros(3, np.bool_), keep, **KEY)


@pytest.mark.parametrize(
    "fill",
    [
        lambda: philox.uniform(np.zeros(3, np.int32), 0, 1, **KEY),
        lambda: philox.normal(np.zeros(3, np.complex64), 0, 1, **KEY),
        lambda: philox.integers(np.zeros(3, np.float32), 0, 1, **KEY),
        lambda: philox.bernoulli(np.zeros(3, np.uint8), 0.5, **KEY),
    ],
)
def test_wrong_output_type_is_named(fill):
    with pytest.raises(DataTypeError, match="out has dtype"):
        fill()


def test_operator_id_is_the_crc_of_name_output_and_occurrence():
    assert philox.operator_id("net", "drop_mask") == zlib.crc32(b"net\0drop_mask\0" + b"0")
    assert philox.operator_id("net", "é", 12) == zlib.crc32("net\0é\0".encode() + b"12")
    keys = [("a", "bc"), ("ab", "c"), ("a", "bc", 1), ("a", "bc1"), ("", "abc")]
    assert len({philox.operator_id(*key) for key in keys}) == len(keys)
