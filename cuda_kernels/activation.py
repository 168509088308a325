"""Launchers of the activation functions."""

from __future__ import annotations

from gpunet.cuda_kernels.pieces import gradient_kernel, unary_kernel
from gpunet.cuda_kernels.signature import FLOATS, Kernel

for _type in ("Relu", "Sigmoid", "Tanh"):
    _name = _type.lower()
    unary_kernel(_type, Kernel("activation", f"{_name}_fwd", "const T* x, T* y, int64 n", T=FLOATS))
    gradient_kernel(
        f"{_type}Gradient",
        Kernel("activation", f"{_name}_bwd", "const T* a, const T* b, T* y, int64 n", T=FLOATS),
    )
