"""Gradients of convolutions with few channels: products in small tiles, images shared between lanes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpunet.cpu_fallback.columns import Layout, Spread, Stack, needs_stacking, spread_blocks, stack_blocks
from gpunet.cpu_fallback.lanes import LANES, largest_divisor, run_lanes, tile_rows
from gpunet.cpu_fallback.rows import RowPlan, bind_rows, order_filters, plan_rows
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
        """Filters; for each lane: columns, stacked outputs, sum and part of dW, sum and part of db."""
        layout, rows = self.layout, self.rows
        size = layout.filters * layout.window.taps * layout.channels
        stacked = layout.output_size() if needs_stacking(layout, dtype) else 0
        columns = max(layout.columns_size(), rows.columns_size if rows is not None else 0)
        stacked = max(stacked, rows.stacked_size if rows is not None else 0)
        lane = [columns, stacked, size, size, layout.filters, layout.filters]
        return [spec((n,), layout.dtype) for n in [size if rows is not None else 0, *lane * LANES]]


def _backward_rows(layout: Layout) -> RowPlan | None:
    """Without steps, dX is the convolution of dY with mirrored filters, input for output channels."""
    window = layout.window
    if layout.pointwise or any(s != 1 for s in window.stride):
        return None
    reach = [d * (k - 1) for d, k in zip(window.dilation, window.kernel, strict=True)]
    mirrored = replace(
        window,
        head=tuple(r - h for r, h in zip(reach, window.head, strict=True)),
        tail=tuple(r - t for r, t in zip(reach, window.tail, strict=True)),
        image=window.output,
        output=window.image,
    )
    return plan_rows(mirrored, layout.batch, layout.filters, layout.channels, layout.dtype)


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
    block = max(1, min(layout.batch // LANES, _POSITIONS // window.positions))
    positions = block * window.positions
    filters = largest_divisor(layout.filters, 32)
    part = tile_rows(elements, filters, positions)
    back_positions = largest_divisor(positions, 256)
    back_elements = tile_rows(elements, layout.filters, back_positions)
    if min(filters, part) < _LEAST_TILE or min(back_elements, back_positions) < _LEAST_TILE:
        return None
    return TilePlan(
        replace(layout, block=block), filters, part, back_elements, back_positions, _backward_rows(layout)
    )


def _tiles(matrix: Array, rows: int, columns: int) -> Array:
    """A matrix as a stack of tiles: (rows // tile, columns // tile, tile rows, tile columns)."""
    height, width = matrix.shape
    return matrix.reshape(height // rows, rows, width // columns, columns).transpose(0, 2, 1, 3)


class _Step(NamedTuple):
    """Views that serve one block of images."""

    spread: Spread
    stack: Stack
    gradients: Array  #: dY in tiles (filters x positions), for dW
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
                spread,
                stack,
                _tiles(gradients, plan.filters, positions),
                _tiles(columns, plan.elements, positions).transpose(1, 0, 3, 2),
                back,
                _tiles(gradients, layout.filters, narrow),
                _tiles((spread if back is None else back).matrices[0], plan.back_elements, narrow),
            )
        )
    return steps


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
    layout = plan.layout
    ordered, *rest = scratch
    memory = [rest[i : i + 6] for i in range(0, len(rest), 6)]
    back = dx if plan.rows is None else None
    steps = [_steps(plan, lane, memory[lane], x, dy, back) for lane in range(LANES)]
    rows = []
    if plan.rows is not None and dx is not None:
        rows = bind_rows(plan.rows, dy, dx, ordered, None, [(m[0], m[1]) for m in memory])
    elements = layout.window.taps * layout.channels

    work = 2 * layout.batch * dw.size * layout.window.positions

    def run_lane(lane: int, filters: Array) -> None:
        _, _, total, part, bias_total, bias_part = memory[lane]
        total_matrix, part_matrix = (m.reshape(layout.filters, elements) for m in (total, part))
        total.fill(0)
        bias_total.fill(0)
        part_tiles = _tiles(part_matrix, plan.filters, plan.elements)
        for step in steps[lane]:
            outputs, copy, matrices = step.stack
            if copy is not None:
                np.copyto(copy, outputs, casting="same_kind")
            step.spread.gather()
            np.matmul(step.gradients, step.columns, out=part_tiles)
            np.add(total_matrix, part_matrix, out=total_matrix)
            if db is not None:
                np.add.reduce(matrices[0], axis=1, out=bias_part)
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
            mirrored = np.flip(w, tuple(range(2, w.ndim))).swapaxes(0, 1)
            order_filters(plan.rows, mirrored, ordered)
        matrix = w.reshape(layout.filters, elements).astype(layout.dtype, copy=False)
        filters = _tiles(matrix.T, plan.back_elements, layout.filters)
        run_lanes([functools.partial(run_lane, lane, filters) for lane in range(LANES)], work)
        first, *others = memory
        for other in others:
            np.add(first[2], other[2], out=first[2])
            np.add(first[4], other[4], out=first[4])
        np.copyto(dw, first[2].reshape(dw.shape), casting="same_kind")
        if db is not None:
            np.copyto(db, first[4], casting="same_kind")

    return run
