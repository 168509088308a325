"""The backend of the simulated CUDA device: ``sim:N``."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpunet import backends
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import device_errors, signature
from gpunet.cuda_kernels.memory_pool import exhausted
from gpunet.cuda_kernels.sim import library, report, toolchain
from gpunet.cuda_kernels.sim.streams import (
    Executor,
    Graph,
    Range,
    Record,
    Recording,
    SimStream,
    Work,
    default_seed,
)
from gpunet.devices import Device
from gpunet.errors import DeviceError, KernelError

_ORDERS: Final = {"forward": library.FORWARD, "reverse": library.REVERSE, "random": library.RANDOM}
Triple = tuple[int, int, int]


class SimFunction(backends.Function):
    """A kernel of a module built for the host."""

    def __init__(self, backend: SimBackend, kernel: signature.Kernel, name: str, launcher: int) -> None:
        self.backend = backend
        self.kernel = kernel
        self.name = name
        self.launcher = launcher
        written = [i for i, p in enumerate(kernel.parameters) if p.pointer and not p.const]
        # Tables of addresses are of this type: such a kernel may reach other blocks than its arguments'.
        self.indirect = any(p.pointer and p.type == "uint64" for p in kernel.parameters)
        self._written = sum(1 << i for i in written if i < 64)
        self._configurations: dict[tuple[Triple, Triple, int], library.Launch] = {}

    def launch(
        self,
        grid: Triple,
        block: Triple,
        shared: int,
        params: Any,
        stream: backends.Stream,
        arguments: tuple[Any, ...] = (),
    ) -> None:
        """Queues a launch; errors of the kernel are raised where the stream is waited for."""
        key = (grid, block, shared)
        configuration = self._configurations.get(key)
        if configuration is None:
            configuration = self._configurations[key] = library.Launch(
                grid, block, shared, written=self._written, milliseconds=self.backend.milliseconds
            )
        run = functools.partial(self.backend.run_launch, self, configuration, params, arguments)
        ranges = functools.partial(self.ranges, params, arguments)
        self.backend.own(stream).put(Work("launch", self.name, run, ranges))

    def pointers(self, arguments: tuple[Any, ...]) -> report.Pointers:
        """The pointer parameters with what was passed for them."""
        return [(p, a) for p, a in zip(self.kernel.parameters, arguments, strict=False) if p.pointer]

    def addresses(self, params: Any) -> list[tuple[signature.Parameter, int]]:
        """The pointer parameters that are not null with their values."""
        found = []
        for parameter, at in zip(self.kernel.parameters, params, strict=False):
            value = ctypes.c_void_p.from_address(at).value if parameter.pointer else None
            if value is not None:
                found.append((parameter, value))
        return found

    def ranges(self, params: Any, arguments: tuple[Any, ...]) -> tuple[list[Range], list[Range]]:
        """The bytes of its buffers that a launch may only read, and those that it may write."""
        reads: list[Range] = []
        writes: list[Range] = []
        known = {id(p): a for p, a in self.pointers(arguments) if isinstance(a, Buffer)}
        for parameter, address in self.addresses(params):
            buffer = known.get(id(parameter))
            if buffer is not None:
                found = self.backend.range_of(buffer)
            else:
                info = self.backend.runtime.find(address)
                found = Range(address, address if info is None else info.pointer + info.nbytes)
            if found.start < found.stop:
                (reads if parameter.const else writes).append(found)
        for reached in arguments[len(self.kernel.parameters) :]:
            reads.extend(self.backend.range_of(buffer) for buffer in reached.reads if buffer.nbytes)
            writes.extend(self.backend.range_of(buffer) for buffer in reached.writes if buffer.nbytes)
        return reads, writes


class SimMemory(backends.Memory):
    """A block of the simulated device."""

    __slots__ = ("__weakref__",)


class SimBackend(backends.Backend):
    """A simulated CUDA device.

    Memory is memory of this process that NumPy is never shown: each block ends at an inaccessible page, so
    blocks are aligned to 256 bytes only if their size is a multiple of 256 (to 16 bytes otherwise). Fresh
    memory holds 0xFF bytes: NaN as floating point.

    Args:
        device: its name.
        seed: of the order in which streams run; the environment's ``GPUNET_SIM_SEED`` by default, else 0.
        order: of a block's threads between barriers, and of blocks: ``forward``, ``reverse`` or ``random``.
        check_order: run each launch in several orders and compare what it wrote (see :meth:`run_launch`).
        memory: bytes that can be allocated at a time; ``None`` for no limit.
        timeout: seconds of processor time that a launch may take, 0 for any; the environment's
            ``GPUNET_SIM_TIMEOUT`` by default, else 120.

    Raises:
        DeviceError: there is no C++ compiler; a seed or a time that is no number.
    """

    def __init__(
        self,
        device: Device,
        *,
        seed: int | None = None,
        order: str = "forward",
        check_order: bool = False,
        memory: int | None = None,
        timeout: float | None = None,
    ) -> None:
        if order not in _ORDERS:
            raise DeviceError(f"order of threads {order!r}, wanted one of {', '.join(_ORDERS)}")
        self.device = device
        self.check_order = check_order
        self.order = order
        self.checks_bounds = toolchain.checks_bounds()
        self.seed = default_seed(os.environ.get("GPUNET_SIM_SEED", 0)) if seed is None else seed
        self.milliseconds = _milliseconds(
            os.environ.get("GPUNET_SIM_TIMEOUT", 120) if timeout is None else timeout
        )
        self.runtime = library.runtime()
        self.executor = Executor(self.seed)
        self._stream = SimStream(self.executor)
        self.errors = device_errors.DeviceErrors(self)
        self._functions: dict[tuple[str, str], SimFunction] = {}
        self._modules: dict[str, library.Module] = {}
        self._launches = 0
        self._memory = memory
        self._used = 0
        self._live: weakref.WeakSet[SimMemory] = weakref.WeakSet()

    @property
    def stream(self) -> backends.Stream:
        """The stream that the simple engine runs on."""
        return self._stream

    def new_stream(self) -> backends.Stream:
        """A further stream."""
        return SimStream(self.executor)

    def own(self, stream: backends.Stream) -> SimStream:
        """``stream`` as one of this device; raises :class:`DeviceError` if it is of another."""
        if not isinstance(stream, SimStream) or stream.executor is not self.executor:
            raise DeviceError(f"the stream is not one of {self.device}")
        return stream

    def synchronize(self) -> None:
        """Runs all work of all streams; raises the first error since the last wait."""
        self.executor.synchronize()

    def record_work(self, on: bool = True) -> list[Record]:
        """Begins, or ends, to record the work that runs; returns the list that it is recorded in, or was.

        See :func:`gpunet.cuda_kernels.sim.recording.as_records` for the race checker's view.
        """
        recording = Recording() if on else self.executor.recording
        self.executor.recording = recording if on else None
        return [] if recording is None else recording.work

    def range_of(self, buffer: Buffer) -> Range:
        """The bytes of a buffer.

        The device's error buffer is communal: kernels of all streams report there by atomic operations, and
        whoever looks takes what it finds.
        """
        communal = self.errors.buffer is not None and buffer.memory is self.errors.buffer.memory
        return Range(buffer.pointer, buffer.pointer + buffer.nbytes, buffer.name, communal)

    def capture(self, issue: Callable[[], None], stream: backends.Stream) -> Callable[[], None]:
        """Records what ``issue`` puts on streams of this device; the work does not run."""
        self.own(stream)
        with library.LOCK:
            if self.executor.captured is not None:
                raise DeviceError(f"a graph is being captured on {self.device} already, wanted one at a time")
            entries: list[tuple[SimStream, Work]] = []
            self.executor.captured = entries
            try:
                issue()
            finally:
                self.executor.captured = None
        return Graph(entries).launch

    # ---- memory ----

    def allocate(self, nbytes: int, stream: backends.Stream | None = None) -> backends.Memory:
        """A block of its own.

        Raises :class:`DeviceError` beyond the limit, or if the host has no more memory.
        """
        if self.executor.released:
            with library.LOCK:
                self.executor.reclaim()
        if self._memory is not None and self._used + nbytes > self._memory:
            # Queued work keeps its buffers.
            self.executor.run_until(lambda: not self.executor.busy, raises=False)
            # Programs and what is bound in them refer to each other: only the collector finds those unused.
            gc.collect()
        if self._memory is not None and self._used + nbytes > self._memory:
            free = self._memory - self._used
            raise DeviceError(exhausted(self.device, nbytes, free, self._memory, self._live))
        pointer = self.runtime.allocate(nbytes)
        if not pointer:
            raise DeviceError(f"out of memory on {self.device}: the host has no {nbytes} bytes more")
        self._used += nbytes
        left = [pointer]

        def release() -> None:
            # Called from anywhere, also by the garbage collector, and queued work may still use the block:
            # it is only noted here.
            if left:
                self._used -= nbytes
                self.executor.released.append((next(self.executor.sequence), left.pop()))

        memory = SimMemory(pointer, nbytes, release)
        self._live.add(memory)
        return memory

    def memory_info(self) -> tuple[int, int]:
        """(bytes free, bytes in all); zeros without a limit."""
        return (0, 0) if self._memory is None else (self._memory - self._used, self._memory)

    # ---- copies ----

    def copy_in(self, target: Buffer, source: npt.NDArray[Any], stream: backends.Stream) -> None:
        """Queues a copy of what ``source`` holds now."""
        backends.check_copy(target, source)
        if self.executor.captured is not None:
            raise DeviceError(
                "a copy from the host cannot be captured: a graph would copy the same bytes always"
            )
        data = source.tobytes()
        address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0

        def run(_keep: bytes = data) -> None:
            self._copy(target.pointer, address, target.nbytes, 1, (target,))

        self._put(stream, "copy", f"copy to {target.name!r}", run, [], [target])

    def copy_out(self, target: npt.NDArray[Any], source: Buffer, stream: backends.Stream) -> None:
        """Copies in the order of the stream and waits; raises what kernels before it reported."""
        backends.check_copy(source, target, written=True)
        done = False
        recording, position = self.executor.recording, None

        def run() -> None:
            nonlocal done, position
            done = True
            if recording is not None:
                position = recording.last.get(self.own(stream).number)
            self._copy(target.ctypes.data, source.pointer, source.nbytes, 2, (source,))

        self._put(stream, "copy", f"copy of {source.name!r}", run, [source], [])
        with library.LOCK:
            self.executor.run_until(lambda: done)
            if recording is not None:
                recording.host_waited(position)
        device_errors.check(self, source, stream)

    def copy(self, target: Buffer, source: Buffer, stream: backends.Stream) -> None:
        """Queues a copy between two buffers of this device, or from another simulated one."""
        if target.nbytes != source.nbytes:
            raise DeviceError(f"cannot copy {source} to {target}, wanted the same number of bytes")

        def run() -> None:
            self._copy(target.pointer, source.pointer, target.nbytes, 3, (target, source))

        self._put(stream, "copy", f"copy of {source.name!r} to {target.name!r}", run, [source], [target])

    def fill(self, target: Buffer, byte: int, stream: backends.Stream) -> None:
        """Queues setting every byte."""

        def run() -> None:
            if self.runtime.fill(target.pointer, byte, target.nbytes):
                raise KernelError(
                    f"fill: buffer {target.name!r} ({target.spec}) is freed or reaches out of its block"
                )

        self._put(stream, "fill", f"fill of {target.name!r}", run, [], [target])

    def _copy(self, target: int, source: int, nbytes: int, device: int, buffers: tuple[Buffer, ...]) -> None:
        failed = self.runtime.copy(target, source, nbytes, device)
        if failed:
            buffer = buffers[failed - 1] if device == 3 else buffers[0]
            raise KernelError(
                f"copy: buffer {buffer.name!r} ({buffer.spec}) is freed or reaches out of its block"
            )

    def _put(
        self,
        stream: backends.Stream,
        kind: str,
        name: str,
        run: Callable[[], None],
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
    ) -> None:
        def ranges() -> tuple[list[Range], list[Range]]:
            spans = [[self.range_of(b) for b in each if b.nbytes] for each in (reads, writes)]
            return spans[0], spans[1]

        self.own(stream).put(Work(kind, name, run, ranges))

    # ---- host functions ----

    def call_host(
        self,
        function: Callable[..., None],
        buffers: Sequence[Buffer],
        stream: backends.Stream,
        reads: int = 0,
    ) -> None:
        """Queues a call of ``function`` with arrays that are the memory of ``buffers``.

        The first ``reads`` of them are read-only. The arrays are valid during the call only.
        """
        kept = tuple(buffers)

        def run() -> None:
            function(*(self._array(buffer, i >= reads) for i, buffer in enumerate(kept)))

        name = getattr(function, "__name__", type(function).__name__)
        self._put(stream, "host", name, run, kept[:reads], kept[reads:])

    def _array(self, buffer: Buffer, writeable: bool) -> npt.NDArray[Any]:
        if not self.runtime.accessible(buffer.pointer, buffer.nbytes):
            raise KernelError(
                f"host call: buffer {buffer.name!r} ({buffer.spec}) is freed or reaches out of its block"
            )
        if buffer.nbytes == 0:
            return np.empty(buffer.shape, buffer.dtype)
        memory = (ctypes.c_uint8 * buffer.nbytes).from_address(buffer.pointer)
        array: npt.NDArray[Any] = np.frombuffer(memoryview(memory), buffer.dtype).reshape(buffer.shape)
        array.flags.writeable = writeable
        return array

    # ---- kernels ----

    def function(self, module: str, name: str) -> backends.Function:
        """A declared kernel; builds its module on first use. Raises :class:`DeviceError`."""
        found = self._functions.get((module, name))
        if found is None:
            kernel = _declaration(module, name)
            loaded = self._modules.get(module)
            launcher = loaded.launcher(name) if loaded is not None else None
            if launcher is None:
                loaded = self._modules[module] = library.Module(module)
                launcher = loaded.launcher(name)
            if launcher is None:
                raise DeviceError(f"the CUDA module {module!r} was built without a launcher of {name!r}")
            found = self._functions[module, name] = SimFunction(self, kernel, name, launcher)
        return found

    def run_launch(
        self, function: SimFunction, launch: library.Launch, params: Any, arguments: tuple[Any, ...]
    ) -> None:
        """Runs one launch now.

        With :attr:`check_order` it runs in reverse and in random order first, each from the same memory, and
        then forward: results that differ in any bit mean that threads race.

        Raises:
            KernelError: the launch failed, or its results depend on the order of threads.
        """
        self._launches += 1
        launch.seed = self.seed * 1_000_003 + self._launches
        if self.checks_bounds:
            reads, writes = function.ranges(params, arguments)
            words = [
                w for each, may in ((reads, 0), (writes, 1)) for r in each for w in (r.start, r.stop, may)
            ]
            table = (ctypes.c_uint64 * len(words))(*words)
            launch.ranges, launch.range_count = ctypes.addressof(table), len(words) // 3
            launch.indirect = function.indirect
        if not self.check_order:
            self._run_once(function, launch, params, arguments, _ORDERS[self.order])
            return
        base = {
            address: info for _, address in function.addresses(params) if (info := self.runtime.find(address))
        }
        blocks = {info.pointer: info.nbytes for info in base.values() if not info.freed}

        def snapshot() -> dict[int, bytes]:
            return {pointer: ctypes.string_at(pointer, nbytes) for pointer, nbytes in blocks.items()}

        before = snapshot()
        results = {}
        for name in ("reverse", "random", "forward"):
            for pointer, data in before.items():
                ctypes.memmove(pointer, data, len(data))
            self._run_once(function, launch, params, arguments, _ORDERS[name])
            results[name] = snapshot()
        owner = {address: info.pointer for address, info in base.items()}
        for name in ("reverse", "random"):
            if results[name] == results["forward"]:
                continue
            found = report.differences(function.pointers(arguments), results["forward"], results[name], owner)
            parameter, buffer, element = next(found, (None, None, 0))
            where = (
                "its memory"
                if parameter is None
                else f"element {element} of {report.argument(parameter, buffer)}"
            )
            raise KernelError(
                f"kernel {function.name!r} ({function.kernel.module}.cu): {where} depends on the order in "
                f"which threads run (forward and {name} differ): a barrier or an atomic is missing"
            )

    def _run_once(
        self,
        function: SimFunction,
        launch: library.Launch,
        params: Any,
        arguments: tuple[Any, ...],
        order: int,
    ) -> None:
        launch.order = order
        if self.runtime.launch(function.launcher, params, ctypes.addressof(launch)):
            raise report.describe(function.name, function.kernel.module, function.pointers(arguments))


def _milliseconds(seconds: Any) -> int:
    try:
        found = round(float(seconds) * 1000)
    except (ValueError, OverflowError):
        found = -1
    if found < 0:
        raise DeviceError(f"GPUNET_SIM_TIMEOUT is {seconds!r}, wanted seconds, or 0 for no limit")
    return found


def _declaration(module: str, name: str) -> signature.Kernel:
    for (owner, _), kernel in signature.declared.items():
        if owner == module and name.startswith(kernel.name):
            for types in kernel.instances():
                if kernel.function_name(*types) == name:
                    return kernel
    raise DeviceError(
        f"kernel {name!r} of {module}.cu is not declared, wanted a gpunet.cuda_kernels.signature.Kernel"
    )


def open_backend(device: Device) -> SimBackend:
    """The backend of ``sim:N``. Raises :class:`DeviceError` without a C++ compiler."""
    return SimBackend(device)
