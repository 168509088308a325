"""Gradients of convolutions on narrow images, one row of the window at a time, the image innermost.

Rows of narrow images are too short to be copied or added one by one. So the images of a block are turned:
the image becomes the last dimension, and a row is as long as the block has images. Columns hold turned images
once for each position along a row of the window, (*kernel[1:], channel, phase, row, *rest, image). A phase is
every ``stride``-th position, so that the columns of one row of the window are a view whose positions are one
piece of memory, and that makes few and large products: ``dW_k^T = columns_k dY^T``, ``columns_k = W_k^T dY``.
dY is copied in both orders, since OpenBLAS is slow where the depth of both operands is contiguous.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpunet.cpu_fallback.columns import Index, Layout, phase_slices, tensor_size
from gpunet.cpu_fallback.lanes import LANES, TRAFFIC, run_lanes
from gpunet.cpu_fallback.rows import NARROW, BlockPlan
from gpunet.specs import Shape, TensorSpec, spec

Array = npt.NDArray[Any]
Pair = tuple[Array, Array]

#: Bytes of what a block of images takes, of which most stays in the cache.
_BLOCK_BYTES: Final = 3 << 19
#: Below this number of multiplications, one product of all columns is as good.
_LEAST_WORK: Final = 1_000_000
_LEAST_FILTERS: Final = 8
#: More filters do not stay in the cache, and are read again for each block.
_MOST_FILTERS: Final = 1 << 17


@dataclass(frozen=True, slots=True)
class TapPlan(BlockPlan):
    """Sizes of blocks."""

    @property
    def phases(self) -> Shape:
        """Phases in each dimension: some do without where the stride is longer than the window."""
        w = self.window
        reach = (d * (k - 1) + 1 for d, k in zip(w.dilation, w.kernel, strict=True))
        return tuple(min(s, r) for s, r in zip(w.stride, reach, strict=True))

    @property
    def pitch(self) -> Shape:
        """Sizes of a phase: those of the output and the greatest shift."""
        w = self.window
        sizes = zip(w.output, w.kernel, w.dilation, w.stride, strict=True)
        return tuple(n + d * (k - 1) // s for n, k, d, s in sizes)

    def at(self, axis: int, k: int) -> tuple[int, slice]:
        """The phase that position ``k`` along a side of the window meets, and where, for all outputs."""
        shift, phase = divmod(k * self.window.dilation[axis], self.window.stride[axis])
        return phase, slice(shift, shift + self.window.output[axis])

    def place(self, tap: Shape, first: int = 0) -> Index:
        """The same in turned images, in all dimensions from ``first`` on."""
        return tuple(itertools.chain.from_iterable(self.at(axis, k) for axis, k in enumerate(tap, first)))

    def taps(self) -> Iterator[Shape]:
        """Positions along a row of the window."""
        return itertools.product(*map(range, self.window.kernel[1:]))

    @property
    def wide(self) -> int:
        """Rows of the columns: channels times positions along a row of the window."""
        return math.prod(self.window.kernel[1:]) * self.channels

    @property
    def work(self) -> int:
        """Multiplications."""
        positions = self.batch * self.window.positions
        elements = self.channels * self.window.taps
        return positions * (2 * elements * self.filters + TRAFFIC * (elements + self.filters))

    def image_sizes(self) -> list[int]:
        """Numbers for an image: turned, its columns, dY^T. The columns make place for those of dX, and dY."""
        w = self.window
        made = self.filters * w.positions
        row = math.prod(w.output[1:])
        columns = self.wide * self.phases[0] * self.pitch[0] * row
        back = self.wide * w.positions + made
        return [math.prod(self.phases) * math.prod(self.pitch) * self.channels, max(columns, back), made]

    def gradient_scratch(self) -> list[TensorSpec]:
        """Filters; for each lane, what belongs to images, sums and a part of dW and of db."""
        pairs, part = self.window.taps * self.channels * self.filters, self.wide * self.filters
        lane = [n * self.images for n in self.image_sizes()] + [pairs, part, self.filters, self.filters]
        return [spec((n,), self.dtype) for n in [pairs, *lane * LANES]]


def plan_taps(layout: Layout) -> TapPlan | None:
    """A plan, or ``None`` where another way is better or the only one."""
    window = layout.window
    size = layout.filters * layout.channels * window.taps
    if (
        window.channels_last
        or layout.groups > 1
        or window.taps == 1
        or layout.batch < LANES
        or min(window.output) < 1
        or window.image[-1] > NARROW
        or layout.filters < _LEAST_FILTERS
        or size > _MOST_FILTERS
        or layout.batch * size * window.positions < _LEAST_WORK
    ):
        return None
    one = TapPlan(window, layout.batch, layout.channels, layout.filters, layout.dtype, 1)
    # Scratch takes at most as much as all tensors, dX and dW among them.
    tensors = tensor_size(window, 1, layout.batch, layout.channels, layout.filters)
    tensors += layout.batch * layout.channels * math.prod(window.image)
    fitting = min(_BLOCK_BYTES // layout.dtype.itemsize, tensors // LANES - 2 * size)
    share = -(-layout.batch // LANES)
    most = max(1, min(share, fitting // sum(one.image_sizes())))
    # Blocks of one size: as many as are needed, no larger than they have to be.
    return replace(one, images=-(-share // -(-share // most)))


class _Block(NamedTuple):
    """Views that serve one block of images."""

    turns: list[Pair]  #: turned images and images
    copies: list[Pair]  #: columns and turned images
    products: list[Array]  #: columns, for each row of the window
    by_position: Pair  #: dY^T (*output, image, filter), and dY
    gradients: Array  #: dY^T (position, filter)
    by_filter: Pair  #: dY (filter, *output, image), and dY
    factors: Array  #: dY (filter, position)
    back: Array  #: columns of dX of one row of the window
    sums: list[list[Pair]]  #: for each row of the window, turned dX and columns of dX
    results: list[Pair]  #: dX and turned dX
    turned: Array  #: all of the turned images
    padded: bool  #: whether some of them lie in the padding


def bind_taps(
    plan: TapPlan,
    x: Array,
    w: Array,
    dy: Array,
    dw: Array,
    db: Array | None,
    dx: Array | None,
    scratch: Sequence[Array],
) -> Callable[[], None]:
    """Writes dW, db and dX where they are wanted. Each lane sums over its own blocks of images."""
    window = plan.window
    ordered, *rest = scratch
    size = len(rest) // LANES
    memory = [rest[lane * size :][:size] for lane in range(LANES)]
    blocks: list[list[_Block]] = [[] for _ in range(LANES)]
    for number, first in enumerate(range(0, plan.batch, plan.images)):
        at = slice(first, first + plan.images)
        target = dx[at] if dx is not None else None
        blocks[number % LANES].append(_block(plan, x[at], dy[at], target, memory[number % LANES]))
    filters = ordered.reshape(*window.kernel, plan.channels, plan.filters)
    by_row = ordered.reshape(window.kernel[0], plan.wide, plan.filters)
    gaps = _leaves_gaps(plan)

    def run_lane(lane: int) -> None:
        total, part, bias_total, bias_part = memory[lane][3:]
        totals, part = total.reshape(by_row.shape), part.reshape(by_row.shape[1:])
        total.fill(0)
        bias_total.fill(0)
        for block in blocks[lane]:
            _gather(block)
            for columns, row in zip(block.products, totals, strict=True):
                np.matmul(columns, block.gradients, out=part)
                np.add(row, part, out=row)
            if db is not None:
                np.add.reduce(block.gradients, axis=0, out=bias_part)
                np.add(bias_total, bias_part, out=bias_total)
            if dx is not None:
                _scatter(block, by_row)

    lanes = [functools.partial(run_lane, lane) for lane in range(LANES)]

    def run() -> None:
        if dx is not None:
            np.copyto(filters, np.moveaxis(w, (0, 1), (-1, -2)), casting="same_kind")
            if gaps:
                dx.fill(0)
        run_lanes(lanes, plan.work)
        first, *others = (m[3:] for m in memory)
        for other in others:
            np.add(first[0], other[0], out=first[0])
            np.add(first[2], other[2], out=first[2])
        np.copyto(np.moveaxis(dw, (0, 1), (-1, -2)), first[0].reshape(filters.shape), casting="same_kind")
        if db is not None:
            np.copyto(db, first[2], casting="same_kind")

    return run


def _gather(block: _Block) -> None:
    if block.padded:
        block.turned.fill(0)
    for target, source in (*block.turns, *block.copies, block.by_position):
        np.copyto(target, source, casting="same_kind")


def _scatter(block: _Block, by_row: Array) -> None:
    np.copyto(*block.by_filter, casting="same_kind")
    # The images are not needed any more: their memory takes dX.
    block.turned.fill(0)
    for filters, sums in zip(by_row, block.sums, strict=True):
        np.matmul(filters, block.factors, out=block.back)
        for target, source in sums:
            np.add(target, source, out=target)
    for target, source in block.results:
        np.copyto(target, source, casting="same_kind")


def _leaves_gaps(plan: TapPlan) -> bool:
    """Whether phases leave out some positions of the image."""
    w = plan.window
    return any(
        p < s or n * s < size + head
        for p, s, n, size, head in zip(plan.phases, w.stride, plan.pitch, w.image, w.head, strict=True)
    )


def _block(plan: TapPlan, x: Array, dy: Array, dx: Array | None, memory: Sequence[Array]) -> _Block:
    window, count = plan.window, len(x)
    whole, columns, transposed = (m[: n * count] for m, n in zip(memory, plan.image_sizes(), strict=False))
    sides = itertools.chain.from_iterable(zip(plan.phases, plan.pitch, strict=True))
    turned = whole.reshape(plan.channels, *sides, count)
    turns = _phase_pairs(plan, turned, x)
    position = (*window.output[1:], count)
    row = math.prod(position)
    height = plan.phases[0] * plan.pitch[0]
    flat = columns[: plan.wide * height * row]
    by_tap = flat.reshape(*window.kernel[1:], plan.channels, plan.phases[0], plan.pitch[0], *position)
    matrix = flat.reshape(plan.wide, height * row)
    copies, products = [], []
    for tap in plan.taps():
        rows: Index = (slice(None), slice(None), slice(None))
        copies.append((by_tap[tap], turned[rows + plan.place(tap, 1)]))
    for k in range(window.kernel[0]):
        phase, inside = plan.at(0, k)
        start = phase * plan.pitch[0]
        products.append(matrix[:, (start + inside.start) * row : (start + inside.stop) * row])
    depth = window.output[0] * row
    by_position = transposed.reshape(*window.output, count, plan.filters)
    factors = columns[plan.wide * depth :][: plan.filters * depth].reshape(plan.filters, depth)
    back = columns[: plan.wide * depth]
    by_back = back.reshape(*window.kernel[1:], plan.channels, window.output[0], *position)
    sums = []
    for k in range(window.kernel[0]):
        pairs = []
        for tap in plan.taps():
            channels: Index = (slice(None),)
            pairs.append((turned[channels + plan.place((k, *tap))], by_back[tap]))
        sums.append(pairs)
    return _Block(
        turns,
        copies,
        products,
        (by_position, dy.transpose(*range(2, dy.ndim), 0, 1)),
        by_position.reshape(depth, plan.filters),
        (factors.reshape(plan.filters, *window.output, count), np.moveaxis(dy, 0, -1)),
        factors,
        back.reshape(plan.wide, depth),
        sums,
        [] if dx is None else [(target, source) for source, target in _phase_pairs(plan, turned, dx)],
        whole,
        sum(target.size for target, _ in turns) < whole.size,
    )


def _phase_pairs(plan: TapPlan, turned: Array, images: Array) -> list[Pair]:
    """Pairs (turned, images) of equal shape, one a phase, for a block of images (image, channel, *space)."""
    pairs = []
    for phase in itertools.product(*map(range, plan.phases)):
        found = phase_slices(plan.window, phase, plan.window.stride, plan.pitch)
        if found is not None:
            inside: Index = tuple(itertools.chain.from_iterable(zip(phase, found[0], strict=True)))
            source: Index = (slice(None), slice(None), *found[1])
            pairs.append((turned[(slice(None), *inside)], np.moveaxis(images[source], 0, -1)))
    return pairs
