"""Compiled programs: memory plans against their lower bound, recomputation, planning time."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace

from gpunet.program import Program
from gpunet.proto import NetDef

from .networks import NETWORKS
from .rows import Bar, Row, Samples
from .timing import Effort, compare

FIGURE = "programs"
#: Networks that `--quick` measures too.
SMALL = ("lenet", "mlp", "resnet20")
BATCH = 32
#: Where recomputation is measured: the batch whose plan counts, and the one whose steps are timed.
RECOMPUTED = {"resnet20": (64, 64), "resnet50": (32, 4)}


def measure(effort: Effort) -> list[Row]:
    """All rows; those of small networks if it is quick."""
    names = [name for name in NETWORKS if name in SMALL or not effort.quick]
    rows = [row for name in names for row in _plans(name)]
    rows += [row for name in RECOMPUTED if name in names for row in _recomputation(name, effort)]
    return [*rows, *_planning("resnet20" if effort.quick else "resnet50")]


def _bytes(program: Program, what: str) -> int:
    """Bytes of the arenas, or of their lower bound, of a program that is prepared."""
    (segment,) = program.segments()
    if segment.compiled is None:
        raise RuntimeError("the program was not prepared")
    return sum(getattr(segment.compiled.memory, what).values())


def _plans(name: str) -> list[Row]:
    """Nothing runs: a plan depends on shapes alone."""
    rows = []
    for kind, limit in (("training", 1.15), ("inference", 1.1)):
        workspace, net = getattr(NETWORKS[name], kind)(BATCH)
        program = workspace.program(net)
        program.prepare()
        rows.append(_plan(f"{name} {kind}, batch {BATCH}", program, limit))
    return rows


def _plan(case: str, program: Program, limit: float) -> Row:
    arena, bound = _bytes(program, "arenas") / 2**20, _bytes(program, "lower_bound") / 2**20
    return Row(
        FIGURE,
        f"arena of {case}",
        unit="MiB",
        own=Samples((arena,)),
        other=Samples((bound,)),
        counterpart="the largest sum of live tensors",
        ratios=Samples((arena / bound if bound else 1.0,)),
        bar=Bar(limit),
    )


def _recomputation(name: str, effort: Effort) -> list[Row]:
    planned, timed = RECOMPUTED[name]
    runs: dict[str, Callable[[], object]] = {}
    sizes = {}
    for label, recompute in (("recomputed", 0), ("plain", None)):
        workspace, net = NETWORKS[name].training(planned, recompute=recompute)
        workspace.program(net).prepare()
        sizes[label] = _bytes(workspace.program(net), "arenas") / 2**20
        if timed != planned:
            workspace, net = NETWORKS[name].training(timed, recompute=recompute)
        runs[label] = functools.partial(workspace.run, net)
    # A step of a large network is long enough to be timed once.
    found = compare(runs, effort if timed == planned else replace(effort, times=1, settle=0.0, budget=60.0))
    own, other = found.seconds["recomputed"].values, found.seconds["plain"].values
    return [
        Row(
            FIGURE,
            f"activations and gradients of {name} with recomputation, batch {planned}",
            unit="MiB",
            own=Samples((sizes["recomputed"],)),
            other=Samples((sizes["plain"],)),
            counterpart="all activations kept",
            ratios=Samples((sizes["recomputed"] / sizes["plain"],)),
            bar=Bar(0.4),
        ),
        Row(
            FIGURE,
            f"step of {name} with recomputation, batch {timed}",
            own=Samples.of(own, 1e3),
            other=Samples.of(other, 1e3),
            counterpart="all activations kept",
            ratios=found.ratios["plain"],
            bar=Bar(1.35),
        ),
    ]


def _planning(name: str) -> list[Row]:
    """Seconds from a training net's definition to bound steps, and from shapes that were compiled before."""
    large, small = 8, 4
    workspace, net = NETWORKS[name].training(large)
    operators = [op.definition for op in workspace.program(net).operators]
    images, labels = workspace.fetch("data"), workspace.fetch("label")

    def prepare(batch: int) -> float:
        workspace.feed("data", images[:batch])
        workspace.feed("label", labels[:batch])
        begin = time.perf_counter()
        workspace.program(net).prepare()
        return time.perf_counter() - begin

    fresh, again = [], []
    for _ in range(3):
        workspace.create(NetDef(name=net, op=operators), overwrite=True, keep=["loss"])
        fresh.append(prepare(large))
        prepare(small)
        again.append(prepare(large))
    what = f"{name} training, {len(operators)} operators"
    return [
        Row(FIGURE, f"{case} {what}", unit="s", own=Samples(tuple(seconds)), bar=Bar(2.0, False))
        for case, seconds in (("planning and binding", fresh), ("binding again", again))
    ]
