"""Progress on the terminal: a bar where there is one, plain lines in a pipe; a table at the end."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from gpunet.training.history import Epoch, History, Step

_SECONDS_BETWEEN_UPDATES: Final = 0.1
#: The running means shown keep this share of the past at each step.
_SMOOTHING: Final = 0.9


class ConsoleReporter:
    """A line for each epoch, and, on a terminal, a bar with loss, accuracy and samples/s."""

    def __init__(self, console: Console, total_steps: int, done: int = 0) -> None:
        """Starts at ``done`` of ``total_steps`` steps."""
        self._console = console
        self._mean: tuple[float, float] | None = None
        self._samples, self._since = 0, time.perf_counter()
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]epoch {task.fields[epoch]}"),
                BarColumn(bar_width=None),
                TaskProgressColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._task = self._progress.add_task("", total=total_steps, completed=done, epoch="", numbers="")

    def __enter__(self) -> ConsoleReporter:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def step(self, step: Step, total: int, samples: int) -> None:
        """Moves the bar, a few times a second."""
        if self._progress is None:
            return
        before = self._mean or (step.loss, step.accuracy)
        loss, accuracy = (
            _SMOOTHING * old + (1 - _SMOOTHING) * new
            for old, new in zip(before, (step.loss, step.accuracy), strict=True)
        )
        self._mean = loss, accuracy
        self._samples += samples
        now = time.perf_counter()
        if now - self._since < _SECONDS_BETWEEN_UPDATES and step.step < total:
            return
        speed = self._samples / max(now - self._since, 1e-9)
        self._samples, self._since = 0, now
        self._progress.update(
            self._task,
            completed=step.step,
            epoch=step.epoch,
            numbers=f"loss {loss:.4f}  accuracy {accuracy:.1%}  {speed:,.0f} samples/s",
        )

    def epoch(self, epoch: Epoch, total: int) -> None:
        """Prints the epoch's line."""
        self._console.print(
            f"epoch {epoch.epoch}/{total}  loss {epoch.loss:.4f}  accuracy {epoch.accuracy:.2%}  "
            f"held out: loss {epoch.test_loss:.4f}  accuracy {epoch.test_accuracy:.2%}  "
            f"{epoch.samples_per_second:,.0f} samples/s",
            highlight=False,
            soft_wrap=True,
        )


def summary(history: History, test_samples: int) -> Table:
    """The best and the last epoch of a run as a table."""
    table = Table()
    for name in ("", "epoch", "loss", "accuracy", "held out: loss", "accuracy", "right"):
        table.add_column(name, justify="left" if not name else "right")
    best = max(history.epochs, key=lambda e: e.test_accuracy)
    for name, epoch in (("best", best), ("last", history.epochs[-1])):
        table.add_row(
            name,
            str(epoch.epoch),
            f"{epoch.loss:.4f}",
            f"{epoch.accuracy:.2%}",
            f"{epoch.test_loss:.4f}",
            f"{epoch.test_accuracy:.2%}",
            f"{round(epoch.test_accuracy * test_samples)} of {test_samples}",
        )
    return table
