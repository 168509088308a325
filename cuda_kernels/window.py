"""The parameters of kernels that slide a window over images (include/window.cuh)."""

from __future__ import annotations

import math
from typing import Final

from gpunet.operators.window import Window
from gpunet.specs import Shape

MAX_RANK: Final = 3
_MOST: Final = 2**31 - 1
#: Image, output, kernel, stride, dilation and head, three numbers each.
WINDOW: Final = ", ".join(f"int32 {name}{d}" for name in "ioksdh" for d in range(MAX_RANK))


def window_values(window: Window) -> tuple[int, ...]:
    """The numbers for :data:`WINDOW`; dimensions that are missing come first."""

    def padded(values: Shape, missing: int) -> tuple[int, ...]:
        return (missing,) * (MAX_RANK - window.rank) + tuple(values)

    return (
        *padded(window.image, 1),
        *padded(window.output, 1),
        *padded(window.kernel, 1),
        *padded(window.stride, 1),
        *padded(window.dilation, 1),
        *padded(window.head, 0),
    )


def against_window(window: Window, filter_size: int = 0) -> str | None:
    """Why the kernels cannot slide this window.

    Places within one image, one dimension with its padding, and one filter of ``filter_size`` elements are
    numbers of 32 bits; those within a tensor are of 64.
    """
    if window.rank > MAX_RANK:
        return f"it has {window.rank} spatial dimensions, the kernels take {MAX_RANK}"
    extents = (n + abs(h) + abs(t) for n, h, t in zip(window.image, window.head, window.tail, strict=True))
    for count, what in (
        (max(math.prod(window.image), math.prod(window.output)), "an image of {:,} pixels"),
        (max(*extents, *window.output), "a dimension of {:,} with its padding"),
        (filter_size, "a filter of {:,} elements"),
    ):
        if count > _MOST:
            return f"it has {what.format(count)}, the kernels take {_MOST:,}"
    return None
