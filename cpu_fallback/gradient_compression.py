"""NumPy kernels of gradient compression."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.products import product
from gpunet.errors import KernelError
from gpunet.kernels import KernelContext, kernel
from gpunet.operators.gradient_compression import matrices, plain_ranges

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]
#: Columns shorter than this are directions of rounding errors only, and are left out.
_TINY = 1e-20


@kernel("RoundWithFeedback", bfloat16=True)
def round_with_feedback(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``rounded`` is ``bucket + error`` in the half type, ``error = bucket + error - rounded``."""
    rounded, error = outputs
    np.add(inputs[0], error, out=error)
    np.copyto(rounded, error, casting="same_kind")
    np.subtract(error, rounded, out=error)
    error[~np.isfinite(error)] = 0


def _factors(left: Array, right: Array, args: Arguments) -> list[tuple[Array, Array]]:
    """Left and right factor of each matrix, as views."""
    rank = args.rank
    found, at_left, at_right = [], 0, 0
    for _, rows, columns in matrices(args):
        found.append(
            (
                left[at_left : at_left + rows * rank].reshape(rows, rank),
                right[at_right : at_right + columns * rank].reshape(columns, rank),
            )
        )
        at_left, at_right = at_left + rows * rank, at_right + columns * rank
    return found


def _matrices(bucket: Array, args: Arguments) -> list[Array]:
    return [bucket[at : at + rows * columns].reshape(rows, columns) for at, rows, columns in matrices(args)]


def _plain(left: Array, args: Arguments) -> Array:
    """What is sent as it is: behind the left factors."""
    return left[args.rank * sum(rows for _, rows, _ in matrices(args)) :]


@kernel("PowerSgdLeft")
def power_sgd_left(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``M += error``, ``left = M right``."""
    _, error, right = inputs
    bucket, left = outputs
    np.add(inputs[0], error, out=bucket)
    pairs = _factors(left, right, args)
    for matrix, (p, q) in zip(_matrices(bucket, args), pairs, strict=True):
        product(matrix, q, p)
    plain = [bucket[begin:end] for begin, end in plain_ranges(args)]
    if plain:
        np.concatenate(plain, out=_plain(left, args))


def _orthonormalize(p: Array) -> None:
    """Gram and Schmidt's method on the columns, in place and in float64."""
    columns = p.astype(np.float64)
    for k in range(columns.shape[1]):
        column = columns[:, k]
        before = float(np.linalg.norm(column))
        for _ in range(2):
            column -= columns[:, :k] @ (columns[:, :k].T @ column)
        norm = float(np.linalg.norm(column))
        column *= 0 if norm <= max(_TINY, 1e-7 * before) else 1 / norm
    p[...] = columns


@kernel("PowerSgdRight")
def power_sgd_right(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``left`` orthonormal, ``right = M^T left``, ``error = M - left right^T``."""
    bucket, (left, error, right) = inputs[0], outputs
    np.copyto(error, bucket)
    for begin, end in plain_ranges(args):
        error[begin:end] = 0
    pairs = _factors(left, right, args)
    for matrix, rest, (p, q) in zip(_matrices(bucket, args), _matrices(error, args), pairs, strict=True):
        _orthonormalize(p)
        product(matrix.T, p, q)
        rest -= p @ q.T


@kernel("PowerSgdRestore")
def power_sgd_restore(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``M = left right^T``."""
    left, right = inputs
    bucket = outputs[0]
    for matrix, (p, q) in zip(_matrices(bucket, args), _factors(left, right, args), strict=True):
        product(p, q.T, matrix)
    plain, at = _plain(left, args), 0
    for begin, end in plain_ranges(args):
        bucket[begin:end] = plain[at : at + end - begin]
        at += end - begin


@kernel("LargestElements")
def largest_elements(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Velocity, error, and the largest elements of the error."""
    places, values, velocity, error = outputs
    velocity *= np.float32(args.momentum)
    velocity += inputs[0]
    error += velocity
    if places.size == 0:
        return
    # As whole numbers, absolute values have the order of the numbers (NaN above all); of equal ones the first
    # are sent.
    keys = np.abs(error).reshape(-1).view(np.uint32)
    least = np.partition(keys, error.size - places.size)[error.size - places.size]
    above, equal = np.flatnonzero(keys > least), np.flatnonzero(keys == least)
    chosen = np.sort(np.concatenate([above, equal[: places.size - above.size]]))
    places[...] = chosen
    values[...] = error[chosen]
    error[chosen] = velocity[chosen] = 0


@kernel("SumElementsAtPlaces")
def sum_elements_at_places(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Zeros, and each value at its place."""
    places, values, bucket = inputs[0].reshape(-1), inputs[1].reshape(-1), outputs[0]
    bucket.fill(0)
    wrong = places[(places < 0) | (places >= bucket.size)]
    if wrong.size:
        raise KernelError(f"place {wrong[0]} is outside, wanted 0 to {bucket.size - 1}")
    np.add.at(bucket, places, values)
