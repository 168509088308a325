"""Convolution with 3x3 filters by Winograd's minimal filtering, F(2x2, 3x3), for many channels.

A tile of 2x2 outputs depends on 4x4 inputs. With tile ``d`` and filter ``g``,
``Y = A^T ((G g G^T) * (B^T d B)) A`` takes 16 multiplications instead of 36, and sums over channels turn them
into 16 matrix products.
The transformations of images and outputs only add and subtract, so results are as exact as direct ones.
Source: A. Lavin and S. Gray, "Fast algorithms for convolutional neural networks", CVPR 2016.

Images are copied into the order (row, column, image, channel), with padding. There both steps of a
transformation are products of a small matrix with overlapping views, and tiles are matrices
(position, channel).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from gpunet.cpu_fallback.columns import After
from gpunet.cpu_fallback.lanes import LANES, SMALL_PRODUCT, run_lanes
from gpunet.cpu_fallback.products import product
from gpunet.operators.window import Window
from gpunet.specs import TensorSpec, spec

Array = npt.NDArray[Any]

#: Outputs along a side of a tile, inputs along it.
_OUT: Final = 2
_IN: Final = 4
_INPUT: Final = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], np.float32)
_FILTER: Final = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)
_OUTPUT: Final = np.array([[1, 1, 1, 0], [0, 1, -1, -1]], np.float32)
_BACK: Final = np.ascontiguousarray(_OUTPUT.T)

#: With fewer channels, transformations take longer than they save; with more filters, those of filters do.
_LEAST_CHANNELS: Final = 48
_MOST_FILTERS: Final = 1 << 16
#: Tiles in a block: what becomes of them stays in the cache.
_TILES: Final = 64
#: More filters are too many for small products and for the cache: they are read once for more tiles.
_MANY_FILTERS: Final = 1 << 15
_MORE_TILES: Final = 100
#: Fewer tiles in all do not make up for the transformation of the filters.
_LEAST_TILES: Final = 256


@dataclass(frozen=True, slots=True)
class WinogradPlan:
    """Sizes of a convolution by tiles, and of its blocks of images and rows of tiles."""

    window: Window
    batch: int
    channels: int
    filters: int
    images: int  #: images in a block
    rows: int  #: rows of tiles in a block

    @property
    def across(self) -> int:
        """Tiles in a row."""
        return -(-self.window.output[1] // _OUT)

    @property
    def down(self) -> int:
        """Rows of tiles in an image."""
        return -(-self.window.output[0] // _OUT)

    @property
    def tiles(self) -> int:
        """Tiles in a block."""
        return self.images * self.rows * self.across

    @property
    def width(self) -> int:
        """Columns of the padded images."""
        return _OUT * self.across + _IN - _OUT

    @property
    def work(self) -> int:
        """Multiplications."""
        return _IN**2 * self.batch * self.down * self.across * self.channels * self.filters

    def scratch(self) -> list[TensorSpec]:
        """Filters, in order and transformed; for each lane, four arrays.

        They are padded images, their rows transformed, and transformed tiles of inputs and of outputs; the
        first two serve again for the outputs with their rows, and then their columns, transformed back.
        """
        row = self.width * self.images * self.channels
        made = self.tiles * self.filters
        lane = [
            max((_OUT * self.rows + _IN - _OUT) * row, _OUT * _IN * made),
            max(self.rows * _IN * row, _OUT**2 * made),
            _IN**2 * self.tiles * self.channels,
            _IN**2 * made,
        ]
        pairs = self.channels * self.filters
        return [spec((n,), np.dtype(np.float32)) for n in [9 * pairs, _IN**2 * pairs, *lane * LANES]]

    def blocks(self) -> Iterator[tuple[int, int, WinogradPlan]]:
        """The first image and the first row of tiles of each block, and its own sizes."""
        for image in range(0, self.batch, self.images):
            for row in range(0, self.down, self.rows):
                images, rows = min(self.images, self.batch - image), min(self.rows, self.down - row)
                yield image, row, replace(self, images=images, rows=rows)


def plan_winograd(
    window: Window, batch: int, channels: int, filters: int, dtype: np.dtype
) -> WinogradPlan | None:
    """A plan, or ``None`` where another way is better or the only one."""
    if (
        dtype != np.float32
        or window.channels_last
        or window.kernel != (3, 3)
        or window.stride != (1, 1)
        or window.dilation != (1, 1)
        or min(channels, filters) < _LEAST_CHANNELS
        or channels * filters > _MOST_FILTERS
    ):
        return None
    most = min(_TILES, SMALL_PRODUCT // (channels * filters))
    if channels * filters > _MANY_FILTERS:
        most = _MORE_TILES
    one = WinogradPlan(window, batch, channels, filters, 1, 1)
    if batch * one.tiles * one.down < _LEAST_TILES or one.tiles > most:
        return None
    rows = min(one.down, most // one.tiles)
    return replace(one, rows=rows, images=min(-(-batch // LANES), most // (one.tiles * rows)))


def transform_filters(plan: WinogradPlan, filters: Array, ordered: Array, transformed: Array) -> None:
    """``G g G^T`` of filters (output channel, channel, 3, 3), through flat memory into flat memory."""
    channels, made = plan.channels, plan.filters
    np.copyto(ordered.reshape(3, 3, channels, made), filters.transpose(2, 3, 1, 0))
    both = np.kron(_FILTER, _FILTER)
    by_channel = ordered.reshape(9, channels, made).transpose(1, 0, 2)
    product(both, by_channel, transformed.reshape(_IN**2, channels, made).transpose(1, 0, 2))


def bind_winograd(
    plan: WinogradPlan,
    images: Array,
    outputs: Array,
    transformed: Array,
    bias: Array | None,
    memory: Sequence[Array],
    after: After | None = None,
) -> list[Callable[[], None]]:
    """One callable a lane: the convolution of its blocks.

    ``images`` (image, channel, *space) and ``outputs`` (image, output channel, *output) are whole tensors,
    ``transformed`` the filters, ``bias`` one number an output channel, ``memory`` flat memory of all lanes,
    ``after`` what is done to each part of the outputs.
    """
    filters = transformed.reshape(_IN**2, plan.channels, plan.filters)
    lanes: list[list[Callable[[], Any]]] = [[] for _ in range(LANES)]
    for number, (image, row, block) in enumerate(plan.blocks()):
        lane = number % LANES
        own = images[image : image + block.images], outputs[image : image + block.images]
        lanes[lane].append(_step(block, row, *own, filters, bias, memory[4 * lane :][:4]))
        if after is not None:
            height = slice(_OUT * row, _OUT * (row + block.rows))
            lanes[lane].append(after((slice(image, image + block.images), slice(None), height)))
    return [functools.partial(_run, lane) for lane in lanes]


def _run(steps: list[Callable[[], Any]]) -> None:
    for step in steps:
        step()


def _step(
    plan: WinogradPlan,
    row: int,
    images: Array,
    outputs: Array,
    filters: Array,
    bias: Array | None,
    memory: Sequence[Array],
) -> Callable[[], None]:
    """The convolution of one block, whose first row of tiles is ``row``."""
    factors = _tiles(memory[2], plan, plan.channels)
    transform = _bind_tiles(plan, row, images, _INPUT, plan.window.head, memory[:2], factors)
    targets = _tiles(memory[3], plan, plan.filters)
    made = plan.tiles * plan.filters
    by_row = targets.reshape(_IN, _IN * made)
    result_rows = memory[0][: _OUT * _IN * made].reshape(_OUT, _IN, made)
    results = memory[1][: _OUT**2 * made].reshape(_OUT, _OUT, made)
    by_place = results.reshape(_OUT, _OUT, plan.rows, plan.across, plan.images, plan.filters)
    finals = _output_views(plan, row, outputs, by_place)
    everywhere = targets[_IN + 1]

    def run() -> None:
        transform()
        np.matmul(factors, filters, out=targets)
        if bias is not None:
            # What stands at this place is added to each of the outputs of a tile.
            np.add(everywhere, bias, out=everywhere)
        np.matmul(_OUTPUT, by_row, out=result_rows.reshape(_OUT, _IN * made))
        np.matmul(_OUTPUT, result_rows, out=results)
        for final, result in finals:
            np.copyto(final, result)

    return run


def _tiles(memory: Array, plan: WinogradPlan, channels: int) -> Array:
    """Transformed tiles of a block in flat memory: (place in the tile, tile, channel)."""
    return memory[: _IN**2 * plan.tiles * channels].reshape(_IN**2, plan.tiles, channels)


def _bind_tiles(
    plan: WinogradPlan,
    row: int,
    images: Array,
    matrix: Array,
    head: Sequence[int],
    memory: Sequence[Array],
    tiles: Array,
) -> Callable[[], None]:
    """Writes ``matrix d matrix^T`` of each tile ``d`` of a block of images (image, channel, *space).

    Tiles begin at every other position, less ``head``, and are as large as ``matrix`` is wide. ``memory`` is
    for the padded images and for what the first of the two products gives.
    """
    rows, across, count, channels = plan.rows, plan.across, plan.images, images.shape[1]
    side, size = matrix.shape[1], tiles.itemsize
    height, width = (_OUT * n + side - _OUT for n in (rows, across))
    pixel = count * channels
    line = width * pixel
    padded = memory[0][: height * line].reshape(height, width, count, channels)
    # Views that overlap: each row of tiles, and in it each tile.
    bands = as_strided(padded, (rows, side, line), (_OUT * line * size, line * size, size))
    sums = memory[1][: rows * _IN * line].reshape(rows, _IN, line)
    columns = as_strided(
        sums,
        (rows, _IN, across, side, pixel),
        (_IN * line * size, line * size, _OUT * pixel * size, pixel * size, size),
    )
    by_place = tiles.reshape(_IN, _IN, rows, across, pixel).transpose(2, 0, 3, 1, 4)
    inside, source, paddings = _image_views((_OUT * row, 0), head, images, padded)

    def run() -> None:
        for padding in paddings:
            padding.fill(0)
        np.copyto(inside, source)
        np.matmul(matrix, bands, out=sums)
        np.matmul(matrix, columns, out=by_place)

    return run


def _image_views(
    starts: Sequence[int], heads: Sequence[int], images: Array, padded: Array
) -> tuple[Array, Array, list[Array]]:
    """The part of the padded images that lies inside, the images there, and the parts that are padding."""
    cuts = []
    for start, head, size, length in zip(starts, heads, images.shape[2:], padded.shape, strict=False):
        first = min(max(0, head - start), length)
        last = max(first, min(length, size + head - start))
        cuts.append((first, last, first + start - head))
    (top, bottom, from_row), (left, right, from_column) = cuts
    source = images[:, :, from_row : from_row + bottom - top, from_column : from_column + right - left]
    paddings = [padded[:top], padded[bottom:], padded[top:bottom, :left], padded[top:bottom, right:]]
    inside = padded[top:bottom, left:right]
    return inside, source.transpose(2, 3, 0, 1), [p for p in paddings if p.size]


def _output_views(plan: WinogradPlan, row: int, outputs: Array, results: Array) -> list[tuple[Array, Array]]:
    """Pairs (outputs, results) of equal shape, one for each place in a tile."""
    pairs = []
    for down in range(_OUT):
        for across in range(_OUT):
            stop = _OUT * (row + plan.rows)
            final = outputs[:, :, _OUT * row + down : stop : _OUT, across::_OUT].transpose(2, 3, 0, 1)
            pairs.append((final, results[down, across, : final.shape[0], : final.shape[1]]))
    return pairs


def filter_gradient_scratch(plan: WinogradPlan) -> list[TensorSpec]:
    """For each lane, six arrays.

    They are padded images, their rows transformed, tiles of images and of dY, a product and a sum.
    """
    both = plan.channels + plan.filters
    row = plan.width * plan.images * max(plan.channels, plan.filters)
    pairs = plan.channels * plan.filters
    lane = [(_OUT * plan.rows + _IN - _OUT) * row, plan.rows * _IN * row]
    lane += [_IN**2 * plan.tiles * n for n in (plan.channels, both - plan.channels)]
    lane += [_IN**2 * pairs] * 2
    return [spec((n,), np.dtype(np.float32)) for n in lane * LANES]


def bind_filter_gradient(
    plan: WinogradPlan, images: Array, dy: Array, dw: Array, scratch: Sequence[Array]
) -> Callable[[], None]:
    """Writes ``dW = G^T (sum over tiles of (B^T d B) * (A dY A^T)) G``, the transpose of the convolution."""
    memory = [scratch[i : i + 6] for i in range(0, len(scratch), 6)]
    steps: list[list[tuple[Callable[[], None], Callable[[], None], Array, Array]]] = [
        [] for _ in range(LANES)
    ]
    for number, (image, row, block) in enumerate(plan.blocks()):
        own = memory[number % LANES]
        at = slice(image, image + block.images)
        factors, gradients = _tiles(own[2], block, plan.channels), _tiles(own[3], block, plan.filters)
        from_x = _bind_tiles(block, row, images[at], _INPUT, plan.window.head, own[:2], factors)
        from_dy = _bind_tiles(block, row, dy[at], _BACK, (0, 0), own[:2], gradients)
        steps[number % LANES].append((from_x, from_dy, gradients.transpose(0, 2, 1), factors))
    shape = (_IN**2, plan.filters, plan.channels)
    both = np.kron(_FILTER, _FILTER)
    direct = dw.flags.c_contiguous
    result = (dw if direct else np.empty(dw.shape, dw.dtype)).reshape(-1, 9)

    def run_lane(lane: int) -> None:
        part, total = (m.reshape(shape) for m in memory[lane][4:])
        total.fill(0)
        for from_x, from_dy, gradients, factors in steps[lane]:
            from_x()
            from_dy()
            np.matmul(gradients, factors, out=part)
            np.add(total, part, out=total)

    lanes = [functools.partial(run_lane, lane) for lane in range(LANES)]

    def run() -> None:
        run_lanes(lanes, plan.work)
        total, *others = (m[5] for m in memory)
        for other in others:
            np.add(total, other, out=total)
        product(total.reshape(_IN**2, -1).T, both, result)
        if not direct:
            np.copyto(dw, result.reshape(dw.shape))

    return run
