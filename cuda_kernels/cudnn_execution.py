"""Graphs of cuDNN on the devices of this process: plans found or made, loaded, and prepared as launches."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from gpunet.backends import Backend, Stream, opened
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import cudnn_cache
from gpunet.cuda_kernels.cudnn import (
    Handle,
    Loaded,
    NoPlanError,
    Target,
    candidates,
    message,
    reason_against,
    settings,
    versions,
)
from gpunet.cuda_kernels.cudnn_cache import Plan, PlanCache, plan_key
from gpunet.cuda_kernels.cudnn_graphs import ALIGNMENT, Descriptor, Settings
from gpunet.errors import DeviceError, KernelError
from gpunet.kernels import KernelContext, scratch_device
from gpunet.specs import TensorSpec, spec

Launch = Callable[[], None]
log = logging.getLogger("gpunet")

#: Plans of all devices of this process.
PLANS: Final = PlanCache()


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
        self.target = Target.of(backend.device.index)

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
        """A new plan of a graph: the fastest of those timed; raises :class:`NoPlanError`."""
        backend: Any = self._backend()
        try:
            handle = self.handle(backend.stream)
        except RuntimeError as error:
            raise NoPlanError(f"cuDNN cannot use {backend.device}: {message(error)}") from error
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
        order = [math.inf if time is None else time for time in taken]
        return plans[order.index(min(order))]

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
    """What cuDNN has of a device; raises :class:`NoPlanError` where it cannot be called."""
    found = _devices.get(backend)
    if found is None:
        reason = reason_against(backend)
        if reason is not None:
            raise NoPlanError(reason)
        try:
            found = _devices[backend] = CudnnDevice(backend)
        except RuntimeError as error:
            raise NoPlanError(f"cuDNN cannot use {backend.device}: {message(error)}") from error
    return found


def find(backend: Backend, descriptor: Descriptor, allowed: Settings | None = None) -> Plan:
    """The plan of a graph on a device: kept from before, or made and timed now.

    Raises :class:`NoPlanError` if there is none that is allowed (by default: that the environment allows).
    """
    known, allowed = device(backend), allowed or settings()
    key = plan_key(known.target.properties, descriptor, allowed, versions())
    return PLANS.find(key, functools.partial(known.plan, descriptor, allowed))


def workspace(*descriptors: Descriptor) -> TensorSpec:
    """Scratch for plans that run one after another, on the device that it is asked for.

    Where that is not known, it is enough for each device that is in use.
    """
    most, wanted = 0, scratch_device()
    for backend in opened():
        if (wanted is not None and backend.device != wanted) or reason_against(backend) is not None:
            continue
        for descriptor in descriptors:
            try:
                most = max(most, find(backend, descriptor).workspace)
            except NoPlanError:
                continue
    return spec((most,), np.uint8)


_told: set[tuple[str, str]] = set()


def tell(ctx: KernelContext, error: NoPlanError, instead: str) -> None:
    """Says once for each operator type and device that cuDNN is not used, why, and what is."""
    key = (ctx.op.type, str(ctx.backend.device))
    if key not in _told:
        _told.add(key)
        log.warning(f"{ctx.op.where} runs on {ctx.backend.device} with {instead}: {error}")


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
    allowed: Settings | None = None,
) -> Launch:
    """The launch of a graph, ready to be repeated and to be captured.

    Args:
        ctx: the context of the operator, with the device and the stream.
        descriptor: the graph.
        buffers: its operands by name.
        scratch: the workspace that :func:`workspace` asked for.
        numbers: its operands that are numbers of the host.
        allowed: what its plan may do; by default what the environment allows.

    Raises:
        NoPlanError: cuDNN cannot run it in this workspace, or an operand does not begin at a multiple of 16
            bytes.
        KernelError: an operand is missing or of another size.
    """
    backend, stream = ctx.backend, ctx.stream
    given = 0 if scratch is None else scratch.nbytes
    allowed = allowed or settings()
    plan = find(backend, descriptor, allowed)
    if plan.workspace > given:
        # Another one than when the scratch was asked for: plans are timed, and may have been forgotten since.
        plan = find(backend, descriptor, dataclasses.replace(allowed, workspace=given))
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
            raise NoPlanError(
                f"{descriptor}: operand {name!r} does not begin at a multiple of {ALIGNMENT} bytes"
            )
    here = device(backend)
    try:
        loaded = here.load(plan, stream)
    except Exception as error:  # whatever is wrong with a plan from disk, there is another way
        raise NoPlanError(f"{descriptor}: plan {plan.name} cannot be loaded: {message(error)}") from error
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
                f"cuDNN failed on {backend.device} with {descriptor} ({plan.name}): {message(error)}"
            ) from error

    return launch
