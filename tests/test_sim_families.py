"""Kernels of pooling, convolution, shaping, joining, indexing and updates on the simulated device.

At sizes beyond the tables: tiles and sorted parts that end inside, sums that are cut, long lines.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import gpunet
from gpunet import kernels
from gpunet.backends import backend
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import conv_transpose, launch, signature
from gpunet.cuda_kernels.multi_tensor import CHUNK, TensorList
from gpunet.cuda_kernels.sim import toolchain
from gpunet.definitions import make_operator
from gpunet.devices import parse_device
from gpunet.dtypes import as_dtype
from gpunet.errors import DataTypeError, KernelError
from gpunet.kernels import KernelContext
from gpunet.operator import Operator
from gpunet.specs import TensorSpec

if toolchain.find() is None:
    pytest.skip(toolchain.MISSING, allow_module_level=True)

TOLERANCE = {"float16": 2e-3, "float32": 2e-5, "float64": 1e-12}
rng = np.random.default_rng(8)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Each test draws from the start, whichever ran before."""
    global rng
    rng = np.random.default_rng(8)


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def integers(high: int, *shape: int, dtype: str = "int32") -> np.ndarray:
    return rng.integers(0, high, shape).astype(dtype)


def run(
    device: str, type: str, inputs: list[np.ndarray], outputs: int, engine: str, args: dict[str, Any]
) -> list[Any]:
    names = [f"in{i}" for i in range(len(inputs))]
    schema = gpunet.schema.lookup(type)
    pairs = {o: i for i, o in (*schema.enforce_inplace,)}
    made = [names[pairs[o]] if o in pairs else f"out{o}" for o in range(outputs)]
    workspace = gpunet.Workspace(device, seed=3, strict=True)
    for name, x in zip(names, inputs, strict=True):
        workspace.feed(name, x)
    workspace.run_operator(make_operator(type, names, made, engine=engine, **args))
    return [workspace.fetch(name) for name in made]


def compare(type: str, inputs: list[np.ndarray], outputs: int = 1, engine: str = "", **args: Any) -> None:
    want = run("cpu", type, inputs, outputs, "", args)
    got = run("sim:0", type, inputs, outputs, engine, args)
    for o, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if b.dtype.kind != "f":
            np.testing.assert_array_equal(a, b, err_msg=f"output {o}")
            continue
        tolerance = TOLERANCE[b.dtype.name]
        largest = float(np.abs(b[np.isfinite(b)]).max(initial=0))
        np.testing.assert_allclose(
            a.astype(float), b.astype(float), tolerance, tolerance * largest, err_msg=f"output {o}"
        )


