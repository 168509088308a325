"""``gpunet devices``."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform

import click

from gpunet.cli import Command


@click.command(cls=Command)
def command() -> None:
    """Tell which devices nets can run on here, and what is missing for others."""
    import numpy as np

    click.echo(f"cpu      available: {_cores()} cores of {platform.machine()}, NumPy {np.__version__}")
    click.echo(f"cuda     {_cuda()}")
    click.echo(f"MPI      {_mpi()}")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cuda() -> str:
    """What of a GPU is there: the driver, CuPy, a device."""
    missing = []
    if not _has_driver():
        missing.append("the NVIDIA driver (https://www.nvidia.com/drivers)")
    if importlib.util.find_spec("cupy") is None:
        missing.append(
            "CuPy (pip install 'gpunet[cuda12]' or 'gpunet[cuda13]', whichever the driver supports)"
        )
    if missing:
        return f"not available, missing: {'; '.join(missing)}"
    try:
        cupy = importlib.import_module("cupy")
        count = cupy.cuda.runtime.getDeviceCount()
        names = [cupy.cuda.runtime.getDeviceProperties(i)["name"].decode() for i in range(count)]
    except Exception as error:  # CuPy raises errors of its own for whatever is wrong with a driver or toolkit
        return f"not available: CuPy finds no device ({' '.join(str(error).split())})"
    return "available: " + ", ".join(f"cuda:{i} {name}" for i, name in enumerate(names))


def _has_driver() -> bool:
    import ctypes

    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False


def _mpi() -> str:
    if importlib.util.find_spec("mpi4py") is None:
        return "not available, missing: mpi4py (pip install 'gpunet[mpi]')"
    return f"available: mpi4py {importlib.metadata.version('mpi4py')}"
