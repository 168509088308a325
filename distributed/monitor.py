"""The monitor of a job: a process beside rank 0 that sees ranks die, and knows what each was doing.

It runs as a script and imports nothing but the standard library. It reads its settings, one line of JSON,
from standard input (the arguments of :class:`Monitor`), writes the port that it listens on to standard
output, and ends when all ranks have left. Ranks send lines of JSON: what they do (``count``, ``within``,
``at``, ``now``), that they wait for too long (``late``), that they fail (``raised``) or leave (``bye``). It
answers with at most one line, ``failed``, when one of them has failed.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

#: Seconds until all ranks must have connected, and after which silence is worth a word.
_CONNECTED_IN: Final = 120.0
_SILENT_AFTER: Final = 3.0
_LONGEST_LINE: Final = 1 << 16


@dataclass
class Rank:
    """What is known of a rank."""

    connection: socket.socket
    rank: int = -1
    host: str = ""
    pid: int = 0
    count: int = 0
    within: bool = False
    at: str = "it had done nothing with the other ranks yet"
    now: str = ""
    shared: list[str] = field(default_factory=list)
    heard: float = field(default_factory=time.monotonic)
    left: bool = False
    raised: bool = False
    data: bytes = b""


class Monitor:
    """Follows the ranks of one job.

    Args:
        size: how many there are.
        host: where to listen.
        token: what ranks know.
        silence: seconds after which a rank that others wait for at the end of the job has failed.
        grace: seconds that ranks have to end by themselves after a failure, before those of this host are
            killed.
    """

    def __init__(
        self, size: int, host: str, token: str, silence: float = math.inf, grace: float = math.inf
    ) -> None:
        self.size, self.token = size, token
        self.silence, self.grace = silence, grace
        self.failed_at = math.inf
        self.ranks: dict[int, Rank] = {}
        self.connections: dict[socket.socket, Rank] = {}
        #: The first failure, in words.
        self.failed = ""
        self.server = socket.create_server((host, 0), backlog=min(size, 4096))
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.server, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server.getsockname()[1])

    def run(self) -> None:
        """Follows the ranks until all of them have gone, and removes the memory that they leave behind."""
        deadline, parent = time.monotonic() + _CONNECTED_IN, os.getppid()
        while self._connected() or (
            # Ranks are still to come, unless the one that started this is gone, too.
            len(self.ranks) < self.size and time.monotonic() < deadline and os.getppid() == parent
        ):
            for key, _ in self.selector.select(1.0):
                if key.fileobj is self.server:
                    connection, _ = self.server.accept()
                    self.connections[connection] = Rank(connection)
                    self.selector.register(connection, selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket):
                    self._read(self.connections[key.fileobj])
            self._look()
        if self.failed:
            self._clean()

    def _look(self) -> None:
        """Ends what would not end: at its end a rank waits inside of MPI for the others, with no limit."""
        now = time.monotonic()
        left = next((rank for rank in self.ranks.values() if rank.left), None)
        silent = [r for r in self._connected() if not r.left and now - r.heard > self.silence]
        if left is not None and silent:
            self._fail(
                f"{self._name(silent[0])}, {silent[0].at}, has not been heard of for "
                f"{now - silent[0].heard:.0f} seconds, and rank {left.rank} waits for it at the end of the "
                "job"
            )
        if now - self.failed_at > self.grace:
            self.grace = math.inf
            for rank in self._here():
                if rank.connection in self.connections:
                    with suppress(OSError):
                        os.kill(rank.pid, signal.SIGKILL)

    def _connected(self) -> list[Rank]:
        """The ranks that have a connection, without strangers that have said nothing."""
        return [rank for rank in self.connections.values() if rank.rank >= 0]

    def _here(self) -> list[Rank]:
        """The ranks of this host."""
        host = self.ranks[0].host if 0 in self.ranks else None
        return [rank for rank in self.ranks.values() if rank.host == host]

    def _clean(self) -> None:
        """Removes the shared memory of the ranks of this host, which MPI removes only where it ends well."""
        for path in {path for rank in self._here() for path in rank.shared}:
            with suppress(OSError):
                os.unlink(path)

    def _read(self, rank: Rank) -> None:
        try:
            more = rank.connection.recv(1 << 16)
        except OSError:
            more = b""
        rank.data += more
        *lines, rank.data = rank.data.split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict) or not self._take(rank, message):
                more = b""
        if not more or len(rank.data) > _LONGEST_LINE:
            self._gone(rank)

    def _take(self, rank: Rank, message: dict[str, Any]) -> bool:
        """Notes what a rank says; whether it may say more."""
        if rank.rank < 0:
            if not hmac.compare_digest(str(message.get("token")).encode(), self.token.encode()):
                return False
            rank.rank, rank.host, rank.pid = message["rank"], message["host"], message["pid"]
            rank.shared = [str(path) for path in message.get("shared", [])]
            self.ranks[rank.rank] = rank
            if self.failed:
                self._tell(rank)
            return True
        rank.heard = time.monotonic()
        if "count" in message:
            rank.count, rank.within, rank.at = message["count"], message["within"], message["at"]
            rank.now = str(message.get("now", ""))
        if "bye" in message:
            rank.left, rank.count, rank.within = True, message["bye"], False
        if message.get("raised"):
            rank.raised = True
            self._fail(str(message["raised"]), quiet=True)
        if "late" in message:
            self._fail(self._whom(rank, message["late"], message["seconds"]))
        for other in self.ranks.values():
            if other.left and any(r.within and r.count > other.count for r in self.ranks.values()):
                waiting = next(r for r in self.ranks.values() if r.within and r.count > other.count)
                self._fail(
                    f"{self._name(other)} has left the job, {other.at}, but rank {waiting.rank} waits for "
                    f"it, {waiting.at}"
                )
        return True

    def _gone(self, rank: Rank) -> None:
        self.selector.unregister(rank.connection)
        rank.connection.close()
        del self.connections[rank.connection]
        if rank.rank >= 0 and not rank.left and not rank.raised:
            self._fail(f"{self._name(rank)} has ended without a word (killed, or crashed), {rank.at}")

    def _whom(self, rank: Rank, count: int, seconds: float) -> str:
        """Whom a rank waits for, in words."""
        missing = []
        now = time.monotonic()
        for number in range(self.size):
            other = self.ranks.get(number)
            if other is None:
                missing.append(f"rank {number}, which is unknown to the monitor")
            elif other.count < count or not other.within:
                silent = now - other.heard
                quiet = f", not heard of for {silent:.0f} seconds" if silent > _SILENT_AFTER else ""
                now_at = f", now {other.now}" if other.now and not quiet else ""
                missing.append(f"{self._name(other)}, {other.at}{now_at}{quiet}")
        if not missing:
            others = [f"{self._name(r)}, {r.at}" for r in self.ranks.values() if r is not rank]
            return f"all ranks are in operation {count}, but it does not end: {'; '.join(others)}"
        return f"rank {rank.rank}, {rank.at}, has waited {seconds:.0f} seconds for {'; '.join(missing)}"

    def _name(self, rank: Rank) -> str:
        return f"rank {rank.rank} of {self.size} on host {rank.host} (pid {rank.pid})"

    def _fail(self, text: str, *, quiet: bool = False) -> None:
        """Tells everyone of the first failure."""
        if self.failed:
            return
        self.failed, self.failed_at = text, time.monotonic()
        if not quiet:
            with suppress(OSError):
                sys.stderr.write(f"gpunet: {text}\n")
                sys.stderr.flush()
        for rank in self.ranks.values():
            self._tell(rank)

    def _tell(self, rank: Rank) -> None:
        with suppress(OSError):
            rank.connection.sendall(json.dumps({"failed": self.failed}).encode() + b"\n")


def main() -> None:
    """Runs the monitor of the settings on standard input."""
    settings = json.loads(sys.stdin.readline())
    monitor = Monitor(**settings)
    sys.stdout.write(f"{monitor.port}\n")
    sys.stdout.close()
    monitor.run()


if __name__ == "__main__":
    main()
