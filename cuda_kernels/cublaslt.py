"""Matrix products by cuBLASLt, through nvmath's bindings: the only module that calls it.

Everything is chosen once, when a program is bound: descriptors, the algorithm, the workspace. What is left
is one call with integers, which a stream can capture. cuBLASLt thinks in column-major matrices: a row-major
``out = a b`` is the column-major ``out^T = b^T a^T``, so the operands change places.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpunet.backends import Backend
from gpunet.cuda_kernels.workspaces import Workspaces
from gpunet.errors import DeviceError, KernelError

if TYPE_CHECKING:
    from gpunet.buffers import Buffer
    from gpunet.cuda_kernels.gemm import Product
    from gpunet.kernels import KernelContext

#: Bytes of workspace of each stream: what NVIDIA advises for compute capability 9.0 and on, and before.
WORKSPACE: Final = {True: 32 << 20, False: 4 << 20}

#: Element type, compute type, type of alpha and beta.
_TYPES: Final = {
    "float16": ("CUDA_R_16F", "COMPUTE_32F", "CUDA_R_32F"),
    "bfloat16": ("CUDA_R_16BF", "COMPUTE_32F", "CUDA_R_32F"),
    "float32": ("CUDA_R_32F", "COMPUTE_32F", "CUDA_R_32F"),
    "float64": ("CUDA_R_64F", "COMPUTE_64F", "CUDA_R_64F"),
}


@dataclass
class Bindings:
    """nvmath's modules."""

    lt: Any
    cublas: Any
    types: Any


@functools.cache
def bindings() -> Bindings:
    """The bindings; raises :class:`DeviceError` if they are not installed."""
    try:
        lt = importlib.import_module("nvmath.bindings.cublasLt")
        cublas = importlib.import_module("nvmath.bindings.cublas")
        types = importlib.import_module("nvmath").CudaDataType
    except ImportError as error:
        raise DeviceError(
            f"cuBLASLt cannot be called: {error}; wanted nvmath-python: pip install 'gpunet[cuda12]'"
        ) from error
    return Bindings(lt, cublas, types)


_handles: weakref.WeakKeyDictionary[Backend, int] = weakref.WeakKeyDictionary()
_workspaces: Final = Workspaces("cuBLASLt workspace")


def reason_against(backend: Backend, work: Product) -> str | None:
    """Why cuBLASLt cannot be asked for a product; ``None`` if it can (it may still offer nothing)."""
    if backend.simulated:
        return "cuBLASLt needs a GPU"
    if importlib.util.find_spec("nvmath") is None:
        return "nvmath-python is not installed"
    if work.k == 0:
        return "there is nothing to sum"
    return None


