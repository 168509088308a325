"""NumPy kernels of the elementwise functions of one tensor."""

from __future__ import annotations

from functools import partial

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.guards import guard, guard_scratch
from gpunet.cpu_fallback.pieces import in_pieces
from gpunet.cpu_fallback.precision import Array, Arrays
from gpunet.cpu_fallback.steps import (
    Specs,
    Step,
    constant,
    copy_step,
    in_turn,
    keep_step,
    mask_scratch,
    wide_constant,
)
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator


def _ufunc_kernel(type: str, function: np.ufunc) -> None:
    """The kernel is one call of a NumPy function."""

    @kernel(type, binds=True)
    @in_pieces
    def bind(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
        return partial(function, inputs[0], outputs[0])


for _type, _function in (
    ("Sqr", np.square),
    ("Exp", np.exp),
    ("Abs", np.abs),
    ("Negative", np.negative),
):
    _ufunc_kernel(_type, _function)


@kernel("Sqrt", binds=True, scratch=guard_scratch)
@in_pieces
def sqrt(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y`` is the square root of X."""
    guarding, (x,) = guard(inputs, ctx)
    return in_turn(guarding, partial(np.sqrt, x, outputs[0]))


@kernel("Log", binds=True, scratch=guard_scratch)
@in_pieces
def log(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = ln(X)``."""
    guarding, (x,) = guard(inputs, ctx)
    return in_turn(guarding, partial(np.log, x, outputs[0]))


@kernel("Sign", binds=True)
@in_pieces
def sign(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = -1, 0 or 1``; 0 for NaN."""
    x, (y,) = inputs[0], outputs
    if x.dtype.kind != "f":
        return partial(np.sign, x, y)

    def run() -> None:
        np.subtract(x > 0, x < 0, out=y, dtype=y.dtype, casting="unsafe")

    return run


@kernel("NegateGradient", binds=True)
def negate_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = X``."""
    return in_turn(copy_step(inputs[0], outputs[0]))


@kernel("Scale", binds=True)
@in_pieces
def scale(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = scale X``."""
    return partial(np.multiply, inputs[0], wide_constant(args.scale, inputs[0]), outputs[0])


@kernel("Clip", binds=True)
@in_pieces
def clip(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = min(max(X, min), max)``."""
    x, (y,) = inputs[0], outputs
    low, high = _limits(args, x)
    return in_turn(partial(np.maximum, x, low, out=y), partial(np.minimum, y, high, out=y))


def _limits(args: Arguments, like: Array) -> tuple[Array, Array]:
    """The limits in the type of the data; its own lowest and largest number by default."""
    info = np.finfo(like.dtype)
    with np.errstate(over="ignore"):  # a limit out of float16's range is an infinity
        low = constant(info.min if args.min is None else args.min, like)
        high = constant(info.max if args.max is None else args.max, like)
    return low, high


def _two_masks(op: Operator, inputs: Specs, outputs: Specs) -> Specs:
    return [inputs[0].with_dtype(np.bool_)] * 2


@kernel("ClipGradient", binds=True, scratch=_two_masks)
@in_pieces
def clip_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``dX = dY`` where ``min < Y < max``, else 0."""
    y, dy = inputs
    inside, below = ctx.scratch
    low, high = _limits(args, y)
    return in_turn(
        partial(np.greater, y, low, inside),
        partial(np.less, y, high, below),
        partial(np.logical_and, inside, below, inside),
        keep_step(inside, dy, outputs[0]),
    )


@kernel("AbsGradient", binds=True, scratch=mask_scratch)
@in_pieces
def abs_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``dX = dY sign(X)``; 0 where X is 0, whatever dY."""
    x, dy = inputs
    (dx,) = outputs
    (mask,) = ctx.scratch
    return in_turn(
        partial(np.copysign, constant(1, dx), x, dx),
        partial(np.multiply, dx, dy, dx),
        partial(np.not_equal, x, constant(0, dx), mask),
        keep_step(mask, dx, dx),
    )
