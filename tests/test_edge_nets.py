"""Nets at the edges, on every engine and device: none or one operator, an error in the middle, new shapes."""

from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner

import gpunet
from gpunet.cli import main
from gpunet.cuda_kernels.sim import toolchain
from gpunet.definitions import make_operator
from gpunet.errors import KernelError
from gpunet.proto import NetDef, OperatorDef
from gpunet.records import check_races
from gpunet.serialization import save

ENGINES = ["simple", "async_scheduling", "graph"]
MISSING = pytest.mark.skipif(toolchain.find() is None, reason=toolchain.MISSING)


def op(type: str, inputs: str, outputs: str, **args) -> OperatorDef:
    return make_operator(type, inputs.split(), outputs.split(), **args)


@pytest.fixture(params=["cpu", pytest.param("sim:0", marks=MISSING)])
def ws(request: pytest.FixtureRequest) -> gpunet.Workspace:
    return gpunet.Workspace(request.param)


@pytest.mark.parametrize("engine", ENGINES)
def test_nets_of_no_and_of_one_operator(ws, engine):
    ws.create(NetDef(name="empty"), engine=engine)
    ws.create(NetDef(name="one", op=[op("Relu", "x", "y")], external_input=["x"]), engine=engine)
    ws.create(NetDef(name="source", op=[op("ConstantFill", "", "c", shape=[2], value=3.0)]), engine=engine)
    ws.feed("x", np.array([-1, 2], np.float32))
    for name in ("empty", "one", "source"):
        ws.run(name, 3)
        assert not check_races(ws.program(name))
    assert ws.fetch("y").tolist() == [0, 2]
    assert ws.fetch("c").tolist() == [3, 3]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_operator_that_fails_in_the_middle_leaves_the_workspace_usable(ws, engine):
    """Before it, blobs have their new values; the next runs are as if nothing had happened."""
    ops = [
        op("Softmax", "x", "before", axis=1),
        op("LabelCrossEntropy", "before label", "loss"),
        op("Scale", "loss", "after", scale=2.0),
        op("Relu", "x", "beside"),
    ]
    ws.feed("x", np.zeros((2, 4), np.float32))
    ws.feed("label", np.array([0, 3], np.int32))
    ws.create(NetDef(name="n", op=ops, external_input=["x", "label"]), engine=engine, workers=2, streams=2)

    def result(runs: int) -> np.ndarray:
        ws.run("n", runs)
        return ws.fetch("after")

    wanted = result(3)
    for _ in range(2):
        ws.feed("label", np.array([0, 4], np.int32))
        with pytest.raises(KernelError, match=r"\[LabelCrossEntropy\] op 1 'loss' in net 'n': .*4"):
            result(1)
        ws.feed("label", np.array([0, 3], np.int32))
        np.testing.assert_array_equal(result(2), wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_shapes_and_types_change_between_runs(ws, engine):
    ops = [op("Tanh", "x", "a"), op("Sqr", "a", "b"), op("Sum", "a b", "y")]
    ws.create(NetDef(name="n", op=ops, external_input=["x"]), engine=engine, keep=["y"], workers=2)
    rng = np.random.default_rng(0)
    for shape in [(2, 3), (40, 7), (0, 3), (2, 3), (5,)]:
        for dtype in ("float32", "float64"):
            x = rng.normal(size=shape).astype(dtype)
            ws.feed("x", x)
            ws.run("n", 3)
            a = np.tanh(x)
            np.testing.assert_allclose(ws.fetch("y"), a + a**2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_ten_thousand_operators_in_two_branches(engine):
    ops = []
    for number in range(5000):
        for branch in "ab":
            source = f"{branch}{number}" if number else "x"
            ops.append(op("Scale", source, f"{branch}{number + 1}", scale=-1.0))
    ops.append(op("Sub", "a5000 b4999", "y"))
    ws = gpunet.Workspace("cpu")
    ws.feed("x", np.ones(3, np.float32))
    net = NetDef(name="long", op=ops, external_input=["x"], external_output=["y"])
    ws.create(net, engine=engine, workers=2)
    ws.run("long", 2)
    assert ws.fetch("y").tolist() == [2, 2, 2]


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("command", ["info", "explain", "time", "check-races", "draw"])
def test_commands_on_nets_of_no_and_of_one_operator(tmp_path, command, count):
    """A file with no operators is no predict net, and says so."""
    net = NetDef(name="n", op=[op("Relu", "x", "y")][:count], external_input=["x"][:count])
    save(tmp_path / "n.pb", net)
    given = [str(tmp_path / "n.pb"), *(["--input", "x=2x3"] if count else [])]
    if command == "draw":
        given += ["--out", str(tmp_path / "n.svg")]
    if command != "info":
        given += ["--device", "cpu"]
    done = CliRunner().invoke(main, [command, *given], catch_exceptions=False)
    assert done.exit_code == (0 if count else 1), done.output
    assert count or "the net has no operators, wanted a predict net" in " ".join(done.stderr.split())


def test_a_net_that_keeps_a_blob_makes_it_again_after_one_that_does_not(ws):
    ops = [op("Relu", "x", "y"), op("Sqr", "y", "z")]
    kept = NetDef(name="kept", op=ops[:1], external_input=["x"], external_output=["y"])
    other = NetDef(name="other", op=ops, external_input=["x"], external_output=["z"])
    ws.feed("x", np.ones((2, 3), np.float32))
    for net in (kept, other):
        ws.create(net)
        ws.run(net.name)
    for rows in (2, 5, 1):
        ws.feed("x", np.full((rows, 3), rows, np.float32))
        ws.run("other")
        ws.run("kept")
        np.testing.assert_array_equal(ws.fetch("y"), np.full((rows, 3), rows, np.float32))
