"""nvmath's bindings of cuBLASLt as far as gpunet calls them: column-major products on the host."""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpunet.dtypes import BFLOAT16
from tests.fake_cuda import Runtime


class Names:
    """In place of an enumeration: each name stands for itself, numbered as it is met."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers) + 1)

    def name(self, number: int) -> str:
        return next(name for name, n in self.numbers.items() if n == number)


def read(address: int, nbytes: int) -> int:
    return int.from_bytes(ctypes.string_at(address, nbytes), "little")


class CublasLt:
    """Offers an algorithm for everything but products whose `k` is in `refused`."""

    class cuBLASLtError(RuntimeError):  # noqa: N801
        pass

    matmul_heuristic_result_dtype = np.dtype(
        [("algo", "<u8", (8,)), ("workspace_size", "<u8"), ("state", "<i4"), ("waves_count", "<f4")]
    )

    def __init__(self, runtime: Runtime, types: Names, compute: Names, operations: Names) -> None:
        self.runtime = runtime
        self.types, self.compute, self.operations = types, compute, operations
        self.MatmulDescAttribute, self.MatrixLayoutAttribute = Names(), Names()
        self.MatmulPreferenceAttribute, self.Epilogue = Names(), Names()
        self.objects: dict[int, dict[str, Any]] = {}
        self.refused: set[int] = set()
        self.unsupported: set[int] = set()
        self.asked: list[dict[str, Any]] = []
        self.calls = 0
        self._handles = itertools.count(1)

    def _new(self, **values: Any) -> int:
        handle = next(self._handles)
        self.objects[handle] = values
        return handle

    def _delete(self, handle: int) -> None:
        del self.objects[handle]

    matmul_desc_destroy = matrix_layout_destroy = matmul_preference_destroy = _delete

    def get_matmul_desc_attribute_dtype(self, attribute: int) -> type:
        return np.uint64 if self.MatmulDescAttribute.name(attribute) == "BIAS_POINTER" else np.int32

    def get_matrix_layout_attribute_dtype(self, attribute: int) -> type:
        return np.int32 if self.MatrixLayoutAttribute.name(attribute) == "BATCH_COUNT" else np.int64

    def get_matmul_preference_attribute_dtype(self, attribute: int) -> type:
        return np.uint64 if "WORKSPACE" in self.MatmulPreferenceAttribute.name(attribute) else np.uint32

    def create(self) -> int:
        return self._new()

    def matmul_desc_create(self, compute_type: int, scale_type: int) -> int:
        return self._new(compute=self.compute.name(compute_type), scale=self.types.name(scale_type))

    def matrix_layout_create(self, type: int, rows: int, cols: int, ld: int) -> int:
        return self._new(
            type=self.types.name(type), rows=rows, cols=cols, ld=ld, BATCH_COUNT=1, STRIDED_BATCH_OFFSET=0
        )

    def matmul_preference_create(self) -> int:
        return self._new()

    def matmul_desc_set_attribute(self, desc: int, attr: int, buf: int, size_in_bytes: int) -> None:
        self.objects[desc][self.MatmulDescAttribute.name(attr)] = read(buf, size_in_bytes)

    def matrix_layout_set_attribute(self, layout: int, attr: int, buf: int, size_in_bytes: int) -> None:
        self.objects[layout][self.MatrixLayoutAttribute.name(attr)] = read(buf, size_in_bytes)

    def matmul_preference_set_attribute(self, pref: int, attr: int, buf: int, size_in_bytes: int) -> None:
        self.objects[pref][self.MatmulPreferenceAttribute.name(attr)] = read(buf, size_in_bytes)

    def matmul_algo_get_heuristic(
        self,
        handle: int,
        desc: int,
        a: int,
        b: int,
        c: int,
        d: int,
        pref: int,
        wanted: int,
        results: int,
        n: int,
    ) -> None:
        transposed = self.operations.name(self.objects[desc]["TRANSA"]) == "T"
        k = self.objects[a]["rows" if transposed else "cols"]
        if k in self.unsupported:
            raise self.cuBLASLtError("CUBLAS_STATUS_NOT_SUPPORTED")
        self.asked.append({**self.objects[desc], **self.objects[pref]})
        ctypes.c_int32.from_address(n).value = 0 if k in self.refused else 1
        ctypes.c_uint64.from_address(results).value = 77

    def _matrix(self, address: int, layout: dict[str, Any], operation: str, z: int) -> np.ndarray:
        dtype = {
            "CUDA_R_16F": np.dtype(np.float16),
            "CUDA_R_16BF": BFLOAT16,
            "CUDA_R_32F": np.dtype(np.float32),
            "CUDA_R_64F": np.dtype(np.float64),
        }[layout["type"]]
        assert dtype is not None
        at = address + z * layout["STRIDED_BATCH_OFFSET"] * dtype.itemsize
        count = layout["ld"] * layout["cols"]
        data = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(at)
        columns = np.frombuffer(data, dtype).reshape(layout["cols"], layout["ld"])[:, : layout["rows"]]
        return columns if operation == "T" else columns.T

    def matmul(
        self,
        handle: int,
        desc: int,
        alpha: int,
        a: int,
        a_layout: int,
        b: int,
        b_layout: int,
        beta: int,
        c: int,
        c_layout: int,
        d: int,
        d_layout: int,
        algo: int,
        workspace: int,
        workspace_size: int,
        stream: int,
    ) -> None:
        assert ctypes.c_uint64.from_address(algo).value == 77
        assert (c, c_layout) == (d, d_layout)
        assert workspace in self.runtime.blocks
        self.calls += 1
        given, first, second, out = (dict(self.objects[h]) for h in (desc, a_layout, b_layout, d_layout))
        number = ctypes.c_double if given["scale"] == "CUDA_R_64F" else ctypes.c_float
        factor, keep = number.from_address(alpha).value, number.from_address(beta).value
        epilogue = self.Epilogue.name(given["EPILOGUE"])

        def run() -> None:
            for z in range(out["BATCH_COUNT"]):
                x = self._matrix(a, first, self.operations.name(given["TRANSA"]), z).astype(np.float64)
                y = self._matrix(b, second, self.operations.name(given["TRANSB"]), z).astype(np.float64)
                target = self._matrix(d, out, "N", z)
                result = factor * (x @ y)
                if keep:
                    result += keep * target
                if "BIAS" in epilogue:
                    vector = {**out, "cols": 1}
                    result += self._matrix(given["BIAS_POINTER"], vector, "N", 0)
                target[...] = np.maximum(result, 0) if "RELU" in epilogue else result

        self.runtime.queues[stream].append(run)


def bindings(runtime: Runtime) -> SimpleNamespace:
    """In place of `gpunet.cuda_kernels.cublaslt.bindings()`."""
    types, compute, operations = Names(), Names(), Names()
    return SimpleNamespace(
        lt=CublasLt(runtime, types, compute, operations),
        cublas=SimpleNamespace(ComputeType=compute, Operation=operations),
        types=types,
    )
