"""What ran on a simulated device, as the race checker sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpunet.cuda_kernels.sim.streams import Range, Record
from gpunet.races import Access
from gpunet.races import Record as RaceRecord


def as_records(work: Sequence[Record], space: str) -> list[RaceRecord]:
    """A record for the race checker for each of ``work``, in the order in which it ran.

    A stream is a lane; events, and what the host had waited for, are waits. Whatever else came one after the
    other in this run may come the other way round in the next one.

    Args:
        work: from :meth:`SimBackend.record_work`.
        space: the device's name.
    """
    return [
        RaceRecord(
            f"stream {each.stream}",
            each.name or each.kind,
            each.waits,
            (*_accesses(each.reads, space, write=False), *_accesses(each.writes, space, write=True)),
        )
        for each in work
    ]


def _accesses(ranges: Iterable[Range], space: str, *, write: bool) -> Iterator[Access]:
    for each in ranges:
        yield Access(space, each.start, each.stop, write, each.name, each.communal)
