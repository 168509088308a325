"""Nets on the simulated device: equal to the CPU, whatever the streams do."""

from __future__ import annotations

import csv
import re

import numpy as np
import pytest
from click.testing import CliRunner

import gpunet
from gpunet import backends
from gpunet.cli import main
from gpunet.cuda_kernels.sim import toolchain
from gpunet.cuda_kernels.sim_backend import SimBackend
from gpunet.devices import parse_device
from gpunet.errors import DeviceError
from gpunet.passes import placement
from gpunet.passes.pipeline import PASSES
from gpunet.proto import NetDef
from gpunet.records import check_races
from tests.nets import op

pytestmark = pytest.mark.skipif(toolchain.find() is None, reason="the simulated device needs a C++ compiler")
SIM = parse_device("sim:0")
OPTIONAL = [p.name for p in PASSES if p.optional]


def losses(
    device: str, steps: int = 5, model_name: str = "lenet", seed: int = 1, batches: int = 1, **options
) -> list[float]:
    """The losses of ``steps`` steps of training, on ``batches`` batches in turn."""
    model = gpunet.zoo.build(model_name, (1, 8, 8), 10)
    model.add_gradients("loss")
    gpunet.optimizers.SGD(0.05, momentum=0.9, weight_decay=1e-4).apply(model)
    ws = gpunet.Workspace(device, seed=seed)
    ws.run_once(model.init_net)
    rng = np.random.default_rng(seed - 1)
    data = rng.normal(size=(batches, 16, 1, 8, 8)).astype(np.float32)
    label = rng.integers(0, 10, (batches, 16)).astype(np.int32)
    ws.feed("data", data[0])
    ws.feed("label", label[0])
    ws.create(model.net, **options)
    result = []
    for step in range(steps):
        if batches > 1:
            ws.feed("data", data[step % batches])
            ws.feed("label", label[step % batches])
        ws.run(model.net)
        result.append(float(ws.fetch("loss")))
    assert not check_races(ws.program(model.net.name))
    return result


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("model", "steps"), [("lenet", 40), ("mlp", 80)])
def test_training_equals_the_cpu_to_the_bit(model, steps, seed):
    """No operator may differ in a single bit: that one decides, some hundred steps later, which of two pixels
    is the larger one in its window, and from there the losses part.
    """
    found, want = (losses(device, steps, model, seed, batches=8) for device in ("sim:0", "cpu"))
    assert found == want


def test_training_by_softmax_and_cross_entropy_equals_the_cpu_to_the_bit():
    """The loss in three operators, as in Caffe2's own examples: their gradients leave the same bits too."""
    weights = []
    for device in ("cpu", "sim:0"):
        model = gpunet.Model("n")
        data, label = model.input("data", (32, 20)), model.input("label", (32,), "int32")
        scores = model.fc(model.relu(model.fc(data, "hidden", 50)), "scores", 10)
        loss = model.add("LabelCrossEntropy", [model.softmax(scores, "softmax"), label], "losses")
        model.add_gradients(model.add("AveragedLoss", [loss], "loss"))
        gpunet.optimizers.Adam(0.01).apply(model)
        ws = gpunet.Workspace(device, seed=3)
        ws.run_once(model.init_net)
        rng = np.random.default_rng(0)
        ws.feed("data", rng.normal(size=(32, 20)).astype(np.float32))
        ws.feed("label", rng.integers(0, 10, 32).astype(np.int32))
        ws.create(model.net)
        ws.run("n", 60)
        weights.append([ws.fetch(name) for name in ("hidden_w", "hidden_b", "scores_w", "scores_b")])
    for cpu, sim in zip(*weights, strict=True):
        np.testing.assert_array_equal(sim, cpu)


@pytest.mark.slow
def test_resnet20_equals_the_cpu():
    np.testing.assert_allclose(losses("sim:0", 3, "resnet20"), losses("cpu", 3, "resnet20"), rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "steps"), [("lenet", 3), ("mlp", 3), pytest.param("resnet20", 2, marks=pytest.mark.slow)]
)
def test_the_order_of_streams_does_not_change_a_bit(monkeypatch, model, steps):
    results = []
    for seed in (1, 2):
        sim = SimBackend(SIM, seed=seed)
        monkeypatch.setitem(backends._open, SIM, sim)
        records = sim.record_work()
        found = losses("sim:0", steps, model, engine="async_scheduling", streams=4, keep=["loss"])
        results.append((found, [record.stream for record in records]))
    (first, order), (second, other) = results
    assert first == second
    assert order != other, "the seeds give one order"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 86])
