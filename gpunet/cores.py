"""Which cores there are, and how many threads of the engines are at work, so that kernels know how many cores
are left to them.

A kernel may use several threads of its own. Beside other lanes that would only make threads wait for each
other: two lanes that are busy on two cores run each kernel in one thread, and the one that is left when the
other waits or is done has both cores. Results do not depend on it, since kernels cut their work in the same
way whatever the number of threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Final


def usable_cores() -> AbstractSet[int]:
    """The cores that the calling thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return frozenset(range(os.cpu_count() or 1))


def is_bound() -> bool:
    """Whether some cores of this host are kept from the calling thread: a launcher, say, has shared them out
    among its ranks.
    """
    return len(usable_cores()) < (os.cpu_count() or 1)


def in_each_fork(function: Callable[[], None]) -> None:
    """Has ``function`` called in the child of each fork: it has none of the other threads of its parent, and
    locks that those held stay locked.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


class BusyLanes:
    """Counts the threads that are at work."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begins with no threads."""
        self._busy = 0
        self._lock = threading.Lock()

    @property
    def others(self) -> int:
        """Lanes at work beside one that asks."""
        return max(0, self._busy - 1)

    @contextmanager
    def working(self) -> Iterator[None]:
        """The calling thread runs kernels."""
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The calling thread, which is working, waits for another one."""
        self._add(-1)
        try:
            yield
        finally:
            self._add(1)

    def _add(self, number: int) -> None:
        with self._lock:
            self._busy += number


#: Those of all workspaces: they share the cores.
BUSY_LANES: Final = BusyLanes()
in_each_fork(BUSY_LANES.forget)
