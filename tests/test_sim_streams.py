"""Streams, events, copies and memory of the simulated device."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from gpunet.cuda_kernels.sim.streams import Range
from gpunet.errors import DeviceError, KernelError
from tests.sim_kernels import Sim, needs_compiler

pytestmark = needs_compiler

SEEDS = range(12)
OUT_OF_MEMORY = (
    "out of memory on sim:0: wanted 400 bytes, 200 bytes of 1000 bytes are free; "
    "the largest of 1 live blocks: 'x' 800 bytes"
)


def producer_and_consumer(seed: int, *, with_event: bool) -> bool:
    """Whether a copy on one stream sees what a kernel on another has written."""
    sim = Sim(seed=seed)
    first, second = sim.backend.new_stream(), sim.backend.new_stream()
    y, z = sim.put(np.zeros(8, "float32"), "y"), sim.put(np.zeros(8, "float32"), "z")
    sim.backend.stream.synchronize()
    for index in range(8):
        sim.prepare("write_at", (y, index, 0), stream=first)()
    if with_event:
        second.wait(first.record())
    sim.backend.copy(z, y, second)
    result = np.empty(8, "float32")
    sim.backend.copy_out(result, z, second)
    return bool((result == 1).all())


def test_only_events_order_streams() -> None:
    assert all(producer_and_consumer(seed, with_event=True) for seed in SEEDS)
    outcomes = [producer_and_consumer(seed, with_event=False) for seed in SEEDS]
    assert not all(outcomes)


def test_the_seed_replays_an_order() -> None:
    def order(seed: int) -> list[int]:
        sim = Sim(seed=seed)
        records = sim.backend.record_work()
        y = sim.put(np.zeros(8, "float32"), "y")
        streams = [sim.backend.new_stream() for _ in range(3)]
        for stream in streams:
            for _ in range(5):
                sim.backend.fill(y, 0, stream)
        for stream in streams:
            stream.synchronize()
        return [record.stream for record in records]

    assert order(3) == order(3)
    assert len({tuple(order(seed)) for seed in SEEDS}) > 6
    assert any(sorted(order(seed)) != order(seed) for seed in SEEDS)


def test_seed_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUNET_SIM_SEED", "77")
    assert Sim().backend.seed == 77
    assert Sim(seed=5).backend.seed == 5
    monkeypatch.setenv("GPUNET_SIM_SEED", "x")
    with pytest.raises(DeviceError, match="GPUNET_SIM_SEED is 'x', wanted an integer"):
        Sim()


def test_work_is_late() -> None:
    sim = Sim()
    ran: list[str] = []

    def note(array: Any) -> None:
        ran.append("host")

    y = sim.put(np.zeros(4, "float32"), "y")
    sim.backend.call_host(note, [y], sim.backend.stream)
    event = sim.backend.stream.record()
    assert ran == []
    event.synchronize()
    assert ran == ["host"]
    assert event.done()


def test_asking_whether_an_event_is_done_makes_progress() -> None:
    sim = Sim()
    y = sim.put(np.zeros(4, "float32"), "y")
    for _ in range(20):
        sim.backend.fill(y, 0, sim.backend.stream)
    event = sim.backend.stream.record()
    answers = [event.done() for _ in range(200)]
    assert not answers[0]
    assert answers[-1]


def test_a_long_queue_runs_by_itself() -> None:
    sim = Sim()
    y = sim.put(np.zeros(4, "float32"), "y")
    calls = 0

    def count(array: Any) -> None:
        nonlocal calls
        calls += 1

    for _ in range(5000):
        sim.backend.call_host(count, [y], sim.backend.stream)
    assert 0 < calls < 5000
    sim.backend.stream.synchronize()
    assert calls == 5000


def test_copy_in_takes_what_the_source_holds_now() -> None:
    sim = Sim()
    x = np.arange(6, dtype="float32").reshape(2, 3)
    y = sim.put(np.zeros((2, 3), "float32"), "y")
    sim.backend.copy_in(y, x, sim.backend.stream)
    x[:] = -1
    np.testing.assert_array_equal(y.numpy(), [[0, 1, 2], [3, 4, 5]])


def test_copies_between_devices_and_events_across_them() -> None:
    one, two = Sim(seed=1), Sim(seed=2)
    x, y = one.put(np.zeros(4, "float32"), "x"), two.put(np.zeros(4, "float32"), "y")
    one.backend.fill(x, 1, one.backend.stream)
    two.backend.stream.wait(one.backend.stream.record())
    two.backend.copy(y, x, two.backend.stream)
    assert (y.numpy().view(np.uint8) == 1).all()
    with pytest.raises(DeviceError, match="the stream is not one of sim:0"):
        one.backend.fill(x, 1, two.backend.stream)


def test_sizes_of_copies_are_checked() -> None:
    sim = Sim()
    y = sim.put(np.zeros(4, "float32"), "y")
    with pytest.raises(DeviceError, match="16 bytes and 20 bytes"):
        sim.backend.copy_in(y, np.zeros(5, "float32"), sim.backend.stream)
    with pytest.raises(DeviceError, match="not contiguous"):
        sim.backend.copy_out(np.zeros((4, 2), "float32")[:, 0], y, sim.backend.stream)


def test_host_functions_see_device_memory() -> None:
    sim = Sim()
    x, y = sim.put(np.arange(4, dtype="float16"), "x"), sim.put(np.zeros((2, 2), "float32"), "y")

    def double(source: Any, target: Any) -> None:
        assert not source.flags.writeable
        target[:] = 2 * source.reshape(2, 2)

    sim.backend.call_host(double, [x, y], sim.backend.stream, reads=1)
    np.testing.assert_array_equal(y.numpy(), [[0, 2], [4, 6]])


def test_errors_of_host_functions_are_raised_where_the_stream_is_waited_for() -> None:
    sim = Sim()
    y = sim.put(np.zeros(4, "float32"), "y")

    def broken(array: Any) -> None:
        raise ValueError("no plan")

    sim.backend.call_host(broken, [y], sim.backend.stream)
    with pytest.raises(DeviceError, match="broken on the simulated device failed: no plan"):
        sim.backend.stream.synchronize()
    assert (y.numpy() == 0).all()


def test_records_tell_ranges_and_events() -> None:
    sim = Sim()
    x, y = sim.put(np.zeros(4, "float32"), "x"), sim.put(np.zeros(6, "float32"), "y")
    sim.backend.stream.synchronize()
    records = sim.backend.record_work()
    other = sim.backend.new_stream()
    sim.prepare("read_at", (x, y, 2))()
    other.wait(sim.backend.stream.record())
    sim.backend.copy(x, x, other)
    other.synchronize()
    launch, record, wait, copy = records
    assert (launch.kind, launch.name) == ("launch", "read_at")
    assert launch.reads == (Range(x.pointer, x.pointer + 16, "x"),)
    assert launch.writes == (Range(y.pointer, y.pointer + 24, "y"),)
    assert (record.kind, wait.kind, copy.kind) == ("record", "wait", "copy")
    assert record.event == wait.event is not None
    assert [each.waits for each in records] == [(), (), (1,), ()]
    assert launch.stream == record.stream != wait.stream == copy.stream
    assert sim.backend.record_work(on=False) is records


def test_memory_is_limited_and_comes_back() -> None:
    sim = Sim(memory=1000)
    x = sim.put(np.zeros(200, "float32"), "x")
    assert sim.backend.memory_info() == (200, 1000)
    with pytest.raises(DeviceError, match=OUT_OF_MEMORY):
        sim.backend.allocate(400)
    # As a net that a workspace drops: it refers to its segments, and these to it.
    cycle: list[Any] = [x]
    cycle.append(cycle)
    gc.disable()
    try:
        del x, cycle
        sim.backend.allocate(1000)
    finally:
        gc.enable()


def test_memory_freed_while_queued_work_uses_it() -> None:
    sim = Sim()
    x, y = sim.put(np.ones(4, "float32"), "x"), sim.put(np.zeros(4, "float32"), "y")
    sim.backend.copy(y, x, sim.backend.stream)
    x.memory._release()
    assert (y.numpy() == 1).all()
    sim.backend.copy(y, x, sim.backend.stream)
    with pytest.raises(KernelError, match=r"copy: buffer 'x' \(float32 4\) is freed"):
        sim.backend.stream.synchronize()


def test_alignment() -> None:
    sim = Sim()
    kept = [sim.backend.allocate(nbytes) for nbytes in (0, 1, 16, 256, 100_000, 1 << 20)]
    assert [memory.pointer % 16 for memory in kept] == [0] * 6
    assert [memory.pointer % 256 for memory in kept if memory.nbytes % 256 == 0] == [0] * 3
    assert len({memory.pointer for memory in kept}) == 6


def test_numpy_cannot_read_device_memory() -> None:
    y = Sim().put(np.zeros(4, "float32"), "y")
    with pytest.raises(DeviceError, match="buffer 'y' is on sim:0, wanted"):
        np.asarray(y)
