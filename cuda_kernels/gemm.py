"""Matrix products: which of four routes computes one, and its launch, prepared once.

* ``cublaslt``: cuBLASLt through nvmath's bindings (:mod:`gpunet.cuda_kernels.cublaslt`), with a workspace of
  our own, so that it can be captured into a graph. The first choice on a GPU.
* ``cudnn``: cuDNN's matrix product, or the same sums as a convolution
  (:mod:`gpunet.cuda_kernels.cudnn_products`). Used on a GPU where cuBLASLt is not installed or offers
  nothing, and cuDNN has a plan.
* ``kernel``: the tiled kernel of ``gemm.cu``: any sizes, no library, also on the simulated device. Used on a
  GPU where neither library computes a product.
* ``host``: NumPy, called by the simulated device in stream order: the choice there, for speed.

``GPUNET_GEMM`` set to one of these names takes the choice away. Float32 is exact, unless TF32 is asked for
with ``GPUNET_TF32=1`` or ``tf32=True``; float16 is summed in float32.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpunet.backends import Backend
from gpunet.broadcasting import Group, collapse, strides_along
from gpunet.buffers import Buffer
from gpunet.cpu_fallback.precision import matmul as host_matmul
from gpunet.cuda_kernels import cublaslt, cudnn_products
from gpunet.cuda_kernels.launch import blocks, in_order, prepare
from gpunet.cuda_kernels.signature import FLOATS, Kernel
from gpunet.dtypes import is_bfloat16
from gpunet.errors import DataTypeError, DeviceError, ShapeError
from gpunet.kernels import KernelContext
from gpunet.rules import broadcast_shapes
from gpunet.specs import Shape, format_shape

Launch = Callable[[], None]

#: Rows and columns of the tile that a block of the kernel computes, and its threads (kTile, kThreads there).
TILE: Final = 64
THREADS: Final = 256
ROUTES: Final = ("auto", "cublaslt", "cudnn", "kernel", "host")

_PARAMETERS: Final = (
    "const T* a, const T* b, T* out, const T* bias, int64 m, int64 n, int64 k, int64 batch, int64 stride_a, "
    "int64 stride_b, int64 stride_out, double alpha, double beta, int32 relu"
)
_GEMM: Final = {
    (trans_a, trans_b): Kernel("gemm", f"gemm_{'nt'[trans_a]}{'nt'[trans_b]}", _PARAMETERS, T=FLOATS)
    for trans_a in (False, True)
    for trans_b in (False, True)
}
#: Libraries by route, the one to be asked first in front.
_LIBRARIES: Final[dict[str, Any]] = {"cublaslt": cublaslt, "cudnn": cudnn_products}


@dataclass(frozen=True)
class Product:
    """``out[z] = act(alpha * op(a[z]) op(b[z]) + beta * out[z] + bias)``, all matrices row-major and packed.

    Attributes:
        dtype: name of the element type of all of them.
        m, n, k: op(a) is m x k, op(b) is k x n.
        trans_a, trans_b: whether a is stored as k x m, and b as n x k.
        batch: the dimensions of z that cannot be taken together, each as (size, strides in elements of a, b
            and out); a stride of 0 takes the same matrix again.
        bias: whether a vector of n is added to each row.
        relu: whether negative results become 0.
        alpha, beta: factors; with ``beta`` 0 what ``out`` holds before is not read.
        tf32: whether float32 factors may be rounded to 10 bits of mantissa.
    """

    dtype: str
    m: int
    n: int
    k: int
    trans_a: bool = False
    trans_b: bool = False
    batch: tuple[Group, ...] = ()
    bias: bool = False
    relu: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    tf32: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is no element to compute."""
        return self.m * self.n * math.prod(size for size, _ in self.batch) == 0

    @property
    def inner(self) -> Group:
        """The batch that one launch takes: (size, strides)."""
        return self.batch[-1] if self.batch else (1, (0, 0, 0))

    def offsets(self) -> Iterator[tuple[int, ...]]:
        """Where each launch starts: elements into a, b and out."""
        outer = self.batch[:-1]
        for index in itertools.product(*(range(size) for size, _ in outer)):
            yield tuple(
                sum(i * strides[operand] for i, (_, strides) in zip(index, outer, strict=True))
                for operand in range(3)
            )

    def __str__(self) -> str:
        sizes = "x".join(str(size) for size, _ in self.batch)
        parts = [
            f"{self.dtype} {sizes + ' times ' if sizes else ''}{self.m}x{self.n} = "
            f"{self.m}x{self.k}{' (transposed)' * self.trans_a} . "
            f"{self.k}x{self.n}{' (transposed)' * self.trans_b}"
        ]
        parts += ["bias"] * self.bias + ["ReLU"] * self.relu
        parts += [f"alpha {self.alpha:g}"] * (self.alpha != 1) + [f"beta {self.beta:g}"] * (self.beta != 0)
        return ", ".join(parts)


