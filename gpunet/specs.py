"""What is known of a blob before anything runs: shape and element type, or the kind of an opaque object."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Shape: TypeAlias = tuple[int, ...]

#: Most dimensions that a tensor may have: what every supported NumPy can do.
MAX_RANK: Final = 32


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and element type of a tensor; ``dtype`` is ``object`` for tensors of byte strings."""

    shape: Shape
    dtype: np.dtype
    #: The elements of a small tensor of whole numbers that follow from shapes alone (the output of Shape,
    #: say), so that what depends on them can be inferred; ``None`` where only running tells. Specs that
    #: differ in this alone are equal.
    known: tuple[int, ...] | None = field(default=None, compare=False)

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, packed."""
        return math.prod(self.shape) * self.dtype.itemsize

    def with_shape(self, *shape: int) -> TensorSpec:
        """The same element type with another shape."""
        return TensorSpec(shape, self.dtype)

    def with_dtype(self, dtype: npt.DTypeLike) -> TensorSpec:
        """The same shape with another element type."""
        return TensorSpec(self.shape, np.dtype(dtype))

    def __str__(self) -> str:
        dtype = "string" if self.dtype == object else self.dtype.name
        return f"{dtype} {format_shape(self.shape)}"


@dataclass(frozen=True, slots=True)
class OpaqueSpec:
    """A blob that holds no plain tensor: a mutex, a counter, a byte string, a quantised tensor."""

    kind: str

    def __str__(self) -> str:
        return self.kind


BlobSpec: TypeAlias = TensorSpec | OpaqueSpec


def spec(shape: Shape, dtype: npt.DTypeLike) -> TensorSpec:
    """Shorthand for a :class:`TensorSpec` that accepts anything NumPy takes as a type."""
    return TensorSpec(tuple(shape), np.dtype(dtype))


def is_representable(shape: Shape, dtype: np.dtype) -> bool:
    """Whether NumPy can describe an array of this shape and type, whatever memory there is."""
    # NumPy multiplies the sizes that are not zero, even for an empty array.
    return len(shape) <= MAX_RANK and math.prod(size or 1 for size in shape) * dtype.itemsize < 2**63


def format_shape(shape: Shape) -> str:
    """``8x3x224x224``; ``scalar`` for the empty shape."""
    return "x".join(map(str, shape)) if shape else "scalar"
