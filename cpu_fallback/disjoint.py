"""The gradient of a maximum over windows that cover the images and do not overlap.

Each position of an image lies in one window. So Y, spread over its windows, is as large as X, and one
comparison tells where the maxima are; another position of the window takes no pass of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpunet.cpu_fallback.lanes import LANES, run_lanes
from gpunet.cpu_fallback.steps import Step, in_turn
from gpunet.operators.window import Window
from gpunet.specs import TensorSpec, spec

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]

#: Bytes of X in a block: that, dX, a spread tensor and a mask stay in the cache.
_BLOCK_BYTES: Final = 1 << 18
#: A number of X takes as long as this many multiplications in a matrix product.
_TRAFFIC: Final = 40


@dataclass(frozen=True, slots=True)
class DisjointPlan:
    """Sizes of blocks of planes: a plane is one channel of one image."""

    window: Window
    planes: int  #: in all
    block: int  #: in a block
    dtype: np.dtype

    @property
    def inner(self) -> int:
        """Numbers in a row of a plane."""
        return self.window.image[-1]

    @property
    def rows(self) -> int:
        """Rows of a plane."""
        return math.prod(self.window.image[:-1])

    @property
    def work(self) -> int:
        """What it takes, in multiplications."""
        return _TRAFFIC * self.planes * self.rows * self.inner

    def scratch(self) -> list[TensorSpec]:
        """For each lane: rows of Y or dY that are spread along themselves, planes, and a mask."""
        narrow = self.block * math.prod(self.window.output[:-1]) * self.inner
        whole = self.block * self.rows * self.inner
        return [spec((narrow,), self.dtype), spec((whole,), self.dtype), spec((whole,), np.bool_)] * LANES


def plan_disjoint(window: Window, batch: int, channels: int, dtype: np.dtype) -> DisjointPlan | None:
    """A plan, or ``None`` where windows overlap, leave something out, or channels are last."""
    covers = all(
        k == s and n == k * o
        for k, s, n, o in zip(window.kernel, window.stride, window.image, window.output, strict=True)
    )
    if window.channels_last or not covers or any((*window.head, *window.tail)) or not window.positions:
        return None
    planes = batch * channels
    most = max(1, _BLOCK_BYTES // (math.prod(window.image) * dtype.itemsize))
    # Blocks of one size, and one for each lane at least.
    count = max(LANES, -(-planes // most))
    return DisjointPlan(window, planes, max(1, -(-planes // count)), dtype)


def bind_disjoint(
    plan: DisjointPlan, x: Array, y: Array, dy: Array, dx: Array, scratch: Sequence[Array]
) -> Callable[[], None]:
    """Writes dX, of contiguous tensors of shape (image, channel, *space)."""
    window, inner = plan.window, plan.inner
    flat_x, flat_dx = (a.reshape(plan.planes, plan.rows * inner) for a in (x, dx))
    flat_y, flat_dy = (a.reshape(plan.planes, -1, window.output[-1]) for a in (y, dy))
    sources = _row_sources(plan)
    bits = np.dtype(f"i{plan.dtype.itemsize}")
    lanes: list[list[Step]] = [[] for _ in range(LANES)]
    for number, first in enumerate(range(0, plan.planes, plan.block)):
        at = slice(first, first + plan.block)
        count = len(flat_x[at])
        narrow, whole, mask = scratch[3 * (number % LANES) :][:3]
        lane = lanes[number % LANES]
        target = flat_dx[at].view(bits)
        shape = (count, plan.rows * inner)
        whole, mask = (m[: math.prod(shape)].reshape(shape) for m in (whole, mask))
        lane += _spread(plan, flat_y[at], narrow, whole, sources)
        lane.append(partial(np.equal, flat_x[at], whole, out=mask))
        lane += _spread(plan, flat_dy[at], narrow, whole, sources)
        # Bit patterns times 0 or 1: infinite gradients leave no NaN elsewhere.
        lane.append(partial(np.copyto, target, mask.view(np.int8)))
        lane.append(partial(np.multiply, target, whole.view(bits), out=target))
    return partial(run_lanes, [in_turn(*lane) for lane in lanes], plan.work)


def _row_sources(plan: DisjointPlan) -> Array:
    """For each row of the planes of a block, the row of outputs whose windows it lies in."""
    window = plan.window
    sources = np.arange(plan.block)
    for output, kernel in zip(window.output[:-1], window.kernel[:-1], strict=True):
        sources = sources[..., None] * output + np.arange(output).repeat(kernel)
    return sources.reshape(-1)


def _spread(plan: DisjointPlan, tensor: Array, narrow: Array, whole: Array, sources: Array) -> list[Step]:
    """Steps that copy outputs (plane, row, position) to all positions of their windows."""
    count, rows, across = tensor.shape
    side = plan.window.kernel[-1]
    lines = narrow[: tensor.size * side].reshape(count * rows, across, side)
    steps: list[Step] = [
        partial(np.copyto, lines[..., k], tensor.reshape(count * rows, across)) for k in range(side)
    ]
    own = sources[: count * plan.rows]
    target = whole.reshape(count * plan.rows, plan.inner)
    # With another mode NumPy would go through a buffer.
    steps.append(partial(np.take, lines.reshape(count * rows, -1), own, axis=0, out=target, mode="clip"))
    return steps
