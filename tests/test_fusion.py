"""Fusion: what becomes one operator and what must not, and the same results as without it."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import gpunet
from gpunet import custom, schema
from gpunet.cli.explain import node_text
from gpunet.cpu_fallback import fused as cpu_fused
from gpunet.cuda_kernels import fused as cuda_fused
from gpunet.cuda_kernels import nvrtc
from gpunet.dtypes import bfloat16
from gpunet.errors import BlobError, DeviceError
from gpunet.passes import fusion
from gpunet.proto import DeviceOption, NetDef, OperatorDef
from gpunet.records import check_races
from tests.nets import DEVICES, nodes_of, op
from tests.sim_kernels import needs_compiler

FLOAT, FLOAT16, DOUBLE = 1, 12, 13


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of any size are fused on the CPU, in blocks that are smaller than the tensors here."""
    monkeypatch.setattr(fusion, "CPU_ELEMENTS", 1)
    monkeypatch.setattr(cpu_fused, "BLOCK", 40)


FEEDS = {"x": (5, 6, 7), "z": (5, 6, 7), "c": (6,), "s": (1,), "r": (5, 1, 7), "p": (1, 6, 1)}


def ran(
    ops: list[OperatorDef], device: str = "cpu", *, keep=("y",), runs: int = 1, dtype=np.float32, **options
) -> gpunet.Workspace:
    ws = gpunet.Workspace(device)
    for seed, (name, shape) in enumerate(FEEDS.items()):
        ws.feed(name, np.random.default_rng(seed).normal(size=shape).astype(dtype))
    ws.create(NetDef(name="n", op=ops), keep=keep, **options)
    ws.run("n", runs)
    assert not check_races(ws.program("n"))
    return ws


def types(ws: gpunet.Workspace) -> list[str]:
    return ["copy" if node.op is None else node.op.type for node in nodes_of(ws)]


def same(ops: list[OperatorDef], device: str = "cpu", *, keep=("y",), exact: bool = True, **options):
    """The workspace with fusion, after a comparison with the one without."""
    got = ran(ops, device, keep=keep, **options)
    want = ran(ops, device, keep=keep, without=["fusion"], **options)
    for name in [*keep, *FEEDS]:
        a, b = got.fetch(name), want.fetch(name)
        if exact:
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6, err_msg=name)
    return got


CHAIN = [
    op("Scale", "x", "a", scale=0.5),
    op("Add", "a z", "b"),
    op("Relu", "b", "b"),
    op("Mul", "b c", "d", broadcast=1, axis=1),
    op("Sub", "d r", "e"),
    op("Sigmoid", "e", "y"),
]


@pytest.mark.parametrize("device", DEVICES)
def test_a_chain_becomes_one_operator(device):
    ws = same(CHAIN, device)
    (node,) = nodes_of(ws)
    assert node.op.type == "FusedElementwise"
    assert node.op.definition.name == "y = Sigmoid((Relu(Scale(x, scale=0.5) + z) * c) - r)"
    with pytest.raises(BlobError, match="blob 'b' is internal to net 'n'"):
        ws.fetch("b")
    # Where all blobs are kept, only what b holds before it is written again is left out.
    kept = types(ran(CHAIN, device, keep=None))
    assert kept == ["Scale", "FusedElementwise", "Mul", "Sub", "Sigmoid"]


@pytest.mark.parametrize("device", DEVICES)
def test_an_operator_in_place_joins_where_all_blobs_are_kept(device):
    ops = [op("Softmax", "z", "a"), op("Sum", "a x", "y"), op("Relu", "y", "y"), op("Tanh", "x", "x")]
    ws = same(ops, device, runs=2)
    assert types(ws) == ["Softmax", "FusedElementwise", "Tanh"]
    ws = same(ops, device, keep=["a", "y"], runs=2)
    assert types(ran(ops, device, keep=None)) == types(ws) == ["Softmax", "FusedElementwise", "Tanh"]
    np.testing.assert_array_equal(ran(ops, device, keep=None).fetch("y"), ran(ops, device).fetch("y"))


