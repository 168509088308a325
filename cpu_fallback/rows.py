"""Convolution a row of outputs at a time, for images with few channels.

Columns (see ``columns``) hold each image row once for each position along the other sides of the window:
(row, *kernel[1:], channel, image, *output[1:]). Windows that overlap from row to row then lie in one piece of
memory with a fixed distance, so the columns of a row of outputs are a view of (kernel[0] * ... * channel) x
(image * output[1:]), and each row is spread only ``prod(kernel[1:])`` times. Of narrow images, the image is
the last dimension instead, so that what is copied in one piece is as long as a block has images.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from gpunet.cpu_fallback.columns import After, Index, axis_slices
from gpunet.cpu_fallback.lanes import LANES, tile_rows
from gpunet.cpu_fallback.steps import Step, in_turn
from gpunet.operators.window import Window

Array = npt.NDArray[Any]

#: Columns of a product: enough for the vector units, few enough for the caches.
_COLUMNS: Final = 64
#: Below this number of multiplications, one product of all columns is as good.
_LEAST_WORK: Final = 1_000_000
_LEAST_TILE: Final = 8
_MOST_ELEMENTS: Final = 640
#: Wider images have rows that are long enough to be copied as they are.
NARROW: Final = 12

#: What is done with the columns (row of outputs, element, position) of images, in a lane.
Use = Callable[[int, slice, Array], Step]


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Sizes of a convolution whose images are handled in blocks."""

    window: Window
    batch: int
    channels: int
    filters: int
    dtype: np.dtype
    images: int  #: images in a block


@dataclass(frozen=True, slots=True)
class RowPlan(BlockPlan):
    """Sizes of a convolution by rows."""

    tile: int  #: output channels in a product
    rows: int  #: rows of the columns
    step: int  #: rows of the columns from one row of outputs to the next

    @property
    def row_elements(self) -> int:
        """Elements of the columns of one row, for one position in the rest of the output."""
        return math.prod(self.window.kernel[1:]) * self.channels

    @property
    def row_positions(self) -> int:
        """Positions of one row of outputs, in all images of a block."""
        return self.images * math.prod(self.window.output[1:])

    @property
    def work(self) -> int:
        """Multiplications."""
        return self.batch * self.filters * self.window.kernel[0] * self.row_elements * self.window.positions

    @property
    def turned(self) -> bool:
        """Whether the image is the last dimension of columns and outputs: rows of narrow images are short."""
        return self.images > 1 and self.window.image[-1] <= NARROW

    @property
    def turned_size(self) -> int:
        """Elements of the turned images of a block."""
        return self.images * self.channels * math.prod(self.window.image) if self.turned else 0

    @property
    def columns_size(self) -> int:
        """Elements of the columns of one block."""
        return self.rows * self.row_elements * self.row_positions

    @property
    def stacked_size(self) -> int:
        """Elements of the outputs of one block."""
        return self.filters * self.window.output[0] * self.row_positions


