"""The runtime of the simulated device as seen from Python: its functions and structures (``runtime.cpp``)."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any, Final

from gpunet.cuda_kernels.sim import toolchain
from gpunet.errors import DeviceError

#: Kinds of what stops a launch.
ACCESS, ARITHMETIC, TRAP, BARRIER, WARP, CANARY, STACK, SHARED_ACCESS, CONFIGURATION, OVERDUE = range(1, 11)
FORWARD, REVERSE, RANDOM = range(3)
READ, WRITE = 1, 2

#: The runtime runs one launch at a time in a process.
LOCK: Final = threading.RLock()


class Report(ctypes.Structure):
    """What stopped a launch, and where."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("access", ctypes.c_int32),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("address", ctypes.c_uint64),
        ("line", ctypes.c_int64),
        ("file", ctypes.c_char * 256),
        ("text", ctypes.c_char * 2048),
    )


class Launch(ctypes.Structure):
    """Grid, block, and how to run them."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("written", ctypes.c_uint64),
        ("ranges", ctypes.c_void_p),
        ("range_count", ctypes.c_uint32),
        ("indirect", ctypes.c_uint32),
        ("milliseconds", ctypes.c_uint64),
    )


class BlockInfo(ctypes.Structure):
    """A block of device memory; ``base`` and ``length`` are the mapping with its guards."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("pointer", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("freed", ctypes.c_int32),
    )


class Runtime:
    """The functions of the runtime. Use :func:`runtime`."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(toolchain.build_runtime()), mode=ctypes.RTLD_GLOBAL)
        word, pointer, integer = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int

        def get(name: str, result: Any, *arguments: Any) -> Any:
            function = getattr(library, f"gpunet_sim_{name}")
            function.restype, function.argtypes = result, arguments
            return function

        self.enter = get("enter", None)
        self.leave = get("leave", None)
        self.launch = get("launch", integer, pointer, pointer, pointer)
        self.allocate = get("allocate", word, word)
        self.free = get("free", word, word)
        self.copy = get("copy", integer, word, word, word, integer)
        self.fill = get("fill", integer, word, integer, word)
        self.accessible = get("accessible", integer, word, word)
        self._find = get("find", integer, word, ctypes.POINTER(BlockInfo))
        self._report = get("report", ctypes.POINTER(Report))

    def report(self) -> Report:
        """What stopped the last launch."""
        report: Report = self._report().contents
        return report

    def find(self, address: int) -> BlockInfo | None:
        """The block, live or freed, whose mapping with its guards holds the address."""
        info = BlockInfo()
        return info if self._find(address % 2**64, info) else None


@functools.cache
def runtime() -> Runtime:
    """The runtime, built and loaded on first use. Raises :class:`DeviceError`."""
    return Runtime()


class Module:
    """A loaded module of kernels."""

    def __init__(self, name: str) -> None:
        runtime()
        path = toolchain.build_module(name)
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise DeviceError(f"cannot load the CUDA module {name!r} built as {path}: {error}") from None

    def launcher(self, kernel: str) -> int | None:
        """Address of the launcher of a kernel; ``None`` if it was not declared when the module was built."""
        function = getattr(self._library, f"gpunet_call_{kernel}", None)
        return None if function is None else ctypes.cast(function, ctypes.c_void_p).value
