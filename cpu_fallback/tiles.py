"""Gradients of convolutions with few channels: products in small tiles, images shared between lanes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from gpunet.cpu_fallback.columns import (
    Layout,
    Spread,
    Stack,
    mirrored,
    mirrored_filters,
    needs_stacking,
    spread_blocks,
    stack_blocks,
    tensor_size,
)
from gpunet.cpu_fallback.lanes import LANES, largest_divisor, run_lanes, tile_rows
from gpunet.cpu_fallback.rows import RowPlan, bind_rows, gather_views, order_filters, plan_rows
from gpunet.specs import TensorSpec, spec

Array = npt.NDArray[Any]

#: Positions in a block of images: a product of this depth is deep enough, and its columns stay in the cache.
_POSITIONS: Final = 1024
#: Below this number of multiplications, one product of all columns is as good.
_LEAST_WORK: Final = 1_000_000
_MOST_FILTERS: Final = 1 << 16
_LEAST_TILE: Final = 8


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Sizes of tiles, of dW = dY columns^T (filters x elements), and of columns = W^T dY."""

    layout: Layout
    filters: int
    elements: int
    back_elements: int
    back_positions: int
    rows: RowPlan | None

    def scratch(self, dtype: np.dtype) -> list[TensorSpec]:
        """Filters; for each lane: columns, stacked outputs, sums and parts of dW and of db, turned images."""
        layout, rows = self.layout, self.rows
        size = layout.filters * layout.window.taps * layout.channels
        stacked = layout.output_size() if needs_stacking(layout, dtype) else 0
        columns = max(layout.columns_size(), rows.columns_size if rows is not None else 0)
        stacked = max(stacked, rows.stacked_size if rows is not None else 0)
        lane = [columns, stacked, size, size, layout.filters, layout.filters]
        lane.append(rows.turned_size if rows is not None else 0)
        return [spec((n,), layout.dtype) for n in [size if rows is not None else 0, *lane * LANES]]


def backward_rows(layout: Layout) -> RowPlan | None:
    """Without steps, dX is the convolution of dY with mirrored filters, input for output channels."""
    window = layout.window
    if layout.pointwise or any(s != 1 for s in window.stride):
        return None
    return plan_rows(mirrored(window), layout.batch, layout.filters, layout.channels, layout.dtype)


