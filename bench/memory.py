"""Peak memory of training steps, over the tensors that live in the workspace afterwards.

Each case runs in a process of its own, twice:

- *allocated*: the most that Python and NumPy had allocated at a time during three steps, less what they had
  before the workspace was made, by `tracemalloc`, to which NumPy reports its arrays.
- *resident*: the greatest resident memory of the process (VmHWM of Linux) during three steps, less what was
  resident before the workspace was made. It also counts what BLAS keeps for itself and what the allocator
  loses, some megabytes whatever the net.

The counterpart is the sum of all tensors of the workspace after the last step (parameters, their gradients
and momenta, activations and their gradients): all of them can be fetched then, so all are live. Memory that
several of them share counts once.
"""

from __future__ import annotations

import re
import sys
import tracemalloc
from pathlib import Path

import numpy as np

import gpunet

from . import training
from .processes import run
from .rows import Bar, Row, Samples
from .timing import Effort

FIGURE = "memory"
STEPS = 3
WARM_UP = training.Case("mlp", batch=1, channels=1, side=4)
#: Of Linux; the first resets the peak when `5` is written to it.
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
MIB = 1 / 2**20


def measure(effort: Effort) -> list[Row]:
    """Rows for LeNet and ResNet-20, allocated and resident."""
    rows = []
    # A small model is measured in a moment; the large one needs a while to be built.
    for number, case in enumerate(training.CASES[:1] if effort.quick else training.CASES):
        for kind in ("allocated", *(["resident"] if STATUS.exists() else [])):
            peak, tensors = map(float, run("-m", "gpunet.bench.memory", kind, str(number)).split())
            rows.append(
                Row(
                    FIGURE,
                    f"{case.title}, {kind}",
                    unit="MiB",
                    own=Samples((peak * MIB,)),
                    other=Samples((tensors * MIB,)),
                    counterpart="all tensors",
                    ratios=Samples((peak / tensors,)),
                    bar=Bar(1.3),
                )
            )
    return rows


def tensor_bytes(workspace: gpunet.Workspace) -> int:
    """Bytes of all tensors, shared memory once."""
    ends: dict[int, int] = {}
    for name in workspace.blobs():
        value = workspace.value(name)
        if isinstance(value, np.ndarray) and value.size:
            low = value.__array_interface__["data"][0]
            ends[low] = max(ends.get(low, 0), low + value.nbytes)
    total = reached = 0
    for low, high in sorted(ends.items()):
        total += max(0, high - max(low, reached))
        reached = max(reached, high)
    return total


def _resident(field: str) -> int:
    """VmRSS or VmHWM, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(encoding="ascii"), re.MULTILINE)
    if found is None:
        raise OSError(f"{STATUS} has no {field}")
    return int(found[1]) * 1024


def _probe(kind: str, number: int) -> tuple[int, int]:
    """Bytes at the peak, and bytes of all tensors."""
    case = training.CASES[number]
    # Modules and caches come once in a process: the smallest step brings them.
    training.start(WARM_UP)[-1]()
    if kind == "allocated":
        tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0] if kind == "allocated" else _resident("VmRSS")
    _, workspace, step = training.start(case)
    if kind == "allocated":
        tracemalloc.reset_peak()
    else:
        CLEAR.write_text("5", encoding="ascii")
    for _ in range(STEPS):
        step()
    after = tracemalloc.get_traced_memory()[1] if kind == "allocated" else _resident("VmHWM")
    return after - before, tensor_bytes(workspace)


if __name__ == "__main__":
    print(*_probe(sys.argv[1], int(sys.argv[2])))
