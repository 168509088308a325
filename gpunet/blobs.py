"""Blobs: the named values of a workspace, and what they may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpunet.backends import backend
from gpunet.buffers import Buffer
from gpunet.devices import CPU, Device
from gpunet.dtypes import NUMPY_TO_PROTO
from gpunet.errors import AllocationError, DataTypeError, ShapeError
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


class Slot:
    """What a blob has in the memory of one device: an array on the host, a :class:`gpunet.buffers.Buffer`
    elsewhere.
    """

    __slots__ = ("_memory", "spec", "storage")

    def __init__(self) -> None:
        self.storage: Any = EMPTY
        self.spec: BlobSpec | None = None
        self._memory: Any = None

    def set(self, storage: Any, spec: BlobSpec | None) -> None:
        """Makes the slot hold this very storage."""
        self.storage, self.spec = storage, spec

    def allocate(self, spec: TensorSpec, device: Device, name: str) -> Any:
        """Storage of this shape and type: the present one if it fits exactly, else a new view of the same
        memory if that is large enough.

        So a net that alternates between batch sizes does not allocate.
        """
        if self.spec == spec:
            return self.storage
        if device == CPU:
            self.set(self._host_array(spec), spec)
        else:
            self.set(self._device_buffer(spec, device, name), spec)
        return self.storage

    def _host_array(self, spec: TensorSpec) -> npt.NDArray[Any]:
        if spec.dtype == object:
            return np.full(spec.shape, b"", dtype=object)
        if self._memory is None or self._memory.nbytes < spec.nbytes:
            self._memory = aligned_bytes(spec.nbytes)
        array: npt.NDArray[Any] = self._memory[: spec.nbytes].view(spec.dtype).reshape(spec.shape)
        return array

    def _device_buffer(self, spec: TensorSpec, device: Device, name: str) -> Buffer:
        if self._memory is None or self._memory.memory.nbytes < spec.nbytes:
            self._memory = Buffer.empty(backend(device), spec, name)
        return Buffer(self._memory.backend, self._memory.memory, spec.shape, spec.dtype, name=name)


class Blob:
    """A named value of a workspace, with a slot for each device that had it.

    ``valid`` are the devices whose slot holds the present value; ``spec`` describes it; ``version`` counts
    its changes where ``watched`` is set (programs keep constants that were computed from it). On the host the
    value may be an array (a tensor; ``object`` arrays hold byte strings), ``bytes``, a
    :class:`QuantizedTensor`, or any other object (opaque). Only the workspace and its programs change a blob,
    since programs hold on to the storage.
    """

    __slots__ = ("name", "slots", "spec", "valid", "version", "watched")

    def __init__(self, name: str) -> None:
        self.name = name
        self.spec: BlobSpec | None = None
        self.valid: frozenset[Device] = frozenset()
        self.slots: dict[Device, Slot] = {}
        self.version = 0
        self.watched = False

    def slot(self, device: Device) -> Slot:
        """The slot of a device, made empty if there is none."""
        found = self.slots.get(device)
        if found is None:
            found = self.slots[device] = Slot()
        return found

    def commit(self, spec: BlobSpec | None, valid: frozenset[Device]) -> None:
        """Declares where the present value is and what it looks like."""
        self.spec, self.valid = spec, valid
        self.version += 1


def aligned_bytes(size: int) -> npt.NDArray[np.uint8]:
    """Uninitialised memory of ``size`` bytes that starts at a multiple of :data:`ALIGNMENT`.

    Raises :class:`AllocationError` where there is not so much.
    """
    try:
        raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
    except (MemoryError, ValueError, OverflowError):
        raise AllocationError(f"the host has no {size:,} bytes") from None
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

    Arrays, NumPy scalars, Python numbers and nested lists become tensors in native byte order; arrays of
    texts become tensors of byte strings (UTF-8); ``str`` becomes ``bytes``; a ``TensorProto`` becomes the
    tensor that it holds; ``bytes``, quantised tensors and opaque objects stay as they are. Raises
    :class:`DataTypeError` for an element type that a tensor cannot have.
    """
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, TensorProto):
        from gpunet.serialization import tensor_from_proto

        return tensor_from_proto(value)
    if isinstance(value, (list, tuple, int, float, bool, np.generic)):
        try:
            value = np.asarray(value)
        except ValueError as error:
            raise ShapeError(
                f"cannot feed blob {name!r}: the nested lists form no array, wanted equal lengths at "
                f"each depth ({error})"
            ) from None
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind in "SUO":
        return _string_tensor(name, value)
    dtype = value.dtype.newbyteorder("=")
    if dtype not in NUMPY_TO_PROTO:
        wanted = ", ".join(sorted(t.name for t in NUMPY_TO_PROTO if not t.hasobject))
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
                f"cannot feed blob {name!r}: element {i} is {type(element).__name__}, wanted str or bytes in "
                "an array of objects"
            )
        result.flat[i] = element
    return result
