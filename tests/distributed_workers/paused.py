"""A command of gpunet of which one rank waits behind a step: `paused RANK STEP COMMAND…`.

It says its process id then, and goes on when it is asked to end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from gpunet.cli import main
from gpunet.discovery import discover
from gpunet.training import Trainer


def wait() -> None:
    """Until a signal has come: the trainer's handlers are taken back then."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    os.write(1, f"rank {discover().rank} waits, pid {os.getpid()}\n".encode())
    while handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]:
        time.sleep(0.01)


def pause(rank: int, at: int) -> None:
    """Makes that rank wait behind that step."""
    make_step = Trainer.make_step

    def make_step_and_wait(trainer: Trainer) -> Any:
        found = make_step(trainer)
        if discover().rank == rank and found[0].step == at:
            wait()
        return found

    Trainer.make_step = make_step_and_wait  # type: ignore[method-assign]


pause(int(sys.argv[1]), int(sys.argv[2]))
main(sys.argv[3:])
