"""Random nets of convolutions and what goes with them: equal on every engine, with passes on and off."""

from __future__ import annotations

from unittest import mock

import hypothesis
import hypothesis.strategies as st
import numpy as np

import gpunet
from gpunet.definitions import make_operator
from gpunet.passes import layout
from gpunet.passes.pipeline import PASSES
from gpunet.proto import PROTO_CPU, NetDef
from gpunet.records import check_races
from tests.sim_kernels import needs_compiler

OPTIONAL = [p.name for p in PASSES if p.optional]
ENGINES = [
    {"engine": "simple"},
    {"engine": "async_scheduling", "streams": 3, "workers": 2},
    {"engine": "graph", "streams": 2},
]
SHAPE = (2, 4, 5, 5)
KINDS = [*["Conv"] * 5, "Relu", "in place", "Sum", "Add", "pool", "norm", "Concat", "again", "FC"]


@st.composite
def nets(draw: st.DrawFn) -> NetDef:
    """Random graphs of operators on images of one shape; blobs are shared, overwritten, written again."""
    blobs = ["x0", "x1"]
    net = NetDef(name="images", external_input=[*blobs, "w", "w2", "b", "v", "u", "c"])
    dead: list[str] = []

    def pick() -> str:
        return str(draw(st.sampled_from(blobs)))

    def add(type: str, inputs: str, outputs: str, **args: object) -> None:
        net.op.append(make_operator(type, inputs.split(), outputs.split(), **args))

    for number in range(draw(st.integers(3, 14))):
        kind, name = draw(st.sampled_from(KINDS)), f"y{number}"
        x = pick()
        if kind == "Conv":
            bias = draw(st.sampled_from(["", " b"]))
            add("Conv", f"{x} w{bias}", name, kernel=3, pad=1)
        elif kind == "Relu":
            add(draw(st.sampled_from(["Relu", "Sigmoid"])), x, name)
        elif kind == "in place":
            add("Relu", x, x)
            continue
        elif kind in ("Sum", "Add"):
            add(kind, f"{x} {pick()}", name)
        elif kind == "pool":
            add(draw(st.sampled_from(["MaxPool", "AveragePool"])), x, name, kernel=3, pad=1)
        elif kind == "norm":
            add("SpatialBN", f"{x} v v b v", name, is_test=1)
        elif kind == "Concat":
            add("Concat", f"{x} {pick()}", f"j{number} i{number}")
            add("Conv", f"j{number} w2", name, kernel=1)
        elif kind == "again":
            # A blob that exists, written anew.
            add("Conv", f"{x} w b", name, kernel=3, pad=1)
            add("Relu", name, name)
        else:
            add("FC", f"{x} u c", f"f{number}")
            add("Relu", f"f{number}", f"g{number}")
            dead.append(f"g{number}")
            continue
        blobs.append(name)
    made = [*blobs[2:], *dead] or ["x0"]
    net.external_output.extend(draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True)))
    for op in net.op:
        if draw(st.integers(0, 24)) == 0:
            op.device_option.device_type = PROTO_CPU
    return net


def outcome(net: NetDef, device: str, dtype: str, **options) -> dict[str, np.ndarray]:
    ws = gpunet.Workspace(device)
    rng = np.random.default_rng(1)
    feeds = {"x0": SHAPE, "x1": SHAPE, "w": (4, 4, 3, 3), "w2": (4, 8, 1, 1)}
    feeds |= {"b": (4,), "u": (3, 100), "c": (3,)}
    for name, shape in feeds.items():
        scale = 0.15 if name in ("w", "w2", "u") else 1.0
        ws.feed(name, (scale * rng.normal(size=shape)).astype(dtype))
    ws.feed("v", np.full(4, 1.25, dtype))
    ws.create(net, **options)
    # The graph engine captures in its second run and replays from then on.
    ws.run(net.name, 3)
    assert not check_races(ws.program(net.name))
    return {name: ws.fetch(name) for name in [*net.external_output, "x0", "x1"]}


def assert_close(a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerance: float) -> None:
    for name, value in b.items():
        x, y = a[name].astype(np.float64), value.astype(np.float64)
        np.testing.assert_allclose(x, y, tolerance, tolerance * max(1.0, np.abs(y).max()), err_msg=name)


#: Folding changes the rounding of batch norms.
EXACT = [name for name in OPTIONAL if name != "batch_norm_folding"]


@hypothesis.given(nets(), st.sampled_from(["float32", "float16"]))
@hypothesis.settings(max_examples=40)
def test_passes_keep_the_bits_on_the_cpu(net: NetDef, dtype: str) -> None:
    folding = ["batch_norm_folding"]
    want = outcome(net, "cpu", dtype, without=OPTIONAL)
    for engine in ENGINES[:2]:
        for without in (folding, [*folding, "epilogues"], [*folding, "fusion"]):
            got = outcome(net, "cpu", dtype, without=without, **engine)
            for name, value in want.items():
                np.testing.assert_array_equal(got[name], value, err_msg=f"{name} {engine} {without}")


@needs_compiler
@hypothesis.given(nets(), st.sampled_from(["float16", "float16", "float32"]), st.integers(0, 2))
@hypothesis.settings(max_examples=30)
def test_passes_keep_the_bits_on_the_simulated_device_but_for_layouts(
    net: NetDef, dtype: str, margin: int
) -> None:
    others = ["batch_norm_folding", "layout"]
    want = outcome(net, "sim:0", dtype, without=OPTIONAL)
    assert_close(want, outcome(net, "cpu", dtype, without=OPTIONAL), 2e-2 if dtype == "float16" else 1e-4)
    for engine in ENGINES:
        for without in (others, [*others, "epilogues"]):
            got = outcome(net, "sim:0", dtype, without=without, **engine)
            for name, value in want.items():
                np.testing.assert_array_equal(got[name], value, err_msg=f"{name} {engine} {without}")
    # With a margin of 0 each convolution has borders of its own.
    with mock.patch.object(layout, "MARGIN", margin):
        turned = [outcome(net, "sim:0", dtype, without=["batch_norm_folding"], **e) for e in ENGINES]
    for got in turned:
        assert_close(got, want, 2e-2 if dtype == "float16" else 1e-4)
        for name, value in turned[0].items():
            np.testing.assert_array_equal(got[name], value, err_msg=name)
