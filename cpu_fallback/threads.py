"""Threads for NumPy kernels that walk over large arrays.

NumPy lets go of the interpreter lock inside its loops but runs each of them in one thread. A kernel that
passes over memory several times gains twice by being cut along its first dimension: the pieces fit a cache,
and threads share them. The number of threads is ``OMP_NUM_THREADS``, where that is set, or the number of
cores that the process may use, less those that other lanes of an engine keep busy. Ranks of one host that may
all use all of its cores share them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from functools import partial

from gpunet.cores import is_bound, usable_cores
from gpunet.crew import CREW
from gpunet.discovery import discover

#: Arrays are cut into pieces of about this size: the few that a kernel works on stay in a core's cache.
PIECE_BYTES = 1 << 19
#: Bytes that a thread must get to pass over, to be worth waking.
THREAD_BYTES = 1 << 19


@functools.cache
def thread_count() -> int:
    """Threads that kernels may use, the calling one included."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    usable = len(usable_cores())
    # A launcher that binds ranks to cores has shared them out already.
    return usable if is_bound() else max(1, usable // _ranks_here())


def _ranks_here() -> int:
    """Processes that a launcher started on this host for the same job."""
    return max(1, discover().local_size)


def cuts(count: int, item_bytes: int, passes: int = 1) -> list[tuple[int, int]]:
    """Ranges that cover ``range(count)`` once: pieces for a cache, as many as there are threads if it pays.

    Args:
        count: items.
        item_bytes: bytes of one item.
        passes: how often each is passed over.
    """
    if not count:
        return []
    threads = min(thread_count(), count * item_bytes * passes // THREAD_BYTES, count)
    step = count
    if count * item_bytes * passes >= 2 * THREAD_BYTES:
        step = min(max(1, PIECE_BYTES // item_bytes), -(-count // max(1, threads)))
    return [(start, min(start + step, count)) for start in range(0, count, step)]


def split(count: int, item_bytes: int, work: Callable[[int, int], None], passes: int = 1) -> None:
    """Calls ``work(begin, end)`` on pieces that cover ``range(count)`` once, from several threads if it pays.

    Args:
        count: items, along the first dimension of the arrays.
        item_bytes: bytes of one item of the largest array.
        work: handles the items from ``begin`` to ``end - 1``; results must not depend on where the cuts are.
        passes: how often it goes over an array of that size.
    """
    CREW.run([partial(work, *ends) for ends in cuts(count, item_bytes, passes)], thread_count())
