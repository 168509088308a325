"""Splitting kernels over threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from gpunet.cores import BUSY_LANES
from gpunet.cpu_fallback import threads
from gpunet.cpu_fallback.threads import PIECE_BYTES, THREAD_BYTES, split


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch):
    """Two threads whatever the machine has."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    threads.thread_count.cache_clear()
    yield
    threads.thread_count.cache_clear()


@pytest.mark.parametrize(
    ("ranks", "usable", "wanted"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (20, 8, 1), (4, 2, 2), (4, 7, 7)]
)
def test_ranks_of_a_host_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, ranks: int, usable: int, wanted: int
) -> None:
    """Unless the launcher has bound them to some."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda process: set(range(usable)), raising=False)
    for name, value in {"RANK": 0, "SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_SIZE": ranks}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    assert threads.thread_count.__wrapped__() == wanted


@pytest.mark.parametrize(
    ("count", "item_bytes"),
    [
        (0, 8),
        (1, 8),
        (7, 0),
        (1, 10 * THREAD_BYTES),
        (5, THREAD_BYTES),
        (1000, 4096),
        (37, PIECE_BYTES // 2 + 1),
    ],
)
def test_pieces_cover_the_range_once(two_threads: None, count: int, item_bytes: int) -> None:
    seen = np.zeros(count, np.int64)

    def work(begin: int, end: int) -> None:
        assert begin < end
        assert (end - begin) * item_bytes <= PIECE_BYTES or end - begin == 1
        seen[begin:end] += 1

    split(count, item_bytes, work)
    assert (seen == 1).all()


def test_large_arrays_are_shared_and_small_ones_not(two_threads: None) -> None:
    def names(item_bytes: int) -> set[str]:
        found: set[str] = set()
        both = threading.Barrier(2)

        def work(begin: int, end: int) -> None:
            if item_bytes >= THREAD_BYTES:
                both.wait(timeout=30)
            found.add(threading.current_thread().name)

        split(2, item_bytes, work)
        return found

    assert len(names(THREAD_BYTES)) == 2
    assert names(8) == {threading.current_thread().name}


def test_other_lanes_at_work_take_their_cores(two_threads: None) -> None:
    """Where another lane is at work, work stays in the calling thread, until that one waits or is done."""

    def threads_used() -> int:
        found: set[str] = set()
        both = threading.Barrier(2)

        def work(begin: int, end: int) -> None:
            if not BUSY_LANES.others:
                both.wait(timeout=30)
            found.add(threading.current_thread().name)

        split(2, THREAD_BYTES, work)
        return len(found)

    with BUSY_LANES.working():
        assert threads_used() == 2
        with BUSY_LANES.working():
            assert threads_used() == 1
            with BUSY_LANES.waiting():
                assert threads_used() == 2
            assert threads_used() == 1
        assert threads_used() == 2
    assert BUSY_LANES.others == 0


def test_an_error_of_any_piece_is_raised_after_all_have_ended(two_threads: None) -> None:
    for bad in (0, 1):
        done: list[int] = []

        def work(begin: int, end: int, bad: int = bad, done: list[int] = done) -> None:
            if begin == bad:
                raise ValueError(f"piece {bad}")
            done.append(begin)

        with pytest.raises(ValueError, match=f"piece {bad}"):
            split(2, THREAD_BYTES, work)
        assert done == [1 - bad]


def test_a_piece_may_split_again(two_threads: None) -> None:
    seen = np.zeros((2, 4), np.int64)

    def outer(begin: int, end: int) -> None:
        for i in range(begin, end):

            def inner(first: int, last: int, i: int = i) -> None:
                seen[i, first:last] += 1

            split(4, THREAD_BYTES, inner)

    split(2, 4 * THREAD_BYTES, outer)
    assert (seen == 1).all()


@pytest.mark.filterwarnings("error")
def test_floating_point_warnings_stay_off_in_threads(two_threads: None) -> None:
    x, y = np.zeros((4, 4), np.float32), np.empty((4, 4), np.float32)
    with np.errstate(all="ignore"):
        split(4, THREAD_BYTES, lambda begin, end: np.divide(x[begin:end], 0, out=y[begin:end]))
    assert np.isnan(y).all()


def test_large_batch_normalization_does_not_depend_on_the_number_of_threads(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpunet.cpu_fallback.normalization import _sums

    rng = np.random.default_rng(3)
    x = rng.standard_normal((24, 8, 4096)).astype(np.float32)
    for last, data in ((False, x), (True, np.ascontiguousarray(x.swapaxes(1, 2)))):
        several = _sums(data, data, last)
        with monkeypatch.context() as one:
            one.setattr(threads, "thread_count", lambda: 1)
            alone = _sums(data, data, last)
        for a, b in zip(several, alone, strict=True):
            np.testing.assert_array_equal(a, b)
        wide = x.astype(np.float64)
        np.testing.assert_allclose(alone[1], (wide * wide).sum(axis=(0, 2)), rtol=1e-5)
