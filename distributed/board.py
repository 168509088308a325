"""Memory that all ranks of one host share, for what is small and has to be quick.

Each rank has a line for what it is about to do, and a slot for its data. It writes both, raises its counter,
and waits until the counters of all are as high. Then everybody can read what everybody wrote: one wait for an
agreement and its data, where messages need several, in each of which a thread of every rank has its turn.

There are two sets of lines and slots, used in turns. A rank that writes into one has seen all counters of the
round in between, so nobody reads any more what was there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpunet.distributed.communicator import Array

#: Most bytes of a slot, and of the memory in all: containers have little of the shared kind.
SLOT_BYTES: Final = 1 << 20
MOST_BYTES: Final = 16 << 20
#: Bytes that no two ranks write to; a multiple of a line of the cache.
_LINE: Final = 128
_WORDS: Final = _LINE // 8


class Board:
    """The shared memory of a communicator all of whose ranks are on one host; all of them make it.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: a communicator of MPI.
        most: upper bound of :attr:`slot_bytes`.

    Attributes:
        slot_bytes: what a rank can show the others at once.
    """

    def __init__(self, mpi: Any, comm: Any, most: int) -> None:
        size = int(comm.Get_size())
        self._rank = int(comm.Get_rank())
        self.slot_bytes = min(SLOT_BYTES, most, MOST_BYTES // (2 * size))
        room = -(-self.slot_bytes // _LINE) * _LINE
        # Rank 0 provides all of it.
        nbytes = size * (3 * _LINE + 2 * room)
        self._window = mpi.Win.Allocate_shared(nbytes if self._rank == 0 else 0, 1, comm=comm)
        memory: Array = np.frombuffer(self._window.Shared_query(0)[0], np.uint8)
        words = memory[: 3 * size * _LINE].view(np.int64).reshape(3, size, _WORDS)
        self._counters, self._intents = words[0, :, 0], words[1:]
        self._slots = memory[3 * size * _LINE :].reshape(2, size, room)
        self._count = 0
        self._window.Lock_all()
        if self._rank == 0:
            self._counters[:] = 0
        self._window.Sync()
        comm.Barrier()
        self._window.Sync()

    def show(self, intent: Sequence[int], data: Array | None) -> None:
        """Begins a round: shows the others some numbers (16 at most), and the bytes of ``data``, a contiguous
        array that fits a slot.
        """
        self._count += 1
        half = self._count % 2
        self._intents[half, self._rank, : len(intent)] = intent
        if data is not None:
            self._slots[half, self._rank, : data.nbytes] = data.reshape(-1).view(np.uint8)
        # Nobody may see the counter before what it stands for.
        self._window.Sync()
        self._counters[self._rank] = self._count

    def complete(self) -> bool:
        """Whether all ranks have shown what they have for this round."""
        if self._counters.min() < self._count:
            return False
        self._window.Sync()
        return True

    def intents(self, length: int) -> Array:
        """The numbers of all ranks, a row each."""
        found: Array = self._intents[self._count % 2, :, :length]
        return found

    def data(self, dtype: np.dtype, size: int) -> Array:
        """What the ranks have shown, a row of ``size`` elements each; it stays until the next round."""
        rows = self._slots[self._count % 2, :, : size * dtype.itemsize]
        found: Array = rows.view(dtype)
        return found

    def close(self) -> None:
        """Gives the memory back; all ranks call it."""
        del self._counters, self._intents, self._slots
        self._window.Unlock_all()
        self._window.Free()
