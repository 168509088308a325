"""Epilogues: what a convolution takes over and what it must not, and the same bits as without."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from click.testing import CliRunner

import gpunet
from gpunet.cli import main
from gpunet.dtypes import BFLOAT16
from gpunet.errors import BlobError
from gpunet.proto import NetDef, OperatorDef
from gpunet.records import check_races
from tests.nets import DEVICES, nodes_of, op

CONV = op("Conv", "x w b", "c", kernel=3, pad=1)
WAITING = op("Tanh", "r", "t")
WAITING.control_input.append("c")
DTYPES = ["float32", "float16", "float64", *([] if BFLOAT16 is None else ["bfloat16"])]
FEEDS = {"x": (3, 4, 6, 6), "w": (4, 4, 3, 3), "b": (4,), "r": (3, 4, 6, 6), "u": (5, 144), "v": (5,)}


def ran(
    ops: list[OperatorDef], device: str = "cpu", *, keep=("y",), runs: int = 1, dtype="float32", **options
) -> gpunet.Workspace:
    ws = gpunet.Workspace(device)
    for seed, (name, shape) in enumerate(FEEDS.items()):
        ws.feed(name, np.random.default_rng(seed).normal(size=shape).astype(dtype))
    ws.create(NetDef(name="n", op=ops), keep=keep, **options)
    ws.run("n", runs)
    assert not check_races(ws.program("n"))
    return ws


def shown(ws: gpunet.Workspace) -> list[str]:
    """The operators, with their epilogues."""
    found = ((node.op.type, getattr(node.op.args, "epilogue", "")) for node in nodes_of(ws))
    return [" ".join(filter(None, pair)) for pair in found]


def same(ops: list[OperatorDef], device: str = "cpu", *, keep=("y",), without=(), **options) -> list[str]:
    """What runs with the pass, after a comparison of bits with what runs without it."""
    got = ran(ops, device, keep=keep, without=without, **options)
    want = ran(ops, device, keep=keep, without=["epilogues", *without], **options)
    for name in [*keep, *FEEDS]:
        np.testing.assert_array_equal(got.fetch(name), want.fetch(name), err_msg=name)
    return shown(got)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("ops", "want"),
    [
        ([CONV, op("Relu", "c", "y")], "bias+relu"),
        ([CONV, op("Relu", "c", "c"), op("Copy", "c", "y")], "bias+relu"),
        ([CONV, op("Sigmoid", "c", "y")], "bias+sigmoid"),
        ([CONV, op("Sum", "c r", "c"), op("Sigmoid", "c", "y")], "bias+add"),
        ([CONV, op("Sum", "c r", "y")], "bias+add"),
        ([CONV, op("Add", "r c", "y")], "bias+add"),
        ([CONV, op("Sum", "r c", "s"), op("Relu", "s", "y")], "bias+add+relu"),
        ([CONV, op("Sum", "c r", "c"), op("Relu", "c", "y")], "bias+add+relu"),
        ([op("Conv2D", "x w", "c", kernel=3, pad=1), op("Relu", "c", "y")], "relu"),
    ],
)
def test_a_convolution_takes_over_what_follows(device, dtype, ops, want):
    found = same(ops, device, dtype=dtype)
    assert found[0] == f"FusedConv {want}"
    assert found[1:] in ([], ["Copy"], ["Sigmoid"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["FC", "FCTransposed"])
def test_a_product_takes_over_a_relu(device, kind):
    ops = [op("FC", "x u v", "h"), op("Relu", "h", "y")]
    if kind == "FCTransposed":
        ops[0] = op(kind, "x t v", "h")
        ops.insert(0, op("Transpose", "u", "t"))
    assert same(ops, device)[-1] == f"Fused{kind} relu"
    ops[-1] = op("Sigmoid", "h", "y")
    assert same(ops, device)[-2:] == [kind, "Sigmoid"]


def test_what_is_in_between_is_internal():
    with pytest.raises(BlobError, match="blob 'c' is internal to net 'n'"):
        ran([CONV, op("Relu", "c", "y")]).fetch("c")


@pytest.mark.parametrize(
    "ops",
    [
        # Read by two.
        [CONV, op("Relu", "c", "h"), op("Mul", "h c", "y")],
        # Read twice.
        [CONV, op("Sum", "c c", "y")],
        # Three terms; another shape.
        [CONV, op("Sum", "c r x", "y")],
        [CONV, op("Add", "c b", "y", broadcast=1, axis=1)],
        # Over the tensor that is added, or over the images: the convolution writes before it has read all.
        [CONV, op("Sum", "r c", "r"), op("Softmax", "r", "y")],
        [CONV, op("Relu", "c", "x"), op("Softmax", "x", "y")],
        # An engine was asked for.
        [op("Conv", "x w b", "c", kernel=3, pad=1, engine="DIRECT"), op("Relu", "c", "y")],
        # Another operator waits for what is in between.
        [CONV, op("Relu", "c", "h"), WAITING, op("Mul", "h t", "y")],
    ],
)
def test_what_stays(ops):
    assert same(ops, without=["fusion"]) == [definition.type for definition in ops]


def test_what_is_kept_stays():
    ops = [CONV, op("Sum", "c r", "s"), op("Relu", "s", "y")]
    assert same(ops, keep=["y", "c"], without=["fusion"]) == ["Conv", "Sum", "Relu"]
    assert same(ops, keep=["y", "s"]) == ["FusedConv bias+add", "Relu"]
    assert shown(ran(ops, keep=None, without=["fusion"])) == ["Conv", "Sum", "Relu"]
    # What the blob holds before it is written again is not kept.
    in_place = [CONV, op("Sum", "c r", "c"), op("Relu", "c", "c"), op("Softmax", "c", "y")]
    assert shown(ran(in_place, keep=None)) == ["FusedConv bias+add+relu", "Softmax"]


def test_what_is_read_must_still_hold():
    overwritten = [CONV, op("Scale", "x", "x", scale=2.0), op("Sum", "c x", "y")]
    assert same(overwritten, without=["fusion"]) == ["Conv", "Scale", "Sum"]
    # A shorter epilogue ends in front of the write.
    shorter = [CONV, op("Sum", "c r", "s"), op("Scale", "x", "x", scale=2.0), op("Relu", "s", "y")]
    assert same(shorter)[0] == "FusedConv bias+add"


def test_of_two_convolutions_that_are_added_the_later_takes_the_sum():
    other = op("Conv", "r w", "d", kernel=3, pad=1)
    ops = [CONV, other, op("Sum", "c d", "s"), op("Relu", "s", "y")]
    assert same(ops) == ["Conv", "FusedConv add+relu"]


def test_fusion_gets_what_is_left():
    ops = [CONV, op("Relu", "c", "h"), op("Sqr", "h", "q"), op("Sum", "q r", "y")]
    got = ran(ops)
    assert shown(got) == ["FusedConv bias+relu", "Sqr", "Sum"]  # as small tensors stay on the CPU


@pytest.mark.parametrize("device", DEVICES)
def test_the_forward_part_of_training_takes_part(device):
    model = gpunet.Model("m")
    x = model.relu(model.conv(model.input("data", (2, 3, 8, 8)), "conv", 4, 3, pad=1))
    model.add("SquaredL2Distance", [model.fc(x, "fc", 3), model.input("t", (2, 3))], ["d"])
    model.add("AveragedLoss", ["d"], ["loss"])
    model.add_gradients("loss")
    gpunet.optimizers.SGD(0.1).apply(model)
    results = []
    for without in ((), ("epilogues",)):
        ws = gpunet.Workspace(device, seed=3)
        ws.run_once(model.init_net)
        ws.feed("data", np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32))
        ws.feed("t", np.ones((2, 3), np.float32))
        ws.create(model.net, keep=["loss"], without=without)
        ws.run(model.net.name, 3)
        assert not check_races(ws.program(model.net.name))
        types = [node.op.type for node in nodes_of(ws, model.net.name) if node.op is not None]
        assert ("FusedConv" in types) == (not without)
        results.append({name: ws.fetch(name) for name in ("loss", "conv_w", "conv_b", "fc_w")})
    for name, value in results[0].items():
        np.testing.assert_array_equal(value, results[1][name], err_msg=name)


def test_explain_shows_a_residual_network_for_inference_as_one_operator_a_layer(tmp_path):
    model = gpunet.zoo.build("resnet20", (3, 16, 16), 10)
    ws = gpunet.Workspace("cpu", seed=1)
    ws.run_once(model.init_net)
    gpunet.save_model(tmp_path, model, ws, "softmax")
    arguments = ["explain", str(tmp_path), "--device", "cpu"]
    shown = CliRunner().invoke(main, [*arguments, "--pass", "epilogues"])
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()[1:]
    # The first convolution, two in each of nine blocks, and two shortcuts.
    ends = Counter(line.split("(then ")[1].rstrip(")") for line in lines if "(then " in line)
    assert ends == {"bias+relu": 10, "bias+add+relu": 9}
    kinds = Counter(line.split()[1] for line in lines if "(runs once)" not in line)
    assert kinds == {"FusedConv": 19, "Conv": 2, "AveragePool": 1, "FC": 1, "Softmax": 1}
    memory = CliRunner().invoke(main, [*arguments, "--pass", "memory_plan"]).output
    (ratio,) = re.findall(r"\(([\d.]+) times the lower bound\)", memory)
    assert float(ratio) <= 1.15
