"""Streams of the simulated device: work is only queued, and runs when something waits for it.

Among the streams whose next piece of work may run, one is picked at random, so that two streams are in no
order but that of their events. The picks depend on the seed only: a failure can be replayed.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gpunet import backends
from gpunet.blas import ONE_BLAS_THREAD
from gpunet.cuda_kernels.sim import library
from gpunet.errors import DeviceError, GpunetError


class Range(NamedTuple):
    """Addresses of bytes, [start, end).

    ``name`` is that of the buffer. ``communal`` is memory that all may touch at any time, by atomic
    operations.
    """

    start: int
    stop: int
    name: str = ""
    communal: bool = False


#: Queued work on one stream that makes a stream run without being waited for.
LONGEST_QUEUE: Final = 4096


@dataclass(slots=True)
class Work:
    """A piece of queued work.

    ``run`` does it; ``ranges`` tells the bytes that it reads and those that it writes. ``after`` are the
    positions of what the host had waited for when it was put into its queue, while work is recorded.
    """

    kind: str
    name: str
    run: Callable[[], None]
    ranges: Callable[[], tuple[list[Range], list[Range]]] | None = None
    event: SimEvent | None = None
    sequence: int = 0
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Record:
    """What has run: in which stream, what, and the bytes that it read and wrote.

    What is written may be read too.
    ``kind`` is launch, copy, fill, host, record or wait; ``event`` numbers the event of the last two.
    ``waits`` are positions of records that had to run before: that of the event that is waited for, and what
    the host had waited for when it issued the work.
    """

    stream: int
    kind: str
    name: str
    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    event: int | None
    waits: tuple[int, ...] = ()


class Recording:
    """What runs on a device from some point on, and what the host knows of it.

    The host counts as one: what any of its threads has waited for comes before all that is issued later.
    """

    def __init__(self) -> None:
        self.work: list[Record] = []
        #: The last position of each stream, of what has run and of what the host has waited for. The second
        #: is replaced and never changed: threads that issue work read it while others wait.
        self.last: dict[int, int] = {}
        self.known: dict[int, int] = {}

    def add(self, stream: SimStream, work: Work) -> None:
        """Notes work that is about to run."""
        reads, writes = work.ranges() if work.ranges is not None else ([], [])
        event, position = work.event, len(self.work)
        waits = work.after
        if event is not None and work.kind == "record":
            event.recorded = (self, position)
        elif event is not None and event.recorded is not None and event.recorded[0] is self:
            waits = (*waits, event.recorded[1])
        self.work.append(
            Record(
                stream.number,
                work.kind,
                work.name,
                tuple(reads),
                tuple(writes),
                None if event is None else event.number,
                waits,
            )
        )
        self.last[stream.number] = position

    def host_waited(self, position: int | None) -> None:
        """The host has waited for a piece of work, and so for all before it in its stream.

        Called with the lock of the library that the wait was under: threads that wait for the same stream
        would else undo what others have noted, and work that others put there and run would pass for waited
        for.
        """
        if position is not None:
            stream = self.work[position].stream
            self.known = {**self.known, stream: max(position, self.known.get(stream, -1))}


class SimEvent(backends.Event):
    """A point in a stream."""

    def __init__(self, executor: Executor, number: int) -> None:
        self.executor = executor
        self.number = number
        self.passed = False
        #: The recording in which it passed, and where.
        self.recorded: tuple[Recording, int] | None = None

    def done(self) -> bool:
        """Whether all work before has run.

        A few pieces of ready work may run first, as a GPU goes on meanwhile.
        """
        with library.LOCK:
            self.executor.progress()
            if self.passed:
                self._host_waited()
            return self.passed

    def synchronize(self) -> None:
        """Runs what is needed until the event has passed; raises the first error since the last such call."""
        with library.LOCK:
            try:
                self.executor.run_until(lambda: self.passed)
            finally:
                self._host_waited()

    def _host_waited(self) -> None:
        if self.recorded is not None:
            recording, position = self.recorded
            recording.host_waited(position)


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
        recording = executor.recording
        with executor.queues:
            work.sequence = next(executor.sequence)
            if recording is not None:
                work.after = tuple(recording.known.values())
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
        with library.LOCK:
            try:
                self.executor.run_until(lambda: not self.queue)
            finally:
                recording = self.executor.recording
                if recording is not None:
                    recording.host_waited(recording.last.get(self.number))

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
    """Runs the work of all streams of one device.

    Any thread may put work into a stream, also while another one runs work: which takes the lock of the
    library for as long as it runs, and that of the queues for each piece that it takes out of one.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sequence = itertools.count()
        self.stream_numbers = itertools.count()
        self.event_numbers = itertools.count()
        #: Held while a queue and ``busy`` change together, and for nothing that may wait.
        self.queues = threading.RLock()
        #: Streams with work, in the order in which they got it.
        self.busy: dict[SimStream, None] = {}
        #: Where all work that runs is recorded.
        self.recording: Recording | None = None
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

    def synchronize(self) -> None:
        """Runs all work; raises the first error since the last wait."""
        with library.LOCK:
            try:
                self.run_until(lambda: not self.busy)
            finally:
                if self.recording is not None:
                    for position in self.recording.last.values():
                        self.recording.host_waited(position)

    def progress(self) -> None:
        """Runs a random number of pieces of ready work, none to seven."""
        with library.LOCK:
            left = self.random.randrange(8)

            def stop() -> bool:
                nonlocal left
                left -= 1
                return left < 0 or not any(stream.ready for stream in self.working())

            self._run(stop)

    def _run(self, stop: Callable[[], bool]) -> None:
        # What runs here was asked for earlier, mostly by a net, which keeps BLAS to one thread.
        with ONE_BLAS_THREAD:
            self._run_work(stop)

    def _run_work(self, stop: Callable[[], bool]) -> None:
        runtime = library.runtime()
        if self._depth == 0:
            runtime.enter()
        self._depth += 1
        try:
            while not stop():
                if self.released:
                    self.reclaim()
                stream = self._pick()
                with self.queues:
                    work = stream.queue.popleft()
                    if not stream.queue:
                        del self.busy[stream]
                self._do(stream, work)
        finally:
            self._depth -= 1
            if self._depth == 0:
                runtime.leave()

    def working(self) -> list[SimStream]:
        """The streams that have work now; others may get some at any time."""
        with self.queues:
            return list(self.busy)

    def _pick(self) -> SimStream:
        working = self.working()
        ready = [stream for stream in working if stream.ready]
        if len(working) == len(ready) == 1:
            return ready[0]
        if not ready:
            # All wait for events of other devices.
            for stream in working:
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
        if self.recording is not None:
            self.recording.add(stream, work)
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
        oldest = min((stream.queue[0].sequence for stream in self.working()), default=None)
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
