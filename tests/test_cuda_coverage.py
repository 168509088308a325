"""Every operator that computes has a CUDA kernel; those that have none say why here."""

from __future__ import annotations

import pytest

from gpunet import kernels

_COUNTER = "a number of the host that the schedule of the learning rate and checkpoints read"
_LIST = "its values are arguments of the definition: made on the host once, in an init net, and copied"
_GROUP = "a group of processes is an object of the host"
_COPY = "copies are steps of the program, which the backend runs itself"

#: Operators without a CUDA kernel, and why.
HOST = {
    "AllgatherSlices": "its result has as many rows as all ranks sent: only the host knows how many",
    "AtomicIter": _COUNTER,
    "Barrier": "the ranks wait for each other on the host",
    "CloneCommonWorld": _GROUP,
    "CopyCPUToGPU": _COPY,
    "CopyGPUToCPU": _COPY,
    "CreateCommonWorld": _GROUP,
    "CreateMutex": "a lock is an object of the host",
    "DestroyCommonWorld": _GROUP,
    "EnsureCPUOutput": _COPY,
    "GivenTensorBoolFill": _LIST,
    "GivenTensorByteStringToUInt8Fill": _LIST,
    "GivenTensorDoubleFill": _LIST,
    "GivenTensorFill": _LIST,
    "GivenTensorInt16Fill": _LIST,
    "GivenTensorInt64Fill": _LIST,
    "GivenTensorIntFill": _LIST,
    "GivenTensorStringFill": _LIST,
    "Iter": _COUNTER,
    "LearningRate": "one number from one number, by schedules with branches and powers in float64",
    "NumpyTile": "the repeats are data that decides the shape of the result",
    "StopUnless": "the host decides whether the rest of the net runs",
    "UpdateLossScale": "the host decides whether a step is skipped, and says so",
}


@pytest.fixture(scope="module")
def registered() -> dict[str, set[str]]:
    """Types with a kernel, by device kind."""
    found: dict[str, set[str]] = {}
    for device in ("cpu", "cuda"):
        kernels.load(device)
    for (type, device, _), kernel in kernels._kernels.items():
        if kernel.function.__module__.startswith("gpunet."):  # other tests register some of their own
            found.setdefault(device, set()).add(type)
    return found


def test_what_has_no_cuda_kernel_says_why(registered: dict[str, set[str]]) -> None:
    missing = registered["cpu"] - registered["cuda"]
    assert missing - HOST.keys() == set(), "these compute: write a kernel, or say here why there is none"
    assert HOST.keys() - missing == set(), "these have a kernel or are gone: their reasons are none"


def test_numpy_kernels_are_the_reference_of_all(registered: dict[str, set[str]]) -> None:
    assert registered["cuda"] - registered["cpu"] == set()