def plan_tiles(layout: Layout) -> TilePlan | None:
    """A plan, or ``None`` where whole products are better."""
    window = layout.window
    elements = window.taps * layout.channels
    size = layout.filters * elements
    if (
        window.channels_last
        or layout.groups > 1
        or layout.batch < LANES
        or window.positions > _POSITIONS
        or size > _MOST_FILTERS
        or layout.batch * size * window.positions < _LEAST_WORK
    ):
        return None
    tensors = tensor_size(window, 1, layout.batch, layout.channels, layout.filters)
    # The columns of all lanes take at most as much as the whole tensors.
    fitting = tensors // (LANES * elements * window.positions)
    block = max(1, min(layout.batch // LANES, _POSITIONS // window.positions, fitting))
    positions = block * window.positions
    filters = largest_divisor(layout.filters, 32)
    rows = backward_rows(layout)
    wide = elements // window.kernel[0] if _slides(layout, rows) else elements
    part = tile_rows(wide, filters, positions)
    back_positions = largest_divisor(positions, 256)
    back_elements = tile_rows(elements, layout.filters, back_positions)
    if min(filters, part) < _LEAST_TILE or min(back_elements, back_positions) < _LEAST_TILE:
        return None
    return TilePlan(replace(layout, block=block), filters, part, back_elements, back_positions, rows)


def _tiles(matrix: Array, rows: int, columns: int) -> Array:
    """A matrix as a stack of tiles: (rows // tile, columns // tile, tile rows, tile columns)."""
    height, width = matrix.shape
    return matrix.reshape(height // rows, rows, width // columns, columns).transpose(0, 2, 1, 3)


class _Step(NamedTuple):
    """Views that serve one block of images."""

    gather: Callable[[], None]  #: copies images into the columns, and dY where it has to be stacked
    matrix: Array  #: dY (filters x positions)
    gradients: Array  #: dY in tiles, for dW
    columns: Array  #: columns^T in tiles (positions x elements)
    back: Spread | None  #: the columns of dX, in the memory of those of X
    narrow_gradients: Array  #: dY in tiles for dX
    back_columns: Array  #: the columns of dX in tiles


def _steps(
    plan: TilePlan, lane: int, memory: Sequence[Array], x: Array, dy: Array, dx: Array | None
) -> list[_Step]:
    layout = plan.layout
    spreads = spread_blocks(layout, x, memory[0])
    stacks = stack_blocks(layout, dy, memory[1])
    backs = spread_blocks(layout, dx, memory[0]) if dx is not None else [None] * len(spreads)
    steps = []
    for spread, stack, back in list(zip(spreads, stacks, backs, strict=True))[lane::LANES]:
        gradients, columns = stack.matrices[0], spread.matrices[0]
        positions = gradients.shape[1]
        narrow = largest_divisor(positions, plan.back_positions)
        steps.append(
            _Step(
                functools.partial(_gather, spread, stack),
                gradients,
                _tiles(gradients, plan.filters, positions),
                _tiles(columns, plan.elements, positions).transpose(1, 0, 3, 2),
                back,
                _tiles(gradients, layout.filters, narrow),
                _tiles((spread if back is None else back).matrices[0], plan.back_elements, narrow),
            )
        )
    return steps


def _gather(spread: Spread, stack: Stack) -> None:
    if stack.copy is not None:
        np.copyto(stack.copy, stack.outputs, casting="same_kind")
    spread.gather()


def _slides(layout: Layout, rows: RowPlan | None) -> bool:
    """Whether the columns of neighbouring rows of outputs overlap: each row is then spread once for all."""
    window = layout.window
    return rows is not None and window.kernel[0] > 1 and window.dilation[0] == 1


def _sliding_steps(plan: TilePlan, lane: int, memory: Sequence[Array], x: Array, dy: Array) -> list[_Step]:
    """Steps on columns (*kernel[1:], channel, row, image, *output[1:]), a row further for each kernel[0]."""
    layout, window = plan.layout, plan.layout.window
    height, rest = window.output[0], math.prod(window.output[1:])
    rows = height + window.kernel[0] - 1
    wide = math.prod(window.kernel[1:]) * layout.channels
    sizes = RowPlan(
        window, layout.batch, layout.channels, layout.filters, layout.dtype, layout.block, 1, rows, 1
    )
    steps = []
    for first, last in list(layout.blocks())[lane::LANES]:
        count = last - first
        row = count * rest
        flat = memory[0][: wide * rows * row]
        columns = flat.reshape(*window.kernel[1:], layout.channels, rows, count, *window.output[1:])
        pairs = gather_views(sizes, np.moveaxis(columns, window.rank, 0), np.moveaxis(x[first:last], 1, 0))
        padded = sum(c.size for c, _ in pairs) < columns.size
        if count == 1 and dy.flags.c_contiguous and dy.dtype == layout.dtype:
            matrix = dy[first].reshape(layout.filters, height * row)
        else:
            matrix = memory[1][: layout.filters * height * row].reshape(layout.filters, height * row)
            stacked = matrix.reshape(layout.filters, height, count, *window.output[1:])
            pairs.append((stacked, np.moveaxis(dy[first:last], 0, 2)))
        size = flat.itemsize
        shifted = as_strided(
            flat,
            (window.kernel[0], 1, wide // plan.elements, height * row, plan.elements),
            (row * size, 0, plan.elements * rows * row * size, size, rows * row * size),
        )
        steps.append(
            _Step(
                functools.partial(_gather_rows, flat if padded else None, pairs),
                matrix,
                _tiles(matrix, plan.filters, height * row),
                shifted,
                None,
                matrix,
                matrix,
            )
        )
    return steps


def _gather_rows(unclean: Array | None, pairs: list[tuple[Array, Array]]) -> None:
    if unclean is not None:
        unclean.fill(0)
    for copy, original in pairs:
        np.copyto(copy, original, casting="same_kind")


def bind_tiles(
    plan: TilePlan,
    x: Array,
    w: Array,
    dy: Array,
    dw: Array,
    db: Array | None,
    dx: Array | None,
    scratch: tuple[Array, ...],
) -> Callable[[], None]:
    """Each lane sums dW and db over its own images; the sums are added at the end."""
    layout, window = plan.layout, plan.layout.window
    ordered, *rest = scratch
    memory = [rest[i : i + 7] for i in range(0, len(rest), 7)]
    back = dx if plan.rows is None else None
    sliding = _slides(layout, plan.rows)
    if sliding:
        steps = [_sliding_steps(plan, lane, memory[lane], x, dy) for lane in range(LANES)]
    else:
        steps = [_steps(plan, lane, memory[lane], x, dy, back) for lane in range(LANES)]
    rows = []
    if plan.rows is not None and dx is not None:
        rows = bind_rows(plan.rows, dy, dx, ordered, None, [(m[0], m[1], m[6]) for m in memory])
    elements = window.taps * layout.channels
    work = 2 * layout.batch * dw.size * window.positions

    def part_tiles(part: Array) -> Array:
        if not sliding:
            return _tiles(part, plan.filters, plan.elements)
        split = part.reshape(
            -1, plan.filters, window.kernel[0], elements // window.kernel[0] // plan.elements, plan.elements
        )
        return split.transpose(2, 0, 3, 1, 4)

    def run_lane(lane: int, filters: Array) -> None:
        _, _, total, part, bias_total, bias_part, _ = memory[lane]
        total_matrix, part_matrix = (m.reshape(layout.filters, elements) for m in (total, part))
        total.fill(0)
        bias_total.fill(0)
        products = part_tiles(part_matrix)
        for step in steps[lane]:
            step.gather()
            np.matmul(step.gradients, step.columns, out=products)
            np.add(total_matrix, part_matrix, out=total_matrix)
            if db is not None:
                np.add.reduce(step.matrix, axis=1, out=bias_part)
                np.add(bias_total, bias_part, out=bias_total)
            if step.back is not None:
                # The columns of X are not needed any more: their memory takes those of dX.
                np.matmul(filters, step.narrow_gradients, out=step.back_columns)
                step.back.scatter()
        if rows:
            rows[lane]()

    def run() -> None:
        if back is not None:
            back.fill(0)
        if plan.rows is not None and rows:
            order_filters(plan.rows, mirrored_filters(w), ordered)
        matrix = w.reshape(layout.filters, elements).astype(layout.dtype, copy=False)
        filters = _tiles(matrix.T, plan.back_elements, layout.filters)
        run_lanes([functools.partial(run_lane, lane, filters) for lane in range(LANES)], work)
        first, *others = memory
        for other in others:
            np.add(first[2], other[2], out=first[2])
            np.add(first[4], other[4], out=first[4])
        total = first[2].reshape(layout.filters, *window.kernel, layout.channels) if sliding else first[2]
        np.copyto(dw, np.moveaxis(total, -1, 1) if sliding else total.reshape(dw.shape), casting="same_kind")
        if db is not None:
            np.copyto(db, first[4], casting="same_kind")

    return run
