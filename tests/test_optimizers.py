"""Optimizers and schedules: what they append to a model, against Caffe2's own nets, and that it trains."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

import gpunet
from gpunet import schedules
from gpunet.arguments import REQUIRED
from gpunet.errors import ArgumentError, GradientError
from gpunet.operators.learning_rate import POLICIES
from gpunet.optimizers import SGD, Adadelta, Adagrad, Adam, Optimizer, RmsProp, Wngrad, YellowFin
from gpunet.proto import NetDef, OperatorDef

GOLDEN = pathlib.Path(__file__).parent / "golden" / "nets"
OPTIMIZERS: list[Optimizer] = [
    SGD(learning_rate=0.1),
    SGD(learning_rate=0.02, momentum=0.9),
    SGD(learning_rate=0.02, momentum=0.9, nesterov=True),
    Adagrad(learning_rate=0.2),
    Adadelta(learning_rate=2.0),
    RmsProp(learning_rate=0.02, momentum=0.5),
    Adam(learning_rate=0.05),
    Wngrad(learning_rate=20.0),
    YellowFin(learning_rate=0.05, momentum=0.3),
]


def linear(rows: int = 16) -> gpunet.Model:
    """``loss = mean |x w^T + b - y|^2 / 2`` with its gradients."""
    model = gpunet.Model("linear")
    model.input("x", (rows, 3))
    model.input("y", (rows, 2))
    model.add_parameter("w", (2, 3))
    model.add_parameter("b", (2,), "ConstantFill", decay=False)
    model.add("FC", ["x", "w", "b"], ["z"])
    model.add("SquaredL2Distance", ["z", "y"], ["distance"])
    model.add("AveragedLoss", ["distance"], ["loss"])
    model.add_gradients("loss")
    return model


def embedding() -> gpunet.Model:
    """A model whose only parameter gets a sparse gradient."""
    model = gpunet.Model("embedding")
    model.input("indices", (3,), "int64")
    model.input("y", (3, 2))
    model.add_parameter("table", (5, 2))
    model.add("Gather", ["table", "indices"], ["rows"])
    model.add("SquaredL2Distance", ["rows", "y"], ["distance"])
    model.add("AveragedLoss", ["distance"], ["loss"])
    model.add_gradients("loss")
    return model


def started(model: gpunet.Model, **feeds: np.ndarray) -> gpunet.Workspace:
    workspace = gpunet.Workspace("cpu")
    workspace.run_once(model.init_net)
    for name, value in feeds.items():
        workspace.feed(name, value)
    workspace.create(model.net)
    return workspace


def linear_data(seed: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((16, 3)).astype(np.float32)
    return {"x": x, "y": x @ np.array([[1, -1], [0.5, 2], [0, 1]], np.float32) + np.float32(0.5)}


def appended(optimizer: Optimizer, model: gpunet.Model) -> list[OperatorDef]:
    before = len(model.net.proto.op)
    optimizer.apply(model)
    return list(model.net.proto.op[before:])


def same_as_caffe2(name: str, optimizer: Optimizer) -> None:
    """Compares the updates of the parameters of a golden net.

    Types, blobs and arguments, but for the name of the rate's blob.
    """
    with np.load(GOLDEN / f"{name}.npz") as stored:
        golden = NetDef.FromString(stored["net"].tobytes())
        init = NetDef.FromString(stored["init_net"].tobytes())
    model = gpunet.Model("lenet")
    # Caffe2 lists parameters in the order of their creation, and so do the fills of the init net.
    for op in init.op:
        if op.type == "XavierFill" or (op.output[0].endswith("_b") and not op.input):
            model.add_parameter(
                op.output[0], tuple(op.arg[0].ints), op.type, decay=op.output[0].endswith("_w")
            )
    for parameter in model.params:
        parameter.gradient = f"{parameter.name}_grad"
    produced = {output for op in golden.op for output in op.output if op.type.endswith("Gradient")}
    assert {p.gradient for p in model.params} <= produced
    length = max(i for i, op in enumerate(golden.op) if op.type.endswith("Gradient")) + 1
    # Copies between devices, and the scaled rate made anew for each parameter, are Caffe2's own.
    left_out = {"EnsureCPUOutput", "CopyFromCPUInput", "Mul"}
    wanted = [described(op) for op in golden.op[length:] if op.type not in left_out]
    found = [described(op) for op in appended(optimizer, model) if op.type not in left_out]
    assert found == wanted
    state = {
        name
        for op in init.op
        for name in op.output
        if op.output[0].startswith(tuple(p.name for p in model.params))
    }
    assert state - {p.name for p in model.params} == set(model.state) - {"optimizer_iteration"}


def described(op: OperatorDef) -> tuple[Any, ...]:
    """Type, blobs and arguments, with one name for rates and without the default of ``nesterov``."""

    def blob(name: str) -> str:
        if name.endswith(("_lr_cpu", "_lr", "_lr_scaled")) and not name.startswith(("conv", "fc", "pred")):
            return "lr"
        if "EnsureCPUOutput" in name:
            number = int(name.rpartition("_")[2]) - 1 if "_" in name.rpartition("/")[2] else 0
            return f"norm_clipped_grad_update/grad_{number}_squared_sum"
        return {"ONE_0_0": "ONE", "wd_0_0": "wd"}.get(name, name)

    arguments = {a.name: a.SerializeToString() for a in op.arg if not (a.name == "nesterov" and a.i == 0)}
    return op.type, [blob(n) for n in op.input], [blob(n) for n in op.output], arguments


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("lenet_sgd", SGD(learning_rate=0.1, schedule=schedules.Step(stepsize=3, gamma=0.5))),
        ("lenet_sgd_momentum", SGD(learning_rate=0.05, momentum=0.9, nesterov=True)),
        (
            "lenet_sgd_nesterov",
            SGD(
                learning_rate=0.05,
                momentum=0.9,
                nesterov=True,
                schedule=schedules.Inverse(gamma=0.1, power=0.75),
            ),
        ),
        ("lenet_weight_decay", SGD(learning_rate=0.1, weight_decay=0.01)),
        ("lenet_clip_norm", SGD(learning_rate=0.1, clip_norm=0.1)),
        ("lenet_adagrad", Adagrad(learning_rate=0.05)),
        ("lenet_adam", Adam(learning_rate=0.01)),
        ("lenet_wngrad", Wngrad(learning_rate=0.5)),
        ("lenet_yellowfin", YellowFin(learning_rate=0.1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_updates_are_those_of_caffe2(name: str, optimizer: Optimizer) -> None:
    same_as_caffe2(name, optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_training_lowers_the_loss(optimizer: Optimizer) -> None:
    model = linear()
    optimizer.apply(model)
    workspace = started(model, **linear_data())
    workspace.run("linear")
    first = workspace.fetch("loss").item()
    workspace.run("linear", 60)
    assert workspace.fetch("loss").item() < first / 2
    assert workspace.fetch("optimizer_iteration").tolist() == [61]


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(learning_rate=0.2),
        SGD(learning_rate=0.05, momentum=0.8, nesterov=True),
        SGD(learning_rate=0.2, clip_norm=1.0),
        Adagrad(learning_rate=0.2),
        Adadelta(learning_rate=2.0),
        Adam(learning_rate=0.05, clip_norm=1.0),
        Wngrad(learning_rate=20.0),
    ],
    ids=lambda o: type(o).__name__,
)
def test_sparse_gradients_change_their_rows_alone(optimizer: Optimizer) -> None:
    model = embedding()
    optimizer.apply(model)
    workspace = started(model, indices=np.array([4, 1, 4]), y=np.ones((3, 2), np.float32))
    before = workspace.fetch("table")
    workspace.run("embedding")
    first = workspace.fetch("loss").item()
    workspace.run("embedding", 50)
    after = workspace.fetch("table")
    assert workspace.fetch("loss").item() < first
    np.testing.assert_array_equal(before[[0, 2, 3]], after[[0, 2, 3]])
    assert (before[[1, 4]] != after[[1, 4]]).all()


def test_weight_decay_acts_on_marked_parameters_alone() -> None:
    """Without a gradient from the loss, one step scales the weights by ``1 - rate decay``."""
    model = linear()
    SGD(learning_rate=0.5, weight_decay=0.2).apply(model)
    workspace = started(model, **linear_data())
    weights = workspace.fetch("w")
    bias = np.array([3.0, -4.0], np.float32)
    workspace.feed("b", bias)
    workspace.feed("y", linear_data()["x"] @ weights.T + bias)
    workspace.run("linear")
    np.testing.assert_allclose(workspace.fetch("w"), weights * 0.9, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(workspace.fetch("b"), bias, rtol=1e-5)


@pytest.mark.parametrize("kind", [SGD, Adagrad], ids=lambda kind: kind.__name__)
def test_clipping_limits_the_norm_of_all_gradients(kind: type[Optimizer]) -> None:
    """A step with clipping is a step with gradients scaled by ``clip_norm / norm``."""
    steps = {}
    for clip_norm in (0.0, 0.25, 1e6):
        model = linear()
        kind(learning_rate=0.1, clip_norm=clip_norm).apply(model)
        workspace = started(model, **linear_data())
        for name, shape in (("w", (2, 3)), ("b", (2,))):
            workspace.feed(name, np.zeros(shape, np.float32))
        workspace.run("linear")
        steps[clip_norm] = [workspace.fetch(name) for name in ("w", "b", "w_grad", "b_grad")]
    gradients = [x.astype(np.float64) for x in steps[0.0][2:]]
    norm = np.sqrt(sum((g**2).sum() for g in gradients))
    assert norm > 0.25
    for parameter, gradient in zip(steps[0.25][:2], gradients, strict=True):
        clipped = gradient * 0.25 / norm
        wanted = -0.1 * (clipped if kind is SGD else clipped / (np.abs(clipped) + 1e-4))
        np.testing.assert_allclose(parameter, wanted, rtol=1e-4)
    for unclipped, bounded in zip(steps[0.0][:2], steps[1e6][:2], strict=True):
        np.testing.assert_allclose(bounded, unclipped, rtol=1e-6)


def test_parameters_that_share_a_gradient_are_updated_from_their_own_copies() -> None:
    model = gpunet.Model("shared")
    model.add_parameter("u", (4,), "ConstantFill", value=1.0)
    model.add_parameter("v", (4,), "ConstantFill", value=2.0)
    model.add("Add", ["u", "v"], ["s"])
    model.add("Sqr", ["s"], ["squares"])
    model.add("AveragedLoss", ["squares"], ["loss"])
    model.add_gradients("loss")
    for parameter in model.params:
        parameter.gradient = model.params[0].gradient
    SGD(learning_rate=1.0, momentum=0.5, weight_decay=0.1).apply(model)
    workspace = started(model)
    workspace.run("shared")
    # The gradient of the mean of (u + v)^2 is 1.5 in each element.
    np.testing.assert_allclose(workspace.fetch("u"), np.full(4, 1 - 1.5 - 0.1), rtol=1e-5)
    np.testing.assert_allclose(workspace.fetch("v"), np.full(4, 2 - 1.5 - 0.2), rtol=1e-5)


def test_schedules_reach_the_operator() -> None:
    model = linear()
    schedule = schedules.Composite(
        [
            schedules.Segment(2, schedules.LinearWarmup(start_multiplier=0.5, num_iter=2)),
            schedules.Segment(3, schedules.Step(stepsize=2, gamma=0.1), scale=2.0),
        ]
    )
    SGD(learning_rate=0.5, schedule=schedule).apply(model)
    workspace = started(model, **linear_data())
    rates = []
    for _ in range(4):
        workspace.run("linear")
        rates.append(workspace.fetch("SGD_0_lr").item())
    np.testing.assert_allclose(rates, [-0.375, -0.5, -0.1, -0.01], rtol=1e-5)


def test_state_is_what_a_checkpoint_must_hold() -> None:
    model = linear()
    Adam(weight_decay=0.1, clip_norm=1.0).apply(model)
    assert sorted(model.state) == sorted(
        ["optimizer_iteration", *(f"{p}_{m}_moment" for p in ("w", "b") for m in ("first", "second"))]
    )


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_schedule_has_the_arguments_of_its_policy(policy: str) -> None:
    if policy == "composite":
        assert set(schedules.Composite([]).arguments()) == {"policy", "sub_policy_num_iters"}
        return
    declared = {arg.name: arg.default for arg in POLICIES[policy].args}
    kind = schedules.SCHEDULES[policy]
    required = {name: 1 for name, default in declared.items() if default is REQUIRED}
    assert kind(**required).arguments() == {"policy": policy, **declared, **required}


def test_a_schedule_by_the_name_of_its_policy() -> None:
    assert schedules.schedule("step", stepsize=3, gamma=0.5) == schedules.Step(3, 0.5)
    assert SGD(learning_rate=1, schedule="fixed").schedule == schedules.Fixed()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SGD(learning_rate=0.1, momentum=-0.5),
            "SGD: momentum is -0.5, wanted at least 0 and less than 1",
        ),
        (lambda: SGD(learning_rate=0.0), "SGD: learning_rate is 0.0, wanted more than 0"),
        (lambda: SGD(learning_rate=float("nan")), "learning_rate is nan, wanted more than 0"),
        (lambda: SGD(learning_rate=0.1, nesterov=True), "momentum is 0, wanted a momentum of more than 0"),
        (lambda: SGD(learning_rate=0.1, weight_decay=-1), "weight_decay is -1, wanted at least 0"),
        (lambda: Adam(beta2=1.0), "Adam: beta2 is 1.0, wanted at least 0 and less than 1"),
        (lambda: Adagrad(clip_norm=-2.0), "clip_norm is -2.0, wanted at least 0"),
        (lambda: RmsProp(schedule="stepp"), "'stepp' is no learning-rate policy; did you mean step"),
        (lambda: RmsProp(schedule="zigzag"), "wanted one of fixed, step"),
        (lambda: RmsProp(schedule="step"), "policy 'step' got the arguments none, wanted stepsize, gamma"),
        (lambda: RmsProp(schedule=3), "schedule is 3, wanted one of gpunet.schedules"),
        (lambda: YellowFin(schedule="fixed"), "wanted none: it tunes the rate itself"),
        (lambda: YellowFin(curv_win_width=0), "curv_win_width is 0, wanted at least 1"),
        (
            lambda: schedules.schedule("step", stepsize=3, gama=0.5),
            "got the arguments stepsize, gama, wanted",
        ),
    ],
)
def test_senseless_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        make()
    assert message in str(caught.value)


def unchanged(model: gpunet.Model, optimizer: Optimizer, error: type[Exception], message: str) -> None:
    before = (model.net.proto.SerializeToString(), model.init_net.proto.SerializeToString())
    with pytest.raises(error) as caught:
        optimizer.apply(model)
    assert message in str(caught.value)
    assert (model.net.proto.SerializeToString(), model.init_net.proto.SerializeToString()) == before


def test_models_that_cannot_be_updated_are_refused_and_unchanged() -> None:
    bare = gpunet.Model("bare")
    bare.add_parameter("w", (2, 3))
    unchanged(
        bare, SGD(learning_rate=0.1), GradientError, "wanted model.add_gradients(loss) before an optimizer"
    )
    done = linear()
    SGD(learning_rate=0.1).apply(done)
    unchanged(done, SGD(learning_rate=0.1), GradientError, "has an optimizer already")
    unchanged(embedding(), RmsProp(), GradientError, "the gradient of parameter 'table' is sparse")
    unchanged(embedding(), YellowFin(), GradientError, "the gradient of parameter 'table' is sparse")
    unchanged(embedding(), Adagrad(decay=0.9), GradientError, "wanted SGD, Adagrad without decay")
    unchanged(embedding(), SGD(learning_rate=0.1, weight_decay=0.1), GradientError, "wanted weight_decay=0")
    bad = SGD(learning_rate=0.1, schedule=schedules.Step(stepsize=0, gamma=0.5))
    unchanged(linear(), bad, ArgumentError, "argument 'stepsize' of policy 'step' is 0, wanted more than 0")
