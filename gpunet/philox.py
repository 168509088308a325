"""Counter-based random numbers: Philox 4x32-10, the same bits on every device.

Source: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3",
SC'11. A draw is a pure function of (seed, operator, step, element index), so no state is carried along, the
order of execution and the number of streams do not matter, and a resumed run continues where the first one
stopped. This page is the definition; a CUDA kernel that follows it writes the same values.

Words
    One call of the bijection makes a block of four 32-bit words. Word ``n`` of a draw is word ``n % 4`` of
    block ``b = n // 4``, made from::

        key     = (seed & 0xffffffff, seed >> 32)                           seed:     64 bits
        counter = (b & 0xffffffff, b >> 32, operator, step & 0xffffffff)    operator: 32 bits

    Arguments wider than their field are taken modulo its size, so that negative seeds are allowed.
    ``operator`` tells the operators of a net apart (`operator_id`), ``step`` the runs of one operator.

Values
    ``w[n]`` is word ``n``, ``v[i] = w[2i] + 2**32 * w[2i+1]``, ``i`` the index of an element in C order.

    bernoulli
        ``w[i] < round(keep_probability * 2**32)``: the probability is off by 2**-33 at most.
    uniform float32
        ``low + (high - low) * ((w[i] >> 8) * 2**-24)``; the bounds, the difference, the product and the sum
        are each rounded to float32 (no fused multiply-add); then at most the largest float32 below ``high``.
    uniform float16 and bfloat16
        as float32, with the bounds first rounded to the type; the value is rounded to it, then at most the
        largest of its numbers below ``high``.
    uniform float64
        as float32 but in float64, with ``(v[i] >> 11) * 2**-53``.
    integers
        ``low + floor(v[i] * (high - low + 1) / 2**64)`` in exact arithmetic: the probability of each value
        differs from 1 / (high - low + 1) by less than 2**-64.
    normal float16, bfloat16 and float32
        Box-Muller on the pair ``p = i // 2``: ``u1 = (w[2p] + 1) * 2**-32`` in (0, 1] and
        ``u2 = w[2p+1] * 2**-32`` in [0, 1), so that standard normal numbers stay within 6.67 of 0.
    normal float64
        the same with ``u1 = ((v[2p] >> 11) + 1) * 2**-53`` and ``u2 = (v[2p+1] >> 11) * 2**-53``.

    Box-Muller is ``r = sqrt(-2 ln u1)``, ``z[2p] = r cos(2 pi u2)``, ``z[2p+1] = r sin(2 pi u2)``; the value
    is ``mean + std * z``. All of it is computed in float64 and rounded once to the type of the output:
    libraries differ in the last place of a float64 logarithm or sine, and that reaches hardly any float32.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet.dtypes import is_float
from gpunet.errors import ArgumentError, DataTypeError

__all__ = [
    "bernoulli",
    "bernoulli_threshold",
    "integers",
    "normal",
    "operator_id",
    "raw",
    "uniform",
    "uniform_bounds",
]

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
# How far the two key words have moved on in each of the ten rounds.
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_KEY_STEPS = np.arange(10, dtype=np.uint64)[:, None, None] * _WEYL
# Row 0 multiplies counter word 2, row 1 counter word 0: the order in which a round uses the products.
_MULTIPLIERS = np.array([[0xCD9E8D57], [0xD2511F53]], dtype=np.uint64)
_SHIFT32 = np.uint64(32)
_CHUNK_BLOCKS = 1 << 14
_CHUNK_WORDS = 4 * _CHUNK_BLOCKS
_FLOATS = "float16, bfloat16, float32 or float64"

UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]
Float64Array = npt.NDArray[np.float64]


def operator_id(net_name: str, output: str, occurrence: int = 0) -> int:
    """The 32-bit number that tells one random operator of a net from the others.

    It is the CRC-32 (zlib's) of the UTF-8 bytes of ``net_name``, a zero byte, ``output`` (the operator's
    first output), a zero byte, and ``occurrence`` in decimal. ``occurrence`` counts the earlier operators of
    the net with the same first output.
    """
    return zlib.crc32(f"{net_name}\0{output}\0{occurrence}".encode())


class _WordStream:
    """Makes the words of one (seed, operator, step), with scratch that is reused from chunk to chunk."""

    def __init__(self, seed: int, operator: int, step: int, capacity: int) -> None:
        seed &= _MASK64
        self._operator = operator & _MASK32
        self._step = step & _MASK32
        self._keys = np.array([[[seed & _MASK32], [seed >> 32]]], dtype=np.uint64) + _KEY_STEPS
        self._keys &= np.uint64(_MASK32)
        blocks = min(_CHUNK_BLOCKS, max(1, -(-capacity // 4)))
        self._scratch = np.empty((3, 2, blocks), dtype=np.uint64)
        self._ramp = np.arange(blocks, dtype=np.uint64)

    def blocks(self, first: int, out: UInt32Array) -> None:
        """Fills ``out`` (blocks, 4), at most a chunk, with the blocks ``first``, ``first + 1``, ..."""
        done = 0
        while done < len(out):
            block = (first + done) & _MASK64
            # Within one piece the counter's second word is constant.
            count = min(len(out) - done, (1 << 32) - (block & _MASK32))
            self._piece(block, out[done : done + count])
            done += count

    def _piece(self, block: int, out: UInt32Array) -> None:
        count = len(out)
        # A 32-bit word is kept in a 64-bit lane. `even` holds counter words 0 and 2 as its rows. `odd` holds
        # the products of the round before: their low halves are counter words 1 and 3, their high halves are
        # shifted out.
        even, odd, product = (self._scratch[i, :, :count] for i in range(3))
        np.add(self._ramp[:count], np.uint64(block & _MASK32), out=even[0])
        even[1] = self._operator
        odd[0] = block >> 32
        odd[1] = self._step
        for key in self._keys:
            np.multiply(even[::-1], _MULTIPLIERS, out=product)
            np.left_shift(odd, _SHIFT32, out=odd)
            np.bitwise_xor(odd, product, out=even)
            np.right_shift(even, _SHIFT32, out=even)
            np.bitwise_xor(even, key, out=even)
            odd, product = product, odd
        # Storing a 64-bit lane as a 32-bit word keeps its low half.
        out[:, 0] = even[0]
        out[:, 1] = odd[0]
        out[:, 2] = even[1]
        out[:, 3] = odd[1]


def _chunks(
    seed: int, operator: int, step: int, count: int, words_each: int
) -> Iterator[tuple[int, int, UInt32Array]]:
    """Yields (first element, last element + 1, words) over ``count`` elements of ``words_each`` words.

    ``words`` is scratch, valid until the next chunk, and holds whole blocks, so that it can be longer than
    the elements need.
    """
    total = count * words_each
    stream = _WordStream(seed, operator, step, total)
    words = np.empty((min(_CHUNK_BLOCKS, max(1, -(-total // 4))), 4), dtype=np.uint32)
    per_chunk = _CHUNK_WORDS // words_each
    for start in range(0, count, per_chunk):
        stop = min(count, start + per_chunk)
        used = words[: -(-(stop - start) * words_each // 4)]
        stream.blocks(start * words_each // 4, used)
        yield start, stop, used.reshape(-1)


def _pairs(words: UInt32Array) -> UInt64Array:
    """Joins words ``2i`` (low) and ``2i + 1`` (high) into 64-bit numbers, on hosts of either byte order."""
    joined = words[1::2].astype(np.uint64)
    joined <<= _SHIFT32
    joined |= words[0::2]
    return joined


def _store(out: npt.NDArray[Any]) -> Callable[[int, int, npt.NDArray[Any]], None]:
    """A function that writes values to the elements [start, stop) of ``out``, counted in C order."""
    target = out.reshape(-1) if out.flags.c_contiguous else None

    def store(start: int, stop: int, values: npt.NDArray[Any]) -> None:
        if target is not None:
            target[start:stop] = values
        else:
            out.flat[start:stop] = values

    return store


def _check_out(function: str, out: npt.NDArray[Any], wanted: str, right_type: bool) -> None:
    if not right_type:
        raise DataTypeError(f"philox.{function}: out has dtype {out.dtype}, wanted {wanted}")
    if not out.flags.writeable:
        raise ArgumentError(f"philox.{function}: out ({out.dtype}, shape {out.shape}) is read-only")


def raw(seed: int, operator: int, step: int, count: int, offset: int = 0) -> UInt32Array:
    """The words ``offset`` to ``offset + count - 1`` of the draw (seed, operator, step), as uint32[count].

    Raises:
        ArgumentError: ``count`` or ``offset`` is negative.
    """
    if count < 0 or offset < 0:
        raise ArgumentError(f"philox.raw: count {count} and offset {offset} must not be negative")
    lead = offset % 4
    blocks = -(-(lead + count) // 4)
    out = np.empty((blocks, 4), dtype=np.uint32)
    stream = _WordStream(seed, operator, step, 4 * blocks)
    for start in range(0, blocks, _CHUNK_BLOCKS):
        stream.blocks(offset // 4 + start, out[start : start + _CHUNK_BLOCKS])
    return out.reshape(-1)[lead : lead + count]


def bernoulli_threshold(keep_probability: float) -> int:
    """The number, up to 2**32, that words below stand for True.

    Raises :class:`ArgumentError` unless the probability is in [0, 1].
    """
    if not 0.0 <= keep_probability <= 1.0:
        raise ArgumentError(f"philox.bernoulli: keep_probability is {keep_probability}, wanted 0 to 1")
    return round(float(keep_probability) * 2.0**32)


def bernoulli(
    out: npt.NDArray[np.bool_], keep_probability: float, *, seed: int, operator: int, step: int
) -> None:
    """Writes True with probability ``keep_probability``, in [0, 1], to each element of the bool ``out``.

    Raises:
        DataTypeError: ``out`` is not bool.
        ArgumentError: ``keep_probability`` is outside [0, 1], or ``out`` is read-only.
    """
    _check_out("bernoulli", out, "bool", out.dtype == np.bool_)
    threshold = bernoulli_threshold(keep_probability)
    if threshold > _MASK32:
        # 2**32 does not fit the 32-bit comparison, and every word is below it.
        out[...] = True
        return
    store, limit = _store(out), np.uint32(threshold)
    for start, stop, words in _chunks(seed, operator, step, out.size, 1):
        store(start, stop, words[: stop - start] < limit)


def uniform_bounds(dtype: np.dtype, low: float, high: float) -> tuple[Any, Any, Any]:
    """For numbers of ``dtype`` in [low, high): (low, high - low, largest number below high) as NumPy scalars.

    The first and last are of ``dtype``, the distance is of the type that :func:`uniform` computes in. Raises
    :class:`ArgumentError` as that does.
    """
    wide = np.float64 if dtype == np.float64 else np.float32
    with np.errstate(over="ignore", invalid="ignore"):
        bottom, top = dtype.type(low), dtype.type(high)
        span = wide(top) - wide(bottom)
    if not (np.isfinite(span) and span >= 0):
        raise ArgumentError(
            f"philox.uniform: low {low}, high {high} and their distance must be finite in {dtype}, "
            "and low not above high"
        )
    return bottom, span, np.nextafter(top, bottom)


def uniform(out: npt.NDArray[Any], low: float, high: float, *, seed: int, operator: int, step: int) -> None:
    """Writes uniform numbers in [low, high) to ``out`` (a floating-point type, any shape and strides).

    The bounds are first rounded to the type of ``out``; where they are equal there, every element is ``low``.

    Raises:
        DataTypeError: ``out`` has another type.
        ArgumentError: ``low`` is above ``high``, a bound or their distance is not finite in the type of
            ``out``, or ``out`` is read-only.
    """
    _check_out("uniform", out, _FLOATS, is_float(out.dtype))
    bottom, span, last = uniform_bounds(out.dtype, low, high)
    if span == 0:
        out[...] = bottom
        return
    store, wide = _store(out), type(span)
    for start, stop, words in _chunks(seed, operator, step, out.size, 2 if wide is np.float64 else 1):
        values: npt.NDArray[Any]
        if wide is np.float64:
            values = _unit64(_pairs(words[: 2 * (stop - start)]))
        else:
            values = (words[: stop - start] >> np.uint32(8)).astype(np.float32)
            values *= np.float32(2.0**-24)
        values *= span
        values += wide(bottom)
        values = values.astype(out.dtype, copy=False)
        np.minimum(values, last, out=values)
        store(start, stop, values)


def _unit64(numbers: UInt64Array) -> Float64Array:
    """The upper 53 bits of 64-bit numbers as float64 in [0, 1)."""
    numbers >>= np.uint64(11)
    units = numbers.astype(np.float64)
    units *= 2.0**-53
    return units


def normal(out: npt.NDArray[Any], mean: float, std: float, *, seed: int, operator: int, step: int) -> None:
    """Writes normal numbers to ``out`` (a floating-point type, any shape and strides).

    Values beyond the range of a type become infinite, as in a cast.

    Raises:
        DataTypeError: ``out`` has another type.
        ArgumentError: ``std`` is negative, ``mean`` or ``std`` is not finite, or ``out`` is read-only.
    """
    _check_out("normal", out, _FLOATS, is_float(out.dtype))
    if not (np.isfinite(mean) and np.isfinite(std) and std >= 0):
        raise ArgumentError(f"philox.normal: mean {mean} and std {std} must be finite, and std not negative")
    double, store = out.dtype == np.float64, _store(out)
    for start, stop, words in _chunks(seed, operator, step, out.size, 2 if double else 1):
        # A pair is always drawn whole; blocks are whole too, so the words of an odd last element are there.
        if double:
            units = _unit64(_pairs(words))
            units[0::2] += 2.0**-53
        else:
            units = words.astype(np.float64)
            units[0::2] += 1.0
            units *= 2.0**-32
        values = _box_muller(units)[: stop - start]
        values *= std
        values += mean
        with np.errstate(over="ignore"):
            store(start, stop, values.astype(out.dtype, copy=False))


def _box_muller(units: Float64Array) -> Float64Array:
    """Turns pairs (u1 in (0, 1], u2 in [0, 1)) into pairs of independent standard normal numbers."""
    radius = np.log(units[0::2])
    radius *= -2.0
    np.sqrt(radius, out=radius)
    angle = units[1::2] * (2.0 * np.pi)
    result = np.empty_like(units)
    np.multiply(radius, np.cos(angle), out=result[0::2])
    np.multiply(radius, np.sin(angle), out=result[1::2])
    return result


def integers(
    out: npt.NDArray[Any], low: int, high_inclusive: int, *, seed: int, operator: int, step: int
) -> None:
    """Writes integers from ``low`` to ``high_inclusive``, both included, to the integer array ``out``.

    Raises:
        DataTypeError: ``out`` is not of an integer type.
        ArgumentError: the range is empty or does not fit the type of ``out``, or ``out`` is read-only.
    """
    _check_out("integers", out, "an integer type", bool(np.issubdtype(out.dtype, np.integer)))
    limits = np.iinfo(out.dtype)
    if not limits.min <= low <= high_inclusive <= limits.max:
        raise ArgumentError(
            f"philox.integers: range {low}..{high_inclusive} is empty or does not fit {out.dtype} "
            f"({limits.min}..{limits.max})"
        )
    values_in_range = int(high_inclusive) - int(low) + 1
    store, base = _store(out), np.uint64(int(low) & _MASK64)
    for start, stop, words in _chunks(seed, operator, step, out.size, 2):
        numbers = _scaled(words[: 2 * (stop - start)], values_in_range)
        # Two's complement: the sum modulo 2**64 has the bits of the result, whatever the type and the signs.
        numbers += base
        store(start, stop, numbers.astype(out.dtype))


def _scaled(words: UInt32Array, factor: int) -> UInt64Array:
    """``floor(v * factor / 2**64)`` for the 64-bit numbers ``v`` of the words and ``factor`` in 1..2**64."""
    if factor > _MASK64:
        return _pairs(words)
    low, high = words[0::2].astype(np.uint64), words[1::2].astype(np.uint64)
    factor_low, factor_high = np.uint64(factor & _MASK32), np.uint64(factor >> 32)
    # Schoolbook product of 32-bit halves; no partial sum exceeds 64 bits.
    middle: UInt64Array = (low * factor_low >> _SHIFT32) + high * factor_low
    result: UInt64Array = middle >> _SHIFT32
    if factor_high != 0:
        lower = (middle & np.uint64(_MASK32)) + low * factor_high
        result += high * factor_high + (lower >> _SHIFT32)
    return result
