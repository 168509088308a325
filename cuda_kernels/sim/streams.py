"""Streams of the simulated device: work is only queued, and runs when something waits for it.

Among the streams whose next piece of work may run, one is picked at random, so that two streams are in no
order but that of their events. The picks depend on the seed only: a failure can be replayed.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from gpunet import backends
from gpunet.cuda_kernels.sim import library
from gpunet.errors import DeviceError, GpunetError

#: Addresses of bytes, [start, end).
Range: TypeAlias = tuple[int, int]

#: Queued work on one stream that makes a stream run without being waited for.
LONGEST_QUEUE: Final = 4096


@dataclass(slots=True)
class Work:
    """A piece of queued work.

    ``run`` does it; ``ranges`` tells the bytes that it reads and those that it writes.
    """

    kind: str
    name: str
    run: Callable[[], None]
    ranges: Callable[[], tuple[list[Range], list[Range]]] | None = None
    event: SimEvent | None = None
    sequence: int = 0


@dataclass(frozen=True)
class Record:
    """What has run: in which stream, what, and the bytes that it read and wrote.

    What is written may be read too.
    ``kind`` is launch, copy, fill, host, record or wait; ``event`` numbers the event of the last two.
    """

    stream: int
    kind: str
    name: str
    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    event: int | None


class SimEvent(backends.Event):
    """A point in a stream."""

    def __init__(self, executor: Executor, number: int) -> None:
        self.executor = executor
        self.number = number
        self.passed = False

    def done(self) -> bool:
        """Whether all work before has run.

        A few pieces of ready work may run first, as a GPU goes on meanwhile.
        """
        self.executor.progress()
        return self.passed

    def synchronize(self) -> None:
        """Runs what is needed until the event has passed; raises the first error since the last such call."""
        self.executor.run_until(lambda: self.passed)


class SimStream(backends.Stream):
    """A queue of work."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.number = next(executor.stream_numbers)
        self.queue: deque[Work] = deque()

    @property
    def capturing(self) -> bool:
        """Whether work is recorded into a graph: of all streams of the device at once."""
        return self.executor.captured is not None

    def put(self, work: Work) -> None:
        """Appends work."""
        executor = self.executor
        if executor.captured is not None:
            executor.captured.append((self, work))
            return
        work.sequence = next(executor.sequence)
        self.queue.append(work)
        executor.busy[self] = None
        if len(self.queue) > LONGEST_QUEUE:
            executor.run_until(lambda: len(self.queue) <= LONGEST_QUEUE // 2, raises=False)

    def record(self) -> backends.Event:
        """An event behind all work that is in the queue now."""
        return self.record_event()

    def record_event(self) -> SimEvent:
        """The same, as what it is."""
        event = SimEvent(self.executor, next(self.executor.event_numbers))

        def run() -> None:
            event.passed = True

        self.put(Work("record", "", run, event=event))
        return event

    def wait(self, event: backends.Event) -> None:
        """Work put into the queue from now on runs after the event, also one of another simulated device."""
        if not isinstance(event, SimEvent):
            raise DeviceError(f"a stream of a simulated device cannot wait for a {type(event).__name__}")
        self.put(Work("wait", "", _nothing, event=event))

    def synchronize(self) -> None:
        """Runs all work of this stream, and of others as far as events ask for or as the seed has it."""
        self.executor.run_until(lambda: not self.queue)

    @property
    def ready(self) -> bool:
        """Whether its next piece of work may run."""
        if not self.queue:
            return False
        head = self.queue[0]
        return head.kind != "wait" or head.event is None or head.event.passed


def _nothing() -> None:
    pass


class Executor:
    """Runs the work of all streams of one device."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sequence = itertools.count()
        self.stream_numbers = itertools.count()
        self.event_numbers = itertools.count()
        #: Streams with work, in the order in which they got it.
        self.busy: dict[SimStream, None] = {}
        #: Set to a list to have all work that runs recorded there.
        self.records: list[Record] | None = None
        #: The first error since the last wait.
        self.error: BaseException | None = None
        #: Blocks given back, with the number of the first work that cannot use them any more.
        self.released: deque[tuple[int, int]] = deque()
        #: Set to a list to have work put there instead of into its queue.
        self.captured: list[tuple[SimStream, Work]] | None = None
        self._favourite: SimStream | None = None
        self._depth = 0

    def run_until(self, stop: Callable[[], bool], *, raises: bool = True) -> None:
        """Runs work until ``stop()``; then raises the first error, once, if asked to."""
        if self.captured is not None:
            raise DeviceError("cannot wait for the simulated device while a graph is captured")
        with library.LOCK:
            if not stop():
                self._run(stop)
            self.reclaim()
            if raises and self.error is not None:
                error, self.error = self.error, None
                raise error

    def progress(self) -> None:
        """Runs a random number of pieces of ready work, none to seven."""
        with library.LOCK:
            left = self.random.randrange(8)

            def stop() -> bool:
                nonlocal left
                left -= 1
                return left < 0 or not any(stream.ready for stream in self.busy)

            self._run(stop)

    def _run(self, stop: Callable[[], bool]) -> None:
        runtime = library.runtime()
        if self._depth == 0:
            runtime.enter()
        self._depth += 1
        try:
            while not stop():
                if self.released:
                    self.reclaim()
                stream = self._pick()
                work = stream.queue.popleft()
                if not stream.queue:
                    self.busy.pop(stream, None)
                self._do(stream, work)
        finally:
            self._depth -= 1
            if self._depth == 0:
                runtime.leave()

    def _pick(self) -> SimStream:
        if len(self.busy) == 1:
            (stream,) = self.busy
            if stream.ready:
                return stream
        ready = [stream for stream in self.busy if stream.ready]
        if not ready:
            # All wait for events of other devices.
            for stream in list(self.busy):
                event = stream.queue[0].event
                if event is not None and event.executor is not self:
                    event.synchronize()
                    return stream
            raise DeviceError("streams of the simulated device wait for one another for ever")
        # Runs of work of one stream show missing events better than an even mixture.
        if self._favourite not in ready or self.random.random() < 0.25:
            self._favourite = self.random.choice(ready)
        return self._favourite if self._favourite is not None else ready[0]

    def _do(self, stream: SimStream, work: Work) -> None:
        if self.records is not None:
            reads, writes = work.ranges() if work.ranges is not None else ([], [])
            number = None if work.event is None else work.event.number
            self.records.append(
                Record(stream.number, work.kind, work.name, tuple(reads), tuple(writes), number)
            )
        try:
            work.run()
        except GpunetError as error:
            self.error = self.error or error
        except Exception as error:  # of a function called on the host: it belongs to its place in the stream
            failed = DeviceError(f"{work.name or work.kind} on the simulated device failed: {error}")
            failed.__cause__ = error
            self.error = self.error or failed

    def reclaim(self) -> None:
        """Frees released blocks that no queued work can use any more."""
        if not self.released:
            return
        oldest = min((s.queue[0].sequence for s in list(self.busy) if s.queue), default=None)
        while self.released and (oldest is None or self.released[0][0] < oldest):
            _, pointer = self.released.popleft()
            damage = library.runtime().free(pointer)
            if damage > 1 and self.error is None:
                side = "before" if damage < pointer else "behind"
                self.error = DeviceError(
                    f"memory {side} a block of the simulated device was overwritten (found when it was freed)"
                )


class Graph:
    """Work that was captured, to be put into its streams again and again."""

    def __init__(self, entries: list[tuple[SimStream, Work]]) -> None:
        self._entries = entries

    def launch(self) -> None:
        """Puts all work into its streams, with new events in place of those of the recording."""
        events: dict[int, SimEvent] = {}
        for stream, work in self._entries:
            event = work.event
            if event is None:
                stream.put(dataclasses.replace(work))
            elif work.kind == "record":
                events[event.number] = stream.record_event()
            else:
                stream.wait(events.get(event.number, event))


def default_seed(value: Any) -> int:
    """The seed of a number or of text from the environment."""
    try:
        return int(value)
    except ValueError:
        raise DeviceError(f"GPUNET_SIM_SEED is {value!r}, wanted an integer") from None
