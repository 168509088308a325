"""NumPy kernels of the activation functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.kernels import KernelContext, kernel

Arrays = tuple[npt.NDArray[Any], ...]


@kernel("Relu")
def relu(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``Y = max(X, 0)``."""
    np.maximum(inputs[0], 0, out=outputs[0])


@kernel("ReluGradient")
def relu_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dX = dY where Y > 0, else 0``."""
    np.multiply(inputs[1], inputs[0] > 0, out=outputs[0])


@kernel("Sigmoid")
def sigmoid(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``Y = 1 / (1 + exp(-X))``, written with tanh so that no exponential overflows."""
    (y,) = outputs
    np.multiply(inputs[0], 0.5, out=y)
    np.tanh(y, out=y)
    np.multiply(y, 0.5, out=y)
    np.add(y, 0.5, out=y)


@kernel("SigmoidGradient")
def sigmoid_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dX = dY Y (1 - Y)``."""
    y, dy = inputs
    np.multiply(dy, y * (1 - y), out=outputs[0])


@kernel("Tanh")
def tanh(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``Y = tanh(X)``."""
    np.tanh(inputs[0], out=outputs[0])


@kernel("TanhGradient")
def tanh_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``dX = dY (1 - Y^2)``."""
    y, dy = inputs
    np.multiply(dy, 1 - y * y, out=outputs[0])