def test_a_group_is_a_graph():
    ops = [
        op("Tanh", "x", "a"),
        op("Sqr", "a", "b"),
        op("Exp", "a", "d"),
        op("Add", "b d", "e"),
        op("Sum", "e a z", "y"),
    ]
    (node,) = nodes_of(same(ops))
    assert node.op.definition.name == "t0 = Tanh(x); y = Sum(Sqr(t0) + Exp(t0), t0, z)"


def test_an_operand_can_lie_along_several_dimensions():
    # c has 6 elements, along dimension 1 of both; once aligned by the rule of NumPy.
    ops = [op("Add", "x c", "a", broadcast=1, axis=1), op("Mul", "a p", "b"), op("Add", "b s", "y")]
    (node,) = nodes_of(same(ops))
    assert [value.name for value in node.inputs] == ["x", "c", "p", "s"]
    square = [op("Reshape", "x", "q old", shape=[35, 6]), op("Slice", "q", "w", starts=[0, 0], ends=[6, 6])]
    twice = [op("Add", "w c", "a", broadcast=1, axis=0), op("Mul", "a c", "y")]
    ws = same([*square, *twice])
    (node,) = [n for n in nodes_of(ws) if n.op.type == "FusedElementwise"]
    assert [value.name for value in node.inputs] == ["w", "c", "c"]


TOTALS = [
    op("AveragedLoss", "b", "y"),
    op("SumElements", "b", "y"),
    op("SumElements", "b", "y", average=1),
    op("ReduceSum", "b", "y"),
    op("ReduceMean", "b", "y", keepdims=0),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, bfloat16()])
@pytest.mark.parametrize("total", TOTALS, ids=lambda o: f"{o.type}{len(o.arg)}")
def test_a_sum_ends_a_group(device, total, dtype):
    ops = [op("Sub", "x z", "a"), op("Sqr", "a", "b"), total]
    ws = same(ops, device, exact=False, dtype=dtype)
    assert types(ws) == ["FusedElementwise"]
    more = same([*ops, op("Scale", "y", "w", scale=2.0)], device, keep=["w"], exact=False, dtype=dtype)
    assert types(more) == ["FusedElementwise", "Scale"]


@pytest.mark.parametrize(
    ("ops", "want"),
    [
        ([op("Relu", "x", "a"), op("ReduceSum", "a", "y", axes=[0])], ["Relu", "ReduceSum"]),
        ([op("Relu", "x", "a"), op("Softmax", "a", "b"), op("Tanh", "b", "y")], ["Relu", "Softmax", "Tanh"]),
        (
            [op("Relu", "c", "a"), op("Add", "x a", "y", broadcast=1, axis=1)],
            ["Relu", "Add"],  # of another shape
        ),
        (
            [op("Cast", "x", "a", to="int32"), op("Cast", "a", "y", to="float")],
            ["Cast", "Cast"],  # whole numbers
        ),
        (
            [
                op("UniformFill", "", "a", shape=[5, 6, 7]),
                op("Relu", "a", "b"),
                op("Dropout", "b", "d m"),
                op("Sqr", "d", "y"),
            ],
            ["UniformFill", "Relu", "Dropout", "Sqr"],
        ),
        ([op("Relu", "x", "a", engine="OTHER"), op("Tanh", "a", "y")], ["Relu", "Tanh"]),
        (
            [op("Relu", "x", "a"), op("Softmax", "a", "b"), op("Add", "a b", "y")],
            ["Relu", "Softmax", "Add"],  # a way out of the group and back in
        ),
        ([op("Scale", "x", "a", scale=float("inf")), op("Tanh", "a", "y")], ["Scale", "Tanh"]),
    ],
    ids=["rows", "other", "shape", "whole", "random", "engine", "convex", "infinite"],
)
def test_what_is_not_fused(ops, want):
    ws = ran(ops)
    assert types(ws) == want
    np.testing.assert_array_equal(ws.fetch("y"), ran(ops, without=["fusion"]).fetch("y"))


def test_small_tensors_are_not_fused_on_the_cpu(monkeypatch):
    monkeypatch.setattr(fusion, "CPU_ELEMENTS", 5 * 6 * 7 + 1)
    assert types(ran(CHAIN)) == [o.type for o in CHAIN]
    monkeypatch.setattr(fusion, "CPU_ELEMENTS", 5 * 6 * 7)
    assert types(ran(CHAIN)) == ["FusedElementwise"]


def test_constants_stay_constant():
    ops = [op("ConstantFill", "", "k", shape=[5, 6, 7], value=2.0), op("Sqr", "k", "q")]
    ws = same([*ops, op("Mul", "x q", "a"), op("Relu", "a", "y")])
    assert [(t, n.constant) for t, n in zip(types(ws), nodes_of(ws), strict=True)] == [
        ("ConstantFill", True),
        ("Sqr", True),
        ("FusedElementwise", False),
    ]


def test_constants_are_not_written_over():
    ops = [
        op("ConstantFill", "", "y", shape=[5, 6, 7], value=2.0),
        op("Mul", "x y", "a"),
        op("Relu", "a", "y"),
    ]
    ws = ran([*ops, op("Softmax", "y", "w")], keep=["w"], runs=3)
    assert types(ws) == ["ConstantFill", "Mul", "Relu", "Softmax"]
    want = ran([*ops, op("Softmax", "y", "w")], keep=["w"], without=["fusion"])
    np.testing.assert_array_equal(ws.fetch("w"), want.fetch("w"))


@needs_compiler
def test_devices_are_not_mixed():
    host = DeviceOption(device_type=0)
    ops = [
        op("Relu", "x", "a"),
        op("Sqr", "a", "b"),
        op("Tanh", "b", "d", device_option=host),
        op("Exp", "d", "y"),
    ]
    ws = same(ops, "sim:0")
    assert types(ws) == ["FusedElementwise", "copy", "Tanh", "copy", "Exp"]


@pytest.mark.parametrize("device", DEVICES)
def test_blobs_that_are_overwritten_are_read_before(device):
    # x is written between: what reads it cannot run later.
    ops = [op("Relu", "x", "a"), op("Softmax", "z", "x"), op("Add", "a x", "y")]
    assert "FusedElementwise" not in types(same(ops, device))
    ops = [op("Relu", "x", "a"), op("Softmax", "z", "x"), op("Add", "a z", "y")]
    assert "FusedElementwise" not in types(same(ops, device))
    # The group itself writes x, in place and by name.
    ops = [op("Scale", "x", "a", scale=3.0), op("Sub", "a x", "b"), op("Abs", "b", "x")]
    ws = same(ops, device, keep=["x"], runs=3)
    assert types(ws) == ["FusedElementwise"]
    # The old x is read by the name that it had.
    ops = [op("Relu", "x", "a"), op("Scale", "a", "x", scale=0.5), op("Add", "a x", "y")]
    same(ops, device, keep=["x", "y"], runs=2)


def test_a_group_does_not_write_over_what_is_read_later():
    # The second Relu is left out: what reads b reads the first a, which must outlive the second one.
    ops = [
        op("Relu", "x", "a"),
        op("Relu", "x", "b"),
        op("Softmax", "b", "d"),
        op("Scale", "a", "t", scale=2.0),
    ]
    ops += [op("Sqr", "t", "a"), op("Softmax", "a", "e"), op("Sum", "b d e", "y")]
    assert types(same(ops)) == ["Relu", "Softmax", "Scale", "Sqr", "Softmax", "Sum"]


@pytest.mark.parametrize("device", DEVICES)
def test_a_sum_in_place_of_a_factor_of_its_terms(device):
    ops = [op("AveragedLoss", "x", "w"), op("Mul", "x w", "a"), op("SumElements", "a", "w")]
    ws = same(ops, device, keep=["w"], exact=False)
    assert types(ws) == ["AveragedLoss", "FusedElementwise"]


