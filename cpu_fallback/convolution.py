"""NumPy kernels of convolution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.columns import (
    Layout,
    canonical_images,
    columns_views,
    image_matrices,
    needs_stacking,
    padding_views,
    plan,
    stacked_outputs,
    tap_pairs,
)
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.convolution import CONVOLUTIONS, convolution_window
from gpunet.specs import TensorSpec, spec

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]
Run = Callable[[], None]


class Spread(NamedTuple):
    """The columns of one block of images."""

    paddings: list[Array]  #: parts of the columns that lie in the padding
    pairs: list[
        tuple[Array, Array]
    ]  #: (columns, images): equal shapes, a pair a tap; none where the images serve as columns
    matrices: Array  #: columns as matrices (group, element, position)

    def gather(self) -> None:
        """Copies the images into the columns."""
        for view in self.paddings:
            view.fill(0)
        for columns, images in self.pairs:
            np.copyto(columns, images, casting="same_kind")

    def scatter(self) -> None:
        """Adds the columns to the images."""
        for columns, images in self.pairs:
            np.add(images, columns, out=images, casting="same_kind")


class Stack(NamedTuple):
    """The outputs of one block of images, or their gradients."""

    outputs: Array  #: canonical
    copy: Array | None  #: a copy, where their own memory does not serve as matrices
    matrices: Array  #: one of the two as matrices (group, output channel, position)


def _layout(args: Arguments, x: Any, w: Any) -> Layout:
    """The layout for X and W, given as specs or as arrays."""
    window = convolution_window(args, spec(x.shape, x.dtype), spec(w.shape, w.dtype))
    channels = x.shape[-1 if window.channels_last else 1]
    return plan(window, args.group, x.shape[0], channels, w.shape[0], x.dtype)


def _memory(ctx: KernelContext, index: int, size: int, dtype: np.dtype) -> Array:
    """Flat scratch memory; made here where none was declared, since only the arrays tell that they are not contiguous."""
    declared: Array = ctx.scratch[index]
    return declared if declared.size >= size else np.empty(size, dtype)


def _spreads(layout: Layout, images: Array, ctx: KernelContext) -> list[Spread]:
    """The columns of each block of ``images`` in the first scratch memory."""
    window = layout.window
    canonical = canonical_images(images, layout.groups, window.channels_last)
    spreads = []
    for first, last in layout.blocks():
        matrices = image_matrices(layout, images, first, last) if layout.pointwise else None
        if matrices is not None:
            spreads.append(Spread([], [], matrices))
        else:
            memory = _memory(ctx, 0, layout.columns_size(), layout.dtype)
            columns, matrices = columns_views(layout, memory, last - first)
            pairs = tap_pairs(window, columns, canonical[:, :, first:last])
            spreads.append(Spread(padding_views(window, columns), pairs, matrices))
    return spreads


def _stacks(layout: Layout, outputs: Array, ctx: KernelContext) -> list[Stack]:
    """The outputs of each block, in the second scratch memory where they have to be copied."""
    canonical = canonical_images(outputs, layout.groups, layout.window.channels_last)
    stacks = []
    for first, last in layout.blocks():
        copy = None
        matrices = image_matrices(layout, outputs, first, last)
        if matrices is None:
            memory = _memory(ctx, 1, layout.output_size(), layout.dtype)
            copy, matrices = stacked_outputs(layout, memory, last - first)
        stacks.append(Stack(canonical[:, :, first:last], copy, matrices))
    return stacks


def _filter_matrices(layout: Layout, filters: Array) -> Array:
    return filters.reshape(layout.filter_shape).astype(layout.dtype, copy=False)


def _scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    layout = _layout(op.args, inputs[0], inputs[1])
    stacking = needs_stacking(layout, inputs[0].dtype)
    columns = 0 if layout.pointwise and not stacking else layout.columns_size()
    return [spec((columns,), layout.dtype), spec((layout.output_size() if stacking else 0,), layout.dtype)]


@kernel(*CONVOLUTIONS, binds=True, scratch=_scratch)
def convolution(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Run:
    """``Y = W columns(X) + b``, a matrix product for each block of images."""
    x, w = inputs[0], inputs[1]
    layout = _layout(args, x, w)
    spreads, stacks = _spreads(layout, x, ctx), _stacks(layout, outputs[0], ctx)
    bias = inputs[2] if len(inputs) > 2 else None

    def run() -> None:
        filters = _filter_matrices(layout, w)
        for spread, (results, copy, products) in zip(spreads, stacks):
            spread.gather()
            np.matmul(filters, spread.matrices, out=products)
            if copy is None:
                if bias is not None:
                    np.add(products, bias.reshape(*products.shape[:2], 1), out=products)
            elif bias is not None:
                tall = bias.reshape(*copy.shape[:2], *(1,) * (copy.ndim - 2))
                np.add(copy, tall, out=results, casting="same_kind")
            else:
                np.copyto(results, copy, casting="same_kind")

    return run


def _gradient_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    layout = _layout(op.args, inputs[0], inputs[1])
    parts = 1 if layout.block < layout.batch else 0
    totals = 1 if layout.dtype != inputs[1].dtype else 0
    size = inputs[1].size
    return [
        *_scratch(op, inputs, outputs),
        spec((parts * size,), layout.dtype),
        spec((totals * size,), layout.dtype),
    ]


@kernel(*(f"{type}Gradient" for type in CONVOLUTIONS), binds=True, scratch=_gradient_scratch)
def convolution_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Run:
    """``dW = dY columns(X)^T``, ``dX = columns^T(W^T dY)``, db the sum of dY."""
    x, w, dy = inputs
    layout = _layout(args, x, w)
    dw = outputs[0]
    db = None if args.no_bias or len(outputs) < 2 else outputs[1]
    dx = outputs[-1] if len(outputs) == (2 if args.no_bias else 3) else None
    spreads, stacks = _spreads(layout, x, ctx), _stacks(layout, dy, ctx)
    backs = _spreads(layout, dx, ctx) if dx is not None else []
    axes = tuple(range(dy.ndim - 1)) if layout.window.channels_last else (0, *range(2, dy.ndim))
    part = _memory(ctx, 2, dw.size if len(spreads) > 1 else 0, layout.dtype)[: dw.size]
    direct = dw.dtype == layout.dtype and dw.flags.c_contiguous
    total = dw if direct else _memory(ctx, 3, dw.size, layout.dtype)
    part, total = (
        m.reshape(layout.filter_shape if m.size else (0,))
        for m in (part, total[: dw.size] if not direct else total)
    )

    def run() -> None:
        filters = _filter_matrices(layout, w).transpose(0, 2, 1)
        if not spreads:
            total.fill(0)
        if dx is not None:
            dx.fill(0)
        for i, (spread, (gradients, copy, products)) in enumerate(zip(spreads, stacks)):
            if copy is not None:
                np.copyto(copy, gradients, casting="same_kind")
            spread.gather()
            transposed = spread.matrices.transpose(0, 2, 1)
            if i == 0:
                np.matmul(products, transposed, out=total)
            else:
                np.matmul(products, transposed, out=part)
                np.add(total, part, out=total)
            if dx is not None:
                # The columns of X are not needed any more: their memory takes those of dX.
                np.matmul(filters, products, out=backs[i].matrices)
                backs[i].scatter()
        if not direct:
            np.copyto(dw, total.reshape(dw.shape), casting="same_kind")
        if db is not None:
            np.add.reduce(dy, axis=axes, dtype=layout.dtype, out=db)

    return run
