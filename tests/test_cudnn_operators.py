"""Operators that take cuDNN, on a fake of the library and of CUDA."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gpunet.buffers import Buffer
from gpunet.cuda_kernels import conv_direct, conv_transpose, cudnn_execution, quantization
from gpunet.cuda_kernels import cudnn_layer_norm as layer_norm
from gpunet.cuda_kernels.cuda_backend import CudaBackend
from gpunet.kernels import KernelContext, find
from gpunet.operator import Operator
from gpunet.specs import TensorSpec, spec
from tests import test_cudnn
from tests.fake_cudnn import Library
from tests.test_cudnn import W, X, Y, operator

folder, library, gpu = test_cudnn.folder, test_cudnn.library, test_cudnn.gpu


def bound(gpu: CudaBackend, op: Operator, inputs: Sequence[TensorSpec], engine: str = "") -> tuple[Any, ...]:
    """The launch of an operator whose kernel has this engine, its inputs, outputs and scratch."""
    outputs = op.infer(inputs)
    found = find(op, "cuda", inputs, outputs)
    assert found.engine == engine
    wanted = [] if found.scratch is None else found.scratch(op, inputs, outputs)
    given, made, scratch = (tuple(Buffer.empty(gpu, s) for s in group) for group in (inputs, outputs, wanted))
    context = KernelContext(op, backend=gpu, stream=gpu.stream, scratch=scratch)
    return found.function(given, made, op.args, context), given, made, scratch


def executed(library: Library) -> list[list[int]]:
    """The addresses of the operands of each graph that has run, by number of operand."""
    return [list(operands.values()) for _, operands, _, _ in library.executed]


def addresses(*buffers: Buffer) -> list[int]:
    return [buffer.pointer for buffer in buffers]


def test_convolution_takes_cudnn(library: Library, gpu: CudaBackend) -> None:
    inputs = [spec(X, "float32"), spec(W, "float32"), spec((4,), "float32")]
    launch, given, made, scratch = bound(gpu, operator("Conv", 3, kernel=3, pad=1), inputs)
    launch()
    ((_, operands, workspace, _),) = library.executed
    assert operands == {i: b.pointer for i, b in enumerate((*given, *made), 1)}
    assert workspace == scratch[-1].pointer


def test_gradients_take_cudnn(library: Library, gpu: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(conv_direct, "channel_sums", lambda *given: lambda: done.append("bias"))
    op = operator("ConvGradient", 3, 3, kernel=3, pad=1)
    launch, (x, w, dy), (dw, _, dx), _ = bound(gpu, op, [spec(shape, "float32") for shape in (X, W, Y)])
    launch()
    assert executed(library) == [addresses(x, dy, dw), addresses(w, dy, dx)]
    assert done == ["bias"]


def test_transposed_convolution_takes_cudnn(
    library: Library, gpu: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(conv_transpose, "_add_bias", lambda *given: [lambda: done.append("bias")])
    monkeypatch.setattr(conv_direct, "channel_sums", lambda *given: lambda: done.append("sums"))
    images, filters, bias = (spec(shape, "float32") for shape in (X, (3, 4, 2, 2), (4,)))
    op = operator("ConvTranspose", 3, stride=2)
    launch, (x, w, _), (y,), _ = bound(gpu, op, [images, filters, bias])
    launch()
    assert y.shape == (X[0], 4, 2 * X[2], 2 * X[3])
    assert executed(library) == [addresses(w, x, y)]
    assert done == ["bias"]
    library.executed.clear()
    op = operator("ConvTransposeGradient", 3, 3, stride=2)
    launch, (x, w, dy), (dw, _, dx), _ = bound(gpu, op, [images, filters, y.spec])
    launch()
    assert executed(library) == [addresses(dy, x, dw), addresses(dy, w, dx)]
    assert done == ["bias", "sums"]


#: Types, and plans that none of their graphs may use: in float32 none with tensor cores, on a device without
#: bfloat16 none at all.
USELESS: dict[str, dict[str, tuple[int, str]]] = {"float32": {"eng0": (0, "TENSOR_CORE")}, "bfloat16": {}}


@pytest.mark.parametrize("dtype", USELESS)
def test_what_has_no_plan_runs_directly(
    library: Library,
    gpu: CudaBackend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dtype: str,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(conv_direct, "convolution", lambda *given: lambda: done.append("direct"))
    library.plans = USELESS[dtype]
    for x in (X, X, (0, *X[1:])):
        with caplog.at_level(logging.WARNING, "gpunet"):
            op = operator("Conv", 2, kernel=3, pad=1)
            launch, *_, scratch = bound(gpu, op, [spec(x, dtype), spec(W, dtype)])
        assert [s.nbytes for s in scratch] == [0]
        launch()
    assert done == ["direct"] * 3
    assert library.executed == []
    (message,) = (record.message for record in caplog.records)
    assert f"runs on cuda:0 with engine 'DIRECT': cuDNN has no plan of convolution forward {dtype}" in message


def test_bfloat16_may_use_tensor_cores(library: Library, gpu: CudaBackend) -> None:
    op = operator("Conv", 2, kernel=3, pad=1)
    launch, (x, w), (y,), _ = bound(gpu, op, [spec(X, "bfloat16"), spec(W, "bfloat16")])
    launch()
    ((name, *_),) = library.executed
    assert name == "eng0"
    assert executed(library) == [addresses(x, w, y)]


def test_layer_normalization_turns_deviations_around(
    library: Library, gpu: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[Buffer, Buffer]] = []

    def prepare(ctx: Any, kernel: Any, types: Any, arguments: Any, grid: Any) -> Any:
        return lambda: done.append(arguments[:2])

    monkeypatch.setattr(layer_norm, "prepare", prepare)
    x, row = spec((3, 5, 8), "float32"), spec((8,), "float32")
    op = operator("LayerNorm", 3, 3, engine="CUDNN", axis=2, elementwise_affine=1, epsilon=0.5)
    launch, given, made, (inverse, workspace) = bound(gpu, op, [x, row, row], "CUDNN")
    assert (inverse.shape, workspace.nbytes) == ((15,), 512)
    launch()
    (_, operands, at, _) = library.executed[-1]
    names = list(layer_norm.descriptor(op, x).operands())
    by_name = {name: operands[uid] for uid, name in enumerate(names, 1)}
    assert ctypes.c_float.from_address(by_name["epsilon"]).value == 0.5
    assert [by_name[n] for n in ("x", "scale", "bias")] == [b.pointer for b in given]
    assert [by_name[n] for n in ("y", "mean", "inv_std")] == [
        made[0].pointer,
        made[1].pointer,
        inverse.pointer,
    ]
    assert at == workspace.pointer
    assert done == [(inverse, made[2])]

    statistics = spec((3, 5, 1), "float32")
    op = operator("LayerNormGradient", 6, 3, engine="CUDNN", axis=2, elementwise_affine=1)
    launch, given, made, (_, inverse, _) = bound(gpu, op, [x, x, statistics, statistics, x, row], "CUDNN")
    launch()
    operands = library.executed[-1][1]
    names = list(layer_norm.descriptor(op, x).operands())
    by_name = {name: operands[uid] for uid, name in enumerate(names, 1)}
    wanted = {"x": given[4], "scale": given[5], "dy": given[0], "mean": given[2], "inv_std": inverse}
    wanted |= dict(zip(("dx", "dscale", "dbias"), made, strict=True))
    assert by_name == {name: buffer.pointer for name, buffer in wanted.items()}
    assert done[1:] == [(given[3], inverse)]


def test_what_cudnn_does_not_normalize(gpu: CudaBackend) -> None:
    op = operator("LayerNorm", 1, 3, engine="CUDNN")
    assert find(op, "cuda", [spec((3, 8), "float32")], []).engine == ""
    op = operator("LayerNorm", 3, 3, engine="CUDNN", elementwise_affine=1)
    for x in (spec((3, 8), "float64"), spec((0, 8), "float32")):
        assert find(op, "cuda", [x, spec((8,), x.dtype), spec((8,), x.dtype)], []).engine == ""


def quantized(gpu: CudaBackend, **args: Any) -> tuple[Any, ...]:
    """The launch of a quantized convolution, its inputs, outputs and scratch."""
    one, step = spec((), "int8"), spec((), "float32")
    inputs = [spec(X, "int8"), step, one, spec(W, "int8"), step, one, step, one, spec((4,), "int32")]
    return bound(gpu, operator("QLinearConv", 9, kernel=3, pad=1, **args), inputs)


def test_symmetric_convolutions_of_whole_numbers_take_cudnn(
    library: Library, gpu: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, Any]] = []

    def prepare(ctx: Any, kernel: Any, types: Any, arguments: Any, grid: Any) -> Any:
        return lambda: done.append((kernel.name, arguments))

    monkeypatch.setattr(quantization, "prepare", prepare)
    launch, given, (y,), (sums, workspace) = quantized(gpu, symmetric=1)
    launch()
    ((_, operands, at, _),) = library.executed
    assert operands == {i: b.pointer for i, b in enumerate((given[0], given[3], sums), 1)}
    assert (at, sums.dtype, sums.shape) == (workspace.pointer, np.int32, Y)
    ((name, arguments),) = done
    assert name == "requantize"
    assert arguments == (sums, given[1], given[4], given[6], given[7], given[8], y, y.size, 4, 64, 0)
    # Zero points are data that no plan knows of.
    launch, given, _, scratch = quantized(gpu)
    launch()
    assert (scratch, len(library.executed), done[-1][0]) == ((), 1, "qconv_fwd")
    assert done[-1][1][2] is given[2]
    library.plans = {"eng0": (0, "NONDETERMINISTIC")}
    cudnn_execution.PLANS.clear()
    launch, *_ = quantized(gpu, symmetric=1, stride=2)
    launch()
    assert (len(library.executed), done[-1][0], done[-1][1][2]) == (1, "qconv_fwd", None)