@pytest.fixture(params=["whole", "small"])
def grid(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids as they are, and of so few blocks that loops go round several times."""
    if request.param == "small":
        monkeypatch.setattr(launch, "THREADS", 32)
        monkeypatch.setattr(launch, "MAX_BLOCKS", 2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize(
    ("image", "filters", "kernel", "args"),
    [
        ((3, 5, 9, 11), 20, (3, 3), {"pad": 1}),
        ((2, 6, 7, 8), 34, (2, 3), {"strides": [2, 1], "pads": [0, 1, 1, 2], "group": 2}),
        ((1, 70, 5, 5), 70, (1, 1), {}),
        ((2, 4, 12, 12), 4, (3, 3), {"dilation": 2, "pad": 2, "group": 4}),
        ((24, 1, 16, 16), 3, (5, 5), {"stride": 2}),
        ((3, 2, 50, 50), 3, (1, 1), {}),
        ((9, 3, 40), 17, (4,), {"stride": 3, "pads": [2, 1]}),
        ((2, 3, 5, 6, 4), 5, (2, 3, 2), {"pad": 1, "strides": [1, 2, 1]}),
    ],
    ids=str,
)
def test_convolution(
    image: tuple[int, ...],
    filters: int,
    kernel: tuple[int, ...],
    args: dict[str, Any],
    order: str,
    dtype: str,
    grid: None,
) -> None:
    in_group = image[1] // args.get("group", 1)
    x, w, b = (
        normal(*image, dtype=dtype),
        normal(filters, in_group, *kernel, dtype=dtype),
        normal(filters, dtype=dtype),
    )
    if order == "NHWC":
        x, w = (np.ascontiguousarray(np.moveaxis(a, 1, -1)) for a in (x, w))
    options = {"order": order, "kernels": list(kernel), **args}
    compare("Conv", [x, w, b], engine="DIRECT", **options)
    (y,) = run("cpu", "Conv", [x, w, b], 1, "", options)
    dy = normal(*y.shape, dtype=dtype)
    compare("ConvGradient", [x, w, dy], 3, engine="DIRECT", **options)
    compare("ConvGradient", [x, w, dy], 1, engine="DIRECT", no_bias=1, **options)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize(
    ("image", "made", "kernel", "args"),
    [
        ((2, 3, 5, 4), 5, (3, 2), {"strides": [2, 3], "pads": [1, 0, 0, 1], "adjs": [1, 2]}),
        ((2, 4, 5, 4), 6, (3, 3), {"stride": 2, "pad": 1, "group": 2}),
        ((1, 4, 3, 4), 4, (2, 2), {"strides": [2, 1], "adjs": [2, 1], "group": 4}),
        ((2, 17, 6, 7), 70, (1, 1), {}),
        ((2, 3, 9), 4, (4,), {"strides": [3], "pads": [2, 0]}),
        ((1, 2, 2, 3, 4), 3, (2, 1, 3), {"strides": [1, 2, 2]}),
        ((0, 2, 3, 3), 3, (2, 2), {}),
    ],
)
def test_transposed_convolution(
    image: tuple[int, ...], made: int, kernel: tuple[int, ...], args: dict[str, Any], dtype: str, order: str
) -> None:
    """Our own kernels, which a GPU takes where cuDNN has no plan."""
    x, w, b = (
        normal(*image, dtype=dtype),
        normal(image[1], made // args.get("group", 1), *kernel, dtype=dtype),
        normal(made, dtype=dtype),
    )
    if order == "NHWC":
        x, w = (np.ascontiguousarray(np.moveaxis(a, 1, -1)) for a in (x, w))
    options = {"order": order, "kernels": list(kernel), **args}
    compare("ConvTranspose", [x, w, b], engine="DIRECT", **options)
    compare("ConvTranspose", [x, w], engine="DIRECT", **options)
    (y,) = run("cpu", "ConvTranspose", [x, w, b], 1, "", options)
    dy = normal(*y.shape, dtype=dtype)
    compare("ConvTransposeGradient", [x, w, dy], 3, engine="DIRECT", **options)
    compare("ConvTransposeGradient", [x, w, dy], 1, engine="DIRECT", no_bias=1, **options)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", signature.FLOATS)
def test_bias_behind_a_graph_of_cudnn(dtype: str, order: str, ctx: KernelContext, grid: None) -> None:
    op = Operator(make_operator("ConvTranspose", ["x", "w", "b"], ["y"], order=order))
    context = dataclasses.replace(ctx, op=op)
    whole = integers(9, 3, 5, 7, 11).astype(as_dtype(dtype))
    bias = integers(9, 11 if order == "NHWC" else 5).astype(as_dtype(dtype))
    y = on_device(whole)
    (launch,) = conv_transpose._add_bias(context, [on_device(bias)], y)
    launch()
    want = whole + (bias if order == "NHWC" else bias.reshape(5, 1, 1))
    np.testing.assert_array_equal(y.numpy().astype(float), want.astype(float))
    assert conv_transpose._add_bias(context, [], y) == []


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("type", "shape", "args"),
    [
        ("AveragePool", (3, 5, 20, 17), {"global_pooling": 1}),
        ("MaxPool", (3, 5, 20, 17), {"global_pooling": 1}),
        ("AveragePool", (2, 20, 17, 5), {"global_pooling": 1, "order": "NHWC"}),
        ("MaxPool", (2, 33, 19, 21), {"kernel": 3, "stride": 2, "pad": 1}),
        ("AveragePool", (2, 19, 21, 33), {"kernel": 3, "stride": 2, "pad": 1, "order": "NHWC"}),
        ("AveragePool", (2, 3, 40, 40), {"kernel": 17, "stride": 5, "pad": 8}),
        ("MaxPool", (2, 3, 40, 40), {"kernel": 17, "stride": 5, "pad": 8}),
    ],
    ids=str,
)
def test_pooling(type: str, shape: tuple[int, ...], args: dict[str, Any], dtype: str, grid: None) -> None:
    x = normal(*shape, dtype=dtype).round(1)  # with ties
    compare(type, [x], **args)
    (y,) = run("cpu", type, [x], 1, "", args)
    compare(f"{type}Gradient", [x, y, normal(*y.shape, dtype=dtype)], **args)


@pytest.mark.parametrize(
    ("definition", "shapes", "found"),
    [
        (("MaxPool", 1, {"kernel": 2}), [(1, 1, 1 << 16, 1 << 15)], "an image of 2,147,483,648 pixels"),
        (("AveragePool", 1, {"kernel": 2}), [(1, 1, 5, 1 << 31)], "an image of 10,737,418,240 pixels"),
        (
            ("Conv", 2, {"kernels": [1], "strides": [1 << 20], "pads": [1 << 30, 1 << 30]}),
            [(1, 1, 2), (1, 1, 1)],
            "a dimension of 2,147,483,650",
        ),
        (("Conv", 2, {"kernel": 1}), [(1, 1, 1 << 16, 1 << 15), (1, 1, 1, 1)], "an image of 2,147,483,648"),
        (("Conv", 2, {"kernel": 2}), [(1, 1 << 29, 2, 2), (1, 1 << 29, 2, 2)], "a filter of 2,147,483,648"),
    ],
)
def test_windows_beyond_32_bits_are_left_to_the_cpu(
    definition: tuple[str, int, dict[str, Any]], shapes: list[tuple[int, ...]], found: str
) -> None:
    type, inputs, args = definition
    op = Operator(make_operator(type, [f"in{i}" for i in range(inputs)], ["out"], **args))
    specs = [TensorSpec(shape, np.dtype("float16")) for shape in shapes]
    small = [TensorSpec(tuple(min(n, 8) for n in shape), np.dtype("float16")) for shape in shapes]
    reason = kernels.reason_against(op, "cuda", specs, op.infer(specs))
    assert reason is not None
    assert found in reason
    if "pads" not in args:
        assert kernels.reason_against(op, "cuda", small, op.infer(small)) is None


def test_pooling_passes_a_nan_on() -> None:
    x = normal(2, 3, 20, 20)
    x[1, 2, 3, 4] = np.nan
    compare("MaxPool", [x], global_pooling=1)
    compare("MaxPool", [x], kernel=2, stride=2)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "int64"])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((70, 45), [1, 0]),
        ((3, 33, 65), [0, 2, 1]),
        ((3, 33, 65), [2, 0, 1]),
        ((9, 10, 12), [2, 1, 0]),
        ((40, 3, 50), [2, 1, 0]),
        ((2, 8, 9, 16), [0, 2, 1, 3]),
        ((5, 1, 64, 4), [3, 1, 0, 2]),
        ((2, 3, 4, 5, 6, 7), [5, 4, 3, 2, 1, 0]),
    ],
    ids=str,
)
def test_transpose(shape: tuple[int, ...], axes: list[int], dtype: str, grid: None) -> None:
    compare("Transpose", [(rng.random(shape) * 100).astype(dtype)], axes=axes)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
@pytest.mark.parametrize(
    ("shape", "axis", "sizes"),
    [((6, 40), 0, [1, 2, 3]), ((50, 24), 1, [8, 7, 9]), ((3, 16, 5), 1, [8, 8])],
    ids=str,
)
def test_cutting_and_joining(
    shape: tuple[int, ...], axis: int, sizes: list[int], dtype: str, grid: None
) -> None:
    x = (rng.random(shape) * 100).astype(dtype)
    compare("Split", [x], len(sizes), axis=axis, split=sizes)
    compare("Concat", np.split(x, np.cumsum(sizes)[:-1], axis), 2, axis=axis)
    compare("Concat", [x] * 11, 2, axis=axis)
    ends = [n - 1 for n in shape]
    compare("Slice", [x], starts=[1] * len(shape), ends=ends)
    compare("SliceGradient", [x, x[tuple(slice(1, n) for n in ends)]], starts=[1] * len(shape), ends=ends)
    compare("Tile", [x], tiles=5, axis=axis)
    compare("TileGradient", [np.tile(x, 5)], tiles=5, axis=-1)


@pytest.mark.parametrize(
    ("rows", "picks", "block"), [(3, 9000, 2), (300, 5000, 3), (70_000, 4500, 1), (5, 1, 7), (1, 2049, 1)]
)
def test_sums_of_rows(rows: int, picks: int, block: int, grid: None) -> None:
    # Whole numbers: their sums are exact in any order.
    indices, values = integers(rows, picks), integers(100, picks, block, dtype="float32")
    compare("SparseToDense", [indices, values, np.zeros((rows, block), "float32")])
    compare("Gather", [normal(rows, block), indices.astype("int64") - rows // 2])


def test_sums_of_rows_of_whole_numbers_wrap() -> None:
    compare("SparseToDense", [integers(4, 600), integers(128, 600, 3, dtype="int8")], output_first_dim=5)


def test_gradient_of_gathering_from_a_batch(grid: None) -> None:
    data, indices = normal(3, 40, 6), integers(40, 25, 11)
    compare("BatchGatherGradient", [data, indices, normal(3, 25, 11, 6)])
    compare("BatchGatherGradient", [data, integers(40, 3, 70), normal(3, 70, 6)], match_outer=1)


@pytest.mark.parametrize("type", ["Gather", "SparseToDense"])
def test_an_index_out_of_range_is_reported(type: str) -> None:
    indices = np.array([1, 7, 3, 9], np.int32)
    inputs = [normal(7, 2), indices] if type == "Gather" else [indices, normal(4, 2), normal(7, 2)]
    with pytest.raises(KernelError, match=r"indices holds 7 at position 1, wanted .*6"):
        run("sim:0", type, inputs, 1, "", {})


def test_a_divisor_of_0_is_reported() -> None:
    inputs = [np.ones((2, 3), np.int32), np.array([4, 0, 0], np.int32)]
    with pytest.raises(KernelError, match="divisor B has a 0 at position 1, wanted no zeros in whole-number"):
        run("sim:0", "Div", inputs, 1, "", {"broadcast": 1})


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int64"])
@pytest.mark.parametrize(
    ("shape", "axis", "k"),
    [((4, 3000), 1, 5), ((3, 700), 1, 40), ((100, 7), 0, 9), ((2, 1500, 3), 1, 20), ((3, 5), 1, 9)],
)
def test_top_k(shape: tuple[int, ...], axis: int, k: int, dtype: str, grid: None) -> None:
    x = (rng.standard_normal(shape) * 20).astype(dtype)  # with ties
    if x.dtype.kind == "f":
        x.flat[:: x.size // 7] = np.nan
    compare("TopK", [x], 3, k=k, axis=axis)
    compare("ArgMax", [x], axis=axis)
    compare("ArgMin", [x], axis=axis, keepdims=0)


UPDATES: list[tuple[str, int, dict[str, Any]]] = [
    ("MomentumSGDUpdate", 3, {"momentum": 0.9, "nesterov": 1}),
    ("Adagrad", 4, {"weight_decay": 0.1, "decay": 0.9}),
    ("Adam", 4, {}),
    ("RmsProp", 3, {"momentum": 0.5}),
    ("Adadelta", 3, {}),
    ("Wngrad", 4, {}),
    ("Storm", 3, {}),
    ("Lars", 1, {}),
    ("YellowFin", 8, {"zero_debias": 0}),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("type", "outputs", "args"), UPDATES, ids=[u[0] for u in UPDATES])
def test_updates(type: str, outputs: int, args: dict[str, Any], dtype: str, grid: None) -> None:
    n = 9001

    def state() -> np.ndarray:
        return np.abs(normal(n, dtype=dtype))

    def one(value: float) -> np.ndarray:
        return np.array([value], "float32")

    inputs = {
        "MomentumSGDUpdate": [normal(n, dtype=dtype), state(), one(0.1), normal(n, dtype=dtype)],
        "Adagrad": [normal(n, dtype=dtype), state(), normal(n, dtype=dtype), one(-0.1)],
        "Adam": [normal(n, dtype=dtype), state(), state(), normal(n, dtype=dtype), one(-0.1), np.array([4])],
        "RmsProp": [normal(n, dtype=dtype), state(), state(), one(-0.1)],
        "Adadelta": [normal(n, dtype=dtype), state(), state(), normal(n, dtype=dtype), one(-0.1)],
        "Wngrad": [normal(n, dtype=dtype), np.array([2], dtype), normal(n, dtype=dtype), one(-0.1)],
        "Storm": [normal(n, dtype=dtype), state(), np.array([2], dtype), normal(n, dtype=dtype), one(-0.1)],
        "Lars": [normal(n, dtype=dtype), normal(n, dtype=dtype), one(0.01), one(0.9), one(3)],
        "YellowFin": [
            *(normal(n, dtype=dtype), state(), np.array([0.1], dtype), np.array([0.5], dtype)),
            *(
                np.abs(normal(20, dtype=dtype)),
                normal(n, dtype=dtype),
                state(),
                np.abs(normal(5, dtype=dtype)),
            ),
            *(normal(n, dtype=dtype), np.array([7])),
        ],
    }[type]
    compare(type, inputs, outputs, **args)


ROWS: list[tuple[str, int, str, dict[str, Any]]] = [
    ("SparseMomentumSGDUpdate", 3, "g m lr w i", {"momentum": 0.9}),
    ("SparseAdagrad", 2, "w s i g lr", {"weight_decay": 0.1}),
    ("RowWiseSparseAdagrad", 2, "w r i g lr", {"weight_decay": 0.1}),
    ("SparseAdadelta", 3, "w s s i g lr", {}),
    ("SparseAdam", 4, "w m s i g lr t", {}),
    ("SparseAdam", 4, "w m s i g lr t", {"enableRAdam": 1}),
    ("RowWiseSparseAdam", 4, "w m r i g lr t", {}),
    ("SparseWngrad", 2, "w one i g lr", {}),
    ("SparseStorm", 3, "w m one g i lr", {}),
    ("SparseFtrl", 2, "w nz i g", {}),
    ("ScatterWeightedSum", 1, "w lr i g lr g one", {}),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("type", "outputs", "inputs", "args"), ROWS, ids=lambda v: v if isinstance(v, str) else ""
)
@pytest.mark.parametrize(("rows", "picks", "block"), [(900, 2500, 2), (5, 20, 70)])
def test_updates_of_rows(
    type: str,
    outputs: int,
    inputs: str,
    args: dict[str, Any],
    rows: int,
    picks: int,
    block: int,
    dtype: str,
    grid: None,
) -> None:
    made = {
        "w": lambda: normal(rows, block, dtype=dtype),
        "m": lambda: normal(rows, block, dtype=dtype),
        "s": lambda: np.abs(normal(rows, block, dtype=dtype)),
        "r": lambda: np.abs(normal(rows, dtype=dtype)),
        "nz": lambda: np.abs(normal(rows, block, 2, dtype=dtype)),
        "g": lambda: normal(picks, block, dtype=dtype),
        "i": lambda: integers(rows, picks, dtype="int64"),
        "lr": lambda: np.array([0.3], "float32"),
        "one": lambda: np.array([2], dtype),
        "t": lambda: np.array([9]),
    }
    compare(type, [made[name]() for name in inputs.split()], outputs, **args)


@pytest.mark.parametrize("source", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    ("to", "least"), [("int8", 0), ("uint16", 0), ("int32", -(2**31)), ("int64", -(2**63))]
)
def test_casts_of_what_is_no_whole_number_of_the_type(source: str, to: str, least: int) -> None:
    """As on x86: GPUs by themselves would give the largest number, or 0."""
    x = np.array([np.nan, np.inf, -np.inf, 300.7, -1.5, -0.5], source)
    (y,) = run("sim:0", "Cast", [x], 1, "", {"to": to})
    fits = np.array([300, -1, 0]).astype(to)
    assert y.tolist() == [least, least, least, *fits.tolist()]
    if source != "float16" and to != "int64":
        big = np.array([2.0**31, -(2.0**31), -(2.0**31) * 1.5, 1e19], source)
        (y,) = run("sim:0", "Cast", [big], 1, "", {"to": to})
        assert y.tolist() == [least] * 4


@pytest.fixture
def ctx() -> KernelContext:
    device = backend(parse_device("sim:0"))
    return KernelContext(Operator(make_operator("Copy", ["a"], ["b"])), backend=device, stream=device.stream)


def on_device(array: np.ndarray) -> Buffer:
    return Buffer.from_numpy(backend(parse_device("sim:0")), array)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_many_tensors(dtype: str, ctx: KernelContext, grid: None) -> None:
    arrays = [normal(*shape, dtype=dtype) for shape in ((3, 4), (), (0, 2), (2 * CHUNK + 5,), (CHUNK,))]
    tensors = TensorList([on_device(a) for a in arrays])
    scratch = Buffer.empty(ctx.backend, tensors.scratch())
    norms, found = on_device(np.zeros(5, "float32")), on_device(np.array([7], np.int32))
    tensors.square_sums(ctx, norms, scratch)()
    tensors.find_overflow(ctx, found)()
    want = [float((a.astype("float64") ** 2).sum()) for a in arrays]
    np.testing.assert_allclose(norms.numpy(), want, 1e-5)
    assert found.numpy().tolist() == [0]

    half = on_device(np.array([0.5], "float32"))
    flat = np.concatenate([a.reshape(-1) for a in arrays])
    for target in ("float32", "float16", "float64"):
        packed = on_device(np.zeros(flat.size, target))
        tensors.pack(ctx, packed, half)()
        wide = flat.astype("float32" if dtype == "float16" else dtype)
        np.testing.assert_array_equal(packed.numpy(), (wide / 2).astype(target))
        tensors.pack(ctx, packed)()
        np.testing.assert_array_equal(packed.numpy(), flat.astype(target))
    others = TensorList([on_device(np.zeros_like(a)) for a in arrays])
    others.unpack(ctx, packed)()
    others.scale(ctx, half)()
    for tensor, a in zip(others.tensors, arrays, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), a * np.array(0.5, dtype))
    for bad in (np.inf, -np.inf, np.nan):
        arrays[4][CHUNK - 1] = bad
        others = TensorList([on_device(a) for a in arrays])
        others.find_overflow(ctx, found)()
        assert found.numpy().tolist() == [1]


def test_a_list_of_tensors_of_different_types_is_refused() -> None:
    with pytest.raises(DataTypeError, match="wanted one element type"):
        TensorList([on_device(normal(2)), on_device(normal(2, dtype="float64"))])
    with pytest.raises(KernelError, match="wanted at least one"):
        TensorList([])
