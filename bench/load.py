"""What else runs on the machine, by the counters of Linux; elsewhere nothing is known of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

#: Seconds of a glimpse: the counters count hundredths of seconds.
GLIMPSE = 0.1
#: Cores that other processes may keep busy where a machine counts as quiet.
QUIET = 0.25


class Others:
    """The cores that other processes have kept busy since this was made."""

    def __init__(self) -> None:
        self._start = _read()

    def cores(self) -> float | None:
        """Their mean number; ``None`` where it is not known."""
        found = self.taken()
        if found is None:
            return None
        busy, own, seconds = found
        return max(0.0, busy - own) / max(seconds, 1e-9)

    def taken(self) -> tuple[float, float, float] | None:
        """Seconds that all processes took, that this one took, and by the clock; ``None`` as above."""
        now = _read()
        if self._start is None or now is None:
            return None
        busy, own, seconds = (b - a for a, b in zip(self._start, now, strict=True))
        return busy, own, seconds

    def __str__(self) -> str:
        cores = self.cores()
        return "unknown" if cores is None else f"{cores:.1f}"


def wait_until_quiet(patience: float) -> float:
    """Waits until other processes do little, at most ``patience`` seconds; returns the seconds waited."""
    start = time.perf_counter()
    while (waited := time.perf_counter() - start) < patience:
        others = Others()
        time.sleep(min(GLIMPSE, patience))
        cores = others.cores()
        if cores is None or cores <= QUIET:
            break
    return waited


def _read() -> tuple[float, float, float] | None:
    """Seconds that all cores were busy, that this process and its children took, and by the clock."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
        tick = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
    user, nice, system, _, _, irq, soft_irq = (int(field) / tick for field in fields[:7])
    return user + nice + system + irq + soft_irq, sum(os.times()[:4]), time.perf_counter()
