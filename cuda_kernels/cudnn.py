"""cuDNN through the ``pygraph`` of nvidia-cudnn-frontend: the one module that calls it.

A graph (:mod:`gpunet.cuda_kernels.cudnn_graphs`) is planned once for a device and kept
(:mod:`gpunet.cuda_kernels.cudnn_cache`); a plan is loaded from the bytes that cuDNN makes of it, whether it was
made now or in another process. Planning needs no GPU: a :class:`Target` can come from a description of one.

Environment: ``GPUNET_TF32`` and ``GPUNET_DETERMINISTIC`` (0 or 1), ``GPUNET_CUDNN_WORKSPACE`` (most MiB of scratch a
plan may take), ``GPUNET_CUDNN_TUNE`` (how many plans are timed to find the fastest; 1 takes cuDNN's first choice).
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import json
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from gpunet.backends import Backend, Stream, opened
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import cudnn_cache
from gpunet.cuda_kernels.cudnn_cache import Plan, PlanCache, plan_key
from gpunet.cuda_kernels.cudnn_graphs import ALIGNMENT, Descriptor, Maker, Settings
from gpunet.errors import DeviceError, KernelError
from gpunet.kernels import KernelContext
from gpunet.specs import TensorSpec, spec

Launch = Callable[[], None]

INSTALL: Final = "wanted nvidia-cudnn-frontend and cuDNN: pip install 'gpunet[cuda12]'"
#: The first version whose calls are these.
_OLDEST: Final = (1, 26)
#: Names the CUDA runtime that the front end loads.
_RUNTIME: Final = "CUDNN_FRONTEND_CUDART_LIB_NAME"


class NoPlan(DeviceError):
    """cuDNN cannot run a graph: it has no plan, or none that is allowed."""


@functools.cache
def library() -> Any:
    """The module ``cudnn``; raises :class:`DeviceError` with what is missing and how to get it."""
    _choose_runtime()
    try:
        found = importlib.import_module("cudnn")
        version = str(found.__version__)
        found.backend_version()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise DeviceError(f"cuDNN cannot be called: {error}; {INSTALL}") from error
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise DeviceError(f"nvidia-cudnn-frontend is {version}, wanted {'.'.join(map(str, _OLDEST))} or newer")
    return found


def _choose_runtime() -> None:
    """Makes the front end load the CUDA runtime of CuPy's version, not any newer one that the loader finds."""
    space = importlib.util.find_spec("nvidia")
    if _RUNTIME in os.environ or space is None or importlib.util.find_spec("cupy_backends") is None:
        return
    try:
        runtime = importlib.import_module("cupy_backends.cuda.api.runtime")
        major = int(runtime.runtimeGetVersion()) // 1000
    except Exception:
        return  # the front end then looks for itself
    for folder in space.submodule_search_locations or ():
        for file in sorted(Path(folder).glob(f"*/lib/libcudart.so.{major}")):
            os.environ[_RUNTIME] = str(file)
            return


def versions() -> tuple[str, str]:
    """Versions of cuDNN and of its front end."""
    return str(library().backend_version()), str(library().__version__)


def reason_against(backend: Backend) -> str | None:
    """Why cuDNN cannot be called for a device; ``None`` if it can."""
    if backend.simulated:
        return "cuDNN needs a GPU"
    if importlib.util.find_spec("cudnn") is None:
        return f"nvidia-cudnn-frontend is not installed; {INSTALL}"
    try:
        library()
    except DeviceError as error:
        return str(error)
    return None


def settings() -> Settings:
    """What the environment allows; raises :class:`DeviceError` for what is no number."""
    default = Settings()

    def number(name: str, value: int, least: int) -> int:
        text = os.environ.get(name, str(value))
        if not text.isdecimal() or int(text) < least:
            raise DeviceError(f"{name} is {text!r}, wanted a whole number of at least {least}")
        return int(text)

    return Settings(
        tf32=number("GPUNET_TF32", default.tf32, 0) == 1,
        deterministic=number("GPUNET_DETERMINISTIC", default.deterministic, 0) == 1,
        workspace=number("GPUNET_CUDNN_WORKSPACE", default.workspace >> 20, 0) << 20,
        tune=number("GPUNET_CUDNN_TUNE", 8, 1),
    )


