"""The models of the zoo: their shapes, sizes and what they refuse."""

import math
from itertools import pairwise

import numpy as np
import pytest

import gpunet
from gpunet.errors import ShapeError
from gpunet.zoo import MODELS, ZooError, build, lookup

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]


def parameter_count(model):
    return sum(math.prod(model.shape_of(p.name)) for p in model.params)


def by_hand(name, channels, side, classes):
    """Numbers in the parameters, from the description of each model alone."""
    if name == "mlp":
        sizes = [channels * side * side, 256, 128, classes]
        return sum(a * b + b for a, b in pairwise(sizes))
    if name == "lenet":
        kernel = 5 if side >= 16 else 3
        after = ((side - 4) // 2 - 4) // 2 if side >= 16 else side // 4
        sizes = [(channels * kernel**2, 20), (20 * kernel**2, 50), (50 * after**2, 500), (500, classes)]
        return sum(a * b + b for a, b in sizes)
    convs = [(channels, 16, 3)] + [(16, 16, 3)] * 6
    convs += [(16, 32, 3), (32, 32, 3), (16, 32, 1)] + [(32, 32, 3)] * 4
    convs += [(32, 64, 3), (64, 64, 3), (32, 64, 1)] + [(64, 64, 3)] * 4
    return sum(a * b * k * k + 2 * b for a, b, k in convs) + 64 * classes + classes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_models_fit_small_and_large_images(name, shape):
    model = build(name, shape, 10)
    assert model.inputs == ["data", "label"]
    assert model.shape_of("softmax") == (1, 10)
    assert model.shape_of("loss") == ()
    assert model.shape_of("accuracy") == ()
    assert parameter_count(model) == by_hand(name, shape[0], shape[1], 10)


def test_sizes_are_those_of_the_literature():
    assert parameter_count(build("lenet", (1, 28, 28), 10)) == 431_080
    assert 0.26e6 < parameter_count(build("resnet20", (3, 32, 32), 10)) < 0.28e6


@pytest.mark.parametrize("name", MODELS)
def test_a_step_lowers_the_loss_of_its_batch(name):
    model = build(name, (1, 8, 8), 3)
    model.add_gradients("loss")
    from gpunet.optimizers import SGD

    SGD(learning_rate=0.01).apply(model)
    ws = gpunet.Workspace("cpu", seed=1)
    ws.run_once(model.init_net)
    net = ws.create(model.net)
    rng = np.random.default_rng(0)
    ws.feed("data", rng.random((6, 1, 8, 8), dtype=np.float32))
    ws.feed("label", np.arange(6, dtype=np.int32) % 3)
    losses = []
    for _ in range(8):
        ws.run(net)
        losses.append(float(ws.fetch("loss")))
    assert 0 < losses[-1] < losses[0] < 5


def test_the_inference_net_needs_no_labels_and_uses_running_statistics():
    net = build("resnet20", (1, 8, 8), 10).predict_net("softmax")
    assert net.external_input[0] == "data"
    assert "label" not in net.external_input
    assert "conv1_bn_rm" in net.external_input
    assert all(arg.i == 1 for op in net.op for arg in op.arg if arg.name == "is_test")


def test_decay_is_for_weights_alone():
    for name in MODELS:
        for parameter in build(name, (1, 8, 8), 10).params:
            assert parameter.decay == parameter.name.endswith("_w")


def test_what_is_refused():
    with pytest.raises(
        ZooError, match="no model 'lenett', wanted one of lenet, mlp, resnet20; did you mean lenet"
    ):
        lookup("lenett")
    with pytest.raises(ShapeError, match="images of 3x8 pixels, wanted at least 4x4"):
        build("lenet", (1, 3, 8), 10)
    with pytest.raises(ShapeError, match="wanted channels x height x width"):
        build("mlp", (8, 8), 10)
    with pytest.raises(ZooError, match="1 classes, wanted at least 2"):
        build("mlp", (1, 8, 8), 1)
