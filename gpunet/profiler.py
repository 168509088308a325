"""The profiler: how long each operator takes, and how near that is to what the machine can do.

Operators of the host are timed with the host's clock, those of a GPU with events on their stream, those of
the simulated device with the host's clock, the stream being waited for before and after.

The share of the roofline (Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance
Model", 2009) is the time that the operator would take at the machine's own speed, ``max(FLOPs / peak FLOP/s,
bytes / peak bytes/s)``, over the time that it took. The peaks are measured, by a matrix product and a copy of
this runtime. Bytes are those of all inputs and outputs, so an operator whose tensors stay in a cache can have
a share above 1.
"""

from __future__ import annotations

import functools
import importlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpunet.backends import backend, opened
from gpunet.devices import Device
from gpunet.errors import DeviceError, NetError
from gpunet.net import Net
from gpunet.observers import Call, Observer, observe
from gpunet.schedule import Lane
from gpunet.specs import BlobSpec, TensorSpec, format_shape

if TYPE_CHECKING:
    from gpunet.workspace import Workspace


@dataclass(frozen=True)
class Sample:
    """One execution of an operator: when it began and ended, in seconds of ``time.perf_counter``."""

    call: Call
    start: float
    stop: float


class Recorder(Observer):
    """Records when each operator began and ended.

    Attributes:
        samples: what was recorded, in the order of :meth:`collect`.
        runs: begin and end of each run.
    """

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.runs: list[tuple[float, float]] = []
        self._local = threading.local()
        #: Of the host: seconds; of a GPU: marks of its clock.
        self._pending: list[tuple[Call, Any, Any]] = []
        self._clocks: dict[Device, Any] = {}

    def before(self, call: Call) -> None:
        """Notes the begin; on the simulated device, waits for its stream first."""
        self._local.start = self._now(call)

    def after(self, call: Call) -> None:
        """Notes the end."""
        self._pending.append((call, self._local.start, self._now(call)))

    def collect(self, start: float, stop: float) -> None:
        """Notes a run, and turns what was noted in it into samples; waits for GPUs."""
        self.runs.append((start, stop))
        for call, begin, end in self._pending:
            clock = self._clocks.get(call.step.lane.device) if call.step.stream is not None else None
            if clock is not None:
                begin, end = clock.seconds(begin), clock.seconds(end)
            self.samples.append(Sample(call, begin, end))
        self.samples.sort(key=lambda sample: sample.start)
        self.drop()

    def drop(self) -> None:
        """Forgets what was noted since the last :meth:`collect`."""
        self._pending.clear()
        for clock in self._clocks.values():
            clock.forget()

    def _now(self, call: Call) -> Any:
        stream = call.step.stream
        if stream is None:
            return time.perf_counter()
        device = call.step.lane.device
        if device.kind == "cuda":
            return self._clock(device).mark(stream)
        stream.synchronize()
        return time.perf_counter()

    def _clock(self, device: Device) -> Any:
        if device not in self._clocks:
            from gpunet.cuda_kernels.cuda_backend import CudaBackend
            from gpunet.cuda_kernels.timing import EventClock

            found = backend(device)
            if isinstance(found, CudaBackend):
                self._clocks[device] = EventClock(found)
        return self._clocks[device]


@dataclass(frozen=True)
class Peak:
    """What a device reaches: floating-point operations a second in a matrix product, bytes a second (read and
    written) in a copy.
    """

    flops: float
    bytes: float

    def seconds(self, flops: int, nbytes: int) -> float:
        """The least time for so much work."""
        return max(flops / self.flops, nbytes / self.bytes)


