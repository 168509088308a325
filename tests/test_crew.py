"""Threads that share the pieces of kernels."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import gpunet
from gpunet.cores import BUSY_LANES
from gpunet.crew import SWITCH_INTERVAL, Crew, QuickTurns
from gpunet.observers import observe
from gpunet.proto import NetDef
from tests.nets import op

#: Seconds after which a test gives up.
PATIENCE = 30


def name() -> str:
    return threading.current_thread().name


@pytest.fixture
def crew() -> Crew:
    return Crew()


def test_pieces_run_at_the_same_time(crew: Crew) -> None:
    together = threading.Barrier(2)
    names: set[str] = set()

    def piece() -> None:
        together.wait(PATIENCE)
        names.add(name())

    for _ in range(3):
        crew.run([piece, piece], 2)
    assert names == {name(), "gpunet kernel"}


def test_one_thread_runs_pieces_in_order(crew: Crew) -> None:
    found: list[tuple[int, str]] = []
    crew.run([lambda i=i: found.append((i, name())) for i in range(5)], 1)
    assert found == [(i, name()) for i in range(5)]


def test_each_piece_runs_once(crew: Crew) -> None:
    seen = np.zeros(1000, np.int64)

    def piece(i: int) -> Callable[[], None]:
        def run() -> None:
            seen[i] += 1

        return run

    crew.run([piece(i) for i in range(1000)], 3)
    assert (seen == 1).all()


def test_no_more_threads_than_cores(crew: Crew) -> None:
    """Lanes at work and helpers of other kernels count."""
    busy, most = 0, 0
    lock, enough = threading.Lock(), threading.Event()

    def piece() -> None:
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
        enough.wait(0.005)
        with lock:
            busy -= 1

    threads = [threading.Thread(target=crew.run, args=([piece] * 20, 3)) for _ in range(2)]
    with ExitStack() as stack:
        for _ in threads:
            stack.enter_context(BUSY_LANES.working())
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == 3


def test_a_lane_that_waits_takes_pieces_of_a_kernel_that_runs(crew: Crew) -> None:
    """Of one that began when no core was free."""
    ready, begun, helped = threading.Event(), threading.Event(), threading.Event()
    names: list[str] = []

    def first() -> None:
        begun.set()
        assert helped.wait(PATIENCE)

    def second() -> None:
        names.append(name())
        helped.set()

    def lane() -> None:
        with BUSY_LANES.working():
            ready.set()
            assert begun.wait(PATIENCE)
            with BUSY_LANES.waiting():
                while crew.help():
                    pass

    other = threading.Thread(target=lane, name="other lane")
    with BUSY_LANES.working():
        other.start()
        assert ready.wait(PATIENCE)
        crew.run([first, second], 2)
    other.join()
    assert names == ["other lane"]
    assert not crew.help()


def test_the_crew_looks_for_pieces_when_a_lane_is_done(crew: Crew) -> None:
    """Nobody looks by himself where all cores were busy when a kernel began."""
    crew.run([lambda: None] * 2, 2)  # There is a thread now.
    helped = threading.Event()
    names: list[str] = []
    lane = ExitStack()
    lane.enter_context(BUSY_LANES.working())

    def first() -> None:
        assert not helped.wait(0.05)
        lane.close()
        crew.look()
        assert helped.wait(PATIENCE)

    def second() -> None:
        names.append(name())
        helped.set()

    with BUSY_LANES.working():
        crew.run([first, second], 2)
    assert names == ["gpunet kernel"]


def test_help_leaves_cores_to_lanes(crew: Crew) -> None:
    def first() -> None:
        found.append(crew.help())

    found: list[bool] = []
    with BUSY_LANES.working(), BUSY_LANES.working():
        crew.run([first, lambda: None], 2)
    assert found == [False]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_is_raised_when_all_pieces_have_ended(crew: Crew, bad: int) -> None:
    done: list[int] = []

    def piece(i: int) -> Callable[[], None]:
        def run() -> None:
            if i == bad:
                raise ValueError(f"piece {i}")
            done.append(i)

        return run

    with pytest.raises(ValueError, match=f"piece {bad}"):
        crew.run([piece(i) for i in range(3)], 2)
    assert sorted(done) == [i for i in range(3) if i != bad]


def test_an_interrupt_waits_for_others_and_ends_the_rest(crew: Crew) -> None:
    begun, leave = threading.Event(), threading.Event()
    done: list[int] = []

    def interrupted() -> None:
        assert begun.wait(PATIENCE)
        threading.Timer(0.05, leave.set).start()
        raise KeyboardInterrupt

    def last() -> None:
        begun.set()
        assert leave.wait(PATIENCE)
        done.append(3)

    with pytest.raises(KeyboardInterrupt):
        crew.run([interrupted, lambda: done.append(1), lambda: done.append(2), last], 2)
    assert done == [3]


def test_an_interrupt_of_a_helper_is_raised_there_and_by_the_kernel(crew: Crew) -> None:
    """Not only by the kernel, which may belong to the net of another thread."""
    begun, helped = threading.Event(), threading.Event()
    raised: list[str] = []

    def first() -> None:
        begun.set()
        assert helped.wait(PATIENCE)

    def interrupted() -> None:
        raise KeyboardInterrupt

    def kernel() -> None:
        try:
            crew.run([first, interrupted], 2)
        except KeyboardInterrupt:
            raised.append("kernel")

    other = threading.Thread(target=kernel)
    # Until it helps, no core is free for threads of the crew.
    with BUSY_LANES.working(), BUSY_LANES.working():
        other.start()
        assert begun.wait(PATIENCE)
        with BUSY_LANES.waiting(), pytest.raises(KeyboardInterrupt):
            crew.help()
    helped.set()
    other.join()
    assert raised == ["kernel"]
    assert not crew._helping


@pytest.mark.parametrize("call", [1, 2])
def test_an_interrupt_when_others_have_ended_is_not_too_late(
    crew: Crew, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_ended, calls = crew._has_ended, []
    together = threading.Barrier(2)

    def interrupted(job: Any) -> bool:
        found = has_ended(job)
        calls.append(found)
        if len(calls) == call:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(crew, "_has_ended", interrupted)
    with pytest.raises(KeyboardInterrupt):
        crew.run([lambda: together.wait(PATIENCE), lambda: (together.wait(PATIENCE), time.sleep(0.2))], 2)
    assert calls[-1]
    assert not crew._jobs


def test_pieces_may_have_pieces(crew: Crew) -> None:
    seen = np.zeros((4, 4), np.int64)

    def outer(i: int) -> Callable[[], None]:
        def inner(j: int) -> Callable[[], None]:
            def run() -> None:
                seen[i, j] += 1

            return run

        return lambda: crew.run([inner(j) for j in range(4)], 2)

    crew.run([outer(i) for i in range(4)], 2)
    assert (seen == 1).all()


@pytest.mark.filterwarnings("error")
def test_floating_point_warnings_are_off_in_threads_of_the_crew(crew: Crew) -> None:
    together = threading.Barrier(2)

    def piece() -> None:
        together.wait(PATIENCE)
        np.divide(np.ones(3), 0)

    with np.errstate(all="ignore"):
        crew.run([piece, piece], 2)


def test_threads_ask_for_the_interpreter_lock_soon_while_they_share(crew: Crew) -> None:
    before = sys.getswitchinterval()
    seen: list[float] = []
    crew.run([lambda: seen.append(sys.getswitchinterval())] * 2, 2)
    crew.run([lambda: seen.append(sys.getswitchinterval())] * 2, 1)
    assert [pytest.approx(s) for s in seen] == [SWITCH_INTERVAL] * 2 + [before] * 2
    assert sys.getswitchinterval() == before


def test_lanes_ask_for_the_interpreter_lock_soon() -> None:
    before = sys.getswitchinterval()
    ops = [op("Scale", "x", "a"), op("Scale", "x", "b"), op("Sum", "a b", "y")]
    workspace = gpunet.Workspace("cpu")
    workspace.feed("x", np.ones(3, np.float32))
    for engine, wanted in (("simple", before), ("async_scheduling", SWITCH_INTERVAL)):
        net = NetDef(name=engine, op=ops, external_input=["x"])
        workspace.create(net, engine=engine, workers=2)
        seen: list[float] = []
        with observe(workspace, engine, before=lambda call, seen=seen: seen.append(sys.getswitchinterval())):
            workspace.run(engine)
        assert seen == [pytest.approx(wanted)] * 3
    assert sys.getswitchinterval() == before


def test_an_interval_that_is_shorter_stays() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL / 2)
    try:
        with QuickTurns():
            assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL / 2)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL / 2)
    finally:
        sys.setswitchinterval(before)


FORKED = """
import os, sys, threading
import numpy as np
import gpunet
from gpunet.cores import BUSY_LANES
from gpunet.crew import CREW, QUICK_TURNS
from gpunet.proto import NetDef
from tests.nets import op

