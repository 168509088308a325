"""Device memory that is kept for reuse and never handed out while work on any stream still uses it.

Freeing a block on the host says nothing about the device: kernels that use it may be waiting in several
queues. A block therefore knows the streams it is used on; when it is given back an event is recorded on
each. It is handed out again when its events are done, but for that of the stream that it is for: whatever
comes next there runs later anyway. The pool never waits, except before it gives up.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from gpunet.backends import Event, Memory, Stream
from gpunet.devices import Device
from gpunet.errors import DeviceError

#: Smallest block; the runtime's promise of alignment is half of it.
SMALLEST: Final = 512
#: Blocks that the message about missing memory lists.
LISTED: Final = 8


def rounded(nbytes: int) -> int:
    """Size of the block for ``nbytes``: at most a sixteenth more, so that close sizes share blocks."""
    step = max(SMALLEST, 1 << max(nbytes.bit_length() - 5, 0))
    return max(-(-nbytes // step), 1) * step


class PooledMemory(Memory):
    """A block of a pool, used on the stream that it was made for and on those that were noted since."""

    __slots__ = ("__weakref__", "streams")

    def __init__(self, pointer: int, nbytes: int, streams: set[Stream], release: Callable[[], None]) -> None:
        super().__init__(pointer, nbytes, release)
        self.streams = streams

    def used_on(self, stream: Stream) -> None:
        """Notes that work on ``stream`` uses the block."""
        self.streams.add(stream)


@dataclass
class _Block:
    pointer: int
    size: int
    streams: set[Stream]
    events: dict[Stream, Event] = field(default_factory=dict)

    def ready_for(self, stream: Stream) -> bool:
        """Whether what ``stream`` does from now on comes after all earlier uses."""
        self.events = {s: event for s, event in self.events.items() if s is stream or not event.done()}
        return self.events.keys() <= {stream}


class Pool:
    """Blocks of one device.

    Args:
        device: for messages.
        allocate: makes a block of so many bytes, aligned to 256 or better; ``None`` if there is no memory.
        free: gives the block at an address back to the device.
        info: (bytes free, bytes in all) on the device.
    """

    def __init__(
        self,
        device: Device,
        allocate: Callable[[int], int | None],
        free: Callable[[int], None],
        info: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self._device = device
        self._make = allocate
        self._unmake = free
        self._info = info
        self._lock = threading.Lock()
        # Blocks come back when Python drops the last reference, which can be in the middle of anything, of
        # a method below too: they are only put on this queue then.
        self._returned: deque[_Block] = deque()
        self._free: dict[int, list[_Block]] = {}
        self._live: weakref.WeakSet[PooledMemory] = weakref.WeakSet()
        #: Bytes in blocks that are kept for reuse.
        self.cached = 0

    def allocate(self, nbytes: int, stream: Stream) -> Memory:
        """Uninitialised memory for use on ``stream``.

        Raises :class:`DeviceError` with the largest live blocks if there is none even with emptied caches.
        """
        size = rounded(nbytes)
        with self._lock:
            self._collect()
            pointer = self._reuse(size, stream)
            if pointer is None:
                pointer = self._make(size)
        if pointer is None:
            # Programs and what is bound in them refer to each other: only the collector finds those unused.
            # Not under the lock, since it runs any code.
            gc.collect()
            with self._lock:
                self._collect()
                self._empty()
                pointer = self._make(size)
        if pointer is None:
            raise DeviceError(exhausted(self._device, nbytes, *self._info(), self._live))
        streams = {stream}
        release = partial(self._returned.append, _Block(pointer, size, streams))
        memory = PooledMemory(pointer, nbytes, streams, release)
        self._live.add(memory)
        return memory

    def empty(self) -> int:
        """Gives all memory that is kept for reuse back to the device, after waiting for the work that uses
        it; returns the number of bytes.
        """
        with self._lock:
            self._collect()
            return self._empty()

    def largest(self, count: int = LISTED) -> list[tuple[str, int]]:
        """(name, bytes) of the largest live blocks; blobs that were made in a block name it."""
        return _largest(self._live, count)

    def _collect(self) -> None:
        """Takes in the blocks that came back."""
        later = []
        while self._returned:
            block = self._returned.popleft()
            if any(stream.capturing for stream in block.streams):
                # An event recorded now would become a node of the graph and could not be asked.
                later.append(block)
                continue
            block.events = {stream: stream.record() for stream in block.streams}
            block.streams.clear()  # they may end before the block does
            self._free.setdefault(block.size, []).append(block)
            self.cached += block.size
        self._returned.extend(later)

    def _reuse(self, size: int, stream: Stream) -> int | None:
        blocks = self._free.get(size, [])
        for i in range(len(blocks) - 1, -1, -1):
            if blocks[i].ready_for(stream):
                self.cached -= size
                return blocks.pop(i).pointer
        return None

    def _empty(self) -> int:
        given_back = self.cached
        for blocks in self._free.values():
            while blocks:
                block = blocks.pop()
                self.cached -= block.size
                for event in block.events.values():
                    event.synchronize()
                self._unmake(block.pointer)
        return given_back


def _largest(live: Iterable[Memory], count: int) -> list[tuple[str, int]]:
    found = sorted(live, key=lambda memory: -memory.nbytes)
    return [(memory.name or "unnamed", memory.nbytes) for memory in found[:count]]


def exhausted(device: Device, nbytes: int, free: int, total: int, live: Collection[Memory]) -> str:
    """What to say where ``nbytes`` of ``total`` bytes are wanted and ``free`` are there."""
    blocks = ", ".join(f"{name!r} {_mebibytes(size)}" for name, size in _largest(live, LISTED))
    return (
        f"out of memory on {device}: wanted {_mebibytes(nbytes)}, {_mebibytes(free)} of {_mebibytes(total)} "
        f"are free; the largest of {len(live)} live blocks: {blocks or 'none'}"
    )


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes} bytes"
