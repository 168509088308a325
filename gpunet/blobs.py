"""Blobs: the named values of a workspace, and what they may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpunet.dtypes import NUMPY_TO_PROTO
from gpunet.errors import DataTypeError
from gpunet.proto import TensorProto
from gpunet.specs import BlobSpec, OpaqueSpec, TensorSpec

#: Buffers start at multiples of this many bytes: a cache line, and the widest vector loads.
ALIGNMENT: Final = 64


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor of small integers that stand for ``scale * (data - zero_point)``.

    Attributes:
        data: uint8 or int8 (biases: int32), any shape.
        scale: the step between two neighbouring values.
        zero_point: the integer that stands for 0.
    """

    data: npt.NDArray[Any]
    scale: float
    zero_point: int


class _Empty:
    def __repr__(self) -> str:
        return "an empty blob"


#: The value of a blob that exists but holds nothing yet.
EMPTY: Final = _Empty()


class Blob:
    """A named slot of a workspace.

    ``value`` is a NumPy array (a tensor; ``object`` arrays hold byte strings), ``bytes``, a :class:`QuantizedTensor`, any other object
    (opaque), or ``EMPTY``. Only the workspace sets it, since programs hold on to the arrays.
    """

    __slots__ = ("_memory", "name", "spec", "value")

    def __init__(self, name: str) -> None:
        self.name = name
        self.value: Any = EMPTY
        self.spec: BlobSpec | None = None
        self._memory: npt.NDArray[np.uint8] | None = None

    def set(self, value: Any) -> None:
        """Makes the blob hold ``value`` itself, not a copy."""
        self.value = value
        self.spec = spec_of(value)

    def allocate(self, spec: TensorSpec) -> npt.NDArray[Any]:
        """An array of this shape and type that the blob holds from now on.

        The present array if it fits exactly; otherwise new shape on the same memory where that is large enough, so that
        a net that alternates between batch sizes does not allocate.
        """
        if self.spec == spec:
            array: npt.NDArray[Any] = self.value
            return array
        if spec.dtype == object:
            self.value = np.full(spec.shape, b"", dtype=object)
        else:
            if self._memory is None or self._memory.nbytes < spec.nbytes:
                self._memory = aligned_bytes(spec.nbytes)
            self.value = self._memory[: spec.nbytes].view(spec.dtype).reshape(spec.shape)
        self.spec = spec
        return self.value  # type: ignore[no-any-return]


def aligned_bytes(size: int) -> npt.NDArray[np.uint8]:
    """Uninitialised memory of ``size`` bytes that starts at a multiple of :data:`ALIGNMENT`."""
    raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def spec_of(value: Any) -> BlobSpec | None:
    """What is known of a value without looking at its elements; ``None`` for an empty blob."""
    if isinstance(value, np.ndarray):
        return TensorSpec(value.shape, value.dtype)
    if value is EMPTY:
        return None
    if isinstance(value, QuantizedTensor):
        return OpaqueSpec("quantized tensor")
    return OpaqueSpec("byte string" if isinstance(value, bytes) else type(value).__name__)


def as_value(name: str, value: Any) -> Any:
    """``value`` as something that a blob can hold, for feeding.

    Arrays, NumPy scalars, Python numbers and nested lists become tensors in native byte order; arrays of texts become tensors of byte
    strings (UTF-8); ``str`` becomes ``bytes``; a ``TensorProto`` becomes the tensor that it holds; ``bytes``, quantised tensors and opaque
    objects stay as they are. Raises :class:`DataTypeError` for an element type that a tensor cannot have.
    """
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, TensorProto):
        from gpunet.serialization import tensor_from_proto

        return tensor_from_proto(value)
    if isinstance(value, (list, tuple, int, float, bool, np.generic)):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind in "SUO":
        return _string_tensor(name, value)
    dtype = value.dtype.newbyteorder("=")
    if dtype not in NUMPY_TO_PROTO:
        wanted = ", ".join(sorted(t.name for t in NUMPY_TO_PROTO if t != object))
        raise DataTypeError(
            f"cannot feed blob {name!r}: the array is {value.dtype}, wanted strings or one of {wanted}"
        )
    return value.astype(dtype, copy=False)


def _string_tensor(name: str, value: npt.NDArray[Any]) -> npt.NDArray[np.object_]:
    result = np.empty(value.shape, dtype=object)
    for i, element in enumerate(value.flat):
        if isinstance(element, str):
            element = element.encode()
        if not isinstance(element, bytes):
            raise DataTypeError(
                f"cannot feed blob {name!r}: element {i} is {type(element).__name__}, wanted str or bytes in an array of objects"
            )
        result.flat[i] = element
    return result
