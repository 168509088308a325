"""Lanes: the shares of a kernel's work that may run at the same time.

Work is always cut into :data:`LANES` lanes, whatever the number of threads, so results are the same bit for
bit on any machine. OpenBLAS has one thread meanwhile (:mod:`gpunet.blas`). Products of small matrices are cut
to stay below :data:`SMALL_PRODUCT`: it then makes no packed copies of its operands, which is the fastest way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from gpunet.cpu_fallback.threads import thread_count
from gpunet.crew import CREW

LANES: Final = 2
#: Rows times columns times depth of the largest product that OpenBLAS leaves to its small-matrix kernels.
SMALL_PRODUCT: Final = 1_000_000
#: Multiplications below which waking another thread costs more than it saves.
THREAD_WORK: Final = 8_000_000
#: Multiplications that take as long as copying a number to columns, or adding one to images.
TRAFFIC: Final = 16


def run_lanes(lanes: Sequence[Callable[[], None]], work: int) -> None:
    """Runs all lanes, which need ``work`` multiplications in all, and returns when all are done."""
    if work < THREAD_WORK:
        for lane in lanes:
            lane()
    else:
        CREW.run(lanes, thread_count())


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is at most ``most``; 0 where there is none."""
    return next((n for n in range(min(number, most), 0, -1) if number % n == 0), 0)


def tile_rows(rows: int, depth: int, columns: int) -> int:
    """The largest divisor of ``rows`` for which the product of a tile stays small; 0 where there is none."""
    return largest_divisor(rows, SMALL_PRODUCT // max(1, depth * columns))
