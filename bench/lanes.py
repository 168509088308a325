"""Nets of several branches: lanes side by side against the operators one after another.

Operators that run one after another may use all cores themselves, and most large ones do; Caffe2's simple
nets ran them in one thread, so both are compared with. What lanes could reach at most is there too: the time
in one thread, shared out to all of them without loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

import gpunet
from gpunet.cores import BUSY_LANES
from gpunet.cpu_fallback.threads import thread_count

from .networks import NETWORKS
from .rows import Bar, Row, Samples
from .timing import Effort, compare

FIGURE = "lanes"
BRANCHES = 4
WORKERS = 2
#: The times of async_scheduling over those of simple.
BAR = Bar(1 / 1.5)
IN_TURN, ONE_THREAD = "one after another", "the same in one thread"


def measure(effort: Effort) -> list[Row]:
    """Rows for a block of four branches, and for the Inception network at batch 1 and 8."""
    rows = _rows(f"{BRANCHES} branches of convolutions", _blocks, effort)
    for batch in (1,) if effort.quick else (1, 8):

        def start(engine: str, batch: int = batch) -> tuple[gpunet.Workspace, str]:
            return NETWORKS["inception"].inference(batch, engine=engine, workers=WORKERS)

        rows += _rows(f"inception, {BRANCHES} branches a block, batch {batch}", start, effort)
    return rows


def _blocks(engine: str) -> tuple[gpunet.Workspace, str]:
    """A net like a block of Inception: branches of convolutions of several sizes, joined by channels."""
    channels = 32
    model = gpunet.Model("branches")
    x = model.input("data", (8, channels, 28, 28))
    joined = []
    for number in range(BRANCHES):
        y = x
        for depth in range(3):
            y = model.relu(
                model.conv(y, f"b{number}c{depth}", channels, 3 if number % 2 else 1, pad=number % 2)
            )
            y = model.tanh(y, f"b{number}t{depth}")
        joined.append(y)
    model.concat(joined, "joined")
    workspace = gpunet.Workspace("cpu")
    workspace.run_once(model.init_net)
    shape = model.shape_of("data")
    workspace.feed("data", np.random.default_rng(0).standard_normal(shape, dtype=np.float32))
    return workspace, workspace.create(model.net, engine=engine, workers=WORKERS, keep=["joined"])


def _rows(case: str, start: Callable[[str], tuple[gpunet.Workspace, str]], effort: Effort) -> list[Row]:
    runs: dict[str, Callable[[], object]] = {}
    for name, engine in (("lanes", "async_scheduling"), (IN_TURN, "simple")):
        workspace, net = start(engine)
        runs[name] = functools.partial(workspace.run, net)
    runs[ONE_THREAD] = lambda: _in_one_thread(runs[IN_TURN])
    found = compare(runs, effort)
    own = Samples.of(found.seconds[ONE_THREAD].values, 1e3 / WORKERS)
    other = Samples.of(found.seconds[IN_TURN].values, 1e3)
    ratios = Samples.of([a / b for a, b in zip(own.values, other.values, strict=True)])
    bound = Row(
        FIGURE, f"{case}, 1/{WORKERS} of one thread", own=own, other=other, counterpart=IN_TURN, ratios=ratios
    )
    return [
        Row(
            FIGURE,
            f"{case}, {WORKERS} lanes",
            own=Samples.of(found.seconds["lanes"].values, 1e3),
            other=Samples.of(found.seconds[other].values, 1e3),
            counterpart=other,
            ratios=found.ratios[other],
            bar=BAR,
        )
        for other in (IN_TURN, ONE_THREAD)
    ] + [bound]


def _in_one_thread(run: Callable[[], object]) -> None:
    """Runs with kernels that find all other cores busy."""
    with ExitStack() as stack:
        for _ in range(thread_count()):
            stack.enter_context(BUSY_LANES.working())
        run()
