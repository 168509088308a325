"""How long `import gpunet` takes, in fresh processes."""

from __future__ import annotations

import time

from . import counterpart
from .processes import run
from .rows import Bar, Row, Samples
from .timing import Effort

FIGURE = "import"


def measure(effort: Effort) -> list[Row]:
    """Rows for the import alone, as the process itself measures it, and for the whole process, with the start
    of Python.
    """
    with_torch = counterpart.INSTALLED and not effort.quick
    modules = ["gpunet", "numpy", *(["torch"] if with_torch else [])]
    inside: dict[str, list[float]] = {name: [] for name in modules}
    whole: dict[str, list[float]] = {name: [] for name in modules}
    for name in modules:
        _seconds(name)  # Files are read from the disk and compiled once.
    for _ in range(3 if effort.quick else 7):
        for name in modules:
            for series, value in zip((inside, whole), _seconds(name), strict=True):
                series[name].append(value)
    own = Samples.of(inside["gpunet"])
    bar = Bar(0.3, of_ratio=False)
    rows = [
        Row(
            FIGURE,
            "import gpunet",
            "s",
            own,
            Samples.of(inside["numpy"]),
            "import numpy",
            _ratios(inside, "numpy"),
            bar,
        ),
        Row(FIGURE, "python -c 'import gpunet'", "s", Samples.of(whole["gpunet"])),
    ]
    if with_torch:
        others = Samples.of(inside["torch"])
        rows.append(Row(FIGURE, "import gpunet", "s", own, others, "import torch", _ratios(inside, "torch")))
    return rows


def _ratios(series: dict[str, list[float]], other: str) -> Samples:
    return Samples.of([a / b for a, b in zip(series["gpunet"], series[other], strict=True)])


def _seconds(module: str) -> tuple[float, float]:
    """Seconds of the import, and of the whole process."""
    code = f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    start = time.perf_counter()
    inside = float(run("-c", code))
    return inside, time.perf_counter() - start
