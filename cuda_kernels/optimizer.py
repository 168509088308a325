"""Launchers of the dense parameter updates.

Rates and iteration numbers are read by the kernels, never on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import device_errors
from gpunet.cuda_kernels.launch import THREADS, Grid, elementwise, in_order, one_block, prepare, rows
from gpunet.cuda_kernels.pieces import Buffers, Launch
from gpunet.cuda_kernels.signature import Kernel
from gpunet.kernels import KernelContext, ScratchFunction, kernel
from gpunet.operator import Operator
from gpunet.specs import TensorSpec, spec

_REALS: Final = ("float32", "float64")


def _declare(name: str, parameters: str) -> Kernel:
    """A kernel with the types of the parameter and of the rate."""
    return Kernel("optimizer", name, parameters, T=_REALS, L=_REALS)


_MOMENTUM_SGD = _declare(
    "momentum_sgd_fwd",
    "const T* g, const T* m, const L* lr, const T* w, T* step, T* new_m, T* new_w, "
    "const T* gradient_weight, const T* param_weight, int64 n, double momentum, int32 nesterov",
)
_ADAGRAD = _declare(
    "adagrad_fwd",
    "const T* w, const T* h, const T* g, const L* lr, T* new_w, T* new_h, T* rates, T* updates, int64 n, "
    "double epsilon, double decay, double weight_decay",
)
_ADADELTA = _declare(
    "adadelta_fwd",
    "const T* w, const T* h, const T* d, const T* g, const L* lr, T* new_w, T* new_h, T* new_d, int64 n, "
    "double epsilon, double decay",
)
_RMSPROP = _declare(
    "rmsprop_fwd",
    "const T* g, const T* squares, const T* m, const L* lr, T* step, T* new_squares, T* new_m, int64 n, "
    "double decay, double momentum, double epsilon",
)
_ADAM = _declare(
    "adam_fwd",
    "const T* w, const T* m, const T* v, const T* g, const L* lr, const int64* iteration, T* new_w, "
    "T* new_m, T* new_v, T* effective, const T* gradient_weight, const T* param_weight, int64 n, "
    "double beta1, double beta2, double epsilon",
)
_FTRL = _declare(
    "ftrl_fwd",
    "const T* w, const T* nz, const T* g, const L* rate, T* new_w, T* new_nz, int64 n, double alpha, "
    "double beta, double lambda1, double lambda2",
)
_WNGRAD = _declare(
    "wngrad_fwd",
    "const T* w, const T* scale, const T* g, const L* lr, T* new_w, T* updates, int64 n, double epsilon",
)
_WNGRAD_SCALE = _declare(
    "wngrad_scale",
    "const T* scale, const L* lr, const T* partial, T* new_scale, T* rate, int64 count, double epsilon",
)
_STORM = _declare(
    "storm_fwd",
    "const T* w, const T* m, const T* total, const T* g, const L* lr, T* new_w, T* new_m, int64 n, "
    "double momentum, double beta",
)
_LARS = _declare(
    "lars_fwd",
    "const T* squares, const T* gradient_squares, const L* decay, const L* trust, const L* upper, T* y, "
    "int64 count, double offset, double lower",
)
_WEIGHT_SCALE = Kernel(
    "optimizer",
    "weight_scale_fwd",
    "const T* w, const int64* iteration, T* new_w, int64 n, int64 step, int64 end, double scale",
    T=_REALS,
)
_SQUARE_SUMS = Kernel("optimizer", "square_sums", "const T* x, T* partial, int64 n, int64 count", T=_REALS)
_STORM_TOTAL = Kernel(
    "optimizer",
    "storm_total",
    "const T* total, const T* partial, T* new_total, int64 count",
    T=_REALS,
)
_YELLOWFIN = Kernel(
    "optimizer",
    "yellowfin_fwd",
    "const T* w, const T* m, const T* lr, const T* mu, const T* g_avg, const T* g2_avg, const T* g, "
    "T* new_w, T* new_m, T* new_g_avg, T* new_g2_avg, T* partial, int64 n, int64 count, double beta, "
    "int32 nesterov",
    T=_REALS,
)
_YELLOWFIN_TUNE = Kernel(
    "optimizer",
    "yellowfin_tune",
    "const T* lr, const T* mu, const T* window, const T* memory, const int64* iteration, const T* partial, "
    "T* new_lr, T* new_mu, T* new_window, T* new_memory, uint64* errors, uint64 code, int64 count, "
    "int64 width, double beta, double epsilon, int32 debias",
    T=_REALS,
)

#: Elements whose squares a block sums at least, and the largest number of blocks. They decide the order of
#: additions, so they do not depend on the device.
_BLOCK_ELEMENTS: Final = 4096
_MAX_SUMS: Final = 256


def _sums(size: int) -> int:
    """Number of blocks that sum squares."""
    return max(1, min(-(-size // _BLOCK_ELEMENTS), _MAX_SUMS))


def square_sums_scratch(x: Any) -> TensorSpec:
    """The memory that :func:`square_sums_launch` of ``x`` wants."""
    return spec((_sums(math.prod(x.shape)),), x.dtype)


def _partial(count: int) -> ScratchFunction:
    """Scratch for ``count`` sums over tensors like input 0."""

    def scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
        return [square_sums_scratch(inputs[0])] * count

    return scratch


def square_sums_launch(ctx: KernelContext, x: Buffer, partial: Buffer) -> Launch:
    """Sums the squares of ``x``; the next kernel adds up the parts."""
    arguments = (x, partial, x.size, partial.size)
    return prepare(ctx, _SQUARE_SUMS, (x.dtype,), arguments, rows(partial.size, THREADS))


def storm_total_launch(ctx: KernelContext, total: Buffer, partial: Buffer, new_total: Buffer) -> Launch:
    """``new_total = total + `` the sum of the parts."""
    arguments = (total, partial, new_total, partial.size)
    return prepare(ctx, _STORM_TOTAL, (total.dtype,), arguments, one_block(partial.size))


def wngrad_scale_launch(
    ctx: KernelContext,
    scale: Buffer,
    lr: Buffer,
    partial: Buffer,
    new_scale: Buffer,
    rate: Buffer | None,
    epsilon: float,
) -> Launch:
    """``new_scale = scale + `` the sum of the parts ``/ (scale + epsilon)``, and the rate that was used."""
    arguments = (scale, lr, partial, new_scale, rate, partial.size, epsilon)
    return prepare(ctx, _WNGRAD_SCALE, (scale.dtype, lr.dtype), arguments, one_block(partial.size))


def _grid(x: Buffer) -> Grid:
    """For kernels that move 16 bytes of each tensor at once."""
    return elementwise(x.size, per_thread=16 // x.dtype.itemsize)


def _optional(buffers: Sequence[Buffer], index: int) -> Buffer | None:
    return buffers[index] if len(buffers) > index else None


def momentum_launch(
    inputs: Buffers,
    outputs: Buffers,
    args: Arguments,
    ctx: KernelContext,
    weights: Sequence[Buffer | None] = (None, None),
) -> Launch:
    """The update; ``weights`` of gradient and parameter make the gradient that it takes."""
    g, m, lr = inputs[:3]
    arguments = (
        *(g, m, lr, _optional(inputs, 3)),
        *(outputs[0], outputs[1], _optional(outputs, 2), *weights),
        *(g.size, args.momentum, int(args.nesterov)),
    )
    return prepare(ctx, _MOMENTUM_SGD, (g.dtype, lr.dtype), arguments, _grid(g))


@kernel("MomentumSGD", "MomentumSGDUpdate", device="cuda", binds=True)
def momentum_sgd(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Moment and step, and with the update ``param' = param - step``."""
    return momentum_launch(inputs, outputs, args, ctx)


