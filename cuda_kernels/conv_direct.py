"""Launchers of the convolution without a library, engine ``DIRECT``.

They take any type, group, dilation, padding and order of dimensions, over one to three spatial dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.broadcast import launch_sum, plan_sum
from gpunet.cuda_kernels.launch import Grid, blocks, elementwise, in_order, prepare
from gpunet.cuda_kernels.pieces import Buffers, Launch, copy_launch
from gpunet.cuda_kernels.signature import FLOATS, Kernel
from gpunet.cuda_kernels.window import WINDOW, against_window, window_values
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.conv_transpose import TRANSPOSED, transposed_window
from gpunet.operators.convolution import CONVOLUTIONS, convolution_window
from gpunet.operators.window import Window
from gpunet.specs import Shape, TensorSpec, spec

#: What the cuDNN kernels leave, or a definition asks for by name.
DIRECT: Final = "DIRECT"
#: How messages name them.
INSTEAD: Final = f"engine {DIRECT!r}"
FORWARD_TYPES: Final = tuple(CONVOLUTIONS)
GRADIENT_TYPES: Final = tuple(f"{type}Gradient" for type in CONVOLUTIONS)

#: What the kernels are told of a convolution: GPUNET_CONVOLUTION_PARAMETERS of include/conv_tiles.cuh.
SIZES: Final = f"int64 batch, int32 channels, int32 filters, int32 groups, int32 channels_last, {WINDOW}"
_FWD = Kernel("conv_direct", "conv_fwd", f"const T* x, const T* w, const T* bias, T* y, {SIZES}", T=FLOATS)
_DATA = Kernel(
    "conv_direct", "conv_data", f"const T* w, const T* dy, const T* bias, T* dx, {SIZES}", T=FLOATS
)
_FILTER = Kernel(
    "conv_direct",
    "conv_filter",
    f"const T* x, const T* dy, T* dw, uint8* partial, int64 slices, {SIZES}",
    T=FLOATS,
)
_FILTER_SUM = Kernel(
    "conv_direct", "conv_filter_sum", "const uint8* partial, T* dw, int64 size, int64 slices", T=FLOATS
)

#: Blocks that are worth having for the gradient of the filters, and windows below which a sum is not cut.
#: They decide the order of additions, so they do not depend on the device.
_WANTED_BLOCKS: Final = 256
_SLICE: Final = 512
#: Columns of a tile and threads of its block, as in include/conv_tiles.cuh.
_COLUMNS: Final = 64
_THREADS: Final = 256


def window_of(op: Operator, x: Any, w: Any) -> Window:
    """The window of a convolution on X and W, given as specs or buffers.

    Of a transposed convolution X is the larger side, its output: all launchers here take it so.
    """
    images, filters = spec(x.shape, x.dtype), spec(w.shape, w.dtype)
    if op.type.removesuffix("Gradient") == TRANSPOSED:
        return transposed_window(op.args, images, filters, of_output=True)
    return convolution_window(op.args, images, filters)


def _sizes(op: Operator, x: Any, w: Any) -> tuple[Window, tuple[int, ...]]:
    window = window_of(op, x, w)
    channels = x.shape[-1 if window.channels_last else 1]
    shape = (x.shape[0], channels, w.shape[0], op.args.group, int(window.channels_last))
    return window, (*shape, *window_values(window))


def _tiles(count_rows: int, columns: int, groups: int) -> int:
    """Number of tiles of a product; few rows share a tile of 16, more one of 64."""
    height = 16 if count_rows <= 16 else 64
    return -(-count_rows // height) * -(-columns // _COLUMNS) * groups


def _grid(tiles: int) -> Grid:
    return blocks(tiles, _THREADS)


def against(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    """Why the kernels cannot run a convolution."""
    size = math.prod(inputs[1].shape[1:])
    return against_window(window_of(op, inputs[0], inputs[1]), size)


@kernel(*FORWARD_TYPES, device="cuda", engine=DIRECT, binds=True, against=against)
def convolution(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = W * X + b``."""
    x, w, *bias = inputs
    sizes, grid = forward_plan(ctx.op, x, w)
    return prepare(ctx, _FWD, (x.dtype,), (x, w, bias[0] if bias else None, outputs[0], *sizes), grid)


