"""cuDNN through the ``pygraph`` of nvidia-cudnn-frontend: the one module that calls it.

A graph (:mod:`gpunet.cuda_kernels.cudnn_graphs`) is planned once for a device and kept
(:mod:`gpunet.cuda_kernels.cudnn_cache`); a plan is loaded from the bytes that cuDNN makes of it, whether it
was made now or in another process. Planning needs no GPU: a :class:`Target` can come from a description of
one.

Environment: ``GPUNET_TF32`` and ``GPUNET_DETERMINISTIC`` (0 or 1), ``GPUNET_CUDNN_WORKSPACE`` (most MiB of
    scratch a plan may take), ``GPUNET_CUDNN_TUNE`` (how many plans are timed to find the fastest; 1 takes
    cuDNN's first choice).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpunet.backends import Backend
from gpunet.cuda_kernels.cudnn_cache import Plan, plan_key
from gpunet.cuda_kernels.cudnn_graphs import Descriptor, Maker, Settings, data_type
from gpunet.errors import DeviceError

INSTALL: Final = "wanted nvidia-cudnn-frontend and cuDNN: pip install 'gpunet[cuda12]'"
#: The first version whose calls are these.
_OLDEST: Final = (1, 26)
#: Names the CUDA runtime that the front end loads.
_RUNTIME: Final = "CUDNN_FRONTEND_CUDART_LIB_NAME"


class NoPlanError(DeviceError):
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
        wanted = ".".join(map(str, _OLDEST))
        raise DeviceError(f"nvidia-cudnn-frontend is {version}, wanted {wanted} or newer")
    return found


def _choose_runtime() -> None:
    """Makes the front end load the CUDA runtime of CuPy's version, not any newer one that is there."""
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
        text = os.environ.get(name, str(int(value)))
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

    @classmethod
    def of(cls, index: int) -> Target:
        """The GPU with this number; raises what cuDNN raises where there is none."""
        return cls(str(library().create_device_properties(index).serialize()))

    @functools.cached_property
    def device(self) -> Any:
        """The description as an object of cuDNN."""
        return library().create_device_properties(self.properties)


_REASON: Final = re.compile(r"CUDNN_STATUS_(\w+); Reason: ([^\n]+)")
_CALL: Final = re.compile(r"[\w.>-]+\(.*\)$|.*CUDNN_STATUS_NOT_INITIALIZED")


def message(error: Exception) -> str:
    """One reason out of the many lines that cuDNN says: the first that is no call, and, where it can be, not
    that an engine is for other devices.
    """
    reasons = [(status, text.strip()) for status, text in _REASON.findall(str(error))]
    told = [pair for pair in reasons if not _CALL.match(pair[1])]
    told.sort(key=lambda pair: "ARCH_MISMATCH" in pair[0])
    lines = [text for _, text in told] or [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _graph(target: Target, descriptor: Descriptor, allowed: Settings, handle: Any) -> Any:
    """A graph with its plans, the forbidden ones struck out; without a handle, for a device not here."""
    lib = library()
    compute = data_type(lib, descriptor.compute)
    place = {"device_property": target.device} if handle is None else {"handle": handle}
    graph = lib.pygraph(
        name="gpunet",
        io_data_type=data_type(lib, descriptor.dtype),
        intermediate_data_type=compute,
        compute_data_type=compute,
        # Without it the front end asks the CUDA runtime for a device.
        sm_version=target.capability,
        **place,
    )
    try:
        descriptor.build(Maker(lib, graph, descriptor.operands()))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([lib.heur_mode.A, lib.heur_mode.FALLBACK])
        graph.deselect_numeric_notes(
            [getattr(lib.numerical_note, note) for note in allowed.forbidden(descriptor)]
        )
        graph.deselect_workspace_greater_than(allowed.workspace)
        graph.check_support()
    except (lib.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
        raise NoPlanError(f"cuDNN has no plan of {descriptor}: {message(error)}") from error
    return graph


def candidates(
    target: Target, descriptor: Descriptor, allowed: Settings, handle: Any = None
) -> Iterator[Plan]:
    """The plans of a graph that build, in cuDNN's order: its first choice first.

    Raises :class:`NoPlanError` if there are none.
    """
    reason = descriptor.against()
    if reason is not None:
        raise NoPlanError(f"cuDNN has no plan of {descriptor}: {reason}")
    key = plan_key(target.properties, descriptor, allowed, versions())
    graph = _graph(target, descriptor, allowed, handle)
    count, built, last = int(graph.get_execution_plan_count()), 0, ""
    for index in range(count):
        try:
            graph.build_plan_at_index(index)  # refuses those struck out
        except Exception as error:
            last = message(error)
            continue
        # Engines that the front end writes in Python are not in what it serialises.
        if getattr(graph, "selected_engine", None) is not None:
            continue
        built += 1
        data = bytes(graph.serialize())
        yield Plan(key, str(graph.get_plan_name_at_index(index)), int(graph.get_workspace_size()), data)
    if not built:
        forbidden = ", ".join(allowed.forbidden(descriptor))
        raise NoPlanError(
            f"cuDNN has no plan of {descriptor}: of {count} none builds without {forbidden} in "
            f"{allowed.workspace} bytes of workspace; the last says: {last}"
        )


def load(plan: Plan, place: Any) -> Any:
    """The graph of a plan, ready to be executed with its operands' uids.

    ``place`` is the handle of a device, or a :class:`Target`: then the plan cannot be executed, and the
    front end must be 1.28 or newer.
    """
    if isinstance(place, Target):
        graph = library().pygraph(device_property=place.device, sm_version=place.capability)
        graph.deserialize(list(plan.data))
    else:
        graph = library().pygraph(handle=place)
        graph.deserialize(place, list(plan.data))
    return graph


# Execution.


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
        if hasattr(self, "opaque") and not sys.is_finalizing():  # CUDA is torn down with the process
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
