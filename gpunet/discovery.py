"""Which rank of how many this process is, from what its launcher put in the environment.

Nothing of MPI is imported. The launchers that are understood: Hydra (MPICH, Intel MPI), Open MPI, MVAPICH2,
PALS (Cray), and Slurm's ``srun``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpunet.devices import CPU, Device, gpu_count, parse_device
from gpunet.errors import DeviceError


@dataclass(frozen=True)
class Place:
    """Where this process stands in its job.

    Attributes:
        launcher: who started it; empty where nobody did, and it is alone.
        rank, size: its number, and how many there are.
        local_rank, local_size: the same among the processes of its host.
        host: name of the host.
    """

    launcher: str = ""
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = ""


#: For each launcher the variables of rank, size, local rank and local size; the last two may be missing.
#: ``SLURM_PROCID`` and ``SLURM_NTASKS`` are also set in a batch script, which is no rank of the job: those of
#: the step are not.
_VARIABLES: Final = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
     "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PALS", "PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("Hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)  # fmt: skip


def discover(environ: Mapping[str, str] | None = None) -> Place:
    """The place that the environment tells of; that of a process alone where it tells of none.

    Raises :class:`DeviceError` for a variable that holds no sensible number.
    """
    env = os.environ if environ is None else environ
    host = env.get("SLURMD_NODENAME") or socket.gethostname()
    for launcher, rank, size, local_rank, local_size in _VARIABLES:
        if rank in env and size in env:
            place = Place(
                launcher,
                _number(env, rank),
                _number(env, size),
                _number(env, local_rank, 0),
                _slurm_local_size(env) if launcher == "Slurm" else _number(env, local_size, 1),
                host,
            )
            if not 0 <= place.rank < place.size:
                raise DeviceError(
                    f"{rank} is {place.rank} and {size} is {place.size}, wanted a rank below the size"
                )
            return place
    return Place(host=host)


def _number(env: Mapping[str, str], name: str, missing: int = 0) -> int:
    text = env.get(name, "")
    if not text:
        return missing
    if not text.isdecimal():
        raise DeviceError(f"the environment has {name}={text!r}, wanted a whole number")
    return int(text)


def _slurm_local_size(env: Mapping[str, str]) -> int:
    """Tasks of this node: ``SLURM_STEP_TASKS_PER_NODE`` reads ``4(x2),3`` for nodes of 4, 4 and 3 tasks."""
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        count, _, times = part.partition("(x")
        if count.isdecimal():
            counts += [int(count)] * int(times.rstrip(")") or 1)
    node = _number(env, "SLURM_NODEID")
    return counts[node] if node < len(counts) else 1


def local_device(name: str, place: Place) -> Device:
    """The device of a process: the GPU of its local rank for ``auto`` and ``cuda``, else the device named.

    Where the launcher or the user already shows each process one GPU alone (``CUDA_VISIBLE_DEVICES``), that
    is ``cuda:0``. ``sim`` is numbered like ``cuda``.
    """
    if name == "sim":
        return Device("sim", place.local_rank)
    if name not in ("auto", "cuda"):
        return parse_device(name)
    count = gpu_count()
    if name == "auto" and parse_device("auto") == CPU:
        return CPU
    return Device("cuda", place.local_rank % count if count else place.local_rank)
