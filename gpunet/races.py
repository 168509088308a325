"""The race checker: a proof that every two accesses to the same bytes are ordered, or the list of those that
are not.

It knows nothing of nets: it takes records of what ran (or will run), in which lane, after which waits, on
which bytes, and follows only the two things that order work: the order of a lane, and waits. So it checks
schedules, memory plans and engines alike, and recordings of the simulated device.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Access:
    """Bytes ``start`` (included) to ``stop`` (excluded) of one memory.

    Attributes:
        space: the memory; addresses of different spaces never meet.
        start, stop: addresses or offsets.
        write: whether they are written.
        name: the blob, for messages.
        communal: memory that is made for being touched in any order, by atomic operations. Two communal
            accesses never conflict.
    """

    space: Hashable
    start: int
    stop: int
    write: bool
    name: str = ""
    communal: bool = False


@dataclass(frozen=True)
class Record:
    """One piece of work.

    Attributes:
        lane: its queue; records of one lane run in the order in which they are listed.
        label: the operator, for messages.
        waits: positions of records that have ended before this one begins.
        accesses: what it reads and writes.
    """

    lane: Hashable
    label: str
    waits: tuple[int, ...]
    accesses: tuple[Access, ...]


@dataclass(frozen=True)
class Race:
    """Two pieces of work that nothing orders, of which at least one writes what the other touches."""

    first: Record
    second: Record
    first_access: Access
    second_access: Access

    def __str__(self) -> str:
        def side(record: Record, access: Access) -> str:
            verb = "writes" if access.write else "reads"
            return f"{record.label} ({record.lane}) {verb} {access.name or 'memory'!r}"

        start = max(self.first_access.start, self.second_access.start)
        stop = min(self.first_access.stop, self.second_access.stop)
        sides = f"{side(self.first, self.first_access)} and {side(self.second, self.second_access)}"
        return f"{sides}: bytes {start} to {stop} of {self.first_access.space} are touched in no fixed order"


def find_races(records: Sequence[Record]) -> list[Race]:
    """All pairs of records that conflict and are not ordered; an empty list is a proof that there are none.

    Raises ValueError for a wait on a record that is not listed before.
    """
    clocks = _clocks(records)
    accesses = sorted(
        (
            (a.space, a.start, a.stop, index, a)
            for index, record in enumerate(records)
            for a in record.accesses
            if a.start < a.stop
        ),
        key=lambda entry: (str(entry[0]), entry[1]),
    )
    races = []
    seen: set[tuple[int, int, str, str]] = set()
    active: list[tuple[Hashable, int, int, int, Access]] = []
    for entry in accesses:
        space, start, _, index, access = entry
        active = [other for other in active if other[0] == space and other[2] > start]
        for other in active:
            if not (access.write or other[4].write) or other[3] == index:
                continue
            if access.communal and other[4].communal:
                continue
            low, high = sorted((index, other[3]))
            pair = (access, other[4]) if index == low else (other[4], access)
            key = (low, high, pair[0].name, pair[1].name)
            if key not in seen and clocks[high].get(records[low].lane, -1) < low:
                seen.add(key)
                races.append(Race(records[low], records[high], *pair))
        active.append(entry)
    return races


def _clocks(records: Sequence[Record]) -> list[dict[Hashable, int]]:
    """For each record, the last record of each lane that has ended when it begins: since a lane runs in
    order, all that is known.
    """
    last: dict[Hashable, int] = {}
    result: list[dict[Hashable, int]] = []
    for index, record in enumerate(records):
        known: dict[Hashable, int] = {}
        for earlier in _predecessors(record, last.get(record.lane)):
            if not 0 <= earlier < index:
                raise ValueError(
                    f"record {index} ({record.label}) waits for record {earlier}, wanted an earlier one"
                )
            for lane, position in (*result[earlier].items(), (records[earlier].lane, earlier)):
                known[lane] = max(position, known.get(lane, -1))
        result.append(known)
        last[record.lane] = index
    return result


def _predecessors(record: Record, previous: int | None) -> Iterable[int]:
    return record.waits if previous is None else (*record.waits, previous)
