"""The engine ``graph`` on the simulated device: how often it captures and replays, and that what changes from
step to step is read from device memory rather than kept in the graph.

A replay there runs the launches that were recorded, with the arguments that they had: a value that a launcher
had taken from the host would stay what it was when the graph was captured.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import gpunet
from gpunet import mixed_precision
from gpunet.cuda_kernels.sim_backend import SimBackend
from gpunet.program import StaticSegment
from gpunet.proto import NetDef
from tests.nets import op
from tests.sim_kernels import needs_compiler

pytestmark = needs_compiler


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[SimBackend]:
    """The device of each capture."""
    made: list[SimBackend] = []
    capture = SimBackend.capture

    def counted(self: SimBackend, *arguments):
        made.append(self)
        return capture(self, *arguments)

    monkeypatch.setattr(SimBackend, "capture", counted)
    return made


def replays(ws: gpunet.Workspace, net: str) -> dict[int, int]:
    """For each static segment that has GPU work, by its start: how often its graphs were launched."""
    found = {s.start: s.execute.replays for s in ws.program(net).segments()}
    return {start: number for start, number in found.items() if number}


def model_with(optimizer: gpunet.optimizers.Optimizer, *, half: bool = False) -> gpunet.Model:
    model = gpunet.zoo.build("mlp", (1, 8, 8), 10)
    if half:
        mixed_precision.to_half(model)
        mixed_precision.add_scaled_gradients(model, "loss", initial_scale=1024.0, growth_interval=2)
    else:
        model.add_gradients("loss")
    optimizer.apply(model)
    return model


def prepared(model: gpunet.Model, engine: str) -> gpunet.Workspace:
    ws = gpunet.Workspace("sim:0", seed=1)
    ws.run_once(model.init_net)
    rng = np.random.default_rng(0)
    ws.feed("data", rng.normal(size=(4, 1, 8, 8)).astype(np.float32))
    ws.feed("label", rng.integers(0, 10, 4).astype(np.int32))
    ws.create(model.net, engine=engine)
    return ws


def parameters(ws: gpunet.Workspace, model: gpunet.Model) -> dict[str, np.ndarray]:
    return {name: ws.fetch(name) for name in model.training_blobs()}


def falling_rate() -> gpunet.Model:
    """Another rate in each step."""
    schedule = gpunet.schedules.schedule("exp", gamma=0.5)
    return model_with(gpunet.optimizers.SGD(0.1, momentum=0.9, schedule=schedule))


def counting_steps() -> gpunet.Model:
    """The number of the step corrects the bias of Adam's moments."""
    return model_with(gpunet.optimizers.Adam(0.01))


@pytest.mark.parametrize("build", [falling_rate, counting_steps])
def test_rates_and_counters_change_without_another_capture(
    build: Callable[[], gpunet.Model], captures: list[SimBackend]
) -> None:
    model, results = build(), []
    for engine in ("simple", "graph"):
        ws = prepared(model, engine)
        steps = []
        for _ in range(5):
            ws.run(model.net)
            steps.append(parameters(ws, model))
        results.append(steps)
    for number, (plain, replayed) in enumerate(zip(*results, strict=True)):
        for name, value in plain.items():
            np.testing.assert_array_equal(replayed[name], value, err_msg=f"{name} in step {number}")
    assert len(captures) == 1
    assert replays(ws, model.net.name) == {0: 4}


def test_the_scale_of_the_loss_changes_without_another_capture(captures: list[SimBackend]) -> None:
    """It grows after two good steps and falls after one that overflows: the updates behind are then left
    out.
    """
    model = model_with(gpunet.optimizers.SGD(0.05, momentum=0.9), half=True)
    results, counts = [], []
    for engine in ("simple", "graph"):
        ws = prepared(model, engine)
        good = ws.fetch("data")
        steps = []
        for number in range(8):
            ws.feed("data", np.full_like(good, 1e6) if number == 5 else good)
            ws.run(model.net)
            steps.append(parameters(ws, model))
            counts.append(len(captures))
        results.append(steps)
    scales = [step[mixed_precision.SCALE].item() for step in results[1]]
    assert scales == [1024, 2048, 2048, 4096, 4096, 2048, 2048, 4096]
    for number, (plain, replayed) in enumerate(zip(*results, strict=True)):
        for name, value in plain.items():
            np.testing.assert_array_equal(replayed[name], value, err_msg=f"{name} in step {number}")
    # The second run captures what is in front of the condition and what is behind it; nothing does later.
    assert counts[8:] == [0, counts[-1], *[counts[-1]] * 6]
    before, *behind = sorted(replays(ws, model.net.name).items())
    assert before[1] % 7 == 0
    assert all(number % 6 == 0 for _, number in behind)
    assert behind


def test_random_draws_differ_from_replay_to_replay(captures: list[SimBackend]) -> None:
    net = NetDef(name="n", op=[op("Relu", "x", "a"), op("Dropout", "a", "y mask", ratio=0.5)])
    draws = []
    for engine in ("simple", "graph"):
        ws = gpunet.Workspace("sim:0", seed=7)
        ws.feed("x", np.ones((8, 32), dtype=np.float32))
        ws.create(net, engine=engine, overwrite=True)
        masks = []
        for _ in range(4):
            ws.run("n")
            masks.append(ws.fetch("mask"))
        draws.append(masks)
    np.testing.assert_array_equal(draws[1], draws[0])
    assert len({mask.tobytes() for mask in draws[1]}) == 4
    assert len(captures) == 1
    assert replays(ws, "n") == {0: 3}


def test_segments_around_an_operator_that_depends_on_data_are_graphs_of_their_own(
    captures: list[SimBackend],
) -> None:
    """Where the data changes a shape, only what is behind it is captured again."""
    net = NetDef(
        name="n",
        op=[
            op("Relu", "x", "a"),
            op("Tanh", "a", "b"),
            op("SparseToDense", "index b", "dense"),
            op("Sigmoid", "dense", "c"),
            op("Sqr", "c", "y"),
        ],
    )
    ws, plain = gpunet.Workspace("sim:0"), gpunet.Workspace("cpu")
    for workspace in (ws, plain):
        workspace.feed("x", np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4))
    ws.create(net, engine="graph")
    plain.create(net)

    def run(largest: int, times: int) -> None:
        for workspace in (ws, plain):
            workspace.feed("index", np.array([0, 2, largest], dtype=np.int32))
        ws.run("n", times)
        plain.run("n")
        assert ws.fetch("y").shape == (largest + 1, 4)
        np.testing.assert_allclose(ws.fetch("y"), plain.fetch("y"), rtol=1e-6)

    run(4, 3)
    assert len(captures) == 2
    assert replays(ws, "n") == {0: 2, 3: 2}
    assert [type(s) is StaticSegment for s in ws.program("n").bound()] == [True, False, True]
    run(6, 3)
    assert len(captures) == 3, "the segment in front is replayed as it is"
    assert replays(ws, "n") == {0: 5, 3: 2}
