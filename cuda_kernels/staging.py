"""Pinned host memory that copies between ordinary arrays and a device go through, in pieces."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpunet.backends import Event, Stream

#: Bytes of one piece, and how many there are: one is filled while others travel.
PIECE: Final = 4 << 20
PIECES: Final = 4


class _Piece:
    __slots__ = ("array", "event", "pointer")

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        self.array = array
        self.pointer = int(array.ctypes.data)
        #: Behind the last copy from here to the device.
        self.event: Event | None = None


class Staging:
    """A ring of pinned pieces, shared by all streams and threads.

    Args:
        pinned: makes a pinned array of so many bytes.
        copy: ``copy(target, source, nbytes, stream)`` puts a copy between two addresses on a stream.
        piece, pieces: bytes of a piece and number of pieces.
    """

    def __init__(
        self,
        pinned: Callable[[int], npt.NDArray[np.uint8]],
        copy: Callable[[int, int, int, Stream], None],
        piece: int = PIECE,
        pieces: int = PIECES,
    ) -> None:
        self._pinned = pinned
        self._copy = copy
        self._size = piece
        # None stands for a piece that was not needed so far.
        self._pieces: queue.Queue[_Piece | None] = queue.Queue()
        for _ in range(pieces):
            self._pieces.put(None)

    def to_device(self, pointer: int, source: npt.NDArray[Any], stream: Stream) -> None:
        """Copies a C-contiguous array to an address, in stream order; ``source`` may change once this
        returns.
        """
        data = _bytes(source)
        for begin in range(0, len(data), self._size):
            part = data[begin : begin + self._size]
            piece = self._prepared(self._pieces.get())
            try:
                piece.array[: len(part)] = part
                self._copy(pointer + begin, piece.pointer, len(part), stream)
                piece.event = stream.record()
            finally:
                self._pieces.put(piece)

    def to_host(self, target: npt.NDArray[Any], pointer: int, stream: Stream) -> None:
        """Copies from an address to a C-contiguous array, in stream order, and waits."""
        data = _bytes(target)
        under_way: deque[tuple[_Piece, Event, npt.NDArray[np.uint8]]] = deque()

        def finish() -> None:
            piece, event, part = under_way.popleft()
            try:
                event.synchronize()
                part[:] = piece.array[: len(part)]
            finally:
                self._pieces.put(piece)

        try:
            for begin in range(0, len(data), self._size):
                part = data[begin : begin + self._size]
                # Never waits for a piece while holding one: two threads would wait for each other.
                while under_way and (len(under_way) > 1 or self._pieces.empty()):
                    finish()
                try:
                    piece = self._prepared(self._pieces.get(block=not under_way))
                except queue.Empty:
                    finish()
                    piece = self._prepared(self._pieces.get())
                try:
                    self._copy(piece.pointer, pointer + begin, len(part), stream)
                    under_way.append((piece, stream.record(), part))
                except BaseException:
                    self._pieces.put(piece)
                    raise
            while under_way:
                finish()
        finally:
            for piece, event, _ in under_way:
                piece.event = event
                self._pieces.put(piece)

    def _prepared(self, piece: _Piece | None) -> _Piece:
        """The piece, with nothing that still reads it."""
        try:
            if piece is None:
                piece = _Piece(self._pinned(self._size))
            if piece.event is not None:
                piece.event.synchronize()
                piece.event = None
        except BaseException:
            self._pieces.put(piece)
            raise
        return piece


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of a C-contiguous array, not a copy."""
    return array.reshape(-1).view(np.uint8)
