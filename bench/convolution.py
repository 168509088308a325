"""Convolution and pooling against PyTorch on the CPU, layer by layer of LeNet, ResNet-20 and ResNet-18."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from gpunet import kernels
from gpunet.blas import ONE_BLAS_THREAD
from gpunet.definitions import make_operator
from gpunet.kernels import KernelContext
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from gpunet.specs import spec


class Shape(NamedTuple):
    """One layer on images of ``channels`` x ``size`` x ``size``; no ``filters`` mean max pooling."""

    name: str
    batch: int
    channels: int
    size: int
    filters: int
    kernel: int
    stride: int = 1
    pad: int = 0


class Row(NamedTuple):
    """Milliseconds; those of PyTorch and the ratio gpunet / PyTorch are ``None`` if it is not installed."""

    name: str
    direction: str
    gpunet_ms: float
    torch_ms: float | None
    ratio: float | None


def shapes() -> list[Shape]:
    """The layers of LeNet, ResNet-20 (CIFAR and the 8x8 digits) and ResNet-18 that differ."""
    return [
        Shape("lenet conv1", 64, 1, 28, 20, 5),
        Shape("lenet conv2", 64, 20, 12, 50, 5),
        Shape("lenet pool1", 64, 20, 24, 0, 2, 2),
        Shape("lenet pool2", 64, 50, 8, 0, 2, 2),
        Shape("digits stem", 64, 1, 8, 16, 3, 1, 1),
        Shape("digits 16", 64, 16, 8, 16, 3, 1, 1),
        Shape("digits 16-32 /2", 64, 16, 8, 32, 3, 2, 1),
        Shape("digits 32", 64, 32, 4, 32, 3, 1, 1),
        Shape("resnet20 stem", 64, 3, 32, 16, 3, 1, 1),
        Shape("resnet20 16", 64, 16, 32, 16, 3, 1, 1),
        Shape("resnet20 16-32 /2", 64, 16, 32, 32, 3, 2, 1),
        Shape("resnet20 16-32 1x1 /2", 64, 16, 32, 32, 1, 2),
        Shape("resnet20 32", 64, 32, 16, 32, 3, 1, 1),
        Shape("resnet20 32-64 /2", 64, 32, 16, 64, 3, 2, 1),
        Shape("resnet20 32-64 1x1 /2", 64, 32, 16, 64, 1, 2),
        Shape("resnet20 64", 64, 64, 8, 64, 3, 1, 1),
        Shape("resnet18 stem", 8, 3, 224, 64, 7, 2, 3),
        Shape("resnet18 pool", 8, 64, 112, 0, 3, 2, 1),
        Shape("resnet18 64", 8, 64, 56, 64, 3, 1, 1),
        Shape("resnet18 64-128 /2", 8, 64, 56, 128, 3, 2, 1),
        Shape("resnet18 64-128 1x1 /2", 8, 64, 56, 128, 1, 2),
        Shape("resnet18 128", 8, 128, 28, 128, 3, 1, 1),
        Shape("resnet18 128-256 /2", 8, 128, 28, 256, 3, 2, 1),
        Shape("resnet18 256", 8, 256, 14, 256, 3, 1, 1),
        Shape("resnet18 256-512 /2", 8, 256, 14, 512, 3, 2, 1),
        Shape("resnet18 512", 8, 512, 7, 512, 3, 1, 1),
    ]


def torch_module() -> ModuleType | None:
    try:
        import torch
    except ImportError:
        return None
    module: ModuleType = torch
    return module


def _bound(
    definition: OperatorDef, inputs: Sequence[np.ndarray]
) -> tuple[Callable[[], Any], list[np.ndarray]]:
    """The kernel of an operator bound to these inputs and to fresh outputs, as a program binds it."""
    op = Operator(definition)
    specs = [spec(x.shape, x.dtype) for x in inputs]
    inferred = op.infer(specs)
    found = kernels.find(op, "cpu")
    outputs = [np.zeros(s.shape, s.dtype) for s in inferred]  # type: ignore[union-attr]
    wanted = found.scratch(op, specs, inferred) if found.scratch is not None else ()
    context = KernelContext(op, scratch=tuple(np.zeros(s.shape, s.dtype) for s in wanted))
    step: Callable[[], Any] = found.function(tuple(inputs), tuple(outputs), op.args, context)

    def run() -> None:
        # As engines do; kernels share their products between threads themselves.
        with ONE_BLAS_THREAD:
            step()

    return run, outputs


def _torch_convolution(torch: Any, shape: Shape, arrays: Sequence[np.ndarray]) -> list[Callable[[], Any]]:
    x, w, b, dy = map(torch.from_numpy, arrays)
    steps, pads = [shape.stride] * 2, [shape.pad] * 2
    backward = torch.ops.aten.convolution_backward
    return [
        lambda: torch.nn.functional.conv2d(x, w, b, shape.stride, shape.pad),
        lambda: backward(dy, x, w, [shape.filters], steps, pads, [1, 1], False, [0, 0], 1, [True] * 3),
    ]


def _torch_pool(torch: Any, shape: Shape, arrays: Sequence[np.ndarray]) -> list[Callable[[], Any]]:
    x, dy = map(torch.from_numpy, arrays)
    window = [[shape.kernel] * 2, [shape.stride] * 2, [shape.pad] * 2, [1, 1], False]
    _, indices = torch.ops.aten.max_pool2d_with_indices(x, *window)
    return [
        lambda: torch.ops.aten.max_pool2d_with_indices(x, *window),
        lambda: torch.ops.aten.max_pool2d_with_indices_backward(dy, x, *window, indices),
    ]


def candidates(shape: Shape, torch: ModuleType | None) -> list[list[Callable[[], Any]]]:
    """[[gpunet forward, backward], [PyTorch forward, backward]], the second where it is installed."""
    rng = np.random.default_rng(0)
    args = {"kernel": shape.kernel, "stride": shape.stride, "pad": shape.pad}
    x = rng.standard_normal((shape.batch, shape.channels, shape.size, shape.size), dtype=np.float32)
    if shape.filters == 0:
        forward, (y,) = _bound(make_operator("MaxPool", ["x"], ["y"], **args), [x])
        forward()
        dy = rng.standard_normal(y.shape, dtype=np.float32)
        backward, _ = _bound(make_operator("MaxPoolGradient", ["x", "y", "dy"], ["dx"], **args), [x, y, dy])
        return [[forward, backward], *([_torch_pool(torch, shape, [x, dy])] if torch else [])]
    w = rng.standard_normal((shape.filters, shape.channels, shape.kernel, shape.kernel), dtype=np.float32)
    b = rng.standard_normal(shape.filters, dtype=np.float32)
    forward, (y,) = _bound(make_operator("Conv", ["x", "w", "b"], ["y"], **args), [x, w, b])
    dy = rng.standard_normal(y.shape, dtype=np.float32)
    gradient = make_operator("ConvGradient", ["x", "w", "dy"], ["dw", "db", "dx"], **args)
    backward, _ = _bound(gradient, [x, w, dy])
    return [[forward, backward], *([_torch_convolution(torch, shape, [x, w, b, dy])] if torch else [])]


def _interleaved(runs: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Least milliseconds of each, run in turn so that a busy machine is one for all of them."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(repeats):
        for run, measured in zip(runs, times, strict=True):
            # The first run after another library's has to wait until that one's threads stop spinning.
            run()
            start = time.perf_counter()
            run()
            measured.append(1e3 * (time.perf_counter() - start))
    return [min(t) for t in times]


def measure(repeats: int = 15, only: Sequence[Shape] | None = None) -> list[Row]:
    """Measures all shapes (or ``only`` some), forward and backward (all gradients)."""
    torch = torch_module()
    rows = []
    for shape in only if only is not None else shapes():
        for direction, runs in zip(
            ("forward", "backward"), zip(*candidates(shape, torch), strict=True), strict=True
        ):
            mine, *others = _interleaved(runs, repeats)
            other = others[0] if others else None
            rows.append(Row(shape.name, direction, mine, other, mine / other if other else None))
    return rows


if __name__ == "__main__":
    for row in measure():
        found = f"{row.torch_ms:9.3f} {row.ratio:6.2f}" if row.torch_ms is not None else ""
        print(f"{row.name:24s} {row.direction:9s} {row.gpunet_ms:9.3f} {found}", flush=True)
