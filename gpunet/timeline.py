"""Timelines: what ran when, as a trace for Chrome or Perfetto, and what memory was in use, as a picture.

A trace has a process for each device and a row for each lane: a thread on the CPU, a stream on a GPU. Arrows
go from an operator to those in other lanes that wait for it. Open it at https://ui.perfetto.dev or at
chrome://tracing. The format is Chrome's "Trace Event Format", JSON.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpunet.binding import Compiled
from gpunet.devices import Device
from gpunet.memory_plan import ALIGNMENT
from gpunet.profiler import Profile, Sample
from gpunet.program import Program
from gpunet.schedule import Lane
from gpunet.serialization import AnyPath, atomic_write
from gpunet.specs import TensorSpec
from gpunet.storage import Storage

_RUNS_PROCESS: Final = 1


def trace(profile: Profile) -> dict[str, Any]:
    """The recorded runs of a profile as a trace: times in microseconds from the begin of the first run."""
    samples, runs = profile.samples, profile.runs
    origin = min((start for start, _ in runs), default=0.0)
    lanes = sorted({s.call.step.lane for s in samples}, key=lambda lane: (str(lane.device), lane.number))
    processes = {
        device: _RUNS_PROCESS + 1 + number
        for number, device in enumerate(dict.fromkeys(lane.device for lane in lanes))
    }
    events = [
        _metadata("process_name", _RUNS_PROCESS, 0, f"net {profile.net}"),
        _metadata("thread_name", _RUNS_PROCESS, 0, "runs"),
    ]
    for device, process in processes.items():
        events.append(_metadata("process_name", process, 0, str(device)))
    for lane in lanes:
        kind = "thread" if lane.device.kind == "cpu" else "stream"
        process = processes[lane.device]
        events.append(_metadata("thread_name", process, lane.number, f"{kind} {lane.number}"))
    for number, (start, stop) in enumerate(runs):
        run = {"name": f"run {number}", "cat": "run", "pid": _RUNS_PROCESS, "tid": 0}
        events.append({**run, "ph": "X", **_span(start, stop, origin)})
    for sample in samples:
        events.append(_slice(sample, processes, origin))
    events += _flows(samples, runs, processes, origin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(path: AnyPath, profile: Profile) -> None:
    """Writes the trace of a profile; raises :class:`OSError` if it cannot."""
    atomic_write(path, json.dumps(trace(profile)).encode())


def _metadata(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _span(start: float, stop: float, origin: float) -> dict[str, float]:
    return {"ts": round((start - origin) * 1e6, 3), "dur": round(max(stop - start, 0) * 1e6, 3)}


def _place(lane: Lane, processes: dict[Device, int]) -> dict[str, int]:
    return {"pid": processes[lane.device], "tid": lane.number}


def _slice(sample: Sample, processes: dict[Device, int], origin: float) -> dict[str, Any]:
    call = sample.call
    inputs, outputs = call.specs()
    node = call.node
    described = {
        "operator": call.where,
        "inputs": [f"{v.name}: {s}" for v, s in zip(node.inputs, inputs, strict=True)],
        "outputs": [f"{v.name}: {s}" for v, s in zip(node.outputs, outputs, strict=True)],
    }
    return {
        "name": f"{call.type} {call.name}",
        "cat": call.type,
        "ph": "X",
        **_place(call.step.lane, processes),
        **_span(sample.start, sample.stop, origin),
        "args": described,
    }


def _flows(
    samples: Sequence[Sample],
    runs: Sequence[tuple[float, float]],
    processes: dict[Device, int],
    origin: float,
) -> list[dict[str, Any]]:
    """An arrow for each wait: from the middle of what is waited for to the begin of what waits."""
    events = []
    number = 0
    for begin, end in runs:
        inside = [s for s in samples if begin <= s.start <= end]
        found = {(s.call.segment, s.call.position): s for s in inside}
        for sample in inside:
            for position in sample.call.step.waits:
                earlier = found.get((sample.call.segment, position))
                if earlier is None:
                    continue
                number += 1
                flow = {"name": "wait", "cat": "wait", "id": number}
                middle = (earlier.start + earlier.stop) / 2
                events.append(
                    {
                        **flow,
                        "ph": "s",
                        **_place(earlier.call.step.lane, processes),
                        "ts": round((middle - origin) * 1e6, 3),
                    }
                )
                events.append(
                    {
                        **flow,
                        "ph": "f",
                        "bp": "e",
                        **_place(sample.call.step.lane, processes),
                        "ts": round((sample.start - origin) * 1e6, 3),
                    }
                )
    return events


@dataclass(frozen=True)
class MemoryCurve:
    """Internal memory of one device while a segment runs.

    Attributes:
        device: whose memory.
        labels: the operators, in the order of issue.
        live: for each of them, bytes of the internal tensors that are live while it runs.
        arena: bytes that the plan takes.
        lower_bound: the largest of ``live``: no plan can take less.
        unplanned: bytes of all internal tensors.
    """

    device: Device
    labels: list[str]
    live: list[int]
    arena: int
    lower_bound: int
    unplanned: int


def memory_curves(program: Program) -> list[MemoryCurve]:
    """A curve for each segment that a program has bound, and each device that it has internal tensors on."""
    found = []
    for segment in program.segments():
        if segment.compiled is not None:
            for device in segment.compiled.memory.arenas:
                found.append(_curve(segment.compiled, device))
    return found


def _curve(compiled: Compiled, device: Device) -> MemoryCurve:
    lives: dict[Storage, tuple[int, int]] = {}
    items = compiled.schedule.items
    for position, item in enumerate(items):
        for value in (*item.node.inputs, *item.node.outputs):
            storage = compiled.places[value]
            if storage.internal and storage.device == device and isinstance(value.spec, TensorSpec):
                lives[storage] = (lives.get(storage, (position, position))[0], position)
    live = [0] * len(items)
    for storage, (first, last) in lives.items():
        size = -(-storage.nbytes // ALIGNMENT) * ALIGNMENT
        for position in range(first, last + 1):
            live[position] += size
    memory = compiled.memory
    labels = [item.node.where for item in items]
    return MemoryCurve(
        device, labels, live, memory.arenas[device], memory.lower_bound[device], memory.unplanned[device]
    )


def save_memory(path: AnyPath, program: Program) -> None:
    """Draws live internal bytes against the steps, with the size of the arena and the lower bound, as PNG.

    Needs no display. The program must be bound: run, or prepared.

    Raises:
        ImportError: matplotlib is missing (extra ``plot``).
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = memory_curves(program)
    figure = Figure(figsize=(9, 3.2 * max(1, len(curves)) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"internal memory of {program.name or 'the net'}")
    plots = figure.subplots(max(1, len(curves)), 1, squeeze=False)[:, 0]
    if not curves:
        plots[0].text(0.5, 0.5, "the net keeps all of its blobs: nothing is planned", ha="center")
        plots[0].set_axis_off()
    for axes, curve in zip(plots, curves, strict=False):
        unit, name = _unit(max(curve.arena, curve.lower_bound))
        steps = range(len(curve.live) + 1)
        live = [size / unit for size in curve.live]
        axes.stairs(live, steps, fill=True, alpha=0.5, label="live")
        axes.axhline(
            curve.arena / unit, color="C3", label=f"arena: {curve.arena / unit:,.2f} {name}", linewidth=1.2
        )
        axes.axhline(
            curve.lower_bound / unit,
            color="C2",
            linestyle="--",
            linewidth=1.2,
            label=f"lower bound: {curve.lower_bound / unit:,.2f} {name}",
        )
        axes.plot([], [], " ", label=f"without a plan: {curve.unplanned / unit:,.2f} {name}")
        axes.set(xlabel="step", ylabel=name, title=str(curve.device), xlim=(0, max(1, len(curve.live))))
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    atomic_write(path, picture.getvalue())


def _unit(size: int) -> tuple[int, str]:
    for factor, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= factor:
            return factor, name
    return 1, "bytes"
