"""Communicators and collectives over MPI, on one to four ranks."""

from __future__ import annotations

import pytest

from gpunet.cuda_kernels.sim import toolchain
from tests.mpi_jobs import succeed


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_operations_agree_with_numpy(ranks: int) -> None:
    assert f"{ranks} ranks agree with NumPy" in succeed(ranks, "collectives", str(256 << 20), str(1 << 20))


@pytest.mark.parametrize("ranks", [2, 3])
def test_operations_by_messages(ranks: int) -> None:
    assert f"{ranks} ranks agree with NumPy" in succeed(ranks, "collectives", str(256 << 20), "0")


@pytest.mark.parametrize("board", [0, 100, 5000])
def test_operations_in_pieces(board: int) -> None:
    """Also where some tensors fit the shared memory and others do not."""
    assert "3 ranks agree with NumPy" in succeed(3, "collectives", "1000", str(board))


def test_an_mpi_that_takes_device_memory() -> None:
    """The memory of the fake GPU is the host's, so any MPI can take it: no copies are made."""
    assert "2 ranks reduced in place" in succeed(2, "device_memory", GPUNET_CUDA_AWARE_MPI="1")


@pytest.mark.parametrize("board", [0, 1 << 20])
def test_device_memory_by_way_of_the_host(board: int) -> None:
    """One copy from the device and one to it, and MPI works on the page-locked memory between them."""
    assert "2 ranks reduced in page-locked memory" in succeed(2, "staged_memory", str(board))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_operators_on_the_cpu(ranks: int) -> None:
    assert f"{ranks} ranks ran nets on cpu" in succeed(ranks, "operators", "cpu")


@pytest.mark.parametrize("ranks", [1, 2])
def test_operators_on_the_simulated_device(ranks: int) -> None:
    if toolchain.find() is None:
        pytest.skip(toolchain.MISSING)
    assert f"{ranks} ranks ran nets on sim:0" in succeed(ranks, "operators", "sim:0")
