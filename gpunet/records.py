"""Records for the race checker: of a bound program, every step with its lane, its waits and the bytes it
touches; and of what really ran on a simulated device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gpunet.backends import backend
from gpunet.buffers import Buffer
from gpunet.engines import Step
from gpunet.errors import DeviceError
from gpunet.graph import Node, Value
from gpunet.program import Program, StaticSegment
from gpunet.races import Access, Race, Record, find_races
from gpunet.specs import TensorSpec
from gpunet.workspace import Workspace


def records_of(segment: StaticSegment) -> list[Record]:
    """A record for each step of a bound segment, in the order of issue."""
    return [_record(segment.program, step, segment.binding.values) for step in segment.binding.steps]


def check_races(program: Program) -> list[Race]:
    """All unordered conflicts in the segments that a program ran last; an empty list proves that there are
    none.
    """
    return [race for segment in program.segments() for race in find_races(records_of(segment))]


def record_run(workspace: Workspace, name: str, runs: int = 3) -> list[Record]:
    """Runs a net that the workspace has, and returns what ran on its device, a simulated one: launches and
    copies with the events that they waited for and the bytes that they read and wrote.

    What the schedule, the memory plan, the engine and the kernels' launchers do is all in it; what operators
    on the CPU do is not. Several runs show conflicts between one run and the next.

    Raises:
        DeviceError: the workspace's device is not a simulated one.
    """
    device = workspace.device
    if device.kind != "sim":
        raise DeviceError(f"what runs on {device} cannot be recorded, wanted a simulated device, sim:0")
    from gpunet.cuda_kernels.sim.recording import as_records
    from gpunet.cuda_kernels.sim_backend import SimBackend

    found = backend(device)
    if not isinstance(found, SimBackend):
        raise DeviceError(
            f"the backend of {device} is a {type(found).__name__}, wanted the simulated device's"
        )
    found.synchronize()
    work = found.record_work()
    try:
        workspace.run(name, runs)
        found.synchronize()
    finally:
        found.record_work(on=False)
    return as_records(work, str(device))


def _record(program: Program, step: Step, values: dict[Value, Any]) -> Record:
    node = step.node
    accesses = [*_accesses(node.inputs, values, write=False), *_accesses(node.outputs, values, write=True)]
    accesses.extend(_scratch(program, node))
    return Record(step.lane, node.where, step.waits, tuple(accesses))


def _accesses(members: Sequence[Value], values: dict[Value, Any], *, write: bool) -> Iterator[Access]:
    for value in members:
        if isinstance(value.spec, TensorSpec) and not value.spec.dtype.hasobject:
            yield _access(values[value], value.name, write=write)


def _scratch(program: Program, node: Node) -> Iterator[Access]:
    if node.op is not None:
        for block in program.context(node.op, node.index).scratch:
            yield _access(block, "scratch", write=True)


def _access(storage: Any, name: str, *, write: bool) -> Access:
    if isinstance(storage, Buffer):
        return Access(
            str(storage.backend.device), storage.pointer, storage.pointer + storage.nbytes, write, name
        )
    low, high = np.lib.array_utils.byte_bounds(storage)
    return Access("cpu", low, high, write, name)
