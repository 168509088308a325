"""Signals that ask a program to end, held until a good moment."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final

#: SIGUSR1 is what batch systems can be asked to send ahead of the end, and what Open MPI's mpirun passes on.
_SIGNALS: Final = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)
)


class Interrupts:
    """Keeps the first SIGINT (Ctrl-C), SIGTERM or SIGUSR1 in :attr:`caught`; a second one acts as without
    this.

    Signals that are ignored stay so (SIGINT of a job that a shell has put in the background). Python handles
    signals in the main thread only; in another one this does nothing.
    """

    def __init__(self) -> None:
        #: Number of the signal that came, or ``None``.
        self.caught: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._catch) for number in heeded}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.caught = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # A handler that was not set from Python reads as None and cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