@dataclass(frozen=True)
class OperatorTime:
    """What was measured of one operator.

    Attributes:
        index: position in the net.
        type: the operator's type; ``copy`` for a copy between devices.
        name: its name, else that of its first output.
        where: how messages name it.
        lane: where it ran.
        inputs, outputs: specs.
        seconds: of each run.
        flops: floating-point operations of one run.
        bytes: of all inputs and outputs.
    """

    index: int
    type: str
    name: str
    where: str
    lane: Lane
    inputs: tuple[BlobSpec | None, ...]
    outputs: tuple[BlobSpec | None, ...]
    flops: int
    bytes: int
    seconds: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Mean seconds of a run."""
        return sum(self.seconds) / len(self.seconds)

    @property
    def flops_per_second(self) -> float:
        """Floating-point operations a second."""
        return self.flops / max(self.mean, 1e-12)

    @property
    def bytes_per_second(self) -> float:
        """Bytes of inputs and outputs a second."""
        return self.bytes / max(self.mean, 1e-12)

    @property
    def shape(self) -> str:
        """The first output, for tables."""
        first = next((s for s in (*self.outputs, *self.inputs) if s is not None), None)
        return format_shape(first.shape) if isinstance(first, TensorSpec) else str(first or "")

    def share(self, peak: Peak) -> float:
        """Share of the roofline, 1 at the machine's own speed."""
        return peak.seconds(self.flops, self.bytes) / max(self.mean, 1e-12)


@dataclass(frozen=True)
class TypeTime:
    """Sums over all operators of one type: their number, and seconds, operations and bytes of a run."""

    type: str
    count: int
    seconds: float
    flops: int
    bytes: int


@dataclass(frozen=True)
class Profile:
    """What was measured of a net.

    Attributes:
        net: its name.
        seconds: of each whole run, without observers.
        operators: in the order in which the net has them.
        samples, runs: what the recorder noted, for a timeline.
    """

    net: str
    seconds: list[float]
    operators: list[OperatorTime]
    samples: list[Sample]
    runs: list[tuple[float, float]]

    @property
    def mean(self) -> float:
        """Mean seconds of a whole run without observers."""
        return sum(self.seconds) / len(self.seconds)

    @property
    def operator_seconds(self) -> float:
        """Seconds of a run in all operators together. More than :attr:`mean` where lanes overlap."""
        return sum(op.mean for op in self.operators)

    def by_type(self) -> list[TypeTime]:
        """Totals of each operator type, the most costly first."""
        groups: dict[str, list[OperatorTime]] = {}
        for op in self.operators:
            groups.setdefault(op.type, []).append(op)
        totals = [
            TypeTime(
                type,
                len(ops),
                sum(op.mean for op in ops),
                sum(op.flops for op in ops),
                sum(op.bytes for op in ops),
            )
            for type, ops in groups.items()
        ]
        return sorted(totals, key=lambda total: -total.seconds)

    def milliseconds(self) -> list[float]:
        """Like Caffe2's ``BenchmarkNet``: the mean of a whole run, then that of each operator, in ms."""
        return [1000 * self.mean, *(1000 * op.mean for op in self.operators)]


def profile(workspace: Workspace, net: str | Net, iterations: int = 10, warmup: int = 1) -> Profile:
    """Runs a created net ``iterations`` times as it is, and as often with a clock at each operator.

    Args:
        workspace: where the net was created, and what it reads was fed.
        net: the net.
        iterations: runs that are measured, at least 1.
        warmup: runs before them.

    Raises:
        NetError: there is no such net, or a number makes no sense.
    """
    name = net.name if isinstance(net, Net) else net
    if iterations < 1 or warmup < 0:
        raise NetError(
            f"net {name!r}: {iterations} iterations and {warmup} before them, wanted at least 1 and 0"
        )
    workspace.program(name)
    whole = [_timed(workspace, name) for _ in range(warmup + iterations)][warmup:]
    recorder = Recorder()
    with observe(workspace, name, recorder):
        # The first run with observers makes what the others use.
        for number in range(-1, iterations):
            start, stop = _timed(workspace, name)
            if number < 0:
                recorder.drop()
            else:
                recorder.collect(start, stop)
    operators: dict[tuple[int, str], OperatorTime] = {}
    for sample in recorder.samples:
        key = (sample.call.node.index, sample.call.where)
        if key not in operators:
            operators[key] = _described(sample.call)
        operators[key].seconds.append(sample.stop - sample.start)
    found = [operators[key] for key in sorted(operators, key=lambda key: key[0])]
    return Profile(name, [stop - start for start, stop in whole], found, recorder.samples, recorder.runs)


