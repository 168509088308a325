"""Compiled programs: lanes, memory plans against their lower bound, recomputation, planning time."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

import gpunet
from gpunet.program import Program
from gpunet.proto import NetDef

from .rows import Bar, Row, Samples
from .timing import Effort, compare

FIGURE = "programs"
BRANCHES = 4


def measure(effort: Effort) -> list[Row]:
    """All rows."""
    return [*_lanes(effort), *_plans(), *_recomputation(effort), _planning()]


def branches(batch: int = 8, channels: int = 32, size: int = 28) -> gpunet.Model:
    """A net like a block of Inception: branches of convolutions of several sizes, joined by channels."""
    model = gpunet.Model("branches")
    x = model.input("data", (batch, channels, size, size))
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
    return model


def _lanes(effort: Effort) -> list[Row]:
    model = branches()
    runs: dict[str, Callable[[], object]] = {}
    for engine in ("simple", "async_scheduling"):
        workspace = gpunet.Workspace("cpu")
        workspace.run_once(model.init_net)
        workspace.feed(
            "data", np.random.default_rng(0).normal(size=model.shape_of("data")).astype(np.float32)
        )
        name = workspace.create(model.net, engine=engine, workers=2, keep=["joined"])
        runs[engine] = lambda workspace=workspace, name=name: workspace.run(name)  # type: ignore[misc]
    times = compare(runs, effort).seconds
    own, other = times["async_scheduling"].values, times["simple"].values
    return [
        Row(
            FIGURE,
            f"{BRANCHES} branches of convolutions, 2 lanes",
            own=Samples.of(own, 1e3),
            other=Samples.of(other, 1e3),
            counterpart="one after another",
            ratios=Samples.of([a / b for a, b in zip(own, other, strict=True)]),
            bar=Bar(1 / 1.5),
        )
    ]


def training(name: str, batch: int, recompute: int | None = None) -> tuple[gpunet.Workspace, str]:
    """A workspace with the training net of a model of the zoo, created and fed."""
    shape = (3, 32, 32) if name == "resnet20" else (1, 28, 28)
    model = gpunet.zoo.build(name, shape, 10)
    model.add_gradients("loss")
    gpunet.optimizers.SGD(0.01, momentum=0.9).apply(model)
    workspace = gpunet.Workspace("cpu")
    workspace.run_once(model.init_net)
    rng = np.random.default_rng(0)
    workspace.feed("data", rng.normal(size=(batch, *shape)).astype(np.float32))
    workspace.feed("label", rng.integers(0, 10, batch).astype(np.int32))
    return workspace, workspace.create(model.net, keep=["loss"], recompute=recompute)


def _bytes(program: Program, what: str) -> int:
    """Bytes of the arenas, or of their lower bound."""
    (segment,) = program.segments()
    if segment.compiled is None:
        raise RuntimeError("the program was not run")
    return sum(getattr(segment.compiled.memory, what).values())


def _plans() -> list[Row]:
    rows = []
    for name in ("lenet", "mlp", "resnet20"):
        workspace, net = training(name, 32)
        workspace.run(net)
        rows.append(_plan(f"{name} training, batch 32", workspace.program(net), 1.15))
        model = gpunet.zoo.build(name, (1, 28, 28), 10)
        predict = model.predict_net("softmax")
        workspace.run_once(model.init_net)
        workspace.feed("data", np.zeros((32, 1, 28, 28), np.float32))
        predict.name = f"{name}_inference"
        workspace.create(predict)
        workspace.run(predict.name)
        rows.append(_plan(f"{name} inference, batch 32", workspace.program(predict.name), 1.1))
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


def _recomputation(effort: Effort) -> list[Row]:
    runs: dict[str, Callable[[], object]] = {}
    sizes = {}
    for label, recompute in (("plain", None), ("recomputed", 0)):
        workspace, net = training("resnet20", 64, recompute)
        workspace.run(net)
        sizes[label] = _bytes(workspace.program(net), "arenas") / 2**20
        runs[label] = lambda workspace=workspace, net=net: workspace.run(net)  # type: ignore[misc]
    times = compare(runs, effort).seconds
    own, other = times["recomputed"].values, times["plain"].values
    return [
        Row(
            FIGURE,
            "activations and gradients of resnet20 with recomputation",
            unit="MiB",
            own=Samples((sizes["recomputed"],)),
            other=Samples((sizes["plain"],)),
            counterpart="all activations kept",
            ratios=Samples((sizes["recomputed"] / sizes["plain"],)),
            bar=Bar(0.4),
        ),
        Row(
            FIGURE,
            "step of resnet20 with recomputation",
            own=Samples.of(own, 1e3),
            other=Samples.of(other, 1e3),
            counterpart="all activations kept",
            ratios=Samples.of([a / b for a, b in zip(own, other, strict=True)]),
            bar=Bar(1.35),
        ),
    ]


def _planning() -> Row:
    """Seconds from a net's definition to bound steps, for a training net of some 500 operators."""
    workspace, net = training("resnet20", 8)
    program = workspace.program(net)
    operators = len(program.operators)
    samples = []
    for _ in range(3):
        workspace.create(_definition(program), overwrite=True, keep=["loss"])
        begin = time.perf_counter()
        workspace.program(net).prepare()
        samples.append(time.perf_counter() - begin)
    return Row(
        FIGURE,
        f"planning and binding {operators} operators",
        unit="s",
        own=Samples(tuple(samples)),
        bar=Bar(2.0, False),
    )


def _definition(program: Program) -> NetDef:
    return NetDef(name=program.name, op=[op.definition for op in program.operators])
