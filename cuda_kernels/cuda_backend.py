"""The device ``cuda:N``: memory, copies, streams, events and launches through CuPy's bindings of CUDA.

Only thin calls are used, with addresses and handles as integers: CuPy's own arrays, pool and current stream
play no part. Streams are non-blocking: nothing here is ordered with the default stream.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from gpunet.backends import Backend, Event, Function, Memory, Stream, check_copy
from gpunet.cuda_kernels import device_errors, nvrtc
from gpunet.cuda_kernels.memory_pool import Pool
from gpunet.cuda_kernels.staging import Staging
from gpunet.devices import Device, driver
from gpunet.errors import DeviceError, KernelError

if TYPE_CHECKING:
    from gpunet.buffers import Buffer

#: Most dynamic shared memory that a launch gets without asking for it.
PLAIN_SHARED: Final = 48 << 10

#: What to do about an error that CUDA reports later than where it happened.
LOCATE: Final = (
    "set CUDA_LAUNCH_BLOCKING=1 to learn the kernel, or run on device 'sim:0', which names kernel, block, "
    "thread and buffer"
)

# Values of the CUDA API.
_NOT_READY: Final = 600
_OUT_OF_MEMORY: Final = 2
_MAX_DYNAMIC_SHARED: Final = 8
_CAPABILITY_MAJOR: Final = 75
_CAPABILITY_MINOR: Final = 76


class Cuda:
    """CuPy's bindings of the CUDA runtime and driver.

    Raises :class:`DeviceError` with what is missing and how to get it.
    """

    def __init__(self) -> None:
        try:
            self.runtime = importlib.import_module("cupy_backends.cuda.api.runtime")
            self.driver = importlib.import_module("cupy_backends.cuda.api.driver")
        except ImportError as error:
            raise DeviceError(
                f"no CUDA device can be used: CuPy is not there ({error}); {nvrtc.INSTALL}"
            ) from error
        #: What a call of either raises.
        self.errors: tuple[type[Exception], ...] = (
            self.runtime.CUDARuntimeError,
            self.driver.CUDADriverError,
        )

    def device_count(self) -> int:
        """Number of devices; raises :class:`DeviceError` if there is no driver, or none that fits."""
        try:
            return int(self.runtime.getDeviceCount())
        except self.errors as error:
            raise DeviceError(_why_no_device(self, error)) from error

    @contextmanager
    def located(self, what: str) -> Iterator[None]:
        """Turns errors of CUDA into :class:`KernelError` with what was done."""
        try:
            yield
        except self.errors as error:
            raise self.failed(what, error) from error

    @staticmethod
    def failed(what: str, error: Exception) -> KernelError:
        """The error to raise where ``what`` failed with an error of CUDA, perhaps one of earlier work."""
        return KernelError(f"{what} failed: {error}; {LOCATE}")


def _why_no_device(cuda: Cuda, error: Exception) -> str:
    text = str(error)
    if driver() is None:
        return (
            "no CUDA device can be used: there is no NVIDIA driver (libcuda.so.1 cannot be loaded); wanted a "
            "machine with an NVIDIA GPU and its driver, or device 'sim:0', which needs neither"
        )
    if "InsufficientDriver" in text:
        version = int(cuda.runtime.runtimeGetVersion())
        return (
            f"no CUDA device can be used: the driver is too old for CUDA {version // 1000}."
            f"{version % 1000 // 10} ({text}); wanted a newer driver, or the packages for an older CUDA: "
            "pip install 'gpunet[cuda12]'"
        )
    return f"no CUDA device can be used: {text}; wanted a device that nvidia-smi lists"


class CudaEvent(Event):
    """A CUDA event without timing."""

    __slots__ = ("_cuda", "_runtime", "pointer")

    def __init__(self, cuda: Cuda, stream: int) -> None:
        self._cuda = cuda
        self._runtime = runtime = cuda.runtime
        self.pointer = int(runtime.eventCreateWithFlags(runtime.eventDisableTiming))
        runtime.eventRecord(self.pointer, stream)

    def __del__(self) -> None:
        pointer = getattr(self, "pointer", 0)
        if pointer and not sys.is_finalizing():  # CUDA is torn down with the process
            self._runtime.eventDestroy(pointer)

    def done(self) -> bool:
        """Whether all work before the point has run; raises :class:`KernelError` if it failed."""
        status = int(self._runtime.eventQuery(self.pointer))
        if status not in (0, _NOT_READY):
            raise KernelError(f"asynchronous work failed before an event: CUDA error {status}; {LOCATE}")
        return status == 0

    def synchronize(self) -> None:
        """Waits on the host until all work before the point has run."""
        with self._cuda.located("waiting for an event"):
            self._runtime.eventSynchronize(self.pointer)


class CudaStream(Stream):
    """A non-blocking stream of one device.

    Attributes:
        pointer: the ``cudaStream_t``.
    """

    __slots__ = ("_backend", "_runtime", "pointer")

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._runtime = backend.cuda.runtime
        with backend.cuda.located(f"making a stream of {backend.device}"):
            backend.activate()
            self.pointer = int(self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking))

    def __del__(self) -> None:
        pointer = getattr(self, "pointer", 0)
        if pointer and not sys.is_finalizing():  # CUDA is torn down with the process
            self._runtime.streamDestroy(pointer)

    def record(self) -> CudaEvent:
        """An event behind all work that is in the queue now."""
        cuda = self._backend.cuda
        try:
            self._backend.activate()
            return CudaEvent(cuda, self.pointer)
        except cuda.errors as error:
            raise cuda.failed(f"recording an event on {self._backend.device}", error) from error

    def wait(self, event: Event) -> None:
        """Work put into the queue from now on runs after the event, which may be of another device."""
        if not isinstance(event, CudaEvent):
            raise DeviceError(
                f"a stream of {self._backend.device} cannot wait for {event!r}, wanted a CUDA event"
            )
        cuda = self._backend.cuda
        try:
            self._runtime.streamWaitEvent(self.pointer, event.pointer)
        except cuda.errors as error:
            raise cuda.failed(f"waiting for an event on {self._backend.device}", error) from error

    def synchronize(self) -> None:
        """Waits until the queue is empty; raises :class:`KernelError` if its work failed."""
        with self._backend.cuda.located(f"work on {self._backend.device}"):
            self._runtime.streamSynchronize(self.pointer)

    @property
    def capturing(self) -> bool:
        """Whether the stream is being captured into a graph."""
        cuda = self._backend.cuda
        try:
            return bool(self._runtime.streamIsCapturing(self.pointer))
        except cuda.errors as error:
            raise cuda.failed(f"asking a stream of {self._backend.device}", error) from error


class CudaFunction(Function):
    """A kernel of a loaded module."""

    __slots__ = ("_backend", "_launch", "_shared", "name", "pointer")

    def __init__(self, backend: CudaBackend, name: str, pointer: int) -> None:
        self._backend = backend
        self._launch = backend.cuda.driver.launchKernel
        self._shared = PLAIN_SHARED
        self.name = name
        self.pointer = pointer

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        params: Any,
        stream: Stream,
        arguments: tuple[Any, ...] = (),
    ) -> None:
        """Puts one launch on a stream; ``arguments`` are not looked at."""
        backend = self._backend
        try:
            backend.activate()
            if shared > self._shared:
                backend.cuda.driver.funcSetAttribute(self.pointer, _MAX_DYNAMIC_SHARED, shared)
                self._shared = shared
            queue = stream.pointer  # type: ignore[attr-defined]
            self._launch(self.pointer, *grid, *block, shared, queue, ctypes.addressof(params), 0)
        except backend.cuda.errors as error:
            raise KernelError(
                f"kernel {self.name!r} failed on {backend.device} with {grid[0]}x{grid[1]}x{grid[2]} blocks "
                f"of {block[0]}x{block[1]}x{block[2]} threads and {shared} bytes of shared memory: {error}"
            ) from error


class CudaGraph:
    """A captured graph, ready to launch."""

    def __init__(self, backend: CudaBackend, graph: int, queue: int) -> None:
        self._backend = backend
        self._runtime = runtime = backend.cuda.runtime
        self._queue = queue
        self._graph = graph
        self._executable = 0
        with backend.cuda.located("making a captured graph ready"):
            self._executable = backend.retried(lambda: int(runtime.graphInstantiate(graph)))
            runtime.graphUpload(self._executable, queue)

    def __del__(self) -> None:
        if sys.is_finalizing():  # CUDA is torn down with the process
            return
        if self._executable:
            self._runtime.graphExecDestroy(self._executable)
        self._runtime.graphDestroy(self._graph)

    def launch(self) -> None:
        """Puts all work of the graph on the stream that it was captured from, with one call."""
        with self._backend.cuda.located("launching a graph"):
            self._backend.activate()
            self._runtime.graphLaunch(self._executable, self._queue)


class CudaBackend(Backend):
    """One GPU.

    Attributes:
        cuda: the bindings.
        capability: compute capability as 10 * major + minor.
    """

    def __init__(self, device: Device, cuda: Cuda | None = None) -> None:
        self.cuda = cuda or Cuda()
        count = self.cuda.device_count()
        if device.index >= count:
            found = ", ".join(f"cuda:{i}" for i in range(count)) or "none"
            raise DeviceError(f"there is no device {device}, found {found}")
        self.device = device
        runtime = self.cuda.runtime
        self._set_device = runtime.setDevice
        try:
            self.activate()
            runtime.free(0)  # makes the context that modules are loaded into
            self.capability = 10 * int(runtime.deviceGetAttribute(_CAPABILITY_MAJOR, device.index)) + int(
                runtime.deviceGetAttribute(_CAPABILITY_MINOR, device.index)
            )
        except self.cuda.errors as error:
            raise DeviceError(
                f"{device} cannot be used: {error}; wanted a GPU that no process has to itself, with memory "
                "for a context: see nvidia-smi"
            ) from error
        self._pool = Pool(device, self._allocate, self._free, self.memory_info)
        self._staging = Staging(self._pinned, self._copy_addresses)
        self._modules: dict[str, int] = {}
        self._functions: dict[tuple[str, str], CudaFunction] = {}
        self._lock = threading.Lock()
        self._stream = CudaStream(self)
        self.errors = device_errors.DeviceErrors(self)

    def activate(self) -> None:
        """Makes the device the current one of this thread: handles belong to it; a new thread has none."""
        self._set_device(self.device.index)

    @property
    def stream(self) -> CudaStream:
        """The stream that the simple engine runs on."""
        return self._stream

    def new_stream(self) -> CudaStream:
        """A further stream."""
        return CudaStream(self)

    def allocate(self, nbytes: int, stream: Stream | None = None) -> Memory:
        """Memory from the pool (:mod:`gpunet.cuda_kernels.memory_pool`)."""
        return self._pool.allocate(nbytes, stream or self._stream)

    def empty_cache(self) -> int:
        """Gives memory that is kept for reuse back to the device; returns the number of bytes."""
        return self._pool.empty()

    def copy_in(self, target: Buffer, source: npt.NDArray[Any], stream: Stream) -> None:
        """Copies a host array to the device through pinned memory; it may be changed when this returns."""
        check_copy(target, source)
        self._refuse_capture(target, stream)
        target.memory.used_on(stream)
        with self.cuda.located(f"copying {target.name!r} to {self.device}"):
            self._staging.to_device(target.pointer, source, stream)

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Page-locked memory, given back when no array of it is left."""
        memory = self._pinned(max(1, nbytes))
        # Views have this array as their base.
        weakref.finalize(memory, self.cuda.runtime.freeHost, int(memory.ctypes.data)).atexit = False
        return memory

    def copy_later(self, target: Buffer, source: npt.NDArray[Any], stream: Stream) -> Event:
        """Puts one copy from page-locked memory on the stream."""
        check_copy(target, source)
        self._refuse_capture(target, stream)
        target.memory.used_on(stream)
        with self.cuda.located(f"copying {target.name!r} to {self.device}"):
            self._copy_addresses(target.pointer, int(source.ctypes.data), source.nbytes, stream)
        return stream.record()

    def copy_out(self, target: npt.NDArray[Any], source: Buffer, stream: Stream) -> None:
        """Copies to a host array through pinned memory and waits; raises what kernels before it reported."""
        check_copy(source, target, written=True)
        self._refuse_capture(source, stream)
        source.memory.used_on(stream)
        with self.cuda.located(f"copying {source.name!r} from {self.device}"):
            self._staging.to_host(target, source.pointer, stream)
        device_errors.check(self, source, stream)

    def copy_back(self, target: npt.NDArray[Any], source: Buffer, stream: Stream) -> None:
        """Copies to page-locked memory by one copy, and waits."""
        check_copy(source, target, written=True)
        self._refuse_capture(source, stream)
        source.memory.used_on(stream)
        with self.cuda.located(f"copying {source.name!r} from {self.device}"):
            self._copy_addresses(int(target.ctypes.data), source.pointer, source.nbytes, stream)
            stream.record().synchronize()
        device_errors.check(self, source, stream)

    def copy(self, target: Buffer, source: Buffer, stream: Stream) -> None:
        """Copies between two buffers of one size, of this or another GPU."""
        target.memory.used_on(stream)
        source.memory.used_on(stream)
        if target.nbytes != source.nbytes:
            raise DeviceError(f"cannot copy {source} to {target}, wanted the same number of bytes")
        runtime = self.cuda.runtime
        queue = stream.pointer  # type: ignore[attr-defined]
        with self.cuda.located(f"copying {source.name!r} to {target.name!r}"):
            self.activate()
            if target.backend is source.backend:
                runtime.memcpyAsync(
                    target.pointer, source.pointer, source.nbytes, runtime.memcpyDeviceToDevice, queue
                )
            else:
                devices = target.backend.device.index, source.backend.device.index
                runtime.memcpyPeerAsync(
                    target.pointer, devices[0], source.pointer, devices[1], source.nbytes, queue
                )

    def fill(self, target: Buffer, byte: int, stream: Stream) -> None:
        """Sets every byte."""
        target.memory.used_on(stream)
        with self.cuda.located(f"filling {target.name!r}"):
            self.activate()
            queue = stream.pointer  # type: ignore[attr-defined]
            self.cuda.runtime.memsetAsync(target.pointer, byte, target.nbytes, queue)

    def function(self, module: str, name: str) -> CudaFunction:
        """A kernel; its module is compiled and loaded on first use."""
        with self._lock:
            found = self._functions.get((module, name))
            if found is None:
                handle = self._modules.get(module)
                if handle is None:
                    handle = self._modules[module] = self._load(module)
                try:
                    pointer = int(self.cuda.driver.moduleGetFunction(handle, name))
                except self.cuda.errors as error:
                    raise KernelError(f"module {module}.cu has no kernel {name!r}: {error}") from error
                found = self._functions[module, name] = CudaFunction(self, name, pointer)
            return found

    def call_host(
        self, function: Callable[..., None], buffers: Sequence[Buffer], stream: Stream, reads: int = 0
    ) -> None:
        """Raises :class:`DeviceError`: only the simulated device can."""
        raise DeviceError(
            f"host functions cannot run on memory of {self.device}, only on the simulated device"
        )

    def capture(self, issue: Callable[[], None], stream: Stream) -> Callable[[], None]:
        """Records what ``issue`` puts on ``stream`` and on streams that it forks, as one CUDA graph."""
        self.activate()
        queue = stream.pointer  # type: ignore[attr-defined]
        runtime = self.cuda.runtime
        with self.cuda.located("capturing a graph"):
            runtime.streamBeginCapture(queue, runtime.streamCaptureModeRelaxed)
            try:
                issue()
            except BaseException:
                # Ending it may fail too, with streams that were not joined yet: the first error tells more.
                with suppress(*self.cuda.errors):
                    runtime.graphDestroy(int(runtime.streamEndCapture(queue)))
                raise
            graph = int(runtime.streamEndCapture(queue))
        return CudaGraph(self, graph, queue).launch

    def memory_info(self) -> tuple[int, int]:
        """(bytes free, bytes in all) on the device, as the driver counts them."""
        with self.cuda.located(f"asking for the memory of {self.device}"):
            self.activate()
            free, total = self.cuda.runtime.memGetInfo()
        return int(free), int(total)

    def _refuse_capture(self, buffer: Buffer, stream: Stream) -> None:
        if stream.capturing:
            raise DeviceError(
                f"cannot copy {buffer.name!r} between {self.device} and the host on a stream that is "
                "captured into a graph: a replay would find something else in the pinned memory between them"
            )

    def _load(self, module: str) -> int:
        cubin = nvrtc.compile_module(module, nvrtc.supported(self.capability))
        try:
            self.activate()
            return self.retried(lambda: int(self.cuda.driver.moduleLoadData(cubin.code)))
        except self.cuda.errors as error:
            raise DeviceError(f"cannot load {module}.cu on {self.device}: {error}") from error

    def retried(self, call: Callable[[], int]) -> int:
        """What a call gives that takes memory of the device by itself; memory kept for reuse makes room."""
        try:
            return call()
        except self.cuda.errors as error:
            if getattr(error, "status", None) != _OUT_OF_MEMORY or not self.empty_cache():
                raise
        return call()

    def _allocate(self, nbytes: int) -> int | None:
        try:
            self.activate()
            return int(self.cuda.runtime.malloc(nbytes))
        except self.cuda.runtime.CUDARuntimeError as error:
            if error.status == _OUT_OF_MEMORY:
                return None
            raise DeviceError(f"cannot allocate {nbytes} bytes on {self.device}: {error}") from error

    def _free(self, pointer: int) -> None:
        with self.cuda.located(f"giving memory of {self.device} back"):
            self.activate()
            self.cuda.runtime.free(pointer)

    def _pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Page-locked host memory that lives as long as the process."""
        try:
            self.activate()
            pointer = int(self.cuda.runtime.hostAlloc(nbytes, self.cuda.runtime.hostAllocPortable))
        except self.cuda.errors as error:
            raise DeviceError(
                f"cannot lock {nbytes} bytes of host memory for {self.device}: {error}"
            ) from error
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))

    def _copy_addresses(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        # cudaMemcpyDefault: the addresses tell which side is the host.
        self.activate()
        runtime = self.cuda.runtime
        queue = stream.pointer  # type: ignore[attr-defined]
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, queue)


def open_backend(device: Device) -> CudaBackend:
    """The backend of ``cuda:N``; raises :class:`DeviceError` with what is missing and how to get it."""
    return CudaBackend(device)