def test_a_group_does_not_write_over_what_it_broadcasts():
    ops = [op("Mul", "x s", "a"), op("Sqr", "a", "b"), op("ReduceSum", "b", "s", keepdims=0)]
    assert types(same(ops, keep=["s"], exact=False)) == ["Mul", "FusedElementwise"]
    ops = [op("Add", "x r", "a"), op("Add", "a z", "r")]
    assert types(same(ops, keep=["r"])) == ["Add", "Add"]


@pytest.mark.parametrize("last", ["AbsGradient a t", "Sum a z t", "Sub t a", "ClipGradient t a", "Max a t"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_result_in_place_of_an_input(device, last):
    """The input is read by the last operator too, whose own kernel may not be right in place of it."""
    type, *operands = last.split()
    ops = [
        op("Softmax", "z", "t"),
        op("Sqr", "t", "a"),
        op(type, " ".join(operands), "b"),
        op("Softmax", "b", "y"),
    ]
    ws = same(ops, device)
    assert [node.shares for node in nodes_of(ws)] == [{}, {0: 0}, {}]


def test_the_next_operator_waits_for_a_value_that_control_inputs_name():
    ops = [op("Relu", "x", "a"), op("Sqr", "a", "y"), op("Softmax", "z", "w")]
    ops[2].control_input.append("a")
    assert types(ran(ops, keep=["y", "w"])) == ["Relu", "Sqr", "Softmax"]


def everything(dtype: np.dtype) -> list[OperatorDef]:
    """A group with an operator of each type."""
    ops = [op("Sigmoid", "x", "u"), op("Abs", "z", "v"), op("GT", "x z", "g"), op("Not", "g", "h")]
    to_half = dtype != np.float16
    small = np.finfo(dtype).dtype.name
    back = {"float16": FLOAT16, "float32": FLOAT, "float64": DOUBLE}[small]
    bools = {
        "EQ": "x z",
        "NE": "x z",
        "GE": "x z",
        "LT": "x z",
        "LE": "x z",
        "And": "g h",
        "Or": "g h",
        "Xor": "g h",
    }
    made = ["u", "v"]
    for type, operands in bools.items():
        ops += [op(type, operands, f"{type}_b"), op("Cast", f"{type}_b", f"{type}_f", to=back)]
        made.append(f"{type}_f")
    args = {"Scale": {"scale": 0.1}, "Clip": {"min": -0.3, "max": 0.7}, "ClipGradient": {"min": -0.3}}
    two = {"ReluGradient", "SigmoidGradient", "TanhGradient", "ClipGradient", "AbsGradient"}
    skipped = {"Sigmoid", "Abs", "Not", "Cast", "Pow", "FloatToHalf", "HalfToFloat", *bools, "GT"}
    for type in sorted(cuda_fused.written_types() - skipped):
        operands = "x z" if type in two else "z v" if type in ("Add", "Sub", "Mul", "Div") else "v"
        operands = {"Sum": "x z u", "Max": "x z u", "Min": "x z u"}.get(type, operands)
        ops.append(op(type, operands, f"{type}_f", **args.get(type, {})))
        made.append(f"{type}_f")
    for number, exponent in enumerate((2.0, 1.0, 0.5, -1.0, 1.5)):
        ops.append(op("Pow", "v", f"Pow{number}_f", exponent=exponent))
        made.append(f"Pow{number}_f")
    if to_half:
        ops += [op("FloatToHalf", "x", "l", clip=1), op("Cast", "l", "l_f", to=back)]
        made.append("l_f")
    else:
        ops += [op("HalfToFloat", "x", "l"), op("Tanh", "l", "m"), op("FloatToHalf", "m", "l_f")]
        made.append("l_f")
    # Of weights that no sum of the others equals.
    for number, name in enumerate(made):
        ops.append(op("Scale", name, f"{name}_w", scale=1.0 + number / 3))
    ops.append(op("Add", f"{made[0]}_w {made[1]}_w", "sum1"))
    for number, name in enumerate(made[2:], 2):
        ops.append(op("Add", f"sum{number - 1} {name}_w", f"sum{number}"))
    return [*ops, op("Copy", f"sum{len(made) - 1}", "y")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_every_type_gives_the_same_bits(device, dtype, monkeypatch):
    monkeypatch.setattr(fusion, "MAX_OPERATORS", 200)
    ops = everything(np.dtype(dtype))
    used = {o.type for o in ops}
    expected = cuda_fused.written_types() - ({"HalfToFloat"} if dtype != np.float16 else set())
    assert used == expected
    assert types(same(ops, device, dtype=dtype)) == ["FusedElementwise"]


def test_all_elementwise_types_but_sign_are_written_in_cuda():
    """Those of floats; SumInt gives whole numbers."""
    declared = {type for type in schema.registered_types() if schema.lookup(type).elementwise}
    built_in = {type for type in declared if not type.startswith("Test")}
    assert built_in - cuda_fused.written_types() == {"Sign", "SumInt"}
    assert cuda_fused.written_types() < declared


@pytest.mark.parametrize("device", DEVICES)
def test_an_operator_of_ones_own_that_declares_itself_elementwise_is_fused(device):
    """On a device that has no formula for it, what is before and behind it is fused without it."""
    if "TestTwist" not in schema.registered_types():
        custom.operator("TestTwist", numpy=lambda x: x * np.abs(x), elementwise=True, doc="``X |X|``")
        custom.operator("TestWhole", numpy=lambda x: x * np.abs(x), doc="``X |X|``")
    before = [op("Tanh", "x", "a"), op("Sqr", "a", "b")]
    behind = [op("Negative", "t", "u"), op("Scale", "u", "y", scale=2.0)]
    apart = ["FusedElementwise", "{}", "FusedElementwise"]
    whole = ["FusedElementwise"] if device == "cpu" else apart
    for kind, wanted in (("TestTwist", whole), ("TestWhole", apart)):
        found = types(same([*before, op(kind, "b", "t"), *behind], device))
        assert [type for type in found if type != "copy"] == [type.format(kind) for type in wanted]


def test_sources_do_not_depend_on_shapes_and_can_be_printed():
    (node,) = nodes_of(ran(CHAIN))
    source = fusion.source_of(node)
    assert "const float t2 = t1 < 0 ? 0 : t1;  // Relu" in source
    assert 'extern "C" __global__ void fused_scale_add_relu_mul_and_2(' in source
    ops = [*CHAIN[:4], op("Sub", "d r2", "e"), CHAIN[5]]
    ws = gpunet.Workspace("cpu")
    for name, shape in {"x": (2, 3, 4), "z": (2, 3, 4), "c": (3,), "r2": (2, 1, 4)}.items():
        ws.feed(name, np.ones(shape, np.float32))
    ws.create(NetDef(name="n", op=ops), keep=["y"])
    ws.run("n")
    assert fusion.source_of(nodes_of(ws)[0]) == source


def test_what_cannot_be_written_says_so():
    (node,) = nodes_of(ran([op("Relu", "x", "a"), op("Sqr", "a", "y")]))
    node.op.args.body.op[0].type = "Sign"
    with pytest.raises(DeviceError, match=r"\[FusedElementwise\].*Sign to float32 is not written"):
        fusion.source_of(node)


@pytest.mark.parametrize("arch", [75, 90])
def test_sources_compile_for_gpus(arch, monkeypatch):
    try:
        nvrtc.bindings()
        nvrtc.headers()
    except DeviceError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(fusion, "MAX_OPERATORS", 200)
    total = [*CHAIN, op("AveragedLoss", "y", "w")]
    for ops, keep, dtype in [
        (CHAIN, ["y"], np.float32),
        (total, ["w"], np.float16),
        *((everything(np.dtype(t)), ["y"], t) for t in (np.float32, np.float16, np.float64)),
    ]:
        (node,) = nodes_of(ran(ops, keep=keep, dtype=dtype))
        made = cuda_fused.declare(cuda_fused.generate(node.op, [v.spec for v in node.inputs]))
        cubin = nvrtc.compile_module(made.module, arch)
        (usage,) = cubin.usage.values()
        assert usage.spill_stores == 0


@st.composite
def expressions(draw: st.DrawFn) -> tuple[list[OperatorDef], list[str]]:
    """Random graphs of elementwise operators: shared results, broadcasting, in-place writes, sums."""
    full, narrow = ["x", "z"], ["c", "s", "r", "p"]
    ops: list[OperatorDef] = []
    for number in range(draw(st.integers(2, 12))):
        pick = lambda: draw(st.sampled_from(full))  # noqa: E731
        name = f"y{number}"
        kind = draw(st.sampled_from(["unary", "binary", "narrow", "sum", "gradient", "inplace", "softmax"]))
        if kind == "unary":
            ops.append(op(draw(st.sampled_from(["Relu", "Tanh", "Sqr", "Negative", "Copy"])), pick(), name))
        elif kind == "binary":
            ops.append(op(draw(st.sampled_from(["Add", "Sub", "Mul", "Max"])), f"{pick()} {pick()}", name))
        elif kind == "narrow":
            other = draw(st.sampled_from(narrow))
            along = {"broadcast": 1, "axis": 1} if other == "c" else {}
            ops.append(op(draw(st.sampled_from(["Add", "Mul"])), f"{pick()} {other}", name, **along))
        elif kind == "sum":
            ops.append(op("Sum", " ".join(pick() for _ in range(draw(st.integers(1, 4)))), name))
        elif kind == "gradient":
            ops.append(
                op(draw(st.sampled_from(["ReluGradient", "TanhGradient"])), f"{pick()} {pick()}", name)
            )
        elif kind == "inplace":
            target = pick()
            ops.append(op(draw(st.sampled_from(["Tanh", "Relu", "Scale"])), target, target))
            continue
        else:
            ops.append(op("Softmax", pick(), name))
        full.append(name)
    keep = draw(st.lists(st.sampled_from(full), min_size=1, max_size=2, unique=True))
    if draw(st.booleans()):
        ops.append(op("AveragedLoss", keep[0], "loss"))
        keep[0] = "loss"
    return ops, keep


def check_expression(expression: tuple[list[OperatorDef], list[str]], device: str) -> None:
    ops, keep = expression
    got = ran(ops, device, keep=keep, runs=2)
    want = ran(ops, device, keep=keep, runs=2, without=["fusion"])
    for name in [*keep, "x", "z"]:
        a, b = got.fetch(name), want.fetch(name)
        if name == "loss":
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)


@hypothesis.given(expressions())
@hypothesis.settings(max_examples=100)
def test_random_expressions_on_the_cpu(expression):
    check_expression(expression, "cpu")


# Each example has sources of its own to be compiled.
@needs_compiler
@hypothesis.given(expressions())
@hypothesis.settings(max_examples=8)
def test_random_expressions_on_the_simulated_device(expression):
    check_expression(expression, "sim:0")


def test_threads_give_the_same_bits(monkeypatch):
    from gpunet.cpu_fallback import threads

    want = ran(CHAIN, without=["fusion"]).fetch("y")
    total = [*CHAIN, op("AveragedLoss", "y", "w")]
    losses = []
    monkeypatch.setattr(threads, "THREAD_BYTES", 1)
    for count in (1, 2, 3):
        for module in (threads, cpu_fused):
            monkeypatch.setattr(module, "thread_count", lambda count=count: count)
        np.testing.assert_array_equal(ran(CHAIN).fetch("y"), want)
        losses.append(ran(total, keep=["w"]).fetch("w"))
    assert losses[0] == losses[1] == losses[2]


def test_explain_shows_what_is_computed():
    (node,) = nodes_of(ran(CHAIN))
    assert node_text(node).endswith("(y = Sigmoid((Relu(Scale(x, scale=0.5) + z) * c) - r))")
