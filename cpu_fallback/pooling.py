"""NumPy kernels of pooling.

A maximum or a sum over a window is taken one dimension after the other, a pass over shifted views for each
position along a side of the window, and so are the gradients of sums. Images are handled in blocks that
stay in the cache.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.columns import Index, axis_slices, canonical_images, tap_slices
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


def _max_gradient_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    """For each lane, a mask and a product."""
    window, batch, channels = _window(op, inputs[0])
    size = _largest(_blocks(window, batch, channels, inputs[0].dtype)) * channels * math.prod(window.output)
    return [spec((size,), np.bool_), spec((size,), inputs[0].dtype)] * LANES


class _Tap(NamedTuple):
    """Views for one position inside the window, of equal shape: where it lies inside of the image."""

    image: Array
    result: Array
    gradient: Array  #: bit patterns
    mask: Array
    selected: Array  #: bit patterns of the product
    product: Array
    target: Array


@kernel(*_types("Max", "Gradient"), binds=True, scratch=_max_gradient_scratch)
def max_pool_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Run:
    """``dX += dY where X == Y``, for each position inside the window.

    All that tie for a maximum get the gradient, as in Caffe2.
    """
    (dx,) = outputs
    window, batch, channels = _window(ctx.op, dx)
    arrays = [_canonical(window, a) for a in (*inputs, dx)]
    apart = all(s >= k for s, k in zip(window.stride, window.kernel, strict=True))
    # Bit patterns times 0 or 1 select: infinite gradients must not become NaN elsewhere.
    bits = np.dtype(f"i{dx.dtype.itemsize}")
    blocks: list[tuple[Array | None, list[_Tap]]] = []
    for number, (first, last) in enumerate(_blocks(window, batch, channels, dx.dtype)):
        x, y, dy, target = (a[:, first:last] for a in arrays)
        memory = ctx.scratch[2 * (number % LANES) :][:2]
        mask, part = (_stage(window, m, last - first, channels, window.output) for m in memory)
        taps = []
        for tap in itertools.product(*map(range, window.kernel)):
            found = tap_slices(window, tap)
            if found is not None:
                inside: Index = (slice(None), slice(None), *found[0])
                source: Index = (slice(None), slice(None), *found[1])
                into = target[source]
                product = into if apart else part[inside]
                gradient, selected = dy[inside].view(bits), product.view(bits)
                taps.append(_Tap(x[source], y[inside], gradient, mask[inside], selected, product, into))
        covered = apart and sum(tap.target.size for tap in taps) == target.size
        blocks.append((None if covered else target, taps))

    def run_lane(lane: int) -> None:
        for unclean, taps in blocks[lane::LANES]:
            if unclean is not None:
                unclean.fill(0)
            for tap in taps:
                np.equal(tap.image, tap.result, out=tap.mask)
                np.multiply(tap.gradient, tap.mask, out=tap.selected)
                if not apart:
                    np.add(tap.target, tap.product, out=tap.target)

    lanes = [functools.partial(run_lane, lane) for lane in range(LANES)]
    # A comparison, a selection and a sum take about as long as this many multiplications in a matrix product.
    work = 40 * inputs[1].size * window.taps
    return functools.partial(run_lanes, lanes, work)


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
