"""Runs that end in the middle: by an error, an exit or an interrupt, on every engine."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gpunet
from gpunet import graph_engine
from gpunet.devices import Device
from gpunet.engines import Step, StepFailed
from gpunet.errors import KernelError
from gpunet.observers import Call, observe
from gpunet.proto import NetDef
from gpunet.schedule import Lane
from tests.nets import DEVICES, op
from tests.sim_kernels import needs_compiler

ENGINES = ["simple", "async_scheduling", "graph"]
#: Two branches of different lengths, which two lanes share.
BRANCHES = [
    op("Tanh", "x", "a0"),
    op("Sigmoid", "x", "b0"),
    op("Sqr", "a0", "a1"),
    op("Sqr", "b0", "b1"),
    op("Sum", "a1 b1", "y"),
]


class Ends(BaseException):
    """What no handler of errors takes, like an interrupt or an exit."""


@pytest.fixture(params=DEVICES)
def ws(request: pytest.FixtureRequest) -> Iterator[gpunet.Workspace]:
    workspace = gpunet.Workspace(request.param)
    workspace.feed("x", np.full((3, 4), 0.5, np.float32))
    yield workspace
    workspace.reset()


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """What a function returns or raises; the test fails if it does not end."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, f"still running after {seconds} seconds"
    return found[0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [Ends, KeyboardInterrupt, SystemExit, RuntimeError])
def test_whatever_is_raised_in_any_lane_ends_the_run(ws, engine, kind):
    ws.create(NetDef(name="n", op=BRANCHES), engine=engine, workers=2, streams=2)
    ws.run("n")
    wanted = ws.fetch("y")
    for output in ("a0", "b0", "a1", "b1", "y"):

        def fail(call: Call, output: str = output) -> None:
            if call.node.outputs[0].name == output:
                raise kind("no more")

        with observe(ws, "n", before=fail):
            error = within(30, lambda: ws.run("n"))
        assert type(error) is (KernelError if kind is RuntimeError else kind)
        assert "no more" in str(error)
        if kind is RuntimeError:
            assert f"'{output}' in net 'n'" in str(error)
        ws.feed("y", np.zeros((3, 4), np.float32))
        within(30, lambda: ws.run("n", 2))
        np.testing.assert_array_equal(ws.fetch("y"), wanted)


@pytest.mark.parametrize("engine", ["async_scheduling", "dag"])
def test_the_error_that_comes_first_wins(engine):
    """Whichever lane it is in: the calling thread's, or another one's."""
    for first, second in (("a0", "b0"), ("b0", "a0")):
        ws = gpunet.Workspace("cpu")
        ws.feed("x", np.full((3, 4), 0.5, np.float32))
        ws.create(NetDef(name="n", op=BRANCHES), engine=engine, workers=2)
        failed, begun = threading.Event(), threading.Event()

        def fail(call: Call, first=first, second=second, failed=failed, begun=begun) -> None:
            name = call.node.outputs[0].name
            if name == first:
                assert begun.wait(30)
                failed.set()
                raise RuntimeError("the first")
            if name == second:
                begun.set()
                assert failed.wait(30)
                time.sleep(0.1)
                raise RuntimeError("the second")

        with observe(ws, "n", before=fail), pytest.raises(KernelError, match=rf"'{first}' in .*the first"):
            ws.run("n")


@needs_compiler
@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_an_error_while_a_graph_is_captured_leaves_no_half_of_it(monkeypatch, kind):
    ws = gpunet.Workspace("sim:0")
    ws.feed("x", np.full((3, 4), 0.5, np.float32))
    ws.create(NetDef(name="n", op=BRANCHES), engine="graph", streams=2, without=["fusion"])
    ws.run("n")
    wanted = ws.fetch("y")
    call, left = graph_engine._call, [3]

    def fail(step: Step) -> None:
        left[0] -= 1
        if not left[0]:
            try:
                raise kind("no more")
            except RuntimeError as error:
                raise StepFailed(error, step.node) from error
        call(step)

    monkeypatch.setattr(graph_engine, "_call", fail)
    with pytest.raises(KernelError if kind is RuntimeError else kind, match="no more"):
        ws.run("n")
    assert not ws.program("n").stream(Lane(Device("sim"))).capturing
    ws.feed("y", np.zeros((3, 4), np.float32))
    ws.run("n", 3)
    np.testing.assert_array_equal(ws.fetch("y"), wanted)
    assert ws.program("n").segments()[0].execute.replays == 3


def test_an_interrupted_run_ends_when_all_lanes_have():
    """Else the lanes that go on would write to the blobs of the next run."""
    ws = gpunet.Workspace("cpu")
    ws.feed("x", np.full((3, 4), 0.5, np.float32))
    ws.create(NetDef(name="n", op=BRANCHES), engine="async_scheduling", workers=2)
    ws.run("n")
    busy: list[str] = []

    def slow(call: Call) -> None:
        if threading.current_thread() is not threading.main_thread():
            busy.append("begins")
            time.sleep(0.2)
            busy.append("ends")

    timer = threading.Timer(0.1, _thread.interrupt_main)
    with observe(ws, "n", before=slow), pytest.raises(KeyboardInterrupt):  # noqa: PT012 (the timer is its part)
        timer.start()
        ws.run("n")
    assert busy, "no second lane ran"
    assert busy[-1] == "ends"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_blob_that_a_failed_run_has_changed_has_one_value_everywhere(ws, engine):
    """On a device it is changed in place before the error: neither fetching it nor the next run finds the
    value from before.
    """
    ops = [op("Scale", "z", "z", scale=2.0), op("Tanh", "x", "t"), op("Scale", "z", "z", scale=3.0)]
    ws.create(NetDef(name="n", op=ops, external_input=["x", "z"]), engine=engine, without=["fusion"])

    def fail(call: Call) -> None:
        if call.type == "Tanh":
            raise RuntimeError("no more")

    ws.feed("z", np.ones(2, np.float32))
    with observe(ws, "n", before=fail), pytest.raises(KernelError, match=r"\[Tanh\] op 1 't' in net 'n'"):
        ws.run("n")
    before = ws.fetch("z")
    if engine == "simple":
        assert before.tolist() == [2, 2]
    ws.run("n")
    np.testing.assert_array_equal(ws.fetch("z"), 6 * before)
