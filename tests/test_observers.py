"""Observers: called around each operator on every engine, and gone when they are taken away."""

from __future__ import annotations

import numpy as np
import pytest

import gpunet
from gpunet import observers
from gpunet.cuda_kernels.sim import toolchain
from gpunet.errors import KernelError, NetError
from gpunet.observers import Call, Observer
from gpunet.proto import NetDef
from tests.nets import op

ENGINES = ["simple", "async_scheduling", "graph"]


def branches() -> NetDef:
    ops = [op("Relu", "x", "a"), op("Tanh", "x", "b"), op("Sum", "a b", "y")]
    return NetDef(name="n", op=ops, external_input=["x"], external_output=["y"])


def workspace(net: NetDef, device: str = "cpu", **options) -> gpunet.Workspace:
    ws = gpunet.Workspace(device)
    ws.feed("x", np.array([[-1, 2], [3, -4]], dtype=np.float32))
    ws.create(net, without=["fusion"], **options)
    return ws


class Log(Observer):
    """Writes down what is called."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self.name, self.lines = name, lines

    def before(self, call: Call) -> None:
        self.lines.append(f"{self.name} before {call.name}")

    def after(self, call: Call) -> None:
        self.lines.append(f"{self.name} after {call.name}")

    def failed(self, call: Call) -> None:
        self.lines.append(f"{self.name} failed {call.name}")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_every_engine_and_device_calls_them(engine, device):
    if device != "cpu" and toolchain.find() is None:
        pytest.skip(toolchain.MISSING)
    ws = workspace(branches(), device, engine=engine, workers=2, streams=2)
    ws.run("n", 3)
    want = ws.fetch("y")
    seen: dict[str, list[np.ndarray]] = {}

    def after(call: Call) -> None:
        seen[call.name] = [*call.fetch_inputs(), *call.fetch_outputs()]

    with observers.observe(ws, "n", after=after):
        ws.run("n")
    x = np.array([[-1, 2], [3, -4]], dtype=np.float32)
    assert sorted(seen) == ["a", "b", "y"]
    np.testing.assert_array_equal(seen["a"][-1], np.maximum(x, 0))
    np.testing.assert_allclose(seen["b"][-1], np.tanh(x), rtol=1e-6)
    np.testing.assert_array_equal(seen["y"][-1], want)
    seen.clear()
    ws.run("n", 2)
    assert not seen
    np.testing.assert_array_equal(ws.fetch("y"), want)


def test_without_observers_the_bound_steps_run_themselves():
    ws = workspace(branches())
    ws.run("n")
    (segment,) = ws.program("n").segments()
    steps = segment.binding.steps
    assert observers.observed(steps, (), segment.binding.values.__getitem__, 0) == steps
    execute = segment.execute
    with observers.observe(ws, "n", before=lambda call: None):
        assert segment.execute is not execute
        assert segment.binding.steps is steps


def test_graphs_are_replayed_again_afterwards():
    if toolchain.find() is None:
        pytest.skip(toolchain.MISSING)
    ws = workspace(branches(), "sim:0", engine="graph")
    (program,) = [ws.program("n")]
    with observers.observe(ws, "n", after=lambda call: None):
        ws.run("n", 3)
        assert program.segments()[0].execute.replays == 0
    ws.run("n", 3)
    assert program.segments()[0].execute.replays == 2


def test_several_nest():
    lines: list[str] = []
    ws = workspace(NetDef(name="n", op=[op("Relu", "x", "y")], external_input=["x"]))
    with observers.observe(ws, "n", Log("1", lines), Log("2", lines)):
        ws.run("n")
    assert lines == ["1 before y", "2 before y", "2 after y", "1 after y"]


def test_dynamic_operators_are_observed_too():
    net = NetDef(
        name="n",
        op=[op("SparseToDense", "i x", "d"), op("Relu", "d", "v")],
        external_input=["i", "x"],
        external_output=["v"],
    )
    ws = workspace(net)
    ws.feed("i", np.array([2, 0], dtype=np.int32))
    seen = []
    with observers.observe(ws, "n", after=lambda call: seen.append((call.type, call.outputs()[0].tolist()))):
        ws.run("n")
    assert seen == [("SparseToDense", [[3, -4], [0, 0], [-1, 2]]), ("Relu", [[3, 0], [0, 0], [0, 2]])]
    ws.run("n")
    assert len(seen) == 2


@pytest.mark.parametrize("engine", ["simple", "async_scheduling"])
def test_what_fails_is_told_and_located(engine):
    net = NetDef(name="n", op=[op("LabelCrossEntropy", "x label", "y")], external_input=["x", "label"])
    lines: list[str] = []
    ws = workspace(net, engine=engine, workers=2)
    ws.feed("label", np.array([0, 7], dtype=np.int32))
    with (
        observers.observe(ws, "n", Log("1", lines), Log("2", lines)),
        pytest.raises(KernelError, match=r"\[LabelCrossEntropy\] op 0 'y' in net 'n'"),
    ):
        ws.run("n")
    assert lines == ["1 before y", "2 before y", "2 failed y", "1 failed y"]

    def refuse(call: Call) -> None:
        raise ValueError("not this one")

    ws.feed("label", np.array([0, 1], dtype=np.int32))
    with (
        observers.observe(ws, "n", Log("1", lines), before=refuse),
        pytest.raises(KernelError, match=r"op 0 'y' in net 'n': the kernel failed: ValueError: not this one"),
    ):
        ws.run("n")
    assert lines[4:] == ["1 before y", "1 failed y"]
    ws.run("n")


def test_a_call_describes_the_operator():
    net = branches()
    net.op[0].name = "first"
    calls: list[Call] = []
    ws = workspace(net, engine="dag", workers=2)
    with observers.observe(ws, "n", before=calls.append):
        ws.run("n", 2)
    by_name = {call.name: call for call in calls}
    assert sorted(by_name) == ["b", "first", "y"]
    first = by_name["first"]
    assert first.where == "[Relu] op 0 'first' in net 'n'"
    assert [str(s) for specs in first.specs() for s in specs] == ["float32 2x2"] * 2
    assert calls.count(first) == 2, "the same object in every run"
    assert by_name["y"].step.waits or by_name["y"].step.lane == by_name["b"].step.lane


def test_unknown_nets_are_refused():
    with pytest.raises(NetError, match="no net named 'm'"), observers.observe(workspace(branches()), "m"):
        raise AssertionError("not reached")
