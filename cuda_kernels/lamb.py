"""Launchers of the LAMB update and its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gpunet.arguments import Arguments
from gpunet.cuda_kernels.launch import THREADS, blocks, elementwise, in_order, prepare
from gpunet.cuda_kernels.optimizer import square_sums_launch, square_sums_scratch
from gpunet.cuda_kernels.pieces import Buffers, Launch, nothing
from gpunet.cuda_kernels.signature import Kernel
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.specs import TensorSpec

_REALS: Final = ("float32", "float64")
_DIRECTION: Final = Kernel(
    "lamb",
    "lamb_direction",
    "const T* w, const T* m, const T* v, const T* g, const int64* iteration, T* new_m, T* new_v, "
    "T* direction, int64 n, double beta1, double beta2, double epsilon, double decay",
    T=_REALS,
)
_STEP: Final = Kernel(
    "lamb",
    "lamb_step",
    "const T* w, const T* direction, const T* squares, const T* direction_squares, const L* lr, T* new_w, "
    "int64 n, int64 count",
    T=_REALS,
    L=_REALS,
)
_SQUARES: Final = Kernel(
    "lamb",
    "segment_squares",
    "const int64* starts, const T* x, T* squares, int64 n, int64 segments, int64 row",
    T=_REALS,
)
_SCALE: Final = Kernel(
    "lamb",
    "scale_by_norms",
    "const T* x, const int64* starts, const T* squares, T* y, int64 n, int64 segments, double trust, "
    "double offset, double lowest, double highest",
    T=_REALS,
)


def _scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    sums = square_sums_scratch(inputs[0])
    return [inputs[0], sums, sums]


@kernel("Lamb", device="cuda", binds=True, scratch=_scratch)
def lamb(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Moments, the direction ``u``, then ``w' = w + lr |w| / |u| u``."""
    w, m, v, g, lr, iteration = inputs
    new_w, new_m, new_v = outputs
    direction, squares, direction_squares = ctx.scratch
    constants = (args.beta1, args.beta2, args.epsilon, args.weight_decay)
    made = (w, m, v, g, iteration, new_m, new_v, direction, w.size, *constants)
    last = (w, direction, squares, direction_squares, lr, new_w, w.size, squares.size)
    grid = elementwise(w.size, per_thread=4)
    return in_order(
        prepare(ctx, _DIRECTION, (w.dtype,), made, grid),
        square_sums_launch(ctx, w, squares),
        square_sums_launch(ctx, direction, direction_squares),
        prepare(ctx, _STEP, (w.dtype, lr.dtype), last, grid),
    )


@kernel("LambDirection", device="cuda", binds=True)
def lamb_direction(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Moments and the direction ``u``."""
    w, m, v, g, iteration = inputs
    direction, new_m, new_v = outputs
    constants = (args.beta1, args.beta2, args.epsilon, args.weight_decay)
    made = (w, m, v, g, iteration, new_m, new_v, direction, w.size, *constants)
    return prepare(ctx, _DIRECTION, (w.dtype,), made, elementwise(w.size, per_thread=4))


@kernel("SegmentSquares", device="cuda", binds=True)
def segment_squares(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Sums of squares of segments, a launch for each tensor."""
    starts, *tensors = inputs
    segments = starts.size - 1
    if segments == 0:
        return nothing
    grid = blocks(segments, 2 * THREADS)
    return in_order(
        *(
            prepare(ctx, _SQUARES, (x.dtype,), (starts, x, outputs[0], x.size, segments, row), grid)
            for row, x in enumerate(tensors)
        )
    )


@kernel("ScaleByNorms", device="cuda", binds=True)
def scale_by_norms(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``trust / (|update| / |parameter| + offset)`` times each segment."""
    x, starts, squares = inputs
    segments = starts.size - 1
    constants = (args.trust, args.offset, args.lowest, args.highest)
    return prepare(
        ctx,
        _SCALE,
        (x.dtype,),
        (x, starts, squares, outputs[0], x.size, segments, *constants),
        blocks(segments + 1, 2 * THREADS),
    )
