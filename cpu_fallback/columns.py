"""Convolution as matrix products: images are spread into columns, one a window, and back (im2col, col2im).

All arrays are handled through *canonical views*: images as (group, channel, image, *space), columns as
(group, channel, *kernel, image, *output). The memory behind follows the order of the images: channels
first, columns are a (channel * kernel) x (image * output) matrix a group; channels last, its transpose.
Images are handled in blocks, so that scratch memory stays small and matrices stay large.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpunet.cpu_fallback.lanes import LANES, TRAFFIC, run_lanes
from gpunet.operators.window import Window
from gpunet.specs import Shape

Array = npt.NDArray[Any]
Slices = tuple[slice, ...]
Index = tuple[Any, ...]
#: What is done to the part of a tensor at an index: called when a kernel is bound, for each part.
After = Callable[[Index], Callable[[], Any]]

#: Bytes of columns that a block of images may take; a single image may need more.
BLOCK_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a convolution and the division of its batch into blocks."""

    window: Window
    groups: int
    batch: int
    channels: int
    filters: int
    dtype: np.dtype
    block: int

    @property
    def filter_shape(self) -> Shape:
        """Filters as a stack of matrices: (group, output channel, element)."""
        return self.groups, self.filters // self.groups, self.window.taps * (self.channels // self.groups)

    @property
    def pointwise(self) -> bool:
        """Whether the columns are the images themselves (1x1 filters without steps and padding)."""
        w = self.window
        plain = w.taps == 1 and all(s == 1 for s in w.stride) and all(p == 0 for p in (*w.head, *w.tail))
        # A transposed convolution can have positions behind all windows.
        return plain and w.image == w.output

    def columns_size(self) -> int:
        """Elements of the columns of one block."""
        return self.channels * self.window.taps * self.block * self.window.positions

    def output_size(self) -> int:
        """Elements of the output of one block."""
        return self.filters * self.block * self.window.positions

    def blocks(self) -> Iterator[tuple[int, int]]:
        """First and past-the-last image of each block."""
        for first in range(0, self.batch, self.block):
            yield first, min(first + self.block, self.batch)


def tensor_size(window: Window, groups: int, batch: int, channels: int, filters: int) -> int:
    """Elements of images, filters and outputs, by which the scratch of small convolutions is limited."""
    image = channels * math.prod(window.image) + filters * window.positions
    return batch * image + filters * window.taps * channels // groups


