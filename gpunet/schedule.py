"""Schedules: the lane of each node, and what it waits for on other lanes.

A lane is a queue of one device that runs its items in order: a thread on the CPU, a stream on a GPU. Work is
given to lanes when a program is compiled, from estimated costs, and never changes from run to run, so that
the order of everything is deterministic, and that memory can be planned, and races can be excluded, before
anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from gpunet.devices import CPU, Device
from gpunet.graph import Node
from gpunet.specs import TensorSpec

#: Rough speeds for the estimate: seconds for each floating-point operation, for each byte moved, for each
#: operator, and for each wait on another lane. Only their ratios matter.
_SECONDS_PER_FLOP: Final = 1 / 20e9
_SECONDS_PER_BYTE: Final = 1 / 5e9
_SECONDS_PER_OPERATOR: Final = 3e-6
_SECONDS_PER_WAIT: Final = 20e-6


@dataclass(frozen=True)
class Lane:
    """One queue of a device."""

    device: Device
    number: int = 0

    def __str__(self) -> str:
        return f"{self.device} lane {self.number}"


@dataclass(frozen=True)
class Item:
    """One node in its lane; ``waits`` are positions of items in other lanes that must have run before it."""

    node: Node
    lane: Lane
    waits: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """Items in an order in which they may be issued one after another.

    Attributes:
        items: one for each node.
        lanes: the lanes that have any item, in the order of their first.
        clocks: for each item and lane, the position of the last item of that lane that has run when the item
            has run; -1 for none. Since a lane runs in order, this says all that happens before the item.
    """

    items: tuple[Item, ...]
    lanes: tuple[Lane, ...]
    clocks: npt.NDArray[np.int64]

    def ordered(self, first: int, second: int) -> bool:
        """Whether item ``first`` has run whenever item ``second`` runs."""
        return bool(self.clocks[second, self.lanes.index(self.items[first].lane)] >= first)


def seconds(node: Node) -> float:
    """A rough estimate of how long a node takes."""
    specs = [v.spec for v in [*node.inputs, *node.outputs]]
    moved = sum(s.nbytes for s in specs if isinstance(s, TensorSpec))
    flops = (
        0 if node.op is None else node.op.flops([v.spec for v in node.inputs], [v.spec for v in node.outputs])
    )
    return _SECONDS_PER_OPERATOR + flops * _SECONDS_PER_FLOP + moved * _SECONDS_PER_BYTE


def schedule(nodes: Sequence[Node], needed: Sequence[set[int]], lanes: dict[str, int]) -> Schedule:
    """Gives each node the lane on which it can start first, in the order of ``nodes``.

    Args:
        nodes: in an order that satisfies ``needed``.
        needed: for each node, the earlier ones that it must run after (:func:`gpunet.storage.dependencies`).
        lanes: number of lanes of each device kind; 1 where it is not named.
    """
    free: dict[Lane, float] = {}
    finish: list[float] = []
    chosen: list[Lane] = []
    for index, node in enumerate(nodes):
        device = CPU if is_host_work(node) else node.device
        count = max(1, lanes.get(device.kind, 1))
        options = [Lane(device, n) for n in range(count)]
        if lanes and node.op is not None and node.op.schema.chain:
            # A chain has a lane of its own, so that it runs beside everything else.
            options = [Lane(device, count)]

        def start(lane: Lane, needed: set[int] = needed[index]) -> float:
            arrivals = (finish[d] + (_SECONDS_PER_WAIT if chosen[d] != lane else 0.0) for d in needed)
            return max(free.get(lane, 0.0), max(arrivals, default=0.0))

        lane = min(options, key=lambda option: (start(option), option.number))
        begin = start(lane)
        finish.append(begin + seconds(node))
        free[lane] = finish[-1]
        chosen.append(lane)
    return order(nodes, chosen, needed)


def order(nodes: Sequence[Node], lanes: Sequence[Lane], needed: Sequence[set[int]]) -> Schedule:
    """The schedule for chosen lanes: waits only where nothing else orders two items already."""
    numbers = {lane: number for number, lane in enumerate(dict.fromkeys(lanes))}
    last: dict[Lane, int] = {}
    clocks: list[list[int]] = []
    items = []
    for index, (node, lane) in enumerate(zip(nodes, lanes, strict=True)):
        known = list(clocks[last[lane]]) if lane in last else [-1] * len(numbers)
        waits = []
        # Latest first: what it waits for has often waited for the others.
        for dependency in sorted(needed[index], reverse=True):
            if known[numbers[lanes[dependency]]] < dependency:
                waits.append(dependency)
                known = [max(pair) for pair in zip(known, clocks[dependency], strict=True)]
        items.append(Item(node, lane, tuple(sorted(waits))))
        known[numbers[lane]] = index
        clocks.append(known)
        last[lane] = index
    table = np.array(clocks, dtype=np.int64).reshape(len(items), len(numbers))
    return Schedule(tuple(items), tuple(numbers), table)


def is_host_work(node: Node) -> bool:
    """Whether the host does it: operators on the CPU, and copies to the host, which wait for their bytes."""
    return node.device == CPU