class Descriptors:
    """The descriptors of one product; destroyed with the object."""

    def __init__(
        self, work: Product, bias: int = 0, alignments: tuple[int, int, int] = (256, 256, 256)
    ) -> None:
        self._b = b = bindings()
        lt = b.lt
        element, compute, scale = _TYPES[work.dtype]
        if work.tf32 and work.dtype == "float32":
            compute = "COMPUTE_32F_FAST_TF32"
        self._made: list[tuple[Callable[[int], None], int]] = []
        type = int(b.types[element])
        self.desc = self._keep(
            lt.matmul_desc_destroy,
            lt.matmul_desc_create(int(b.cublas.ComputeType[compute]), int(b.types[scale])),
        )
        self.numbers = np.array(
            [work.alpha, work.beta], np.float64 if work.dtype == "float64" else np.float32
        )
        # The operands in cuBLASLt's order: b, a, out, each column-major with as many rows as n, k or m.
        transposed = int(b.cublas.Operation["T"]), int(b.cublas.Operation["N"])
        self._describe("TRANSA", transposed[not work.trans_b])
        self._describe("TRANSB", transposed[not work.trans_a])
        epilogue = "_".join(["RELU"] * work.relu + ["BIAS"] * work.bias) or "DEFAULT"
        self._describe("EPILOGUE", int(lt.Epilogue[epilogue]))
        if work.bias:
            self._describe("BIAS_POINTER", bias)
        size, (stride_a, stride_b, stride_out) = work.inner
        m, n, k = work.m, work.n, work.k
        self.first = self._layout(type, *((k, n) if work.trans_b else (n, k)), size, stride_b)
        self.second = self._layout(type, *((m, k) if work.trans_a else (k, m)), size, stride_a)
        self.out = self._layout(type, n, m, size, stride_out)
        self.preference = self._keep(lt.matmul_preference_destroy, lt.matmul_preference_create())
        for name, alignment in zip("ABCD", (*alignments, alignments[2]), strict=True):
            self._prefer(f"MIN_ALIGNMENT_{name}_BYTES", alignment)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            for destroy, handle in getattr(self, "_made", []):
                destroy(handle)

    def _keep(self, destroy: Callable[[int], None], handle: int) -> int:
        self._made.append((destroy, handle))
        return handle

    def _describe(self, name: str, value: int) -> None:
        lt = self._b.lt
        attribute = lt.MatmulDescAttribute[name]
        data = np.array([value], lt.get_matmul_desc_attribute_dtype(attribute))
        lt.matmul_desc_set_attribute(self.desc, int(attribute), data.ctypes.data, data.nbytes)

    def _layout(self, type: int, rows: int, columns: int, batch: int, stride: int) -> int:
        """A packed column-major matrix, or a batch of them."""
        lt = self._b.lt
        layout = self._keep(lt.matrix_layout_destroy, lt.matrix_layout_create(type, rows, columns, rows))
        if batch > 1:
            for name, value in (("BATCH_COUNT", batch), ("STRIDED_BATCH_OFFSET", stride)):
                attribute = lt.MatrixLayoutAttribute[name]
                data = np.array([value], lt.get_matrix_layout_attribute_dtype(attribute))
                lt.matrix_layout_set_attribute(layout, int(attribute), data.ctypes.data, data.nbytes)
        return int(layout)

    def _prefer(self, name: str, value: int) -> None:
        lt = self._b.lt
        attribute = lt.MatmulPreferenceAttribute[name]
        data = np.array([value], lt.get_matmul_preference_attribute_dtype(attribute))
        lt.matmul_preference_set_attribute(self.preference, int(attribute), data.ctypes.data, data.nbytes)

    def algorithm(self, handle: int, workspace: int) -> Any:
        """The first choice with so many bytes of workspace, an array of one; ``None`` if there is none.

        Raises the bindings' error if it cannot be asked, without a device for instance.
        """
        lt = self._b.lt
        self._prefer("MAX_WORKSPACE_BYTES", workspace)
        found = np.zeros(1, lt.matmul_heuristic_result_dtype)
        count = np.zeros(1, np.int32)
        lt.matmul_algo_get_heuristic(
            handle,
            self.desc,
            self.first,
            self.second,
            self.out,
            self.out,
            self.preference,
            1,
            found.ctypes.data,
            count.ctypes.data,
        )
        return found if count[0] and found["state"][0] == 0 else None


def alignment(address: int) -> int:
    """The largest power of two up to 256 that divides an address."""
    return min(256, address & -address) if address else 256


def prepare(
    ctx: KernelContext, work: Product, a: Buffer, b: Buffer, out: Buffer, bias: Buffer | None
) -> Callable[[], None] | None:
    """The launch of a product; ``None`` if cuBLASLt offers no algorithm for it.

    ``a``, ``b``, ``out`` start at the first matrix of the batch ``work.inner``.
    """
    backend, stream, lt = ctx.backend, ctx.stream, bindings().lt
    backend.activate()
    handle = _handles.get(backend)
    if handle is None:
        handle = _handles[backend] = lt.create()
    workspace = _workspaces.of(backend, stream, WORKSPACE[backend.capability >= 90])
    pointers = b.pointer, a.pointer, out.pointer
    given = Descriptors(work, 0 if bias is None else bias.pointer, tuple(map(alignment, pointers)))  # type: ignore[arg-type]
    try:
        found = given.algorithm(handle, workspace.nbytes)
    except lt.cuBLASLtError:
        return None  # cuBLASLt says "not supported" in this way too
    if found is None:
        return None
    kept = [a, b, out] if bias is None else [a, b, out, bias]
    for buffer in kept:
        buffer.memory.used_on(stream)
    numbers = given.numbers.ctypes.data, given.numbers.ctypes.data + given.numbers.itemsize
    call = functools.partial(
        lt.matmul,
        handle,
        given.desc,
        numbers[0],
        pointers[0],
        given.first,
        pointers[1],
        given.second,
        numbers[1],
        pointers[2],
        given.out,
        pointers[2],
        given.out,
        found.ctypes.data,
        workspace.pointer,
        workspace.nbytes,
        stream.pointer,
    )

    # The default keeps what the addresses point to.
    def launch(_keep: Any = (given, found, workspace, kept)) -> None:
        backend.activate()
        try:
            call()
        except lt.cuBLASLtError as error:
            raise KernelError(f"cuBLASLt failed on {backend.device} with {work}: {error}") from error

    return launch
