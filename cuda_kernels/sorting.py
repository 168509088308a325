"""A stable sort of rows picked by indices, so that what adds up in a row is next to each other and in order.

This is how gradients of indexing and sparse updates are deterministic without locking rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpunet.buffers import Buffer
from gpunet.cuda_kernels import device_errors
from gpunet.cuda_kernels.launch import blocks, elementwise, in_order, prepare
from gpunet.cuda_kernels.pieces import Buffers, Launch, nothing
from gpunet.cuda_kernels.signature import INDICES, Kernel
from gpunet.kernels import KernelContext
from gpunet.specs import TensorSpec, spec

_COUNT = Kernel(
    "sorting", "sort_count", "const uint32* keys, uint32* counts, int64 n, int64 parts, int32 shift"
)
_SCAN = Kernel("sorting", "sort_scan", "uint32* counts, int64 count")
_MOVE = Kernel(
    "sorting",
    "sort_move",
    "const uint32* keys, const uint32* order, const uint32* counts, uint32* new_keys, uint32* new_order, "
    "int64 n, int64 parts, int32 shift",
)
_ROW_KEYS = Kernel(
    "sorting",
    "row_keys",
    "const I* indices, uint32* keys, uint64* errors, uint64 code, int64 count, int64 picked, "
    "int64 outer_step, int64 size, int64 rows, int32 wrap",
    I=INDICES,
)
#: As in sorting.cu.
_DIGITS: Final = 256
_THREADS: Final = 256
_PART: Final = 2048
_MOST: Final = 2**32 - 2


@dataclass(frozen=True)
class Picks:
    """Rows of a tensor of shape (outer, size, ...) that indices pick: ``picked`` in each outer part.

    Attributes:
        outer: number of outer parts.
        picked: number of indices that each of them uses.
        own: whether each part has indices of its own, else all use the same ones.
        size: number of rows in a part.
        wrap: whether negative indices count from the end.
    """

    outer: int
    picked: int
    own: bool
    size: int
    wrap: bool = False

    @property
    def count(self) -> int:
        """Number of picks."""
        return self.outer * self.picked

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.outer * self.size

    @property
    def outer_step(self) -> int:
        """Distance of the indices of one part from those of the part before."""
        return self.picked if self.own else 0

    def report(self, ctx: KernelContext) -> tuple[Buffer, int]:
        """Where kernels report an index that is out of range."""
        lowest = -self.size if self.wrap else 0
        allowed = f"{lowest} to {self.size - 1}" if self.size else "none: the dimension is empty"
        return device_errors.report(
            ctx, f"input indices holds {{value}} at position {{index}}, wanted {allowed}"
        )


def against_picks(picks: Picks) -> str | None:
    """Why the picks cannot be sorted."""
    if max(picks.count, picks.rows) > _MOST:
        return f"it has {picks.count} picks of {picks.rows} rows, the kernels take {_MOST}"
    return None


def sort_scratch(picks: Picks) -> list[TensorSpec]:
    """Memory for :func:`sort_launch`: two of keys, two of their order, counts."""
    parts = -(-picks.count // _PART)
    sizes = [picks.count] * 4 + [parts * _DIGITS]
    return [spec((size,), np.uint32) for size in sizes]


def scan_launch(ctx: KernelContext, counts: Buffer) -> Launch:
    """Replaces uint32 numbers by the sum of those before them."""
    return prepare(ctx, _SCAN, (), (counts, counts.size), blocks(1, _THREADS))


def sort_launch(
    ctx: KernelContext, picks: Picks, indices: Buffer, memory: Buffers
) -> tuple[Launch, Buffer, Buffer]:
    """The launches that sort picks by their row, equal ones in order.

    Args:
        ctx: the context of the operator.
        picks: how the indices pick rows.
        indices: int32 or int64.
        memory: buffers for :func:`sort_scratch`.

    Returns:
        The launches; the sorted rows, in which an index out of range is the number of rows, and is reported;
        and the pick that each of them is.
    """
    *pairs, counts = memory
    keys, order = [pairs[0], pairs[1]], [pairs[2], pairs[3]]
    n, parts = picks.count, -(-picks.count // _PART)
    if n == 0:
        return nothing, keys[0], order[0]
    arguments: tuple[Any, ...] = (indices, keys[0], *picks.report(ctx), n)
    arguments += (picks.picked, picks.outer_step, picks.size, picks.rows, int(picks.wrap))
    launches = [prepare(ctx, _ROW_KEYS, (indices.dtype,), arguments, elementwise(n))]
    grid = blocks(parts, _THREADS)
    moved: Buffer | None = None
    for i, shift in enumerate(range(0, max(1, picks.rows.bit_length()), 8)):
        source, target = keys[i % 2], keys[1 - i % 2]
        into = order[1 - i % 2]
        launches += [
            prepare(ctx, _COUNT, (), (source, counts, n, parts, shift), grid),
            scan_launch(ctx, counts),
            prepare(ctx, _MOVE, (), (source, moved, counts, target, into, n, parts, shift), grid),
        ]
        moved = into
    if moved is None:
        return in_order(*launches), keys[0], order[0]
    return in_order(*launches), keys[order.index(moved)], moved
