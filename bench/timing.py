"""Times of pieces of code, measured side by side.

Other work on the machine disturbs a measurement, mostly for seconds at a time. So contenders take turns, in
rounds: what disturbs one disturbs the other, and a ratio within a round says more than one of times from
different rounds. Within a round the least of several times counts, since disturbance only adds. Before a
contender is timed it runs untimed, so that threads that the other one left spinning have gone to sleep and
caches are its own. A round waits a while for other processes to be quiet, and rounds go on while the ratios
scatter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .load import wait_until_quiet
from .rows import Samples


@dataclass(frozen=True)
class Effort:
    """How carefully to measure.

    Attributes:
        rounds: rounds at least, and ``most_rounds`` at most.
        scatter: rounds go on while the middle half of the ratios spans more than this part of their median.
        settle: seconds that a contender runs before it is timed.
        times: times taken in a round, of which the least counts.
        seconds: a time covers as many calls as take so long.
        budget: no round starts after so many seconds, waiting not counted.
        patience: seconds in all to wait for other processes to be quiet, before rounds.
        quick: whether figures are to leave out what takes long.
    """

    rounds: int
    most_rounds: int
    scatter: float
    settle: float
    times: int
    seconds: float
    budget: float
    patience: float
    quick: bool


FULL = Effort(
    rounds=7,
    most_rounds=25,
    scatter=0.1,
    settle=0.05,
    times=3,
    seconds=0.02,
    budget=20.0,
    patience=20.0,
    quick=False,
)
QUICK = Effort(
    rounds=3,
    most_rounds=5,
    scatter=0.2,
    settle=0.01,
    times=2,
    seconds=0.005,
    budget=2.0,
    patience=0.5,
    quick=True,
)


@dataclass(frozen=True)
class Comparison:
    """Seconds a call of each contender, and the ratios of the first one to the others, by name."""

    seconds: Mapping[str, Samples]
    ratios: Mapping[str, Samples]


def compare(contenders: Mapping[str, Callable[[], object]], effort: Effort) -> Comparison:
    """Measures all contenders in turns. The first is the one that ratios are of."""
    names = list(contenders)
    first, others = names[0], names[1:]
    calls = {name: _calls(function, effort.seconds) for name, function in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    ratios: dict[str, list[float]] = {name: [] for name in others}
    end, patience = time.perf_counter() + effort.budget, effort.patience
    for number in range(effort.most_rounds):
        if number >= effort.rounds and _settled(ratios if others else seconds, effort.scatter):
            break
        if number > 0 and time.perf_counter() > end:
            break
        waited = wait_until_quiet(patience)
        end, patience = end + waited, patience - waited
        for name in names if number % 2 == 0 else reversed(names):
            _run_for(contenders[name], effort.settle)
            seconds[name].append(min(_time(contenders[name], calls[name]) for _ in range(effort.times)))
        for name in others:
            ratios[name].append(seconds[first][-1] / seconds[name][-1])
    return Comparison(
        {name: Samples.of(values) for name, values in seconds.items()},
        {name: Samples.of(values) for name, values in ratios.items()},
    )


def _settled(series: Mapping[str, list[float]], scatter: float) -> bool:
    for values in series.values():
        low, middle, high = statistics.quantiles(values, n=4)
        if high - low > scatter * middle:
            return False
    return True


def _calls(function: Callable[[], object], seconds: float) -> int:
    """How often to call to fill so many seconds. The first calls, which prepare things, do not count."""
    function()
    function()
    return max(1, round(seconds / max(_time(function, 1), 1e-7)))


def _run_for(function: Callable[[], object], seconds: float) -> None:
    end = time.perf_counter() + seconds
    while True:
        function()
        if time.perf_counter() >= end:
            return


def _time(function: Callable[[], object], calls: int) -> float:
    """Seconds a call."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls
