"""Class labels that kernels use as indices."""

from __future__ import annotations

import numpy as np

from gpunet.cpu_fallback.precision import Array
from gpunet.errors import KernelError


def check_labels(labels: Array, classes: int) -> None:
    """Raises :class:`KernelError` unless all ``labels`` (integers) are from 0 to ``classes - 1``."""
    if labels.size == 0 or (labels.min() >= 0 and labels.max() < classes):
        return
    index = int(np.argmax((labels < 0) | (labels >= classes)))
    raise KernelError(f"label {index} is {labels[index]}, wanted 0 to {classes - 1} ({classes} classes)")
