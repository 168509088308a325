"""What happens when a rank fails: the others learn of it, say so, and end.

Three things watch a job. Every operation that ranks do together has a deadline
(``GPUNET_COLLECTIVE_TIMEOUT``). A monitor (:mod:`gpunet.distributed.monitor`), a small process beside rank 0
that each rank keeps a connection to, sees at once when a rank dies or leaves, and knows what each was doing.
And a rank that ends with an exception says so. Whoever notices first writes the message; then ``MPI_Abort``
ends all processes, unless ``GPUNET_ABORT=0``: then the error is raised on each rank.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

from gpunet.discovery import Place, discover
from gpunet.distributed import whereabouts
from gpunet.distributed.start import shared_memory
from gpunet.errors import ArgumentError, GpunetError

TIMEOUT_VARIABLE: Final = "GPUNET_COLLECTIVE_TIMEOUT"
ABORT_VARIABLE: Final = "GPUNET_ABORT"
MONITOR_VARIABLE: Final = "GPUNET_MONITOR"
_DEFAULT_TIMEOUT: Final = 30.0
#: Part of the timeout after which a rank gives up, so that the job has ended when the timeout is over.
_WAITS: Final = 0.9
#: Seconds between two reports to the monitor, and until one without news; at most between the news of a
#: failure and the end of a rank that is not waiting for others; and until a process that cannot be aborted is
#: ended the hard way.
_BEAT: Final = 0.25
_SILENCE: Final = 1.0
_GRACE: Final = 3.0
_HARD: Final = 5.0


class CollectiveError(GpunetError, RuntimeError):
    """Ranks do not agree on what they do together, or one of them did not come."""


class PeerFailed(CollectiveError):  # noqa: N818 (it says what has happened)
    """Another rank has failed; the message says which, where, and in what."""


def timeout() -> float:
    """Seconds that a failure may go unnoticed (``GPUNET_COLLECTIVE_TIMEOUT``, by default 30); infinite for 0.

    Raises :class:`ArgumentError` if the variable holds no number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    try:
        seconds = float(text) if text else _DEFAULT_TIMEOUT
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ArgumentError(f"{TIMEOUT_VARIABLE} is {text!r}, wanted a number of seconds, or 0 for no limit")
    return seconds or math.inf


def patience() -> float:
    """Seconds to wait for other ranks before giving up."""
    return timeout() * _WAITS


def aborts() -> bool:
    """Whether a failure ends all processes (``GPUNET_ABORT`` is not 0)."""
    return os.environ.get(ABORT_VARIABLE, "1") != "0"


@dataclass
class _State:
    """What this process does, and what it knows of the others."""

    place: Place = field(default_factory=discover)
    #: Operations with other ranks so far, whether it is in one now, and which.
    count: int = 0
    within: bool = False
    what: str = ""
    label: str = ""
    operator: str = ""
    step: int = -1
    #: The step that the monitor was told of last.
    told_step: int = -1
    #: What another rank, or the monitor, said of a failure.
    news: str = ""
    link: socket.socket | None = None
    abort: Callable[[int], None] | None = None
    ended: bool = False


_state = _State()
_lock = threading.Lock()


def who() -> str:
    """``rank 2 of 4 on host node7 (pid 123)``: how messages name this process."""
    place = _state.place
    return f"rank {place.rank} of {place.size} on host {place.host} (pid {os.getpid()})"


def at() -> str:
    """What this process does: operator, operation and step."""
    state = _state
    if not state.what:
        return "it had done nothing with the other ranks yet"
    step = f", step {state.step}" if state.step >= 0 else ""
    return f"{'in' if state.within else 'last in'} {state.label}{step}"


def what() -> str:
    """The operation that is under way, and its operator."""
    return _state.label


def in_operator() -> bool:
    """Whether what is under way belongs to an operator of a net."""
    return bool(_state.operator)


def operator_now() -> tuple[str, int]:
    """Operator and step that operations belong to at this moment, for :func:`operator`."""
    return _state.operator, _state.step


@contextmanager
def operator(where: str, step: int) -> Iterator[None]:
    """Tells the operator of a net, and the number of the run of the net, that operations belong to."""
    _state.operator, _state.step = where, step
    try:
        yield
    finally:
        _state.operator = ""


@contextmanager
def inside(what: str, *, together: bool) -> Iterator[None]:
    """Tells that an operation with other ranks is under way; with all of them where ``together``."""
    state = _state
    state.count += together
    outer = state.within
    state.what, state.within = what, True
    state.label = f"{state.operator} ({what})" if state.operator else what
    if state.step != state.told_step:
        # A rank that is killed has no time to say where it was, and those that wait for it may have none
        # either: some launchers kill them at once. What has been sent arrives.
        state.told_step = state.step
        _tell(**_report())
    try:
        yield
    finally:
        state.within = outer


