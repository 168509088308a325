"""Scratch memory of streams, which libraries take for work that runs one after another on its stream."""

from __future__ import annotations

import weakref

from gpunet.backends import Backend, Memory, Stream


class Workspaces:
    """One block of memory for each stream, shared by all launches that were prepared for the stream.

    A block lives as long as something that uses it: launches must keep what :meth:`of` gives.

    Args:
        name: of the blocks, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # Blocks know their streams: kept here, they would keep each other alive for ever.
        self._found: weakref.WeakKeyDictionary[Stream, weakref.ref[Memory]] = weakref.WeakKeyDictionary()

    def of(self, backend: Backend, stream: Stream, nbytes: int) -> Memory:
        """The block of a stream, of at least so many bytes; a larger one where one wants more.

        Raises :class:`DeviceError` if there is no memory.
        """
        known = self._found.get(stream)
        memory = None if known is None else known()
        if memory is None or memory.nbytes < nbytes:
            memory = backend.allocate(nbytes, stream)
            memory.name = self._name
            # Graphs are captured from side streams and replayed on the main one.
            memory.used_on(backend.stream)
            self._found[stream] = weakref.ref(memory)
        return memory
