"""Memory planning: places in one arena a device for the values that nothing outside a net sees.

Two values may lie in the same bytes if, in the schedule's order, everything that touches one has run before
the other is first written. Places are given greedily, the largest first, each at the lowest offset that
collides with nothing (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from gpunet.devices import Device
from gpunet.graph import Value
from gpunet.schedule import Lane, Schedule
from gpunet.storage import Storage

#: Offsets are multiples of this: what vector loads and cuDNN want.
ALIGNMENT: Final = 256


@dataclass
class MemoryPlan:
    """Where internal storages lie.

    Attributes:
        offsets: bytes from the start of the device's arena.
        arenas: bytes of each device's arena.
        lower_bound: for each device, the largest sum of internal storages that are live at once, in the order
            of issue: no plan can need less.
        unplanned: for each device, the sum of all internal storages: what is needed without a plan.
    """

    offsets: dict[Storage, int] = field(default_factory=dict)
    arenas: dict[Device, int] = field(default_factory=dict)
    lower_bound: dict[Device, int] = field(default_factory=dict)
    unplanned: dict[Device, int] = field(default_factory=dict)


@dataclass(eq=False)
class _Life:
    """When a storage is in use: positions of the items that touch it first and last, and last in each
    lane; of those that may be the first, where parts of it are written apart from each other.
    """

    storage: Storage
    size: int
    first: int
    last: int
    ends: list[int]
    begins: list[int]


def plan(schedule: Schedule, places: dict[Value, Storage], *, share: bool = True) -> MemoryPlan:
    """Places all internal storages that the schedule's items touch; one behind the other where they may not
    ``share``.
    """
    lives: dict[Storage, _Life] = {}
    numbers = {lane: number for number, lane in enumerate(schedule.lanes)}
    for index, item in enumerate(schedule.items):
        for value in (*item.node.inputs, *item.node.outputs):
            storage = places[value]
            if storage.internal:
                life = lives.get(storage)
                if life is None:
                    size = -(-storage.nbytes // ALIGNMENT) * ALIGNMENT
                    life = lives[storage] = _Life(storage, size, index, index, [-1] * len(numbers), [index])
                elif storage.starts:
                    life.begins.append(index)
                life.last = life.ends[numbers[item.lane]] = index
    result = MemoryPlan()
    for device in dict.fromkeys(life.storage.device for life in lives.values()):
        chosen = [life for life in lives.values() if life.storage.device == device]
        result.unplanned[device] = sum(life.size for life in chosen)
        result.lower_bound[device] = _peak(chosen, len(schedule.items))
        if share:
            result.arenas[device] = _place(schedule, chosen, result.offsets)
        else:
            result.arenas[device] = _stack(chosen, result.offsets)
    return result


def _stack(lives: Sequence[_Life], offsets: dict[Storage, int]) -> int:
    size = 0
    for life in lives:
        offsets[life.storage] = size
        size += life.size
    return size


def _place(schedule: Schedule, lives: Sequence[_Life], offsets: dict[Storage, int]) -> int:
    """Fills in ``offsets`` and returns the size of the arena."""
    chosen = sorted(lives, key=lambda life: (-life.size, life.first))
    ends = np.array([life.ends for life in chosen]).reshape(len(chosen), len(schedule.lanes))
    # What has run when the first item of each life begins, whichever that is: everything before it in its own
    # lane, and what that knows.
    clocks = _clocks_before(schedule, [index for life in chosen for index in life.begins])
    firsts = np.cumsum([0, *(len(life.begins) for life in chosen[:-1])])
    starts = np.minimum.reduceat(clocks, firsts, axis=0)
    places = np.zeros((len(chosen), 2), dtype=np.int64)
    size = 0
    for number, life in enumerate(chosen):
        earlier = (ends[:number] <= starts[number]).all(axis=1)
        later = (ends[number] <= starts[:number]).all(axis=1)
        offset = _first_gap(places[:number][~(earlier | later)], life.size)
        offsets[life.storage] = offset
        places[number] = offset, offset + life.size
        size = max(size, offset + life.size)
    return size


def _first_gap(blocked: npt.NDArray[np.int64], size: int) -> int:
    """The lowest offset at which ``size`` bytes meet none of the blocked ranges (start, stop)."""
    if not len(blocked):
        return 0
    blocked = blocked[np.argsort(blocked[:, 0], kind="stable")]
    # Free from here on, as far as the ranges before go; behind the last one there is room in any case.
    free = np.concatenate(([0], np.maximum.accumulate(blocked[:, 1])))
    fits = np.append(blocked[:, 0] >= free[:-1] + size, True)
    return int(free[np.argmax(fits)])


def _clocks_before(schedule: Schedule, positions: Sequence[int]) -> npt.NDArray[np.int64]:
    """For each item, and each lane, the last item that has run when it begins."""
    table = schedule.clocks[list(positions)].copy()
    previous: dict[Lane, int] = {}
    before = []
    for index, item in enumerate(schedule.items):
        before.append(previous.get(item.lane, -1))
        previous[item.lane] = index
    for row, position in enumerate(positions):
        table[row, schedule.lanes.index(schedule.items[position].lane)] = before[position]
    return table


def _peak(lives: Sequence[_Life], count: int) -> int:
    change = [0] * (count + 1)
    for life in lives:
        change[life.first] += life.size
        change[life.last + 1] -= life.size
    live = peak = 0
    for step in change:
        live += step
        peak = max(peak, live)
    return peak
