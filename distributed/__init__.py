"""Distributed training: communicators over MPI and NCCL, collectives, and what happens when a rank fails.

A process that was started by ``mpirun``, ``mpiexec``, ``srun`` or ``gpunet launch`` is one rank of a job;
:func:`world` is the communicator of all its ranks. In any other process it is a communicator of one.
"""

from __future__ import annotations

import threading
from typing import Final

from gpunet.devices import Device
from gpunet.distributed.communicator import OPS, Communicator, element_type
from gpunet.distributed.discovery import Place, discover, local_device
from gpunet.distributed.failure import CollectiveError, PeerFailed
from gpunet.distributed.single import SingleCommunicator
from gpunet.errors import ArgumentError, DeviceError

__all__ = [
    "OPS",
    "CollectiveError",
    "Communicator",
    "PeerFailed",
    "Place",
    "SingleCommunicator",
    "discover",
    "element_type",
    "finalize",
    "init",
    "local_device",
    "world",
]

BACKENDS: Final = ("auto", "mpi", "nccl", "single")
_world: Communicator | None = None
_lock = threading.Lock()


def world() -> Communicator:
    """The communicator of all ranks of this job, made on first use (:func:`init`)."""
    return _world if _world is not None else init()


def init(backend: str = "auto", device: str | Device | None = None) -> Communicator:
    """Makes the communicator of this process; all ranks call it.

    Args:
        backend: ``mpi``; ``nccl``; ``single``; or ``auto``: one process for itself where no launcher started
            it, else NCCL where ``device`` is a GPU on every rank, else MPI.
        device: where this rank computes; needed for NCCL only. By default the one of
            :func:`local_device` for ``auto``.

    Returns:
        The communicator, also of :func:`world` from now on. A second call returns the first one, if it is of
        the kind that is asked for.

    Raises:
        ArgumentError: an unknown backend.
        DeviceError: MPI or NCCL is missing, or there is another communicator already.
    """
    global _world
    if backend not in BACKENDS:
        raise ArgumentError(f"backend {backend!r}, wanted one of {', '.join(BACKENDS)}")
    with _lock:
        if _world is None:
            _world = _make(backend, device)
        elif backend not in ("auto", _world.name.lower()):
            raise DeviceError(
                f"this process has a communicator over {_world.name} already, wanted {backend} from the start"
            )
        return _world


def finalize() -> None:
    """Closes the communicator of this process; a later :func:`world` makes a new one."""
    global _world
    with _lock:
        if _world is not None:
            _world.close()
        _world = None


def _make(backend: str, device: str | Device | None) -> Communicator:
    place = discover()
    if backend == "single" or (backend == "auto" and place.size == 1):
        return SingleCommunicator()
    from gpunet.distributed.mpi import MpiCommunicator

    return MpiCommunicator()
