"""Copies between strided places of two buffers: what transposing, joining and cutting are made of.

They move bytes, so element types do not matter: elements are handled as whole numbers of their size, and
neighbours that always move together as larger ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpunet.broadcasting import Group, collapse
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.broadcast import STRIDED
from gpunet.cuda_kernels.launch import blocks, elementwise, in_order, prepare
from gpunet.cuda_kernels.pieces import Launch, nothing
from gpunet.cuda_kernels.signature import INDICES, Kernel
from gpunet.kernels import KernelContext
from gpunet.specs import Shape

#: Element types that stand for all of their size.
MOVED: Final = ("uint8", "uint16", "int32", "int64")
_ENDS: Final = "const T* x, T* y, int64 x_first, int64 y_first"
_ROWS = Kernel("shaping", "copy_rows", f"{_ENDS}, int64 n, int64 width, int64 x_step, int64 y_step", T=MOVED)
_STRIDED = Kernel("shaping", "copy_strided", f"{_ENDS}, {STRIDED}", T=MOVED)
_TILES = Kernel(
    "shaping",
    "transpose_tiles",
    f"{_ENDS}, int64 batch, int64 rows, int64 columns, int64 x_batch, int64 x_step, int64 y_batch, "
    "int64 y_step",
    T=MOVED,
)
_AT_ONCE: Final = 8
_NUMBERS = Kernel(
    "shaping",
    "put_numbers",
    "T* y, int64 first, int64 count, " + ", ".join(f"int64 v{i}" for i in range(_AT_ONCE)),
    T=INDICES,
)

_MAX_GROUPS: Final = 6
_TILE: Final = 32
_TILE_THREADS: Final = 256
#: With fewer rows or columns, most of a tile would be empty.
_SMALLEST_SIDE: Final = 8


def contiguous(shape: Sequence[int]) -> list[int]:
    """Strides in elements of a C-contiguous tensor."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def against_strided(shape: Shape, x_strides: Sequence[int], y_strides: Sequence[int]) -> str | None:
    """Why :func:`strided_launch` cannot copy between these places."""
    count = len(collapse(shape, x_strides, y_strides))
    if count > _MAX_GROUPS:
        return f"it moves {count} dimensions that cannot be taken together, the kernels take {_MAX_GROUPS}"
    return None


def strided_launch(
    ctx: KernelContext,
    x: Buffer,
    y: Buffer,
    shape: Shape,
    x_strides: Sequence[int],
    y_strides: Sequence[int],
    *,
    x_first: int = 0,
    y_first: int = 0,
) -> Launch:
    """``y[y_first + sum of i y_strides] = x[x_first + sum of i x_strides]`` for all indices i in ``shape``.

    Args:
        ctx: the context of the operator.
        x: the source.
        y: the target, of the same element type.
        shape: how many elements are copied in each dimension.
        x_strides: of the source in elements, one a dimension; 0 repeats it.
        y_strides: of the target.
        x_first: where the first element lies in the source.
        y_first: where it lies in the target.
    """
    if 0 in shape:
        return nothing
    groups = collapse(shape, x_strides, y_strides)
    width = 1
    if groups and groups[-1][1] == (1, 1):
        steps = [step for _, strides in groups[:-1] for step in strides]
        width = widest((x, y), (groups[-1][0], x_first, y_first, *steps))
    if width > 1:
        size, _ = groups[-1]
        groups = [(n, (a // width, b // width)) for n, (a, b) in groups[:-1]]
        groups += [(size // width, (1, 1))] if size > width else []
        x_first, y_first = x_first // width, y_first // width
    moved, source, target = as_moved(width, x, y)
    ends = (source, target, x_first, y_first)
    n = math.prod(size for size, _ in groups)
    tiles = _transposed(groups)
    if tiles is not None:
        batch, height, across = tiles[:3]
        grid = blocks(batch * -(-height // _TILE) * -(-across // _TILE), _TILE_THREADS)
        return prepare(ctx, _TILES, (moved,), (*ends, *tiles), grid)
    if not groups or (len(groups) <= 2 and groups[-1][1] == (1, 1)):
        inner = groups[-1][0] if groups else 1
        row_steps = groups[0][1] if len(groups) == 2 else (inner, inner)
        return prepare(ctx, _ROWS, (moved,), (*ends, n, inner, *row_steps), elementwise(n))
    padded = [(1, (0, 0))] * (_MAX_GROUPS - len(groups)) + groups
    sizes = [size for size, _ in padded[1:]]
    strides = [stride[operand] for operand in (0, 1) for _, stride in padded]
    return prepare(ctx, _STRIDED, (moved,), (*ends, n, *sizes, *strides), elementwise(n))


def widest(buffers: Sequence[Buffer], numbers: Sequence[int]) -> int:
    """How many elements can be moved as one, of up to eight bytes.

    All buffers, of one element type, must be aligned, and all ``numbers`` (sizes and distances in elements)
    be multiples.
    """
    itemsize = buffers[0].dtype.itemsize
    width = 8 // itemsize
    while width > 1 and (
        any(n % width for n in numbers) or any(b.pointer % (width * itemsize) for b in buffers)
    ):
        width //= 2
    return width


def as_moved(width: int, *buffers: Buffer) -> tuple[Any, ...]:
    """The type of :data:`MOVED` for ``width`` elements, and the buffers as that.

    Elements at the end that do not fill one are left out: nothing moves them.
    """
    dtype = np.dtype(MOVED[(buffers[0].dtype.itemsize * width).bit_length() - 1])
    views = [
        Buffer(b.backend, b.memory, (b.nbytes // dtype.itemsize,), dtype, b.offset, b.name) for b in buffers
    ]
    return dtype, *views


def _transposed(groups: list[Group]) -> tuple[int, ...] | None:
    """(batch, rows, columns, x_batch, x_step, y_batch, y_step) where a copy is a batch of transposes."""
    if len(groups) not in (2, 3) or groups[-1][1][1] != 1:
        return None
    height, (x_step, _) = groups[-1]
    across = [g for g in groups[:-1] if g[1][0] == 1]
    if len(across) != 1 or height < _SMALLEST_SIDE or across[0][0] < _SMALLEST_SIDE:
        return None
    others = [g for g in groups[:-1] if g is not across[0]] or [(1, (0, 0))]
    batch, (x_batch, y_batch) = others[0]
    width, (_, y_step) = across[0]
    return batch, height, width, x_batch, x_step, y_batch, y_step


def numbers_launch(ctx: KernelContext, y: Buffer, values: Sequence[int]) -> Launch:
    """Writes numbers that are known on the host to a buffer of int32 or int64 with as many elements."""
    launches = []
    for first in range(0, len(values), _AT_ONCE):
        part: list[Any] = list(values[first : first + _AT_ONCE])
        arguments = (y, first, len(part), *part, *[0] * (_AT_ONCE - len(part)))
        launches.append(prepare(ctx, _NUMBERS, (y.dtype,), arguments, elementwise(len(part))))
    return in_order(*launches) if launches else nothing
