"""Convolution with few elements in a window, image by image: outputs serve as matrices as they are.

Columns are (image, channel, *kernel, *output), so that the product of an image with the filters lies in
memory as its outputs do, and a block of images takes one call for each step. With a window of many elements,
the columns take longer than they do in ``rows``, where neighbouring windows share them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from gpunet.cpu_fallback.columns import After, Index, Layout, memory_of, tap_slices
from gpunet.cpu_fallback.lanes import LANES, TRAFFIC, run_lanes
from gpunet.cpu_fallback.rows import BlockPlan
from gpunet.cpu_fallback.steps import Step, in_turn
from gpunet.specs import TensorSpec, spec

Array = npt.NDArray[Any]

#: Bytes of columns and outputs of a block of images, which stay in the cache.
_BLOCK_BYTES: Final = 1 << 19
#: The same for gradients, which take more calls.
_GRADIENT_BYTES: Final = 3 << 18
#: A product for each image pays while dW is this small.
_MOST_FILTERS: Final = 1024
#: Products with fewer columns leave the vector units idle.
_LEAST_POSITIONS: Final = 48


@dataclass(frozen=True, slots=True)
class DirectPlan(BlockPlan):
    """Sizes of a convolution image by image."""

    @property
    def depth(self) -> int:
        """Elements of a window, and one for the bias."""
        return self.channels * self.window.taps + 1

    @property
    def copied(self) -> bool:
        """Whether the images have to be copied to serve as columns."""
        w = self.window
        plain = all(s == 1 for s in w.stride) and not any(w.head) and w.image == w.output
        return w.taps > 1 or not plain

    @property
    def work(self) -> int:
        """Multiplications."""
        positions = self.batch * self.window.positions
        return positions * (self.depth * self.filters + TRAFFIC * (self.depth + self.filters))

    def scratch(self) -> list[TensorSpec]:
        """Filters with the bias; for each lane, columns."""
        columns = self.images * self.depth * self.window.positions if self.copied else 0
        return [spec((n,), self.dtype) for n in (self.filters * self.depth, *[columns] * LANES)]

    def gradient_scratch(self) -> list[TensorSpec]:
        """For each lane: columns, and sums and parts of dW with db."""
        columns = self.images * self.depth * self.window.positions
        pairs = self.filters * self.depth
        return [spec((n,), self.dtype) for n in (columns, pairs, self.images * pairs, pairs)] * LANES


def plan_direct(layout: Layout, dtype: np.dtype) -> DirectPlan | None:
    """A plan, or ``None`` where another way is better or the only one."""
    window = layout.window
    shared = layout.channels * (window.taps - math.prod(window.kernel[1:]))
    if (
        window.channels_last
        or layout.groups > 1
        or dtype != layout.dtype
        or window.positions < _LEAST_POSITIONS
        # Copies that `rows` would save, against its copy of the outputs.
        or 2 * shared > 3 * layout.filters
    ):
        return None
    plan = DirectPlan(window, layout.batch, layout.channels, layout.filters, layout.dtype, 1)
    return _in_blocks(plan, _BLOCK_BYTES)


def _in_blocks(plan: DirectPlan, nbytes: int) -> DirectPlan:
    size = (plan.depth + plan.filters) * plan.window.positions * plan.dtype.itemsize
    return replace(plan, images=max(1, min(-(-plan.batch // LANES), nbytes // size)))


def bind_direct(
    plan: DirectPlan,
    x: Array,
    w: Array,
    bias: Array | None,
    y: Array,
    scratch: Sequence[Array],
    after: After | None = None,
) -> Step:
    """Writes Y (image, output channel, *output) of X (image, channel, *space); ``after`` as in ``columns``.

    Where there are columns, the bias is one more element of each window, which is 1 everywhere.
    """
    copied = plan.copied or not x.flags.c_contiguous
    inside = bias is not None and copied
    elements = plan.depth - 1
    depth = plan.depth if inside else elements
    filters, *memory = scratch
    matrix = filters[: plan.filters * depth].reshape(plan.filters, depth)
    weights = matrix[:, :elements].reshape(plan.filters, plan.channels, *plan.window.kernel)
    lanes = []
    for lane, own in enumerate(memory):
        shape = (plan.images, depth, plan.window.positions)
        columns = memory_of(math.prod(shape), plan.dtype, own)[: math.prod(shape)].reshape(shape)
        steps: list[Step] = []
        if inside:
            steps.append(partial(columns[:, elements].fill, 1))
        for first in range(lane * plan.images, plan.batch, LANES * plan.images):
            at = slice(first, min(first + plan.images, plan.batch))
            images, outputs = x[at], y[at]
            matrices = images.reshape(len(images), elements, -1) if not copied else columns[: len(images)]
            if copied:
                steps += _gather(plan, matrices[:, :elements], images, clear=first == lane * plan.images)
            products = outputs.reshape(len(images), plan.filters, -1)
            steps.append(partial(np.matmul, matrix, matrices, out=products))
            if bias is not None and not inside:
                steps.append(partial(np.add, products, bias[:, None], out=products))
            if not np.may_share_memory(products, outputs):
                steps.append(partial(np.copyto, outputs, products.reshape(outputs.shape)))
            if after is not None:
                steps.append(after((at,)))
        lanes.append(in_turn(*steps))

    def run() -> None:
        np.copyto(weights, w)
        if bias is not None and inside:
            np.copyto(matrix[:, elements], bias)
        run_lanes(lanes, plan.work)

    return run


def _gather(plan: DirectPlan, columns: Array, images: Array, clear: bool) -> list[Step]:
    """Steps that copy images into columns; what lies in the padding is cleared once for all blocks."""
    window = plan.window
    shaped = columns.reshape(len(images), plan.channels, *window.kernel, *window.output)
    if all(p == 0 for p in (*window.head, *window.tail)):
        # Windows overlap, so all taps are one view.
        reach = tuple(d * (k - 1) + 1 for d, k in zip(window.dilation, window.kernel, strict=True))
        axes = tuple(range(2, images.ndim))
        found = sliding_window_view(images, reach, axes)
        inner = tuple(slice(None, None, d) for d in window.dilation)
        outer = tuple(slice(0, n * s, s) for n, s in zip(window.output, window.stride, strict=True))
        windows = found[(slice(None), slice(None), *outer, *inner)]
        order = (0, 1, *range(2 + window.rank, 2 + 2 * window.rank), *range(2, 2 + window.rank))
        return [partial(np.copyto, shaped, windows.transpose(order))]
    steps: list[Step] = []
    if clear:
        steps.append(partial(columns.fill, 0))
    for tap in itertools.product(*map(range, window.kernel)):
        slices = tap_slices(window, tap)
        if slices is not None:
            at: Index = (slice(None), slice(None), *tap, *slices[0])
            steps.append(partial(np.copyto, shaped[at], images[(slice(None), slice(None), *slices[1])]))
    return steps


def plan_direct_gradient(layout: Layout, dtype: np.dtype) -> DirectPlan | None:
    """A plan for all gradients, or ``None`` where another way is better or the only one."""
    plan = plan_direct(layout, dtype)
    if plan is None or layout.batch < LANES or plan.filters * plan.depth > _MOST_FILTERS or not plan.copied:
        return None
    return _in_blocks(plan, _GRADIENT_BYTES)


def bind_direct_gradient(
    plan: DirectPlan,
    x: Array,
    w: Array,
    dy: Array,
    dw: Array,
    db: Array | None,
    dx: Array | None,
    scratch: Sequence[Array],
) -> Step:
    """Writes dW, and db and dX where they are wanted. Each lane sums over its own images.

    An element of the windows that is 1 everywhere makes db a column of dW.
    """
    elements, depth = plan.depth - 1, plan.depth
    memory = [scratch[4 * lane :][:4] for lane in range(LANES)]
    gradients = dy if dy.flags.c_contiguous else np.empty(dy.shape, dy.dtype)
    by_image = gradients.reshape(plan.batch, plan.filters, -1)
    weights = np.empty(0) if dx is None else w.reshape(plan.filters, elements)
    lanes = []
    for lane, (columns, total, parts, part) in enumerate(memory):
        shaped = columns.reshape(plan.images, depth, plan.window.positions)
        steps: list[Step] = [partial(total.fill, 0), partial(shaped[:, elements].fill, 1)]
        for first in range(lane * plan.images, plan.batch, LANES * plan.images):
            at = slice(first, min(first + plan.images, plan.batch))
            count = at.stop - first
            matrices, own = shaped[:count], parts[: count * part.size].reshape(count, plan.filters, depth)
            # What belongs to dX takes the memory of padding, too.
            clear = dx is not None or first == lane * plan.images
            steps += _gather(plan, matrices[:, :elements], x[at], clear)
            steps.append(partial(np.matmul, by_image[at], matrices.transpose(0, 2, 1), out=own))
            steps.append(partial(np.add.reduce, own.reshape(count, -1), axis=0, out=part))
            steps.append(partial(np.add, total, part, out=total))
            if dx is not None:
                back = matrices[:, :elements]
                steps.append(partial(np.matmul, weights.T, by_image[at], out=back))
                steps += _scatter(plan, back, dx[at])
        lanes.append(in_turn(*steps))

    def run() -> None:
        if gradients is not dy:
            np.copyto(gradients, dy)
        if dx is not None:
            dx.fill(0)
        run_lanes(lanes, 2 * plan.work)
        first, *others = (m[1] for m in memory)
        for other in others:
            np.add(first, other, out=first)
        sums = first.reshape(plan.filters, depth)
        np.copyto(dw, sums[:, :elements].reshape(dw.shape))
        if db is not None:
            np.copyto(db, sums[:, elements])

    return run


def _scatter(plan: DirectPlan, columns: Array, images: Array) -> list[Step]:
    """Steps that add columns to images."""
    window = plan.window
    shaped = columns.reshape(len(images), plan.channels, *window.kernel, *window.output)
    steps: list[Step] = []
    for tap in itertools.product(*map(range, window.kernel)):
        slices = tap_slices(window, tap)
        if slices is not None:
            target = images[(slice(None), slice(None), *slices[1])]
            at: Index = (slice(None), slice(None), *tap, *slices[0])
            # With one tap, windows have no position in common, and images begin as zeros.
            step = partial(np.copyto, target) if window.taps == 1 else partial(np.add, target, out=target)
            steps.append(partial(step, shaped[at]))
    return steps
