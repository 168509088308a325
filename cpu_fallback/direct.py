"""Convolution with few elements in a window, image by image: the products are the outputs themselves.

Columns are (image, channel, *kernel, *output), so that the product of an image with the filters lies in
memory as its outputs do, and a block of images takes one call for each step. With a window of many elements,
the columns take longer than they do in ``rows``, where neighbouring windows share them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from gpunet.cpu_fallback.columns import After, Index, Layout, memory_of, tap_slices
from gpunet.cpu_fallback.lanes import LANES, run_lanes
from gpunet.cpu_fallback.rows import BlockPlan
from gpunet.cpu_fallback.steps import Step, in_turn
from gpunet.specs import TensorSpec, spec

Array = npt.NDArray[Any]

#: Bytes of columns and outputs of a block of images, which stay in the cache.
_BLOCK_BYTES: Final = 1 << 19
#: Products with fewer columns leave the vector units idle.
_LEAST_POSITIONS: Final = 48
#: Copying an element of the columns or writing an output takes as long as this many multiplications.
_TRAFFIC: Final = 16


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
        return positions * (self.depth * self.filters + _TRAFFIC * (self.depth + self.filters))

    def scratch(self) -> list[TensorSpec]:
        """Filters with the bias; for each lane, columns."""
        columns = self.images * self.depth * self.window.positions if self.copied else 0
        return [spec((n,), self.dtype) for n in (self.filters * self.depth, *[columns] * LANES)]


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
    one = DirectPlan(window, layout.batch, layout.channels, layout.filters, layout.dtype, 1)
    size = (one.depth + layout.filters) * window.positions * dtype.itemsize
    images = max(1, min(-(-layout.batch // LANES), _BLOCK_BYTES // size))
    return DirectPlan(window, layout.batch, layout.channels, layout.filters, layout.dtype, images)


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
