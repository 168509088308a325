"""Passes, one by one: what each changes, and what it must leave alone."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest

import gpunet
from gpunet import records
from gpunet.cuda_kernels.sim import toolchain
from gpunet.graph import Graph, Value
from gpunet.passes.dead_code import remove_dead_code
from gpunet.passes.pipeline import PASSES
from gpunet.proto import NetDef, OperatorDef
from gpunet.records import check_races
from tests.nets import DEVICES, nodes_of, op

ALL = [p.name for p in PASSES if p.optional]


def ran(
    ops: list[OperatorDef], only: str = "", *, keep=("y",), runs: int = 1, feed=None
) -> tuple[gpunet.Workspace, list]:
    """A workspace after runs of the net, and the nodes of its (only) segment.

    ``only``: all other passes are off.
    """
    ws = gpunet.Workspace("cpu")
    for name, value in (feed or {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}).items():
        ws.feed(name, value)
    without = [name for name in ALL if only and name != only]
    ws.create(NetDef(name="n", op=ops), keep=keep, without=without)
    ws.run("n", runs)
    return ws, ws.program("n").segments()[0].compiled.graph.nodes


def types(nodes: list) -> list[str]:
    return [node.op.type for node in nodes]


def test_dead_code_goes_and_what_is_kept_stays():
    ops = [op("Relu", "x", "a"), op("Tanh", "a", "unused"), op("Tanh", "a", "y"), op("Sqr", "unused", "too")]
    assert types(ran(ops, "dead_code")[1]) == ["Relu", "Tanh"]
    assert types(ran(ops, "dead_code", keep=["y", "too"])[1]) == ["Relu", "Tanh", "Tanh", "Sqr"]
    assert types(ran(ops, "dead_code", keep=None)[1]) == types(ran(ops, "in_place", keep=["y"])[1])


def test_dead_code_keeps_writes_of_blobs_from_outside():
    ops = [op("Sum", "state x", "state"), op("Relu", "x", "y")]
    feed = {"x": np.ones(2, dtype=np.float32), "state": np.zeros(2, dtype=np.float32)}
    ws, nodes = ran(ops, feed=feed, runs=3)
    assert types(nodes) == ["Sum", "Relu"]
    assert ws.fetch("state").tolist() == [3, 3]


def test_equal_operators_are_merged():
    ops = [
        op("Relu", "x", "a"),
        op("Relu", "x", "b"),
        op("Scale", "x", "c", scale=2.0),
        op("Sum", "a b c", "y"),
    ]
    ws, nodes = ran(ops, "common_subexpressions")
    assert types(nodes) == ["Relu", "Scale", "Sum"]
    np.testing.assert_array_equal(ws.fetch("y"), 4 * np.arange(6).reshape(2, 3))


@pytest.mark.parametrize(
    "second",
    [
        op("Scale", "x", "b", scale=3.0),
        op("Scale", "x2", "b", scale=2.0),
        op("Scale", "x", "b", scale=2.0, engine="OTHER"),
    ],
)
def test_operators_that_differ_are_not_merged(second):
    feed = {"x": np.ones(2, dtype=np.float32), "x2": np.ones(2, dtype=np.float32)}
    _, nodes = ran(
        [op("Scale", "x", "a", scale=2.0), second, op("Sum", "a b", "y")], "common_subexpressions", feed=feed
    )
    assert len(nodes) == 3


def test_random_and_overwritten_operators_are_not_merged():
    ops = [
        op("UniformFill", "", "a", shape=[3]),
        op("UniformFill", "", "b", shape=[3]),
        op("Sub", "a b", "y"),
    ]
    ws, _ = ran(ops)
    assert np.abs(ws.fetch("y")).min() > 0
    ops = [op("Tanh", "x", "a"), op("Tanh", "x", "b"), op("Sum", "a a", "a"), op("Sub", "a b", "y")]
    ws, _ = ran(ops)
    np.testing.assert_allclose(
        ws.fetch("y"), np.tanh(np.arange(6, dtype=np.float32)).reshape(2, 3), rtol=1e-6
    )


def test_constants_are_computed_once():
    ops = [
        op("ConstantFill", "", "c", shape=[2, 3], value=2.0),
        op("Sqr", "c", "d"),
        op("Mul", "x d", "y"),
        op("UniformFill", "", "r", shape=[1]),
    ]
    ws, nodes = ran(ops, "constants", keep=["y", "r"], runs=2)
    assert [node.constant for node in nodes] == [True, True, False, False]
    np.testing.assert_array_equal(ws.fetch("y"), 4 * np.arange(6).reshape(2, 3))
    ws.feed("x", np.ones((2, 3), dtype=np.float32))
    ws.run("n")
    np.testing.assert_array_equal(ws.fetch("y"), np.full((2, 3), 4))


def test_constants_that_are_overwritten_or_kept_are_made_each_run():
    ops = [op("ConstantFill", "", "c", shape=[2], value=1.0), op("Sum", "c c", "c"), op("Copy", "c", "y")]
    ws, nodes = ran(ops, runs=3)
    assert ws.fetch("y").tolist() == [2, 2]
    assert not nodes[0].constant
    assert not ran(ops[:1], keep=["c"])[1][0].constant


def test_outputs_take_the_place_of_inputs_that_die():
    ops = [
        op("Tanh", "x", "a"),
        op("Relu", "a", "b"),
        op("Reshape", "b", "c old", shape=[3, 2]),
        op("Sqr", "c", "y"),
    ]
    ws, _ = ran(ops, "in_place")
    compiled = ws.program("n").segments()[0].compiled
    assert sum(compiled.memory.arenas.values()) <= 2 * 256
    shared = {places.name: storage for places, storage in compiled.places.items()}
    assert shared["a"] is shared["b"] is shared["c"]
    np.testing.assert_allclose(
        ws.fetch("y"), np.tanh(np.arange(6, dtype=np.float32)).reshape(3, 2) ** 2, rtol=1e-6
    )


def test_inputs_that_live_on_are_not_overwritten():
    ops = [op("Tanh", "x", "a"), op("Relu", "a", "b"), op("Sub", "b a", "c"), op("Sum", "c a", "y")]
    ws, _ = ran(ops, "in_place")
    np.testing.assert_allclose(
        ws.fetch("y"), np.tanh(np.arange(6, dtype=np.float32)).reshape(2, 3), rtol=1e-6
    )
    ops = [op("Reshape", "x", "v old", shape=[6]), op("Relu", "v", "v"), op("Sum", "x x", "y")]
    ws, _ = ran(ops, "in_place")
    np.testing.assert_array_equal(ws.fetch("x"), np.arange(6).reshape(2, 3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ["simple", "async_scheduling", "graph"])
def test_a_reshaped_tensor_is_a_view_though_both_are_read_later(device, engine):
    """As in training, where the gradient of a pooling reads what a Flatten has given to the layer behind."""
    ops = [
        op("Tanh", "x", "a"),
        op("Flatten", "a", "v"),
        op("Softmax", "v", "s", axis=1),
        op("ResizeLike", "v a", "w"),
        op("Add", "a w", "b"),
        op("Flatten", "b", "f"),
        op("Add", "f s", "y"),
    ]
    x = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)
    results = []
    for without in ((), ("in_place",)):
        ws = gpunet.Workspace(device)
        ws.feed("x", x)
        net = NetDef(name="n", op=ops, external_input=["x"], external_output=["y"])
        ws.create(net, engine=engine, workers=2, streams=2, without=["fusion", *without])
        ws.run("n", 3)
        assert not check_races(ws.program("n"))
        results.append(ws.fetch("y"))
        (segment,) = ws.program("n").segments()
        places = {value.name: place for value, place in segment.compiled.places.items()}
        assert (places["a"] is places["v"] is places["w"]) == (not without)
    np.testing.assert_array_equal(*results)
    np.testing.assert_allclose(results[0].sum(), 4 + 2 * np.tanh(x).sum(), rtol=1e-5)


@pytest.mark.parametrize(
    "ops",
    [
        # One of the two is overwritten while the other is still to be read: by name, or by a later operator.
        [op("Relu", "v", "v"), op("Sum", "a", "y")],
        [op("Relu", "a", "a"), op("Sqr", "v", "y")],
        [op("Relu", "v", "r"), op("Sum", "a", "y"), op("Sum", "r r", "z")],
        [op("Relu", "a", "r"), op("Sum", "v", "y"), op("Sum", "r r", "z")],
    ],
)
def test_a_reshaped_tensor_and_its_source_keep_their_values(ops):
    ops = [op("Tanh", "x", "a"), op("Reshape", "a", "v old", shape=[-1]), *ops]
    keep = ["y", *("z" for o in ops if "z" in o.output)]
    got, _ = ran(ops, "in_place", keep=keep)
    want, _ = ran(ops, "dead_code", keep=keep)
    for name in keep:
        np.testing.assert_array_equal(got.fetch(name), want.fetch(name))


def test_a_control_input_that_is_merged_away_still_orders():
    ops = [
        op("Tanh", "x", "a"),
        op("Tanh", "x", "b"),
        op("Sqr", "x", "c"),
        op("Sum", "a b c", "y"),
    ]
    ops[2].control_input.append("b")
    _, nodes = ran(ops, "common_subexpressions")
    assert types(nodes) == ["Tanh", "Sqr", "Sum"]
    assert nodes[1].after == nodes[0].outputs


def test_an_input_that_is_read_twice_is_not_overwritten():
    """The gradient of one operand is written before the other's, which reads the same tensor."""
    ops = [op("Tanh", "x", "g"), op("MulGradient", "g g b", "p q"), op("Tanh", "p", "y"), op("Sqr", "q", "z")]
    feed = {name: np.arange(1, 7, dtype=np.float32) / seed for seed, name in enumerate("xb", 1)}
    got, _ = ran(ops, "in_place", keep=["y", "z"], feed=feed)
    want, _ = ran(ops, "dead_code", keep=["y", "z"], feed=feed)
    for name in "yz":
        np.testing.assert_array_equal(got.fetch(name), want.fetch(name))


