"""Gradients of convolutions without steps, all from the columns of dY.

dX is the convolution of dY with mirrored filters. Its columns, one row of outputs at a time as in ``rows``,
also give dW: an element ``e`` of a window of dY meets the position ``p`` of X where the mirrored filter has
its weight, ``dW'_e = sum over p of columns[e, p] X[p]^T``. So nothing is copied for dW but X, transposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpunet.cpu_fallback.columns import Layout, mirrored_filters
from gpunet.cpu_fallback.lanes import LANES, run_lanes
from gpunet.cpu_fallback.rows import RowPlan, bind_rows, order_filters
from gpunet.cpu_fallback.steps import Step, in_turn
from gpunet.cpu_fallback.tiles import backward_rows
from gpunet.specs import TensorSpec, spec

Array = npt.NDArray[Any]

#: How many times as many windows dX may have as Y: dW multiplies as often as dX, too.
_MOST_GROWTH: Final = 1.3
_LEAST_CHANNELS: Final = 8
#: Numbers in the products of a block, one for each row of X, which are then summed.
_MOST_PARTS: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class MirroredPlan:
    """How dX is made; ``rows.channels`` are the filters of the convolution, ``rows.filters`` its channels."""

    rows: RowPlan

    @property
    def depth(self) -> int:
        """Elements of a window of dY."""
        return self.rows.window.kernel[0] * self.rows.row_elements

    @property
    def pairs(self) -> int:
        """Numbers in dW."""
        return self.depth * self.rows.filters

    def gradient_scratch(self) -> list[TensorSpec]:
        """Filters; for each lane, what rows take, X^T, products, a sum and a part of dW, and a sum of db."""
        rows = self.rows
        image = rows.images * rows.filters * rows.window.positions
        parts = rows.window.output[0] * self.pairs
        lane = [rows.columns_size, rows.stacked_size, rows.turned_size]
        lane += [image, parts, self.pairs, self.pairs, rows.channels]
        return [spec((n,), rows.dtype) for n in [self.pairs, *lane * LANES]]


def plan_mirrored(layout: Layout) -> MirroredPlan | None:
    """A plan, or ``None`` where another way is better or the only one."""
    window = layout.window
    grows = math.prod(window.image) > _MOST_GROWTH * window.positions
    if layout.groups > 1 or grows or layout.channels < _LEAST_CHANNELS:
        return None
    rows = backward_rows(layout)
    if rows is None or rows.window.output[0] * layout.filters * layout.channels * window.taps > _MOST_PARTS:
        return None
    return MirroredPlan(rows)


def bind_mirrored(
    plan: MirroredPlan,
    x: Array,
    w: Array,
    dy: Array,
    dw: Array,
    db: Array | None,
    dx: Array,
    scratch: Sequence[Array],
) -> Callable[[], None]:
    """Writes dW, dX, and db where it is wanted. Each lane sums over its own blocks of images."""
    rows = plan.rows
    ordered, *rest = scratch
    size = len(rest) // LANES
    memory = [rest[lane * size :][:size] for lane in range(LANES)]
    height = rows.window.output[0]

    def use(lane: int, at: slice, columns: Array) -> Step:
        """The share of a block in dW and db; ``columns`` (row, element, position)."""
        _, _, _, transposed, parts, total, part, bias = memory[lane]
        images, gradients = x[at], dy[at]
        count, positions = len(images), columns.shape[2]
        by_position = transposed[: height * positions * rows.filters].reshape(height, positions, rows.filters)
        rest = rows.window.output[1:]
        position = (*rest, count) if rows.turned else (count, *rest)
        shaped = by_position.reshape(height, *position, rows.filters)
        last = -2 if rows.turned else 1
        products = parts.reshape(height, plan.depth, rows.filters)
        steps: list[Step] = [
            partial(np.copyto, np.moveaxis(shaped, last, 0), np.moveaxis(images, 1, -1), casting="same_kind"),
            partial(np.matmul, columns, by_position, out=products),
            partial(np.add.reduce, parts.reshape(height, -1), axis=0, out=part),
            partial(np.add, total, part, out=total),
        ]
        if db is not None:
            steps.append(partial(_add_sums, gradients, rows.dtype, bias))
        return in_turn(*steps)

    lanes = bind_rows(rows, dy, dx, ordered, None, [(m[0], m[1], m[2]) for m in memory], use=use)

    def run_lane(lane: int) -> None:
        for sums in memory[lane][5::2]:
            sums.fill(0)
        lanes[lane]()

    bound = [partial(run_lane, lane) for lane in range(LANES)]
    kernel = tuple(range(rows.window.rank))

    def run() -> None:
        order_filters(rows, mirrored_filters(w), ordered)
        run_lanes(bound, 2 * rows.work)
        first, *others = memory
        for other in others:
            np.add(first[5], other[5], out=first[5])
            np.add(first[7], other[7], out=first[7])
        total = np.flip(first[5].reshape(*rows.window.kernel, rows.channels, rows.filters), kernel)
        np.copyto(np.moveaxis(dw, (0, 1), (-2, -1)), total, casting="same_kind")
        if db is not None:
            np.copyto(db, first[7], casting="same_kind")

    return run


def _add_sums(gradients: Array, dtype: np.dtype, sums: Array) -> None:
    """Adds the sum of dY (image, filter, *output) for each filter: BLAS sums rows faster than NumPy."""
    rows = gradients.reshape(*gradients.shape[:2], -1).astype(dtype, copy=False)
    np.add(sums, np.add.reduce(np.matmul(rows, np.ones(rows.shape[2], dtype)), axis=0), out=sums)
