"""The communicator over MPI, by mpi4py; for tensors on the host, and on devices by way of it.

Only what the MPI standard has is used, so MPICH, Open MPI and their kin serve alike. Before an operation of
all ranks they exchange what they are about to do, so that a disagreement is an error with names and not a
hang or a wrong number; that exchange is also where ranks wait for each other, with sleeps that grow. Then
data moves by non-blocking operations in place, in pieces. Ranks of one host exchange through memory that they
share (:mod:`gpunet.distributed.board`), small tensors at once with what they are about to do with them.

Sums of half types: each rank gets a part of the elements from all others, adds them in float32 in the order
of the ranks, rounds once, and sends the result to all. That moves as few bytes as a ring and gives all ranks
the same bits.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpunet import backends
from gpunet.buffers import Buffer
from gpunet.discovery import Place, discover
from gpunet.distributed import failure
from gpunet.distributed.board import SLOT_BYTES, Board
from gpunet.distributed.communicator import (
    KINDS,
    MAX,
    MEAN,
    MIN,
    OPS,
    SUM,
    Array,
    Communicator,
    Tensor,
)
from gpunet.distributed.single import copy_tensor
from gpunet.distributed.staging import Staging
from gpunet.dtypes import NUMPY_TO_PROTO, is_half
from gpunet.errors import DeviceError

if TYPE_CHECKING:
    from gpunet.backends import Stream

#: Most bytes that one call of MPI moves for a rank; counts have to fit into 31 bits.
CHUNK_BYTES: Final = 256 << 20
#: How often a request is tested at once before the waiting rank sleeps, and how long sleeps are (seconds).
_SPINS: Final = 30
_SHORT_SLEEP: Final = 2e-5
_LONG_SLEEP: Final = 2e-3
_CUDA_AWARE_VARIABLE: Final = "GPUNET_CUDA_AWARE_MPI"
#: Operations whose tensor, where it is small, goes with the agreement.
_CARRIED: Final = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")
#: How many numbers say what a rank is about to do.
_WORDS: Final = 4


def load_mpi() -> Any:
    """The module ``mpi4py.MPI``, which starts MPI when it is first imported.

    Raises :class:`DeviceError` with what is missing and how to get it.
    """
    try:
        return importlib.import_module("mpi4py.MPI")
    except ImportError as error:
        raise DeviceError(
            f"MPI cannot be used: {error}; pip install 'gpunet[mpi]' brings mpi4py and an MPI with mpirun"
        ) from error
    except RuntimeError as error:
        raise DeviceError(
            f"MPI cannot be used: mpi4py finds no MPI library ({error}); pip install 'gpunet[mpi]' brings one"
        ) from error


class MpiCommunicator(Communicator):
    """All ranks of ``MPI_COMM_WORLD``.

    Args:
        chunk_bytes: most bytes that one call of MPI moves.
        board_bytes: most bytes of a tensor that goes through shared memory, where all ranks are on one host;
            0 uses messages alone.

    Raises:
        DeviceError: there is no MPI, or it is not the one of the ``mpirun`` that started this process.
    """

    name = "MPI"

    def __init__(self, chunk_bytes: int = CHUNK_BYTES, board_bytes: int = SLOT_BYTES) -> None:
        self.mpi = mpi = load_mpi()
        told = discover()
        world = mpi.COMM_WORLD
        if told.size > 1 and world.Get_size() == 1:
            raise DeviceError(
                f"{told.launcher} started this process as rank {told.rank} of {told.size}, but its "
                f"MPI library ({_library(mpi)}) sees one process alone; wanted the mpirun of this library"
            )
        # A communicator of our own: messages of others on the world cannot be taken for ours.
        self.comm = world.Dup()
        local = world.Split_type(mpi.COMM_TYPE_SHARED)
        place = Place(
            told.launcher or "MPI",
            int(world.Get_rank()),
            int(world.Get_size()),
            int(local.Get_rank()),
            int(local.Get_size()),
            told.host,
        )
        local.Free()
        super().__init__(place)
        self.chunk_bytes = chunk_bytes
        self.cuda_aware = cuda_aware(mpi)
        self._ops = {SUM: mpi.SUM, MEAN: mpi.SUM, MAX: mpi.MAX, MIN: mpi.MIN}
        self._intents = np.zeros((self.size, _WORDS), np.int64)
        alone = 1 < self.size == place.local_size and board_bytes > 0
        self._board = Board(mpi, self.comm, board_bytes) if alone else None
        self._staging = Staging()
        #: Whether the agreement on the operation under way came with the data of all ranks.
        self._carried = False
        failure.install(place, world.Abort if mpi.Query_thread() == mpi.THREAD_MULTIPLE else os._exit)
        if self.size > 1 and not _monitor_asked:
            _monitor_asked.append(True)
            self._start_monitor()

    # ---- waiting ----

    def _wait(self, *requests: Any, patient: bool = False) -> None:
        """Waits until the requests are done, and not for ever.

        ``patient`` is for requests that may take long to begin: sleeps grow then.
        """
        for request in requests:
            for _ in range(_SPINS):
                if request.Test():
                    break
            else:
                self._sleep_until(request.Test, patient)

    def _sleep_until(self, done: Callable[[], bool], patient: bool) -> None:
        start = time.monotonic()
        limit = failure.patience()
        while not done():
            failure.check()
            waited = time.monotonic() - start
            if waited > limit:
                raise failure.late(waited)
            time.sleep(min(_LONG_SLEEP, max(_SHORT_SLEEP, waited / 8)) if patient else _SHORT_SLEEP)

    def _agree(self, kind: str, x: Tensor | None, op: str, root: int) -> None:
        if self.size == 1:
            return
        self._flush()
        code = KINDS.index(kind) + (len(KINDS) * (OPS.index(op) + 1) if op else 0)
        what = (-1, -1) if x is None else (_type_code(x.dtype), x.size)
        mine = (code, root, *what)
        carried = self._carried = False
        board = self._board
        if board is None:
            self._wait(self.comm.Iallgather(np.array(mine, np.int64), self._intents), patient=True)
            intents = self._intents
        else:
            # A tensor on a device has to come to the host first; ranks may have other kinds of device.
            here = x if isinstance(x, np.ndarray) and kind in _CARRIED and self._fitting(x) else None
            shown = None if kind == "broadcast" and root != self.rank else here
            found = self._round(board, (*mine, here is not None), shown)
            intents, carried = found[:, :_WORDS], bool(found[:, _WORDS].all())
        if (intents == mine).all():
            self._carried = carried
            return
        wrong = [r for r in range(self.size) if (intents[r] != intents[0]).any()]
        texts = [part.decode() for part in self._all_gather_bytes(failure.at().encode())]
        others = "; ".join(f"rank {r} is {texts[r]}" for r in wrong)
        raise failure.CollectiveError(
            f"ranks do not agree on what they do together: rank 0 is {texts[0]}; {others}"
        )

    @staticmethod
    def _flush() -> None:
        """Runs what is queued on simulated devices: a graph that is replayed there may hold collectives,
        which come before one that is called from outside.
        """
        if not failure.in_operator():
            for found in backends.opened():
                if found.simulated:
                    found.stream.synchronize()

    # ---- through shared memory ----

    def _fitting(self, x: Tensor) -> Board | None:
        """The board, for a tensor that goes through it: one that is small, unless MPI takes those of devices
        itself.
        """
        board = self._board
        return board if board and not self.cuda_aware and 0 < x.nbytes <= board.slot_bytes else None

    def _round(self, board: Board, intent: Sequence[int], data: Array | None) -> Array:
        """Shows the other ranks numbers and data, waits for theirs, and returns their numbers."""
        board.show(intent, data)
        if not any(board.complete() for _ in range(_SPINS)):
            self._sleep_until(board.complete, patient=True)
        return board.intents(len(intent))

    def _shown(self, board: Board, x: Array, *, mine: bool = True) -> Array:
        """The tensors of all ranks, a row each; ``x`` is that of this rank, if it has one to show."""
        if self._carried:
            self._carried = False
        else:
            self._round(board, (), x if mine else None)
        return board.data(x.dtype, x.size)

    # ---- operations on the host ----

    def _pieces(self, count: int, itemsize: int) -> list[slice]:
        step = max(1, self.chunk_bytes // itemsize)
        return [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]

    def _all_reduce(self, x: Tensor, op: str, stream: Stream | None) -> None:
        if isinstance(x, Buffer):
            if self._takes(x) and op != MEAN and not is_half(x.dtype):
                for part in self._views(x, stream):
                    self._wait(self.comm.Iallreduce(self.mpi.IN_PLACE, part, self._ops[op]))
                return
            self._staging.run(lambda a: self._all_reduce(a, op, None), [x], stream)
            return
        flat = x.reshape(-1)
        if self.size == 1 or not flat.size:
            return
        if board := self._fitting(flat):
            _combine(self._shown(board, flat), op, flat)
            return
        for piece in self._pieces(flat.size, flat.itemsize):
            self._reduce_piece(flat[piece], op)

    def _reduce_piece(self, x: Array, op: str) -> None:
        if is_half(x.dtype):
            part = -(-x.size // self.size)
            padded = np.zeros(part * self.size, x.dtype)
            padded[: x.size] = x
            mine = self._half_parts(padded, op)
            self._wait(self.comm.Iallgather(_bytes(mine), _bytes(padded)))
            x[:] = padded[: x.size]
            return
        self._wait(self.comm.Iallreduce(self.mpi.IN_PLACE, x, self._ops[op]))
        if op == MEAN:
            np.divide(x, self.size, out=x)

    def _half_parts(self, x: Array, op: str) -> Array:
        """This rank's part of the reduction of ``size`` equal parts of a half type."""
        received = np.empty_like(x)
        self._wait(self.comm.Ialltoall(_bytes(x), _bytes(received)))
        reduced = np.empty(x.size // self.size, x.dtype)
        _combine(received.reshape(self.size, -1), op, reduced)
        return reduced

    def _reduce(self, x: Tensor, root: int, op: str, stream: Stream | None) -> None:
        # All ranks reduce: one way to add, the same bits as all_reduce.
        self._all_reduce(x, op, stream)

    def _broadcast(self, x: Tensor, root: int, stream: Stream | None) -> None:
        if isinstance(x, Buffer):
            if self._takes(x):
                for part in self._views(x.view((x.nbytes,), np.uint8), stream):
                    self._wait(self.comm.Ibcast(part, root))
                return
            self._staging.run(lambda a: self._broadcast(a, root, None), [x], stream)
            return
        data = _bytes(x)
        if self.size == 1:
            return
        if board := self._fitting(data):
            shown = self._shown(board, data, mine=root == self.rank)
            if root != self.rank:
                data[:] = shown[root]
            return
        for piece in self._pieces(data.size, 1):
            self._wait(self.comm.Ibcast(data[piece], root))

    def _all_gather(self, x: Tensor, out: Tensor, stream: Stream | None) -> None:
        if isinstance(x, Buffer) or isinstance(out, Buffer):
            self._staging.run(lambda a, b: self._all_gather(a, b, None), [x, out], stream)
            return
        source, target = _bytes(x), _bytes(out).reshape(self.size, -1)
        if board := self._fitting(source):
            target[:] = self._shown(board, source)
            return
        own = target[self.rank]
        if source.ctypes.data != own.ctypes.data:
            np.copyto(own, source)
        if self.size == 1 or not source.size:
            return
        pieces = self._pieces(source.size, self.size)
        if len(pieces) == 1:
            self._wait(self.comm.Iallgather(self.mpi.IN_PLACE, target))
            return
        for piece in pieces:
            part = np.ascontiguousarray(target[:, piece])
            self._wait(self.comm.Iallgather(self.mpi.IN_PLACE, part))
            target[:, piece] = part

    def _all_gather_rows(self, x: Array, counts: Sequence[int]) -> Array:
        out = np.empty((sum(counts), *x.shape[1:]), x.dtype)
        starts = np.concatenate([[0], np.cumsum(counts)])
        for rank in range(self.size):
            part = out[starts[rank] : starts[rank + 1]]
            if rank == self.rank:
                part[...] = x
            self._broadcast(part, rank, None)
        return out

    def _reduce_scatter(self, x: Tensor, out: Tensor, op: str, stream: Stream | None) -> None:
        if isinstance(x, Buffer) or isinstance(out, Buffer):
            self._staging.run(lambda a, b: self._reduce_scatter(a, b, op, None), [x, out], stream)
            return
        if self.size == 1 or not out.size:
            copy_tensor(out, x, None)
            return
        parts, target = x.reshape(self.size, -1), out.reshape(-1)
        if board := self._fitting(x):
            shown = self._shown(board, x.reshape(-1)).reshape(self.size, self.size, -1)
            _combine(shown[:, self.rank], op, target)
            return
        for piece in self._pieces(target.size, target.itemsize * self.size):
            source = np.ascontiguousarray(parts[:, piece])
            if is_half(x.dtype):
                target[piece] = self._half_parts(source.reshape(-1), op)
                continue
            result = np.empty(source.shape[1], source.dtype)
            self._wait(self.comm.Ireduce_scatter_block(source, result, self._ops[op]))
            if op == MEAN:
                np.divide(result, self.size, out=result)
            target[piece] = result

    def _send(self, x: Tensor, to: int, tag: int, stream: Stream | None) -> None:
        if isinstance(x, Buffer):
            self._staging.run(lambda a: self._send(a, to, tag, None), [x], stream, back=False)
            return
        data = _bytes(x)
        header = np.array([_type_code(x.dtype), x.size], np.int64)
        self._wait(self.comm.Isend(header, to, tag), patient=True)
        for piece in self._pieces(data.size, 1):
            self._wait(self.comm.Isend(data[piece], to, tag), patient=True)

    def _recv(self, x: Tensor, source: int, tag: int, stream: Stream | None) -> None:
        if isinstance(x, Buffer):
            self._staging.run(lambda a: self._recv(a, source, tag, None), [x], stream)
            return
        data = _bytes(x)
        header = np.empty(2, np.int64)
        self._wait(self.comm.Irecv(header, source, tag), patient=True)
        if [int(n) for n in header] != [_type_code(x.dtype), x.size]:
            raise failure.CollectiveError(
                f"rank {source} sends {header[1]} elements of {_type_name(int(header[0]))} with tag {tag}, "
                f"rank {self.rank} wants {x.size} of {x.dtype.name}"
            )
        for piece in self._pieces(data.size, 1):
            self._wait(self.comm.Irecv(data[piece], source, tag))

    def _barrier(self) -> None:
        """The exchange before every operation is one."""

    def _all_gather_bytes(self, text: bytes) -> list[bytes]:
        lengths = np.empty(self.size, np.int64)
        self._all_gather(np.array([len(text)], np.int64), lengths, None)
        longest = int(lengths.max())
        mine = np.zeros(longest, np.uint8)
        mine[: len(text)] = np.frombuffer(text, np.uint8)
        out = np.zeros((self.size, longest), np.uint8)
        self._all_gather(mine, out, None)
        return [row[:length].tobytes() for row, length in zip(out, lengths, strict=True)]

    # ---- devices ----

    def _recorded(
        self, work: Callable[..., None], buffers: Sequence[Tensor], stream: Stream | None, reads: int
    ) -> bool:
        """Records the call of an operation on a simulated device that is captured; whether that was so."""
        first = buffers[0]
        if not isinstance(first, Buffer):
            return False
        queue = stream or first.backend.stream
        if not queue.capturing:
            return False
        if not first.backend.simulated:
            raise DeviceError(
                "a collective over MPI cannot be captured as a graph, wanted NCCL, or the engine "
                "async_scheduling"
            )
        where = failure.operator_now()

        def call(*arrays: Array) -> None:
            with failure.operator(*where):
                work(*arrays)

        first.backend.call_host(call, [b for b in buffers if isinstance(b, Buffer)], queue, reads)
        return True

    def _takes(self, x: Buffer) -> bool:
        """Whether MPI is given the memory of a buffer itself."""
        return self.cuda_aware and not x.backend.simulated

    def _views(self, x: Buffer, stream: Stream | None) -> list[Buffer]:
        """The pieces of a buffer, after the work on the stream that fills it."""
        (stream or x.backend.stream).synchronize()
        pieces = self._pieces(x.size, x.dtype.itemsize)
        sizes = [(p.start * x.dtype.itemsize, p.stop - p.start) for p in pieces]
        return [Buffer(x.backend, x.memory, (n,), x.dtype, x.offset + at, x.name) for at, n in sizes]

    def close(self) -> None:
        """Gives the communicator back to MPI; all ranks call it."""
        self._staging.close()
        if self._board is not None:
            self._board.close()
        self.comm.Free()

    # ---- the monitor ----

    def _start_monitor(self) -> None:
        """Starts the monitor on rank 0 and connects to it from every rank."""
        hosts = self._all_gather_bytes(self.place.host.encode())
        lines = b""
        if self.rank == 0 and os.environ.get(failure.MONITOR_VARIABLE, "1") != "0":
            alone = len(set(hosts)) == 1
            token = secrets.token_hex(16)
            port = _launch_monitor(self.size, "127.0.0.1" if alone else "", token)
            names = ["127.0.0.1"] if alone else _addresses()
            lines = "\n".join([str(port), token, *names]).encode()
        lines = self._all_gather_bytes(lines)[0]
        if lines:
            port_text, token, *names = lines.decode().split("\n")
            failure.connect(names, int(port_text), token)


def _launch_monitor(size: int, host: str, token: str) -> int:
    """Starts the monitor; the port that it listens on."""
    script = Path(__file__).with_name("monitor.py")
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    _monitors.append(process)
    limits = {"silence": 0.6 * failure.timeout(), "grace": 0.2 * failure.timeout()}
    if not failure.aborts():
        limits["grace"] = math.inf
    settings = json.dumps({"size": size, "host": host, "token": token, **limits})
    if process.stdin is None or process.stdout is None:
        raise DeviceError("the monitor was started without pipes")
    process.stdin.write(settings.encode() + b"\n")
    process.stdin.close()
    port = int(process.stdout.readline())
    process.stdout.close()
    return port


#: Whether the monitor of this job was started: one serves all communicators of a process.
_monitor_asked: Final[list[bool]] = []
#: Kept, so that nothing waits for them when they are collected.
_monitors: Final[list[subprocess.Popen[bytes]]] = []


def _addresses() -> list[str]:
    """Names and addresses under which other hosts may reach this one, the likeliest first."""
    name = socket.gethostname()
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        found = []
    outside = [address for address in found if not address.startswith("127.") and address != "::1"]
    return list(dict.fromkeys([*outside, name]))


def cuda_aware(mpi: Any) -> bool:
    """Whether MPI takes pointers of CUDA devices.

    ``GPUNET_CUDA_AWARE_MPI`` says so, or else MPI itself: by the memory kinds of MPI 4.1, or by the function
    that MPICH and Open MPI have for it.
    """
    told = os.environ.get(_CUDA_AWARE_VARIABLE, "")
    if told:
        return told != "0"
    try:
        kinds = mpi.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or ""
    except mpi.Exception:
        kinds = ""
    if "cuda" in kinds:
        return True
    try:
        query = ctypes.CDLL(mpi.__file__).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return False
    query.restype = ctypes.c_int
    return bool(query())


def _library(mpi: Any) -> str:
    return str(mpi.Get_library_version()).strip("\0 \n").splitlines()[0]


def _combine(parts: Array, op: str, out: Array) -> None:
    """Reduces the rows of ``parts``, in their order; sums of half types are made in float32."""
    if op in (MAX, MIN):
        (np.maximum if op == MAX else np.minimum).reduce(parts, axis=0, out=out)
        return
    half = is_half(parts.dtype)
    total = parts[0].astype(np.float32) if half else out
    if not half:
        np.copyto(out, parts[0])
    for part in parts[1:]:
        np.add(total, part, out=total)
    if op == MEAN:
        np.divide(total, len(parts), out=total)
    if half:
        with np.errstate(over="ignore"):
            out[...] = total


def _bytes(x: Array) -> Array:
    """The bytes of a C-contiguous array, not a copy."""
    return x.reshape(-1).view(np.uint8)


def _type_code(dtype: np.dtype) -> int:
    """A number that ranks share for an element type."""
    found = NUMPY_TO_PROTO.get(dtype)
    return (
        int(found)
        if found is not None
        else sum(c << (8 * (i % 6)) for i, c in enumerate(dtype.name.encode()))
    )


def _type_name(code: int) -> str:
    return next((d.name for d, t in NUMPY_TO_PROTO.items() if int(t) == code), "another type")
