"""Launchers of pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gpunet.arguments import Arguments
from gpunet.cuda_kernels.launch import elementwise, prepare, rows
from gpunet.cuda_kernels.pieces import Buffers, Launch
from gpunet.cuda_kernels.signature import FLOATS, Kernel
from gpunet.cuda_kernels.window import WINDOW, against_window, window_values
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.pooling import POOLING_RANKS, pooling_window
from gpunet.operators.window import Window
from gpunet.specs import spec

_SIZES: Final = f"int64 outer, int64 inner, int32 include_padding, {WINDOW}"
_FORWARD: Final = {
    (kind, suffix): Kernel("pooling", f"{kind}_pool_{suffix}", f"const T* x, T* y, {_SIZES}", T=FLOATS)
    for kind in ("max", "average")
    for suffix in ("fwd", "large")
}
_MAX_BWD: Final = Kernel(
    "pooling",
    "max_pool_bwd",
    f"const T* x, const T* y, const T* dy, T* dx, int64 outer, int64 inner, {WINDOW}",
    T=FLOATS,
)
_AVERAGE_BWD: Final = Kernel("pooling", "average_pool_bwd", f"const T* dy, T* dx, {_SIZES}", T=FLOATS)

#: From this many positions on, a block handles a window whose positions are neighbours in memory.
_LARGE: Final = 256


def _types(kind: str, end: str = "") -> list[str]:
    return [f"{kind}Pool{suffix}{end}" for suffix in POOLING_RANKS]


def _sizes(op: Operator, x: Any) -> tuple[Window, int, int]:
    """The window, and how many images (with channels first: and channels) and channels (1) there are."""
    window = pooling_window(op, spec(x.shape, x.dtype))
    if window.channels_last:
        return window, x.shape[0], x.shape[-1]
    return window, x.shape[0] * x.shape[1], 1


def _against(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    return against_window(pooling_window(op, inputs[0]))


def _forward(
    kind: str, inputs: Buffers, outputs: Buffers, include_padding: bool, ctx: KernelContext
) -> Launch:
    (x,), (y,) = inputs, outputs
    window, outer, inner = _sizes(ctx.op, x)
    arguments = (x, y, outer, inner, int(include_padding), *window_values(window))
    if window.taps >= _LARGE and inner == 1:
        return prepare(ctx, _FORWARD[kind, "large"], (x.dtype,), arguments, rows(y.size, window.taps))
    return prepare(ctx, _FORWARD[kind, "fwd"], (x.dtype,), arguments, elementwise(y.size))


@kernel(*_types("Max"), device="cuda", binds=True, against=_against)
def max_pool(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y`` is the maximum of each window."""
    return _forward("max", inputs, outputs, False, ctx)


@kernel(*_types("Average"), device="cuda", binds=True, against=_against)
def average_pool(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y`` is the sum of each window times the reciprocal of a count."""
    return _forward("average", inputs, outputs, args.count_include_pad, ctx)


@kernel(*_types("Max", "Gradient"), device="cuda", binds=True, against=_against)
def max_pool_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dX = sum of dY of the windows in which X == Y``."""
    (x, y, dy), (dx,) = inputs, outputs
    window, outer, inner = _sizes(ctx.op, dx)
    arguments = (x, y, dy, dx, outer, inner, *window_values(window))
    return prepare(ctx, _MAX_BWD, (dx.dtype,), arguments, elementwise(dx.size))


@kernel(*_types("Average", "Gradient"), device="cuda", binds=True, against=_against)
def average_pool_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dX = sum of dY of the windows around it``, each times the reciprocal of its count."""
    dy, dx = inputs[2], outputs[0]
    window, outer, inner = _sizes(ctx.op, dx)
    arguments = (dy, dx, outer, inner, int(args.count_include_pad), *window_values(window))
    return prepare(ctx, _AVERAGE_BWD, (dx.dtype,), arguments, elementwise(dx.size))
