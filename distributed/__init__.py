"""Distributed training: communicators over MPI and NCCL, collectives, and what happens when a rank fails.

A process that was started by ``mpirun``, ``mpiexec``, ``srun`` or ``gpunet launch`` is one rank of a job;
:func:`world` is the communicator of all its ranks. In any other process it is a communicator of one.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Set as AbstractSet
from typing import Final

from gpunet.devices import Device, parse_device
from gpunet.discovery import Place, discover, local_device
from gpunet.distributed import affinity, failure
from gpunet.distributed.agreement import check_same_graph
from gpunet.distributed.communicator import OPS, Communicator, element_type
from gpunet.distributed.failure import CollectiveError, PeerFailed
from gpunet.distributed.single import SingleCommunicator
from gpunet.distributed.start import limited
from gpunet.errors import ArgumentError, DeviceError

__all__ = [
    "OPS",
    "CollectiveError",
    "Communicator",
    "PeerFailed",
    "Place",
    "SingleCommunicator",
    "check_same_graph",
    "discover",
    "element_type",
    "finalize",
    "init",
    "local_device",
    "world",
]

BACKENDS: Final = ("auto", "mpi", "nccl", "single")
_world: Communicator | None = None
#: The cores that this process could use before it was bound to one.
_cores: AbstractSet[int] | None = None
_lock = threading.Lock()
log = logging.getLogger("gpunet")


def world() -> Communicator:
    """The communicator of all ranks of this job, made on first use (:func:`init`)."""
    return _world if _world is not None else init()


def init(backend: str = "auto", device: str | Device | None = None) -> Communicator:
    """Makes the communicator of this process; all ranks call it.

    Args:
        backend: ``mpi``; ``nccl``; ``single``; or ``auto``: one process for itself where no launcher started
            it, else NCCL where ``device`` is a GPU on every rank, else MPI.
        device: where this rank computes; ``auto`` chooses NCCL only if it is given. For ``nccl`` it is the
            GPU of the local rank by default.

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
            _world = _make(backend, device, discover())
        elif backend not in ("auto", _world.name.lower()):
            raise DeviceError(
                f"this process has a communicator over {_world.name} already, wanted {backend} from the start"
            )
        return _world


def finalize() -> None:
    """Closes the communicator of this process; a later :func:`world` makes a new one."""
    global _cores, _world
    with _lock:
        if _world is not None:
            _world.close()
        _world = None
        if _cores is not None:
            affinity.release(_cores)
        _cores = None


def _make(backend: str, device: str | Device | None, place: Place) -> Communicator:
    if backend == "single" or (backend == "auto" and place.size == 1):
        return SingleCommunicator()
    from gpunet.distributed.mpi import MpiCommunicator

    global _cores
    if backend != "nccl" and (device is None or parse_device(device).kind != "cuda"):
        # With a GPU the core is free for other things while it computes.
        _cores = affinity.bind(place)
    # Operations of ranks that have started give up before that, and know more.
    seconds = (failure.patience() + failure.timeout()) / 2 if place.size > 1 else math.inf
    try:
        with limited(seconds, failure.who()):
            ranks = MpiCommunicator()
    except Exception:
        if _cores is not None:
            affinity.release(_cores)
        _cores = None
        raise
    if backend == "mpi" or (backend == "auto" and device is None):
        return ranks
    chosen = local_device("cuda", ranks.place) if device is None else parse_device(device)
    if backend == "auto" and not _all_have_nccl(ranks, chosen):
        return ranks
    from gpunet.distributed.nccl import NcclCommunicator

    if chosen.kind != "cuda":
        raise DeviceError(
            f"NCCL works between GPUs, found device {chosen}, wanted 'cuda:N' or the backend mpi"
        )
    return NcclCommunicator(ranks, chosen)


def _all_have_nccl(ranks: Communicator, device: Device) -> bool:
    """Whether every rank has a GPU of its own and NCCL; all ranks get the same answer."""
    from gpunet.distributed.nccl import load_nccl

    able = device.kind == "cuda"
    try:
        if able:
            load_nccl()
    except DeviceError as error:
        log.warning("%s; the ranks use MPI", error)
        able = False
    found = ranks.all_gather_object([able, ranks.place.host, str(device)])
    shared = len({(host, name) for _, host, name in found}) < len(found)
    hidden = "CUDA_VISIBLE_DEVICES" in os.environ
    return all(has for has, _, _ in found) and (hidden or not shared)