def test_training_lenet_equals_the_cpu(tmp_path, seed):
    """The command that README.md begins with, on both devices."""
    logs, right = {}, {}
    for device in ("cpu", "sim"):
        folder = tmp_path / device
        arguments = ["train", "lenet", "--device", device, "--seed", str(seed), "--out", str(folder)]
        result = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        (found,) = re.findall(r"│ last │.* (\d+) of 296 │", result.output)
        right[device] = int(found)
        with (folder / "steps.csv").open(newline="") as log:
            logs[device] = [float(row["loss"]) for row in csv.DictReader(log)]
    assert len(logs["cpu"]) == len(logs["sim"]) == 470
    np.testing.assert_allclose(logs["sim"], logs["cpu"], rtol=1e-5)
    assert right["sim"] == right["cpu"] >= 0.98 * 296


@pytest.mark.parametrize("streams", [1, 2, 5])
@pytest.mark.parametrize("without", [(), OPTIONAL], ids=["all passes", "no passes"])
def test_any_number_of_streams_gives_the_same_bits(streams, without):
    want = losses("sim:0")
    assert (
        losses("sim:0", engine="async_scheduling", streams=streams, workers=2, keep=["loss"], without=without)
        == want
    )


def test_a_net_follows_new_shapes():
    results = {}
    for device in ("cpu", "sim:0"):
        ws = gpunet.Workspace(device)
        ws.create(NetDef(name="n", op=[op("Relu", "x", "a"), op("Softmax", "a", "y")]))
        for rows in (5, 3, 5, 1):
            ws.feed("x", np.random.default_rng(rows).normal(size=(rows, 4)).astype(np.float32))
            ws.run("n")
            results.setdefault(rows, []).append(ws.fetch("y"))
    for rows, found in results.items():
        assert all(y.shape == (rows, 4) for y in found)
        for y in found[1:]:
            np.testing.assert_allclose(y, found[0], rtol=1e-6)


def test_operators_without_a_kernel_run_on_the_cpu_and_say_so_once(caplog, monkeypatch):
    monkeypatch.setattr(placement, "_reported", set())
    a, b = np.ones((2, 1) * 5, np.float32), np.ones((1, 2) * 5, np.float32)  # more axes than kernels take
    net = NetDef(name="n", op=[op("Mul", "a b", "g"), op("Sum", "g g", "y")], external_input=["a", "b"])
    ws = gpunet.Workspace("sim:0")
    ws.feed("a", a)
    ws.feed("b", b)
    ws.create(net)
    ws.run("n", 2)
    np.testing.assert_array_equal(ws.fetch("y"), np.full((2,) * 10, 2))
    ws.run_once(net)
    (said,) = [text for text in caplog.messages if "[Mul]" in text]
    assert "runs on the CPU, not on sim:0" in said
    assert f"{a.nbytes + b.nbytes + 2**10 * 4:,} bytes are copied each run" in said
    strict = gpunet.Workspace("sim:0", strict=True)
    strict.feed("a", a)
    strict.feed("b", b)
    with pytest.raises(DeviceError, match=r"\[Mul\].*strict placement"):
        strict.run_once(net)


@pytest.mark.parametrize("strict", [False, True])
def test_saved_parameters_come_from_the_host_without_a_word(strict, caplog, monkeypatch):
    monkeypatch.setattr(placement, "_reported", set())
    ws = gpunet.Workspace("sim:0", strict=strict)
    given = op("GivenTensorFill", "", "g", shape=[3], values=[1.0, -2.0, 3.0])
    ws.run_once(NetDef(name="init", op=[given]))
    ws.create(NetDef(name="n", op=[op("Relu", "g", "y")], external_input=["g"]))
    ws.run("n")
    assert ws.fetch("y").tolist() == [1, 0, 3]
    assert not caplog.messages


