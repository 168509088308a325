"""The memory pool and the staging area, on streams that the test moves."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import numpy as np
import pytest

from gpunet.backends import Event, Memory, Stream
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.memory_pool import Pool, rounded
from gpunet.cuda_kernels.sim_backend import SimBackend
from gpunet.cuda_kernels.staging import Staging
from gpunet.devices import Device
from gpunet.errors import DeviceError
from gpunet.specs import TensorSpec
from tests.sim_kernels import needs_compiler


class FakeEvent(Event):
    def __init__(self) -> None:
        self.reached = False
        self.waited = False

    def done(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached = self.waited = True


class FakeStream(Stream):
    """Work is done when `finish` says so."""

    def __init__(self) -> None:
        self.events: list[FakeEvent] = []
        self.captured = False

    @property
    def capturing(self) -> bool:
        return self.captured

    def record(self) -> FakeEvent:
        assert not self.captured, "an event of a captured stream cannot be asked"
        self.events.append(FakeEvent())
        return self.events[-1]

    def wait(self, event: Event) -> None:
        raise AssertionError("the pool waits on no stream")

    def synchronize(self) -> None:
        raise AssertionError("the pool waits for events only")

    def finish(self) -> None:
        for event in self.events:
            event.reached = True


class Source:
    """A device with so many bytes."""

    def __init__(self, total: int = 1 << 40) -> None:
        self.total = total
        self.blocks: dict[int, int] = {}
        self._pointers = itertools.count(1)

    def allocate(self, nbytes: int) -> int | None:
        if sum(self.blocks.values()) + nbytes > self.total:
            return None
        pointer = next(self._pointers) << 20
        self.blocks[pointer] = nbytes
        return pointer

    def free(self, pointer: int) -> None:
        del self.blocks[pointer]

    def info(self) -> tuple[int, int]:
        return self.total - sum(self.blocks.values()), self.total

    def pool(self) -> Pool:
        return Pool(Device("cuda", 3), self.allocate, self.free, self.info)


@pytest.fixture
def streams() -> tuple[FakeStream, FakeStream, FakeStream]:
    return FakeStream(), FakeStream(), FakeStream()


Streams = tuple[FakeStream, FakeStream, FakeStream]


def test_the_same_stream_gets_a_block_again_at_once(streams: Streams) -> None:
    pool = Source().pool()
    block = pool.allocate(1000, streams[0])
    pointer = block.pointer
    del block
    assert pool.allocate(1001, streams[0]).pointer == pointer


def test_another_stream_gets_it_when_the_work_is_done(streams: Streams) -> None:
    a, b, _ = streams
    pool = Source().pool()
    block = pool.allocate(1000, a)
    pointer = block.pointer
    del block
    assert pool.allocate(1000, b).pointer != pointer
    a.finish()
    first = pool.allocate(1000, b)
    second = pool.allocate(1000, b)
    assert pointer in (first.pointer, second.pointer)


def test_a_block_that_another_stream_still_reads_is_not_handed_out(streams: Streams) -> None:
    a, b, _ = streams
    pool = Source().pool()
    block = pool.allocate(1000, a)
    block.used_on(b)
    pointer = block.pointer
    del block
    a.finish()
    held = pool.allocate(1000, a)
    assert held.pointer != pointer, "b still reads it"
    b.finish()
    assert pool.allocate(1000, a).pointer == pointer


def test_a_waiting_block_does_not_hide_a_ready_one(streams: Streams) -> None:
    a, b, _ = streams
    pool = Source().pool()
    first, second = pool.allocate(1000, a), pool.allocate(1000, a)
    second.used_on(b)
    pointer = first.pointer
    del first, second
    assert pool.allocate(1000, a).pointer == pointer


def test_no_event_is_recorded_while_a_stream_is_captured(streams: Streams) -> None:
    a, b, _ = streams
    source = Source()
    pool = source.pool()
    block = pool.allocate(1000, a)
    pointer = block.pointer
    a.captured = True
    del block
    assert pool.allocate(1000, b).pointer != pointer
    assert pool.empty() == rounded(1000), "the block of b, not that of the captured stream"
    a.captured = False
    assert pool.allocate(1000, a).pointer == pointer


def test_memory_is_given_back_before_the_pool_gives_up(streams: Streams) -> None:
    a, b, _ = streams
    source = Source(total=64 << 10)
    pool = source.pool()
    block = pool.allocate(40 << 10, a)
    del block
    assert pool.allocate(60 << 10, b).nbytes == 60 << 10
    assert all(event.waited for event in a.events), "a block is freed only after the work that uses it"
    assert len(source.blocks) == 1


def test_blocks_in_cycles_are_found_before_the_pool_gives_up(streams: Streams) -> None:
    """Nets that a workspace drops refer to their segments, and these to them."""
    a, _, _ = streams
    pool = Source(total=64 << 10).pool()
    gc.disable()
    try:
        cycle: list[Any] = [pool.allocate(40 << 10, a)]
        cycle.append(cycle)
        del cycle
        assert pool.allocate(60 << 10, a).nbytes == 60 << 10
    finally:
        gc.enable()


def test_streams_end_before_blocks_that_are_kept_for_reuse(streams: Streams) -> None:
    a, _, _ = streams
    pool = Source().pool()
    block = pool.allocate(1000, a)
    del block
    pool.allocate(2000, a)
    assert not any(block.streams for blocks in pool._free.values() for block in blocks)


def test_out_of_memory_lists_the_largest_blocks(streams: Streams) -> None:
    pool = Source(total=64 << 20).pool()
    blocks: list[Memory] = []
    for name, size in (("small", 1000), ("big", 40 << 20), ("", 8 << 20)):
        blocks.append(pool.allocate(size, streams[0]))
        blocks[-1].name = name
    with pytest.raises(DeviceError) as error:
        pool.allocate(30 << 20, streams[0])
    assert str(error.value) == (
        "out of memory on cuda:3: wanted 30.0 MiB, 16.0 MiB of 64.0 MiB are free; the largest of 3 live "
        "blocks: 'big' 40.0 MiB, 'unnamed' 8.0 MiB, 'small' 1000 bytes"
    )


def test_blocks_may_come_back_in_the_middle_of_an_allocation(streams: Streams) -> None:
    source = Source()
    held: list[Memory] = []

    def allocate(nbytes: int) -> int | None:
        held.clear()
        gc.collect()
        return source.allocate(nbytes)

    pool = Pool(Device("cuda"), allocate, source.free)
    held.append(pool.allocate(1 << 20, streams[0]))
    second = pool.allocate(2 << 20, streams[0])
    third = pool.allocate(1 << 20, streams[0])
    assert sorted(source.blocks.values()) == [1 << 20, 2 << 20]
    assert {second.pointer, third.pointer} == set(source.blocks)


def copied(seed: int, noted: bool) -> bool:
    """Whether a stream of the simulated device copies what it should from a block that is freed before."""
    sim = SimBackend(Device("sim", 8), seed=seed)
    pool = Pool(sim.device, lambda n: sim.runtime.allocate(n) or None, lambda p: None)
    a, b, spec = sim.stream, sim.new_stream(), TensorSpec((128,), np.dtype("float32"))

    def view(memory: Memory) -> Buffer:
        # Queued work of the simulated device keeps its blocks: a GPU's does not.
        return Buffer(sim, Memory(memory.pointer, memory.nbytes, lambda: None), spec.shape, spec.dtype)

    out, block = Buffer.empty(sim, spec), pool.allocate(spec.nbytes, a)
    sim.copy_in(view(block), np.full(128, 7, np.float32), a)
    b.wait(a.record())
    sim.copy(out, view(block), b)
    if noted:
        block.used_on(b)
    del block
    other = pool.allocate(spec.nbytes, a)
    sim.fill(view(other), 1, a)
    return bool((out_of(sim, out, b) == 7).all())


def out_of(sim: SimBackend, buffer: Buffer, stream: Stream) -> np.ndarray:
    array = np.empty(buffer.shape, buffer.dtype)
    sim.copy_out(array, buffer, stream)
    return array


@needs_compiler
def test_a_stream_of_the_simulated_device_reads_a_freed_block() -> None:
    assert all(copied(seed, noted=True) for seed in range(16))
    assert not all(copied(seed, noted=False) for seed in range(16)), "the order of streams shows it"


@pytest.mark.parametrize(
    "nbytes", [0, 1, 511, 512, 513, 4096, 10_000, 1 << 20, (1 << 20) + 1, 10**9, 1 << 33]
)
def test_rounding(nbytes: int) -> None:
    size = rounded(nbytes)
    assert size % 512 == 0
    assert nbytes <= size <= max(nbytes * 17 // 16, nbytes + 512)
    assert rounded(size) == size


# The staging area.


class LateCopies:
    """Copies between addresses that happen when a stream's event is waited for."""

    def __init__(self) -> None:
        self.waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self.memory = np.zeros(100, np.uint8)
        self.pinned: list[np.ndarray] = []
        self.most = 0

    def make(self, nbytes: int) -> np.ndarray:
        self.pinned.append(np.zeros(nbytes, np.uint8))
        return self.pinned[-1]

    def at(self, pointer: int, nbytes: int) -> np.ndarray:
        for array in (self.memory, *self.pinned):
            begin = pointer - array.ctypes.data
            if 0 <= begin <= array.nbytes - nbytes:
                return array[begin : begin + nbytes]
        raise AssertionError("no such address")

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        self.waiting.append((self.at(target, nbytes), self.at(source, nbytes)))
        self.most = max(self.most, len(self.waiting))

    def run(self) -> None:
        while self.waiting:
            target, source = self.waiting.pop(0)
            target[:] = source


