"""Schedules: the lane of each node, and what it waits for on other lanes.

A lane is a queue of one device that runs its items in order: a thread on the CPU, a stream on a GPU. Work is
given to lanes when a program is compiled, from estimated costs, and never changes from run to run, so that
the order of everything is deterministic, and that memory can be planned, and races can be excluded, before
anything runs.
"""

from __future__ import annotations

from collections import Counter
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
_SECONDS_PER_FLOP: Final = 1 / 90e9
_SECONDS_PER_BYTE: Final = 1 / 10e9
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
    """Gives each node a lane of its device, and keeps the order of ``nodes``.

    Two ways are tried, and the one that is estimated to be done first is taken: each node goes to the lane on
    which it can start first, in the order of ``nodes``; or each chain does, in the order of what is still to
    come behind it, the longest way first (Topcuoglu, Hariri, Wu, Performance-effective and low-complexity
    task scheduling for heterogeneous computing, 2002).

    Args:
        nodes: in an order that satisfies ``needed``.
        needed: for each node, the earlier ones that it must run after (:func:`gpunet.storage.dependencies`).
        lanes: number of lanes of each device kind; 1 where it is not named.
    """
    options = [_options(node, lanes) for node in nodes]
    costs = [seconds(node) for node in nodes]
    chosen, end = _assign(range(len(nodes)), options, costs, needed)
    if any(len(found) > 1 for found in options):
        other = _by_chains(options, costs, needed)
        _, other_end = _assign(range(len(nodes)), [[lane] for lane in other], costs, needed)
        if other_end < end:
            chosen = other
    return order(nodes, chosen, needed)


def _by_chains(
    options: Sequence[Sequence[Lane]], costs: Sequence[float], needed: Sequence[set[int]]
) -> list[Lane]:
    """Lanes for whole chains, the one with the longest way to the end first."""
    numbers = _chains(options, needed)
    count = max(numbers, default=-1) + 1
    chain_options: list[Sequence[Lane]] = [()] * count
    chain_costs = [0.0] * count
    chain_needed: list[set[int]] = [set() for _ in range(count)]
    for index, number in enumerate(numbers):
        chain_options[number] = options[index]
        chain_costs[number] += costs[index]
        chain_needed[number].update(numbers[d] for d in needed[index] if numbers[d] != number)
    ways = _longest_ways(chain_costs, chain_needed)
    sequence = sorted(range(count), key=lambda number: (-ways[number], number))
    lanes, _ = _assign(sequence, chain_options, chain_costs, chain_needed)
    return [lanes[number] for number in numbers]


def _chains(options: Sequence[Sequence[Lane]], needed: Sequence[set[int]]) -> list[int]:
    """The number of the chain of each node: of nodes that need one other alone, which nothing else needs."""
    wanted = Counter(earlier for found in needed for earlier in found)
    numbers: list[int] = []
    count = 0
    for index, found in enumerate(needed):
        (earlier,) = found if len(found) == 1 else (-1,)
        if earlier >= 0 and wanted[earlier] == 1 and options[earlier] == options[index]:
            numbers.append(numbers[earlier])
        else:
            numbers.append(count)
            count += 1
    return numbers


def _options(node: Node, lanes: dict[str, int]) -> list[Lane]:
    """The lanes that may run a node."""
    device = CPU if is_host_work(node) else node.device
    count = max(1, lanes.get(device.kind, 1))
    if lanes and node.op is not None and node.op.schema.chain:
        # A chain has a lane of its own, so that it runs beside everything else.
        return [Lane(device, count)]
    if node.op is None and device != CPU and count > 1:
        return [copy_lane(device, count)]
    return [Lane(device, number) for number in range(count)]


def copy_lane(device: Device, lanes: int, *, out: bool = False) -> Lane:
    """The lane of copies to a GPU with several lanes, or out of it: behind those of kernels and of a chain.

    GPUs have engines for copies, one for each direction: on streams of their own they work beside kernels.
    """
    return Lane(device, lanes + (2 if out else 1))


def _longest_ways(costs: Sequence[float], needed: Sequence[set[int]]) -> list[float]:
    """Seconds of the longest way from each node to the end, itself included."""
    ways = list(costs)
    for index in reversed(range(len(costs))):
        for earlier in needed[index]:
            ways[earlier] = max(ways[earlier], costs[earlier] + ways[index])
    return ways


def _assign(
    sequence: Sequence[int],
    options: Sequence[Sequence[Lane]],
    costs: Sequence[float],
    needed: Sequence[set[int]],
) -> tuple[list[Lane], float]:
    """The lane on which each node can start first, behind those before it in ``sequence``; when all end."""
    free: dict[Lane, float] = {}
    finish = [0.0] * len(sequence)
    chosen: dict[int, Lane] = {}
    for index in sequence:

        def start(lane: Lane, needed: set[int] = needed[index]) -> tuple[float, int, int]:
            """When it can start there; of equal times the one with fewer waits is the better."""
            waits = [chosen[d] != lane for d in needed]
            arrivals = (finish[d] + _SECONDS_PER_WAIT * wait for d, wait in zip(needed, waits, strict=True))
            return max(free.get(lane, 0.0), max(arrivals, default=0.0)), sum(waits), lane.number

        lane = min(options[index], key=start)
        finish[index] = free[lane] = start(lane)[0] + costs[index]
        chosen[index] = lane
    return [chosen[index] for index in range(len(sequence))], max(finish, default=0.0)


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
