"""Threads that put work into streams of the simulated device, and wait for it, at the same time.

Each test stops one thread in the middle of a step and lets another one go on, as the operating system may.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpunet.cuda_kernels.sim import recording
from gpunet.cuda_kernels.sim.streams import SimStream
from gpunet.races import find_races
from tests.sim_kernels import Sim, needs_compiler

pytestmark = needs_compiler

#: Seconds to wait for what must not happen.
MOMENT = 0.1


class Thread(threading.Thread):
    """A thread that has started; ``join`` raises what it raised."""

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.function = function
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.function()
        except BaseException as error:
            self.error = error

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if self.error is not None:
            raise self.error


def test_waits_of_two_threads_for_one_stream_are_both_recorded() -> None:
    sim = Sim()
    x, y = sim.put(np.zeros(4, "float32"), "x"), sim.put(np.zeros(4, "float32"), "y")
    sim.backend.synchronize()
    out, other = sim.backend.new_stream(), sim.backend.new_stream()
    work = sim.backend.record_work()
    found = sim.backend.executor.recording
    assert found is not None
    looking, done = threading.Event(), threading.Event()

    class Known(dict[int, int]):
        """Lets the second thread note its wait, if it can, after the first one has looked."""

        def get(self, key: int, default: Any = None) -> Any:
            result = super().get(key, default)
            if not looking.is_set():
                looking.set()
                done.wait(MOMENT)
            return result

    found.known = Known()

    def second() -> None:
        sim.backend.copy_out(np.empty(4, "float32"), y, out)
        done.set()

    threads = [Thread(lambda: sim.backend.copy_out(np.empty(4, "float32"), x, out))]
    assert looking.wait(10)
    threads.append(Thread(second))
    for thread in threads:
        thread.join()
    sim.backend.fill(x, 1, other)
    sim.backend.fill(y, 1, other)
    sim.backend.synchronize()
    assert [each.name for each in work] == ["copy of 'x'", "copy of 'y'", "fill of 'x'", "fill of 'y'"]
    assert [str(race) for race in find_races(recording.as_records(work, "sim:0"))] == []


def test_work_that_others_put_into_a_stream_meanwhile_was_not_waited_for() -> None:
    sim = Sim()
    x = sim.put(np.zeros(4, "float32"), "x")
    sim.backend.synchronize()
    one, other = sim.backend.new_stream(), sim.backend.new_stream()
    work = sim.backend.record_work()
    found = sim.backend.executor.recording
    assert found is not None
    threads: list[Thread] = []

    def later() -> None:
        sim.backend.fill(x, 1, one)
        sim.backend.executor.run_until(lambda: not one.queue)

    class Last(dict[int, int]):
        """Lets another thread run work, if it can, when the first one's has run."""

        def get(self, key: int, default: Any = None) -> Any:
            threads.append(Thread(later))
            threads[0].join(MOMENT)
            return super().get(key, default)

    sim.backend.fill(x, 0, one)
    found.last = Last()
    one.synchronize()
    threads[0].join()
    sim.backend.fill(x, 2, other)
    sim.backend.synchronize()
    (race,) = find_races(recording.as_records(work, "sim:0"))
    assert (race.first, race.second) == tuple(recording.as_records(work, "sim:0")[1:])


def test_streams_get_work_while_one_is_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Sim()
    x = sim.put(np.zeros(4, "float32"), "x")
    blocks = [sim.put(np.zeros(4, "float32"), f"y{i}") for i in range(2)]
    sim.backend.synchronize()
    ready = SimStream.ready.fget
    assert ready is not None
    streams: list[SimStream] = []

    def ready_later(stream: SimStream) -> bool:
        if len(streams) < 4:
            streams.append(sim.backend.own(sim.backend.new_stream()))
            Thread(lambda: sim.backend.fill(x, 1, streams[-1])).join()
        return bool(ready(stream))

    monkeypatch.setattr(SimStream, "ready", property(ready_later))
    for block in blocks:
        sim.backend.fill(block, 1, sim.backend.new_stream())
    sim.backend.synchronize()
    assert len(streams) == 4
    for block in (x, *blocks):
        assert (block.numpy().view("uint8") == 1).all(), block


def test_a_stream_that_gets_work_when_it_runs_out_of_it_runs_on() -> None:
    sim = Sim()
    x, y = sim.put(np.zeros(4, "float32"), "x"), sim.put(np.zeros(4, "float32"), "y")
    sim.backend.synchronize()
    stream = sim.backend.own(sim.backend.new_stream())
    threads: list[Thread] = []

    class Queue(deque[Any]):
        """Lets another thread put work there, if it can, when it has been found empty."""

        def __len__(self) -> int:
            length = super().__len__()
            if not length and not threads:
                threads.append(Thread(lambda: sim.backend.fill(y, 1, stream)))
                threads[0].join(MOMENT)
            return length

    sim.backend.fill(x, 1, stream)
    stream.queue = Queue(stream.queue)
    stream.synchronize()
    threads[0].join()
    stream.synchronize()
    for block in (x, y):
        assert (block.numpy().view("uint8") == 1).all(), block
