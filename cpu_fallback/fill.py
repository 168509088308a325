"""NumPy kernels of the fills."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet import philox
from gpunet.arguments import Arguments
from gpunet.errors import KernelError
from gpunet.kernels import KernelContext, kernel
from gpunet.operators.fill import check_diagonal, check_msra, check_values, fill_dtype
from gpunet.specs import Shape

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]


def _shape(inputs: Arrays, args: Arguments) -> Shape:
    """The output's shape, where the data of an input decide about it."""
    if not inputs:
        return tuple(args.shape)
    if not args.input_as_shape:
        return (*inputs[0].shape, *args.extra_shape)
    shape = tuple(inputs[0].tolist())
    if any(n < 0 for n in shape):
        raise KernelError(f"input shape holds {list(shape)}, wanted no negative dimension")
    return (*shape, *args.extra_shape)


def _target(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Array:
    """The output to fill: the given one, or a fresh one where the shape depends on data."""
    return outputs[0] if outputs else np.empty(_shape(inputs, args), fill_dtype(ctx.op))


def _key(ctx: KernelContext) -> dict[str, int]:
    return {"seed": ctx.seed, "operator": ctx.operator_id, "step": ctx.run.step}


@kernel("ConstantFill")
def constant_fill(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Arrays:
    """``Y = value`` everywhere."""
    value = inputs[1].reshape(-1)[0] if len(inputs) == 2 else args.value
    y = _target(inputs, outputs, args, ctx)
    if y.dtype == object and not isinstance(value, bytes):
        value = b""
    y.fill(value)
    return (y,)


@kernel("Float16ConstantFill")
def float16_constant_fill(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``Y = value`` everywhere."""
    outputs[0].fill(args.value)


@kernel("DiagonalFill")
def diagonal_fill(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Arrays:
    """``value`` at equal distances in row-major order: the diagonal, and more of them in tall matrices."""
    y = _target(inputs, outputs, args, ctx)
    check_diagonal(y.shape)
    y.fill(b"" if y.dtype == object else 0)
    step = y.shape[1] + 1 if y.ndim == 2 else sum(y.shape[0] ** k for k in range(y.ndim))
    y.flat[:: max(step, 1)] = args.value
    return (y,)


@kernel("RangeFill")
def range_fill(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Arrays:
    """0, 1, 2, ... in row-major order."""
    y = _target(inputs, outputs, args, ctx)
    np.copyto(y, np.arange(y.size, dtype=y.dtype).reshape(y.shape))
    return (y,)


@kernel("GaussianFill")
def gaussian_fill(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Arrays:
    """Normal random numbers."""
    y = _target(inputs, outputs, args, ctx)
    philox.normal(y, args.mean, args.std, **_key(ctx))
    return (y,)


@kernel("UniformFill", "UniformIntFill")
def uniform_fill(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Arrays:
    """Uniform random numbers, or integers."""
    low, high = (x.item() for x in inputs[1:]) if len(inputs) == 3 else (args.min, args.max)
    if outputs:
        y = outputs[0]
    else:
        shape = _shape(inputs, args)
        y = np.empty(shape if low <= high or not shape else (0, *shape[1:]), fill_dtype(ctx.op))
    if y.size:
        if low > high:
            raise KernelError(f"input min is {low}, wanted at most max, {high}")
        draw = philox.integers if y.dtype.kind == "i" else philox.uniform
        draw(y, low, high, **_key(ctx))
    return (y,)


@kernel("Float16UniformFill", bfloat16=True)
def float16_uniform_fill(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Uniform random numbers."""
    philox.uniform(outputs[0], args.min, args.max, **_key(ctx))


@kernel("XavierFill")
def xavier_fill(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Arrays:
    """Uniform random numbers in [-s, s) with ``s = sqrt(3 / fan_in)``."""
    y = _target(inputs, outputs, args, ctx)
    if y.size:
        bound = math.sqrt(3 * (y.shape[0] if y.ndim else 1) / y.size)
        philox.uniform(y, -bound, bound, **_key(ctx))
    return (y,)


@kernel("MSRAFill")
def msra_fill(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Arrays:
    """Normal random numbers of standard deviation ``sqrt(2 / fan_out)``."""
    y = _target(inputs, outputs, args, ctx)
    check_msra(y.shape)
    if y.size:
        philox.normal(y, 0.0, math.sqrt(2 * y.shape[1] / y.size), **_key(ctx))
    return (y,)


@kernel(
    "GivenTensorFill",
    "GivenTensorDoubleFill",
    "GivenTensorBoolFill",
    "GivenTensorInt16Fill",
    "GivenTensorIntFill",
    "GivenTensorInt64Fill",
    "GivenTensorStringFill",
)
def given_tensor_fill(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Arrays:
    """The given values in row-major order."""
    y = _target(inputs, outputs, args, ctx)
    if not outputs:
        check_values(ctx.op, y.shape)
    np.copyto(y, np.array(args.values, dtype=y.dtype).reshape(y.shape))
    return (y,)


@kernel("GivenTensorByteStringToUInt8Fill")
def given_bytes_fill(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Arrays:
    """The given bytes in row-major order."""
    y = _target(inputs, outputs, args, ctx)
    if not outputs:
        check_values(ctx.op, y.shape)
    np.copyto(y, np.frombuffer(args.values[0], np.uint8).reshape(y.shape))
    return (y,)
