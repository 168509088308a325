"""LARS, LAMB, and learning rates for large batches."""

import numpy as np
import pytest

import gpunet
from gpunet.errors import ArgumentError, GradientError
from gpunet.large_batch import LAMB, LARS, scaled_rate, warm_up
from gpunet.schedules import Fixed, Step

WEIGHT = np.array([[3.0, -1.0], [0.5, 2.0]], np.float32)
INPUT = np.array([[1.0, 2.0]], np.float32)


def one_layer(optimizer):
    """``loss = sum(x w^T + b)``: the gradient of each row of w is x, that of b is 1."""
    model = gpunet.Model("line")
    x = model.input("x", (1, 2))
    scores = model.fc(x, "fc", 2)
    model.add("SumElements", [scores], "loss")
    model.add_gradients("loss")
    optimizer.apply(model)
    workspace = gpunet.Workspace("cpu")
    workspace.run_once(model.init_net)
    workspace.feed("fc_w", WEIGHT)
    workspace.feed("x", INPUT)
    return model, workspace


def test_lars_scales_the_rate_of_each_weight():
    model, workspace = one_layer(LARS(0.5, momentum=0.9, trust=0.1, weight_decay=0.01))
    net = workspace.create(model.net)
    w, b, moment = WEIGHT.astype(float), np.zeros(2), np.zeros((2, 2))
    bias_moment = np.zeros(2)
    gradient = np.repeat(INPUT, 2, axis=0)
    for _ in range(3):
        workspace.run(net)
        norm = np.linalg.norm(w)
        rate = 0.5 * 0.1 * norm / (np.linalg.norm(gradient) + 0.01 * norm)
        moment = 0.9 * moment + rate * (gradient + 0.01 * w)
        w -= moment
        # Biases have the plain rate and no decay.
        bias_moment = 0.9 * bias_moment + 0.5
        b -= bias_moment
    np.testing.assert_allclose(workspace.fetch("fc_w"), w, rtol=1e-5)
    np.testing.assert_allclose(workspace.fetch("fc_b"), b, rtol=1e-5)


def test_lamb_steps_have_the_norm_of_the_weight_times_the_rate():
    model, workspace = one_layer(LAMB(0.01, weight_decay=0.1))
    net = workspace.create(model.net)
    for _ in range(4):
        before = workspace.fetch("fc_w")
        workspace.run(net)
        step = np.linalg.norm(workspace.fetch("fc_w") - before)
        assert step == pytest.approx(0.01 * np.linalg.norm(before), rel=1e-4)
    assert {"fc_w_first_moment", "fc_w_second_moment"} <= set(model.state)
    decays = {op.input[0]: arg.f for op in model.net.proto.op if op.type == "Lamb" for arg in op.arg
              if arg.name == "weight_decay"}  # fmt: skip
    assert decays == {"fc_w": pytest.approx(0.1), "fc_b": 0}


@pytest.mark.parametrize("optimizer", [LARS(0.1), LAMB(0.01)])
def test_sparse_gradients_are_refused(optimizer):
    model = gpunet.Model("rows")
    rows = model.input("rows", (3,), "int64")
    table = model.add_parameter("table", (5, 2))
    model.add("SumElements", [model.add("Gather", [table, rows], "picked")], "loss")
    model.add_gradients("loss")
    with pytest.raises(GradientError, match="is sparse"):
        optimizer.apply(model)


def test_numbers_that_make_no_sense_are_refused():
    with pytest.raises(ArgumentError, match="trust is 0"):
        LARS(0.1, trust=0)
    with pytest.raises(ArgumentError, match="beta1 is 1"):
        LAMB(0.1, beta1=1)
    with pytest.raises(ArgumentError, match="batch_size 0"):
        scaled_rate(0.1, 0)
    with pytest.raises(ArgumentError, match="wanted linear or sqrt"):
        scaled_rate(0.1, 8, rule="cubic")
    with pytest.raises(ArgumentError, match="start 2"):
        warm_up(3, start=2)


def test_rates_for_a_batch_size():
    assert scaled_rate(0.1, 8192) == pytest.approx(3.2)
    assert scaled_rate(0.1, 64, 256) == pytest.approx(0.025)
    assert scaled_rate(0.1, 4096, rule="sqrt") == pytest.approx(0.4)


def rates(schedule, count):
    model, workspace = one_layer(LAMB(2.0, schedule=schedule))
    net = workspace.create(model.net)
    found = []
    for _ in range(count):
        workspace.run(net)
        found.append(-workspace.fetch("LAMB_0_lr").item())
    return found


def test_warm_up_is_a_ramp_before_the_schedule():
    ramp = [2 * i / 4 for i in range(1, 5)]
    assert rates(warm_up(4), 6) == pytest.approx([*ramp, 2, 2])
    assert rates(warm_up(4, Fixed()), 6) == pytest.approx([*ramp, 2, 2])
    found = rates(warm_up(4, Step(stepsize=6, gamma=0.1)), 8)
    assert found[:3] == pytest.approx(ramp[:3])
    assert found[4:] == pytest.approx([2, 0.2, 0.2, 0.2])
