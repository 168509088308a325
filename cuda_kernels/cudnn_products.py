"""Matrix products by cuDNN: as such, or as convolutions with filters of one pixel.

cuDNN's matrix product takes tensor cores only: float32 without TF32 and odd rows of two-byte types have no
plan. The same sums are a convolution of images of one pixel (``a b^T``), its gradient of the data (``a b``)
or that of the filters (``a^T b``), which have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from gpunet.backends import Backend, Stream
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import cudnn, cudnn_execution
from gpunet.cuda_kernels.cudnn import NoPlanError
from gpunet.cuda_kernels.cudnn_graphs import Convolution, Descriptor, MatrixProduct, Settings
from gpunet.cuda_kernels.workspaces import Workspaces

if TYPE_CHECKING:
    from gpunet.cuda_kernels.gemm import Product
    from gpunet.kernels import KernelContext

#: Most bytes of workspace of a stream.
WORKSPACE: Final = 32 << 20
#: Names of the operands of a convolution in the places of a, b and out.
_NAMES: Final = {"forward": ("x", "w", "y"), "data": ("y", "w", "x"), "filter": ("y", "x", "w")}

_workspaces: Final = Workspaces("cuDNN workspace of products")


def graphs(work: Product) -> list[Descriptor]:
    """The graphs that compute one launch of a product, the one to be asked for first in front."""
    size, strides = work.inner
    packed = (work.m * work.k, work.k * work.n, work.m * work.n)
    if work.alpha != 1 or work.beta != 0 or (size != 1 and strides != packed):
        return []
    epilogue = ("bias",) * work.bias + ("relu",) * work.relu
    shape = (work.m, work.n, work.k, work.trans_a, work.trans_b, size)
    whole = MatrixProduct(work.dtype, *shape, epilogue=epilogue)
    found: list[Descriptor] = [] if work.dtype == "float64" else [whole]
    convolution = whole.as_convolution()
    return found if convolution is None else [*found, convolution]


def _allowed(work: Product) -> Settings:
    allowed = cudnn.settings()
    return dataclasses.replace(allowed, tf32=work.tf32, workspace=min(allowed.workspace, WORKSPACE))


def _planned(backend: Backend, work: Product) -> Iterator[Descriptor]:
    """The graphs of a product that have a plan on a device; raises :class:`NoPlanError` if none has."""
    reason = "cuDNN multiplies whole matrices that are packed, without factors"
    found = False
    for graph in graphs(work):
        try:
            cudnn_execution.find(backend, graph, _allowed(work))
        except NoPlanError as error:
            reason = str(error)
            continue
        found = True
        yield graph
    if not found:
        raise NoPlanError(reason)


def reason_against(backend: Backend, work: Product) -> str | None:
    """Why cuDNN does not compute a product; ``None`` if it has a plan."""
    if backend.simulated:
        return "cuDNN needs a GPU"
    if work.k == 0:
        return "there is nothing to sum"
    reason = cudnn.reason_against(backend)
    if reason is not None:
        return reason
    try:
        next(_planned(backend, work))
    except NoPlanError as error:
        return str(error)
    return None


def _workspace(backend: Backend, stream: Stream, nbytes: int) -> Buffer | None:
    """Memory of a stream, in which products run one after another."""
    if nbytes == 0:
        return None
    memory = _workspaces.of(backend, stream, nbytes)
    return Buffer(backend, memory, (memory.nbytes,), np.uint8)


def prepare(
    ctx: KernelContext, work: Product, a: Buffer, b: Buffer, out: Buffer, bias: Buffer | None
) -> Callable[[], None] | None:
    """The launch of a product; ``None`` if cuDNN has no plan for it.

    ``a``, ``b``, ``out`` start at the first matrix of the batch ``work.inner``.
    """
    if reason_against(ctx.backend, work) is not None:
        return None
    for graph in _planned(ctx.backend, work):
        names = _NAMES[graph.kind] if isinstance(graph, Convolution) else ("a", "b", "out")
        buffers = dict(zip(names, (a, b, out), strict=True)) | ({} if bias is None else {"bias": bias})
        allowed = _allowed(work)
        wanted = cudnn_execution.find(ctx.backend, graph, allowed).workspace
        scratch = _workspace(ctx.backend, ctx.stream, wanted)
        try:
            return cudnn_execution.prepare(ctx, graph, buffers, scratch, allowed=allowed)
        except NoPlanError:
            continue  # an address that is not aligned, or a plan that cannot be loaded
    return None
