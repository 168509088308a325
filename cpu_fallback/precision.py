"""Half precision in NumPy kernels: float16 is a storage type only, sums and products run in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet.cpu_fallback.products import product

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]


def widened(array: Array) -> Array:
    """The array itself, or a float32 copy of a float16 one."""
    return array.astype(np.float32) if array.dtype == np.float16 else array


def matmul(a: Array, b: Array, out: Array) -> None:
    """``a @ b`` into ``out``; float16 multiplies and sums in float32."""
    if out.dtype == np.float16:
        wide = np.empty(out.shape, np.float32)
        product(a.astype(np.float32), b.astype(np.float32), wide)
        out[...] = wide
    else:
        product(a, b, out)


def sum_dtype(dtype: np.dtype) -> np.dtype:
    """The type for sums whose order must not show: float64 for float32, float32 for half types."""
    return np.dtype(np.float32 if dtype.itemsize == 2 else np.float64)


def exponential(x: Array, out: Array) -> Array:
    """``exp(x)``, of float32 computed in float64 and rounded.

    NumPy's own function for float32 differs from processor to processor by some units in the last place.
    """
    np.exp(x, out=out, dtype=np.float64, casting="same_kind")
    return out


def logarithm(x: Array) -> Array:
    """``log(x)``, of float32 computed in float64 and rounded."""
    return np.log(x, dtype=np.float64).astype(x.dtype)