def together():
    both = threading.Barrier(2)
    CREW.run([lambda: both.wait(30)] * 2, 2)

if not hasattr(os, "fork"):
    raise SystemExit
before = sys.getswitchinterval()
workspace = gpunet.Workspace("cpu")
workspace.feed("x", np.ones(3, np.float32))
ops = [op("Scale", "x", "a"), op("Scale", "x", "b"), op("Sum", "a b", "y")]
workspace.create(NetDef(name="net", op=ops, external_input=["x"]), engine="async_scheduling", workers=2)
ready, leave = threading.Event(), threading.Event()

def lane():
    with QUICK_TURNS, BUSY_LANES.working(), BUSY_LANES.working(), BUSY_LANES._lock, QUICK_TURNS._lock:
        ready.set()
        leave.wait()

together()
workspace.run("net")
other = threading.Thread(target=lane)
other.start()
ready.wait()
child = os.fork()
if child:
    status = os.waitpid(child, 0)[1]
    leave.set()
    raise SystemExit(os.waitstatus_to_exitcode(status))
together()
workspace.run("net")
assert sys.getswitchinterval() == before
os._exit(0)
"""


def test_a_fork_has_threads_of_its_own() -> None:
    """Whatever the other threads of its parent were at."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=PATIENCE)


def test_who_was_inside_in_the_parent_of_a_fork_leaves() -> None:
    before = sys.getswitchinterval()
    turns = QuickTurns()
    with turns:
        turns.forget()
        assert sys.getswitchinterval() == before
    with turns:
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL)
    assert sys.getswitchinterval() == before