def check() -> None:
    """Raises :class:`PeerFailed` if another rank is known to have failed."""
    if _state.news:
        raise PeerFailed(f"{who()} stops, {at()}: {_state.news}")


def late(waited: float, where: str = "") -> CollectiveError:
    """The error of a rank that has waited so many seconds for others (``where`` not in what it does now, in
    that); asks the monitor whom it waits for.
    """
    if _state.link is not None:
        _tell(late=_state.count, seconds=round(waited, 1), **_report())
        deadline = time.monotonic() + 2
        while not _state.news and time.monotonic() < deadline:
            time.sleep(0.01)
    reason = _state.news or "not all of the others have come"
    return CollectiveError(
        f"{who()} has waited {waited:.1f} seconds for the other ranks, {where or at()}: {reason}; "
        f"{TIMEOUT_VARIABLE} sets how long to wait"
    )


def news() -> str:
    """What is known of the failure of another rank; empty while there is none."""
    return _state.news


def announce(text: str) -> None:
    """Takes a failure that was noticed in the background for news, and ends the job."""
    _state.news = _state.news or text
    if aborts():
        time.sleep(min(_GRACE, timeout() * (1 - _WAITS) / 2))
        abort(text)


# ---- the end ----


def abort(message: str, status: int = 1) -> None:
    """Writes ``message`` to standard error and ends all processes of the job with an exit status.

    Where ``GPUNET_ABORT`` is 0 it only writes, and tells the monitor.
    """
    with _lock:
        if _state.ended:
            return
        _state.ended = True
    if message:
        with suppress(OSError):
            sys.stderr.write(f"gpunet: {message}\n")
            sys.stderr.flush()
    _tell(raised=message)
    if not aborts() or _state.abort is None:
        return
    # MPI's own abort can hang, too.
    timer = threading.Timer(_HARD, os._exit, (status,))
    timer.daemon = True
    timer.start()
    with suppress(OSError):
        sys.stdout.flush()
    _state.abort(status)
    os._exit(status)


def fail(error: BaseException) -> None:
    """Ends the job because of an error on this rank; does nothing in a process that is alone."""
    if _state.place.size > 1 and _state.abort is not None:
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        abort(describe(error), status)


def describe(error: BaseException) -> str:
    """What is written about an error that ends a rank."""
    if isinstance(error, CollectiveError):
        return str(error)
    return f"{who()} failed with {type(error).__name__}: {error}; {at()}"


def install(place: Place, abort_job: Callable[[int], None] | None) -> None:
    """From now on an exception that nobody catches ends the whole job, not only this process."""
    first = _state.abort is None
    _state.place, _state.abort = place, abort_job
    if not first or abort_job is None:
        return
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, PeerFailed):
            shown(kind, error, trace)
        fail(error)

    sys.excepthook = hook
    atexit.register(_leave)


def _leave() -> None:
    """At the end of the process: says good-bye, unless it is too late for that."""
    if _state.news or _state.ended:
        # MPI_Finalize would wait for the ranks that are gone.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)
    _tell(bye=_state.count)


# ---- the monitor ----


def connect(addresses: list[str], port: int, token: str) -> bool:
    """Connects to the monitor; whether that worked."""
    for address in addresses:
        try:
            link = socket.create_connection((address, port), timeout=3)
        except OSError:
            continue
        _state.link = link
        place = _state.place
        hello = {"rank": place.rank, "host": place.host, "pid": os.getpid()}
        _tell(token=token, **hello, shared=shared_memory(os.getpid()))
        threading.Thread(target=_listen, args=(link,), name="gpunet monitor", daemon=True).start()
        return True
    return False


def _report() -> dict[str, Any]:
    return {"count": _state.count, "within": _state.within, "at": at()}


def _tell(**message: Any) -> None:
    link = _state.link
    if link is not None:
        with suppress(OSError), _link_lock:
            link.sendall(json.dumps(message).encode() + b"\n")


_link_lock = threading.Lock()


def _listen(link: socket.socket) -> None:
    """Reports what this process does whenever that has changed, and waits for news of failures."""
    link.settimeout(_BEAT)
    told: dict[str, Any] = {}
    spoken = 0.0
    data = b""
    while b"\n" not in data:
        report = _report()
        now = time.monotonic()
        if report != told:
            _tell(**report)
            told, spoken = report, now
        elif now - spoken > _SILENCE:
            # It has been at something else for a while: those that wait for it want to know at what.
            _tell(**report, **({} if _state.within else {"now": whereabouts.doing()}))
            spoken = now
        try:
            more = link.recv(4096)
        except TimeoutError:
            continue
        except OSError:
            return
        if not more:
            return
        data += more
    said = str(json.loads(data.split(b"\n")[0])["failed"])
    _state.news = said
    announce(f"{who()} stops, {at()}: {said}")
