"""Copies of a network on several devices of one process."""

import numpy as np
import pytest

import gpunet
from gpunet.cuda_kernels.sim import toolchain
from gpunet.distributed.replicas import replicate
from gpunet.errors import ArgumentError, GradientError, NetError
from gpunet.optimizers import SGD
from gpunet.scope import scoped

RNG = np.random.default_rng(8)
DATA = RNG.normal(size=(8, 6)).astype(np.float32)
LABEL = (np.arange(8) % 3).astype(np.int32)


def build(model):
    data, label = model.input(scoped("data"), (8, 6)), model.input(scoped("label"), (8,), "int32")
    scores = model.fc(model.relu(model.fc(data, "fc1", 5), "relu1"), "fc2", 3)
    return model.add("SoftmaxWithLoss", [scores, label], [scoped("softmax"), scoped("loss")])[1]


def train(devices, engine="simple", steps=5):
    model = gpunet.Model("net")
    replicas = replicate(model, build, devices)
    replicas.apply(SGD(0.1, momentum=0.9, weight_decay=1e-3))
    workspace = gpunet.Workspace(devices[0], seed=4)
    workspace.run_once(model.init_net)
    net = workspace.create(model.net, engine=engine, workers=2)
    losses = []
    for _ in range(steps):
        parts = zip(np.split(DATA, len(devices)), np.split(LABEL, len(devices)), replicas.scopes, strict=True)
        for data, label, scope in parts:
            workspace.feed(f"{scope}data", data)
            workspace.feed(f"{scope}label", label)
        workspace.run(net)
        losses.append(np.mean([workspace.fetch(loss) for loss in replicas.losses]))
    for parameter in ("fc1_w", "fc1_b", "fc2_w", "fc2_b"):
        first, *others = (workspace.fetch(name) for name in replicas.names(parameter))
        for other in others:
            np.testing.assert_array_equal(other, first)
    return model, np.array(losses)


@pytest.mark.parametrize("engine", ["simple", "async_scheduling"])
@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_copies_train_like_one_network_on_the_whole_batch(kind, engine):
    if kind == "sim" and toolchain.find() is None:
        pytest.skip(toolchain.MISSING)
    _, expected = train(["cpu"])
    devices = ["cpu", "cpu"] if kind == "cpu" else ["sim:0", "sim:1"]
    _, found = train(devices, engine)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_each_copy_is_on_its_device():
    model = gpunet.Model("net")
    replicate(model, build, ["sim:0", "sim:1"]).apply(SGD(0.1, momentum=0.9))
    for op in model.net.proto.op:
        if op.type.startswith("NCCL") or op.type in ("AtomicIter", "LearningRate"):
            continue
        (device,) = {name.split("/")[0] for name in op.output}
        assert f"gpu_{op.device_option.device_id}" == device, op
    reduced = [list(op.input) for op in model.net.proto.op if op.type == "NCCLAllreduce"]
    assert len(reduced) == 4
    assert ["gpu_0/fc1_w_grad", "gpu_1/fc1_w_grad"] in reduced


def test_mistakes_are_named():
    with pytest.raises(ArgumentError, match="no devices"):
        replicate(gpunet.Model(), build, [])
    with pytest.raises(ArgumentError, match="clip_norm is 1"):
        replicate(gpunet.Model(), build, ["cpu", "cpu"]).apply(SGD(0.1, clip_norm=1.0))

    def other(model):
        scores = model.fc(model.input(scoped("x"), (2, 3)), f"fc_of_{len(model.params)}", 1)
        return model.add("SumElements", [scores], scoped("loss"))

    with pytest.raises(NetError, match="differ in parameter 'fc_of_0_b'"):
        replicate(gpunet.Model(), other, ["cpu", "cpu"])

    def sparse(model):
        table = model.add_parameter("table", (5, 2))
        picked = model.add("Gather", [table, model.input(scoped("rows"), (3,), "int64")], scoped("picked"))
        return model.add("SumElements", [picked], scoped("loss"))

    with pytest.raises(GradientError, match="'table' is sparse"):
        replicate(gpunet.Model(), sparse, ["cpu", "cpu"])
