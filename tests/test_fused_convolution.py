"""FusedConv on GPUs: what cuDNN is asked for, what our own kernel does, and the kernels without a library."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import gpunet
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import conv_direct, cudnn, fused_convolution
from gpunet.cuda_kernels.cuda_backend import CudaBackend
from gpunet.cuda_kernels.pieces import Launch
from gpunet.definitions import make_operator
from gpunet.dtypes import BFLOAT16
from gpunet.kernels import KernelContext, find
from gpunet.operator import Operator
from gpunet.specs import spec
from tests.fake_cudnn import Library
from tests.sim_kernels import needs_compiler
from tests.test_cudnn import folder, gpu, library  # noqa: F401 (fixtures)

X, W, Y = (2, 8, 6, 6), (4, 8, 3, 3), (2, 4, 6, 6)


def operator(epilogue: str, order: str = "NCHW", **args: Any) -> Operator:
    words = [word for word in epilogue.split("+") if word in ("bias", "add")]
    given = {"kernel": 3, "pad": 1, "order": order, "epilogue": epilogue, **args}
    return Operator(make_operator("FusedConv", ["x", "w", *words], ["y"], **given))


def last(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], *shape[2:], shape[1])


@pytest.mark.parametrize(
    ("epilogue", "order", "asked"),
    [
        ("bias+relu", "NCHW", [("bias", "relu"), ("bias",)]),
        ("bias+add+relu", "NHWC", [("bias", "add", "relu"), ("bias",)]),
        ("add+relu", "NHWC", [("add", "relu"), ()]),
        ("bias", "NCHW", [("bias",)]),
    ],
)
def test_graphs(epilogue: str, order: str, asked: list[tuple[str, ...]]) -> None:
    shapes = (X, W) if order == "NCHW" else (last(X), last(W))
    made = fused_convolution.graphs(operator(epilogue, order), *(spec(s, "float32") for s in shapes))
    assert [graph.epilogue for graph in made] == asked
    assert {graph.x for graph in made} == {X}
    assert made[0].against() is None


@pytest.mark.parametrize(
    ("epilogue", "order", "plans", "left"),
    [
        # All of it; with channels first cuDNN adds no tensor, and has no activation without a bias.
        ("bias+relu", "NCHW", None, []),
        ("bias+add+relu", "NHWC", None, []),
        ("bias+add+relu", "NCHW", None, [("epilogue_add_relu", 3)]),
        ("add", "NCHW", None, [("epilogue_add", 3)]),
        ("relu", "NCHW", None, [("epilogue_relu", 2)]),
        # No plan at all.
        ("bias+relu", "NCHW", {"eng0": (0, "TENSOR_CORE")}, ["direct", ("epilogue_relu", 2)]),
        ("bias+add", "NHWC", {"eng0": (0, "TENSOR_CORE")}, ["direct", ("epilogue_add", 3)]),
        ("bias", "NHWC", {"eng0": (0, "TENSOR_CORE")}, ["direct"]),
    ],
)
def test_cudnn_does_what_it_has_a_plan_for(
    library: Library,  # noqa: F811
    gpu: CudaBackend,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    epilogue: str,
    order: str,
    plans: dict[str, tuple[int, str]] | None,
    left: list[Any],
) -> None:
    done: list[Any] = []

    def noted(ctx: KernelContext, kernel: Any, buffers: tuple[Buffer, ...]) -> Launch:
        return lambda: done.append((kernel.name, len(buffers)))

    def direct(inputs: tuple[Buffer, ...], *rest: Any) -> Launch:
        assert len(inputs) == (3 if "bias" in epilogue else 2)
        return lambda: done.append("direct")

    monkeypatch.setattr(fused_convolution, "map_launch", noted)
    monkeypatch.setattr(conv_direct, "convolution", direct)
    if plans is not None:
        library.plans = plans
    op = operator(epilogue, order)
    turned = last if order == "NHWC" else tuple
    shapes = [turned(X), turned(W)]
    shapes += [(4,) if word == "bias" else turned(Y) for word in op.inputs[2:]]
    inputs = [spec(shape, "float32") for shape in shapes]
    (output,) = op.infer(inputs)
    found = find(op, "cuda", inputs, [output])
    assert found.scratch is not None
    scratch = tuple(Buffer.empty(gpu, s) for s in found.scratch(op, inputs, [output]))
    given, y = tuple(Buffer.empty(gpu, s) for s in inputs), Buffer.empty(gpu, output)
    context = KernelContext(op, backend=gpu, stream=gpu.stream, scratch=scratch)
    with caplog.at_level(logging.WARNING, "gpunet"):
        found.function(given, (y,), op.args, context)()
    assert done == left
    if plans is not None:
        assert library.executed == []
        (message,) = (record.message for record in caplog.records)
        assert "[FusedConv]" in message
        assert "with engine 'DIRECT': cuDNN has no plan" in message
        return
    ((_, operands, _, _),) = library.executed
    used = given if not left else given[: 3 if "bias" in epilogue else 2]
    assert operands == {i: b.pointer for i, b in enumerate((*used, y), 1)}
    assert not caplog.records


def test_what_cudnn_is_not_asked_for_with_channels_first() -> None:
    inputs = [spec(X, "float32"), spec(W, "float32")]
    reasons = {
        epilogue: str(fused_convolution.graphs(operator(epilogue), *inputs)[0].against())
        for epilogue in ("relu", "sigmoid", "add", "bias+add+sigmoid", "bias+sigmoid")
    }
    assert "no activation without a bias" in reasons["relu"]
    assert "no activation without a bias" in reasons["sigmoid"]
    assert "channels innermost only" in reasons["add"]
    assert "channels innermost only" in reasons["bias+add+sigmoid"]
    assert reasons["bias+sigmoid"] == "None"
    assert issubclass(cudnn.NoPlanError, Exception)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "float16", *([] if BFLOAT16 is None else ["bfloat16"])])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("epilogue", ["bias", "relu", "bias+relu", "add", "bias+add+relu", "sigmoid"])
def test_our_own_kernels(epilogue: str, order: str, dtype: str) -> None:
    """Engine DIRECT on the simulated device: what a GPU takes where cuDNN has no plan."""
    rng = np.random.default_rng(5)
    op = operator(epilogue, order, stride=2).definition
    shapes = {"x": X, "w": W, "bias": (4,), "add": (2, 4, 3, 3)}
    results = []
    for device, engine in (("cpu", ""), ("sim:0", "DIRECT")):
        rng = np.random.default_rng(5)
        ws = gpunet.Workspace(device, strict=True)
        for name in op.input:
            shape = shapes[name] if order == "NCHW" or len(shapes[name]) == 1 else last(shapes[name])
            ws.feed(name, rng.normal(size=shape).astype(dtype))
        op.engine = engine
        ws.run_operator(op)
        results.append(ws.fetch("y").astype(np.float64))
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(*results, rtol=tolerance, atol=tolerance * np.abs(results[0]).max())
