"""Launchers of gradient compression."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.elementwise import ADD
from gpunet.cuda_kernels.gemm import matmul
from gpunet.cuda_kernels.indexing import sum_rows_launch
from gpunet.cuda_kernels.launch import blocks, elementwise, in_order, one_block, prepare
from gpunet.cuda_kernels.pieces import Buffers, Launch, copy_launch, map_launch, nothing
from gpunet.cuda_kernels.signature import HALVES, Kernel
from gpunet.cuda_kernels.sorting import Picks, against_picks, scan_launch, sort_scratch
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.gradient_compression import matrices, plain_ranges
from gpunet.specs import Shape, TensorSpec, spec

_MODULE: Final = "gradient_compression"
_ROUND = Kernel(
    _MODULE, "round_with_feedback", "const float* bucket, float* error, T* rounded, int64 n", T=HALVES
)
_ORTHONORMALIZE = Kernel(_MODULE, "orthonormalize", "float* p, double* work, int64 rows, int64 rank")
_LARGEST_UPDATE = Kernel(
    _MODULE,
    "largest_update",
    "const float* bucket, float* velocity, float* error, uint32* counts, uint32* state, int64 n, int64 kept, "
    "double momentum",
)
_LARGEST_COUNT = Kernel(
    _MODULE,
    "largest_count",
    "const float* error, const uint32* state, uint32* counts, int64 n, int32 shift",
)
_LARGEST_DIGIT = Kernel(_MODULE, "largest_digit", "uint32* counts, uint32* state, int32 shift")
_LARGEST_PARTS = Kernel(
    _MODULE,
    "largest_parts",
    "const float* error, const uint32* state, uint32* places, int64 n, int64 parts",
)
_LARGEST_MOVE = Kernel(
    _MODULE,
    "largest_move",
    "float* error, float* velocity, const uint32* state, const uint32* before, int32* places, float* values, "
    "int64 n, int64 parts",
)
#: As in gradient_compression.cu.
_DIGITS: Final = 256
_THREADS: Final = 256
_PART: Final = 2048
#: Elements of a bucket whose places int32 counts.
_MOST: Final = 2**31 - 1


@kernel("RoundWithFeedback", device="cuda", binds=True)
def round_with_feedback(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``rounded`` is ``bucket + error`` in the half type, ``error = bucket + error - rounded``."""
    rounded, error = outputs
    if rounded.size == 0:
        return nothing
    arguments = (inputs[0], error, rounded, rounded.size)
    return prepare(ctx, _ROUND, (rounded.dtype,), arguments, elementwise(rounded.size))


def _part(buffer: Buffer, begin: int, shape: Shape) -> Buffer:
    """The elements of a vector from ``begin`` on, in a shape."""
    offset = buffer.offset + begin * buffer.dtype.itemsize
    return Buffer(buffer.backend, buffer.memory, shape, buffer.dtype, offset, buffer.name)


def _triples(bucket: Buffer, left: Buffer, right: Buffer, args: Arguments) -> list[tuple[Buffer, ...]]:
    """Each matrix of a bucket with its left and its right factor, as views."""
    rank: int = args.rank
    found: list[tuple[Buffer, ...]] = []
    at_left = at_right = 0
    for begin, rows, columns in matrices(args):
        matrix = _part(bucket, begin, (rows, columns))
        p, q = _part(left, at_left, (rows, rank)), _part(right, at_right, (columns, rank))
        found.append((matrix, p, q))
        at_left, at_right = at_left + rows * rank, at_right + columns * rank
    return found


def _plain(bucket: Buffer, left: Buffer, args: Arguments) -> list[tuple[Buffer, Buffer]]:
    """Pieces of the bucket that are sent as they are, each with its place behind the left factors."""
    at = args.rank * sum(rows for _, rows, _ in matrices(args))
    found = []
    for begin, end in plain_ranges(args):
        found.append((_part(bucket, begin, (end - begin,)), _part(left, at, (end - begin,))))
        at += end - begin
    return found


