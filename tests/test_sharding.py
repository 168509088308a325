"""Optimizer state that is shared between ranks, here with one and with one of two that are alike."""

import numpy as np
import pytest

import gpunet
from gpunet.distributed import SingleCommunicator
from gpunet.distributed.sharding import SHARED, shard_optimizer
from gpunet.errors import ArgumentError, CheckpointError, GradientError
from gpunet.large_batch import LARS
from gpunet.mixed_precision import add_scaled_gradients, to_half
from gpunet.optimizers import SGD, Adam, Wngrad
from gpunet.zoo import build

RNG = np.random.default_rng(9)
IMAGES = RNG.random((12, 1, 8, 8), dtype=np.float32)
LABELS = (np.arange(12) % 3).astype(np.int32)


def train(optimizer, *, shared, steps=5):
    model = build("mlp", (1, 8, 8), 3)
    model.add_gradients("loss")
    sharded = shard_optimizer(model, optimizer, bucket_bytes=9_000, metrics=["loss"]) if shared else None
    if sharded is None:
        optimizer.apply(model)
    workspace = gpunet.Workspace("cpu", seed=5)
    workspace.run_once(model.init_net)
    if sharded is not None:
        sharded.start(workspace)
    workspace.feed("data", IMAGES)
    workspace.feed("label", LABELS)
    net = workspace.create(model.net, engine="async_scheduling", workers=1)
    losses = []
    for _ in range(steps):
        workspace.run(net)
        losses.append(float(workspace.fetch("loss")))
    return model, sharded, workspace, np.array(losses)


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("kind", SHARED, ids=lambda kind: kind.__name__)
def test_updates_are_those_of_whole_parameters(kind, clip):
    options = {"weight_decay": 1e-2, "clip_norm": clip} | ({"momentum": 0.9} if kind in (SGD, LARS) else {})
    plain = train(kind(0.01, **options), shared=False)
    shared = train(kind(0.01, **options), shared=True)
    np.testing.assert_allclose(shared[3], plain[3], atol=1e-6)
    for parameter in plain[0].params:
        np.testing.assert_allclose(shared[2].fetch(parameter.name), plain[2].fetch(parameter.name), atol=1e-6)


def test_state_is_gathered_restored_and_measured():
    model, sharded, workspace, _ = train(Adam(0.01), shared=True)
    assert model.state == ["optimizer_iteration"]
    state = sharded.state(workspace)
    elements = sum(workspace.fetch(p.name).size for p in model.params)
    assert sum(value.size for value in state.values()) == 2 * elements
    assert sharded.state_bytes() == (8 * elements, 8 * elements)
    # Names and shapes are those of one process.
    plain = train(Adam(0.01), shared=False)[0]
    assert sorted(sharded.training_blobs) == sorted(plain.training_blobs())
    assert state["fc1_w_first_moment"].shape == (256, 64)
    name = next(iter(state))
    sharded.put_state(workspace, {key: value * 2 for key, value in state.items()})
    np.testing.assert_array_equal(sharded.state(workspace)[name], state[name] * 2)
    with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
        sharded.put_state(workspace, {})
    with pytest.raises(CheckpointError, match="of shape"):
        sharded.put_state(workspace, {**state, name: state[name][1:]})


def test_a_scaled_loss_is_scaled_back_in_the_parts():
    model = build("mlp", (1, 8, 8), 3)
    to_half(model)
    add_scaled_gradients(model, "loss", initial_scale=64.0)
    sharded = shard_optimizer(model, SGD(0.1), metrics=["loss"])
    workspace = gpunet.Workspace("cpu", seed=5)
    workspace.run_once(model.init_net)
    sharded.start(workspace)
    workspace.feed("data", IMAGES)
    workspace.feed("label", LABELS)
    first = [workspace.fetch(p.name) for p in model.params]
    net = workspace.create(model.net)
    losses = []
    for _ in range(4):
        workspace.run(net)
        losses.append(float(workspace.fetch("loss")))
    assert losses[-1] < losses[0] - 0.01
    kinds = [op.type for op in model.net.proto.op]
    place = kinds.index("UnscaleGradients")
    assert kinds[place : place + 4] == ["UnscaleGradients", "Allreduce", "UpdateLossScale", "StopUnless"]
    # A sum that is not finite leaves everything as it was.
    workspace.feed("data", np.full_like(IMAGES, np.inf))
    before = [workspace.fetch(p.name) for p in model.params]
    workspace.run(net)
    for name, old in zip([p.name for p in model.params], before, strict=True):
        np.testing.assert_array_equal(workspace.fetch(name), old)
    assert any((a != b).any() for a, b in zip(first, before, strict=True))
    assert workspace.fetch("loss_scale_skipped_steps").tolist() == [1]


def test_micro_batches_gather_into_the_padded_bucket():
    model = build("mlp", (1, 8, 8), 3)
    model.add_gradients("loss")
    sharded = shard_optimizer(model, Adam(0.01), metrics=["loss"], accumulate=True)
    workspace = gpunet.Workspace("cpu", seed=5)
    workspace.run_once(model.init_net)
    sharded.start(workspace)
    net, micro = workspace.create(model.net), workspace.create(sharded.micro_net)
    plain = train(Adam(0.01), shared=False, steps=3)[3]
    losses = []
    for _ in range(3):
        total = 0.0
        for part, runs in ((slice(0, 5), micro), (slice(5, 12), net)):
            sharded.set_weight(workspace, part.stop - part.start, 12)
            workspace.feed("data", IMAGES[part])
            workspace.feed("label", LABELS[part])
            workspace.run(runs)
            total = float(workspace.fetch("loss"))
        losses.append(total)
    np.testing.assert_allclose(losses, plain, atol=1e-5)


class SecondOfThree(SingleCommunicator):
    rank, size = 1, 3


def test_each_rank_has_a_part_of_the_state():
    model = build("mlp", (1, 8, 8), 3)
    model.add_gradients("loss")
    sharded = shard_optimizer(model, Adam(0.01), communicator=SecondOfThree())
    here, whole = sharded.state_bytes()
    assert whole / 3 <= here < whole / 3 + 100
    np.testing.assert_array_equal(sharded._mine(np.arange(7.0)), [3, 4, 5])


def test_mistakes_are_named():
    model = build("mlp", (1, 8, 8), 3)
    with pytest.raises(ArgumentError, match="state of Wngrad cannot be shared between ranks, wanted one of"):
        shard_optimizer(model, Wngrad(0.1))
    with pytest.raises(GradientError, match="has 0 parameters with gradients"):
        shard_optimizer(model, SGD(0.1))
    model.add_gradients("loss")
    SGD(0.1).apply(model)
    with pytest.raises(GradientError, match="has an optimizer already"):
        shard_optimizer(model, SGD(0.1))
