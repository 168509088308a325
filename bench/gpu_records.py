"""What the sections of the check on a GPU are given, and what they find."""

from __future__ import annotations

import itertools
import math
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from gpunet import kernels
from gpunet.backends import Backend, backend
from gpunet.buffers import Buffer
from gpunet.devices import parse_device
from gpunet.errors import GpunetError
from gpunet.kernels import KernelContext
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from gpunet.specs import spec


@dataclass(frozen=True)
class Record:
    """One finding.

    Attributes:
        case: what was looked at.
        ok: whether it is as it should be; ``None`` where something was only measured, or skipped.
        value, unit: what was measured.
        detail: why it is not, or what else is worth knowing.
    """

    case: str
    ok: bool | None = None
    value: float | None = None
    unit: str = ""
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without what is empty."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}


def failed(case: str, error: Exception) -> Record:
    """What is found where a case raises; of errors that are none of gpunet's also where they come from."""
    if isinstance(error, GpunetError):
        return Record(case, False, detail=str(error))
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    where = ", ".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
    return Record(case, False, detail=f"{type(error).__name__}: {error} ({where})")


@dataclass(frozen=True)
class Place:
    """Where and how long a section runs.

    Attributes:
        device: ``cuda:N`` or ``sim:N``.
        quick: whether a small part is enough.
        deadline: of ``time.perf_counter()``.
        skip: cases that were run before.
        begin: is told of each case before it runs.
        numbers: of the cases, from 0 on.
    """

    device: str
    quick: bool
    deadline: float
    skip: int = 0
    begin: Callable[[str], None] = lambda case: None
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def turn(self, case: str) -> bool:
        """Whether to run the next case, not where a process before, which has died, has begun it."""
        if next(self.numbers) < self.skip:
            return False
        self.begin(case)
        return True

    @property
    def backend(self) -> Backend:
        """The device; raises DeviceError if it is not here."""
        return backend(parse_device(self.device))

    @property
    def simulated(self) -> bool:
        """Whether times say nothing about a GPU."""
        return parse_device(self.device).kind == "sim"

    @property
    def small(self) -> bool:
        """Whether to take small nets and tensors: times of the simulated device are of no use."""
        return self.quick or self.simulated

    @property
    def late(self) -> bool:
        """Whether to stop."""
        return time.perf_counter() >= self.deadline

    def seconds(self, call: Callable[[], object], limit: float = 1.0) -> float:
        """Seconds a call, once work put on the main stream has run: the least mean of some batches of calls.

        Plans are made and graphs captured in calls before, which do not count.
        """
        wait = self.backend.stream.synchronize
        for _ in range(3):
            call()
            wait()
            if self.late:
                break
        start = time.perf_counter()
        call()
        wait()
        once = max(time.perf_counter() - start, 1e-7)
        limit = min(limit / (10 if self.quick else 1), max(self.deadline - time.perf_counter(), 0.0))
        calls = max(1, min(1000, int(limit / 5 / once)))
        best, end = once, time.perf_counter() + limit
        while time.perf_counter() < end:
            start = time.perf_counter()
            for _ in range(calls):
                call()
            wait()
            best = min(best, (time.perf_counter() - start) / calls)
        return best

    def put(self, array: np.ndarray, name: str = "") -> Buffer:
        """A copy on the device."""
        return Buffer.from_numpy(self.backend, array, name)

    def bind(self, definition: OperatorDef, inputs: list[np.ndarray]) -> Bound:
        """The kernel of an operator, bound to copies of these inputs, as a program binds it."""
        op = Operator(definition)
        specs: list[Any] = [spec(x.shape, x.dtype) for x in inputs]
        outputs: list[Any] = op.infer(specs)
        found = kernels.find(op, parse_device(self.device).kind, specs, outputs)
        scratch = () if found.scratch is None else found.scratch(op, specs, outputs)
        device = self.backend
        ctx = KernelContext(op, backend=device, stream=device.stream)
        ctx.scratch = tuple(Buffer.empty(device, s, "scratch") for s in scratch)
        targets = tuple(Buffer.empty(device, s, name) for s, name in zip(outputs, op.outputs, strict=True))
        sources = tuple(self.put(x, name) for x, name in zip(inputs, op.inputs, strict=True))
        launch = found.function(sources, targets, op.args, ctx)
        return Bound(launch, targets, found.engine, op.flops(specs, outputs))


@dataclass(frozen=True)
class Bound:
    """A bound kernel: a call puts it on the main stream."""

    launch: Callable[[], None]
    outputs: tuple[Buffer, ...]
    engine: str
    flops: int


@dataclass(frozen=True)
class Section:
    """A part of the check: its name, what it does in a line, how many seconds it may take, and after how many
    a case hangs.
    """

    name: str
    doc: str
    run: Callable[[Place], Iterator[Record]]
    seconds: float
    stall: float = math.inf
