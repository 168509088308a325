"""Communicators and collectives over MPI, on one to four ranks."""

from __future__ import annotations

import pytest

from gpunet.cuda_kernels.sim import toolchain
from tests.mpi_jobs import succeed


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_operations_agree_with_numpy(ranks: int) -> None:
    assert f"{ranks} ranks agree with NumPy" in succeed(ranks, "collectives", str(256 << 20))


def test_operations_in_pieces() -> None:
    assert "3 ranks agree with NumPy" in succeed(3, "collectives", "1000")


def test_an_mpi_that_takes_device_memory() -> None:
    """The memory of the fake GPU is the host's, so any MPI can take it: no copies are made."""
    assert "2 ranks reduced in place" in succeed(2, "device_memory", GPUNET_CUDA_AWARE_MPI="1")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_operators_on_the_cpu(ranks: int) -> None:
    assert f"{ranks} ranks ran nets on cpu" in succeed(ranks, "operators", "cpu")


@pytest.mark.parametrize("ranks", [1, 2])
def test_operators_on_the_simulated_device(ranks: int) -> None:
    if toolchain.find() is None:
        pytest.skip(toolchain.MISSING)
    assert f"{ranks} ranks ran nets on sim:0" in succeed(ranks, "operators", "sim:0")
