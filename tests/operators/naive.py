"""Plain formulations for references: one element after another, with Python's own arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def each(function: Callable[..., Any], dtype: Any = np.float64) -> Callable[..., np.ndarray]:
    """A reference that applies ``function`` at each position, with NumPy's rule of broadcasting."""

    def reference(*inputs: np.ndarray) -> np.ndarray:
        shape = np.broadcast_shapes(*(x.shape for x in inputs))
        result = np.empty(shape, dtype)
        for position in np.ndindex(*shape):
            result[position] = function(*(_at(x, position) for x in inputs))
        return result

    return reference


def _at(x: np.ndarray, position: Sequence[int]) -> Any:
    own = position[len(position) - x.ndim :]
    return x[tuple(0 if n == 1 else i for i, n in zip(own, x.shape, strict=True))].item()


def along(
    function: Callable[[Any, Any], Any], axis: int, dtype: Any = np.float64
) -> Callable[..., np.ndarray]:
    """A reference for two operands where B's first dimension lies along dimension ``axis`` of A."""

    def reference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        result = np.empty(a.shape, dtype)
        for position in np.ndindex(*a.shape):
            own = position[axis : axis + b.ndim]
            index = tuple(0 if n == 1 else i for i, n in zip(own, b.shape, strict=True))
            result[position] = function(a[position].item(), b[index].item())
        return result

    return reference
