"""Tensors in device memory: a view (pointer, shape, type) of a block."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from gpunet.dtypes import is_bfloat16
from gpunet.errors import DataTypeError, DeviceError, ShapeError
from gpunet.specs import Shape, TensorSpec

if TYPE_CHECKING:
    from gpunet.backends import Backend, Memory


class Buffer:
    """A C-contiguous tensor in device memory. NumPy cannot read it: :meth:`numpy` copies it to the host.

    Attributes:
        backend: the device.
        memory: the block that it lies in; kept alive by the buffer.
        offset: bytes from the start of the block.
        shape, dtype: as of an array.
        name: the blob, for messages.
    """

    __slots__ = ("backend", "dtype", "memory", "name", "offset", "shape")

    def __init__(
        self,
        backend: Backend,
        memory: Memory,
        shape: Shape,
        dtype: npt.DTypeLike,
        offset: int = 0,
        name: str = "",
    ) -> None:
        self.backend = backend
        self.memory = memory
        self.shape = tuple(shape)
        self.dtype: np.dtype = np.dtype(dtype)
        self.offset = offset
        self.name = name
        if not memory.name:
            memory.name = name

    @classmethod
    def empty(cls, backend: Backend, spec: TensorSpec, name: str = "") -> Buffer:
        """An uninitialised tensor in a block of its own."""
        return cls(backend, backend.allocate(spec.nbytes), spec.shape, spec.dtype, name=name)

    @classmethod
    def from_numpy(cls, backend: Backend, array: npt.NDArray[Any], name: str = "") -> Buffer:
        """A copy of a host array."""
        array = np.ascontiguousarray(array).reshape(array.shape)
        result = cls.empty(backend, TensorSpec(array.shape, array.dtype), name)
        backend.copy_in(result, array, backend.stream)
        return result

    @property
    def pointer(self) -> int:
        """Address of the first element."""
        return self.memory.pointer + self.offset

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.dtype.itemsize

    @property
    def spec(self) -> TensorSpec:
        """Shape and type."""
        return TensorSpec(self.shape, self.dtype)

    def view(self, shape: Shape, dtype: npt.DTypeLike | None = None) -> Buffer:
        """The same memory as another shape and type of the same number of bytes."""
        result = Buffer(self.backend, self.memory, shape, dtype or self.dtype, self.offset, self.name)
        if result.nbytes != self.nbytes:
            raise ShapeError(f"cannot view {self} as {result.spec}, wanted the same number of bytes")
        return result

    def numpy(self) -> npt.NDArray[Any]:
        """A copy on the host, after all work on the device's main stream has run."""
        array: npt.NDArray[Any] = np.empty(self.shape, self.dtype)
        self.backend.copy_out(array, self, self.backend.stream)
        return array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.backend.simulated:
            raise AttributeError("memory of the simulated device is not CUDA memory")
        if is_bfloat16(self.dtype):
            raise DataTypeError(
                f"buffer {self.name!r} is bfloat16, for which the interface has no typestr, wanted "
                ".view(shape, 'uint16'): its bits"
            )
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise DeviceError(
            f"buffer {self.name!r} is on {self.backend.device}, wanted .numpy() or Workspace.fetch() to read "
            "it"
        )

    def __repr__(self) -> str:
        return f"Buffer({self.name!r}, {self.spec}, {self.backend.device})"
