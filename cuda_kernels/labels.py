"""Class labels that kernels use as indices."""

from __future__ import annotations

from gpunet.buffers import Buffer
from gpunet.cuda_kernels.device_errors import report
from gpunet.kernels import KernelContext


def report_labels(ctx: KernelContext, classes: int) -> tuple[Buffer, int]:
    """The arguments ``errors`` and ``code`` of a kernel that wants labels from 0 to ``classes - 1``."""
    return report(ctx, f"label {{index}} is {{value}}, wanted 0 to {classes - 1} ({classes} classes)")