def plan(window: Window, groups: int, batch: int, channels: int, filters: int, dtype: np.dtype) -> Layout:
    """Chooses the block size: columns and outputs of a block take at most two thirds of the whole tensors."""
    compute = np.dtype(np.float32) if dtype == np.float16 else dtype
    columns = max(1, channels * window.taps * window.positions)
    limit = 2 * tensor_size(window, groups, batch, channels, filters) // 3
    fitting = limit // (columns + filters * window.positions)
    most = max(1, min(batch, BLOCK_BYTES // (columns * compute.itemsize), fitting))
    count = max(1, -(-batch // most))
    return Layout(window, groups, batch, channels, filters, compute, max(1, -(-batch // count)))


def mirrored(window: Window) -> Window:
    """The window of dX as a convolution of dY with mirrored filters, where the window has no steps."""
    reach = [d * (k - 1) for d, k in zip(window.dilation, window.kernel, strict=True)]
    return replace(
        window,
        head=tuple(r - h for r, h in zip(reach, window.head, strict=True)),
        tail=tuple(r - t for r, t in zip(reach, window.tail, strict=True)),
        image=window.output,
        output=window.image,
    )


def mirrored_filters(filters: Array) -> Array:
    """Filters (output channel, channel, *kernel) as that convolution takes them."""
    view: Array = np.flip(filters, tuple(range(2, filters.ndim))).swapaxes(0, 1)
    return view


def canonical_images(images: Array, groups: int, channels_last: bool) -> Array:
    """A view of a batch of images as (group, channel, image, *space)."""
    if channels_last:
        split = images.reshape(*images.shape[:-1], groups, images.shape[-1] // groups)
        return np.moveaxis(split, (-2, -1), (0, 1))
    split = images.reshape(images.shape[0], groups, images.shape[1] // groups, *images.shape[2:])
    return np.moveaxis(split, 0, 2)


def columns_views(layout: Layout, memory: Array, count: int) -> tuple[Array, Array]:
    """Columns of ``count`` images in flat memory: canonical, and as (group, element, position) matrices."""
    w, groups = layout.window, layout.groups
    channels = layout.channels // groups
    elements, positions = w.taps * channels, count * w.positions
    flat = memory[: groups * elements * positions]
    if w.channels_last:
        base = flat.reshape(groups, count, *w.output, *w.kernel, channels)
        axes = (0, 2 * w.rank + 2, *range(w.rank + 2, 2 * w.rank + 2), *range(1, w.rank + 2))
        return base.transpose(axes), flat.reshape(groups, positions, elements).transpose(0, 2, 1)
    return flat.reshape(groups, channels, *w.kernel, count, *w.output), flat.reshape(
        groups, elements, positions
    )


def axis_slices(window: Window, axis: int, k: int) -> tuple[slice, slice] | None:
    """Outputs, and image positions, of position ``k`` of one side of the window; ``None`` if never inside.

    The image positions are ``o * stride + k * dilation - head``, for the outputs ``o`` that lie inside.
    """
    stride, size = window.stride[axis], window.image[axis]
    offset = k * window.dilation[axis] - window.head[axis]
    first = max(0, -(offset // stride))
    last = min(window.output[axis], (size - 1 - offset) // stride + 1)
    if last <= first:
        return None
    return slice(first, last), slice(first * stride + offset, (last - 1) * stride + offset + 1, stride)


def tap_slices(window: Window, tap: Shape) -> tuple[Slices, Slices] | None:
    """The same in all dimensions, for a position ``tap`` of the window."""
    found = [axis_slices(window, axis, k) for axis, k in enumerate(tap)]
    inside = tuple(f[0] for f in found if f is not None)
    source = tuple(f[1] for f in found if f is not None)
    return (inside, source) if len(inside) == len(tap) else None


def phase_slices(window: Window, phase: Shape, stride: Shape, most: Shape) -> tuple[Slices, Slices] | None:
    """Positions of a phase that lie inside of the image, and where; ``None`` if none does.

    Position ``p`` (less than ``most``) of a phase lies at ``p * stride + phase - head`` of the image.
    """
    inside, source = [], []
    for f, s, head, size, end in zip(phase, stride, window.head, window.image, most, strict=True):
        first = max(0, -((f - head) // s))
        last = min(end, (size - 1 + head - f) // s + 1)
        if last <= first:
            return None
        inside.append(slice(first, last))
        source.append(slice(first * s + f - head, (last - 1) * s + f - head + 1, s))
    return tuple(inside), tuple(source)


def tap_pairs(window: Window, columns: Array, images: Array) -> list[tuple[Array, Array]]:
    """Views (columns, images) of equal shape, one pair a tap, of canonical columns and images of a block."""
    pairs = []
    for tap in itertools.product(*map(range, window.kernel)):
        found = tap_slices(window, tap)
        if found is not None:
            inside: Index = (slice(None), slice(None), *tap, slice(None), *found[0])
            source: Index = (..., *found[1])
            pairs.append((columns[inside], images[source]))
    return pairs


def padding_views(window: Window, columns: Array) -> list[Array]:
    """Views of the columns that lie in the padding."""
    views = []
    for tap in itertools.product(*map(range, window.kernel)):
        at: Index = (slice(None), slice(None), *tap)
        mine = columns[at]
        found = tap_slices(window, tap)
        if found is None:
            views.append(mine)
            continue
        for axis, (inside, count) in enumerate(zip(found[0], window.output, strict=False)):
            before: Slices = (slice(None),) * (3 + axis)
            if inside.start > 0:
                views.append(mine[(*before, slice(0, inside.start))])
            if inside.stop < count:
                views.append(mine[(*before, slice(inside.stop, None))])
    return views


def image_matrices(layout: Layout, images: Array, first: int, last: int) -> Array | None:
    """Images ``first`` to ``last`` as (group, channel, position) matrices; ``None`` where no view does it."""
    w, groups = layout.window, layout.groups
    if images.dtype != layout.dtype or not images.flags.c_contiguous:
        return None
    block = images[first:last]
    if w.channels_last:
        return block.reshape((last - first) * w.positions, groups, images.shape[-1] // groups).transpose(
            1, 2, 0
        )
    if last - first == 1:
        return block.reshape(groups, images.shape[1] // groups, w.positions)
    return None


def needs_stacking(layout: Layout, dtype: np.dtype) -> bool:
    """Whether a block of contiguous outputs of this type has to be copied to be used as matrices."""
    return dtype != layout.dtype or not (layout.window.channels_last or layout.block == 1)


def stacked_outputs(layout: Layout, memory: Array, count: int) -> tuple[Array, Array]:
    """Outputs of ``count`` images in flat memory: canonical, and as (group, filter, position) matrices."""
    w, groups = layout.window, layout.groups
    filters = layout.filters // groups
    flat = memory[: layout.filters * count * w.positions]
    return flat.reshape(groups, filters, count, *w.output), flat.reshape(groups, filters, count * w.positions)


class Spread(NamedTuple):
    """The columns of one block of images."""

    paddings: list[Array]  #: parts of the columns that lie in the padding
    pairs: list[
        tuple[Array, Array]
    ]  #: (columns, images): equal shapes, a pair a tap; none where the images serve as columns
    matrices: Array  #: columns as matrices (group, element, position)

    def gather(self) -> None:
        """Copies the images into the columns."""
        for view in self.paddings:
            view.fill(0)
        run_lanes([partial(_copy, self.pairs[lane::LANES]) for lane in range(LANES)], self._work())

    def scatter(self) -> None:
        """Adds the columns to the images."""
        channels = self.pairs[0][0].shape[1] if self.pairs else 0
        bounds = [channels * lane // LANES for lane in range(LANES + 1)]
        parts = [slice(*bounds[lane : lane + 2]) for lane in range(LANES)]
        run_lanes([partial(_add, self.pairs, part) for part in parts], self._work())

    def _work(self) -> int:
        return TRAFFIC * sum(columns.size for columns, _ in self.pairs)


def _copy(pairs: list[tuple[Array, Array]]) -> None:
    for columns, images in pairs:
        np.copyto(columns, images, casting="same_kind")


def _add(pairs: list[tuple[Array, Array]], channels: slice) -> None:
    """For some channels: positions of the window meet in the images."""
    for columns, images in pairs:
        target = images[:, channels]
        np.add(target, columns[:, channels], out=target, casting="same_kind")


class Stack(NamedTuple):
    """The outputs of one block of images, or their gradients."""

    outputs: Array  #: canonical
    copy: Array | None  #: a copy, where their own memory does not serve as matrices
    matrices: Array  #: one of the two as matrices (group, output channel, position)


def memory_of(size: int, dtype: np.dtype, declared: Array) -> Array:
    """Scratch memory; made here where none was declared, as only arrays tell that they are not contiguous."""
    return declared if declared.size >= size else np.empty(size, dtype)


def spread_blocks(layout: Layout, images: Array, memory: Array) -> list[Spread]:
    """The columns of each block of ``images``, in flat memory."""
    window = layout.window
    canonical = canonical_images(images, layout.groups, window.channels_last)
    spreads = []
    for first, last in layout.blocks():
        matrices = image_matrices(layout, images, first, last) if layout.pointwise else None
        if matrices is not None:
            spreads.append(Spread([], [], matrices))
        else:
            memory = memory_of(layout.columns_size(), layout.dtype, memory)
            columns, matrices = columns_views(layout, memory, last - first)
            pairs = tap_pairs(window, columns, canonical[:, :, first:last])
            spreads.append(Spread(padding_views(window, columns), pairs, matrices))
    return spreads


def stack_blocks(layout: Layout, outputs: Array, memory: Array) -> list[Stack]:
    """The outputs of each block, in flat memory where they have to be copied."""
    canonical = canonical_images(outputs, layout.groups, layout.window.channels_last)
    stacks = []
    for first, last in layout.blocks():
        copy = None
        matrices = image_matrices(layout, outputs, first, last)
        if matrices is None:
            memory = memory_of(layout.output_size(), layout.dtype, memory)
            copy, matrices = stacked_outputs(layout, memory, last - first)
        stacks.append(Stack(canonical[:, :, first:last], copy, matrices))
    return stacks