# Planning.


@dataclass(frozen=True)
class Target:
    """A device to plan for.

    Attributes:
        properties: its description as JSON, as cuDNN reads and writes it.
    """

    properties: str

    @property
    def capability(self) -> int:
        """Compute capability as 10 * major + minor."""
        return int(json.loads(self.properties)["deviceVer"]) // 10

    @functools.cached_property
    def device(self) -> Any:
        """The description as an object of cuDNN."""
        return library().create_device_properties(self.properties)


def _message(error: Exception) -> str:
    """The last thing that cuDNN says, without its many lines of what it tried."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def _graph(target: Target, descriptor: Descriptor, allowed: Settings, handle: Any) -> Any:
    """A graph with its plans, the forbidden ones struck out; without a handle, for a device that is not here."""
    lib = library()
    maker = functools.partial(Maker, lib, operands=descriptor.operands())
    compute = maker(graph=None).type(descriptor.compute)
    place = {"device_property": target.device} if handle is None else {"handle": handle}
    graph = lib.pygraph(
        name="gpunet",
        io_data_type=maker(graph=None).type(descriptor.dtype),
        intermediate_data_type=compute,
        compute_data_type=compute,
        # Without it the front end asks the CUDA runtime for a device.
        sm_version=target.capability,
        **place,
    )
    try:
        descriptor.build(maker(graph=graph))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([lib.heur_mode.A, lib.heur_mode.FALLBACK])
        graph.deselect_numeric_notes(
            [getattr(lib.numerical_note, note) for note in allowed.forbidden(descriptor)]
        )
        graph.deselect_workspace_greater_than(allowed.workspace)
        graph.check_support()
    except (lib.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
        raise NoPlan(f"cuDNN has no plan of {descriptor}: {_message(error)}") from error
    return graph


def candidates(
    target: Target, descriptor: Descriptor, allowed: Settings, handle: Any = None
) -> Iterator[Plan]:
    """The plans of a graph that build, in cuDNN's order: its first choice first.

    Raises :class:`NoPlan` if there are none.
    """
    reason = descriptor.against()
    if reason is not None:
        raise NoPlan(f"cuDNN has no plan of {descriptor}: {reason}")
    key = plan_key(target.properties, descriptor, allowed, versions())
    graph = _graph(target, descriptor, allowed, handle)
    count, built, last = int(graph.get_execution_plan_count()), 0, ""
    for index in range(count):
        try:
            graph.build_plan_at_index(index)  # refuses those struck out
        except Exception as error:
            last = _message(error)
            continue
        # Engines that the front end writes in Python are not in what it serialises.
        if getattr(graph, "selected_engine", None) is not None:
            continue
        built += 1
        data = bytes(graph.serialize())
        yield Plan(key, str(graph.get_plan_name_at_index(index)), int(graph.get_workspace_size()), data)
    if not built:
        forbidden = ", ".join(allowed.forbidden(descriptor))
        raise NoPlan(
            f"cuDNN has no plan of {descriptor}: of {count} none builds without {forbidden} in "
            f"{allowed.workspace} bytes of workspace; the last says: {last}"
        )


def load(plan: Plan, place: Any) -> Any:
    """The graph of a plan, ready to be executed with its operands' uids.

    ``place`` is the handle of a device, or a :class:`Target`: then the plan cannot be executed, and the front end
    must be 1.28 or newer.
    """
    if isinstance(place, Target):
        graph = library().pygraph(device_property=place.device, sm_version=place.capability)
        graph.deserialize(list(plan.data))
    else:
        graph = library().pygraph(handle=place)
        graph.deserialize(place, list(plan.data))
    return graph


# Devices.

#: Plans of all devices of this process.
PLANS: Final = PlanCache()


class Handle:
    """A ``cudnnHandle_t`` on one stream, for one thread; destroyed with the object.

    Attributes:
        opaque: what the front end takes; nothing is done with it but passing it on.
    """

    def __init__(self, backend: Any, stream: Any) -> None:
        lib = library()
        backend.activate()
        self._destroy = lib.destroy_handle
        self.opaque = lib.create_handle()
        lib.set_stream(handle=self.opaque, stream=stream.pointer)

    def __del__(self) -> None:
        if hasattr(self, "opaque"):
            self._destroy(self.opaque)


class Loaded:
    """A plan that is loaded on a device."""

    def __init__(self, plan: Plan, handle: Handle) -> None:
        self.plan = plan
        self.graph = load(plan, handle.opaque)
        # The front end fills one array of pointers for a graph.
        self.lock = threading.Lock()

    def execute(self, operands: dict[int, int], workspace: int, handle: Handle) -> None:
        """Puts the work on the stream of the handle; ``operands`` are addresses by uid."""
        with self.lock:
            self.graph.execute(operands, workspace, handle=handle.opaque)


class _Handles(threading.local):
    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[Stream, Handle] = weakref.WeakKeyDictionary()


class CudnnDevice:
    """What cuDNN has of one device: its description, handles by thread and stream, loaded plans."""

    def __init__(self, backend: Any) -> None:
        self._backend = weakref.ref(backend)
        self._handles = _Handles()
        self._loaded: weakref.WeakValueDictionary[str, Loaded] = weakref.WeakValueDictionary()
        backend.activate()
        self.target = Target(str(library().create_device_properties(backend.device.index).serialize()))

    def handle(self, stream: Stream) -> Handle:
        """The handle of this thread for a stream."""
        found = self._handles.of.get(stream)
        if found is None:
            found = self._handles.of[stream] = Handle(self._backend(), stream)
        return found

    def load(self, plan: Plan, stream: Stream) -> Loaded:
        """A plan, loaded once for all who use it at a time."""
        found = self._loaded.get(plan.key)
        if found is None or found.plan != plan:
            found = self._loaded[plan.key] = Loaded(plan, self.handle(stream))
        return found

    def plan(self, descriptor: Descriptor, allowed: Settings) -> Plan:
        """A new plan of a graph: the fastest of those timed; raises :class:`NoPlan`."""
        backend: Any = self._backend()
        handle = self.handle(backend.stream)
        found: list[Plan] = []
        for candidate in candidates(self.target, descriptor, allowed, handle.opaque):
            found.append(candidate)
            if len(found) >= allowed.tune:
                break
        return found[0] if len(found) == 1 else self._fastest(found, descriptor)

    def _fastest(self, plans: list[Plan], descriptor: Descriptor) -> Plan:
        """Times plans on memory of its own that holds zeros."""
        backend: Any = self._backend()
        stream, operands = backend.stream, descriptor.operands()
        try:
            memory = {
                name: Buffer.empty(backend, spec((operand.nbytes,), np.uint8), name)
                for name, operand in operands.items()
                if not operand.value
            }
            scratch = Buffer.empty(backend, spec((max(p.workspace for p in plans),), np.uint8), "workspace")
        except DeviceError:
            return plans[0]  # no memory to time them with
        for buffer in memory.values():
            backend.fill(buffer, 0, stream)
        numbers = _numbers(descriptor, dict.fromkeys(operands, 0.5))
        addresses = _addresses(descriptor, memory, numbers)
        launches = [self._trial(plan, addresses, scratch.pointer, stream) for plan in plans]
        taken = cudnn_cache.times(backend.cuda.runtime, stream.pointer, launches)
        stream.synchronize()
        return min(zip(plans, taken, strict=True), key=lambda pair: math.inf if pair[1] is None else pair[1])[0]

    def _trial(self, plan: Plan, addresses: dict[int, int], scratch: int, stream: Stream) -> Launch:
        handle = self.handle(stream)
        made: list[Loaded] = []

        def launch() -> None:
            if not made:
                made.append(Loaded(plan, handle))
            made[0].execute(addresses, scratch, handle)

        return launch


_devices: weakref.WeakKeyDictionary[Backend, CudnnDevice] = weakref.WeakKeyDictionary()


def device(backend: Backend) -> CudnnDevice:
    """What cuDNN has of a device; raises :class:`NoPlan` where it cannot be called."""
    found = _devices.get(backend)
    if found is None:
        reason = reason_against(backend)
        if reason is not None:
            raise NoPlan(reason)
        try:
            found = _devices[backend] = CudnnDevice(backend)
        except RuntimeError as error:
            raise NoPlan(f"cuDNN cannot use {backend.device}: {_message(error)}") from error
    return found


def find(backend: Backend, descriptor: Descriptor, allowed: Settings | None = None) -> Plan:
    """The plan of a graph on a device: kept from before, or made and timed now.

    Raises :class:`NoPlan` if there is none that is allowed (by default: that the environment allows).
    """
    known, allowed = device(backend), allowed or settings()
    key = plan_key(known.target.properties, descriptor, allowed, versions())
    return PLANS.find(key, functools.partial(known.plan, descriptor, allowed))


def workspace(*descriptors: Descriptor) -> TensorSpec:
    """Scratch for plans that run one after another, on any device that is in use."""
    most = 0
    for backend in opened():
        if reason_against(backend) is not None:
            continue
        for descriptor in descriptors:
            try:
                most = max(most, find(backend, descriptor).workspace)
            except NoPlan:
                continue
    return spec((most,), np.uint8)


# Execution.


def _numbers(descriptor: Descriptor, given: Mapping[str, float]) -> dict[str, Any]:
    """Numbers that are passed from the host, in memory that cuDNN reads."""
    return {n: ctypes.c_float(given[n]) for n, o in descriptor.operands().items() if o.value}


def _addresses(
    descriptor: Descriptor, buffers: Mapping[str, Buffer], numbers: Mapping[str, Any]
) -> dict[int, int]:
    """Addresses of the operands by uid, as plain integers."""
    return {
        uid: ctypes.addressof(numbers[name]) if operand.value else int(buffers[name].pointer)
        for uid, (name, operand) in enumerate(descriptor.operands().items(), 1)
    }


def prepare(
    ctx: KernelContext,
    descriptor: Descriptor,
    buffers: Mapping[str, Buffer],
    scratch: Buffer | None,
    numbers: Mapping[str, float] | None = None,
) -> Launch:
    """The launch of a graph, ready to be repeated and to be captured.

    Args:
        ctx: the context of the operator, with the device and the stream.
        descriptor: the graph.
        buffers: its operands by name.
        scratch: the workspace that :func:`workspace` asked for.
        numbers: its operands that are numbers of the host.

    Raises:
        NoPlan: cuDNN cannot run it, or an operand does not begin at a multiple of 16 bytes.
        KernelError: an operand or the workspace is missing or of another size.
    """
    backend, stream = ctx.backend, ctx.stream
    plan = find(backend, descriptor)
    for name, operand in descriptor.operands().items():
        if operand.value:
            if name not in (numbers or {}):
                raise KernelError(f"{descriptor}: the number {name!r} is missing")
            continue
        buffer = buffers.get(name)
        if buffer is None or buffer.nbytes != operand.nbytes:
            found = "missing" if buffer is None else f"{buffer.nbytes} bytes"
            raise KernelError(f"{descriptor}: operand {name!r} is {found}, wanted {operand.nbytes} bytes")
        if buffer.pointer % ALIGNMENT:
            raise NoPlan(f"{descriptor}: operand {name!r} does not begin at a multiple of {ALIGNMENT} bytes")
    given = 0 if scratch is None else scratch.nbytes
    if plan.workspace > given:
        raise KernelError(f"{descriptor}: the workspace has {given} bytes, wanted {plan.workspace}")
    here = device(backend)
    loaded = here.load(plan, stream)
    values = _numbers(descriptor, numbers or {})
    addresses = _addresses(descriptor, buffers, values)
    at = 0 if scratch is None else int(scratch.pointer)
    kept = (*buffers.values(), *(() if scratch is None else (scratch,)))
    for buffer in kept:
        buffer.memory.used_on(stream)

    # The default keeps what the addresses point to.
    def launch(_keep: Any = (kept, values)) -> None:
        backend.activate()
        try:
            loaded.execute(addresses, at, here.handle(stream))
        except Exception as error:
            raise KernelError(
                f"cuDNN failed on {backend.device} with {descriptor} ({plan.name}): {_message(error)}"
            ) from error

    return launch
