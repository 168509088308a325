"""What a benchmark ran on."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

import gpunet
from gpunet.cores import usable_cores

from . import counterpart


def describe() -> dict[str, str]:
    """CPU, cores, load, and the versions and threads of what computes; load is that of the moment."""
    found = {
        "cpu": _cpu(),
        "cores": f"{len(usable_cores())} usable of {os.cpu_count()}",
        "load": f"{load()} at the start",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "gpunet": gpunet.__version__,
        "numpy": f"{np.__version__}, {_blas()}",
    }
    if counterpart.INSTALLED:
        torch = counterpart.torch()
        found["torch"] = f"{torch.__version__}, {torch.get_num_threads()} threads"
    else:
        found["torch"] = "not installed"
    return found


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def load() -> str:
    """Processes that ran or wanted to, averaged over the last minute."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def _blas() -> str:
    settings: dict[str, Any] = np.show_config(mode="dicts")  # type: ignore[assignment]
    blas = settings["Build Dependencies"]["blas"]
    return f"{blas['name']} {blas['version']}, {_blas_threads()} threads"


def _blas_threads() -> str:
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
            if os.environ.get(variable):
                return os.environ[variable]
        return str(len(usable_cores()))
    pools = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    return str(max(pools, default=1))
