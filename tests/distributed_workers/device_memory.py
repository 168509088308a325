"""MPI on the memory of a (fake) GPU, in place."""

from __future__ import annotations

import numpy as np

from gpunet.buffers import Buffer
from gpunet.cuda_kernels.cuda_backend import CudaBackend
from gpunet.devices import Device
from gpunet.distributed.mpi import MpiCommunicator
from tests.test_cuda_backend import fake


def main() -> None:
    ranks = MpiCommunicator(chunk_bytes=100)
    device = CudaBackend(Device("cuda"), fake(memory=64 << 20))
    assert ranks.cuda_aware
    x = Buffer.from_numpy(device, np.arange(60, dtype=np.float32) + ranks.rank, "x")
    device.stream.synchronize()
    copies = len(device.cuda.runtime.copies)
    ranks.all_reduce(x, "max", device.stream)
    ranks.all_reduce(x, "sum", device.stream)
    ranks.broadcast(x, 1, device.stream)
    assert len(device.cuda.runtime.copies) == copies
    want = (np.arange(60, dtype=np.float32) + ranks.size - 1) * ranks.size
    np.testing.assert_array_equal(x.numpy(), want)
    # What needs arithmetic of our own goes through the host.
    ranks.all_reduce(x, "mean", device.stream)
    np.testing.assert_array_equal(x.numpy(), want)
    half = Buffer.from_numpy(device, np.full(5, 1 + ranks.rank, np.float16), "half")
    ranks.all_reduce(half)
    np.testing.assert_array_equal(half.numpy(), np.full(5, 3, np.float16))
    assert len(device.cuda.runtime.copies) > copies
    if ranks.rank == 0:
        print(f"{ranks.size} ranks reduced in place")


main()
