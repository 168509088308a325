"""Many tensors in one launch: norms, scaling, checks for overflow, packing into one buffer and back.

For gradient clipping, loss scaling and data parallelism, where a launch for each of hundreds of small tensors
would cost more than the work. The kernels find the tensors through tables in device memory, which a
:class:`TensorList` makes once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from gpunet.buffers import Buffer
from gpunet.cuda_kernels.launch import THREADS, in_order, prepare, rows
from gpunet.cuda_kernels.pieces import Launch, nothing
from gpunet.cuda_kernels.signature import FLOATS, Kernel
from gpunet.errors import DataTypeError, KernelError
from gpunet.kernels import KernelContext
from gpunet.specs import TensorSpec, spec

_CHUNKS: Final = (
    "const uint64* addresses, const int32* tensors, const int64* starts, const int64* lengths, int64 chunks"
)
_SQUARE = Kernel("multi_tensor", "multi_square", f"{_CHUNKS}, double* partial", T=FLOATS)
_SUM = Kernel(
    "multi_tensor",
    "multi_sum",
    "const double* partial, const int64* firsts, R* y, int64 count",
    R=("float32", "float64"),
)
_SCALE = Kernel("multi_tensor", "multi_scale", f"{_CHUNKS}, const float* factor", T=FLOATS)
_UNSCALE = Kernel("multi_tensor", "multi_unscale", f"{_CHUNKS}, const float* scale, int32* finite", T=FLOATS)
_CHECK = Kernel("multi_tensor", "multi_check", f"{_CHUNKS}, int32* found", T=FLOATS)
_PACK = Kernel(
    "multi_tensor",
    "multi_pack",
    f"{_CHUNKS}, const int64* places, const float* factor, R* buffer",
    T=FLOATS,
    R=FLOATS,
)
_UNPACK = Kernel(
    "multi_tensor",
    "multi_unpack",
    f"{_CHUNKS}, const int64* places, const float* factor, const R* buffer",
    T=FLOATS,
    R=FLOATS,
)
#: The kernels that change the tensors.
_WRITERS: Final = (_SCALE, _UNSCALE, _UNPACK)
#: Elements that a block handles. It decides the order of additions, so it does not depend on the device.
CHUNK: Final = 16_384


class TensorList:
    """Tensors of one element type on one device, with the tables by which kernels find them.

    Making one copies the tables to the device and keeps the tensors alive: do it when a program is bound.
    Launches hold the addresses, so the tensors must stay where they are.

    Args:
        tensors: buffers of float16, float32 or float64, at least one; empty ones count.
        starts: where each begins where they are packed, in elements; one behind the other by default.

    Raises:
        KernelError: there are no tensors, or they lie on several devices.
        DataTypeError: the element types differ.
    """

    def __init__(self, tensors: Sequence[Buffer], starts: Sequence[int] | None = None) -> None:
        if not tensors:
            raise KernelError("a list of tensors is empty, wanted at least one")
        first = tensors[0]
        for tensor in tensors:
            if tensor.dtype != first.dtype:
                raise DataTypeError(f"{tensor} and {first} are in one list, wanted one element type")
            if tensor.backend is not first.backend:
                raise KernelError(f"{tensor} and {first} are in one list, wanted one device")
        self.tensors = tuple(tensors)
        self.dtype = first.dtype
        self.backend = first.backend
        sizes = np.array([t.size for t in tensors], np.int64)
        #: Number of elements of all tensors.
        self.size = int(sizes.sum())
        places = np.cumsum(sizes) - sizes if starts is None else np.array(starts, np.int64)
        #: Elements that the tensors need where they are packed.
        self.extent = int((places + sizes).max())
        counts = -(-sizes // CHUNK)
        firsts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        owner = np.repeat(np.arange(len(tensors), dtype=np.int32), counts)
        begins = (np.arange(len(owner), dtype=np.int64) - firsts[owner]) * CHUNK
        self.chunks = len(owner)
        self._firsts = self._table("firsts", firsts)
        self._chunk_places = self._table("places", places[owner] + begins)
        self._tables = (
            self._table("addresses", np.array([t.pointer for t in tensors], np.uint64)),
            self._table("tensors", owner),
            self._table("starts", begins),
            self._table("lengths", np.minimum(sizes[owner] - begins, CHUNK)),
        )
        # Launches may be put on other streams than the one that the tables came by.
        self.backend.stream.synchronize()

    def _table(self, name: str, values: np.ndarray) -> Buffer:
        return Buffer.from_numpy(self.backend, values, f"table of {name}")

    def __len__(self) -> int:
        return len(self.tensors)

    def scratch(self) -> TensorSpec:
        """The memory that :meth:`square_sums` wants."""
        return spec((self.chunks,), np.float64)

    def _launch(
        self, ctx: KernelContext, kernel: Kernel, *rest: Buffer | None, to: Buffer | None = None
    ) -> Launch:
        if self.chunks == 0:
            return nothing
        written = kernel in _WRITERS
        types = (self.dtype,) if to is None else (self.dtype, to.dtype)
        arguments = (*self._tables, self.chunks, *rest)
        put = prepare(
            ctx,
            kernel,
            types,
            arguments,
            rows(self.chunks, THREADS),
            reads=() if written else self.tensors,
            writes=self.tensors if written else (),
        )

        def launch(_keep: TensorList = self) -> None:
            put()

        return launch

    def square_sums(self, ctx: KernelContext, out: Buffer, scratch: Buffer) -> Launch:
        """Sets ``out`` to the sum of the squares of each tensor; of an empty one it is 0.

        Each chunk is summed in the type that its elements are computed in, chunks in float64, in a fixed
        order.

        Args:
            ctx: the device and the stream.
            out: float32 or float64, one number a tensor.
            scratch: a buffer for :meth:`scratch`.
        """
        _want_size(out, len(self))
        sums = (scratch, self._firsts, out, len(self))
        return in_order(
            self._launch(ctx, _SQUARE, scratch),
            prepare(ctx, _SUM, (out.dtype,), sums, rows(len(self), THREADS)),
        )

    def scale(self, ctx: KernelContext, factor: Buffer) -> Launch:
        """Multiplies all tensors in place by ``factor``, one float32 in device memory."""
        _want_size(factor, 1)
        return self._launch(ctx, _SCALE, factor)

    def unscale(self, ctx: KernelContext, scale: Buffer, finite: Buffer) -> Launch:
        """Divides all tensors in place by ``scale``, one float32 in device memory.

        ``finite`` (one int32) becomes 0 if any element is infinite or no number then, and stays as it is
        otherwise.
        """
        _want_size(scale, 1)
        _want_size(finite, 1)
        return self._launch(ctx, _UNSCALE, scale, finite)

    def find_overflow(self, ctx: KernelContext, found: Buffer) -> Launch:
        """Sets ``found`` (one int32) to 1 if any element is infinite or no number, else to 0."""
        _want_size(found, 1)
        clear = partial(ctx.backend.fill, found, 0, ctx.stream)
        return in_order(clear, self._launch(ctx, _CHECK, found))

    def pack(self, ctx: KernelContext, buffer: Buffer, factor: Buffer | None = None) -> Launch:
        """Copies the tensors one behind the other to ``buffer``, in its element type.

        Args:
            ctx: the device and the stream.
            buffer: float16, float32 or float64, at least :attr:`extent` elements.
            factor: one float32 in device memory that all elements are multiplied with, before they are
                rounded.
        """
        self._want_room(buffer)
        return self._launch(ctx, _PACK, self._chunk_places, factor, buffer, to=buffer)

    def unpack(self, ctx: KernelContext, buffer: Buffer, factor: Buffer | None = None) -> Launch:
        """The inverse of :meth:`pack`; ``factor`` multiplies what is read from ``buffer``."""
        self._want_room(buffer)
        return self._launch(ctx, _UNPACK, self._chunk_places, factor, buffer, to=buffer)

    def _want_room(self, buffer: Buffer) -> None:
        if buffer.size < self.extent:
            raise KernelError(f"{buffer} has {buffer.size} elements, wanted {self.extent} at least")


def _want_size(buffer: Buffer, size: int) -> None:
    if buffer.size != size:
        raise KernelError(f"{buffer} has {buffer.size} elements, wanted {size}")
