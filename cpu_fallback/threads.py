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
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from gpunet.cores import BUSY_LANES, is_bound, usable_cores
from gpunet.discovery import discover

#: Arrays are cut into pieces of about this size: the few that a kernel works on stay in a core's cache.
PIECE_BYTES = 1 << 19
#: What a thread must get to do, to be worth waking.
THREAD_BYTES = 1 << 20

_local = threading.local()


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


def _start() -> None:
    _local.inside = True
    # The engine's setting for floating-point warnings holds in its own thread only.
    np.seterr(all="ignore")


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_count() - 1, thread_name_prefix="gpunet-kernel", initializer=_start)


if hasattr(os, "register_at_fork"):
    # Threads do not survive a fork.
    os.register_at_fork(after_in_child=_pool.cache_clear)


def split(count: int, item_bytes: int, work: Callable[[int, int], None]) -> None:
    """Calls ``work(begin, end)`` on pieces that cover ``range(count)`` once, from several threads if it pays.

    Args:
        count: items, along the first dimension of the arrays.
        item_bytes: bytes of one item of the largest array.
        work: handles the items from ``begin`` to ``end - 1``; results must not depend on where the cuts are.
    """
    step = max(1, PIECE_BYTES // max(1, item_bytes))
    threads = min(thread_count() - BUSY_LANES.others, count * item_bytes // THREAD_BYTES, count)
    if threads < 2 or getattr(_local, "inside", False):
        _walk(0, count, step, work)
        return
    bounds = [count * t // threads for t in range(threads + 1)]
    futures = [_pool().submit(_walk, bounds[t], bounds[t + 1], step, work) for t in range(1, threads)]
    try:
        _walk(0, bounds[1], step, work)
    finally:
        wait(futures)
    for future in futures:
        future.result()


def _walk(begin: int, end: int, step: int, work: Callable[[int, int], None]) -> None:
    for start in range(begin, end, step):
        work(start, min(start + step, end))
