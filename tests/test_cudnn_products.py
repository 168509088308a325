"""Matrix products by cuDNN: which sums the graphs are, by NumPy, and that they are taken, on a fake of it."""

from __future__ import annotations

import numpy as np
import pytest

from gpunet.buffers import Buffer
from gpunet.cuda_kernels import cublaslt, cudnn, cudnn_execution, cudnn_products, gemm
from gpunet.cuda_kernels.cuda_backend import CudaBackend
from gpunet.cuda_kernels.cudnn_graphs import Convolution, MatrixProduct
from gpunet.definitions import make_operator
from gpunet.errors import DeviceError
from gpunet.kernels import KernelContext
from gpunet.operator import Operator
from gpunet.specs import TensorSpec
from tests import test_cudnn
from tests.fake_cudnn import Library

folder, library, gpu = test_cudnn.folder, test_cudnn.library, test_cudnn.gpu
WORK = gemm.Product("float32", 128, 10, 500, trans_b=True, bias=True, relu=True)


def convolved(graph: Convolution, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What a graph with filters of one pixel makes of the matrices."""
    operands = graph.operands()
    first, second, out = cudnn_products._NAMES[graph.kind]
    assert [n for n, operand in operands.items() if operand.output] == [out]
    x, y = (v.reshape(operands[n].shape[:2]) for n, v in ((first, a), (second, b)))
    if graph.kind == "forward":
        return x @ y.T
    return x @ y if graph.kind == "data" else x.T @ y


@pytest.mark.parametrize(
    ("trans_a", "trans_b", "kind"),
    [(False, True, "forward"), (False, False, "data"), (True, False, "filter")],
)
def test_products_are_convolutions_of_single_pixels(trans_a: bool, trans_b: bool, kind: str) -> None:
    rng = np.random.default_rng(5)
    m, n, k = 5, 7, 3
    a, b = rng.normal(size=(k, m) if trans_a else (m, k)), rng.normal(size=(n, k) if trans_b else (k, n))
    work = gemm.Product("float32", m, n, k, trans_a, trans_b)
    whole, graph = cudnn_products.graphs(work)
    assert isinstance(whole, MatrixProduct)
    assert isinstance(graph, Convolution)
    assert graph.kind == kind
    want = (a.T if trans_a else a) @ (b.T if trans_b else b)
    np.testing.assert_allclose(convolved(graph, a, b), want)


def test_graphs_of_products() -> None:
    graphs = cudnn_products.graphs
    assert [type(g).__name__ for g in graphs(WORK)] == ["MatrixProduct", "Convolution"]
    assert graphs(WORK)[1].epilogue == ("bias", "relu")  # type: ignore[attr-defined]
    assert [type(g) for g in graphs(gemm.Product("float64", 3, 4, 5))] == [Convolution]
    assert graphs(gemm.Product("float32", 3, 4, 5, alpha=2.0)) == []
    assert graphs(gemm.Product("float32", 3, 4, 5, beta=1.0)) == []
    batch = gemm.Product("float16", 2, 4, 6, batch=((3, (12, 24, 8)),))
    assert graphs(batch) == [MatrixProduct("float16", 2, 4, 6, batch=3)]
    shared = gemm.Product("float16", 2, 4, 6, batch=((3, (12, 0, 8)),))
    assert graphs(shared) == []


@pytest.fixture
def without_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUNET_GEMM", raising=False)
    monkeypatch.setattr(cublaslt, "reason_against", lambda backend, work: "nvmath-python is not installed")
    monkeypatch.setattr(cudnn, "reason_against", lambda backend: None)


@pytest.mark.usefixtures("without_cublaslt")
def test_a_gpu_without_cublaslt_takes_cudnn(library: Library, gpu: CudaBackend) -> None:
    assert gemm.explain(gpu, WORK) == (
        "float32 128x10 = 128x500 . 500x10 (transposed), bias, ReLU: cudnn (exact; nvmath-python is not "
        "installed)"
    )
    op = Operator(make_operator("FC", ["a", "b", "c"], ["d"]))
    ctx = KernelContext(op, backend=gpu, stream=gpu.stream)
    a, b, bias, out = (
        Buffer.empty(gpu, TensorSpec(shape, np.dtype("float32")))
        for shape in ((128, 500), (10, 500), (10,), (128, 10))
    )
    launches = [gemm.matmul(ctx, a, b, out, trans_b=True, bias=bias, relu=True) for _ in range(2)]
    for run in launches:
        run()
    (plan, operands, workspace, _), (_, _, again, _) = library.executed
    assert (plan, workspace) == ("eng1", again)
    assert operands == {i: buffer.pointer for i, buffer in enumerate((a, b, bias, out), 1)}


@pytest.mark.usefixtures("without_cublaslt")
def test_tf32_is_asked_of_cudnn_too(library: Library, gpu: CudaBackend) -> None:
    op = Operator(make_operator("MatMul", ["a", "b"], ["c"]))
    ctx = KernelContext(op, backend=gpu, stream=gpu.stream)
    a, b, out = (Buffer.empty(gpu, TensorSpec((8, 8), np.dtype("float32"))) for _ in range(3))
    gemm.matmul(ctx, a, b, out, tf32=True)()
    assert library.executed[-1][0] == "eng0"  # with tensor cores


@pytest.mark.usefixtures("without_cublaslt")
def test_what_cudnn_does_not_plan_is_left_to_the_kernel(
    library: Library, gpu: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    monkeypatch.setattr(gemm, "_kernel", lambda *_: lambda: taken.append("kernel"))
    op = Operator(make_operator("MatMul", ["a", "b"], ["c"]))
    ctx = KernelContext(op, backend=gpu, stream=gpu.stream)
    a, b, out = (Buffer.empty(gpu, TensorSpec((8, 8), np.dtype("float32"))) for _ in range(3))
    gemm.matmul(ctx, a, b, out, beta=1.0)()
    crooked = Buffer(gpu, gpu.allocate(4096), (8, 8), np.float32, 4)
    gemm.matmul(ctx, crooked, b, out)()
    library.plans = {}
    cudnn_execution.PLANS.clear()
    small = gemm.Product("float32", 4, 4, 4)
    route, reason = gemm.choose(gpu, small)
    assert route == "kernel"
    assert reason.startswith("nvmath-python is not installed; cuDNN has no plan of convolution data float32")
    monkeypatch.setenv("GPUNET_GEMM", "cudnn")
    with pytest.raises(DeviceError, match="GPUNET_GEMM is 'cudnn', on cuda:0: cuDNN has no plan of"):
        gemm.choose(gpu, small)
    assert (taken, library.executed) == (["kernel"] * 2, [])
