"""``gpunet devices``."""

from __future__ import annotations

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

    from gpunet.devices import gpu_count

    click.echo(f"{'cpu':8} available: {_cores()} cores of {platform.machine()}, NumPy {np.__version__}")
    for index in range(max(gpu_count(), 1)):
        _print_device(f"cuda:{index}")
    _print_device("sim:0")
    click.echo(f"{'MPI':8} {_mpi()}")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _print_device(name: str) -> None:
    from gpunet.backends import backend
    from gpunet.devices import parse_device
    from gpunet.errors import DeviceError

    try:
        free, total = backend(parse_device(name)).memory_info()
    except DeviceError as error:
        click.echo(f"{name:8} not available: {error}")
        return
    memory = f": {free / 2**30:.1f} of {total / 2**30:.1f} GiB of memory are free" if total else ""
    click.echo(f"{name:8} available{memory}")


def _mpi() -> str:
    if importlib.util.find_spec("mpi4py") is None:
        return "not available: mpi4py is not installed (pip install 'gpunet[mpi]')"
    return f"available: mpi4py {importlib.metadata.version('mpi4py')}"
