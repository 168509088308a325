"""Launchers of further elementwise functions."""

from __future__ import annotations

from typing import Final

from gpunet.cuda_kernels.guards import guarded_kernel
from gpunet.cuda_kernels.pieces import gradient_kernel, unary_kernel
from gpunet.cuda_kernels.signature import FLOATS, Kernel

#: The functions that have a gradient, with the position of X or Y among its inputs; dY is the other.
_OPERANDS: Final = {
    "Sin": 0,
    "Cos": 0,
    "Tan": 0,
    "Asin": 0,
    "Acos": 0,
    "Atan": 0,
    "Sinh": 1,
    "Cosh": 1,
    "Cube": 1,
    "Cbrt": 1,
    "Rsqrt": 1,
    "Reciprocal": 0,
    "Softplus": 0,
    "Softsign": 0,
}

for _type in (*_OPERANDS, "Floor", "Ceil"):
    _register = guarded_kernel if _type in ("Rsqrt", "Reciprocal") else unary_kernel
    _register(_type, Kernel("function", f"{_type.lower()}_fwd", "const T* x, T* y, int64 n", T=FLOATS))
for _type, _operand in _OPERANDS.items():
    _declared = Kernel("function", f"{_type.lower()}_bwd", "const T* a, const T* b, T* y, int64 n", T=FLOATS)
    gradient_kernel(f"{_type}Gradient", _declared, _operand)
