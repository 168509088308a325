"""Engines: how the bound steps of a segment are run.

``simple`` runs them one after another. ``async_scheduling`` runs the lanes of the schedule side by side: each
CPU lane on a thread of a pool (NumPy frees the interpreter lock in its loops), each GPU lane on a stream,
with waits only where an edge crosses lanes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from gpunet.backends import Event, Stream, backend
from gpunet.cores import BUSY_LANES, in_each_fork
from gpunet.crew import CREW, QUICK_TURNS
from gpunet.graph import Node
from gpunet.schedule import Lane

#: Seconds after which a thread that waits for others looks whether they are done: a second interrupt may come
#: while the first one leaves an event of Python's library, which then wakes nobody.
_LOOK: Final = 0.1


@dataclass(slots=True)
class Step:
    """One bound node: ``function(*arguments)`` does its work, or puts it on the stream of its lane.

    Attributes:
        waits: positions of the steps of other lanes that must have run before.
        stream: the stream of a GPU lane; ``None`` for work of the host.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    node: Node
    lane: Lane
    waits: tuple[int, ...] = ()
    stream: Stream | None = None


class StepFailed(Exception):  # noqa: N818 (it carries the error of a step to the program, users never see it)
    """A step raised; ``error`` is what, ``node`` where: ``None`` for an interrupt between two steps."""

    def __init__(self, error: BaseException, node: Node | None) -> None:
        super().__init__(str(error))
        self.error = error
        self.node = node


def run_simple(steps: Sequence[Step]) -> Callable[[], None]:
    """Runs the steps one after another; raises :class:`StepFailed`."""
    calls = [(step.function, step.arguments) for step in steps]

    def run() -> None:
        position = 0
        try:
            for position, (function, arguments) in enumerate(calls):  # noqa: B007 (the handler does)
                function(*arguments)
        except Exception as error:
            raise StepFailed(error, steps[position].node) from error

    return run


class _Run:
    """What the lanes of one run share."""

    def __init__(self, signalled: frozenset[int]) -> None:
        self.done = {position: threading.Event() for position in signalled}
        self.events: dict[int, Event] = {}
        self.failure: StepFailed | None = None
        self._lock = threading.Lock()

    def fail(self, error: BaseException, node: Node | None) -> None:
        """Notes an error, of which the first one wins; nobody waits for a step from now on."""
        if isinstance(error.__context__, KeyboardInterrupt):
            # It has left something in the middle.
            error = error.__context__
        with self._lock:
            if self.failure is None:
                self.failure = StepFailed(error, node)
        for event in self.done.values():
            event.set()


def run_lanes(steps: Sequence[Step]) -> Callable[[], None]:
    """Runs the lanes of the steps side by side; raises the :class:`StepFailed` that came first.

    The calling thread puts all GPU work on its streams, in the order of the steps, and runs the first CPU
    lane where there is no GPU work. After an error the other lanes skip what is left, and the run ends when
    all of them have: also after an interrupt, since what still runs writes to blobs.
    """
    signalled = frozenset(w for step in steps for w in step.waits)
    queues: dict[Lane | None, list[tuple[int, Step]]] = {}
    for position, step in enumerate(steps):
        queues.setdefault(None if step.stream is not None else step.lane, []).append((position, step))
    own = None if None in queues else next(iter(queues), None)
    mine = queues.pop(own, [])
    others = list(queues.values())

    def work(run: _Run, items: Sequence[tuple[int, Step]]) -> None:
        with np.errstate(all="ignore"), BUSY_LANES.working():
            for position, step in items:
                try:
                    for earlier in step.waits:
                        _wait(run, steps[earlier], earlier, step)
                    if run.failure is None:
                        step.function(*step.arguments)
                        if position in signalled and step.stream is not None:
                            run.events[position] = step.stream.record()
                except BaseException as error:  # the calling thread raises it
                    run.fail(error, step.node)
                if position in signalled:
                    run.done[position].set()
        CREW.look()

    def work_beside(run: _Run, items: Sequence[tuple[int, Step]]) -> None:
        try:
            work(run, items)
        except BaseException as error:  # the thread goes on with other runs
            run.fail(error, None)

    forks = _side_streams(steps)

    def run() -> None:
        state = _Run(signalled)
        jobs: list[threading.Event] = []
        try:
            # Side streams begin after what the main stream of their device was given before; it waits for
            # them.
            for main, side in forks:
                side.wait(main.record())
            for items in others:
                jobs.append(POOL.start(partial(work_beside, state, items)))
            work(state, mine)
        except BaseException as error:
            state.fail(error, None)
        for job in jobs:
            _finish(job, state)
        for main, side in forks:
            main.wait(side.record())
        if state.failure is not None:
            raise state.failure from state.failure.error

    def run_several() -> None:
        with QUICK_TURNS:
            run()

    return run_several if others else run


def _finish(job: threading.Event, run: _Run) -> None:
    """Waits for the end of a lane, in spite of interrupts."""
    while not job.is_set():
        try:
            while not job.is_set() and CREW.help():
                pass
            job.wait(_LOOK)
        except BaseException as error:
            run.fail(error, None)


def _side_streams(steps: Sequence[Step]) -> list[tuple[Stream, Stream]]:
    """For each stream of the steps that is not the main one of its device: that one, and the stream."""
    used = {id(s.stream): (backend(s.lane.device).stream, s.stream) for s in steps if s.stream is not None}
    return [(main, side) for main, side in used.values() if main is not side]


def _wait(run: _Run, earlier: Step, position: int, step: Step) -> None:
    done = run.done[position]
    if not done.is_set():
        with BUSY_LANES.waiting():
            while _may_help(step) and not done.is_set() and CREW.help():
                pass
            while not done.is_set():
                done.wait(_LOOK)
    event = run.events.get(position)
    if event is None:
        return
    if step.stream is not None and step.lane.device == earlier.lane.device:
        step.stream.wait(event)
    else:
        event.synchronize()


def _may_help(step: Step) -> bool:
    """Whether a lane may be late for a step by a piece of a kernel.

    Not for the work of a GPU, nor for collectives, for which other ranks wait.
    """
    return step.stream is None and (step.node.op is None or not step.node.op.schema.chain)


class ThreadPool:
    """Threads that wait for work; as many as were ever busy at once. They end with the process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begins with no threads: those of a process are not in its fork."""
        self._idle: list[queue.SimpleQueue[tuple[Callable[[], None], threading.Event]]] = []
        self._lock = threading.Lock()

    def start(self, function: Callable[[], None]) -> threading.Event:
        """Runs ``function`` on a thread of the pool; the event is set when it has returned."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else self._new_thread()
        done = threading.Event()
        inbox.put((function, done))
        return done

    def _new_thread(self) -> queue.SimpleQueue[tuple[Callable[[], None], threading.Event]]:
        inbox: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()

        def loop() -> None:
            while True:
                function, done = inbox.get()
                try:
                    function()
                finally:
                    with self._lock:
                        self._idle.append(inbox)
                    done.set()

        threading.Thread(target=loop, name="gpunet lane", daemon=True).start()
        return inbox


#: The pool of all workspaces.
POOL: Final = ThreadPool()
in_each_fork(POOL.forget)
