"""Times on a GPU, taken by the GPU itself: events that are put between the work of a stream."""

from __future__ import annotations

import time

from gpunet.backends import Stream
from gpunet.cuda_kernels.cuda_backend import CudaBackend, CudaStream
from gpunet.errors import DeviceError


class EventClock:
    """Marks on the streams of one GPU, and when the GPU came to them.

    Between two marks around one kernel also lies the time that the host needs to launch it where the stream
    has run dry, some microseconds.
    """

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._runtime = backend.cuda.runtime
        self._marks: list[int] = []
        backend.stream.synchronize()
        self._origin = self.mark(backend.stream)
        self._runtime.eventSynchronize(self._origin)
        self._host = time.perf_counter()

    def mark(self, stream: Stream) -> int:
        """Puts a mark on a stream, behind the work that it has got; returns its number."""
        if not isinstance(stream, CudaStream):
            raise DeviceError(f"cannot time {stream!r}, wanted a stream of {self._backend.device}")
        self._backend.activate()
        event = int(self._runtime.eventCreate())
        self._marks.append(event)
        self._runtime.eventRecord(event, stream.pointer)
        return event

    def seconds(self, mark: int) -> float:
        """When the GPU reached the mark, in seconds of ``time.perf_counter``; waits until it has."""
        with self._backend.cuda.located("waiting for an event"):
            self._runtime.eventSynchronize(mark)
            return self._host + float(self._runtime.eventElapsedTime(self._origin, mark)) / 1000

    def forget(self) -> None:
        """Gives back all marks but the origin."""
        for mark in self._marks[1:]:
            self._runtime.eventDestroy(mark)
        del self._marks[1:]
