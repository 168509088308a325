"""Compression of gradients on their way between ranks.

A compressor is two functions and a state: :meth:`Compressor.compress` appends the operators that make what is
sent of a bucket, :meth:`Compressor.decompress` those that make the gradients of what came, and blobs that
each rank keeps from step to step hold what was not sent. Nothing else knows how gradients are compressed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from gpunet.dtypes import DTypeLike, as_dtype, is_bfloat16, is_half
from gpunet.errors import ArgumentError
from gpunet.operators.gradient_compression import kept
from gpunet.specs import Shape

_FLOAT: Final = 4
_HALF: Final = 2


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        name: of the blob that holds them.
        blobs: the gradients, in the order in which they lie in it.
        shapes: their shapes.
        dtype: their element type.
    """

    name: str
    blobs: tuple[str, ...]
    shapes: tuple[Shape, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return self.size * self.dtype.itemsize


class Emitter(Protocol):
    """Where a compressor puts its operators."""

    def operator(self, type: str, inputs: Sequence[str], outputs: Sequence[str], **args: Any) -> None:
        """Appends an operator."""

    def state(self, name: str, size: int, filler: str = "ConstantFill") -> str:
        """Makes a float32 blob of ``size`` elements that each rank keeps for itself; returns its name.

        It starts equal on all ranks, and is not in checkpoints.
        """


class Compressor(ABC):
    """How gradients are made smaller; see the module.

    Attributes:
        name: what users call it, with its numbers.
        gathers: whether what ranks send is gathered, and not summed.
        overflows: whether finite gradients can become infinite.
    """

    name: str = ""
    gathers: bool = False
    overflows: bool = False

    @abstractmethod
    def compress(self, bucket: Bucket, factor: str, emit: Emitter) -> list[str]:
        """Appends what turns ``factor`` times the bucket's gradients into blobs to send; returns those."""

    @abstractmethod
    def decompress(self, bucket: Bucket, sent: Sequence[str], emit: Emitter) -> None:
        """Appends what overwrites the gradients with their sum over the ranks.

        ``sent`` are the blobs of :meth:`compress`, summed over the ranks or gathered.
        """

    @abstractmethod
    def bytes_sent(self, bucket: Bucket) -> int:
        """Bytes that a rank gives to collective operations in a step."""

    def error(self, bucket: Bucket) -> str | None:
        """The blob of what was not sent; ``None`` where none is kept."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class NoCompression(Compressor):
    """Gradients as they are."""

    name = "none"

    def compress(self, bucket: Bucket, factor: str, emit: Emitter) -> list[str]:
        """The bucket."""
        emit.operator("PackBucket", [factor, *bucket.blobs], [bucket.name])
        return [bucket.name]

    def decompress(self, bucket: Bucket, sent: Sequence[str], emit: Emitter) -> None:
        """Back to the gradients."""
        _unpack(bucket, sent[0], emit)

    def bytes_sent(self, bucket: Bucket) -> int:
        """All of it."""
        return bucket.nbytes


class Half(Compressor):
    """Gradients in float16 or bfloat16, divided before they are rounded and summed, so that the sum cannot
    overflow where the mean does not.

    With ``feedback``, what rounding takes from a gradient is added to that of the next step.
    """

    def __init__(self, dtype: DTypeLike = "float16", *, feedback: bool = False) -> None:
        self.feedback = feedback
        self.dtype = as_dtype(dtype)
        if not is_half(self.dtype):
            raise ArgumentError(f"gradients are to be sent in {self.dtype}, wanted float16 or bfloat16")
        self.name = f"{self.dtype.name}+feedback" if feedback else self.dtype.name
        # bfloat16 has the range of float32.
        self.overflows = not is_bfloat16(self.dtype)

    def compress(self, bucket: Bucket, factor: str, emit: Emitter) -> list[str]:
        """The bucket in the half type."""
        half = f"{bucket.name}_half"
        if self.feedback:
            error = emit.state(f"{bucket.name}_error", bucket.size)
            _pack_single(bucket, factor, emit)
            emit.operator("RoundWithFeedback", [bucket.name, error], [half, error], dtype=self.dtype)
        else:
            emit.operator("PackBucket", [factor, *bucket.blobs], [half], dtype=self.dtype)
        return [half]

    def decompress(self, bucket: Bucket, sent: Sequence[str], emit: Emitter) -> None:
        """Back to the gradients' own type."""
        _unpack(bucket, sent[0], emit)

    def bytes_sent(self, bucket: Bucket) -> int:
        """Two bytes an element."""
        return _HALF * bucket.size

    def error(self, bucket: Bucket) -> str | None:
        """With feedback."""
        return f"{bucket.name}_error" if self.feedback else None


class PowerSgd(Compressor):
    """Low-rank factors of each gradient that is a matrix, with error feedback.

    A gradient of shape ``n x ...`` counts as a matrix of ``n`` rows. Those that two factors of ``rank``
    columns would not make smaller, and vectors, are sent as they are. Source: T. Vogels et al., PowerSGD,
    NeurIPS 2019.
    """

    def __init__(self, rank: int = 1) -> None:
        """Raises :class:`ArgumentError` for a rank below 1."""
        if rank < 1:
            raise ArgumentError(f"powersgd: rank is {rank}, wanted at least 1")
        self.rank = rank
        self.name = f"powersgd:{rank}"

    def _layout(self, bucket: Bucket) -> tuple[list[int], list[int]]:
        rows, columns = [], []
        for shape in bucket.shapes:
            size = math.prod(shape)
            n = shape[0] if shape else 1
            m = size // n if n else 0
            smaller = len(shape) > 1 and self.rank * (n + m) < size
            rows.append(n if smaller else size)
            columns.append(m if smaller else 0)
        return rows, columns

    def _sizes(self, bucket: Bucket) -> tuple[int, int]:
        """Elements of the left factors with what is sent as it is, and of the right factors."""
        pairs = list(zip(*self._layout(bucket), strict=True))
        left = sum(self.rank * rows if columns else rows for rows, columns in pairs)
        return left, self.rank * sum(columns for _, columns in pairs)

    def _arguments(self, bucket: Bucket) -> dict[str, Any]:
        rows, columns = self._layout(bucket)
        return {"rank": self.rank, "rows": rows, "columns": columns}

    def compress(self, bucket: Bucket, factor: str, emit: Emitter) -> list[str]:
        """The left factors."""
        error = emit.state(f"{bucket.name}_error", bucket.size)
        right = emit.state(f"{bucket.name}_right", self._sizes(bucket)[1], "GaussianFill")
        _pack_single(bucket, factor, emit)
        emit.operator(
            "PowerSgdLeft",
            [bucket.name, error, right],
            [bucket.name, f"{bucket.name}_left"],
            **self._arguments(bucket),
        )
        return [f"{bucket.name}_left"]

    def decompress(self, bucket: Bucket, sent: Sequence[str], emit: Emitter) -> None:
        """The right factors, which are summed too, and the products."""
        name, left = bucket.name, sent[0]
        right, error, arguments = f"{name}_right", f"{name}_error", self._arguments(bucket)
        emit.operator("PowerSgdRight", [name, left, error, right], [left, error, right], **arguments)
        emit.operator("Allreduce", [right], [right])
        emit.operator("PowerSgdRestore", [left, right], [f"{name}_restored"], **arguments)
        _unpack(bucket, f"{name}_restored", emit)

    def bytes_sent(self, bucket: Bucket) -> int:
        """Both factors of each matrix, and the rest."""
        return _FLOAT * sum(self._sizes(bucket))

    def error(self, bucket: Bucket) -> str | None:
        """What the factors left."""
        return f"{bucket.name}_error"


class TopK(Compressor):
    """The elements of largest absolute value, with those not sent kept for later, and momentum corrected.

    ``momentum`` takes the place of the optimizer's, which must have none. Source: Y. Lin et al., Deep
    Gradient Compression, ICLR 2018.
    """

    gathers = True

    def __init__(self, ratio: float = 0.01, momentum: float = 0.9) -> None:
        """Raises :class:`ArgumentError` for numbers outside their range."""
        if not 0 < ratio <= 1 or not 0 <= momentum < 1:
            raise ArgumentError(
                f"topk: ratio is {ratio} and momentum {momentum}, wanted more than 0 up to 1, and 0 up to "
                "less than 1"
            )
        self.ratio, self.momentum = ratio, momentum
        self.name = f"topk:{ratio:g}:{momentum:g}"

    def compress(self, bucket: Bucket, factor: str, emit: Emitter) -> list[str]:
        """Places and values of the largest elements."""
        state = [emit.state(f"{bucket.name}_{what}", bucket.size) for what in ("velocity", "error")]
        sent = [f"{bucket.name}_{what}" for what in ("places", "values")]
        _pack_single(bucket, factor, emit)
        emit.operator(
            "LargestElements",
            [bucket.name, *state],
            [*sent, *state],
            ratio=float(self.ratio),
            momentum=float(self.momentum),
        )
        return sent

    def decompress(self, bucket: Bucket, sent: Sequence[str], emit: Emitter) -> None:
        """The sum of the elements of all ranks, and zeros."""
        total = f"{bucket.name}_total"
        emit.operator("SumElementsAtPlaces", list(sent), [total], size=bucket.size)
        _unpack(bucket, total, emit)

    def bytes_sent(self, bucket: Bucket) -> int:
        """A place and a value each."""
        return 2 * _FLOAT * kept(bucket.size, self.ratio) if bucket.size else 0

    def error(self, bucket: Bucket) -> str | None:
        """Velocities that wait."""
        return f"{bucket.name}_error"


def _pack_single(bucket: Bucket, factor: str, emit: Emitter) -> None:
    emit.operator("PackBucket", [factor, *bucket.blobs], [bucket.name], dtype=np.dtype(np.float32))


def _unpack(bucket: Bucket, source: str, emit: Emitter) -> None:
    emit.operator("UnpackBucket", [source, *bucket.blobs], bucket.blobs)


#: What can be asked for by name.
NAMES: Final = (
    "none", "float16", "float16+feedback", "bfloat16", "bfloat16+feedback", "powersgd[:RANK]",
    "topk[:RATIO[:MOMENTUM]]",
)  # fmt: skip
_HALVES: Final = ("float16", "float16+feedback", "bfloat16", "bfloat16+feedback")


def compressor(name: str | Compressor) -> Compressor:
    """The compressor of a name in :data:`NAMES`: ``powersgd:4`` and ``topk:0.001`` have numbers.

    Raises:
        ArgumentError: there is no such compressor, or its numbers make no sense.
    """
    if isinstance(name, Compressor):
        return name
    kind, *numbers = name.split(":")
    try:
        if kind == "none" and not numbers:
            return NoCompression()
        if kind in _HALVES and not numbers:
            dtype, _, feedback = kind.partition("+")
            return Half(dtype, feedback=bool(feedback))
        if kind == "powersgd" and len(numbers) <= 1:
            return PowerSgd(*map(int, numbers))
        if kind == "topk" and len(numbers) <= 2:
            return TopK(*map(float, numbers))
    except ValueError as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"compression {name!r}: {error}, wanted one of {', '.join(NAMES)}") from None
    raise ArgumentError(f"there is no compression {name!r}, wanted one of {', '.join(NAMES)}")
