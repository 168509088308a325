"""How training ends early."""

from __future__ import annotations

import signal

from gpunet.errors import GpunetError


class TrainingError(GpunetError, ValueError):
    """Training cannot go on, or cannot start as asked: the loss is not finite, a setting makes no sense."""


class TrainingInterruptedError(GpunetError):
    """A signal ended training between two steps; everything is saved by then.

    Attributes:
        signal: its number.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = signal.Signals(number)

    @property
    def exit_code(self) -> int:
        """The status that shells give a program which this signal ended: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signal
