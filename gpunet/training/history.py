"""What training measured: each step, each epoch, and a log of the steps that grows with them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, field, fields
from types import TracebackType
from typing import Any, TextIO

import numpy as np

from gpunet.errors import CheckpointError


@dataclass(frozen=True)
class Step:
    """One update.

    Attributes:
        step: its number, from 1.
        epoch: the epoch that its batch starts in, from 1.
        loss: the mean over the batch before the update.
        accuracy: the share of the batch that was right, before the update.
        learning_rate: the rate of the update.
    """

    step: int
    epoch: int
    loss: float
    accuracy: float
    learning_rate: float


@dataclass(frozen=True)
class Epoch:
    """One pass over the training data, and what the model then made of held-out data.

    Attributes:
        epoch: its number, from 1.
        loss: mean of the steps' losses.
        accuracy: mean of the steps' accuracies.
        test_loss: mean cross entropy of the held-out samples.
        test_accuracy: the share of them that was right.
        samples_per_second: training only, without the held-out samples.
    """

    epoch: int
    loss: float
    accuracy: float
    test_loss: float
    test_accuracy: float
    samples_per_second: float


@dataclass
class History:
    """All steps and epochs of a run, those before it was resumed included."""

    steps: list[Step] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)

    def steps_of(self, epoch: int) -> list[Step]:
        """The steps of one epoch, counted from 1."""
        found = []
        for step in reversed(self.steps):
            if step.epoch < epoch:
                break
            if step.epoch == epoch:
                found.append(step)
        return found[::-1]

    def to_json(self) -> dict[str, Any]:
        """Columns for a checkpoint."""
        return {
            "steps": {f.name: [getattr(s, f.name) for s in self.steps] for f in fields(Step)},
            "epochs": [asdict(e) for e in self.epochs],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> History:
        """What :meth:`to_json` gave; anything else raises :class:`CheckpointError`."""
        try:
            columns = [data["steps"][f.name] for f in fields(Step)]
            return cls(
                [Step(*row) for row in zip(*columns, strict=True)], [Epoch(**row) for row in data["epochs"]]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the history of the run is malformed ({type(error).__name__}: {error})"
            ) from None


class StepLog:
    """A CSV file with a line for each step, written as the steps happen.

    Numbers are written so that they read back as the same float32.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], steps: Iterable[Step] = ()) -> None:
        """Starts the file anew with ``steps``."""
        self._file: TextIO = open(path, "w", encoding="ascii", buffering=1, newline="\n")  # noqa: SIM115
        self._file.write(",".join(f.name for f in fields(Step)) + "\n")
        for step in steps:
            self.write(step)

    def write(self, step: Step) -> None:
        """Appends one line, which other programs can read at once."""
        number, epoch, *measured = astuple(step)
        self._file.write(f"{number},{epoch},{','.join(str(np.float32(x)) for x in measured)}\n")

    def __enter__(self) -> StepLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
