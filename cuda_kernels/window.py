"""The parameters of kernels that slide a window over images (include/window.cuh)."""

from __future__ import annotations

from typing import Final

from gpunet.operators.window import Window
from gpunet.specs import Shape

MAX_RANK: Final = 3
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


def against_rank(window: Window) -> str | None:
    """Why the kernels cannot slide this window."""
    if window.rank > MAX_RANK:
        return f"it has {window.rank} spatial dimensions, the kernels take {MAX_RANK}"
    return None
