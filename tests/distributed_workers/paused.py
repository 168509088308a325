"""A command of gpunet of which one rank waits in the middle: `paused RANK PLACE STEP COMMAND…`.

Places: `step`, behind that step; `save`, before the checkpoint of that step, when the parts of the ranks are
written; `write`, in the middle of the file of that checkpoint. It says its process id then, and goes on when
it is asked to end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from gpunet.cli import main
from gpunet.discovery import discover
from gpunet.training import CheckpointFolder, Trainer, checkpoint


def wait() -> None:
    """Until a signal has come: the trainer's handlers are taken back then."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    os.write(1, f"rank {discover().rank} waits, pid {os.getpid()}\n".encode())
    while handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]:
        time.sleep(0.01)


def pause(place: str, at: int) -> None:
    """Makes this process wait there."""
    make_step, save, write = Trainer.make_step, CheckpointFolder.save, checkpoint.write_records

    def make_step_and_wait(trainer: Trainer) -> Any:
        found = make_step(trainer)
        if place == "step" and found[0].step == at:
            wait()
        return found

    def wait_and_save(folder: CheckpointFolder, state: Any, *more: Any) -> Any:
        if place == "save" and state.step == at:
            wait()
        return save(folder, state, *more)

    def write_half(path: Any, metadata: Any, blobs: Iterable[tuple[str, Any]]) -> None:
        def some() -> Iterator[tuple[str, Any]]:
            for number, blob in enumerate(blobs):
                if place == "write" and number == 2 and metadata.get("step") == at:
                    wait()
                yield blob

        write(path, metadata, some())

    Trainer.make_step = make_step_and_wait  # type: ignore[method-assign]
    CheckpointFolder.save = wait_and_save  # type: ignore[method-assign]
    checkpoint.write_records = write_half


if discover().rank == int(sys.argv[1]):
    pause(sys.argv[2], int(sys.argv[3]))
main(sys.argv[4:])
