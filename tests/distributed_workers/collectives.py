"""Every operation of the communicator, on every element type, against NumPy: `collectives CHUNK_BYTES
BOARD_BYTES`.
"""

from __future__ import annotations

import sys

import numpy as np

from gpunet.distributed.communicator import OPS
from gpunet.distributed.mpi import MpiCommunicator
from gpunet.dtypes import as_dtype, is_float

TYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "int64")
REDUCED = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


def tensors(dtype: str, shape: tuple[int, ...], ranks: int) -> list[np.ndarray]:
    """What each rank has, known to all: whole numbers, whose sums are exact in every type."""
    rng = np.random.default_rng([ord(c) for c in dtype] + [len(shape), *shape])
    return [np.asarray(rng.integers(0, 25, shape)).astype(as_dtype(dtype)) for _ in range(ranks)]


def main() -> None:
    ranks = MpiCommunicator(*map(int, sys.argv[1:]))
    rank, size = ranks.rank, ranks.size
    for dtype in TYPES:
        for shape in ((0,), (), (7,), (3, 5), (2, 0, 3), (1001,)):
            have = tensors(dtype, shape, size)
            for op in OPS:
                if op == "mean" and not is_float(as_dtype(dtype)):
                    continue
                want = REDUCED[op](np.stack(have).astype(np.float64), axis=0).astype(as_dtype(dtype))
                x = have[rank].copy()
                ranks.all_reduce(x, op)
                same(x, want, "all_reduce", op)
                x = have[rank].copy()
                ranks.reduce(x, size - 1, op)
                if rank == size - 1:
                    same(x, want, "reduce", op)
                wide = np.stack([have[rank]] * size)
                part = np.empty(shape, as_dtype(dtype))
                ranks.reduce_scatter(wide, part, op)
                same(part, want, "reduce_scatter", op)
            for root in range(size):
                x = have[rank].copy()
                ranks.broadcast(x, root)
                same(x, have[root], "broadcast", str(root))
            out = np.empty((size, *shape), as_dtype(dtype))
            ranks.all_gather(have[rank], out)
            same(out, np.stack(have), "all_gather")
            out[rank] = have[rank]
            ranks.all_gather(out[rank, ...], out)
            same(out, np.stack(have), "all_gather", "in place")
            if size > 1:
                x = np.empty(shape, as_dtype(dtype))
                if rank % 2:
                    ranks.send(have[rank], (rank + 1) % size, tag=3)
                    ranks.recv(x, rank - 1, tag=3)
                    same(x, have[rank - 1], "recv")
                else:
                    # With an odd number of ranks the last one and the first are both even.
                    if rank == size - 1:
                        ranks.send(have[rank], 0, tag=3)
                        ranks.recv(x, rank - 1, tag=3)
                        same(x, have[rank - 1], "recv")
                    elif rank == 0 and size % 2:
                        ranks.recv(x, size - 1, tag=3)
                        same(x, have[size - 1], "recv")
                        ranks.send(have[rank], 1, tag=3)
                    else:
                        ranks.recv(x, (rank - 1) % size, tag=3)
                        same(x, have[rank - 1], "recv")
                        ranks.send(have[rank], rank + 1, tag=3)
    rows = [np.full((n % 3, 2), n, np.float32) for n in range(size)]
    same(ranks.all_gather_rows(rows[rank]), np.concatenate(rows), "all_gather_rows")
    none = np.empty((0, 4), np.int64)
    same(ranks.all_gather_rows(none), none, "all_gather_rows", "of none")
    assert ranks.all_gather_object({"rank": rank, "é": [1, None]}) == [
        {"rank": r, "é": [1, None]} for r in range(size)
    ]
    assert ranks.all_gather_int(rank * rank) == [r * r for r in range(size)]
    assert ranks.broadcast_object("x" * 1000 if rank == 0 else None) == "x" * 1000
    check_halves(ranks)
    same_bits(ranks)
    ranks.barrier()
    ranks.close()
    # A second one of a process, as a program that closes and begins anew makes it.
    MpiCommunicator().barrier()
    if rank == 0:
        print(f"{size} ranks agree with NumPy")


def check_halves(ranks: MpiCommunicator) -> None:
    """Sums of half types are rounded once, and means divided before: 2048 + 1 is 2048 in float16, 256 + 1 is
    256 in bfloat16.
    """
    x = np.full(5, 2048 if ranks.rank == 0 else 1, np.float16)
    ranks.all_reduce(x)
    same(x, np.full(5, 2048 + ranks.size - 1).astype(np.float16), "all_reduce", "of halves")
    x = np.full(5, 60000, np.float16)
    ranks.all_reduce(x, "mean")
    same(x, np.full(5, 60000, np.float16), "all_reduce", "mean of large halves")
    ranks.all_reduce(x)
    same(np.isinf(x), np.full(5, ranks.size > 1), "all_reduce", "sum of large halves")
    kind = as_dtype("bfloat16")
    x = np.full(5, 256 if ranks.rank == 0 else 1, kind)
    ranks.all_reduce(x)
    same(x, np.full(5, 256 + ranks.size - 1).astype(kind), "all_reduce", "of bfloat16")


def same_bits(ranks: MpiCommunicator) -> None:
    """All ranks get the same bits, whatever the order of the additions."""
    for dtype in map(as_dtype, ("float16", "bfloat16", "float32", "float64")):
        x = np.random.default_rng(ranks.rank).standard_normal(999).astype(dtype)
        ranks.all_reduce(x, "mean")
        assert len(set(ranks.all_gather_object(x.tobytes().hex()))) == 1


def same(got: np.ndarray, want: np.ndarray, *what: str) -> None:
    np.testing.assert_array_equal(got, want, err_msg=" ".join(what))
    assert got.dtype == want.dtype, what


main()
