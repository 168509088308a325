"""NumPy kernels of pooling.

A maximum or a sum over a window is taken one dimension after the other, a pass over shifted views for each
position along a side of the window, and so are the gradients of sums. Images are handled in blocks that
stay in the cache.
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

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.columns import Index, Slices, axis_slices, canonical_images, phase_slices
from gpunet.cpu_fallback.disjoint import bind_disjoint, plan_disjoint
from gpunet.cpu_fallback.lanes import LANES, run_lanes
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.pooling import POOLING_RANKS, pooling_window
from gpunet.operators.window import Window
from gpunet.specs import Shape, TensorSpec, spec

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]
Run = Callable[[], Any]

#: Bytes of images (or of what becomes of them) that a block may take; a single image may need more.
BLOCK_BYTES: Final = 1 << 20
#: Bytes of each of the few arrays of a block of a gradient of a maximum.
PHASE_BYTES: Final = 1 << 16


def _types(kind: str, end: str = "") -> list[str]:
    return [f"{kind}Pool{suffix}{end}" for suffix in POOLING_RANKS]


def _blocks(window: Window, batch: int, channels: int, dtype: np.dtype) -> list[tuple[int, int]]:
    """First and past-the-last image of each block."""
    size = channels * math.prod(map(max, window.image, window.output)) * dtype.itemsize
    count = max(1, min(batch, BLOCK_BYTES // max(1, size)))
    return [(first, min(first + count, batch)) for first in range(0, batch, count)]


def _largest(blocks: list[tuple[int, int]]) -> int:
    return max((last - first for first, last in blocks), default=0)


def _sizes(window: Window) -> list[Shape]:
    """Spatial sizes after 0, 1, ... dimensions are pooled, the first dimension first."""
    return [(*window.output[:d], *window.image[d:]) for d in range(window.rank + 1)]


def _stage(window: Window, memory: Array, count: int, channels: int, sizes: Shape) -> Array:
    """Flat memory as ``count`` images of these sizes, canonical: (channel, image, *space)."""
    flat = memory[: count * channels * math.prod(sizes)]
    shape = (count, *sizes, channels) if window.channels_last else (count, channels, *sizes)
    return _canonical(window, flat.reshape(shape))


def _canonical(window: Window, images: Array) -> Array:
    view: Array = canonical_images(images, 1, window.channels_last)[0]
    return view


def _window(op: Operator, x: Any) -> tuple[Window, int, int]:
    """The window, and the numbers of images and channels."""
    window = pooling_window(op, spec(x.shape, x.dtype))
    return window, x.shape[0], x.shape[-1 if window.channels_last else 1]


def _accumulator(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def _pool_axis(
    window: Window, axis: int, combine: np.ufunc, neutral: float, source: Array, target: Array
) -> Run:
    """The pass that combines ``source`` along one spatial dimension into ``target``."""
    lead = (slice(None),) * (2 + axis)
    found = [axis_slices(window, axis, k) for k in range(window.kernel[axis])]
    taps = [f for f in found if f is not None]
    if window.output[axis] == 1 and len(taps) > 2:
        rows = source[(*lead, slice(taps[0][1].start, taps[-1][1].stop))]
        return functools.partial(
            combine.reduce, rows, axis=2 + axis, dtype=target.dtype, out=target, keepdims=True
        )
    views = [(target[(*lead, inside)], source[(*lead, outside)]) for inside, outside in taps]
    whole = [s for t, s in views if t.shape == target.shape]
    partial = [(t, s) for t, s in views if t.shape != target.shape]

    def run() -> None:
        if len(whole) > 1:
            combine(whole[0], whole[1], out=target, dtype=target.dtype)
        elif whole:
            np.copyto(target, whole[0])
        else:
            target.fill(neutral)
        for rows in whole[2:]:
            combine(target, rows, out=target)
        for into, rows in partial:
            combine(into, rows, out=into)

    return run


def _in_turn(passes: list[Run]) -> Run:
    def run() -> None:
        for step in passes:
            step()

    return run


def _stage_memory(op: Operator, x: Any, y: Any, dtype: np.dtype) -> list[TensorSpec]:
    """Two memories, between which passes alternate; the last pass writes the output where the types agree."""
    window, batch, channels = _window(op, x)
    count = _largest(_blocks(window, batch, channels, dtype)) * channels
    sizes = [math.prod(s) * count for s in _sizes(window)]
    used = sizes[1:] if dtype != x.dtype else sizes[1:-1]
    return [spec((max(used[i::2], default=0),), dtype) for i in range(2)]


def _pool(
    x: Array,
    y: Array,
    ctx: KernelContext,
    combine: np.ufunc,
    neutral: float,
    dtype: np.dtype,
    scale: Array | None = None,
) -> list[Run]:
    """Passes that pool ``x`` into ``y``, and multiply with ``scale`` of shape (*output)."""
    window, batch, channels = _window(ctx.op, x)
    images, outputs = _canonical(window, x), _canonical(window, y)
    passes: list[Run] = []
    for first, last in _blocks(window, batch, channels, dtype):
        source = images[:, first:last]
        final = outputs[:, first:last]
        for axis, sizes in enumerate(_sizes(window)[1:]):
            if axis == window.rank - 1 and dtype == y.dtype:
                target = final
            else:
                target = _stage(window, ctx.scratch[axis % 2], last - first, channels, sizes)
            passes.append(_pool_axis(window, axis, combine, neutral, source, target))
            source = target
        if scale is not None:
            passes.append(functools.partial(np.multiply, source, scale, out=final, casting="same_kind"))
        elif source is not final:
            passes.append(functools.partial(np.copyto, final, source, casting="same_kind"))
    return passes


def _max_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    return _stage_memory(op, inputs[0], outputs[0], inputs[0].dtype)


@kernel(*_types("Max"), binds=True, scratch=_max_scratch)
def max_pool(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Run:
    """``Y`` is the maximum of each window."""
    return _in_turn(_pool(inputs[0], outputs[0], ctx, np.maximum, -np.inf, inputs[0].dtype))


@dataclass(frozen=True)
class _Phases:
    """How the gradient of a maximum sees an image: as phases, every ``stride``-th position in each dimension.

    As with gradients of convolutions (see ``phases``), a position of the window is then one distance in
    memory, and takes a few passes over long pieces.
    """

    window: Window
    stride: Shape
    images: int  #: images in a block
    channels: int  #: channels in a block

    @functools.cached_property
    def far(self) -> Shape:
        """The greatest shift in each dimension."""
        return tuple((k - 1) // s for k, s in zip(self.window.kernel, self.stride, strict=True))

    @functools.cached_property
    def pitch(self) -> Shape:
        """Sizes of a phase: those of the output and the greatest shift."""
        return tuple(n + f for n, f in zip(self.window.output, self.far, strict=True))

    @property
    def cells(self) -> int:
        """Numbers in one phase of a block."""
        return self.images * self.channels * math.prod(self.pitch)

    def shift(self, position: Shape) -> int:
        """The distance of a position of a phase from its first one, in numbers."""
        distance = 0
        for p, size in zip(position, self.pitch, strict=True):
            distance = distance * size + p
        return distance * (self.channels if self.window.channels_last else 1)

    def shifts(self, phase: Shape) -> list[int]:
        """Distances at which positions of the window meet a phase, the shortest first."""
        ranges = [range(len(range(f, k, s))) for f, k, s in self._axes(phase)]
        return [self.shift(position) for position in itertools.product(*ranges)]

    def _axes(self, phase: Shape) -> Iterator[tuple[int, int, int]]:
        return zip(phase, self.window.kernel, self.stride, strict=True)

    def view(self, memory: Array, images: int, channels: int) -> Array:
        """A phase in flat memory, as a tensor."""
        return memory[: images * channels * math.prod(self.pitch)].reshape(self._order(images, channels))

    def _order(self, images: int, channels: int) -> Shape:
        inner = self.pitch
        return (images, *inner, channels) if self.window.channels_last else (images, channels, *inner)

    def within(self, spatial: Slices) -> Index:
        """An index of a tensor, given that of its spatial dimensions."""
        every = slice(None)
        return (every, *spatial, every) if self.window.channels_last else (every, every, *spatial)


def _phases(op: Operator, x: Any) -> _Phases:
    window, batch, channels = _window(op, x)
    # With one output, any step does: by that of the window, no two of its positions share a phase.
    steps = zip(window.stride, window.kernel, window.output, strict=True)
    stride = tuple(k if n == 1 else s for s, k, n in steps)
    one = _Phases(window, stride, 1, 1)
    most = max(1, PHASE_BYTES // (x.dtype.itemsize * max(1, one.cells)))
    if most < channels:
        return _Phases(window, stride, 1, most)
    return _Phases(window, stride, max(1, min(-(-batch // LANES), most // max(1, channels))), channels)


def _max_gradient_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    """For each lane, one phase of X, of Y, of dY, of dX, products, and a mask; or what windows apart need."""
    disjoint = plan_disjoint(*_window(op, inputs[0]), inputs[0].dtype)
    if disjoint is not None:
        return disjoint.scratch()
    return _phase_scratch(op, inputs[0])


def _phase_scratch(op: Operator, x: Any) -> list[TensorSpec]:
    cells, dtype = _phases(op, x).cells, x.dtype
    return [spec((cells,), kind) for kind in (*[dtype] * 5, np.dtype(np.bool_))] * LANES


class _Phase(NamedTuple):
    """Views that serve one phase of a block."""

    image: tuple[Array, Array]  #: where X is copied to, and X
    target: tuple[Array, Array]  #: dX, and what is copied there
    unclean: Array  #: what no position of the window writes first
    taps: list[tuple[Array, Array, bool]]  #: X, bit patterns of dX, and whether they are written first


@kernel(*_types("Max", "Gradient"), binds=True, scratch=_max_gradient_scratch)
def max_pool_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Run:
    """``dX += dY where X == Y``, for each position inside the window.

    All that tie for a maximum get the gradient, as in Caffe2.
    """
    (dx,) = outputs
    plan = _phases(ctx.op, dx)
    window, batch, channels = _window(ctx.op, dx)
    scratch: Sequence[Array] = ctx.scratch
    disjoint = plan_disjoint(window, batch, channels, dx.dtype)
    if disjoint is not None:
        if all(a.flags.c_contiguous for a in (*inputs, dx)):
            x, y, dy = inputs
            return bind_disjoint(disjoint, x, y, dy, dx, scratch)
        # Only arrays tell that they are not contiguous, so nothing is declared for that.
        scratch = [np.empty(s.shape, s.dtype) for s in _phase_scratch(ctx.op, dx)]
    found = {
        phase: phase_slices(window, phase, plan.stride, plan.pitch)
        for phase in itertools.product(*(range(min(k, s)) for _, k, s in plan._axes(window.kernel)))
    }
    covered = math.prod(window.image) == sum(
        math.prod(len(range(s.start, s.stop, s.step)) for s in slices[1])
        for slices in found.values()
        if slices
    )
    lanes: list[list[Run]] = [[] for _ in range(LANES)]
    starts = itertools.product(range(0, batch, plan.images), range(0, channels, plan.channels))
    for number, (image, channel) in enumerate(starts):
        lane = number % LANES
        at: Index = (slice(image, image + plan.images), slice(channel, channel + plan.channels))
        if window.channels_last:
            at = (at[0], *[slice(None)] * window.rank, at[1])
        x, y, dy, target = (a[at] for a in (*inputs, dx))
        memory = scratch[6 * lane :][:6]
        lanes[lane].append(_phase_step(plan, found, covered, (x, y, dy, target), memory))
    # A comparison, a selection and a sum take about as long as this many multiplications in a matrix product.
    work = 40 * inputs[1].size * window.taps
    return functools.partial(run_lanes, [_in_turn(lane) for lane in lanes], work)


def _phase_step(
    plan: _Phases, found: dict[Shape, Any], covered: bool, block: Arrays, memory: Sequence[Array]
) -> Run:
    """The gradient of one block of images and channels."""
    x, y, dy, dx = block
    images, channels = x.shape[0], x.shape[-1 if plan.window.channels_last else 1]
    if (images, channels) != (plan.images, plan.channels):
        plan = replace(plan, images=images, channels=channels)
    count = plan.cells - plan.shift(plan.far)
    bits = np.dtype(f"i{x.dtype.itemsize}")
    outputs, copies = [], []
    for tensor, flat in zip((y, dy), memory[1:3], strict=True):
        if plan.pitch == plan.window.output and tensor.flags.c_contiguous:
            outputs.append(tensor.reshape(-1))
            continue
        inner = plan.within(tuple(slice(0, n) for n in plan.window.output))
        copies.append((plan.view(flat, images, channels)[inner], tensor))
        outputs.append(flat[:count])
    result, gradient = outputs[0], outputs[1].view(bits)
    # Between rows, the gradient is zero.
    gap = memory[2][:count] if plan.pitch != plan.window.output else None
    from_x, into, product = memory[0][: plan.cells], memory[3][: plan.cells], memory[4][:count]
    mask = memory[5][:count]
    phases = []
    for phase, slices in found.items():
        if slices is None:
            continue
        inside, source = (plan.within(s) for s in slices)
        shifts = plan.shifts(phase)
        taps = [(from_x[s : s + count], into[s : s + count], number == 0) for number, s in enumerate(shifts)]
        phases.append(
            _Phase(
                (plan.view(from_x, images, channels)[inside], x[source]),
                (dx[source], plan.view(into, images, channels)[inside]),
                into[count:],
                taps,
            )
        )
    flags, selected = mask.view(np.int8), product.view(bits)

    def run() -> None:
        if gap is not None:
            gap.fill(0)
        for copy, original in copies:
            np.copyto(copy, original)
        if not covered:
            dx.fill(0)
        for phase in phases:
            np.copyto(*phase.image)
            phase.unclean.fill(0)
            for values, total, first in phase.taps:
                np.equal(values, result, out=mask)
                # Bit patterns AND all ones or all zeros: infinite gradients leave no NaN elsewhere.
                np.negative(flags, out=flags)
                np.copyto(selected, flags)
                if first:
                    np.bitwise_and(gradient, selected, out=total.view(bits))
                else:
                    np.bitwise_and(gradient, selected, out=selected)
                    np.add(total, product, out=total)
            np.copyto(*phase.target)

    return run


def _divisors(window: Window, include_padding: bool, dtype: np.dtype) -> Array:
    """What the sum of each window is multiplied with, of shape (*output)."""
    if include_padding:
        return np.full(window.output, 1 / window.taps, dtype)
    counts = np.ones((), np.int64)
    for axis in range(window.rank):
        inside = np.zeros(window.output[axis], np.int64)
        for k in range(window.kernel[axis]):
            found = axis_slices(window, axis, k)
            if found is not None:
                inside[found[0]] += 1
        counts = np.multiply.outer(counts, inside)
    scale: Array = (1 / np.maximum(counts, 1)).astype(dtype)
    return scale


def _average_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    return _stage_memory(op, inputs[0], outputs[0], _accumulator(inputs[0].dtype))


@kernel(*_types("Average"), binds=True, scratch=_average_scratch)
def average_pool(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Run:
    """``Y`` is the sum of each window times the reciprocal of a count."""
    (x,), (y,) = inputs, outputs
    dtype = _accumulator(x.dtype)
    scale = _divisors(_window(ctx.op, x)[0], args.count_include_pad, dtype)
    return _in_turn(_pool(x, y, ctx, np.add, 0.0, dtype, scale))


def _spread_axis(window: Window, axis: int, source: Array, target: Array) -> list[Run]:
    """The passes that add the outputs in ``source`` to the positions of their windows, along one axis."""
    lead = (slice(None),) * (2 + axis)
    found = [axis_slices(window, axis, k) for k in range(window.kernel[axis])]
    taps = [f for f in found if f is not None]
    if window.output[axis] == 1 and len(taps) > 2:
        taps = [(slice(0, 1), slice(taps[0][1].start, taps[-1][1].stop))]
    views = [(target[(*lead, outside)], source[(*lead, inside)]) for inside, outside in taps]
    passes: list[Run] = []
    apart = window.stride[axis] >= window.kernel[axis] or len(taps) == 1
    if not apart or sum(t.shape[2 + axis] for t, _ in views) < target.shape[2 + axis]:
        passes.append(functools.partial(target.fill, 0))
    for into, rows in views:
        passes.append(
            functools.partial(np.copyto, into, rows)
            if apart
            else functools.partial(np.add, into, rows, out=into)
        )
    return passes


def _average_gradient_scratch(
    op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]
) -> list[TensorSpec]:
    x = inputs[0]
    dtype = _accumulator(x.dtype)
    window, batch, channels = _window(op, x)
    count = _largest(_blocks(window, batch, channels, dtype)) * channels
    sizes = [math.prod(s) * count for s in _sizes(window)][::-1]
    used = sizes if dtype != x.dtype else sizes[:-1]
    return [spec((max(used[i::2], default=0),), dtype) for i in range(2)]


@kernel(*_types("Average", "Gradient"), binds=True, scratch=_average_gradient_scratch)
def average_pool_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Run:
    """Each window's gradient, times the reciprocal of its count, is added to all its positions."""
    dy, dx = inputs[2], outputs[0]
    dtype = _accumulator(dx.dtype)
    window, batch, channels = _window(ctx.op, dx)
    scale = _divisors(window, args.count_include_pad, dtype)
    gradients, targets = _canonical(window, dy), _canonical(window, dx)
    passes: list[Run] = []
    for first, last in _blocks(window, batch, channels, dtype):
        final = targets[:, first:last]
        source = _stage(window, ctx.scratch[0], last - first, channels, window.output)
        passes.append(functools.partial(np.multiply, gradients[:, first:last], scale, out=source))
        for i, axis in enumerate(reversed(range(window.rank))):
            target = final
            if axis > 0 or dtype != dx.dtype:
                target = _stage(
                    window, ctx.scratch[(i + 1) % 2], last - first, channels, _sizes(window)[axis]
                )
            passes += _spread_axis(window, axis, source, target)
            source = target
        if source is not final:
            passes.append(functools.partial(np.copyto, final, source, casting="same_kind"))
    return _in_turn(passes)
