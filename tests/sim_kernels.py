"""Kernels of tests/kernels on the simulated device: `Sim().run(NAME, arguments, grid)`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpunet.backends import Function
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import launch, signature, sources
from gpunet.cuda_kernels.signature import Kernel
from gpunet.cuda_kernels.sim import toolchain
from gpunet.cuda_kernels.sim_backend import SimBackend
from gpunet.devices import Device
from gpunet.kernels import KernelContext
from gpunet.operator import Operator

FOLDER = Path(__file__).with_name("kernels")
needs_compiler = pytest.mark.skipif(toolchain.find() is None, reason=toolchain.MISSING)

_PARAMETERS = {
    "sim_indexing": {
        "write_at": "float* y, int64 index, int64 thread",
        "read_at": "const float* x, float* y, int64 index",
        "divide": "int32* y, int32 a, int32 b",
        "stop": "float* y",
        "shared_at": "float* y, int32 index",
        "dynamic_at": "float* y, int32 index",
        "recurse": "float* y, int32 depth",
    },
    "sim_barriers": {
        "rotate": "const float* x, float* y",
        "rotate_racing": "const float* x, float* y",
        "partial": "float* y, int32 count",
        "divergent": "float* y, int32 count",
        "tree": "float* y, int32* positive",
        "unwritten": "float* y",
        "count_racing": "int32* y",
        "place": "int32* y",
    },
    "sim_warps": {
        "shuffles": "const T* x, T* y",
        "votes": "const int32* x, uint32* y",
        "sums": "const float* x, float* y",
        "stuck": "float* y",
        "left_out": "float* y",
        "atomics": "int32* i, uint32* u, uint64* w, float* f, double* d",
    },
    "sim_bounds": {
        "copy_at": "const float* x, float* y, int64 from, int64 to",
        "write_const": "const float* x, float* y, int64 index",
        "through_table": "const uint64* table, float* y",
    },
    "sim_hostile": {
        "endless": "float* y, int32* flag, int32 kind",
        "many_blocks": "float* y",
        "large_frame": "float* y, int32 index",
        "much_shared": "float* y",
        "vast_shared": "float* y",
        "call_address": "float* y, int64 address",
        "misaligned": "const float* x, float* y, int64 bytes",
        "misaligned_vector": "const float* x, float* y, int64 floats",
        "say": "int32 number",
        "give_up": "float* y",
    },
    "sim_numbers": {
        "half_to_float": "const float16* x, float* y, int64 n",
        "float_to_half": "const float* x, float16* y, int64 n",
        "double_to_half": "const double* x, float16* y, int64 n",
        "half_sums": "const float16* x, const float16* y, float16* z, int64 n",
        "float_to_bfloat16": "const float* x, uint16* y, float* back, int64 n",
        "multiply_add": "const float* x, float* y, int64 n",
        "intrinsics": "const float* x, float* y",
        "half_intrinsics": "const float* x, float* y",
    },
}

_DECLARING = threading.Lock()


@contextmanager
def declared(*kernels: Kernel) -> Iterator[None]:
    """Declares kernels meanwhile: the tests over all declared kernels are not to see them."""
    with _DECLARING:
        signature.declared.update({(k.module, k.name): k for k in kernels})
        try:
            yield
        finally:
            for k in kernels:
                signature.declared.pop((k.module, k.name), None)


def declare(module: str, name: str, parameters: str, **types: Any) -> Kernel:
    """A declaration that is not kept."""
    kernel = Kernel(module, name, parameters, **types)
    signature.declared.pop((module, name))
    return kernel


KERNELS = {
    name: declare(
        module, name, text, **({"T": ("float32", "float64", "int32", "int64")} if "T*" in text else {})
    )
    for module, kernels in _PARAMETERS.items()
    for name, text in kernels.items()
}
for _module in _PARAMETERS:
    sources.register_source(_module, FOLDER / f"{_module}.cu")


class Sim:
    """A simulated device of its own."""

    def __init__(self, **options: Any) -> None:
        self.backend = SimBackend(Device("sim"), **options)

    def put(self, array: Any, name: str) -> Buffer:
        """A copy on the device."""
        return Buffer.from_numpy(self.backend, np.asarray(array), name)

    def prepare(
        self,
        name: str,
        arguments: tuple[Any, ...],
        grid: tuple[int, int] = (1, 1),
        *,
        types: tuple[str, ...] = (),
        shared: int = 0,
        stream: Any = None,
    ) -> Callable[[], None]:
        """A launch of a kernel of tests/kernels."""
        kernel = KERNELS[name]
        ctx = KernelContext(
            Operator.__new__(Operator), backend=self.backend, stream=stream or self.backend.stream
        )
        with declared(*(k for k in KERNELS.values() if k.module == kernel.module)):
            return launch.prepare(ctx, kernel, tuple(map(np.dtype, types)), arguments, grid, shared=shared)

    def function(self, name: str) -> Function:
        """A kernel of tests/kernels, to be launched by hand."""
        kernel = KERNELS[name]
        with declared(*(k for k in KERNELS.values() if k.module == kernel.module)):
            return self.backend.function(kernel.module, name)

    def run(self, *arguments: Any, **options: Any) -> None:
        """Launches and waits."""
        self.prepare(*arguments, **options)()
        self.backend.stream.synchronize()
