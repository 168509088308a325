"""The pass that lets updates take over weight decay, on the simulated device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpunet
from gpunet import optimizers
from gpunet.cuda_kernels.sim import toolchain
from gpunet.definitions import make_operator
from gpunet.proto import NetDef

if toolchain.find() is None:
    pytest.skip(toolchain.MISSING, allow_module_level=True)


def trained(optimizer: Any, without: list[str]) -> tuple[list[str], dict[str, np.ndarray]]:
    """Types of the operators of a training net, and its parameters after three steps."""
    model = gpunet.Model()
    x = model.input("x", (5, 6))
    hidden = model.relu(model.fc(x, "a", 7), "h")
    model.add("Sqr", model.fc(hidden, "b", 3), "square")
    model.add("AveragedLoss", "square", "loss")
    model.add_gradients("loss")
    optimizer.apply(model)
    workspace = gpunet.Workspace("sim:0", seed=3)
    workspace.run_once(model.init_net)
    workspace.feed("x", np.random.default_rng(4).standard_normal((5, 6)).astype("float32"))
    name = model.net.proto.name
    workspace.create(model.net, keep=["loss"], without=without)
    workspace.run(name, 3)
    nodes = [n for s in workspace.program(name).segments() for n in s.compiled.graph.nodes]
    types = [node.op.type for node in nodes if node.op is not None]
    return types, {blob: workspace.fetch(blob) for blob in model.training_blobs()}


@pytest.mark.parametrize(
    ("optimizer", "plain"),
    [
        (optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01), "MomentumSGDUpdate"),
        (optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01), "MomentumSGDUpdate"),
        (optimizers.Adam(0.01, weight_decay=0.01), "Adam"),
    ],
    ids=["momentum", "nesterov", "adam"],
)
def test_weight_decay_is_taken_over(optimizer: Any, plain: str) -> None:
    fused, blobs = trained(optimizer, [])
    before, want = trained(optimizer, ["updates"])
    name = {"MomentumSGDUpdate": "FusedMomentumSGDUpdate", "Adam": "FusedAdam"}[plain]
    # Filters decay, biases do not.
    assert (before.count("WeightedSum"), before.count(plain), before.count(name)) == (2, 4, 0)
    assert (fused.count("WeightedSum"), fused.count(plain), fused.count(name)) == (0, 2, 2)
    for blob, value in want.items():
        np.testing.assert_array_equal(blobs[blob], value, err_msg=blob)


def types_of(ops: list[Any], keep: tuple[str, ...]) -> list[str]:
    workspace = gpunet.Workspace("sim:0")
    for blob in "gmwv":
        workspace.feed(blob, np.ones(4, "float32"))
    for blob in ("lr", "one", "wd"):
        workspace.feed(blob, np.full(1, 0.5, "float32"))
    net = NetDef(name="n", op=[make_operator(t, i.split(), o.split(), **a) for t, i, o, a in ops])
    workspace.create(net, keep=keep)
    workspace.run("n")
    return [node.op.type for node in workspace.program("n").segments()[0].compiled.graph.nodes]


UPDATE = ("MomentumSGDUpdate", "d m lr w", "d m w", {"momentum": 0.5})


def test_what_is_left_alone() -> None:
    decay = ("WeightedSum", "g one w wd", "d", {})
    keep = ("w", "m")
    assert types_of([decay, UPDATE], keep) == ["FusedMomentumSGDUpdate"]
    # The sum is read by another, it is of another parameter, and a weight is written in between.
    shown = [decay, ("SumSqrElements", "d", "norm", {}), UPDATE]
    assert "FusedMomentumSGDUpdate" not in types_of(shown, (*keep, "norm"))
    other = [("WeightedSum", "g one v wd", "d", {}), UPDATE]
    assert "FusedMomentumSGDUpdate" not in types_of(other, keep)
    changed = [decay, ("Copy", "lr", "wd", {}), UPDATE]
    assert "FusedMomentumSGDUpdate" not in types_of(changed, (*keep, "wd"))
    three = [("WeightedSum", "g one w wd v one", "d", {}), UPDATE]
    assert "FusedMomentumSGDUpdate" not in types_of(three, keep)
    seen = [
        ("WeightedSum", "g one w wd", "e", {}),
        ("MomentumSGDUpdate", "e m lr w", "s m w", {"momentum": 0.5}),
    ]
    assert "FusedMomentumSGDUpdate" not in types_of(seen, (*keep, "e"))
    assert types_of(seen, keep) == ["FusedMomentumSGDUpdate"]