def test_device_options_place_operators():
    net = NetDef(name="n", op=[op("Relu", "x", "a"), op("Tanh", "a", "b"), op("Sqr", "b", "y")])
    net.op[1].device_option.device_type = gpunet.proto.PROTO_CPU
    ws = gpunet.Workspace("sim:0")
    x = np.linspace(-1, 1, 7, dtype=np.float32)
    ws.feed("x", x)
    ws.create(net)
    ws.run("n")
    np.testing.assert_allclose(ws.fetch("y"), np.tanh(np.maximum(x, 0)) ** 2, rtol=1e-5)
    (segment,) = ws.program("n").segments()
    kinds = ["copy" if n.op is None else n.op.type for n in segment.compiled.graph.nodes]
    assert kinds == ["Relu", "copy", "Tanh", "copy", "Sqr"]


def test_random_bits_equal_those_of_the_cpu():
    draws = []
    for device in ("cpu", "sim:0"):
        ws = gpunet.Workspace(device, seed=9)
        ws.feed("x", np.ones((3, 1001), dtype=np.float32))
        ws.create(
            NetDef(
                name="n",
                op=[op("UniformFill", "", "u", shape=[999]), op("Dropout", "x", "y mask", ratio=0.3)],
            )
        )
        ws.run("n", 3)
        draws.append([ws.fetch(name) for name in ("u", "y", "mask")])
    for a, b in zip(*draws, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("streams", [1, 3])
def test_a_step_replayed_as_one_graph_gives_the_same_bits(streams):
    want = losses("sim:0")
    assert losses("sim:0", engine="graph", streams=streams, keep=["loss"]) == want
    assert losses("sim:0", engine="graph", streams=streams) == want


def test_graphs_are_captured_once_and_again_for_new_shapes():
    ws = gpunet.Workspace("sim:0")
    net = NetDef(
        name="n", op=[op("Relu", "x", "a"), op("Dropout", "a", "d m", ratio=0.5), op("Tanh", "d", "y")]
    )
    ws.create(net, engine="graph")
    plain = gpunet.Workspace("sim:0")
    plain.create(net)
    for shape in [(4, 5)] * 4 + [(2, 5)] * 3:
        for workspace in (ws, plain):
            workspace.feed("x", np.random.default_rng(1).normal(size=shape).astype(np.float32))
            workspace.run("n")
        np.testing.assert_array_equal(ws.fetch("y"), plain.fetch("y"))
    (segment,) = ws.program("n").segments()
    assert segment.execute.replays == 2
    ws.run("n", 3)
    assert segment.execute.replays == 5


def test_host_work_stays_outside_of_the_graph():
    """Counter and learning rate on the host, their copy, then everything else as one graph."""
    model = gpunet.zoo.build("mlp", (1, 8, 8), 10)
    model.add_gradients("loss")
    schedule = gpunet.schedules.schedule("step", stepsize=2, gamma=0.5)
    gpunet.optimizers.SGD(0.1, momentum=0.9, schedule=schedule).apply(model)
    ws = gpunet.Workspace("sim:0")
    ws.run_once(model.init_net)
    ws.feed("data", np.ones((4, 1, 8, 8), dtype=np.float32))
    ws.feed("label", np.zeros(4, dtype=np.int32))
    ws.create(model.net, engine="graph", keep=["loss"])
    ws.run(model.net, 5)
    (segment,) = ws.program(model.net.name).segments()
    assert segment.execute.replays == 4
    kinds = [
        n.op is None or n.device.kind == "cpu" for n in (i.node for i in segment.compiled.schedule.items)
    ]
    assert kinds == sorted(kinds, reverse=True), "all host work comes first"


def test_a_net_may_leave_another_shape_in_a_blob_than_it_reads():
    net = NetDef(name="n", op=[op("Add", "x r", "a"), op("Softmax", "a", "r")])
    results = []
    for device in ("cpu", "sim:0"):
        ws = gpunet.Workspace(device)
        ws.feed("x", np.arange(12, dtype=np.float32).reshape(4, 3))
        ws.feed("r", np.ones((4, 1), dtype=np.float32))
        ws.create(net)
        ws.run("n")
        first = ws.fetch("r")
        ws.run("n", 2)
        results.append([first, ws.fetch("r")])
    for a, b in zip(*results, strict=True):
        assert a.shape == (4, 3)
        np.testing.assert_allclose(a, b, rtol=1e-5)