def product(
    a: Buffer,
    b: Buffer,
    out: Buffer,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: Buffer | None = None,
    relu: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    tf32: bool | None = None,
) -> Product:
    """The product that :func:`matmul` would make of these buffers, or anything with their shapes and types.

    Raises:
        ShapeError: shapes do not fit.
        DataTypeError: element types differ, or are no floating-point type.
    """
    for name, found in (("b", b), ("out", out), ("bias", bias)):
        if found is not None and found.dtype != a.dtype:
            raise DataTypeError(f"matrix product: {name} holds {found.dtype}, a {a.dtype}, wanted one type")
    if a.dtype.name not in FLOATS:
        raise DataTypeError(f"matrix product of {a.dtype}, wanted one of {', '.join(FLOATS)}")
    if min(len(a.shape), len(b.shape), len(out.shape)) < 2:
        raise ShapeError(f"matrix product {_shown(a, b, out)}, wanted at least 2 dimensions each")
    m, k = _swapped(a.shape[-2:], trans_a)
    wanted, n = _swapped(b.shape[-2:], trans_b)
    full = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if k != wanted or out.shape != (*full, m, n):
        raise ShapeError(
            f"matrix product {_shown(a, b, out)} does not fit"
            f"{', a is transposed' * trans_a}{', b is transposed' * trans_b}"
        )
    if bias is not None and bias.shape != (n,):
        raise ShapeError(f"matrix product {_shown(a, b, out)}: bias is {bias.shape}, wanted ({n},)")
    strides = [
        [stride * size for stride in strides_along((1,) * (len(full) - len(shape)) + shape, full)]
        for shape, size in ((a.shape[:-2], m * k), (b.shape[:-2], k * n), (full, m * n))
    ]
    batch = collapse(full, *strides)
    if not trans_a and batch and batch[-1][1] == (m * k, 0, m * n):
        # One b for all: the rows of all a are one matrix.
        m *= batch.pop()[0]
    batch.sort()  # one launch takes the last group: the largest
    if tf32 is None:
        tf32 = os.environ.get("GPUNET_TF32", "0") == "1"
    return Product(
        a.dtype.name, m, n, k, trans_a, trans_b, tuple(batch), bias is not None, relu, alpha, beta, tf32
    )


def choose(backend: Backend, work: Product) -> tuple[str, str]:
    """The route for a product, and why.

    Raises :class:`DeviceError` if ``GPUNET_GEMM`` names a route that the device does not have.
    """
    asked = os.environ.get("GPUNET_GEMM", "auto")
    if asked not in ROUTES:
        raise DeviceError(f"GPUNET_GEMM is {asked!r}, wanted one of {', '.join(ROUTES)}")
    if asked != "auto":
        against = None
        if asked == "host" and not backend.simulated:
            against = "only the simulated device calls the host"
        elif asked in _LIBRARIES:
            against = _LIBRARIES[asked].reason_against(backend, work)
        if against is not None:
            raise DeviceError(f"GPUNET_GEMM is {asked!r}, on {backend.device}: {against}")
        return asked, "GPUNET_GEMM asks for it"
    if backend.simulated:
        return "host", "the simulated device takes NumPy for libraries"
    reasons: dict[str, None] = {}
    for route, library in _LIBRARIES.items():
        against = library.reason_against(backend, work)
        if against is None:
            exact = "TF32" if work.tf32 and work.dtype == "float32" else "exact"
            return route, "; ".join([exact, *reasons])
        reasons[against] = None
    return "kernel", "; ".join(reasons)


def explain(backend: Backend, work: Product) -> str:
    """One line that says which route a product takes on a device, and why."""
    route, reason = choose(backend, work)
    return f"{work}: {route} ({reason})"