class LateEvent(FakeEvent):
    def __init__(self, copies: LateCopies) -> None:
        super().__init__()
        self.copies = copies

    def synchronize(self) -> None:
        self.copies.run()
        super().synchronize()


class LateStream(FakeStream):
    def __init__(self, copies: LateCopies) -> None:
        super().__init__()
        self.copies = copies

    def record(self) -> FakeEvent:
        return LateEvent(self.copies)


@pytest.mark.parametrize("count", [0, 1, 5, 7, 14, 15, 23])
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_staged_copies(count: int, pieces: int) -> None:
    copies = LateCopies()
    staging = Staging(copies.make, copies.copy, piece=28, pieces=pieces)
    stream = LateStream(copies)
    source = np.arange(count, dtype=np.float32).reshape(1, count)
    want = source.copy()
    pointer = copies.memory.ctypes.data + 4
    staging.to_device(pointer, source, stream)
    source[...] = -1
    got = np.empty((count, 1), np.float32)
    staging.to_host(got, pointer, stream)
    np.testing.assert_array_equal(got.ravel(), want.ravel())
    assert not copies.memory[:4].any()
    assert not copies.memory[4 + 4 * count :].any()
    assert len(copies.pinned) <= pieces
    if count == 23 and pieces > 1:
        assert copies.most > 1, "pieces travel while others are filled"


def test_an_error_gives_the_piece_back() -> None:
    copies = LateCopies()

    def fail(*_: object) -> None:
        raise DeviceError("no copy")

    staging = Staging(copies.make, fail, piece=16, pieces=1)
    array = np.zeros(3, np.float32)
    for _ in range(3):
        with pytest.raises(DeviceError, match="no copy"):
            staging.to_device(1, array, LateStream(copies))
        with pytest.raises(DeviceError, match="no copy"):
            staging.to_host(array, 1, LateStream(copies))
