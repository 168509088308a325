"""Communicators and collectives over MPI, on one to four ranks."""

from __future__ import annotations

import pytest

from gpunet.cuda_kernels.sim import toolchain
from tests.mpi_jobs import succeed


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [256 << 20, 64], ids=["whole", "pieces"])
def test_operations_agree_with_numpy(ranks: int, chunk: int) -> None:
    assert f"{ranks} ranks agree with NumPy" in succeed(ranks, "collectives", str(chunk))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_operators_on_the_cpu(ranks: int) -> None:
    assert f"{ranks} ranks ran nets on cpu" in succeed(ranks, "operators", "cpu")


@pytest.mark.parametrize("ranks", [1, 2])
def test_operators_on_the_simulated_device(ranks: int) -> None:
    if toolchain.find() is None:
        pytest.skip(toolchain.MISSING)
    assert f"{ranks} ranks ran nets on sim:0" in succeed(ranks, "operators", "sim:0")
