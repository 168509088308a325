"""``gpunet devices``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Callable
from typing import Final

import click

from gpunet.cli import Command
from gpunet.cores import usable_cores


@click.command(cls=Command)
def command() -> None:
    """Tell which devices and libraries can be used here, and how to get what is missing."""
    import numpy as np

    from gpunet.devices import gpu_count

    click.echo(
        f"{'cpu':8} available: {len(usable_cores())} cores of {platform.machine()}, NumPy {np.__version__}"
    )
    for index in range(max(gpu_count(), 1)):
        _print_device(f"cuda:{index}")
    _print_device("sim:0")
    for library, version in LIBRARIES.items():
        click.echo(f"{library:8} {_library(version)}")
    click.echo(f"{'MPI':8} {_mpi()}")


def _nvrtc() -> str:
    from gpunet.cuda_kernels import nvrtc

    return ".".join(map(str, nvrtc.bindings().getVersion()))


def _cudnn() -> str:
    from gpunet.cuda_kernels import cudnn

    found, front_end = cudnn.versions()
    return f"{found}, front end {front_end}"


def _cublaslt() -> str:
    from gpunet.cuda_kernels import cublaslt

    cublaslt.bindings()
    return f"nvmath {importlib.metadata.version('nvmath-python')}"


def _nccl() -> str:
    from gpunet.distributed import nccl

    return str(nccl.load_nccl().get_version())


def _compiler() -> str:
    from gpunet.cuda_kernels.sim import toolchain
    from gpunet.errors import DeviceError

    found = toolchain.find()
    if found is None:
        raise DeviceError("no C++ compiler for sim:0; wanted g++, clang++, or pip install ziglang")
    return " ".join(found.command)


#: What devices and ranks call, by name; each tells its version or raises DeviceError.
LIBRARIES: Final[dict[str, Callable[[], str]]] = {
    "NVRTC": _nvrtc,
    "cuDNN": _cudnn,
    "cuBLASLt": _cublaslt,
    "NCCL": _nccl,
    "C++": _compiler,
}


def _library(version: Callable[[], str]) -> str:
    from gpunet.errors import DeviceError

    try:
        return f"available: {version()}"
    except DeviceError as error:
        return f"not available: {error}"


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
