"""Training in half types: what is cast, what stays float32, and what a step that overflows does."""

from __future__ import annotations

import numpy as np
import pytest

import gpunet
from gpunet import dtypes, mixed_precision
from gpunet.cuda_kernels.sim import toolchain
from gpunet.errors import ArgumentError, NetError

DEVICES = [
    "cpu",
    pytest.param("sim:0", marks=pytest.mark.skipif(toolchain.find() is None, reason="needs a C++ compiler")),
]


def build(name: str, *, half: bool, scale: float = 1024.0) -> gpunet.Model:
    model = gpunet.zoo.build(name, (1, 8, 8), 10)
    if half:
        mixed_precision.to_half(model)
    mixed_precision.add_scaled_gradients(model, "loss", initial_scale=scale, growth_interval=3)
    gpunet.optimizers.SGD(0.05, momentum=0.9).apply(model)
    return model


def prepared(model: gpunet.Model, device: str) -> gpunet.Workspace:
    ws = gpunet.Workspace(device, seed=1)
    ws.run_once(model.init_net)
    rng = np.random.default_rng(0)
    ws.feed("data", rng.normal(size=(8, 1, 8, 8)).astype(np.float32))
    ws.feed("label", rng.integers(0, 10, 8).astype(np.int32))
    ws.create(model.net)
    return ws


def train(model: gpunet.Model, device: str, steps: int) -> list[float]:
    ws = prepared(model, device)
    result = []
    for _ in range(steps):
        ws.run(model.net)
        result.append(float(ws.fetch("loss")))
    return result


def losses(name: str, device: str, steps: int = 4, *, half: bool) -> list[float]:
    return train(build(name, half=half), device, steps)


def in_bfloat16(name: str) -> gpunet.Model:
    """Without a scale of the loss."""
    model = gpunet.zoo.build(name, (1, 8, 8), 10)
    mixed_precision.to_half(model, "bfloat16")
    model.add_gradients("loss")
    gpunet.optimizers.SGD(0.05, momentum=0.9).apply(model)
    return model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["lenet", "mlp"])
def test_losses_are_those_of_float32_to_float16_accuracy(name, device):
    want = losses(name, "cpu", half=False)
    got = losses(name, device, half=True)
    np.testing.assert_allclose(got, want, rtol=2e-2)
    assert got != want


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["lenet", "mlp"])
def test_losses_are_those_of_float32_to_bfloat16_accuracy(name, device):
    want = losses(name, "cpu", half=False)
    got = train(in_bfloat16(name), device, len(want))
    np.testing.assert_allclose(got, want, rtol=5e-2)
    assert got != want


def test_a_residual_network_trains_in_bfloat16():
    got = train(in_bfloat16("resnet20"), "cpu", 6)
    assert np.isfinite(got).all()
    assert got[-1] < got[0]


def test_types_in_bfloat16():
    model, kind = in_bfloat16("resnet20"), dtypes.bfloat16()
    ws = prepared(model, "cpu")
    ws.run(model.net)
    for name in (n for p in model.params for n in (p.name, str(p.gradient))):
        assert ws.fetch(name).dtype == np.float32
    convolutions = [op for op in model.net.proto.op if op.type in ("Conv", "ConvGradient")]
    assert convolutions
    assert {ws.fetch(name).dtype for op in convolutions for name in op.output} == {kind}
    norms = [op for op in model.net.proto.op if op.type == "SpatialBN"]
    assert {ws.fetch(name).dtype for op in norms for name in op.output} == {np.dtype(np.float32)}
    casts = [op for op in model.net.proto.op if op.type == "Cast"]
    assert len(casts) > len(convolutions)
    assert mixed_precision.SCALE not in model.state


def test_bfloat16_may_have_a_scale_too():
    model = gpunet.zoo.build("mlp", (1, 8, 8), 10)
    mixed_precision.to_half(model, "bfloat16")
    mixed_precision.add_scaled_gradients(model, "loss", initial_scale=2.0**40)
    gpunet.optimizers.SGD(0.05, momentum=0.9).apply(model)
    ws = prepared(model, "cpu")
    ws.run(model.net, 2)
    assert ws.fetch(mixed_precision.SKIPPED).item() == 0


def test_a_residual_network_trains():
    got = losses("resnet20", "cpu", 6, half=True)
    assert np.isfinite(got).all()
    assert got[-1] < got[0]


def test_types():
    model = build("resnet20", half=True)
    ws = prepared(model, "cpu")
    ws.run(model.net)
    assert all(ws.fetch(p.name).dtype == np.float32 for p in model.params), "master weights are float32"
    assert all(ws.fetch(str(p.gradient)).dtype == np.float32 for p in model.params)
    convolutions = [op for op in model.net.proto.op if op.type == "Conv"]
    assert convolutions
    assert all(ws.fetch(op.output[0]).dtype == np.float16 for op in convolutions)
    norms = [op for op in model.net.proto.op if op.type == "SpatialBN"]
    assert norms
    assert all(ws.fetch(name).dtype == np.float32 for op in norms for name in op.output)
    assert ws.fetch("loss").dtype == np.float32


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_overflows_is_skipped_and_said(device, caplog):
    model = build("mlp", half=True)
    ws = prepared(model, device)
    ws.run(model.net)
    before = {name: ws.fetch(name) for name in model.training_blobs() if not name.startswith("loss_scale")}
    good = ws.fetch("data")
    ws.feed("data", np.full_like(good, 1e6))
    ws.run(model.net)
    for name, value in before.items():
        if name not in model.statistics:
            np.testing.assert_array_equal(ws.fetch(name), value, err_msg=name)
    assert ws.fetch(mixed_precision.SKIPPED).item() == 1
    assert ws.fetch(mixed_precision.SCALE).item() == 512
    assert "the step is skipped (1 so far)" in caplog.text
    ws.feed("data", good)
    ws.run(model.net)
    assert ws.fetch("optimizer_iteration").item() == before["optimizer_iteration"].item() + 1
    changed = [p.name for p in model.params if not np.array_equal(ws.fetch(p.name), before[p.name])]
    assert len(changed) == len(model.params)


def test_the_scale_grows_after_good_steps():
    model = build("mlp", half=True)
    ws = prepared(model, "cpu")
    ws.run(model.net, 7)
    assert ws.fetch(mixed_precision.SCALE).item() == 4096


def test_refusals():
    model = gpunet.zoo.build("mlp", (1, 8, 8), 10)
    with pytest.raises(ArgumentError, match="initial_scale is -1"):
        mixed_precision.add_scaled_gradients(model, "loss", initial_scale=-1)
    with pytest.raises(ArgumentError, match="dtype is float64, wanted float16 or bfloat16"):
        mixed_precision.to_half(model, "float64")
    model.add_gradients("loss")
    with pytest.raises(NetError, match="gradients already"):
        mixed_precision.to_half(model)
