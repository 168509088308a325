"""Which cores a rank runs on, where there are few.

A rank computes on one thread and communicates on another. Where a host has fewer cores than that, the system
may put one rank on a core alone and three on another; the quick ones then wait for the slow ones at the end
of the backward pass, where nothing hides it. Evenly bound ranks come at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Set as AbstractSet
from typing import Final

from gpunet.cores import is_bound, usable_cores
from gpunet.discovery import Place

#: Set to 0, ranks stay where the system puts them.
VARIABLE: Final = "GPUNET_BIND"


def chosen_core(place: Place, usable: AbstractSet[int]) -> int | None:
    """The core for a rank, of those that it may use; ``None`` where ranks are better left to the system.

    That is where each has two cores, and where some cores would get more ranks than others.
    """
    ranks = place.local_size
    if ranks < 2 or ranks % len(usable):
        return None
    return sorted(usable)[place.local_rank % len(usable)]


def bind(place: Place) -> AbstractSet[int] | None:
    """Keeps the calling thread, and those that it starts, on the core of its rank.

    Call it before there are other threads. Returns the cores that it could use before; ``None`` where nothing
    was changed, as where the launcher has bound it already.
    """
    if os.environ.get(VARIABLE) == "0" or not hasattr(os, "sched_setaffinity") or is_bound():
        return None
    before = usable_cores()
    core = chosen_core(place, before)
    if core is None:
        return None
    os.sched_setaffinity(0, {core})
    return before


def release(before: AbstractSet[int]) -> None:
    """Undoes :func:`bind`."""
    os.sched_setaffinity(0, before)
