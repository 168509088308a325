"""Gradients of images by phases: for convolutions with steps, and with many elements in a window.

A phase is every ``stride``-th position of the images in each dimension. Position ``k`` of a window meets, for
all outputs ``o``, position ``o + k // stride`` of the phase ``k % stride``. If outputs and phases have rows
of one pitch, that is one distance in memory: a product ``W_k^T dY`` is added to a phase in long pieces, and
the first one of a phase needs not be added at all.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpunet.cpu_fallback.columns import Index, Layout, phase_slices
from gpunet.cpu_fallback.lanes import LANES, largest_divisor, run_lanes, tile_rows
from gpunet.cpu_fallback.rows import BlockPlan
from gpunet.specs import Shape, TensorSpec, spec

Array = npt.NDArray[Any]

#: Bytes of dY, phases and products of the images of a block, which stay in the cache.
_BLOCK_BYTES: Final = 1 << 19
#: Below this number of multiplications, one product of all columns is as good.
_LEAST_WORK: Final = 1_000_000
_LEAST_TILE: Final = 8
#: More filters do not stay in the cache, and are read again for each image.
_MOST_FILTERS: Final = 1 << 17
#: Columns of a product.
_COLUMNS: Final = 256
#: How many times the outputs may grow by the pitch of their rows.
_MOST_PITCH: Final = 1.6


@dataclass(frozen=True, slots=True)
class PhasePlan(BlockPlan):
    """Sizes of products and blocks."""

    rows: int  #: rows of outputs in a product
    tile: int  #: channels in a product

    @property
    def pitch(self) -> Shape:
        """Sizes of a phase: those of the output and the greatest shift."""
        w = self.window
        return tuple(n + (k - 1) // s for n, k, s in zip(w.output, w.kernel, w.stride, strict=True))

    @property
    def row(self) -> int:
        """Numbers in a row of a phase."""
        return math.prod(self.pitch[1:])

    @property
    def positions(self) -> int:
        """Outputs of an image, with their pitch."""
        return self.window.output[0] * self.row

    @property
    def work(self) -> int:
        """Multiplications."""
        return self.batch * self.filters * self.channels * self.window.taps * self.positions

    def image_sizes(self) -> list[int]:
        """Numbers in dY, a phase and a product of one image."""
        phase = self.channels * self.pitch[0] * self.row
        return [self.filters * self.positions, phase, self.channels * self.positions]

    def scratch(self) -> list[TensorSpec]:
        """Filters; for each lane, dY, a phase and a product."""
        lane = [n * self.images for n in self.image_sizes()]
        sizes = [self.window.taps * self.channels * self.filters, *lane * LANES]
        return [spec((n,), self.dtype) for n in sizes]


def plan_phases(layout: Layout) -> PhasePlan | None:
    """A plan, or ``None`` where another way is better or the only one."""
    window = layout.window
    if (
        window.channels_last
        or layout.groups > 1
        or layout.pointwise
        or any(d != 1 for d in window.dilation)
        or layout.batch < LANES
        or layout.channels < _LEAST_TILE
        or layout.filters * layout.channels * window.taps > _MOST_FILTERS
        or min(window.output) < 1
    ):
        return None
    sizes = (window, layout.batch, layout.channels, layout.filters, layout.dtype)
    one = PhasePlan(*sizes, images=1, rows=1, tile=1)
    if one.work < _LEAST_WORK or one.positions > _MOST_PITCH * window.positions:
        return None
    rows = largest_divisor(window.output[0], max(1, _COLUMNS // one.row))
    tile = tile_rows(layout.channels, layout.filters, rows * one.row)
    if tile < _LEAST_TILE:
        return None
    images = max(1, _BLOCK_BYTES // (sum(one.image_sizes()) * layout.dtype.itemsize))
    return PhasePlan(*sizes, images=min(images, -(-layout.batch // LANES)), rows=rows, tile=tile)


class _Phase(NamedTuple):
    """What is done for one phase of a block."""

    taps: list[tuple[Array, Array, Array | None, Array]]  #: filters, product, and where it is added to what
    unclean: Array  #: what the first product leaves out
    target: Array  #: dX
    result: Array  #: what is copied there


def bind_phases(
    plan: PhasePlan, filters: Array, dy: Array, dx: Array, scratch: Sequence[Array]
) -> Callable[[], None]:
    """Writes dX of dY (image, output channel, *output) and filters (output channel, channel, *kernel)."""
    ordered, *memory = scratch
    by_tap = ordered.reshape(plan.window.taps, plan.channels, plan.filters)
    lanes: list[list[Callable[[], None]]] = [[] for _ in range(LANES)]
    for number, first in enumerate(range(0, plan.batch, plan.images)):
        lane, block = number % LANES, slice(first, first + plan.images)
        lanes[lane].append(_step(plan, by_tap, dy[block], dx[block], memory[3 * lane :][:3]))
    bound = [functools.partial(_run, steps) for steps in lanes]
    target = by_tap.reshape(*plan.window.kernel, plan.channels, plan.filters)
    source = np.moveaxis(filters, (0, 1), (-1, -2))
    # Steps that are longer than the window leave positions out.
    gaps = any(k < s for k, s in zip(plan.window.kernel, plan.window.stride, strict=True)) or any(
        n * s < size + head
        for n, s, size, head in zip(
            plan.pitch, plan.window.stride, plan.window.image, plan.window.head, strict=True
        )
    )

    def run() -> None:
        np.copyto(target, source, casting="same_kind")
        if gaps:
            dx.fill(0)
        run_lanes(bound, plan.work)

    return run


def _run(steps: list[Callable[[], None]]) -> None:
    for step in steps:
        step()


def _step(
    plan: PhasePlan, by_tap: Array, dy: Array, dx: Array, memory: Sequence[Array]
) -> Callable[[], None]:
    """The phases of one block of images."""
    window, count = plan.window, len(dy)
    gradients, sums, part = (
        m[: n * count].reshape(count, -1, n // channels)
        for m, n, channels in zip(
            memory, plan.image_sizes(), (plan.filters, plan.channels, plan.channels), strict=True
        )
    )
    spread = gradients.reshape(count, plan.filters, window.output[0], *plan.pitch[1:])
    data: Index = (..., *(slice(0, n) for n in window.output))
    factors = _by_rows(plan, gradients)
    phases = []
    for phase in itertools.product(
        *(range(min(k, s)) for k, s in zip(window.kernel, window.stride, strict=True))
    ):
        found = phase_slices(window, phase, window.stride, plan.pitch)
        if found is None:
            continue
        inside: Index = (..., *found[0])
        source: Index = (..., *found[1])
        steps = zip(phase, window.kernel, window.stride, strict=True)
        taps: list[tuple[Array, Array, Array | None, Array]] = []
        for tap in itertools.product(*(range(f, k, s) for f, k, s in steps)):
            shift = 0
            for k, s, size in zip(tap, window.stride, plan.pitch, strict=True):
                shift = shift * size + k // s
            matrix = by_tap[np.ravel_multi_index(tap, window.kernel)]
            tiles = matrix.reshape(plan.channels // plan.tile, plan.tile, plan.filters)
            into = sums[:, :, shift : shift + plan.positions]
            # The end of a product is a gap where the phase has no place for it.
            added = part[:, :, : into.shape[2]]
            product, addend = (part, into) if taps else (into, None)
            taps.append((tiles, _by_rows(plan, product, plan.tile), addend, added))
        result = sums.reshape(count, plan.channels, *plan.pitch)[inside]
        phases.append(_Phase(taps, sums[:, :, plan.positions :], dx[source], result))
    gaps = plan.positions > window.positions

    def run() -> None:
        if gaps:
            gradients.fill(0)
        np.copyto(spread[data], dy, casting="same_kind")
        for taps, unclean, target, result in phases:
            unclean.fill(0)
            for tiles, product, addend, added in taps:
                np.matmul(tiles, factors, out=product)
                if addend is not None:
                    np.add(addend, added, out=addend)
            np.copyto(target, result, casting="same_kind")

    return run


def _by_rows(plan: PhasePlan, images: Array, tile: int | None = None) -> Array:
    """Images (image, channel, position) as matrices (image, rows of outputs, tile, channel, position)."""
    count, channels, _ = images.shape
    tile = channels if tile is None else tile
    bands = plan.window.output[0] // plan.rows
    image, channel, number = images.strides
    return np.lib.stride_tricks.as_strided(
        images,
        (count, bands, channels // tile, tile, plan.rows * plan.row),
        (image, plan.rows * plan.row * number, tile * channel, channel, number),
    )
