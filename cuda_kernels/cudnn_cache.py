"""Plans of cuDNN that were made before: in memory, least recently used first to go, and on disk.

A plan is kept under all that it depends on: the device, the graph (types, shapes, strides, attributes), what
    is allowed (math mode, workspace), the alignment of addresses, and the versions of cuDNN and of its front
    end. On disk, a file holds a line of JSON with that key in full, then the plan as cuDNN serialises it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpunet.cuda_kernels import cache
from gpunet.cuda_kernels.cudnn_graphs import ALIGNMENT, Descriptor, Settings
from gpunet.errors import DeviceError

#: What a description of a device says of one board or of the moment; plans are the same without.
_BOARD: Final = frozenset(["cudaDeviceId", "pciDeviceId", "totalGlobalMem"])


@dataclass(frozen=True)
class Plan:
    """A plan that can be loaded on its device.

    Attributes:
        key: what it depends on, from :func:`plan_key`.
        name: cuDNN's name of the engine with its settings.
        workspace: bytes of scratch.
        data: the plan as cuDNN serialises it.
    """

    key: str
    name: str
    workspace: int
    data: bytes


def plan_key(properties: str, descriptor: Descriptor, settings: Settings, versions: Sequence[str]) -> str:
    """What a plan depends on, as a line of JSON.

    Args:
        properties: the description of the device, as cuDNN writes it.
        descriptor: the graph.
        settings: what its plan may do.
        versions: of cuDNN and of the front end.
    """
    device = {name: value for name, value in json.loads(properties).items() if name not in _BOARD}
    operands = {name: dataclasses.astuple(operand) for name, operand in descriptor.operands().items()}
    parts = {
        "device": device,
        "graph": repr(descriptor),
        "operands": operands,
        "settings": settings.key(),
        "alignment": ALIGNMENT,
        "versions": list(versions),
    }
    return json.dumps(parts, sort_keys=True)


class PlanCache:
    """Plans by key, safe for threads.

    Attributes:
        size: number of plans that are kept in memory.
    """

    def __init__(self, size: int = 1024) -> None:
        self.size = size
        self._found: OrderedDict[str, Plan | DeviceError] = OrderedDict()
        self._lock = threading.RLock()

    def find(self, key: str, make: Callable[[], Plan]) -> Plan:
        """The plan of a key: from memory, from disk, or made now and kept.

        That there is none, a :class:`DeviceError` of ``make``, is kept too, in memory, and raised each time.
        """
        with self._lock:
            found = self._found.get(key)
            if found is None:
                found = read(key)
                if found is None:
                    try:
                        found = make()
                        write(found)
                    except DeviceError as error:
                        found = error
                self._found[key] = found
                while len(self._found) > self.size:
                    self._found.popitem(last=False)
            self._found.move_to_end(key)
        if isinstance(found, DeviceError):
            raise found.with_traceback(None)
        return found

    def clear(self) -> None:
        """Forgets what is in memory."""
        with self._lock:
            self._found.clear()

    def __len__(self) -> int:
        return len(self._found)


def path(key: str) -> Path:
    """The file of a plan."""
    return cache.folder("cudnn") / f"{cache.key(key)}.plan"


def write(plan: Plan) -> None:
    """Keeps a plan on disk."""
    digest = hashlib.sha256(plan.data).hexdigest()
    header = {"key": plan.key, "name": plan.name, "workspace": plan.workspace, "sha256": digest}
    cache.write(path(plan.key), json.dumps(header).encode() + b"\n" + plan.data)


def read(key: str) -> Plan | None:
    """The plan of a key from disk; ``None`` if there is none, or the file is damaged."""
    try:
        line, _, data = path(key).read_bytes().partition(b"\n")
        header = json.loads(line)
        if header["key"] != key or header["sha256"] != hashlib.sha256(data).hexdigest():
            return None
        return Plan(key, str(header["name"]), int(header["workspace"]), data)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def times(
    runtime: Any, stream: int, launches: Sequence[Callable[[], None]], repeats: int = 5
) -> list[float | None]:
    """Milliseconds that each launch takes on a stream, the least of several tries; ``None`` for those that
    raise.

    Args:
        runtime: CuPy's bindings of the CUDA runtime, its device being the current one.
        stream: the ``cudaStream_t``.
        launches: put their work on the stream; each runs once more before, to warm up.
        repeats: number of tries.
    """
    events = [int(runtime.eventCreate()), int(runtime.eventCreate())]
    try:
        return [_time(runtime, stream, launch, repeats, events) for launch in launches]
    finally:
        for event in events:
            runtime.eventDestroy(event)


def _time(
    runtime: Any, stream: int, launch: Callable[[], None], repeats: int, events: Sequence[int]
) -> float | None:
    start, stop = events
    best: float | None = None
    # A candidate that fails is one fewer: the others remain.
    with contextlib.suppress(Exception):
        launch()
        for _ in range(repeats):
            runtime.eventRecord(start, stream)
            launch()
            runtime.eventRecord(stop, stream)
            runtime.eventSynchronize(stop)
            taken = float(runtime.eventElapsedTime(start, stop))
            best = taken if best is None else min(best, taken)
        return best
    return None
