"""Layout: which operators run with channels innermost, where transposes are, and the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gpunet
from gpunet import mixed_precision, schema
from gpunet.devices import Device
from gpunet.dtypes import BFLOAT16
from gpunet.errors import GradientError
from gpunet.graph import Graph, Node, Value
from gpunet.operator import Operator
from gpunet.operators.convolution import CONVOLUTIONS
from gpunet.passes import layout
from gpunet.passes.layout import SUFFIX
from gpunet.proto import PROTO_CPU, NetDef, OperatorDef
from gpunet.records import check_races
from gpunet.specs import TensorSpec
from tests.nets import nodes_of, op
from tests.op_check import OpCase, copies, execute
from tests.operators.test_operators import GOOD
from tests.sim_kernels import needs_compiler

pytestmark = needs_compiler
HALVES = ["float16", *([] if BFLOAT16 is None else ["bfloat16"])]
TO, BACK = "NCHW2NHWC", "NHWC2NCHW"


def conv(x: str, y: str, w: str = "w", **args: Any) -> OperatorDef:
    return op("Conv", f"{x} {w}", y, kernel=3, pad=1, **args)


FEEDS = {"x": (3, 8, 6, 6), "w": (8, 8, 3, 3), "r": (3, 8, 6, 6), "b": (8,), "u": (5, 288), "v": (5,)}
FEEDS |= dict.fromkeys(["s", "t", "m"], (8,))


def ran(
    ops: list[OperatorDef], device: str = "sim:0", *, keep=("y",), dtype="float16", runs: int = 1, **options
) -> gpunet.Workspace:
    ws = gpunet.Workspace(device)
    for seed, (name, shape) in enumerate(FEEDS.items()):
        scale = 0.2 if name == "w" else 1.0
        ws.feed(name, (scale * np.random.default_rng(seed).normal(size=shape)).astype(dtype))
    ws.feed("q", np.full(8, 1.5, dtype))
    ws.create(NetDef(name="n", op=ops), keep=keep, **options)
    ws.run("n", runs)
    assert not check_races(ws.program("n"))
    return ws


def shown(nodes: list[Node]) -> list[str]:
    """The types of operators, with a star where the result has channels innermost."""
    found = []
    for node in nodes:
        last = bool(node.outputs) and node.outputs[0].name.endswith(SUFFIX)
        kind = "copy" if node.op is None else node.op.type
        found.append(kind + "*" * (last and kind not in (TO, BACK)))
    return found


def same(ops: list[OperatorDef], *, keep=("y",), without=(), **options) -> list[str]:
    """What runs with the pass, after a comparison with what runs without it."""
    got = ran(ops, keep=keep, without=without, **options)
    want = ran(ops, keep=keep, without=["layout", *without], **options)
    tolerance = 1e-5 if options.get("dtype") == "float32" else 2e-2
    for name in keep:
        a, b = (ws.fetch(name).astype(np.float64) for ws in (got, want))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max(), err_msg=name)
    for name in FEEDS:
        np.testing.assert_array_equal(got.fetch(name), want.fetch(name), err_msg=name)
    return shown(nodes_of(got))


TWO = [conv("x", "a"), op("Tanh", "a", "h"), conv("h", "y")]


@pytest.mark.parametrize("dtype", HALVES)
def test_a_region_has_transposes_at_its_borders_only(dtype):
    ws_types = same(TWO, dtype=dtype)
    # Both convolutions read the same filters, which are transposed once for all runs.
    assert ws_types == [TO, TO, "Conv*", "Tanh*", "Conv*", BACK]
    constant = [node.constant for node in nodes_of(ran(TWO, dtype=dtype)) if shown([node]) == [TO]]
    assert sorted(constant) == [False, True]


def test_one_convolution_is_not_worth_its_borders():
    assert same([conv("x", "y")]) == ["Conv"]
    apart = [conv("x", "a"), op("Softmax", "a", "h", axis=3), conv("h", "y")]
    assert same(apart) == ["Conv", "Softmax", "Conv"]
    # The border lies behind a pooling, where images are smaller.
    pooled = [*TWO[:2], conv("h", "p"), op("MaxPool", "p", "y", kernel=2, stride=2)]
    assert same(pooled) == [TO, TO, "Conv*", "Tanh*", "Conv*", "MaxPool*", BACK]


def test_what_gains_nothing_stays_outside():
    ops = [op("Tanh", "x", "a"), *[conv(a, c) for a, c in ("ah", "hc")], op("Tanh", "c", "d")]
    assert same([*ops, op("Sigmoid", "d", "y")], without=["fusion"]) == [
        "Tanh",
        TO,
        TO,
        "Conv*",
        "Conv*",
        BACK,
        "Tanh",
        "Sigmoid",
    ]
    assert same([op("Tanh", "x", "a"), op("MaxPool", "a", "y", kernel=2)]) == ["Tanh", "MaxPool"]


@pytest.mark.parametrize(
    "between",
    [
        op("Relu", "a", "a"),
        op("MaxPool", "a", "h", kernel=3, pad=1),
        op("AveragePool2D", "a", "h", kernel=3, pad=1),
        op("SpatialBN", "a s t m q", "h", is_test=1),
        op("LRN", "a", "h", size=3, alpha=0.1, beta=0.5),
        op("Sum", "a r", "h"),
        op("Add", "a r", "h"),
        op("Cast", "a", "h", to="float16"),
        op("Copy", "a", "h"),
        op("ConvTranspose", "a w", "h", kernel=3, pad=1),
    ],
    ids=lambda definition: definition.type,
)
def test_what_takes_part(between):
    after = [conv(between.output[0], "d"), op("Tanh", "d", "e"), conv("e", "f"), conv("f", "y")]
    ops = [conv("x", "c"), conv("c", "a"), between, *after]
    found = same(ops, without=["fusion", "epilogues", "batch_norm_folding"])
    # The tensor that is added comes from outside.
    assert found == [
        *([TO] * 2),
        *(["Conv*"] * 2),
        *([TO] if len(between.input) == 2 and between.type in ("Sum", "Add") else []),
        f"{between.type}*",
        "Conv*",
        "Tanh*",
        *(["Conv*"] * 2),
        BACK,
    ]


@pytest.mark.parametrize("axis", [{}, {"axis": 1}, {"axis": -3}, {"order": "NCHW"}])
@pytest.mark.parametrize("kind", ["", "Depth"])
def test_channels_are_joined_and_split(kind, axis):
    ops = [conv("x", "a"), conv("a", "h"), op(f"{kind}Concat", "a h", "c i", **axis)]
    ops += [op(f"{kind}Split", "c", "d e", **axis), conv("d", "f"), conv("e", "g"), op("Sum", "f g", "y")]
    found = same(ops, without=["epilogues"])
    assert f"{kind}Concat*" in found
    assert f"{kind}Split*" in found
    assert (found.count(TO), found.count(BACK)) == (2, 1)


@pytest.mark.parametrize(
    "border",
    [
        op("Dropout", "a", "h k", ratio=0.5, is_test=0),
        op("Reshape", "a", "h i", shape=[3, 8, 6, 6]),
        op("Add", "a b", "h", broadcast=1, axis=1),
        op("Softmax", "a", "h", axis=3),
    ],
    ids=lambda definition: definition.type,
)
def test_what_does_not(border):
    ops = [conv("x", "c"), conv("c", "a"), border, conv("h", "d"), conv("d", "y")]
    found = same(ops, without=["batch_norm_folding"])
    (place,) = (i for i, text in enumerate(found) if text == border.type)
    assert BACK in found[:place]
    assert TO in found[place:]


def test_what_has_channels_innermost_already_is_left_alone():
    turned = op("Transpose", "w", "v8", axes=[0, 2, 3, 1])
    ops = [turned, op("NCHW2NHWC", "x", "a")]
    ops += [conv(a, b, "v8", order="NHWC") for a, b in ("ah", "hy")]
    assert same(ops) == ["Transpose", TO, "Conv", "Conv"]
    joined = [conv("x", "a"), conv("a", "h"), op("Concat", "h r", "c i", axis=2), op("Copy", "c", "y")]
    assert same(joined) == [TO, TO, "Conv*", "Conv*", BACK, "Concat", "Copy"]


def test_layers_of_features_want_channels_first():
    ops = [conv("x", "a"), conv("a", "c"), op("FC", "c u v", "y")]
    assert same(ops) == [TO, TO, "Conv*", "Conv*", BACK, "FC"]


def test_kept_blobs_stay_as_they_are():
    ops = [conv("x", "a"), op("Tanh", "a", "h"), conv("h", "d"), conv("d", "y")]
    ws = ran(ops, keep=["y", "h"])
    assert ws.fetch("h").shape == FEEDS["x"]
    # The region goes on, and the kept blob is written too.
    assert same(ops, keep=["y", "h"]).count(BACK) == 2
    assert not any(SUFFIX in name for name in ws.blobs())
    everything = ran(ops, keep=None)
    assert TO not in shown(nodes_of(everything))
    # Sums in another order, rounded to multiples of 2**-7 where they are large; wrong channels differ by 1.
    np.testing.assert_allclose(everything.fetch("y").astype(float), ws.fetch("y").astype(float), atol=0.1)


def test_blobs_that_are_written_again_and_in_place():
    ops = [conv("x", "a"), op("Relu", "a", "a"), conv("a", "h"), op("Tanh", "h", "a"), conv("a", "y")]
    ops += [conv("y", "z"), op("Relu", "x", "x"), conv("x", "e"), op("Sum", "e z", "o")]
    for engine in ({}, {"engine": "async_scheduling", "streams": 3}, {"engine": "graph", "streams": 2}):
        found = same(ops, keep=["o", "y", "x"], runs=3, **engine)
        assert found.count(TO) >= 2


def test_control_inputs_still_order():
    waits = op("Tanh", "r", "o")
    waits.control_input.append("a")
    graphs: dict[str, Graph] = {}
    ws = ran([*TWO, waits], keep=["y", "o"])
    program = ws.program("n")
    program.seen = graphs.__setitem__
    ws.feed("x", np.zeros((2, 8, 6, 6), np.float16))
    ws.feed("r", np.zeros((2, 8, 6, 6), np.float16))
    ws.run("n")
    after: list[Value] = [v for node in graphs["layout"].nodes for v in node.after]
    made = {v for node in graphs["layout"].nodes for v in node.outputs}
    assert [v.name for v in after] == [f"a{SUFFIX}"]
    assert set(after) <= made


def test_other_types_and_devices_stay(monkeypatch):
    for dtype in ("float32", "float64"):
        assert same(TWO, dtype=dtype) == ["Conv", "Tanh", "Conv"]
    # Without TF32 no tensor core is used.
    monkeypatch.setenv("GPUNET_TF32", "1")
    assert same(TWO, dtype="float32")[2:] == ["Conv*", "Tanh*", "Conv*", BACK]
    assert shown(nodes_of(ran(TWO, "cpu"))) == ["Conv", "Tanh", "Conv"]
    on_host = [*TWO[:2], conv("h", "y")]
    on_host[2].device_option.device_type = PROTO_CPU
    assert TO not in shown(nodes_of(ran(on_host)))
    assert same([conv(a, b, engine="DIRECT") for a, b in ("xa", "ay")]) == ["Conv", "Conv"]


def test_filters_that_change_are_transposed_in_each_run():
    ops = [op("Scale", "w", "w", scale=0.5), *TWO]
    ws = ran(ops, runs=2)
    assert not any(node.constant for node in nodes_of(ws))
    want = ran(ops, runs=2, without=["layout"])
    np.testing.assert_allclose(ws.fetch("y").astype(float), want.fetch("y").astype(float), atol=1e-2)


def test_filters_that_are_fed_anew_are_transposed_anew():
    ws, want = ran(TWO), ran(TWO, without=["layout"])
    for workspace in (ws, want):
        workspace.feed("w", workspace.fetch("w") * np.float16(0.5))
        workspace.run("n")
    np.testing.assert_allclose(ws.fetch("y").astype(float), want.fetch("y").astype(float), atol=1e-2)


def test_epilogues_come_along():
    ops = [conv("x", "a"), op("Relu", "a", "h"), conv("h", "c"), op("Sum", "c x", "d"), op("Relu", "d", "y")]
    assert same(ops) == [TO, TO, "FusedConv*", "FusedConv*", BACK]


# Whole networks.


def trained(
    name: str, shape: tuple[int, ...], build: Callable[[gpunet.Model], None], steps: int = 3, **options
) -> tuple[list[float], gpunet.Workspace, str]:
    model = gpunet.zoo.build(name, shape, 10)
    build(model)
    gpunet.optimizers.SGD(0.05, momentum=0.9).apply(model)
    ws = gpunet.Workspace("sim:0", seed=1)
    ws.run_once(model.init_net)
    rng = np.random.default_rng(0)
    ws.feed("data", rng.normal(size=(4, *shape)).astype(np.float32))
    ws.feed("label", rng.integers(0, 10, 4).astype(np.int32))
    ws.create(model.net, keep=["loss"], **options)
    losses = []
    for _ in range(steps):
        ws.run(model.net.name)
        losses.append(float(ws.fetch("loss")))
    assert not check_races(ws.program(model.net.name))
    return losses, ws, model.net.name


def in_float16(model: gpunet.Model) -> None:
    mixed_precision.to_half(model)
    mixed_precision.add_scaled_gradients(model, "loss", initial_scale=1024.0)


@pytest.mark.parametrize(("name", "shape"), [("lenet", (1, 16, 16)), ("resnet20", (3, 8, 8))])
def test_networks_train_with_channels_innermost(name, shape):
    got, ws, net = trained(name, shape, in_float16)
    want, *_ = trained(name, shape, in_float16, without=["layout"])
    # Rounding to float16 in another order decides a maximum or a ReLU now and then, and steps add that up.
    np.testing.assert_allclose(got, want, rtol=0.1, atol=0.05)
    np.testing.assert_allclose(got[0], want[0], rtol=2e-3)
    nodes = nodes_of(ws, net)
    texts = shown(nodes)
    inside = [node for node in nodes if any(SUFFIX in v.name for v in (*node.inputs, *node.outputs))]
    kinds = {node.op.type for node in inside if node.op is not None}
    assert {"Conv", "ConvGradient"} <= kinds
    assert ("MaxPoolGradient" in kinds) == (name == "lenet")
    assert ("SpatialBNGradient" in kinds) == (name == "resnet20")
    convolutions = [n for n in nodes if n.op is not None and n.op.type in CONVOLUTIONS]
    assert texts.count("Conv*") == len(convolutions)
    # Images in, gradients of what follows the last pooling; and filters: all in, their gradients out.
    assert texts.count(TO) == len(convolutions) + 2
    assert texts.count(BACK) == len(convolutions) + 1
    memory = ws.program(net).segments()[0].compiled.memory
    for device, size in memory.arenas.items():
        assert size <= 1.15 * memory.lower_bound[device]


def test_a_residual_network_predicts_with_channels_innermost():
    """Parameters in float16: filters are folded with batch norms and transposed once."""
    model = gpunet.zoo.build("resnet20", (3, 8, 8), 10)
    source = gpunet.Workspace("cpu", seed=1)
    source.run_once(model.init_net)
    net = model.predict_net("softmax")
    results = []
    for without in ((), ("layout",), ("layout", "epilogues", "fusion")):
        ws = gpunet.Workspace("sim:0")
        for name in net.external_input:
            if name != "data":
                ws.feed(name, source.fetch(name).astype(np.float16))
        ws.feed("data", np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float16))
        ws.create(net, without=without)
        ws.run(net.name, 2)
        assert not check_races(ws.program(net.name))
        results.append((ws.fetch("softmax").astype(np.float64), ws))
    for value, _ in results[1:]:
        np.testing.assert_allclose(results[0][0], value, rtol=0.05, atol=5e-3)
    ws = results[0][1]
    nodes = nodes_of(ws, net.name)
    each_run = [text for node, text in zip(nodes, shown(nodes), strict=True) if not node.constant]
    assert each_run[0] == TO
    assert each_run.count(BACK) == each_run.count(TO) == 1
    assert each_run.count("FusedConv*") == 19
    assert each_run.count("Conv*") == 2
    memory = ws.program(net.name).segments()[0].compiled.memory
    for device, size in memory.arenas.items():
        assert size <= 1.15 * memory.lower_bound[device]


# The table of operators: what each gives on turned tensors is what it gives, turned.


SCHEMAS = [schema.lookup(type) for type in schema.registered_types() if not type.startswith("Test")]
ELEMENTWISE = {each.type for each in SCHEMAS if each.elementwise}
CHANNELS = {each.type for each in SCHEMAS if each.channels or each.joins or each.cuts}
POSSIBLE = ELEMENTWISE | CHANNELS


def node_of(definition: OperatorDef, inputs: list[np.ndarray]) -> Node | None:
    made = Operator(definition)
    if not all(isinstance(x, np.ndarray) for x in inputs):
        return None
    specs = [TensorSpec(x.shape, x.dtype) for x in inputs]
    outputs = made.infer(specs)
    if not all(isinstance(s, TensorSpec) for s in outputs):
        return None
    sim = Device("sim")
    values = [
        tuple(Value(name, s, sim) for name, s in zip(names, found, strict=True))
        for names, found in ((made.inputs, specs), (made.outputs, outputs))
    ]
    return Node(made, values[0], values[1], 0, sim)


def gradient_of(case: OpCase) -> Iterator[tuple[OperatorDef, list[np.ndarray]]]:
    """The operators of the gradient of a row's first output, with what they read."""
    definition = case.definition()
    y = definition.output[0]
    if case.gradient == () or not callable(schema.lookup(case.type).gradient):
        return
    try:
        steps, _ = gpunet.gradient_ops(definition, {y: "dy"})
    except GradientError:  # these arguments have none
        return
    ws = gpunet.Workspace("cpu", seed=1)
    for name, x in zip(definition.input, case.inputs, strict=True):
        ws.feed(name, x)
    ws.run_operator(definition)
    made = ws.fetch(y)
    ws.feed("dy", np.asarray(np.random.default_rng(6).uniform(0.5, 1.5, made.shape)).astype(made.dtype))
    for step in steps:
        yield step, [ws.fetch(name) for name in step.input]
        ws.run_operator(step)


