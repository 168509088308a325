"""Which cores a rank runs on, where there are few.

A rank computes on one thread and communicates on another. Where a host has fewer cores than that, the system
may put one rank on a core alone and three on another; the quick ones then wait for the slow ones at the end
of the backward pass, where nothing hides it. Evenly bound ranks come at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Set as AbstractSet
from typing import Final

from gpunet.discovery import Place

#: Set to 0, ranks stay where the system puts them.
VARIABLE: Final = "GPUNET_BIND"


def chosen_core(place: Place, usable: AbstractSet[int], cores: int) -> int | None:
    """The core for a rank; ``None`` where ranks are better left to the system.

    That is where a launcher has bound them already, where each has two cores, and where some cores would get
    more ranks than others.

    Args:
        place: of the rank.
        usable: the cores that the process may use.
        cores: the cores of its host.
    """
    ranks = place.local_size
    if ranks < 2 or len(usable) < cores or ranks % cores:
        return None
    return sorted(usable)[place.local_rank % cores]


def bind(place: Place) -> AbstractSet[int] | None:
    """Keeps the calling thread, and those that it starts, on the core of its rank.

    Call it before there are other threads. Returns the cores that it could use before; ``None`` where nothing
    was changed.
    """
    if os.environ.get(VARIABLE) == "0" or not hasattr(os, "sched_setaffinity"):
        return None
    before = os.sched_getaffinity(0)
    core = chosen_core(place, before, os.cpu_count() or 1)
    if core is None:
        return None
    os.sched_setaffinity(0, {core})
    return before


def release(before: AbstractSet[int]) -> None:
    """Undoes :func:`bind`."""
    os.sched_setaffinity(0, before)
