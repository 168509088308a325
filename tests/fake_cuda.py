"""CuPy's bindings of the CUDA runtime and driver, as far as gpunet calls them, on host memory.

Streams run late: nothing is executed before something waits for it. `test_cuda_backend.py` compares names and
numbers of arguments with the installed CuPy.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Callable

import numpy as np


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"cudaError {status}")


class CUDADriverError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"CUDA_ERROR {status}")


class Runtime:
    CUDARuntimeError = CUDARuntimeError
    streamNonBlocking = 1  # noqa: N815
    eventDisableTiming = 2  # noqa: N815
    hostAllocPortable = 1  # noqa: N815
    memcpyDeviceToDevice = 3  # noqa: N815
    memcpyDefault = 4  # noqa: N815
    streamCaptureModeRelaxed = 2  # noqa: N815

    def __init__(self, devices: int = 1, memory: int = 1 << 30, status: int = 0) -> None:
        self.devices = devices
        self.memory = memory
        self.status = status
        self.blocks: dict[int, np.ndarray] = {}
        self.device = -1
        self.queues: dict[int, deque[Callable[[], None]]] = {}
        self.events: dict[int, tuple[int, bool]] = {}
        self.capturing: set[int] = set()
        self.captured: dict[int, int] = {}
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.errors: list[int] = []
        self.copies: list[int] = []
        #: What most calls raise from then on, as behind a kernel that broke the device.
        self.broken = 0
        #: Whether the end of a capture fails, as with streams that were not joined.
        self.unjoined = False
        self._handles = itertools.count(1)

    def _check(self) -> None:
        if self.broken:
            raise CUDARuntimeError(self.broken)

    # Devices.
    def getDeviceCount(self) -> int:  # noqa: N802
        if self.status:
            raise CUDARuntimeError(self.status)
        return self.devices

    def setDevice(self, device: int) -> None:  # noqa: N802
        self.device = device

    def deviceGetAttribute(self, attrib: int, device: int) -> int:  # noqa: N802
        self._check()
        return {75: 9, 76: 0}[attrib]

    def runtimeGetVersion(self) -> int:  # noqa: N802
        return 12090

    # Memory.
    def malloc(self, size: int) -> int:
        self._check()
        if sum(b.nbytes for b in self.blocks.values()) + size > self.memory:
            raise CUDARuntimeError(2)
        block = np.full(size + 256, 0xA5, np.uint8)
        pointer = -(-block.ctypes.data // 256) * 256
        self.blocks[pointer] = block
        return pointer

    def free(self, ptr: int) -> None:
        self._check()
        if ptr:
            del self.blocks[ptr]

    def hostAlloc(self, size: int, flags: int) -> int:  # noqa: N802
        return self.malloc(size)

    def freeHost(self, ptr: int) -> None:  # noqa: N802
        self.free(ptr)

    def memGetInfo(self) -> tuple[int, int]:  # noqa: N802
        self._check()
        return self.memory - sum(b.nbytes for b in self.blocks.values()), self.memory

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
        self._check()
        self.copies.append(size)
        self.queues[stream].append(lambda: ctypes.memmove(dst, src, size))

    def memcpyPeerAsync(  # noqa: N802
        self, dst: int, dst_device: int, src: int, src_device: int, size: int, stream: int
    ) -> None:
        self.memcpyAsync(dst, src, size, 4, stream)

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:  # noqa: N802
        self._check()
        self.queues[stream].append(lambda: ctypes.memset(ptr, value, size))

    # Streams and events.
    def streamCreateWithFlags(self, flags: int) -> int:  # noqa: N802
        self._check()
        handle = next(self._handles)
        self.queues[handle] = deque()
        return handle

    def streamDestroy(self, stream: int) -> None:  # noqa: N802
        self.run(stream)
        del self.queues[stream]

    def streamSynchronize(self, stream: int) -> None:  # noqa: N802
        self.run(stream)

    def streamIsCapturing(self, stream: int) -> bool:  # noqa: N802
        self._check()
        return stream in self.capturing

    def streamBeginCapture(self, stream: int, mode: int) -> None:  # noqa: N802
        self._check()
        self.capturing.add(stream)
        self.captured[stream] = len(self.queues[stream])

    def streamEndCapture(self, stream: int) -> int:  # noqa: N802
        self.capturing.remove(stream)
        start, queue, handle = self.captured.pop(stream), self.queues[stream], next(self._handles)
        if self.unjoined:
            raise CUDARuntimeError(904)
        self.graphs[handle] = list(queue)[start:]
        while len(queue) > start:
            queue.pop()
        return handle

    def graphInstantiate(self, graph: int) -> int:  # noqa: N802
        handle = next(self._handles)
        self.graphs[handle] = self.graphs[graph]
        return handle

    def graphUpload(self, graph_exec: int, stream: int) -> None:  # noqa: N802
        if graph_exec not in self.graphs or stream not in self.queues:
            raise CUDARuntimeError(1)

    def graphLaunch(self, graph_exec: int, stream: int) -> None:  # noqa: N802
        self.queues[stream].extend(self.graphs[graph_exec])

    def graphExecDestroy(self, graph_exec: int) -> None:  # noqa: N802
        del self.graphs[graph_exec]

    def graphDestroy(self, graph: int) -> None:  # noqa: N802
        del self.graphs[graph]

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:  # noqa: N802
        self._check()
        self.queues[stream].append(lambda: self.eventSynchronize(event))

    def eventCreateWithFlags(self, flags: int) -> int:  # noqa: N802
        handle = next(self._handles)
        self.events[handle] = (0, True)
        return handle

    def eventDestroy(self, event: int) -> None:  # noqa: N802
        del self.events[event]

    def eventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        self._check()
        self.events[event] = (stream, False)

        def reach() -> None:
            if event in self.events:
                self.events[event] = (stream, True)

        self.queues[stream].append(reach)

    def eventQuery(self, event: int) -> int:  # noqa: N802
        if self.errors:
            return self.errors[0]
        return 0 if self.events[event][1] else 600

    def eventSynchronize(self, event: int) -> None:  # noqa: N802
        self.run(self.events[event][0], lambda: self.events[event][1])

    def run(self, stream: int, until: Callable[[], bool] = lambda: False) -> None:
        while self.queues.get(stream) and not until():
            self.queues[stream].popleft()()
        if self.errors:
            raise CUDARuntimeError(self.errors[0])


class Driver:
    """Knows the module `activation`, of which it runs `relu_fwd_f32`."""

    CUDADriverError = CUDADriverError

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.modules: list[bytes] = []
        self.names: list[str] = []
        self.launches: list[tuple[str, tuple[int, ...], int]] = []
        self.attributes: list[tuple[int, int, int]] = []
        #: Bytes of the device that a module wants to be free.
        self.wanted = 0

    def moduleLoadData(self, image: bytes) -> int:  # noqa: N802
        if self.runtime.memGetInfo()[0] < self.wanted:
            raise CUDADriverError(2)
        self.modules.append(image)
        return len(self.modules)

    def moduleGetFunction(self, module: int, funcname: str) -> int:  # noqa: N802
        if not funcname.startswith("relu_"):
            raise CUDADriverError(500)
        self.names.append(funcname)
        return len(self.names)

    def funcSetAttribute(self, f: int, attribute: int, value: int) -> None:  # noqa: N802
        self.attributes.append((f, attribute, value))

    def launchKernel(  # noqa: N802
        self,
        f: int,
        grid_dim_x: int,
        grid_dim_y: int,
        grid_dim_z: int,
        block_dim_x: int,
        block_dim_y: int,
        block_dim_z: int,
        shared_mem_bytes: int,
        stream: int,
        kernel_params: int,
        extra: int,
    ) -> None:
        if block_dim_x * block_dim_y * block_dim_z > 1024:
            raise CUDADriverError(1)
        sizes = (grid_dim_x, grid_dim_y, grid_dim_z, block_dim_x, block_dim_y, block_dim_z)
        self.launches.append((self.names[f - 1], sizes, shared_mem_bytes))
        if self.names[f - 1] == "relu_fwd_f32":
            pointers = (ctypes.c_void_p * 3).from_address(kernel_params)
            x, y = (ctypes.c_void_p.from_address(p).value or 0 for p in pointers[:2])
            n = ctypes.c_int64.from_address(pointers[2]).value

            def run() -> None:
                values = np.ctypeslib.as_array((ctypes.c_float * n).from_address(x))
                np.maximum(values, 0, out=np.ctypeslib.as_array((ctypes.c_float * n).from_address(y)))

            self.runtime.queues[stream].append(run)


class Bindings:
    """In place of `gpunet.cuda_kernels.cuda_backend.Cuda`'s modules."""

    def __init__(self, **runtime: int) -> None:
        self.runtime = Runtime(**runtime)
        self.driver = Driver(self.runtime)
