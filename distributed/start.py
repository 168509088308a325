"""A limit of time for the start of a job, in which ranks wait for each other inside of MPI.

There nothing of Python runs, so a small process beside the rank keeps the time: this file, run as a script.
It reads its settings, one line of JSON, from standard input (``seconds``, ``pid`` of the rank, ``who`` it
is), and ends when that is closed, or after the time, with the rank.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

#: How MPICH and Open MPI name such files.
_OF_MPI: Final = ("mpich_shm_", "sm_segment.", "vader_segment.")


@contextmanager
def limited(seconds: float, who: str) -> Iterator[None]:
    """Ends this process, with a message, if what is done here takes more than so many seconds.

    Args:
        seconds: infinite for no limit.
        who: what the message calls this process.
    """
    if not math.isfinite(seconds):
        yield
        return
    command = [sys.executable, "-I", "-S", __file__]
    watch = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
    try:
        if watch.stdin is not None:
            settings = {"seconds": seconds, "pid": os.getpid(), "who": who}
            watch.stdin.write(json.dumps(settings).encode() + b"\n")
        yield
    finally:
        watch.kill()
        if watch.stdin is not None:
            watch.stdin.close()
        watch.wait()


def shared_memory(pid: int) -> list[str]:
    """Files of the memory that a process shares with others of its host by its MPI library."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []
    names = {Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/" in line}
    return sorted(str(path) for path in names if path.name.startswith(_OF_MPI))


def main() -> None:
    """Watches the process of the settings on standard input."""
    with open(0, "rb", buffering=0, closefd=False) as rank:
        settings = json.loads(rank.readline())
        if select.select([rank], [], [], settings["seconds"])[0]:
            return
    with suppress(OSError):
        sys.stderr.write(
            f"gpunet: {settings['who']} has waited {settings['seconds']:g} seconds for the other ranks to "
            "start; GPUNET_COLLECTIVE_TIMEOUT sets how long to wait\n"
        )
        sys.stderr.flush()
    shared = shared_memory(settings["pid"])
    with suppress(OSError):
        os.kill(settings["pid"], signal.SIGKILL)
    for path in shared:
        with suppress(OSError):
            os.unlink(path)


if __name__ == "__main__":
    main()