def _timed(workspace: Workspace, name: str) -> tuple[float, float]:
    """Begin and end of one run, all of its work on devices included."""
    _wait_for_devices()
    start = time.perf_counter()
    workspace.run(name)
    _wait_for_devices()
    return start, time.perf_counter()


def _wait_for_devices() -> None:
    for device in opened():
        device.stream.synchronize()


def _described(call: Call) -> OperatorTime:
    inputs, outputs = call.specs()
    op = call.node.op
    known = all(s is not None for s in (*inputs, *outputs))
    flops = op.flops(inputs, outputs) if op is not None and known else 0
    nbytes = sum(s.nbytes for s in (*inputs, *outputs) if isinstance(s, TensorSpec))
    index, lane = call.node.index, call.step.lane
    return OperatorTime(
        index, call.type, call.name, call.where, lane, tuple(inputs), tuple(outputs), flops, nbytes
    )


#: Side of the matrices of the product, and bytes of the copy, by device kind.
_SIZES: Final = {"cpu": (1024, 64 << 20), "cuda": (8192, 1 << 30), "sim": (256, 8 << 20)}
_REPEATS: Final = 5


@functools.cache
def peak(device: Device) -> Peak:
    """What a device reaches in float32, measured once in a process: the best of some runs.

    Raises :class:`DeviceError` if there is no such device here.
    """
    from gpunet.definitions import make_operator

    side, nbytes = _SIZES[device.kind]
    matrix = TensorSpec((side, side), np.dtype(np.float32))
    block = TensorSpec((nbytes // 4,), np.dtype(np.float32))
    product = _best(device, make_operator("MatMul", ["a", "b"], ["c"]), {"a": matrix, "b": matrix})
    copy = _best(device, make_operator("Copy", ["a"], ["b"]), {"a": block})
    return Peak(2 * side**3 / product, 2 * block.nbytes / copy)


def _best(device: Device, operator: Any, feeds: dict[str, TensorSpec]) -> float:
    from gpunet.proto import NetDef
    from gpunet.workspace import Workspace

    workspace = Workspace(device)
    for name, spec in feeds.items():
        workspace.feed(name, np.full(spec.shape, 0.5, spec.dtype))
    net = NetDef(name="peak", op=[operator], external_input=list(feeds))
    (found,) = profile(workspace, workspace.create(net), _REPEATS).operators
    return max(min(found.seconds), 1e-12)


SORTS: Final[dict[str, Callable[[OperatorTime], Any]]] = {
    "time": lambda op: -op.mean,
    "order": lambda op: 0,
    "flops": lambda op: -op.flops,
    "bytes": lambda op: -op.bytes,
    "type": lambda op: (op.type, -op.mean),
}


def sort_operators(operators: Sequence[OperatorTime], by: str) -> list[OperatorTime]:
    """The operators in the order of a key of :data:`SORTS`, else as they come."""
    return sorted(operators, key=SORTS[by])


def nvtx_ranges() -> Observer:
    """An observer that puts an NVTX range around each operator, as Nsight Systems shows them.

    Raises :class:`DeviceError` where CuPy is missing.
    """
    try:
        nvtx = importlib.import_module("cupy.cuda.nvtx")
    except ImportError as error:
        raise DeviceError(
            f"no NVTX ranges can be made: {error}; wanted CuPy: pip install 'gpunet[cuda12]'"
        ) from error
    return _NvtxRanges(nvtx)


class _NvtxRanges(Observer):
    def __init__(self, nvtx: Any) -> None:
        self._nvtx = nvtx

    def before(self, call: Call) -> None:
        self._nvtx.RangePush(call.where)

    def after(self, call: Call) -> None:
        self._nvtx.RangePop()

    def failed(self, call: Call) -> None:
        self._nvtx.RangePop()