@kernel("PowerSgdLeft", device="cuda", binds=True)
def power_sgd_left(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``M += error``, ``left = M right``."""
    _, error, right = inputs
    bucket, left = outputs
    return in_order(
        map_launch(ctx, ADD, (inputs[0], error, bucket)),
        *(matmul(ctx, matrix, q, p) for matrix, p, q in _triples(bucket, left, right, args)),
        *(copy_launch(ctx, piece, place) for piece, place in _plain(bucket, left, args)),
    )


def _right_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    """The largest left factor in float64."""
    rows = max((rows for _, rows, _ in matrices(op.args)), default=0)
    return [spec((op.args.rank * rows,), np.float64)]


@kernel("PowerSgdRight", device="cuda", binds=True, scratch=_right_scratch)
def power_sgd_right(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``left`` orthonormal, ``right = M^T left``, ``error = M - left right^T``."""
    bucket, (left, error, right), (work,) = inputs[0], outputs, ctx.scratch
    launches = [copy_launch(ctx, bucket, error)]
    launches += [
        partial(ctx.backend.fill, piece, 0, ctx.stream)
        for piece, _ in _plain(error, left, args)
        if piece.size
    ]
    triples, rests = _triples(bucket, left, right, args), _triples(error, left, right, args)
    for (matrix, p, q), (rest, _, _) in zip(triples, rests, strict=True):
        rows, rank = p.shape
        launches += [
            prepare(ctx, _ORTHONORMALIZE, (), (p, work, rows, rank), one_block(rows)),
            matmul(ctx, matrix, p, q, trans_a=True),
            matmul(ctx, p, q, rest, trans_b=True, alpha=-1.0, beta=1.0),
        ]
    return in_order(*launches)


@kernel("PowerSgdRestore", device="cuda", binds=True)
def power_sgd_restore(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``M = left right^T``."""
    (left, right), (bucket,) = inputs, outputs
    return in_order(
        *(matmul(ctx, p, q, matrix, trans_b=True) for matrix, p, q in _triples(bucket, left, right, args)),
        *(copy_launch(ctx, place, piece) for piece, place in _plain(bucket, left, args)),
    )


def _against_largest(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    size = inputs[0].size
    return f"the bucket has {size} elements, int32 counts {_MOST}" if size > _MOST else None


def _largest_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    """Counts of a digit, the state of the search, two counts a part."""
    parts = -(-inputs[0].size // _PART)
    return [spec((size,), np.uint32) for size in (_DIGITS, 2, 2 * parts)]


@kernel("LargestElements", device="cuda", binds=True, scratch=_largest_scratch, against=_against_largest)
def largest_elements(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Velocity, error, and the largest elements of the error; of equal ones the first."""
    places, values, velocity, error = outputs
    n, kept = error.size, places.size
    if n == 0:
        return nothing
    counts, state, before = ctx.scratch
    parts, grid = before.size // 2, elementwise(n)
    update = (inputs[0], velocity, error, counts, state, n, kept, args.momentum)
    launches = [prepare(ctx, _LARGEST_UPDATE, (), update, grid)]
    for shift in (24, 16, 8, 0):
        launches += [
            prepare(ctx, _LARGEST_COUNT, (), (error, state, counts, n, shift), grid),
            prepare(ctx, _LARGEST_DIGIT, (), (counts, state, shift), one_block(_DIGITS)),
        ]
    of_parts = blocks(parts, _THREADS)
    launches += [
        prepare(ctx, _LARGEST_PARTS, (), (error, state, before, n, parts), of_parts),
        scan_launch(ctx, _part(before, 0, (parts,))),
        scan_launch(ctx, _part(before, parts, (parts,))),
        prepare(ctx, _LARGEST_MOVE, (), (error, velocity, state, before, places, values, n, parts), of_parts),
    ]
    return in_order(*launches)


def _place_picks(op: Operator, places: Any) -> Picks:
    return Picks(1, places.size, False, op.args.size)


def _against_sum(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    return against_picks(_place_picks(op, inputs[0]))


def _sum_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    return sort_scratch(_place_picks(op, inputs[0]))


@kernel("SumElementsAtPlaces", device="cuda", binds=True, scratch=_sum_scratch, against=_against_sum)
def sum_elements_at_places(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Zeros, and the values of each place, added up in their order."""
    places, values = inputs
    return sum_rows_launch(ctx, _place_picks(ctx.op, places), places, values, outputs[0], 1)
