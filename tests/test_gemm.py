"""Matrix products: routes, the kernel and NumPy on the simulated device, cuBLASLt as far as it goes."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import itertools
import re
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpunet import cuda_kernels, kernels
from gpunet.backends import backend
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import cublaslt, gemm, launch, nvrtc
from gpunet.cuda_kernels.cuda_backend import Cuda, CudaBackend
from gpunet.cuda_kernels.signature import FLOATS
from gpunet.definitions import make_operator
from gpunet.devices import Device
from gpunet.errors import DataTypeError, DeviceError, ShapeError
from gpunet.kernels import KernelContext
from gpunet.operator import Operator
from gpunet.specs import TensorSpec
from tests import fake_cublaslt
from tests.fake_cuda import Bindings
from tests.sim_kernels import needs_compiler

#: Sizes (m, n, k) around the tile of 64 x 64 x 16.
SIZES = [(1, 1, 1), (3, 5, 7), (64, 64, 16), (65, 63, 17), (1, 130, 33), (70, 2, 100), (5, 4, 0), (0, 3, 2)]

tolerance = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2**-7, "float64": 1e-12}


@pytest.fixture
def ctx() -> KernelContext:
    device = backend(Device("sim"))
    op = Operator(make_operator("MatMul", ["a", "b"], ["c"]))
    return KernelContext(op, backend=device, stream=device.stream)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def run(
    ctx: KernelContext,
    a: np.ndarray,
    b: np.ndarray,
    out: np.ndarray,
    bias: np.ndarray | None = None,
    **options: Any,
) -> np.ndarray:
    buffers = [Buffer.from_numpy(ctx.backend, x, name) for x, name in ((a, "a"), (b, "b"), (out, "out"))]
    added = None if bias is None else Buffer.from_numpy(ctx.backend, bias, "bias")
    gemm.matmul(ctx, *buffers, bias=added, **options)()
    np.testing.assert_array_equal(buffers[0].numpy(), a)
    np.testing.assert_array_equal(buffers[1].numpy(), b)
    return buffers[2].numpy()


def expected(
    a: np.ndarray,
    b: np.ndarray,
    out: np.ndarray,
    bias: np.ndarray | None = None,
    trans_a: bool = False,
    trans_b: bool = False,
    relu: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> np.ndarray:
    x, y = a.astype(np.float64), b.astype(np.float64)
    x, y = (x.swapaxes(-1, -2) if trans_a else x), (y.swapaxes(-1, -2) if trans_b else y)
    result = alpha * np.matmul(x, y)
    if beta:
        result = result + beta * out.astype(np.float64)
    if bias is not None:
        result = result + bias.astype(np.float64)
    return np.maximum(result, 0) if relu else result


@needs_compiler
@pytest.mark.parametrize("route", ["kernel", "host"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("transposed", list(itertools.product((False, True), repeat=2)), ids=str)
def test_products(
    ctx: KernelContext, monkeypatch: pytest.MonkeyPatch, route: str, dtype: str, transposed: tuple[bool, bool]
) -> None:
    monkeypatch.setenv("GPUNET_GEMM", route)
    rng = np.random.default_rng(5)
    trans_a, trans_b = transposed
    for i, (m, n, k) in enumerate(SIZES):
        a = normal(rng, (k, m) if trans_a else (m, k), dtype)
        b = normal(rng, (n, k) if trans_b else (k, n), dtype)
        out = np.full((m, n), np.nan, dtype)
        bias = normal(rng, (n,), dtype) if i % 2 else None
        options = {"trans_a": trans_a, "trans_b": trans_b, "relu": i % 3 == 1}
        got = run(ctx, a, b, out, bias, **options)
        want = expected(a, b, out, bias, **options)
        np.testing.assert_allclose(
            got.astype(np.float64),
            want,
            tolerance[dtype],
            tolerance[dtype] * max(k, 1) ** 0.5,
            err_msg=f"{m} {n} {k}",
        )


@needs_compiler
@pytest.mark.parametrize("route", ["kernel", "host"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_factors(ctx: KernelContext, monkeypatch: pytest.MonkeyPatch, route: str, dtype: str) -> None:
    monkeypatch.setenv("GPUNET_GEMM", route)
    rng = np.random.default_rng(6)
    a, b, out = normal(rng, (9, 20), dtype), normal(rng, (20, 70), dtype), normal(rng, (9, 70), dtype)
    bias = normal(rng, (70,), dtype)
    for options in ({"alpha": -0.5}, {"beta": 1.0}, {"alpha": 2.0, "beta": 0.25, "relu": True}):
        got = run(ctx, a, b, out, bias, **options)
        want = expected(a, b, out, bias, **options)
        np.testing.assert_allclose(got.astype(np.float64), want, tolerance[dtype] * 5, tolerance[dtype] * 10)


@needs_compiler
@pytest.mark.parametrize("route", ["kernel", "host"])
@pytest.mark.parametrize(
    ("batch_a", "batch_b", "launches"),
    [
        ((3,), (3,), 1),
        ((2, 3), (2, 3), 1),
        ((3,), (), 1),
        ((), (3,), 1),
        ((2, 1), (1, 3), 2),
        ((4, 1, 2), (3, 2), 6),
        ((2, 1, 2, 1), (1, 3, 1, 2), 8),
        ((0,), (1,), 0),
        ((2, 3), (1,), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("trans_a", [False, True])
def test_batches(
    ctx: KernelContext,
    monkeypatch: pytest.MonkeyPatch,
    route: str,
    batch_a: tuple[int, ...],
    batch_b: tuple[int, ...],
    launches: int,
    trans_a: bool,
) -> None:
    monkeypatch.setenv("GPUNET_GEMM", route)
    rng = np.random.default_rng(7)
    a = normal(rng, (*batch_a, *((5, 7) if trans_a else (7, 5))), "float32")
    b = normal(rng, (*batch_b, 5, 6), "float32")
    full = np.broadcast_shapes(batch_a, batch_b)
    out = np.full((*full, 7, 6), np.nan, np.float32)
    np.testing.assert_allclose(
        run(ctx, a, b, out, trans_a=trans_a), expected(a, b, out, trans_a=trans_a), 1e-5, 1e-5
    )
    work = gemm.product(
        *(SimpleNamespace(shape=x.shape, dtype=x.dtype) for x in (a, b, out)),  # type: ignore[arg-type]
        trans_a=trans_a,
    )
    assert work.empty == (launches == 0)
    assert work.empty or len(list(work.offsets())) == launches


@needs_compiler
def test_more_tiles_than_blocks(ctx: KernelContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUNET_GEMM", "kernel")
    monkeypatch.setattr(launch, "MAX_BLOCKS", 3)
    rng = np.random.default_rng(8)
    a, b = normal(rng, (5, 70, 9), "float32"), normal(rng, (5, 9, 130), "float32")
    out = np.full((5, 70, 130), np.nan, np.float32)
    np.testing.assert_allclose(run(ctx, a, b, out), np.matmul(a, b), 1e-5, 1e-5)


@needs_compiler
def test_nan_and_infinity_stay(ctx: KernelContext, monkeypatch: pytest.MonkeyPatch) -> None:
    a = np.eye(3, dtype=np.float32)
    b = np.array([[np.nan, 1, -1], [2, np.inf, 3], [4, 5, -np.inf]], np.float32)
    results = []
    for route in ("kernel", "host"):
        monkeypatch.setenv("GPUNET_GEMM", route)
        results.append(run(ctx, a, b, np.zeros((3, 3), np.float32), relu=True))
    np.testing.assert_array_equal(*results)
    assert np.isnan(results[0][0, 0])


# Operators.

CASES = [
    ("FC", [(5, 12), (3, 12), (3,)], {}),
    ("FC", [(2, 3, 4), (3, 4), (3,)], {"axis": -1}),
    ("FC", [(2, 3, 4), (2, 3, 12), (6,)], {"axis_w": 2}),
    ("FCTransposed", [(5, 12), (12, 3), (3,)], {}),
    ("FCGradient", [(5, 12), (3, 12), (5, 3)], {}),
    ("FCGradient", [(1, 12), (3, 12), (1, 3)], {}),
    ("FCGradient", [(0, 12), (3, 12), (0, 3)], {}),
    ("FCGradient", [(900, 4), (40, 4), (900, 40)], {}),
    ("FCTransposedGradient", [(5, 2, 6), (12, 3), (5, 3)], {}),
    ("MatMul", [(5, 6), (6, 7)], {}),
    ("MatMul", [(6, 5), (2, 7, 6)], {"trans_a": 1, "trans_b": 1, "axis_b": 2}),
    ("BatchMatMul", [(3, 5, 6), (3, 6, 7)], {}),
    ("BatchMatMul", [(3, 6, 5), (3, 7, 6)], {"trans_a": 1, "trans_b": 1}),
    ("BatchMatMul", [(2, 1, 5, 6), (3, 6, 7)], {"broadcast": 1}),
    ("BatchMatMul", [(6,), (3, 6, 7)], {}),
    ("BatchMatMul", [(3, 5, 6), (6,)], {}),
    ("BatchMatMul", [(6,), (6,)], {"trans_a": 1}),
]


def specs(arrays: list[np.ndarray]) -> list[TensorSpec]:
    return [TensorSpec(x.shape, x.dtype) for x in arrays]


@needs_compiler
@pytest.mark.parametrize("route", ["kernel", "host"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("type", "shapes", "args"), CASES, ids=lambda value: str(value).replace(" ", "") or None
)
def test_operators_agree_with_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
    route: str,
    dtype: str,
    type: str,
    shapes: list[tuple[int, ...]],
    args: dict[str, int],
) -> None:
    monkeypatch.setenv("GPUNET_GEMM", route)
    rng = np.random.default_rng(9)
    inputs = [normal(rng, shape, dtype) for shape in shapes]
    count = 3 if "Gradient" in type else 1
    definition = make_operator(
        type, [f"i{i}" for i in range(len(inputs))], [f"o{i}" for i in range(count)], **args
    )
    op = Operator(definition)
    inferred = op.infer(specs(inputs))
    want = [np.zeros(s.shape, s.dtype) for s in inferred]
    reference = kernels.find(op, "cpu", specs(inputs), inferred)
    scratch = [] if reference.scratch is None else reference.scratch(op, specs(inputs), inferred)
    context = KernelContext(op, scratch=tuple(np.empty(s.shape, s.dtype) for s in scratch))
    step = reference.function(tuple(inputs), tuple(want), op.args, context)
    if reference.binds:
        step()

    device = backend(Device("sim"))
    found = kernels.find(op, "sim", specs(inputs), inferred)
    scratch = [] if found.scratch is None else found.scratch(op, specs(inputs), inferred)
    context = KernelContext(
        op,
        backend=device,
        stream=device.stream,
        scratch=tuple(Buffer.empty(device, s, "scratch") for s in scratch),
    )
    buffers = tuple(Buffer.from_numpy(device, x, f"i{i}") for i, x in enumerate(inputs))
    outputs = tuple(Buffer.empty(device, s, f"o{i}") for i, s in enumerate(inferred))
    found.function(buffers, outputs, op.args, context)()
    for got, right in zip(outputs, want, strict=True):
        tol = {"float32": 5e-5, "float16": 8e-3, "bfloat16": 2**-7, "float64": 1e-12}[dtype]
        np.testing.assert_allclose(
            got.numpy().astype(np.float64), right.astype(np.float64), tol, tol * len(inputs[0]) ** 0.5
        )


# The choice.


def fake_backend(kind: str) -> Any:
    return SimpleNamespace(simulated=kind == "sim", device=Device(kind), capability=90)


WORK = gemm.Product("float32", 128, 10, 500, trans_b=True, bias=True, relu=True)


def test_a_gpu_takes_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUNET_GEMM", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert gemm.explain(fake_backend("cuda"), WORK) == (
        "float32 128x10 = 128x500 . 500x10 (transposed), bias, ReLU: cublaslt (exact)"
    )
    empty_sum = gemm.Product("float32", 2, 3, 0)
    assert gemm.choose(fake_backend("cuda"), empty_sum) == ("kernel", "there is nothing to sum")


def test_a_gpu_without_nvmath_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUNET_GEMM", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    route, reason = gemm.choose(fake_backend("cuda"), WORK)
    assert route == "kernel"
    assert reason.startswith("nvmath-python is not installed; nvidia-cudnn-frontend is not installed;")
    monkeypatch.setenv("GPUNET_GEMM", "cublaslt")
    with pytest.raises(DeviceError, match="GPUNET_GEMM is 'cublaslt', on cuda:0: nvmath-python is not"):
        gemm.choose(fake_backend("cuda"), WORK)


def test_the_simulated_device_takes_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUNET_GEMM", raising=False)
    assert gemm.choose(fake_backend("sim"), WORK)[0] == "host"
    monkeypatch.setenv("GPUNET_GEMM", "host")
    with pytest.raises(DeviceError, match="only the simulated device calls the host"):
        gemm.choose(fake_backend("cuda"), WORK)
    monkeypatch.setenv("GPUNET_GEMM", "mkl")
    with pytest.raises(DeviceError, match="GPUNET_GEMM is 'mkl', wanted one of auto, cublaslt, cudnn,"):
        gemm.choose(fake_backend("sim"), WORK)


def spec(*shape: int, dtype: str = "float32") -> Any:
    return SimpleNamespace(shape=shape, dtype=np.dtype(dtype))


@pytest.mark.parametrize(
    ("a", "b", "out", "options", "error", "message"),
    [
        (spec(2, 3), spec(4, 5), spec(2, 5), {}, ShapeError, "2x5 = 2x3 . 4x5 does not fit"),
        (spec(3, 2), spec(4, 5), spec(2, 5), {"trans_a": True}, ShapeError, "does not fit, a is transposed"),
        (spec(2, 3), spec(3, 5), spec(5, 2), {}, ShapeError, "does not fit"),
        (spec(3), spec(3, 5), spec(5), {}, ShapeError, "at least 2 dimensions"),
        (spec(2, 3), spec(3, 5), spec(2, 5), {"bias": spec(2)}, ShapeError, r"bias is \(2,\), wanted \(5,\)"),
        (spec(2, 3), spec(3, 5, dtype="float64"), spec(2, 5), {}, DataTypeError, "b holds float64"),
        (*(spec(2, 2, dtype="int32") for _ in range(3)), {}, DataTypeError, "matrix product of int32"),
    ],
)
def test_what_does_not_fit(
    a: Any, b: Any, out: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        gemm.product(a, b, out, **options)


def test_tf32_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    three = spec(2, 3), spec(3, 5), spec(2, 5)
    monkeypatch.delenv("GPUNET_TF32", raising=False)
    assert not gemm.product(*three).tf32
    assert gemm.product(*three, tf32=True).tf32
    monkeypatch.setenv("GPUNET_TF32", "1")
    assert gemm.product(*three).tf32
    assert not gemm.product(*three, tf32=False).tf32


# cuBLASLt: the operands' order by column-major products in its place, the rest by the installed bindings.


@pytest.fixture
def fake_lt(monkeypatch: pytest.MonkeyPatch) -> tuple[KernelContext, fake_cublaslt.CublasLt]:
    cuda = Cuda.__new__(Cuda)
    fakes = Bindings(memory=256 << 20)
    cuda.runtime, cuda.driver = fakes.runtime, fakes.driver
    cuda.errors = (fakes.runtime.CUDARuntimeError, fakes.driver.CUDADriverError)
    device = CudaBackend(Device("cuda"), cuda)
    bindings = fake_cublaslt.bindings(fakes.runtime)
    monkeypatch.setattr(cublaslt, "bindings", lambda: bindings)
    monkeypatch.setattr(cublaslt, "WORKSPACE", {True: 1 << 20, False: 1 << 10})
    installed = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if name == "nvmath" else installed(name)
    )
    monkeypatch.setenv("GPUNET_GEMM", "cublaslt")
    op = Operator(make_operator("MatMul", ["a", "b"], ["c"]))
    return KernelContext(op, backend=device, stream=device.stream), bindings.lt


Fake = tuple[KernelContext, fake_cublaslt.CublasLt]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("transposed", list(itertools.product((False, True), repeat=2)), ids=str)
def test_cublaslt_gets_its_operands(fake_lt: Fake, dtype: str, transposed: tuple[bool, bool]) -> None:
    ctx, lt = fake_lt
    rng = np.random.default_rng(5)
    trans_a, trans_b = transposed
    shapes = [((), ()), ((3,), (3,)), ((3,), ()), ((), (3,)), ((2, 1), (1, 3))]
    for i, (batch_a, batch_b) in enumerate(shapes):
        m, n, k = 5, 7, 6
        a = normal(rng, (*batch_a, *((k, m) if trans_a else (m, k))), dtype)
        b = normal(rng, (*batch_b, *((n, k) if trans_b else (k, n))), dtype)
        out = normal(rng, (*np.broadcast_shapes(batch_a, batch_b), m, n), dtype)
        bias = normal(rng, (n,), dtype) if i % 2 else None
        options: dict[str, Any] = {"trans_a": trans_a, "trans_b": trans_b, "relu": i % 3 == 1}
        options |= {"alpha": 0.5, "beta": 2.0} if i == 2 else {}
        got = run(ctx, a, b, out, bias, **options)
        want = expected(a, b, out, bias, **options)
        np.testing.assert_allclose(got.astype(np.float64), want, tolerance[dtype], tolerance[dtype] * 10)
    assert lt.calls == 6, "one a product, two where batches cannot be taken together"
    assert lt.asked[0]["compute"] == {"float64": "COMPUTE_64F"}.get(dtype, "COMPUTE_32F")
    assert lt.asked[0]["MAX_WORKSPACE_BYTES"] == 1 << 20
    del got
    gc.collect()
    assert len(lt.objects) == 1, "all but the handle is destroyed"


def test_cublaslt_rounds_to_tf32_only_when_asked(fake_lt: Fake) -> None:
    ctx, lt = fake_lt
    a, b, out = np.ones((4, 4), np.float32), np.ones((4, 4), np.float32), np.zeros((4, 4), np.float32)
    run(ctx, a, b, out)
    run(ctx, a, b, out, tf32=True)
    assert [asked["compute"] for asked in lt.asked] == ["COMPUTE_32F", "COMPUTE_32F_FAST_TF32"]


def test_the_workspace_is_made_once_a_stream(fake_lt: Fake) -> None:
    ctx, _ = fake_lt
    a, b, out = (Buffer.from_numpy(ctx.backend, np.ones((4, 4), np.float32)) for _ in range(3))
    launches = [gemm.matmul(ctx, a, b, out)]
    free = ctx.backend.memory_info()[0]
    launches += [gemm.matmul(ctx, a, b, out) for _ in range(3)]
    assert ctx.backend.memory_info()[0] == free
    other = KernelContext(ctx.op, backend=ctx.backend, stream=ctx.backend.new_stream())
    launches.append(gemm.matmul(other, a, b, out))
    assert ctx.backend.memory_info()[0] < free - (1 << 20)
    for run_once in launches:
        run_once()
        ctx.backend.stream.synchronize()
        other.stream.synchronize()
    np.testing.assert_array_equal(out.numpy(), np.full((4, 4), 4))


def test_a_workspace_ends_with_the_launches_that_use_it(fake_lt: Fake) -> None:
    ctx, _ = fake_lt
    device = ctx.backend
    a, b, out = (Buffer.from_numpy(device, np.ones((4, 4), np.float32)) for _ in range(3))
    side = device.new_stream()
    ended = weakref.ref(side)
    launches = [gemm.matmul(KernelContext(ctx.op, backend=device, stream=side), a, b, out)]
    (workspace,) = (block for block in device._pool._live if block.name == "cuBLASLt workspace")
    assert device.stream in workspace.streams, "where graphs are replayed that were captured from the other"
    # What uses it on the stream ends with it.
    del workspace, side, a, b, out
    launches.clear()
    gc.collect()
    device.stream.synchronize()
    assert device.empty_cache() > 1 << 20
    gc.collect()
    assert ended() is None


@pytest.mark.parametrize("answer", ["refused", "unsupported"])
def test_what_cublaslt_does_not_offer_is_left_to_the_kernel(
    fake_lt: Fake, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, lt = fake_lt
    getattr(lt, answer).add(3)
    taken = []
    monkeypatch.setattr(gemm, "_kernel", lambda *_: lambda: taken.append("kernel"))
    a, b = (Buffer.from_numpy(ctx.backend, np.ones(shape, np.float32)) for shape in ((2, 3), (3, 4)))
    gemm.matmul(ctx, a, b, Buffer.from_numpy(ctx.backend, np.ones((2, 4), np.float32)))()
    assert taken == ["kernel"]


@pytest.fixture
def lt() -> Any:
    try:
        return cublaslt.bindings().lt
    except DeviceError as error:
        pytest.skip(str(error))


#: Numbers of arguments of what cublaslt.py calls.
CALLS = {
    "create": 0,
    "matmul": 16,
    "matmul_algo_get_heuristic": 10,
    "matmul_desc_create": 2,
    "matmul_desc_destroy": 1,
    "matmul_desc_set_attribute": 4,
    "matmul_preference_create": 0,
    "matmul_preference_destroy": 1,
    "matmul_preference_set_attribute": 4,
    "matrix_layout_create": 4,
    "matrix_layout_destroy": 1,
    "matrix_layout_set_attribute": 4,
}


@pytest.mark.parametrize(("name", "count"), list(CALLS.items()), ids=list(CALLS))
def test_nvmath_takes_these_arguments(lt: Any, name: str, count: int) -> None:
    first = getattr(lt, name).__doc__.splitlines()[0]
    inside = first[first.index("(") + 1 : first.index(")")]
    assert len([p for p in inside.split(",") if p.strip()]) == count, first


def test_names_of_nvmath(lt: Any) -> None:
    found = cublaslt.bindings()
    for element, compute, scale in cublaslt._TYPES.values():
        assert {element, scale} <= set(found.types.__members__)
        assert compute in found.cublas.ComputeType.__members__
    assert "COMPUTE_32F_FAST_TF32" in found.cublas.ComputeType.__members__
    assert {"DEFAULT", "BIAS", "RELU", "RELU_BIAS"} <= set(lt.Epilogue.__members__)
    assert {"TRANSA", "TRANSB", "EPILOGUE", "BIAS_POINTER"} <= set(lt.MatmulDescAttribute.__members__)
    assert {"BATCH_COUNT", "STRIDED_BATCH_OFFSET"} <= set(lt.MatrixLayoutAttribute.__members__)
    assert {f"MIN_ALIGNMENT_{x}_BYTES" for x in "ABCD"} <= set(lt.MatmulPreferenceAttribute.__members__)
    assert lt.matmul_heuristic_result_dtype.fields["algo"][1] == 0, "the algorithm comes first"
    assert "state" in lt.matmul_heuristic_result_dtype.names
    assert issubclass(lt.cuBLASLtError, Exception)


def test_every_call_is_one_of_these() -> None:
    assert set(re.findall(r"\blt\.([a-z_]\w+)", inspect.getsource(cublaslt))) == {
        *CALLS,
        "cuBLASLtError",
        "matmul_heuristic_result_dtype",
        "get_matmul_desc_attribute_dtype",
        "get_matrix_layout_attribute_dtype",
        "get_matmul_preference_attribute_dtype",
    }


@pytest.mark.parametrize(
    ("address", "want"), [(0x1000, 256), (0x1010, 16), (0x1002, 2), (0, 256), (256, 256)]
)
def test_alignment(address: int, want: int) -> None:
    assert cublaslt.alignment(address) == want


def test_the_kernels_are_compiled() -> None:
    assert cuda_kernels.__file__
    assert len(nvrtc.declared_functions("gemm")) == 4 * len(FLOATS)
