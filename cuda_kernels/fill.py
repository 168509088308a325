"""Launchers of the fills. GivenTensor fills run on the host, where their values are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.launch import elementwise, prepare
from gpunet.cuda_kernels.pieces import Buffers, Launch
from gpunet.cuda_kernels.signature import HALVES, Kernel
from gpunet.errors import KernelError
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.fill import check_diagonal, check_msra
from gpunet.philox import uniform_bounds

_WORDS: Final = ("int8", "int16", "int32", "int64")
_KEY: Final = "uint64 seed, uint32 operator_id, const uint64* step"
_CONSTANT = Kernel("fill", "constant_fwd", "T* y, int64 n, int64 bits", T=_WORDS)
_REPEAT = Kernel("fill", "repeat_fwd", "const T* value, T* y, int64 n", T=_WORDS)
_DIAGONAL = Kernel("fill", "diagonal_fwd", "T* y, int64 n, int64 step, int64 bits", T=_WORDS)
_RANGE = Kernel("fill", "range_fwd", "float* y, int64 n")
_UNIFORM = Kernel(
    "fill",
    "uniform_fwd",
    f"T* y, int64 n, double low, double span, double last, {_KEY}",
    T=("float32", *HALVES),
)
_INTEGERS = Kernel("fill", "integers_fwd", f"int32* y, int64 n, int64 low, uint64 range, {_KEY}")
_NORMAL = Kernel("fill", "normal_fwd", f"float* y, int64 n, double mean, double std, {_KEY}")


def as_words(buffer: Buffer) -> Buffer:
    """The buffer as whole numbers of the size of its elements, one dimension."""
    return buffer.view((buffer.size,), np.dtype(f"int{8 * buffer.dtype.itemsize}"))


def _bits(value: Any, dtype: np.dtype) -> int:
    """The bit pattern of a number of this type, as a signed number."""
    with np.errstate(over="ignore"):
        array = np.array(value).astype(dtype)
    return int(array.view(f"int{8 * dtype.itemsize}"))


def constant_launch(ctx: KernelContext, y: Buffer, value: Any) -> Launch:
    """Writes a number that is known now to every element."""
    words = as_words(y)
    grid = elementwise(y.size, per_thread=16 // y.dtype.itemsize)
    return prepare(ctx, _CONSTANT, (words.dtype,), (words, y.size, _bits(value, y.dtype)), grid)


def repeat_launch(ctx: KernelContext, value: Buffer, y: Buffer) -> Launch:
    """Writes the first element of ``value``, of the same type, to every element."""
    source, target = value.view(value.shape, as_words(value).dtype), as_words(y)
    grid = elementwise(y.size, per_thread=16 // y.dtype.itemsize)
    return prepare(ctx, _REPEAT, (target.dtype,), (source, target, y.size), grid)


def key(ctx: KernelContext) -> tuple[Any, ...]:
    """The last arguments of a random kernel: the seed, the operator, the step in device memory."""
    return ctx.seed, ctx.operator_id, ctx.step_buffer


@kernel("ConstantFill", device="cuda", binds=True)
def constant_fill(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = value`` everywhere."""
    (y,) = outputs
    return repeat_launch(ctx, inputs[1], y) if len(inputs) == 2 else constant_launch(ctx, y, args.value)


@kernel("Float16ConstantFill", device="cuda", binds=True)
def float16_constant_fill(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = value`` everywhere."""
    return constant_launch(ctx, outputs[0], args.value)


@kernel("DiagonalFill", device="cuda", binds=True)
def diagonal_fill(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``value`` at equal distances in row-major order: the diagonal, and more of them in tall matrices."""
    (y,) = outputs
    check_diagonal(y.shape)
    step = y.shape[1] + 1 if y.ndim == 2 else sum(y.shape[0] ** k for k in range(y.ndim))
    words = as_words(y)
    arguments = (words, y.size, max(step, 1), _bits(args.value, y.dtype))
    return prepare(ctx, _DIAGONAL, (words.dtype,), arguments, elementwise(y.size))


@kernel("RangeFill", device="cuda", binds=True)
def range_fill(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """0, 1, 2, ... in row-major order."""
    (y,) = outputs
    return prepare(ctx, _RANGE, (), (y, y.size), elementwise(y.size))


def _random_grid(y: Buffer) -> tuple[int, int]:
    """A thread for each block of four words."""
    return elementwise(y.size, per_thread=4)


def _uniform_launch(ctx: KernelContext, y: Buffer, low: float, high: float) -> Launch:
    bottom, span, last = uniform_bounds(y.dtype, low, high)
    if span == 0:
        return constant_launch(ctx, y, bottom)
    arguments = (y, y.size, float(bottom), float(span), float(last), *key(ctx))
    return prepare(ctx, _UNIFORM, (y.dtype,), arguments, _random_grid(y))


def _normal_launch(ctx: KernelContext, y: Buffer, mean: float, std: float) -> Launch:
    arguments = (y, y.size, float(mean), float(std), *key(ctx))
    return prepare(ctx, _NORMAL, (), arguments, _random_grid(y))


@kernel("GaussianFill", device="cuda", binds=True)
def gaussian_fill(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Normal random numbers."""
    return _normal_launch(ctx, outputs[0], args.mean, args.std)


def _against_uniform(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    return "its bounds are data, which decide about the shape" if len(inputs) == 3 else None


@kernel("UniformFill", device="cuda", binds=True, against=_against_uniform)
def uniform_fill(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Uniform random numbers."""
    return _uniform_launch(ctx, outputs[0], args.min, args.max)


@kernel("Float16UniformFill", device="cuda", binds=True)
def float16_uniform_fill(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Uniform random numbers."""
    return _uniform_launch(ctx, outputs[0], args.min, args.max)


@kernel("UniformIntFill", device="cuda", binds=True, against=_against_uniform)
def uniform_int_fill(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Uniform random integers."""
    (y,) = outputs
    limits = np.iinfo(y.dtype)
    low, high = args.min, args.max
    if not limits.min <= low <= high <= limits.max:
        raise KernelError(
            f"range {low}..{high} is empty or does not fit {y.dtype} ({limits.min}..{limits.max})"
        )
    arguments = (y, y.size, low, high - low + 1, *key(ctx))
    return prepare(ctx, _INTEGERS, (), arguments, elementwise(y.size, per_thread=2))


@kernel("XavierFill", device="cuda", binds=True)
def xavier_fill(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Uniform random numbers in [-s, s) with ``s = sqrt(3 / fan_in)``."""
    (y,) = outputs
    bound = math.sqrt(3 * (y.shape[0] if y.ndim else 1) / max(1, y.size))
    return _uniform_launch(ctx, y, -bound, bound)


@kernel("MSRAFill", device="cuda", binds=True)
def msra_fill(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Normal random numbers of standard deviation ``sqrt(2 / fan_out)``."""
    (y,) = outputs
    check_msra(y.shape)
    return _normal_launch(ctx, y, 0.0, math.sqrt(2 * y.shape[1] / max(1, y.size)))