@kernel("Adagrad", device="cuda", binds=True)
def adagrad(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``h' = decay h + g^2``, ``w' = w + lr g / (sqrt(h') + eps)``."""
    w, h, g, lr = inputs
    arguments = (
        *(w, h, g, lr, outputs[0], outputs[1], _optional(outputs, 2), _optional(outputs, 3)),
        *(w.size, args.epsilon, args.decay, args.weight_decay),
    )
    return prepare(ctx, _ADAGRAD, (w.dtype, lr.dtype), arguments, _grid(w))


@kernel("Adadelta", device="cuda", binds=True)
def adadelta(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``h' = r h + (1-r) g^2``, ``u = g sqrt((d + eps) / (h' + eps))``, ``d' = r d + (1-r) u^2``."""
    w, lr = inputs[0], inputs[4]
    arguments = (*inputs, *outputs, w.size, args.epsilon, args.decay)
    return prepare(ctx, _ADADELTA, (w.dtype, lr.dtype), arguments, _grid(w))


@kernel("RmsProp", device="cuda", binds=True)
def rmsprop(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``ms' = ms + (1-r)(g^2 - ms)``, ``mom' = mu mom + lr g / sqrt(eps + ms')``."""
    g, lr = inputs[0], inputs[3]
    arguments = (*inputs, *outputs, g.size, args.decay, args.momentum, args.epsilon)
    return prepare(ctx, _RMSPROP, (g.dtype, lr.dtype), arguments, _grid(g))


@kernel("Adam", device="cuda", binds=True)
def adam(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Moments, then ``w' = w + lr c m' / (sqrt(v') + eps)``."""
    return adam_launch(inputs, outputs, args, ctx)


def adam_launch(
    inputs: Buffers,
    outputs: Buffers,
    args: Arguments,
    ctx: KernelContext,
    weights: Sequence[Buffer | None] = (None, None),
) -> Launch:
    """The update; ``weights`` of gradient and parameter make the gradient that it takes."""
    w, lr = inputs[0], inputs[4]
    constants = (args.beta1, args.beta2, args.epsilon)
    arguments = (*inputs, *outputs[:3], _optional(outputs, 3), *weights, w.size, *constants)
    # Each block works out the correction in double precision first: fewer blocks.
    grid = elementwise(w.size, per_thread=4)
    return prepare(ctx, _ADAM, (w.dtype, lr.dtype), arguments, grid)


@kernel("Ftrl", device="cuda", binds=True)
def ftrl(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The proximal step; a fourth input takes the place of the argument alpha."""
    w, nz, g = inputs[:3]
    rate = _optional(inputs, 3)
    types = (w.dtype, w.dtype if rate is None else rate.dtype)
    constants = (args.alpha, args.beta, args.lambda1, args.lambda2)
    return prepare(ctx, _FTRL, types, (w, nz, g, rate, *outputs, w.size, *constants), elementwise(w.size))


@kernel("WeightScale", device="cuda", binds=True)
def weight_scale(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Scales in iterations that are multiples of the step."""
    w = inputs[0]
    constants = (args.stepsize, args.upper_bound_iter, args.scale)
    return prepare(ctx, _WEIGHT_SCALE, (w.dtype,), (*inputs, *outputs, w.size, *constants), _grid(w))


@kernel("Wngrad", device="cuda", binds=True, scratch=_partial(1))
def wngrad(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``w' = w + lr g / (b + eps)``, ``b' = b + sum(g^2) / (b + eps)``."""
    w, scale, g, lr = inputs
    (partial,) = ctx.scratch
    update = (w, scale, g, lr, outputs[0], _optional(outputs, 3), w.size, args.epsilon)
    return in_order(
        square_sums_launch(ctx, g, partial),
        prepare(ctx, _WNGRAD, (w.dtype, lr.dtype), update, _grid(w)),
        wngrad_scale_launch(ctx, scale, lr, partial, outputs[1], _optional(outputs, 2), args.epsilon),
    )


@kernel("Storm", device="cuda", binds=True, scratch=_partial(1))
def storm(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The sum of squares first, then the step with the rate that follows from it."""
    w, m, total, g, lr = inputs
    (partial,), new_total = ctx.scratch, outputs[2]
    update = (w, m, new_total, g, lr, *outputs[:2], w.size, args.momentum, args.beta)
    return in_order(
        square_sums_launch(ctx, g, partial),
        storm_total_launch(ctx, total, partial, new_total),
        prepare(ctx, _STORM, (w.dtype, lr.dtype), update, _grid(w)),
    )


def _against_lars(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    found = {x.dtype for x in inputs[2:]}
    return None if len(found) == 1 else "wd, trust and lr_max are of different types"


@kernel("Lars", device="cuda", binds=True, scratch=_partial(2), against=_against_lars)
def lars(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``trust / (|dX| / |X| + wd + offset)`` between the bounds."""
    x, dx, decay, trust, upper = inputs
    squares, gradient_squares = ctx.scratch
    last = (squares, gradient_squares, decay, trust, upper, outputs[0], squares.size)
    return in_order(
        square_sums_launch(ctx, x, squares),
        square_sums_launch(ctx, dx, gradient_squares),
        prepare(
            ctx, _LARS, (x.dtype, decay.dtype), (*last, args.offset, args.lr_min), one_block(squares.size)
        ),
    )


def _yellowfin_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    return [spec((2 * _sums(inputs[0].size),), inputs[0].dtype)]


@kernel("YellowFin", device="cuda", binds=True, scratch=_yellowfin_scratch)
def yellowfin(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """A momentum step with the tuned values so far, then new statistics and new values from them."""
    w, m, lr, mu, window, g_avg, g2_avg, memory, g, iteration = inputs
    new_w, new_m, new_lr, new_mu, new_window, new_g_avg, new_g2_avg, new_memory = outputs
    (partial,), types = ctx.scratch, (w.dtype,)
    count = partial.size // 2
    errors = device_errors.report(
        ctx,
        "input iter is {value}, wanted at least 1: Iter or AtomicIter counts up ahead of the update",
    )
    step = (
        *(w, m, lr, mu, g_avg, g2_avg, g, new_w, new_m, new_g_avg, new_g2_avg, partial),
        *(w.size, count, args.beta, int(args.nesterov)),
    )
    tune = (
        *(lr, mu, window, memory, iteration, partial, new_lr, new_mu, new_window, new_memory),
        *(*errors, count, window.size, args.beta, args.epsilon, int(args.zero_debias)),
    )
    return in_order(
        prepare(ctx, _YELLOWFIN, types, step, rows(count, THREADS)),
        prepare(ctx, _YELLOWFIN_TUNE, types, tune, one_block(count)),
    )