def forward_plan(op: Operator, x: Any, w: Any) -> tuple[tuple[int, ...], Grid]:
    """The sizes of a forward product of X and W, as :data:`SIZES` declares them, and its grid."""
    window, sizes = _sizes(op, x, w)
    groups = op.args.group
    return sizes, _grid(_tiles(w.shape[0] // groups, x.shape[0] * window.positions, groups))


def _filter_slices(op: Operator, x: Any, w: Any) -> tuple[int, int]:
    """Number of tiles of the gradient of the filters, and of slices of its sums."""
    window, groups = window_of(op, x, w), op.args.group
    tiles = _tiles(w.shape[0] // groups, math.prod(w.shape[1:]), groups)
    windows = x.shape[0] * window.positions
    return tiles, max(1, min(-(-_WANTED_BLOCKS // max(1, tiles)), windows // _SLICE))


def gradient_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    """Memory for the slices of the gradient of the filters, and then of that of the bias.

    ``inputs`` are X, W and dY, or (X being the output of a transposed convolution) its gradient and W.
    """
    x, w = inputs[0], inputs[1]
    _, slices = _filter_slices(op, x, w)
    sizes = [slices * w.size * max(4, w.dtype.itemsize) if slices > 1 else 0]
    if gradient_outputs(op.args, outputs)[1] is not None:
        partial = plan_sum(*_channels_of(op, inputs[-1] if len(inputs) > 2 else x)).partial
        sizes.append(0 if partial is None else partial.nbytes)
    return [spec((max(sizes),), np.uint8)]


def gradient_outputs(args: Arguments, outputs: Sequence[Any]) -> tuple[Any, Any | None, Any | None]:
    """(dW, db, dX) of a gradient operator; ``None`` for what it does not give."""
    db = None if args.no_bias or len(outputs) < 2 else outputs[1]
    dx = outputs[-1] if len(outputs) == (2 if args.no_bias else 3) else None
    return outputs[0], db, dx


@kernel(*GRADIENT_TYPES, device="cuda", engine=DIRECT, binds=True, scratch=gradient_scratch, against=against)
def convolution_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dW = dY * X``, ``dX = dY * W``, db the sum of dY."""
    x, w, dy = inputs
    dw, db, dx = gradient_outputs(args, outputs)
    launches = [filter_gradient(ctx, x, w, dy, dw)]
    if db is not None:
        launches.append(channel_sums(ctx, dy, db))
    if dx is not None:
        launches.append(data_gradient(ctx, x, w, dy, dx))
    return in_order(*launches)


def _channels_of(op: Operator, dy: Any) -> tuple[Shape, Shape]:
    """The shape of dY with its positions taken together, and that of its sum for each channel."""
    if op.args.order == "NHWC":
        return (math.prod(dy.shape[:-1]), dy.shape[-1]), (1, dy.shape[-1])
    return (*dy.shape[:2], math.prod(dy.shape[2:])), (1, dy.shape[1], 1)


def channel_sums(ctx: KernelContext, dy: Buffer, db: Buffer) -> Launch:
    """db, the sum of dY over images and positions; the first scratch is that of :func:`gradient_scratch`."""
    full, shape = _channels_of(ctx.op, dy)
    if full == shape:
        return copy_launch(ctx, dy, db)
    partial = None if plan_sum(full, shape).partial is None else ctx.scratch[0]
    return launch_sum(ctx, dy, db, full, shape, partial, wide=True)


def data_gradient(
    ctx: KernelContext, x: Buffer, w: Buffer, dy: Buffer, dx: Buffer, bias: Buffer | None = None
) -> Launch:
    """``dX = dY * W``; a transposed convolution adds ``bias``, one number a channel of dX."""
    window, sizes = _sizes(ctx.op, x, w)
    channels = w.shape[-1 if window.channels_last else 1]
    tiles = _tiles(channels, x.shape[0] * math.prod(window.image), ctx.op.args.group)
    return prepare(ctx, _DATA, (x.dtype,), (w, dy, bias, dx, *sizes), _grid(tiles))


def filter_gradient(ctx: KernelContext, x: Buffer, w: Buffer, dy: Buffer, dw: Buffer) -> Launch:
    """``dW = dY * X``; the first scratch is that of :func:`gradient_scratch`."""
    _, sizes = _sizes(ctx.op, x, w)
    tiles, slices = _filter_slices(ctx.op, x, w)
    partial = ctx.scratch[0] if slices > 1 else None
    first = prepare(ctx, _FILTER, (x.dtype,), (x, dy, dw, partial, slices, *sizes), _grid(tiles * slices))
    if slices == 1:
        return first
    last = prepare(ctx, _FILTER_SUM, (x.dtype,), (partial, dw, dw.size, slices), elementwise(dw.size))
    return in_order(first, last)
