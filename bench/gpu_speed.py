"""Sections of the check on a GPU: how fast it is."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

import gpunet
from gpunet import gradient_check
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import gemm
from gpunet.cuda_kernels.signature import FLOATS
from gpunet.definitions import make_operator
from gpunet.errors import GpunetError
from gpunet.kernels import KernelContext
from gpunet.operator import Operator
from gpunet.specs import TensorSpec, spec

from . import overhead
from .convolution import Shape, shapes
from .gpu_correctness import ENGINES, PRECISIONS, model
from .gpu_records import Place, Record, failed
from .training import CASES, batch


def copies(place: Place) -> Iterator[Record]:
    """Bandwidth of copies and of an elementwise kernel."""
    size = 2**20 if place.small else 2**28
    host = np.ones(size // 4, np.float32)
    a, b = place.put(host, "a"), Buffer.empty(place.backend, TensorSpec(host.shape, host.dtype), "b")
    device, stream = place.backend, place.backend.stream
    relu = place.bind(make_operator("Relu", ["x"], ["y"]), [host])
    for case, moved, call in (
        ("host to device", size, lambda: device.copy_in(a, host, stream)),
        ("device to host", size, lambda: device.copy_out(host, a, stream)),
        ("device to device, read and written", 2 * size, lambda: device.copy(b, a, stream)),
        ("Relu, read and written", 2 * size, relu.launch),
    ):
        title = f"{case}, {size / 2**20:g} MiB"
        if place.turn(title):
            yield Record(title, value=moved / place.seconds(call) / 1e9, unit="GB/s")


def launches(place: Place) -> Iterator[Record]:
    """What a launch costs, and an operator of a net of tiny ones, engine by engine."""
    relu = place.bind(make_operator("Relu", ["x"], ["y"]), [np.ones(8, np.float32)])
    yield Record("launch of a prepared kernel", value=1e6 * place.seconds(relu.launch), unit="µs")
    for device in ("cpu", place.device):
        for engine in ENGINES[: 1 if device == "cpu" else None]:
            title = f"1 of {overhead.OPERATORS} tiny operators, {device}, {engine}"
            if not place.turn(title):
                continue
            try:
                value = 1e6 * place.seconds(_tiny_net(device, engine)) / overhead.OPERATORS
            except Exception as error:
                yield failed(title, error)
                continue
            yield Record(title, value=value, unit="µs")


def _tiny_net(device: str, engine: str) -> Callable[[], None]:
    chain = gpunet.Net("tiny")
    for number, (type, binary, _) in enumerate(overhead.CHAIN):
        chain.add(type, [f"x{number}", *(["operand"] if binary else [])], [f"x{number + 1}"])
    workspace = gpunet.Workspace(device)
    for name in ("x0", "operand"):
        workspace.feed(name, np.full(overhead.SIZE, overhead.OPERAND, np.float32))
    name = workspace.create(chain, engine=engine)
    return lambda: workspace.run(name)


def steps(place: Place) -> Iterator[Record]:
    """Training steps of LeNet and ResNet-20 by engine, in float32 and float16; in bfloat16 replayed."""
    for case in CASES[: 1 if place.simulated else None]:
        for size in (4,) if place.small else (case.batch, 4 * case.batch):
            sized = case._replace(batch=size, side=16) if place.small else case._replace(batch=size)
            for precision in PRECISIONS:
                for engine in ENGINES if precision != "bfloat16" else ("graph",):
                    if place.late:
                        yield Record("further steps", detail="not reached in time")
                        return
                    title = f"{sized.title}, {precision}, {engine}"
                    if not place.turn(title):
                        continue
                    try:
                        made = model(sized, precision)
                        workspace = gpunet.Workspace(place.device, seed=1)
                        workspace.run_once(made.init_net)
                        gradient_check.feed(workspace, ["data", "label"], batch(sized))
                        net = workspace.create(made.net, engine=engine, keep=["loss"])
                        seconds = place.seconds(lambda workspace=workspace, net=net: workspace.run(net), 1.5)
                    except Exception as error:
                        yield failed(title, error)
                        continue
                    words = f"{size / seconds:.0f} images/s"
                    yield Record(title, value=1e3 * seconds, unit="ms", detail=words)


def _convolutions(place: Place) -> list[Shape]:
    found = [shape for shape in shapes() if shape.filters]
    return [s._replace(batch=2) for s in found if s.name.startswith("digits")][:2] if place.small else found


def convolutions(place: Place) -> Iterator[Record]:
    """Convolutions of the models, forward and backward: the default engine and DIRECT; some in bfloat16."""
    rng = np.random.default_rng(0)
    ratios: dict[str, list[float]] = {}
    wanted = _convolutions(place)
    rows = [("float32", shape) for shape in wanted]
    if "bfloat16" in FLOATS:
        rows += [("bfloat16", shape) for shape in wanted[::3]]
    for dtype, shape in rows:
        args = {"kernel": shape.kernel, "stride": shape.stride, "pad": shape.pad}
        x = rng.standard_normal((shape.batch, shape.channels, shape.size, shape.size), dtype=np.float32)
        w = rng.standard_normal((shape.filters, shape.channels, shape.kernel, shape.kernel), dtype=np.float32)
        out = (shape.size + 2 * shape.pad - shape.kernel) // shape.stride + 1
        dy = rng.standard_normal((shape.batch, shape.filters, out, out), dtype=np.float32)
        bias = np.zeros(shape.filters, np.float32)
        for type, names, made, inputs in (
            ("Conv", "x w b", "y", [x, w, bias]),
            ("ConvGradient", "x w dy", "dw db dx", [x, w, dy]),
        ):
            times = []
            for engine in ("", "DIRECT"):
                if place.late:
                    yield Record("further shapes", detail="not reached in time")
                    return
                words = "" if dtype == "float32" else f" {dtype}"
                title = f"{shape.name}{words}, {type}, {engine or 'default'}"
                if not place.turn(title):
                    continue
                definition = make_operator(type, names.split(), made.split(), engine=engine, **args)
                try:
                    bound = place.bind(definition, [array.astype(dtype) for array in inputs])
                    seconds = place.seconds(bound.launch, 0.1)
                except Exception as error:
                    yield failed(title, error)
                    continue
                times.append(seconds)
                speed = f"{bound.flops / seconds / 1e12:.3g} TFLOP/s" if bound.flops else ""
                yield Record(title, value=1e6 * seconds, unit="µs", detail=speed)
            if len(times) == 2:
                ratios.setdefault(dtype, []).append(times[0] / times[1])
    for dtype, found in ratios.items():
        title = f"default over DIRECT, {dtype}, geometric mean"
        yield Record(title, value=statistics.geometric_mean(found), unit="×")


def products(place: Place) -> Iterator[Record]:
    """Matrix products by every route, and whether they are right."""
    sizes = (
        [(64, 32, 48), (33, 17, 5)]
        if place.small
        else [
            (64, 500, 800),
            (33, 1001, 77),
            (1024, 1024, 1024),
            (4096, 4096, 4096),
        ]
    )
    rng = np.random.default_rng(0)
    for m, n, k in sizes:
        for dtype, tf32 in (("float32", True), *((dtype, False) for dtype in FLOATS)):
            a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((m, k), (k, n)))
            want = a[:256].astype(np.float64) @ b.astype(np.float64)
            for route in ("cublaslt", "cudnn", "kernel", "host"):
                if place.late:
                    yield Record("further products", detail="not reached in time")
                    return
                libraries = ("host",) if place.simulated else ("cublaslt", "cudnn")
                title = f"{m}x{n}x{k} {'TF32' if tf32 else dtype}, {route}"
                if (route in libraries or (route == "kernel" and not tf32)) and place.turn(title):
                    yield _product(place, title, (m, n, k), dtype, tf32, route, a, b, want)


def _product(
    place: Place,
    title: str,
    size: tuple[int, int, int],
    dtype: str,
    tf32: bool,
    route: str,
    a: np.ndarray,
    b: np.ndarray,
    want: np.ndarray,
) -> Record:
    m, n, k = size
    ctx = KernelContext(Operator(make_operator("MatMul", ["a", "b"], ["y"])))
    ctx.backend, ctx.stream = place.backend, place.backend.stream
    out = Buffer.empty(place.backend, spec((m, n), dtype), "y")
    try:
        with _route(route):
            launch = gemm.matmul(ctx, place.put(a, "a"), place.put(b, "b"), out, tf32=tf32)
            seconds = place.seconds(launch, 0.2)
        found = out.numpy()[:256].astype(np.float64)
    except Exception as error:
        if isinstance(error, GpunetError) and ("not installed" in str(error) or "GPUNET_GEMM" in str(error)):
            return Record(title, detail=str(error))
        return failed(title, error)
    # Relative to what a sum of k products of normal numbers is: the square root of k.
    error = float(np.abs(found - want).max() / k**0.5)
    limit = {"float16": 5e-3, "bfloat16": 4e-2, "float64": 1e-13}.get(dtype, 5e-3 if tf32 else 1e-5)
    speed = f"{2 * m * n * k / seconds / 1e12:.3g} TFLOP/s"
    return Record(title, error <= limit, 1e6 * seconds, "µs", f"{speed}, error {error:.1e}")


@contextmanager
def _route(name: str) -> Iterator[None]:
    before = os.environ.get("GPUNET_GEMM")
    os.environ["GPUNET_GEMM"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["GPUNET_GEMM"]
        else:
            os.environ["GPUNET_GEMM"] = before
