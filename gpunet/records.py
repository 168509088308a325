"""Records of a bound program, for the race checker: every step with its lane, its waits and the bytes it
touches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gpunet.buffers import Buffer
from gpunet.engines import Step
from gpunet.graph import Node, Value
from gpunet.program import Program, StaticSegment
from gpunet.races import Access, Race, Record, find_races
from gpunet.specs import TensorSpec


def records_of(segment: StaticSegment) -> list[Record]:
    """A record for each step of a bound segment, in the order of issue."""
    return [_record(segment.program, step, segment.binding.values) for step in segment.binding.steps]


def check_races(program: Program) -> list[Race]:
    """All unordered conflicts in the segments that a program ran last; an empty list proves that there are
    none.
    """
    return [race for segment in program.segments() for race in find_races(records_of(segment))]


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
