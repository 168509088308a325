"""Memory planning: places in one arena a device for the values that nothing outside a net sees.

Two values may lie in the same bytes if, in the schedule's order, everything that touches one has run before
the other is first written. Places are given greedily, the largest first, each at the lowest offset that
collides with nothing (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gpunet.devices import Device
from gpunet.graph import Value
from gpunet.schedule import Schedule
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
    """When a storage is in use: the items that touch it, as positions and as a bit set."""

    storage: Storage
    first: int
    touched: list[int]
    size: int
    mask: int = 0


def plan(schedule: Schedule, places: dict[Value, Storage], *, share: bool = True) -> MemoryPlan:
    """Places all internal storages that the schedule's items touch; one behind the other where they may not
    ``share``.
    """
    lives: dict[Storage, _Life] = {}
    for index, item in enumerate(schedule.items):
        for value in (*item.node.inputs, *item.node.outputs):
            storage = places[value]
            if storage.internal:
                size = -(-storage.nbytes // ALIGNMENT) * ALIGNMENT
                life = lives.setdefault(storage, _Life(storage, index, [], size))
                if not life.touched or life.touched[-1] != index:
                    life.touched.append(index)
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
    single = len({item.lane for item in schedule.items}) == 1
    for life in lives:
        for index in life.touched:
            life.mask |= 1 << index
    placed: list[tuple[int, int, _Life]] = []
    size = 0
    for life in sorted(lives, key=lambda item: (-item.size, item.first)):
        offset = 0
        for start, end, other in placed:
            if start < offset + life.size and offset < end and _overlap(schedule, life, other, single):
                offset = end
            # ``placed`` is sorted by start, so a later one cannot leave a gap below the offset.
            elif start >= offset + life.size:
                break
        offsets[life.storage] = offset
        placed.append((offset, offset + life.size, life))
        placed.sort(key=lambda entry: entry[0])
        size = max(size, offset + life.size)
    return size


def _overlap(schedule: Schedule, a: _Life, b: _Life, single: bool) -> bool:
    if single:
        return a.first <= b.touched[-1] and b.first <= a.touched[-1]
    return not (_ends_before(schedule, a, b) or _ends_before(schedule, b, a))


def _ends_before(schedule: Schedule, a: _Life, b: _Life) -> bool:
    """Whether everything that touches ``a`` has run before ``b`` is first written."""
    earlier = schedule.before[b.first] & ~(1 << b.first)
    return a.mask & ~earlier == 0


def _peak(lives: Sequence[_Life], count: int) -> int:
    change = [0] * (count + 1)
    for life in lives:
        change[life.first] += life.size
        change[life.touched[-1] + 1] -= life.size
    live = peak = 0
    for step in change:
        live += step
        peak = max(peak, live)
    return peak
