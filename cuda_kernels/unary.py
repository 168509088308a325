"""Launchers of the elementwise functions of one tensor."""

from __future__ import annotations

import numpy as np

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.guards import guarded_kernel
from gpunet.cuda_kernels.pieces import (
    SIGNLESS,
    Buffers,
    Launch,
    argument_dtype,
    copy_launch,
    gradient_kernel,
    map_launch,
    signless,
    unary_kernel,
)
from gpunet.cuda_kernels.signature import FLOATS, NUMBERS, Kernel
from gpunet.kernels import KernelContext, kernel

for _type in ("Sqr", "Exp", "Abs"):
    unary_kernel(_type, Kernel("unary", f"{_type.lower()}_fwd", "const T* x, T* y, int64 n", T=FLOATS))
guarded_kernel("Sqrt", Kernel("unary", "sqrt_fwd", "const T* x, T* y, int64 n", T=FLOATS))
NEGATIVE = Kernel("unary", "negative_fwd", "const T* x, T* y, int64 n", T=SIGNLESS)
unary_kernel("Sign", Kernel("unary", "sign_fwd", "const T* x, T* y, int64 n", T=NUMBERS))
gradient_kernel("AbsGradient", Kernel("unary", "abs_bwd", "const T* a, const T* b, T* y, int64 n", T=FLOATS))

_LOG = Kernel("unary", "log_fwd", "const T* x, T* y, int64 n, double epsilon", T=FLOATS)
_SCALE = Kernel("unary", "scale_fwd", "const T* x, T* y, int64 n, double factor", T=FLOATS)
_CLIP_FWD = Kernel("unary", "clip_fwd", "const T* x, T* y, int64 n, double low, double high", T=FLOATS)
_CLIP_BWD = Kernel(
    "unary", "clip_bwd", "const T* y, const T* dy, T* dx, int64 n, double low, double high", T=FLOATS
)


@kernel("Negative", device="cuda", binds=True)
def negative(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = -X``."""
    return map_launch(ctx, NEGATIVE, (signless(inputs[0]), signless(outputs[0])))


@kernel("NegateGradient", device="cuda", binds=True)
def negate_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = X``."""
    return copy_launch(ctx, inputs[0], outputs[0])


@kernel("Log", device="cuda", binds=True)
def log(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = ln(X)``, or ``ln(max(X, epsilon))`` with an epsilon above 0."""
    x = inputs[0]
    # Nothing is below minus infinity.
    low = float(argument_dtype(x.dtype).type(args.epsilon)) if args.epsilon > 0 else -np.inf
    return map_launch(ctx, _LOG, (x, outputs[0]), low)


@kernel("Scale", device="cuda", binds=True)
def scale(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = scale X``."""
    return map_launch(ctx, _SCALE, (inputs[0], outputs[0]), args.scale)


def _limits(args: Arguments, like: Buffer) -> tuple[float, float]:
    """The limits, rounded to the type of the data; its own lowest and largest number by default."""
    dtype = argument_dtype(like.dtype)
    info = np.finfo(dtype)
    with np.errstate(over="ignore"):  # a limit out of float16's range is an infinity
        low, high = np.array(
            [info.min if args.min is None else args.min, info.max if args.max is None else args.max]
        ).astype(dtype)
    return float(low), float(high)


@kernel("Clip", device="cuda", binds=True)
def clip(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = min(max(X, min), max)``."""
    return map_launch(ctx, _CLIP_FWD, (inputs[0], outputs[0]), *_limits(args, inputs[0]))


@kernel("ClipGradient", device="cuda", binds=True)
def clip_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dX = dY`` where ``min < Y < max``, else 0."""
    return map_launch(ctx, _CLIP_BWD, (*inputs, outputs[0]), *_limits(args, inputs[0]))
