"""Products of large matrices, shared between threads.

BLAS has one thread while nets run (:mod:`gpunet.blas`). A product that is large enough is cut here into
:data:`~gpunet.cpu_fallback.lanes.LANES` parts, whatever the number of threads, so that results are the same
bit for bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpunet.cpu_fallback.lanes import LANES, THREAD_WORK, run_lanes

Array = npt.NDArray[Any]

#: Cuts lie at multiples of this: BLAS works on blocks of so many rows or columns.
_BLOCK: Final = 16


def product(a: Array, b: Array, out: Array) -> None:
    """``a @ b`` into ``out``, for matrices or stacks of matrices as in ``numpy.matmul``.

    Args:
        a: of two dimensions at least.
        b: of two dimensions at least.
        out: of the shape of the product; shares no memory with ``a`` and ``b``.
    """
    work = out.size * a.shape[-1]
    rows, columns = out.shape[-2:]
    stacked = out.ndim > 2 and out.shape[0] >= LANES
    if work < THREAD_WORK or not (stacked or max(rows, columns) >= LANES * _BLOCK):
        np.matmul(a, b, out=out)
        return
    lanes = []
    bounds = _bounds(out.shape[0], 1) if stacked else _bounds(max(rows, columns), _BLOCK)
    for part in map(slice, bounds, bounds[1:]):
        if stacked:
            lane = partial(np.matmul, _item(a, part, out), _item(b, part, out), out=out[part])
        elif rows >= columns:
            lane = partial(np.matmul, a[..., part, :], b, out=out[..., part, :])
        else:
            lane = partial(np.matmul, a, b[..., part], out=out[..., part])
        lanes.append(lane)
    run_lanes(lanes, work)


def _bounds(size: int, block: int) -> list[int]:
    """Where the parts of ``range(size)`` begin, and where the last one ends."""
    return [size * lane // (LANES * block) * block for lane in range(LANES)] + [size]


def _item(operand: Array, part: slice, out: Array) -> Array:
    """The part of a stack; the stack itself where it is the same for all parts."""
    return operand[part] if operand.ndim == out.ndim and operand.shape[0] > 1 else operand
