"""Optimizer state that is shared between ranks, here with one and with one of two that are alike."""

import numpy as np
import pytest

import gpunet
from gpunet.distributed import SingleCommunicator
from gpunet.distributed.sharding import ELEMENTWISE, shard_optimizer
from gpunet.errors import ArgumentError, CheckpointError, GradientError
from gpunet.large_batch import LAMB
from gpunet.optimizers import SGD, Adam
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


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_updates_are_those_of_whole_parameters(kind):
    options = {"weight_decay": 1e-2} | ({"momentum": 0.9} if kind is SGD else {})
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
    name = next(iter(state))
    sharded.restore(workspace, {key: value * 2 for key, value in state.items()})
    np.testing.assert_array_equal(sharded.state(workspace)[name], state[name] * 2)
    with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
        sharded.restore(workspace, {})
    with pytest.raises(CheckpointError, match="of shape"):
        sharded.restore(workspace, {**state, name: state[name][1:]})


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
    for optimizer in (LAMB(0.1), SGD(0.1, clip_norm=1.0)):
        with pytest.raises(ArgumentError, match="needs more than parts of parameters"):
            shard_optimizer(model, optimizer)
    with pytest.raises(GradientError, match="has 0 parameters with gradients"):
        shard_optimizer(model, SGD(0.1))
    model.add_gradients("loss")
    SGD(0.1).apply(model)
    with pytest.raises(GradientError, match="has an optimizer already"):
        shard_optimizer(model, SGD(0.1))
