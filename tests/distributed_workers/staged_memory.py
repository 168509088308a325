"""Tensors of a (fake) GPU, and an MPI that does not take its memory; `staged_memory BOARD_BYTES`."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gpunet.buffers import Buffer
from gpunet.cuda_kernels.cuda_backend import CudaBackend
from gpunet.devices import Device
from gpunet.distributed.mpi import MpiCommunicator
from tests.test_cuda_backend import fake


class Watched(MpiCommunicator):
    """Notes the arrays on the host that are reduced."""

    def __init__(self, board_bytes: int) -> None:
        self.places: list[int] = []
        super().__init__(board_bytes=board_bytes)

    def _all_reduce(self, x: Any, op: str, stream: Any) -> None:
        if isinstance(x, np.ndarray):
            self.places.append(x.ctypes.data)
        super()._all_reduce(x, op, stream)


def main() -> None:
    ranks = Watched(int(sys.argv[1]))
    device = CudaBackend(Device("cuda"), fake(memory=64 << 20))
    runtime = device.cuda.runtime
    # Larger than the pieces that ordinary arrays are copied in.
    for size in (2_000_000, 7, 0, 1000):
        for op, factor in (("sum", 3), ("mean", 1.5), ("max", 2)):
            x = Buffer.from_numpy(device, np.arange(size, dtype=np.float32) * (ranks.rank + 1), "x")
            device.stream.synchronize()
            before = len(runtime.copies)
            ranks.all_reduce(x, op, device.stream)
            assert len(runtime.copies) == before + 2, (size, op)
            np.testing.assert_array_equal(x.numpy(), np.arange(size, dtype=np.float32) * factor)
    # The memory of the first, largest tensor serves all.
    assert len(set(ranks.places)) == 1
    assert ranks.places[0] in runtime.blocks

    # Two copies in turn wait for each other.
    x = Buffer.from_numpy(device, np.full(5, ranks.rank, np.float16), "x")
    out = Buffer.from_numpy(device, np.zeros(10, np.float16), "out")
    ranks.all_gather(x, out, device.stream)
    np.testing.assert_array_equal(out.numpy(), np.repeat(np.arange(2), 5))
    # One rank's tensor is on its device, and the other's on the host.
    mixed: Any = x if ranks.rank else np.zeros(5, np.float16)
    ranks.all_reduce(mixed)
    np.testing.assert_array_equal(mixed.numpy() if ranks.rank else mixed, np.ones(5))
    ranks.close()
    if ranks.rank == 0:
        print("2 ranks reduced in page-locked memory")


main()
