"""The profiler: what it counts, how it sorts, and the clocks that it reads."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

import gpunet
from gpunet import profiler
from gpunet.cuda_kernels.sim import toolchain
from gpunet.cuda_kernels.timing import EventClock
from gpunet.devices import CPU
from gpunet.errors import DeviceError, NetError
from gpunet.observers import attach
from gpunet.profiler import OperatorTime, Peak, Profile, profile
from gpunet.proto import NetDef
from gpunet.schedule import Lane
from tests.nets import op


def net() -> NetDef:
    ops = [op("MatMul", "x w", "h"), op("Relu", "h", "r"), op("MatMul", "r w", "y")]
    return NetDef(name="n", op=ops, external_input=["x", "w"], external_output=["y"])


def workspace(device: str = "cpu", **options) -> gpunet.Workspace:
    ws = gpunet.Workspace(device)
    ws.feed("x", np.ones((8, 16), dtype=np.float32))
    ws.feed("w", np.ones((16, 16), dtype=np.float32))
    ws.create(net(), **options)
    return ws


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("engine", ["simple", "async_scheduling", "graph"])
def test_each_operator_is_timed_in_each_run(device, engine):
    if device != "cpu" and toolchain.find() is None:
        pytest.skip(toolchain.MISSING)
    ws = workspace(device, engine=engine, workers=2, streams=2)
    found = profile(ws, "n", iterations=3, warmup=0)
    assert [(o.type, o.name, o.index) for o in found.operators] == [
        ("MatMul", "h", 0),
        ("Relu", "r", 1),
        ("MatMul", "y", 2),
    ]
    assert len(found.seconds) == len(found.runs) == 3
    for operator in found.operators:
        assert len(operator.seconds) == 3
        assert all(seconds > 0 for seconds in operator.seconds)
    for start, stop in found.runs:
        inside = [s for s in found.samples if start <= s.start <= s.stop <= stop]
        assert len(inside) == 3
    assert not ws.program("n").observers


def test_operations_and_bytes():
    product, relu, _ = profile(workspace(), "n", iterations=1).operators
    assert product.flops == 2 * 8 * 16 * 16
    assert product.bytes == 4 * (8 * 16 + 16 * 16 + 8 * 16)
    assert relu.bytes == 2 * 4 * 8 * 16
    assert product.shape == "8x16"
    assert product.flops_per_second == pytest.approx(product.flops / product.mean)
    assert product.bytes_per_second == pytest.approx(product.bytes / product.mean)


def made(type: str, index: int, seconds: list[float], flops: int, nbytes: int) -> OperatorTime:
    return OperatorTime(index, type, f"{type}{index}", "", Lane(CPU), (), (), flops, nbytes, seconds)


def test_the_roofline_is_what_binds():
    peak = Peak(flops=100.0, bytes=10.0)
    assert made("A", 0, [2.0, 4.0], flops=150, nbytes=0).share(peak) == pytest.approx(0.5)
    assert made("A", 0, [2.0], flops=150, nbytes=20).share(peak) == pytest.approx(1.0)


def test_totals_and_orders():
    operators = [
        made("A", 0, [1.0], 5, 1),
        made("B", 1, [4.0], 1, 9),
        made("A", 2, [2.0], 7, 2),
    ]
    found = Profile("n", [8.0, 6.0], operators, [], [])
    assert [(t.type, t.count, t.seconds, t.flops, t.bytes) for t in found.by_type()] == [
        ("B", 1, 4.0, 1, 9),
        ("A", 2, 3.0, 12, 3),
    ]
    assert found.milliseconds() == [7000, 1000, 4000, 2000]
    assert found.operator_seconds == 7
    order = {by: [o.index for o in profiler.sort_operators(operators, by)] for by in profiler.SORTS}
    assert order == {
        "time": [1, 2, 0],
        "order": [0, 1, 2],
        "flops": [2, 0, 1],
        "bytes": [1, 2, 0],
        "type": [2, 0, 1],
    }


def test_dynamic_operators_are_timed_in_each_run():
    ws = gpunet.Workspace("cpu")
    ws.feed("i", np.array([2, 0], dtype=np.int32))
    ws.feed("x", np.ones((2, 3), dtype=np.float32))
    ops = [op("SparseToDense", "i x", "d"), op("Relu", "d", "y")]
    ws.create(NetDef(name="n", op=ops, external_input=["i", "x"]))
    assert [(o.type, o.shape, len(o.seconds)) for o in profile(ws, "n", iterations=4).operators] == [
        ("SparseToDense", "3x3", 4),
        ("Relu", "3x3", 4),
    ]


def test_peaks_are_measured_once(monkeypatch):
    monkeypatch.setitem(profiler._SIZES, "cpu", (64, 1 << 16))
    measure = profiler.peak.__wrapped__
    found = measure(CPU)
    assert found.flops > 0
    assert found.bytes > 0
    assert profiler.peak.cache_info().maxsize is None


@pytest.mark.parametrize(("iterations", "warmup"), [(0, 1), (1, -1)])
def test_numbers_that_make_no_sense(iterations, warmup):
    with pytest.raises(NetError, match=f"{iterations} iterations and {warmup} before"):
        profile(workspace(), "n", iterations, warmup)


class Runtime:
    """Events that are reached a millisecond after one another."""

    def __init__(self) -> None:
        self.events: dict[int, float | None] = {}
        self.recorded: list[tuple[int, int]] = []

    def eventCreate(self) -> int:  # noqa: N802
        self.events[len(self.recorded) + 10] = None
        return len(self.recorded) + 10

    def eventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        self.events[event] = float(len(self.recorded))
        self.recorded.append((event, stream))

    def eventSynchronize(self, event: int) -> None:  # noqa: N802
        assert event in self.events

    def eventElapsedTime(self, start: int, stop: int) -> float:  # noqa: N802
        return self.events[stop] - self.events[start]

    def eventDestroy(self, event: int) -> None:  # noqa: N802
        del self.events[event]


def test_marks_of_a_gpu_are_on_the_clock_of_the_host(monkeypatch):
    from contextlib import nullcontext

    from gpunet.cuda_kernels.cuda_backend import CudaStream

    runtime = Runtime()
    stream = object.__new__(CudaStream)
    monkeypatch.setattr(CudaStream, "synchronize", lambda self: None)
    monkeypatch.setattr(CudaStream, "__del__", lambda self: None)
    stream.pointer = 77
    cuda = types.SimpleNamespace(runtime=runtime, located=lambda what: nullcontext())
    backend = types.SimpleNamespace(cuda=cuda, stream=stream, activate=lambda: None, device="cuda:0")
    monkeypatch.setattr("gpunet.cuda_kernels.timing.time.perf_counter", lambda: 5.0)
    clock = EventClock(backend)
    first, second = clock.mark(stream), clock.mark(stream)
    assert clock.seconds(first) == pytest.approx(5.001)
    assert clock.seconds(second) == pytest.approx(5.002)
    assert {queue for _, queue in runtime.recorded} == {77}
    clock.forget()
    assert len(runtime.events) == 1
    with pytest.raises(DeviceError, match="wanted a stream of cuda:0"):
        clock.mark(object())


def test_nvtx_ranges_are_balanced(monkeypatch):
    calls: list[str] = []
    nvtx = types.SimpleNamespace(RangePush=calls.append, RangePop=lambda: calls.append("pop"))
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", types.ModuleType("cupy.cuda"))
    monkeypatch.setitem(sys.modules, "cupy.cuda.nvtx", nvtx)
    ws = workspace()
    attach(ws.program("n"), profiler.nvtx_ranges())
    ws.run("n")
    assert calls[::2] == [
        f"[{t}] op {i} {o!r} in net 'n'"
        for i, t, o in ((0, "MatMul", "h"), (1, "Relu", "r"), (2, "MatMul", "y"))
    ]
    assert calls[1::2] == ["pop"] * 3


def test_nvtx_ranges_need_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "cupy.cuda.nvtx", raising=False)
    with pytest.raises(DeviceError, match="no NVTX ranges can be made"):
        profiler.nvtx_ranges()
