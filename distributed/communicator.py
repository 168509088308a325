"""The protocol of communicators: what ranks do together.

All ranks of a job call the same operations, in the same order, with tensors of the same type and size. A
tensor is a C-contiguous NumPy array, or a :class:`~gpunet.buffers.Buffer` on a device with the stream that
the work is to be ordered with.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from gpunet.buffers import Buffer
from gpunet.discovery import Place
from gpunet.distributed import failure
from gpunet.dtypes import bfloat16
from gpunet.errors import ArgumentError, DataTypeError, GpunetError, ShapeError
from gpunet.schema import NUMBERS

if TYPE_CHECKING:
    from gpunet.backends import Stream

Array: TypeAlias = npt.NDArray[Any]
Tensor: TypeAlias = "Array | Buffer"

SUM: Final = "sum"
MEAN: Final = "mean"
MAX: Final = "max"
MIN: Final = "min"
#: How the tensors of the ranks are combined.
OPS: Final = (SUM, MEAN, MAX, MIN)
#: All operations, in an order that ranks share.
KINDS: Final = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_rows", "reduce_scatter", "barrier",
    "all_gather_object", "send", "recv",
)  # fmt: skip
#: Operations that name another rank, and how.
_ROOTED: Final = {"reduce": "to", "broadcast": "from", "send": "to", "recv": "from"}


def element_type(name: str) -> np.dtype:
    """The type of a name; ``bfloat16`` is that of the package ml_dtypes.

    Raises :class:`DataTypeError` for a type that communicators do not take, or whose package is missing.
    """
    if name == "bfloat16":
        return bfloat16()
    try:
        found = np.dtype(name)
    except TypeError:
        raise DataTypeError(f"found {name!r} as an element type, {_wanted_types()}") from None
    check_numbers(found)
    return found


def check_numbers(dtype: np.dtype) -> None:
    """Raises :class:`DataTypeError` for a type that cannot be reduced."""
    if dtype not in NUMBERS:
        raise DataTypeError(f"element type {dtype.name} cannot be reduced, {_wanted_types()}")


def _wanted_types() -> str:
    return "wanted one of " + ", ".join(sorted(t.name for t in NUMBERS))


class Communicator(ABC):
    """The ranks of a job, seen from one of them.

    Every operation raises :class:`~gpunet.distributed.failure.CollectiveError` when ranks do not agree on
    what they do, when another rank has failed, or when one does not come in time.

    Attributes:
        place: rank, size, local rank and host of this process.
    """

    #: What messages call it.
    name: str = ""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._lock = threading.RLock()

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return self.place.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.place.size

    # ---- what users and operators call ----

    def all_reduce(self, x: Tensor, op: str = SUM, stream: Stream | None = None) -> None:
        """Replaces ``x`` on every rank by the sum, mean, maximum or minimum of that of all ranks.

        Sums of float16 and bfloat16 are made in float32 and rounded once, also those of a mean, which is
        divided before it is rounded. All ranks get the same bits. A mean of integers is refused.
        """
        self._check(x, op)
        if self._recorded(lambda a: self.all_reduce(a, op), [x], stream, 0):
            return
        with self._entered("all_reduce", x, op):
            self._all_reduce(x, op, stream)

    def reduce(self, x: Tensor, root: int = 0, op: str = SUM, stream: Stream | None = None) -> None:
        """As :meth:`all_reduce`, but only rank ``root`` gets the result; ``x`` holds anything elsewhere."""
        self._check(x, op)
        self._check_rank("root", root)
        if self._recorded(lambda a: self.reduce(a, root, op), [x], stream, 0):
            return
        with self._entered("reduce", x, op, root):
            self._reduce(x, root, op, stream)

    def broadcast(self, x: Tensor, root: int = 0, stream: Stream | None = None) -> None:
        """Replaces ``x`` on every rank by that of rank ``root``; of any element type."""
        self._check(x)
        self._check_rank("root", root)
        if self._recorded(lambda a: self.broadcast(a, root), [x], stream, 0):
            return
        with self._entered("broadcast", x, "", root):
            self._broadcast(x, root, stream)

    def all_gather(self, x: Tensor, out: Tensor, stream: Stream | None = None) -> None:
        """Fills ``out`` with the elements of ``x`` of rank 0, then those of rank 1, and so on.

        ``out`` has ``size`` times the elements of ``x``; ``x`` may lie in ``out`` where this rank's belong.
        """
        self._check(x)
        self._check(out)
        self._check_sizes("out", out, "x", x)
        if self._recorded(lambda a, b: self.all_gather(a, b), [x, out], stream, 1):
            return
        with self._entered("all_gather", x):
            self._all_gather(x, out, stream)

    def reduce_scatter(self, x: Tensor, out: Tensor, op: str = SUM, stream: Stream | None = None) -> None:
        """Reduces ``x`` over the ranks; rank ``r`` gets the ``r``-th of ``size`` equal parts in ``out``."""
        self._check(x, op)
        self._check(out)
        self._check_sizes("x", x, "out", out)
        if self._recorded(lambda a, b: self.reduce_scatter(a, b, op), [x, out], stream, 1):
            return
        with self._entered("reduce_scatter", x, op):
            self._reduce_scatter(x, out, op, stream)

    def all_gather_rows(self, x: Array) -> Array:
        """Rows of ``x`` of all ranks under each other, rank 0 first; a rank may have none.

        ``x`` is on the host and has at least one dimension; all but the first are the same on all ranks.
        """
        if not isinstance(x, np.ndarray) or x.ndim < 1:
            raise ShapeError(f"found {_describe(x)}, wanted an array on the host with at least one dimension")
        x = np.ascontiguousarray(x)
        self._check(x)
        with self._entered("all_gather_rows", x[:0] if x.ndim == 1 else np.empty(x.shape[1:], x.dtype)):
            counts = self.all_gather_int(x.shape[0])
            return self._all_gather_rows(x, counts)

    def send(self, x: Tensor, to: int, tag: int = 0, stream: Stream | None = None) -> None:
        """Sends ``x`` to one rank, which calls :meth:`recv`; returns when ``x`` may be changed."""
        self._check_peer("to", to)
        self._check(x)
        with self._entered("send", x, "", to):
            self._send(x, to, tag, stream)

    def recv(self, x: Tensor, source: int, tag: int = 0, stream: Stream | None = None) -> None:
        """Receives into ``x`` what rank ``source`` sends; type and size must be the sender's."""
        self._check_peer("source", source)
        self._check(x)
        with self._entered("recv", x, "", source):
            self._recv(x, source, tag, stream)

    def barrier(self) -> None:
        """Returns when all ranks have come here."""
        with self._entered("barrier"):
            self._barrier()

    def all_gather_object(self, obj: Any) -> list[Any]:
        """What each rank gave, rank 0 first; anything that JSON can say."""
        try:
            text = json.dumps(obj).encode()
        except (TypeError, ValueError) as error:
            raise DataTypeError(f"cannot send {type(obj).__name__} as JSON: {error}") from error
        with self._entered("all_gather_object"):
            return [json.loads(part) for part in self._all_gather_bytes(text)]

    def all_gather_int(self, value: int) -> list[int]:
        """A whole number of each rank."""
        out = np.empty(self.size, np.int64)
        self.all_gather(np.array([value], np.int64), out)
        return [int(n) for n in out]

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """What rank ``root`` gave; anything that JSON can say."""
        self._check_rank("root", root)
        return self.all_gather_object(obj if self.rank == root else None)[root]

    def abort(self, message: str) -> None:
        """Ends all processes of the job, after ``message`` on standard error."""
        failure.abort(message)

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Gives back what the communicator holds; it is not used any more."""

    # ---- what an implementation does ----

    @abstractmethod
    def _all_reduce(self, x: Tensor, op: str, stream: Stream | None) -> None: ...

    @abstractmethod
    def _reduce(self, x: Tensor, root: int, op: str, stream: Stream | None) -> None: ...

    @abstractmethod
    def _broadcast(self, x: Tensor, root: int, stream: Stream | None) -> None: ...

    @abstractmethod
    def _all_gather(self, x: Tensor, out: Tensor, stream: Stream | None) -> None: ...

    @abstractmethod
    def _all_gather_rows(self, x: Array, counts: Sequence[int]) -> Array: ...

    @abstractmethod
    def _reduce_scatter(self, x: Tensor, out: Tensor, op: str, stream: Stream | None) -> None: ...

    @abstractmethod
    def _send(self, x: Tensor, to: int, tag: int, stream: Stream | None) -> None: ...

    @abstractmethod
    def _recv(self, x: Tensor, source: int, tag: int, stream: Stream | None) -> None: ...

    @abstractmethod
    def _barrier(self) -> None: ...

    @abstractmethod
    def _all_gather_bytes(self, text: bytes) -> list[bytes]: ...

    def _agree(self, kind: str, x: Tensor | None, op: str, root: int) -> None:  # noqa: B027 (some need none)
        """Makes sure that all ranks do the same thing; raises :class:`CollectiveError` on all of them."""

    def _recorded(
        self, work: Callable[..., None], buffers: Sequence[Tensor], stream: Stream | None, reads: int
    ) -> bool:
        """Whether an operation was recorded into a graph in place of being run: where the communicator works
        on the host, and cannot be captured itself. The first ``reads`` of the buffers are only read.
        """
        return False

    # ---- checks ----

    @contextmanager
    def _entered(self, kind: str, x: Tensor | None = None, op: str = "", root: int = 0) -> Iterator[None]:
        """Everything around the work of one operation: what watches see of it, and what its errors say."""
        what = f"{kind}{f' ({op})' if op else ''}{f' of {_describe(x)}' if x is not None else ''}"
        if kind in _ROOTED:
            what += f" {_ROOTED[kind]} {root}"
        with self._lock, failure.inside(what, together=kind not in ("send", "recv")):
            try:
                if kind not in ("send", "recv"):
                    self._agree(kind, x, op, root)
                yield
            except GpunetError:
                raise
            except (MemoryError, KeyboardInterrupt):
                raise
            except Exception as error:
                raise failure.CollectiveError(
                    f"{what} failed on {failure.who()}: {type(error).__name__}: {error}"
                ) from error

    def _check(self, x: Tensor, op: str = "") -> None:
        if not isinstance(x, (np.ndarray, Buffer)):
            raise DataTypeError(f"found {type(x).__name__}, wanted a NumPy array or a buffer on a device")
        if isinstance(x, np.ndarray):
            if not x.flags.c_contiguous:
                raise ShapeError(f"{_describe(x)} is not C-contiguous, wanted numpy.ascontiguousarray of it")
            if x.dtype.hasobject:
                raise DataTypeError("strings and objects cannot be sent as tensors, wanted all_gather_object")
        if op:
            if op not in OPS:
                raise ArgumentError(f"operation {op!r}, wanted one of {', '.join(OPS)}")
            check_numbers(x.dtype)
            if op == MEAN and x.dtype.kind in "iu":
                raise DataTypeError(f"a mean of {x.dtype.name} would be rounded, wanted a floating type")

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ArgumentError(f"{name} is {rank}, wanted 0 to {self.size - 1}")

    def _check_peer(self, name: str, rank: int) -> None:
        self._check_rank(name, rank)
        if rank == self.rank:
            raise ArgumentError(f"{name} is {rank}, this rank itself; wanted another one")

    def _check_sizes(self, many: str, whole: Tensor, one: str, part: Tensor) -> None:
        if whole.dtype != part.dtype:
            raise DataTypeError(f"{many} is {whole.dtype} and {one} is {part.dtype}, wanted one element type")
        if whole.size != part.size * self.size:
            raise ShapeError(
                f"{many} has {whole.size} elements and {one} has {part.size}, wanted {self.size} times as "
                f"many in {many}, for {self.size} ranks"
            )


def _describe(x: object) -> str:
    if isinstance(x, Buffer):
        return f"{x.spec} on {x.backend.device}"
    if isinstance(x, np.ndarray):
        return f"{x.dtype.name} {'x'.join(map(str, x.shape)) or 'scalar'}"
    return type(x).__name__
