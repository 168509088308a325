"""The race checker: a proof that every two accesses to the same bytes are ordered, or the list of those that
are not.

It knows nothing of nets: it takes records of what ran (or will run), in which lane, after which waits, on
which bytes, and follows only the two things that order work: the order of a lane, and waits. So it checks
schedules, memory plans and engines alike, and recordings of the simulated device.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
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

    Where nothing races it takes time in proportion to the accesses (and lanes): every access is compared with
    the last ones to its bytes only, since what was ordered before these is ordered before it too. Pairs are
    listed by comparing it with all that are not ordered before it, on the bytes where that has found one.

    Raises ValueError for a wait on a record that is not listed before.
    """
    clocks = _clocks(records)
    memories: dict[Hashable, _Memory] = {}
    for index, record in enumerate(records):
        for access in record.accesses:
            if access.start < access.stop:
                memory = memories.setdefault(access.space, _Memory())
                memory.add(access, index, record.lane, clocks[index])
    races: list[Race] = []
    for space in sorted((space for space in memories if memories[space].racy), key=str):
        races += _pairs(records, clocks, space, memories[space].racy_ranges())
    return races


#: Whose access it was: the lane, whether it wrote, and whether it was communal.
_Who = tuple[Hashable, bool, bool]


class _Memory:
    """The last accesses to each byte of a memory.

    Bytes with the same history are one range: from its start in ``_starts`` to the next one.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._last: list[dict[_Who, int]] = []
        #: Ranges of bytes to which accesses are not ordered.
        self.racy: set[tuple[int, int]] = set()

    def add(self, access: Access, index: int, lane: Hashable, clock: dict[Hashable, int]) -> None:
        """Notes an access of record ``index``, before which the records in ``clock`` have ended."""
        first, end = self._cut(access.start), self._cut(access.stop)
        who = (lane, access.write, access.communal)
        for position in range(first, end):
            last = self._last[position]
            for (other, wrote, communal), at in last.items():
                harmless = not (access.write or wrote) or (access.communal and communal)
                if not harmless and at != index and clock.get(other, -1) < at:
                    self.racy.add((self._starts[position], self._starts[position + 1]))
                    break
            last[who] = index
        if access.write and not access.communal:
            # What comes later is compared with this one: it stands for all before. Communal accesses, which
            # nothing orders among themselves, stand for themselves only.
            self._starts[first:end] = [access.start]
            self._last[first:end] = [{who: index}]

    def racy_ranges(self) -> list[tuple[int, int]]:
        """The ranges of ``racy``, joined where they meet, in order."""
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(self.racy):
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
            else:
                joined.append((start, stop))
        return joined

    def _cut(self, at: int) -> int:
        """The position of the range that starts at an address; it is made if need be."""
        position = bisect_left(self._starts, at)
        if position == len(self._starts) or self._starts[position] != at:
            self._starts.insert(position, at)
            self._last.insert(position, dict(self._last[position - 1]) if position else {})
        return position


def _pairs(
    records: Sequence[Record],
    clocks: Sequence[dict[Hashable, int]],
    space: Hashable,
    ranges: Sequence[tuple[int, int]],
) -> list[Race]:
    """The unordered pairs that conflict on these bytes: sorted ranges that do not meet."""
    starts = [start for start, _ in ranges]

    def touches(access: Access) -> bool:
        before = bisect_right(starts, access.stop - 1) - 1
        return before >= 0 and ranges[before][1] > access.start

    accesses = [
        (index, access)
        for index, record in enumerate(records)
        for access in record.accesses
        if access.space == space and access.start < access.stop and touches(access)
    ]
    bounds = sorted({bound for _, access in accesses for bound in (access.start, access.stop)})
    #: For each range from one bound to the next, all accesses so far.
    history: list[dict[_Who, list[tuple[int, Access]]]] = [{} for _ in bounds]
    races: dict[tuple[int, int, str, str], Race] = {}
    for index, access in accesses:
        clock, lane = clocks[index], records[index].lane
        for position in range(bisect_left(bounds, access.start), bisect_left(bounds, access.stop)):
            for (other, wrote, communal), earlier in history[position].items():
                if not (access.write or wrote) or (access.communal and communal):
                    continue
                # Of one lane: what is ordered before this access comes first.
                for at, before in reversed(earlier):
                    if at <= clock.get(other, -1):
                        break
                    if at != index:
                        race = Race(records[at], records[index], before, access)
                        races.setdefault((at, index, before.name, access.name), race)
            who = (lane, access.write, access.communal)
            history[position].setdefault(who, []).append((index, access))
    return [races[key] for key in sorted(races)]


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