def plan_rows(window: Window, batch: int, channels: int, filters: int, dtype: np.dtype) -> RowPlan | None:
    """A plan, or ``None`` where the convolution is better done on all columns at once."""
    rest = math.prod(window.output[1:])
    elements = window.taps * channels
    work = batch * filters * elements * window.positions
    if (
        window.channels_last
        or window.rank < 2
        or batch < LANES
        or work < _LEAST_WORK
        or elements > _MOST_ELEMENTS
    ):
        return None
    images = max(1, min(batch // LANES, _COLUMNS // rest))
    tile = tile_rows(filters, elements, images * rest)
    if tile < min(filters, _LEAST_TILE):
        return None
    kernel, stride, count = window.kernel[0], window.stride[0], window.output[0]
    overlapping = window.dilation[0] == 1 and kernel > stride
    rows, step = ((count - 1) * stride + kernel, stride) if overlapping else (count * kernel, kernel)
    compute = np.dtype(np.float32) if dtype == np.float16 else dtype
    return RowPlan(window, batch, channels, filters, compute, images, tile, rows, step)


def gather_views(plan: RowPlan, columns: Array, images: Array) -> list[tuple[Array, Array]]:
    """Pairs (columns, images) of equal shape; ``images`` are a block of shape (channel, image, *space)."""
    window = plan.window
    pairs = []
    for tap in itertools.product(*map(range, window.kernel[1:])):
        found = [axis_slices(window, axis, k) for axis, k in enumerate(tap, 1)]
        inside = [f[0] for f in found if f is not None]
        source = [f[1] for f in found if f is not None]
        if len(inside) < len(tap):
            continue
        at: Index = (slice(None), *tap, slice(None), slice(None), *inside)
        mine = columns[at]
        theirs = np.moveaxis(images[(slice(None), slice(None), slice(None), *source)], 2, 0)
        if plan.step == window.stride[0] and plan.rows < window.output[0] * window.kernel[0]:
            first = max(0, window.head[0])
            last = min(plan.rows, window.head[0] + window.image[0])
            if last > first:
                pairs.append((mine[first:last], theirs[first - window.head[0] : last - window.head[0]]))
            continue
        for k in range(window.kernel[0]):
            rows = axis_slices(window, 0, k)
            if rows is not None:
                every = slice(
                    rows[0].start * plan.step + k, (rows[0].stop - 1) * plan.step + k + 1, plan.step
                )
                pairs.append((mine[every], theirs[rows[1]]))
    return pairs


def order_filters(plan: RowPlan, filters: Array, target: Array) -> None:
    """Copies filters (output channel, channel, *kernel) in the order of the columns into flat memory."""
    shape = (plan.filters, *plan.window.kernel, plan.channels)
    np.copyto(target.reshape(shape), np.moveaxis(filters, 1, -1), casting="same_kind")


def bind_rows(
    plan: RowPlan,
    images: Array,
    outputs: Array,
    filters: Array,
    bias: Array | None,
    memory: list[tuple[Array, Array, Array]],
    after: After | None = None,
    use: Use | None = None,
) -> list[Callable[[], None]]:
    """One callable a lane: the convolution of its blocks.

    ``images`` (image, channel, *space) and ``outputs`` (image, output channel, *output) are whole tensors,
    ``filters`` flat memory in the order of the columns, ``bias`` one number an output channel, ``memory``
    flat memory for columns, outputs and turned images, for each lane, ``after`` what is done to each part of
    the outputs, ``use`` what else is done with the columns of each block.
    """
    window = plan.window
    height, rest = window.output[0], math.prod(window.output[1:])
    depth = window.kernel[0] * plan.row_elements
    tiles = filters.reshape(plan.filters // plan.tile, plan.tile, depth)
    channels_first = np.moveaxis(images, 1, 0)
    lanes: list[Callable[[], None]] = []
    for lane, (columns_memory, stacked_memory, turned_memory) in enumerate(memory):
        steps = []
        for first in range(lane * plan.images, plan.batch, LANES * plan.images):
            last = min(first + plan.images, plan.batch)
            count = last - first
            positions = count * rest
            flat = columns_memory[: plan.rows * plan.row_elements * positions]
            position = (*window.output[1:], count) if plan.turned else (count, *window.output[1:])
            columns = flat.reshape(plan.rows, *window.kernel[1:], plan.channels, *position)
            row = plan.row_elements * positions
            size = flat.itemsize
            products = as_strided(
                flat, (height, 1, depth, positions), (plan.step * row * size, 0, positions * size, size)
            )
            results = np.moveaxis(outputs[first:last], 2, 0)
            stacked = None
            if count == 1 and outputs.flags.c_contiguous and outputs.dtype == plan.dtype:
                matrices = outputs[first].reshape(plan.filters, height, rest).transpose(1, 0, 2)
            else:
                matrices = stacked_memory[: height * plan.filters * positions].reshape(
                    height, plan.filters, positions
                )
                stacked = matrices.reshape(height, plan.filters, *position)
                stacked = np.moveaxis(stacked, -1 if plan.turned else 2, 1)
            split = (height, plan.filters // plan.tile, plan.tile, positions)
            targets = as_strided(
                matrices, split, (matrices.strides[0], matrices.strides[1] * plan.tile, *matrices.strides[1:])
            )
            block = channels_first[:, first:last]
            turns = []
            if plan.turned:
                columns = np.moveaxis(columns, -1, window.rank + 1)
                turned = turned_memory[: block.size].reshape(plan.channels, *window.image, count)
                turns = [(np.moveaxis(turned, -1, 1), block)]
                block = turns[0][0]
            pairs = gather_views(plan, columns, block)
            padded = sum(c.size for c, _ in pairs) < columns.size
            pairs = turns + pairs
            at = slice(first, last)
            end = None if after is None else after((at,))
            if use is not None:
                end = in_turn(use(lane, at, products[:, 0]), end)
            steps.append((flat, padded, pairs, products, targets, matrices, stacked, results, end))
        lanes.append(_lane(steps, tiles, bias))
    return lanes


def _lane(steps: list[Any], tiles: Array, bias: Array | None) -> Callable[[], None]:
    def run() -> None:
        size = 0
        for flat, padded, pairs, products, targets, matrices, stacked, results, end in steps:
            if padded and flat.size != size:
                # Padding stays zero from block to block while the blocks have one size.
                flat.fill(0)
                size = flat.size
            for columns, images in pairs:
                np.copyto(columns, images, casting="same_kind")
            np.matmul(tiles, products, out=targets)
            if bias is not None:
                np.add(matrices, bias[:, None], out=matrices)
            if stacked is not None:
                np.copyto(results, stacked, casting="same_kind")
            if end is not None:
                end()

    return run
