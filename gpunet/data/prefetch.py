"""Batches that threads prepare ahead, in the order of the sampler, in a queue of bounded length."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpunet.data.errors import DatasetError
from gpunet.data.sampler import Batches, Images, Labels, Plan

if TYPE_CHECKING:
    from gpunet.backends import Backend, Event
    from gpunet.workspace import Workspace


class Prefetcher:
    """Gives out the batches of a sampler, prepared by threads while earlier ones are used.

    Batches come in the sampler's order whatever the threads do, and the position of ``batches`` is always
    that behind the last batch that was given out: what was prepared and not used is prepared again after a
    restart, neither lost nor counted. Threads start with the first batch and end with :meth:`close`, or when
    this object is collected.

    Args:
        batches: the sampler; change its position only after :meth:`close`.
        threads: how many prepare batches; 0 prepares each when it is asked for.
        depth: most batches that are ready or under way; by default two for each thread.
        device: where batches go, if that is not the host: they are put into page-locked memory then, from
            which :meth:`feed` starts copies without waiting for them.

    Raises:
        DatasetError: a number that makes no sense.
    """

    def __init__(
        self,
        batches: Batches,
        threads: int = 1,
        *,
        depth: int | None = None,
        device: Backend | None = None,
    ) -> None:
        depth = 2 * threads if depth is None else depth
        if threads < 0 or depth < min(threads, 1):
            raise DatasetError(
                f"Prefetcher: {threads} threads and {depth} batches ahead, wanted 0 threads or more, and at "
                "least one batch"
            )
        self.batches = batches
        self._threads, self._depth, self._device = threads, depth, device
        self._line: _Line | None = None
        self._given: _Slot | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    def next_batch(self) -> tuple[Images, Labels]:
        """The next images [B, C, H, W] and labels [B]; they are valid until the next call.

        Raises:
            DatasetError: the batch could not be prepared; the message has its number. The position is still
                in front of it.
        """
        if not self._threads:
            return self.batches.next_batch()
        if self._line is None:
            self._line = _Line(self.batches, self._threads, self._depth, self._device)
            self._end = weakref.finalize(self, self._line.stop)
        if self._given is not None:
            self._line.give_back(self._given)
            self._given = None
        slot = self._line.take()
        if slot.error is not None or slot.plan is None:
            self.close()
            raise DatasetError(
                f"{_name(slot.plan, self.batches)} could not be prepared: {type(slot.error).__name__}: "
                f"{slot.error}"
            ) from slot.error
        self.batches.go_behind(slot.plan)
        self._given = slot
        return slot.arrays[0], slot.arrays[1]

    def feed(self, workspace: Workspace, name: str, value: npt.NDArray[Any]) -> None:
        """Feeds a part of the batch that was given out last, by the shortest way to where it goes."""
        if self._given is None or self._device is None:
            workspace.feed(name, value)
        else:
            self._given.events.append(workspace.feed_to(self._device, name, value))

    def close(self) -> None:
        """Ends the threads and drops what they prepared; a later batch starts them again, at the position of
        ``batches``.
        """
        if self._end is not None and self._line is not None:
            self._end.detach()
            self._line.stop()
            self._line.join()
        self._line = self._given = self._end = None


class _Slot:
    """Room for one batch."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.arrays: Sequence[npt.NDArray[Any]] = ()
        self.error: BaseException | None = None
        self.done = False
        #: Behind the copies from here to the device.
        self.events: list[Event] = []
        self._memory: list[npt.NDArray[np.uint8]] = []

    def fill(self, arrays: Sequence[npt.NDArray[Any]], device: Backend | None) -> None:
        """Takes arrays, in page-locked memory of its own where there is a device."""
        for event in self.events:
            event.synchronize()
        self.events.clear()
        if device is None:
            self.arrays = arrays
            return
        kept = []
        for i, array in enumerate(arrays):
            if len(self._memory) <= i:
                self._memory.append(device.pinned(array.nbytes))
            elif self._memory[i].nbytes < array.nbytes:
                self._memory[i] = device.pinned(array.nbytes)
            own = self._memory[i][: array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(own, array)
            kept.append(own)
        self.arrays = kept


class _Line:
    """The queue and its threads, which hold nothing of the :class:`Prefetcher`."""

    def __init__(self, batches: Batches, threads: int, depth: int, device: Backend | None) -> None:
        # Its position runs ahead of that of the sampler.
        self._front = copy.copy(batches)
        self._device = device
        self._changed = threading.Condition()
        self._ordered: deque[_Slot] = deque()
        # One more than wait in the queue: the one that is in use.
        self._free = [_Slot() for _ in range(depth + 1)]
        self._depth = depth
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"gpunet prefetch {i}", daemon=True)
            for i in range(threads)
        ]
        for number, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError as error:
                del self._threads[number:]
                self.stop()
                raise DatasetError(
                    f"Prefetcher: {number} of {threads} threads could be started ({error}), wanted fewer"
                ) from None

    def take(self) -> _Slot:
        """The next batch, once it is there."""
        with self._changed:
            self._changed.wait_for(lambda: self._ordered and self._ordered[0].done)
            slot = self._ordered.popleft()
            self._changed.notify_all()
            return slot

    def give_back(self, slot: _Slot) -> None:
        """Lets a slot be filled again."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def stop(self) -> None:
        """Tells the threads to end after what they are at."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def join(self) -> None:
        """Waits for the threads."""
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (slot := self._next()) is not None:
            try:
                if slot.error is None and slot.plan is not None:
                    slot.fill(self._front.make(slot.plan), self._device)
            except BaseException as error:
                slot.error = error
            with self._changed:
                slot.done = True
                # Nothing behind a batch that cannot be made is of use.
                self._stopped = self._stopped or slot.error is not None
                self._changed.notify_all()

    def _next(self) -> _Slot | None:
        """A slot in line, with the plan of its batch; ``None`` at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or (self._free and len(self._ordered) < self._depth))
            if self._stopped:
                return None
            slot = self._free.pop()
            slot.plan, slot.error, slot.done = None, None, False
            self._ordered.append(slot)
            try:
                slot.plan = self._front.plan()
            except BaseException as error:
                slot.error = error
            return slot


def _name(plan: Plan | None, batches: Batches) -> str:
    """What messages call a batch: its number in its epoch, both from 1."""
    epoch, position = (batches.epoch, batches.position) if plan is None else plan.begin
    return f"batch {position // batches.batch_size + 1} of epoch {epoch + 1}"
