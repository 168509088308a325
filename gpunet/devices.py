"""Device names: ``cpu``, ``cuda:N``, ``sim:N``, ``auto``."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from dataclasses import dataclass
from typing import Final

from gpunet.errors import DeviceError
from gpunet.proto import PROTO_CPU, PROTO_CUDA, PROTO_HIP, DeviceOption, DeviceTypeProto, OperatorDef

#: Device types that mean a GPU; all others are host memory here, whatever library computed on it there.
_ACCELERATORS: Final = frozenset([PROTO_CUDA, PROTO_HIP])
#: Names of all device types by number.
_KINDS: Final = {
    value.number: value.name.removeprefix("PROTO_")
    for value in DeviceTypeProto.DESCRIPTOR.values
    if value.name != "PROTO_COMPILE_TIME_MAX_DEVICE_TYPES"
}


@dataclass(frozen=True)
class Device:
    """Where blobs live and kernels run: a kind (``cpu``, ``cuda``, ``sim``) and a number."""

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"

    def option(self) -> DeviceOption:
        """The ``DeviceOption`` that places an operator here."""
        if self.kind == "cpu":
            return DeviceOption(device_type=PROTO_CPU)
        return DeviceOption(device_type=PROTO_CUDA, device_id=self.index)


CPU: Final = Device("cpu")


def driver() -> ctypes.CDLL | None:
    """The library of the NVIDIA driver; ``None`` where there is none."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@functools.cache
def gpu_count() -> int:
    """Number of GPUs that the NVIDIA driver offers; 0 without a driver. Asks the driver itself, once: nothing
    large is imported.
    """
    library = driver()
    count = ctypes.c_int(0)
    if library is None or library.cuInit(0) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def parse_device(name: str | Device) -> Device:
    """The device of a name; ``auto`` is the best one that is available: ``cuda:0`` where there is a GPU, its
    driver and CuPy, else ``cpu``.

    Raises :class:`DeviceError` for an unknown name.
    """
    if isinstance(name, Device):
        return name
    kind, colon, number = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind == "auto" and not colon:
        return Device("cuda") if gpu_count() and importlib.util.find_spec("cupy_backends") else CPU
    if kind not in ("cpu", "cuda", "sim") or (colon and not number.isdecimal()):
        raise DeviceError(f"unknown device {name!r}, wanted 'auto', 'cpu', 'cuda:N' or 'sim:N'")
    if kind == "cpu" and int(number or 0):
        raise DeviceError(f"unknown device {name!r}: the host is one device, wanted 'cpu'")
    return Device(kind, int(number or 0))


def requested_device(definition: OperatorDef) -> Device | None:
    """The device that a definition asks for; ``None`` where it leaves the choice to the workspace.

    A device option without a device type (one that only sets a random seed, say) asks for nothing. Raises
    :class:`DeviceError` for a number that is no device type.
    """
    option = definition.device_option
    if not option.HasField("device_type"):
        return None
    if option.device_type not in _KINDS:
        known = ", ".join(f"{number} ({name})" for number, name in _KINDS.items())
        raise DeviceError(f"device_type is {option.device_type}, wanted one of {known}")
    if option.device_id < 0:
        raise DeviceError(f"device_id is {option.device_id}, wanted 0 or more")
    if option.device_type in _ACCELERATORS:
        return Device("cuda", option.device_id)
    return CPU
