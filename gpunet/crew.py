"""The crew: threads that share the pieces of kernels.

A kernel that has cut its work into pieces runs them itself, one after the other, and whoever has nothing to
do meanwhile takes some of them: threads of the crew, while fewer lanes are at work than there are cores, and
lanes that wait for another one. Who takes which piece is settled while they run, so a kernel that began when
all cores were busy is shared as soon as one of them is not. Results do not depend on it, since pieces are the
same whoever runs them.

NumPy lets go of the interpreter lock in each call, but one that takes less time than a waiting thread takes
to wake has the lock again before that thread comes. It would wait on until it may ask for the lock, 5 ms by
default: so threads ask for it much sooner while several of them run kernels.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np

from gpunet.cores import BUSY_LANES, in_each_fork

Piece = Callable[[], Any]

#: Seconds after which a thread asks another one for the interpreter lock.
SWITCH_INTERVAL: Final = 1e-5
#: Seconds after which a thread that waits for others looks whether they are at work.
_LOOK: Final = 0.1


class QuickTurns:
    """A context, for any number of threads at once, in which threads ask for the interpreter lock soon."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = SWITCH_INTERVAL

    def forget(self) -> None:
        """Leaves it for all threads."""
        self._lock = threading.Lock()
        if self._inside:
            self._inside = 0
            sys.setswitchinterval(self._before)

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, SWITCH_INTERVAL))

    def __exit__(self, *error: object) -> None:
        with self._lock:
            # 0 in the fork of a thread that was inside.
            if self._inside == 1:
                sys.setswitchinterval(self._before)
            self._inside = max(0, self._inside - 1)


#: That of all threads: the interval is one in a process.
QUICK_TURNS: Final = QuickTurns()
in_each_fork(QUICK_TURNS.forget)


class _Job:
    """The pieces of one kernel.

    Attributes:
        pieces: those that nobody has taken. The thread of the kernel takes them from the left and others from
            the right: of two kernels in a row on the same data, each thread has the same part.
        threads: how many threads may be at work, in all, where one of them runs a piece of this.
        ended: held while the thread of the kernel waits for others that run a piece.
        error: the first one of a piece.
    """

    __slots__ = ("ended", "error", "pieces", "threads")

    def __init__(self, pieces: Iterable[Piece], threads: int) -> None:
        self.pieces = deque(pieces)
        self.threads = threads
        self.ended: threading.Lock | None = None
        self.error: BaseException | None = None

    def run_rest(self) -> None:
        """Takes and runs pieces until there are none."""
        while True:
            try:
                piece = self.pieces.popleft()
            except IndexError:
                return
            self.run_piece(piece)

    def run_piece(self, piece: Piece) -> None:
        """Runs a piece and notes its error."""
        try:
            piece()
        except BaseException as error:  # raised when all pieces have ended
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Notes an error; after an interrupt nobody takes another piece."""
        if self.error is None:
            self.error = error
        if not isinstance(error, Exception):
            self.pieces.clear()


class Crew:
    """Threads that run pieces of others. They start when they are first wanted, and end with the process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begins with no threads: those of a process are not in its fork."""
        self._lock = threading.Lock()
        self._jobs: list[_Job] = []
        self._idle: list[threading.Lock] = []
        self._size = 0
        #: What those at work run a piece of. An entry is made, by one operation, before its piece is taken:
        #: no interrupt comes between the two.
        self._helping: dict[object, _Job] = {}
        self._here = threading.local()

    def run(self, pieces: Iterable[Piece], threads: int) -> None:
        """Runs all pieces and returns when they have ended; raises the first error of one of them.

        Args:
            pieces: may run at the same time and in any order.
            threads: how many threads may be at work, those of lanes of engines included.
        """
        job = _Job(pieces, threads)
        if threads < 2 or len(job.pieces) < 2 or getattr(self._here, "helps", False):
            job.run_rest()
        else:
            with QUICK_TURNS:
                self._share(job)
        if job.error is not None:
            raise job.error

    def help(self) -> bool:
        """Runs a piece of another thread; ``False`` where there is none. For threads that have to wait.

        An interrupt is raised here, and there too, since the piece has not been run to its end.
        """
        helper, helped = object(), False
        interrupt: BaseException | None = None
        try:
            helped = self._help(helper)
        except BaseException as error:
            interrupt = error
        while helper in self._helping:
            try:
                self._leave(helper, interrupt)
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
        return helped

    def _help(self, helper: object) -> bool:
        with self._lock:
            found = self._claim(helper)
        if found is None:
            return False
        job, piece = found
        try:
            piece()
        except Exception as error:  # raised there
            job.fail(error)
        return True

    def look(self) -> None:
        """Has a thread of the crew look for pieces, since a core has become free."""
        if self._jobs:
            with self._lock:
                if self._idle:
                    self._idle.pop().release()

    def _share(self, job: _Job) -> None:
        try:
            with self._lock:
                self._jobs.append(job)
                self._wake(min(len(job.pieces) - 1, self._free(job)), job.threads - 1)
            job.run_rest()
        except BaseException as error:  # an interrupt between two pieces
            job.fail(error)
        while True:
            try:
                if self._has_ended(job):
                    return
            except BaseException as error:  # what helpers run still writes to blobs
                job.fail(error)

    def _has_ended(self, job: _Job) -> bool:
        """Whether nobody runs a piece; waits for that a while. Nobody takes one from now on."""
        with self._lock:
            if job in self._jobs:
                self._jobs.remove(job)
            if job not in self._helping.values():
                return True
            ended = job.ended
            if ended is None:
                ended = threading.Lock()
                ended.acquire()
                job.ended = ended
        # A helper that is interrupted at its end may not say so.
        ended.acquire(timeout=_LOOK)
        return False

    def _wake(self, count: int, most: int) -> None:
        """Wakes so many threads, or starts them while there are fewer than ``most``; with the lock held."""
        for _ in range(count):
            if self._idle:
                self._idle.pop().release()
            elif self._size < most:
                self._size += 1
                threading.Thread(target=self._loop, name="gpunet kernel", daemon=True).start()

    def _free(self, job: _Job) -> int:
        """Cores that are left to helpers."""
        return job.threads - 1 - BUSY_LANES.others - len(self._helping)

    def _claim(self, helper: object) -> tuple[_Job, Piece] | None:
        """A piece, of a job which ``helper`` helps from now on; called with the lock held."""
        for job in self._jobs:
            if job.pieces and self._free(job) > 0:
                self._helping[helper] = job
                try:
                    return job, job.pieces.pop()
                except IndexError:
                    del self._helping[helper]
        return None

    def _leave(self, helper: object, interrupt: BaseException | None = None) -> None:
        """The piece of a helper has ended, or was interrupted."""
        with self._lock:
            if interrupt is not None:
                self._helping[helper].fail(interrupt)
            job = self._helping.pop(helper)
            if job.ended is not None and job not in self._helping.values():
                job.ended.release()

    def _loop(self) -> None:
        # The engine's setting for floating-point warnings holds in its own thread only.
        np.seterr(all="ignore")
        self._here.helps = True
        wake = threading.Lock()
        wake.acquire()
        while True:
            with self._lock:
                found = self._claim(wake)
                if found is None:
                    self._idle.append(wake)
            if found is None:
                wake.acquire()
            else:
                job, piece = found
                job.run_piece(piece)
                self._leave(wake)


#: That of all workspaces: they share the cores.
CREW: Final = Crew()
in_each_fork(CREW.forget)