def matmul(
    ctx: KernelContext,
    a: Buffer,
    b: Buffer,
    out: Buffer,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: Buffer | None = None,
    relu: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    tf32: bool | None = None,
) -> Launch:
    """Prepares ``out = act(alpha * op(a) op(b) + beta * out + bias)`` and returns the launch.

    Args:
        ctx: the context of the operator, with the device and the stream.
        a: (..., M, K), or (..., K, M) if transposed; the dimensions before are a batch.
        b: (..., K, N), or (..., N, K) if transposed; batches are broadcast by NumPy's rule.
        out: (..., M, N); shares no memory with the others.
        trans_a: whether the matrices of a are stored transposed.
        trans_b: whether those of b are.
        bias: (N,), added to each row.
        relu: whether negative results become 0.
        alpha: factor of the product.
        beta: factor of what ``out`` holds, which is not read if it is 0.
        tf32: whether float32 may be rounded to TF32; by default as ``GPUNET_TF32`` says.

    Raises:
        ShapeError, DataTypeError: as :func:`product`.
        DeviceError: as :func:`choose`.
    """
    work = product(
        a,
        b,
        out,
        trans_a=trans_a,
        trans_b=trans_b,
        bias=bias,
        relu=relu,
        alpha=alpha,
        beta=beta,
        tf32=tf32,
    )
    if work.empty:
        return _nothing
    route, _ = choose(ctx.backend, work)
    if route == "host":
        return _on_host(ctx, work, a, b, out, bias)
    # A library may still offer nothing for these addresses: then the next one is asked.
    names = list(_LIBRARIES)
    for name in names[names.index(route) :] if route in names else ():
        launches = [
            _LIBRARIES[name].prepare(ctx, work, *_at(work, offsets, a, b, out), bias)
            for offsets in work.offsets()
        ]
        found = [launch for launch in launches if launch is not None]
        if len(found) == len(launches):
            return in_order(*found)
    return in_order(*(_kernel(ctx, work, *_at(work, offsets, a, b, out), bias) for offsets in work.offsets()))


def _nothing() -> None:
    """The launch of an empty product."""


def _swapped(shape: Shape, swap: bool) -> tuple[int, int]:
    return (shape[1], shape[0]) if swap else (shape[0], shape[1])


def _shown(a: Buffer, b: Buffer, out: Buffer) -> str:
    return f"{format_shape(out.shape)} = {format_shape(a.shape)} . {format_shape(b.shape)}"


def _at(work: Product, offsets: tuple[int, ...], *buffers: Buffer) -> tuple[Buffer, Buffer, Buffer]:
    """The buffers from an offset on, with the elements that one launch reaches."""
    size, strides = work.inner
    matrices = (work.m * work.k, work.k * work.n, work.m * work.n)
    a, b, out = (
        Buffer(
            buffer.backend,
            buffer.memory,
            ((size - 1) * stride + matrix,),
            buffer.dtype,
            buffer.offset + offset * buffer.dtype.itemsize,
            buffer.name,
        )
        for buffer, offset, stride, matrix in zip(buffers, offsets, strides, matrices, strict=True)
    )
    return a, b, out


def _kernel(
    ctx: KernelContext, work: Product, a: Buffer, b: Buffer, out: Buffer, bias: Buffer | None
) -> Launch:
    size, strides = work.inner
    tiles = size * -(-work.m // TILE) * -(-work.n // TILE)
    numbers = (work.m, work.n, work.k, size, *strides, work.alpha, work.beta, int(work.relu))
    kernel = _GEMM[work.trans_a, work.trans_b]
    return prepare(ctx, kernel, (a.dtype,), (a, b, out, bias, *numbers), blocks(tiles, THREADS))


def _on_host(
    ctx: KernelContext, work: Product, a: Buffer, b: Buffer, out: Buffer, bias: Buffer | None
) -> Launch:
    reads = [a, b] if bias is None else [a, b, bias]

    def gemm(*arrays: npt.NDArray[Any]) -> None:
        if is_bfloat16(arrays[-1].dtype):
            # In float32 as the CPU's kernels, and rounded once.
            wide = [array.astype(np.float32) for array in arrays]
            compute(*wide)
            arrays[-1][...] = wide[-1]
        else:
            compute(*arrays)

    def compute(*arrays: npt.NDArray[Any]) -> None:
        x, y, target = arrays[0], arrays[1], arrays[-1]
        x = x.swapaxes(-1, -2) if work.trans_a else x
        y = y.swapaxes(-1, -2) if work.trans_b else y
        # The same steps as the CPU's kernels in the plain case, for the same bits.
        result = target if work.alpha == 1 and work.beta == 0 else np.empty_like(target)
        with np.errstate(all="ignore"):
            host_matmul(x, y, result)
            if result is not target:
                result *= np.asarray(work.alpha, result.dtype)
                if work.beta:
                    result += np.asarray(work.beta, result.dtype) * target
                target[...] = result
            if bias is not None:
                np.add(target, arrays[2], out=target)
            if work.relu:
                np.maximum(target, 0, out=target)

    return partial(ctx.backend.call_host, gemm, [*reads, out], ctx.stream, len(reads))
