"""NumPy kernels of the transposed convolution.

They are those of a convolution from Y to X with the same filters (:mod:`.columns`): Y is what its gradient of
images gives for X, dX its result on dY.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.columns import (
    Layout,
    memory_of,
    needs_stacking,
    plan,
    spread_blocks,
    stack_blocks,
)
from gpunet.cpu_fallback.products import product
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.conv_transpose import TRANSPOSED, transposed_window
from gpunet.specs import TensorSpec, spec

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]
Run = Callable[[], Any]


def _layout(args: Arguments, x: Any, w: Any) -> Layout:
    """The layout of the convolution from Y to X, from X and W given as specs or as arrays."""
    window = transposed_window(args, spec(x.shape, x.dtype), spec(w.shape, w.dtype))
    channels = w.shape[-1 if window.channels_last else 1] * args.group
    return plan(window, args.group, x.shape[0], channels, w.shape[0], x.dtype)


def _columns(layout: Layout, dtype: np.dtype) -> list[TensorSpec]:
    """Memory for columns, and for stacked images like X."""
    stacking = needs_stacking(layout, dtype)
    columns = 0 if layout.pointwise and not stacking else layout.columns_size()
    return [spec((columns,), layout.dtype), spec((layout.output_size() if stacking else 0,), layout.dtype)]


def _sums(layout: Layout, target: Array, declared: Array) -> Array:
    """What sums for ``target`` go to: itself, or memory of the type that they are made in."""
    if target.dtype == layout.dtype and target.flags.c_contiguous:
        return target
    return memory_of(target.size, layout.dtype, declared)[: target.size].reshape(target.shape)


def _forward_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    layout = _layout(op.args, inputs[0], inputs[1])
    sums = 0 if outputs[0].dtype == layout.dtype else outputs[0].size
    return [*_columns(layout, inputs[0].dtype), spec((sums,), layout.dtype)]


@kernel(TRANSPOSED, binds=True, scratch=_forward_scratch)
def conv_transpose(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Run:
    """``columns(Y) = W^T X``, added up where columns meet; ``+ b``."""
    x, w, *bias = inputs
    y = outputs[0]
    layout = _layout(args, x, w)
    total = _sums(layout, y, ctx.scratch[2])
    backs = spread_blocks(layout, total, ctx.scratch[0])
    stacks = stack_blocks(layout, x, ctx.scratch[1])
    spatial = (1,) * layout.window.rank

    def run() -> None:
        filters = w.reshape(layout.filter_shape).astype(layout.dtype, copy=False).transpose(0, 2, 1)
        total.fill(0)
        for back, (images, copy, products) in zip(backs, stacks, strict=True):
            if copy is not None:
                np.copyto(copy, images, casting="same_kind")
            product(filters, products, back.matrices)
            back.scatter()
        if bias:
            np.add(
                total, bias[0] if layout.window.channels_last else bias[0].reshape(-1, *spatial), out=total
            )
        if total is not y:
            np.copyto(y, total, casting="same_kind")

    return run


def _gradient_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    layout = _layout(op.args, inputs[0], inputs[1])
    columns, stacked = _columns(layout, inputs[0].dtype)
    return [columns, stacked, stacked, *(spec((inputs[1].size,), layout.dtype),) * 2]


@kernel(f"{TRANSPOSED}Gradient", binds=True, scratch=_gradient_scratch)
def conv_transpose_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Run:
    """``dW = X columns(dY)^T``, ``dX = W columns(dY)``, db the sum of dY."""
    x, w, dy = inputs
    layout = _layout(args, x, w)
    dw = outputs[0]
    db = None if args.no_bias or len(outputs) < 2 else outputs[1]
    dx = outputs[-1] if len(outputs) == (2 if args.no_bias else 3) else None
    columns, stacked, results, *sums = ctx.scratch
    spreads, stacks = spread_blocks(layout, dy, columns), stack_blocks(layout, x, stacked)
    targets = stack_blocks(layout, dx, results) if dx is not None else []
    total, part = (memory_of(dw.size, layout.dtype, s)[: dw.size].reshape(layout.filter_shape) for s in sums)
    axes = tuple(range(dy.ndim - 1)) if layout.window.channels_last else (0, *range(2, dy.ndim))

    def run() -> None:
        filters = w.reshape(layout.filter_shape).astype(layout.dtype, copy=False)
        total.fill(0)
        for i, (spread, (images, copy, products)) in enumerate(zip(spreads, stacks, strict=True)):
            if copy is not None:
                np.copyto(copy, images, casting="same_kind")
            spread.gather()
            product(products, spread.matrices.transpose(0, 2, 1), part)
            np.add(total, part, out=total)
            if dx is not None:
                place, made, matrices = targets[i]
                product(filters, spread.matrices, matrices)
                if made is not None:
                    np.copyto(place, made, casting="same_kind")
        np.copyto(dw, total.reshape(dw.shape), casting="same_kind")
        if db is not None:
            # With out=db NumPy would round float16 again and again.
            np.copyto(db, np.add.reduce(dy, axis=axes, dtype=layout.dtype), casting="same_kind")

    return run