def test_a_collective_whose_result_nobody_reads_stays():
    ops = [op("Tanh", "x", "a"), op("Sqr", "a", "unused"), op("Sqr", "x", "y")]
    _, nodes = ran(ops, "dead_code")
    assert types(nodes) == ["Sqr"]
    for node, chain in ((node, chain) for node in nodes for chain in ("", "collectives")):
        graph = Graph([replace(node, op=copy.copy(node.op), outputs=(Value("z", node.outputs[0].spec),))])
        graph.nodes[0].op.schema = replace(node.op.schema, chain=chain)
        assert len(remove_dead_code(graph, lambda name: False).nodes) == bool(chain)


def convolution_and_norm(**norm) -> tuple[list[OperatorDef], dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    ops = [
        op("Conv", "x w b", "c", kernel=3, pad=1),
        op("SpatialBN", "c s t m v", "n", is_test=1, epsilon=0.1, **norm),
        op("Relu", "n", "y"),
    ]
    feed = {name: rng.normal(size=4).astype(np.float32) for name in "bstm"}
    feed |= {"x": rng.normal(size=(2, 3, 5, 5)).astype(np.float32), "v": np.abs(feed["m"]) + 1}
    return ops, feed | {"w": rng.normal(size=(4, 3, 3, 3)).astype(np.float32)}


def test_batch_norm_is_folded_into_the_convolution_and_follows_its_parameters():
    ops, feed = convolution_and_norm()
    want, _ = ran(ops, "in_place", feed=feed)
    ws, nodes = ran(ops, "batch_norm_folding", feed=feed)
    assert [(node.op.type, node.constant) for node in nodes] == [
        ("FoldBatchNorm", True),
        ("Conv", False),
        ("Relu", False),
    ]
    np.testing.assert_allclose(ws.fetch("y"), want.fetch("y"), rtol=1e-4, atol=1e-5)
    for workspace in (ws, want):
        workspace.feed("s", np.array([1, 2, 3, 4], dtype=np.float32))
        workspace.run("n")
    np.testing.assert_allclose(ws.fetch("y"), want.fetch("y"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rename", "between", "folds"),
    [
        ({"n": "c"}, [], True),  # in place
        ({"n": "x"}, [], False),
        ({}, [op("Relu", "x", "x")], False),
        ({}, [op("Copy", "b", "x")], False),
        ({}, [op("Tanh", "x", "z")], True),
    ],
)
def test_a_folded_convolution_reads_what_it_read(rename, between, folds):
    """Names may be used again: for the result, or for something else before the batch norm."""
    ops, feed = convolution_and_norm()
    for definition in ops[1:]:
        for names in (definition.input, definition.output):
            names[:] = [rename.get(name, name) for name in names]
    ops[1:1] = between
    keep = ["y", *(name for o in between for name in o.output)]
    want, _ = ran(ops, "dead_code", keep=keep, feed=feed)
    for kept in (keep, [*keep, *rename.values()]):
        got, nodes = ran(ops, "batch_norm_folding", keep=kept, feed=feed)
        assert ("FoldBatchNorm" in types(nodes)) == folds
        for name in keep:
            np.testing.assert_allclose(got.fetch(name), want.fetch(name), rtol=1e-4, atol=1e-5)


def test_another_net_that_writes_the_parameters_is_noticed():
    ops, feed = convolution_and_norm()
    ws, _ = ran(ops, feed=feed)
    ws.create(NetDef(name="train", op=[op("Scale", "s", "s", scale=2.0)]))
    ws.run("train")
    ws.run("n")
    want, _ = ran(ops, "in_place", feed=feed | {"s": feed["s"] * 2})
    np.testing.assert_allclose(ws.fetch("y"), want.fetch("y"), rtol=1e-4, atol=1e-5)
    ws.run("train", 2)
    ws.run("n")
    want, _ = ran(ops, "in_place", feed=feed | {"s": feed["s"] * 8})
    np.testing.assert_allclose(ws.fetch("y"), want.fetch("y"), rtol=1e-4, atol=1e-5)


def test_batch_norm_stays_where_it_cannot_be_folded():
    ops, feed = convolution_and_norm()
    assert types(ran(ops, "batch_norm_folding", feed=feed, keep=["y", "c"])[1]) == [
        "Conv",
        "SpatialBN",
        "Relu",
    ]
    twice = [*ops[:2], op("Sum", "n c", "y")]
    assert types(ran(twice, "batch_norm_folding", feed=feed)[1]) == ["Conv", "SpatialBN", "Sum"]
    training = op("SpatialBN", "c s t m v", "n m v sm sv", is_test=0)
    assert "FoldBatchNorm" not in types(ran([ops[0], training, ops[2]], feed=feed)[1])


def training_losses(model_name: str, steps: int = 3, **options) -> tuple[list[float], gpunet.Workspace]:
    model = gpunet.zoo.build(model_name, (1, 8, 8), 10)
    model.add_gradients("loss")
    gpunet.optimizers.SGD(0.05, momentum=0.9).apply(model)
    ws = gpunet.Workspace("cpu", seed=1)
    ws.run_once(model.init_net)
    rng = np.random.default_rng(0)
    ws.feed("data", rng.normal(size=(8, 1, 8, 8)).astype(np.float32))
    ws.feed("label", rng.integers(0, 10, 8).astype(np.int32))
    ws.create(model.net, keep=["loss"], **options)
    losses = []
    for _ in range(steps):
        ws.run(model.net)
        losses.append(float(ws.fetch("loss")))
    return losses, ws


@pytest.mark.parametrize("name", ["lenet", "mlp", "resnet20"])
def test_recomputed_activations_give_the_same_training_with_less_memory(name):
    want, plain = training_losses(name)
    got, saving = training_losses(name, recompute=0)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    arenas = [
        sum(ws.program(ws.nets()[0]).segments()[0].compiled.memory.arenas.values()) for ws in (plain, saving)
    ]
    assert arenas[1] <= arenas[0]
    if name == "resnet20":
        # Gradients of parameters are no activations; they live until the updates, one way or the other.
        gradients = sum(
            plain.fetch(name).nbytes for name in plain.blobs() if name.endswith(("_w", "_b", "_s"))
        )
        assert arenas[1] - gradients < 0.5 * (arenas[0] - gradients)
        nodes = saving.program(saving.nets()[0]).segments()[0].compiled.graph.nodes
        assert any(node.outputs and node.outputs[0].name.endswith("/again") for node in nodes)
        for statistic in [n for n in plain.blobs() if n.endswith(("_rm", "_riv"))]:
            np.testing.assert_allclose(saving.fetch(statistic), plain.fetch(statistic), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("maximum", ["MaxPool", "Max", "ReduceMax", "ReduceBackMax"])
def test_gradients_of_a_maximum_find_it_in_what_is_computed_again(device, maximum):
    """A batch norm that is computed again gives other last bits: no element would equal the maximum."""
    model = gpunet.Model("m")
    data = model.input("data", (8, 2, 6, 6))
    label = model.input("label", (8,), "int32")
    model.spatial_bn(data, "n")
    if maximum == "MaxPool":
        model.add("MaxPool", ["n"], ["p"], kernel=3, stride=1)
    elif maximum == "Max":
        model.add("Max", ["n", data], ["p"])
    elif maximum == "ReduceMax":
        model.add("ReduceMax", ["n"], ["p"], axes=[3])
    else:
        model.add("ReduceBackMax", ["n"], ["p"])
    model.add("Flatten", ["p"], ["f"])
    model.fc("f", "logits", 3)
    model.add("SoftmaxWithLoss", ["logits", label], ["softmax", "loss"])
    model.add_gradients("loss")
    results = []
    for recompute in (None, 2, 3, 4) if device == "cpu" else (None, 2):
        ws = gpunet.Workspace(device, seed=1)
        ws.run_once(model.init_net)
        ws.feed("data", np.random.default_rng(0).normal(size=(8, 2, 6, 6)).astype(np.float32))
        ws.feed("label", (np.arange(8) % 3).astype(np.int32))
        ws.feed("n_s", np.array([0.37, 1.71], np.float32))
        ws.feed("n_b", np.array([0.21, -0.83], np.float32))
        ws.create(model.net, keep=["loss", "n_s_grad", "n_b_grad"], recompute=recompute)
        ws.run(model.net)
        nodes = nodes_of(ws, "m")
        again = any("/again" in value.name for node in nodes for value in node.outputs)
        assert again == (recompute is not None)
        results.append([ws.fetch(name) for name in ("loss", "n_s_grad", "n_b_grad")])
    for found in results[1:]:
        for a, b in zip(found, results[0], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_nothing_is_computed_again_from_what_was_overwritten():
    model = gpunet.Model("m")
    data = model.input("data", (4, 6))
    label = model.input("label", (4,), "int32")
    model.add_parameter("shift", (4, 6), "ConstantFill", value=0.5)
    model.add("Sum", [data, "shift"], ["h"])
    model.add("Scale", [data], [data], scale=-3.0)
    for before, after in itertools.pairwise(["h", "t0", "t1", "t2", "t3"]):
        model.add("Tanh", [before], [after])
    model.fc("t3", "logits", 3)
    model.add("SoftmaxWithLoss", ["logits", label], ["softmax", "loss"])
    model.add_gradients("loss")
    results = []
    for recompute in (None, 2, 3, 4):
        ws = gpunet.Workspace("cpu", seed=1)
        ws.run_once(model.init_net)
        ws.feed("data", np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32))
        ws.feed("label", (np.arange(4) % 3).astype(np.int32))
        ws.create(model.net, keep=["loss", "h_grad"], recompute=recompute)
        ws.run(model.net)
        results.append(ws.fetch("h_grad"))
    for found in results[1:]:
        np.testing.assert_allclose(found, results[0], rtol=1e-5)


def test_dropout_that_is_computed_again_draws_the_same():
    ops = [
        op("Dropout", "x", "d m", ratio=0.5),
        op("Scale", "d", "a", scale=2.0),
        op("Tanh", "a", "b"),
        op("Dropout", "b", "e m2", ratio=0.5),
        op("Tanh", "e", "f"),
        op("Sqr", "f", "g"),
        op("Tanh", "g", "h"),
        op("AveragedLoss", "h", "loss"),
    ]
    made, grads = gpunet.gradients.backward(ops, ["loss"])
    results = []
    for recompute in (None, 4):
        ws = gpunet.Workspace("cpu", seed=3)
        ws.feed("x", np.linspace(-1, 1, 4096, dtype=np.float32))
        ws.create(NetDef(name="n", op=[*ops, *made]), keep=["loss", grads["x"]], recompute=recompute)
        ws.run("n", 2)
        results.append((ws.fetch("loss"), ws.fetch(grads["x"])))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_frozen_batch_norm_is_computed_again_as_it_is():
    ops = [
        op("SpatialBN", "x s b m v", "n", is_test=1),
        op("Tanh", "n", "t"),
        op("Tanh", "t", "t2"),
        op("Tanh", "t2", "t3"),
        op("Sqr", "t3", "q"),
        op("Tanh", "q", "u"),
        op("Tanh", "u", "u2"),
        op("Tanh", "u2", "u3"),
        op("AveragedLoss", "u3", "loss"),
    ]
    made, grads = gpunet.gradients.backward(ops, ["loss"])
    results = []
    for recompute in (None, 2):
        ws = gpunet.Workspace("cpu")
        ws.feed("x", np.random.default_rng(0).normal(size=(4, 2, 6, 6)).astype(np.float32))
        for name, value in zip("sbmv", (1.5, 0.1, 0.2, 2.0), strict=True):
            ws.feed(name, np.full(2, value, dtype=np.float32))
        ws.create(
            NetDef(name="n", op=[*ops, *made]),
            keep=["loss", grads["x"]],
            without=["fusion"],
            recompute=recompute,
        )
        ws.run("n")
        results.append(ws.fetch(grads["x"]))
        nodes = ws.program("n").segments()[0].compiled.graph.nodes
        repeated = [
            node.op.type for node in nodes if node.outputs and node.outputs[0].name.endswith("/again")
        ]
        assert ("SpatialBN" in repeated) == (recompute is not None)
    np.testing.assert_array_equal(*results)


SPLIT_NET = [
    op("Tanh", "x", "a"),
    op("Split", "a", "p q r", axis=0, split=[64, 1, 127]),
    op("Relu", "p", "p2"),
    op("Sqr", "r", "r2"),
    op("Concat", "r2 q p2", "y s", axis=0),
]


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("engine", [{"engine": "simple"}, {"engine": "async_scheduling", "workers": 3}])
def test_parts_of_a_split_are_views_where_they_are_aligned(device, engine):
    if device != "cpu" and toolchain.find() is None:
        pytest.skip(toolchain.MISSING)
    x = np.random.default_rng(0).normal(size=(192, 5)).astype(np.float32)
    results = []
    for without in ((), ("in_place",)):
        ws = gpunet.Workspace(device)
        ws.feed("x", x)
        ws.create(NetDef(name="n", op=SPLIT_NET, external_input=["x"]), keep=["y"], without=without, **engine)
        ws.run("n", 2)
        results.append(ws.fetch("y"))
        (segment,) = ws.program("n").segments()
        assert not check_races(ws.program("n"))
        (split,) = (n for n in segment.compiled.graph.nodes if n.op is not None and n.op.type == "Split")
        shared = [o for o in range(3) if split.aliased(o) is not None]
        # q begins at a multiple of 256 bytes, and r 20 bytes behind it.
        assert shared == ([] if without else [0, 1])
        if not without:
            whole, parts = split.inputs[0], split.outputs
            values = segment.binding.values
            places = [records._access(values[v], "", write=False).start for v in (whole, *parts[:2])]
            assert [place - places[0] for place in places] == [0, 0, 64 * 5 * 4]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    ("ops", "keep"),
    [
        # The whole is read afterwards, when a part has been written over.
        ([op("Split", "a", "p q", axis=0), op("Relu", "p", "p"), op("Sum", "a a", "z")], ["p", "q", "z"]),
        ([op("Split", "a", "p q", axis=0), op("Relu", "p", "p"), op("Concat", "p a", "z s", axis=0)], ["z"]),
        # Parts that do not lie one behind the other.
        ([op("Split", "a", "p q", axis=1), op("Concat", "q p", "z s", axis=1)], ["z"]),
        # What is fed is not to be written over.
        ([op("Split", "x", "p q", axis=0), op("Relu", "p", "p"), op("Concat", "q p", "z s", axis=0)], ["z"]),
    ],
)
def test_parts_are_copied_where_a_view_would_be_wrong(ops, keep):
    x = np.random.default_rng(1).normal(size=(128, 4)).astype(np.float32)
    feed = {"x": x}
    found, _ = ran([op("Tanh", "x", "a"), *ops], "in_place", keep=keep, feed=feed)
    want, _ = ran([op("Tanh", "x", "a"), *ops], "dead_code", keep=keep, feed=feed)
    for name in (*keep, "x"):
        np.testing.assert_array_equal(found.fetch(name), want.fetch(name), err_msg=name)
    split = next(n for n in found.program("n").segments()[0].compiled.graph.nodes if n.op.type == "Split")
    assert not split.shares
