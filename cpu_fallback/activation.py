"""NumPy kernels of the activation functions."""

from __future__ import annotations

from functools import partial

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.pieces import in_pieces
from gpunet.cpu_fallback.precision import Arrays
from gpunet.cpu_fallback.steps import Step, constant, in_turn, input_scratch, keep_step, mask_scratch
from gpunet.kernels import KernelContext, kernel


@kernel("Relu", binds=True)
@in_pieces
def relu(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = max(X, 0)``."""
    x = inputs[0]
    return partial(np.maximum, x, constant(0, x), out=outputs[0])


@kernel("ReluGradient", binds=True, scratch=mask_scratch)
@in_pieces
def relu_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``dX = dY where Y > 0, else 0``."""
    y, dy = inputs
    (mask,) = ctx.scratch
    return in_turn(partial(np.greater, y, constant(0, y), mask), keep_step(mask, dy, outputs[0]))


@kernel("Sigmoid", binds=True)
@in_pieces
def sigmoid(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = 1 / (1 + exp(-X))``; where the exponential overflows the result is the 0 that it should be."""
    x, (y,) = inputs[0], outputs
    return in_turn(
        partial(np.negative, x, y),
        partial(np.exp, y, y),
        partial(np.add, y, constant(1, y), y),
        partial(np.reciprocal, y, y),
    )


@kernel("SigmoidGradient", binds=True, scratch=input_scratch)
@in_pieces
def sigmoid_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``dX = dY Y (1 - Y)``."""
    y, dy = inputs
    (slope,) = ctx.scratch
    return in_turn(
        partial(np.subtract, constant(1, y), y, slope),
        partial(np.multiply, slope, y, slope),
        partial(np.multiply, slope, dy, outputs[0]),
    )


@kernel("Tanh", binds=True)
@in_pieces
def tanh(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """The hyperbolic tangent."""
    return partial(np.tanh, inputs[0], outputs[0])


@kernel("TanhGradient", binds=True, scratch=input_scratch)
@in_pieces
def tanh_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``dX = dY (1 - Y^2)``."""
    y, dy = inputs
    (slope,) = ctx.scratch
    return in_turn(
        partial(np.square, y, slope),
        partial(np.subtract, constant(1, y), slope, slope),
        partial(np.multiply, slope, dy, outputs[0]),
    )