def turned_steps(case: OpCase) -> Iterator[tuple[OperatorDef, list[np.ndarray], layout._Turned]]:
    """The operators of a row and of its gradient that the pass can turn."""
    for definition, inputs in [(case.definition(), list(case.inputs)), *gradient_of(case)]:
        node = node_of(definition, inputs)
        turned = None if node is None else layout._turned(node)
        if turned is not None:
            yield definition, inputs, turned


def test_every_operator_of_the_table_gives_the_same_turned():
    covered = set()
    for case in GOOD:
        rank = max((np.ndim(x) for x in case.inputs), default=0)
        large = max((np.size(x) for x in case.inputs), default=0) > 10_000
        if rank < 3 or large or case.type not in POSSIBLE:
            continue
        for definition, inputs, turned in turned_steps(case):
            want = execute(definition, copies(inputs))
            laid = turned.places[0]
            moved = [np.moveaxis(x, 1, -1).copy() if i in laid else x for i, x in enumerate(inputs)]
            got = execute(turned.op.definition, copies(moved))
            for o, (a, b) in enumerate(zip(got, want, strict=True)):
                a = np.moveaxis(a, -1, 1) if o in turned.places[1] else a
                exact = a.dtype.kind in "iub" or definition.type in ELEMENTWISE
                tolerance = (
                    0.0
                    if exact
                    else {"bfloat16": 5e-2, "float16": 1e-2, "float32": 1e-3}.get(a.dtype.name, 1e-9)
                )
                a, b = a.astype(np.float64), b.astype(np.float64)
                largest = np.abs(b[np.isfinite(b)]).max(initial=0)
                np.testing.assert_allclose(a, b, tolerance, tolerance * largest, err_msg=case.name())
            covered.add(definition.type)
    assert {"Relu", "ReluGradient", "Sum", "Mul", "Copy", "FloatToHalf"} <= covered
    # Rows of Split have other dimensions; it is in a region above.
    assert CHANNELS - covered == {"Split"}, "operators that the pass turns, without a row that shows it"
