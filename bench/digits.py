"""Teaching LeNet the digits that come with gpunet, as `gpunet train lenet` does, in a process of its own."""

from __future__ import annotations

import tempfile
import time

from .processes import run
from .rows import Bar, Row, Samples
from .timing import Effort

FIGURE = "digits"
EPOCHS = 10
QUICK_EPOCHS = 2


def measure(effort: Effort) -> list[Row]:
    """One row: seconds from the start of the process to its end, three times. If it is quick: once, for fewer
    epochs and without a bar.
    """
    epochs, repeats = (QUICK_EPOCHS, 1) if effort.quick else (EPOCHS, 3)
    seconds = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            run("-m", "gpunet", "train", "lenet", "--epochs", str(epochs), "--out", f"{folder}/run")
            seconds.append(time.perf_counter() - start)
    case = f"gpunet train lenet --epochs {epochs}"
    bar = None if effort.quick else Bar(30.0, of_ratio=False)
    return [Row(FIGURE, case, unit="s", own=Samples.of(seconds), bar=bar)]
