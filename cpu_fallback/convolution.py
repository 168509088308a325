"""NumPy kernels of convolution."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.columns import (
    After,
    Layout,
    memory_of,
    mirrored,
    mirrored_filters,
    needs_stacking,
    plan,
    spread_blocks,
    stack_blocks,
)
from gpunet.cpu_fallback.direct import (
    DirectPlan,
    bind_direct,
    bind_direct_gradient,
    plan_direct,
    plan_direct_gradient,
)
from gpunet.cpu_fallback.lanes import LANES, run_lanes
from gpunet.cpu_fallback.mirrored import MirroredPlan, bind_mirrored, plan_mirrored
from gpunet.cpu_fallback.phases import PhasePlan, bind_phases, plan_phases
from gpunet.cpu_fallback.products import product
from gpunet.cpu_fallback.rows import RowPlan, bind_rows, order_filters, plan_rows
from gpunet.cpu_fallback.steps import in_turn
from gpunet.cpu_fallback.taps import TapPlan, bind_taps, plan_taps
from gpunet.cpu_fallback.tiles import backward_rows, bind_tiles, plan_tiles
from gpunet.cpu_fallback.winograd import (
    WinogradPlan,
    bind_filter_gradient,
    bind_winograd,
    filter_gradient_scratch,
    plan_winograd,
    transform_filters,
)
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.convolution import CONVOLUTIONS, convolution_window
from gpunet.specs import TensorSpec, spec

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]
Run = Callable[[], Any]

#: How many times as many windows dX may have as Y, to be made as a convolution on narrow images.
_MOST_GROWTH: Final = 1.5


def _layout(args: Arguments, x: Any, w: Any) -> Layout:
    """The layout for X and W, given as specs or as arrays."""
    window = convolution_window(args, spec(x.shape, x.dtype), spec(w.shape, w.dtype))
    channels = x.shape[-1 if window.channels_last else 1]
    return plan(window, args.group, x.shape[0], channels, w.shape[0], x.dtype)


def _filter_matrices(layout: Layout, filters: Array) -> Array:
    return filters.reshape(layout.filter_shape).astype(layout.dtype, copy=False)


def _scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    """Memory for columns and for stacked outputs."""
    layout = _layout(op.args, inputs[0], inputs[1])
    stacking = needs_stacking(layout, inputs[0].dtype)
    columns = 0 if layout.pointwise and not stacking else layout.columns_size()
    return [spec((columns,), layout.dtype), spec((layout.output_size() if stacking else 0,), layout.dtype)]


def _rows(args: Arguments, x: Any, w: Any) -> RowPlan | None:
    layout = _layout(args, x, w)
    if layout.pointwise or layout.groups > 1:
        return None
    return plan_rows(layout.window, layout.batch, layout.channels, layout.filters, x.dtype)


def _winograd(layout: Layout, dtype: np.dtype) -> WinogradPlan | None:
    if layout.groups > 1:
        return None
    return plan_winograd(layout.window, layout.batch, layout.channels, layout.filters, dtype)


def _backward_winograd(layout: Layout, dtype: np.dtype) -> WinogradPlan | None:
    """A plan for dX as the convolution of dY with mirrored filters, input for output channels."""
    if layout.groups > 1:
        return None
    return plan_winograd(mirrored(layout.window), layout.batch, layout.filters, layout.channels, dtype)


def _backward_phases(layout: Layout) -> PhasePlan | None:
    """A plan for dX where it is no convolution by rows."""
    return plan_phases(layout) if backward_rows(layout) is None else None


def _backward_taps(layout: Layout, has_data: bool) -> TapPlan | None:
    """A plan for all gradients, where dX is no convolution by rows that multiplies about as much."""
    window = layout.window
    growth = math.prod(window.image) / max(1, window.positions)
    by_rows = has_data and growth <= _MOST_GROWTH and backward_rows(layout) is not None
    return None if by_rows else plan_taps(layout)


def _by_winograd(
    plan: WinogradPlan,
    x: Array,
    w: Array,
    bias: Array | None,
    y: Array,
    scratch: Sequence[Array],
    after: After | None = None,
) -> Run:
    ordered, transformed, *memory = scratch
    lanes = bind_winograd(plan, x, y, transformed, bias, memory, after)

    def run() -> None:
        transform_filters(plan, w, ordered, transformed)
        run_lanes(lanes, plan.work)

    return run


def forward_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    """Memory for a convolution."""
    layout, dtype = _layout(op.args, inputs[0], inputs[1]), inputs[0].dtype
    found = _winograd(layout, dtype) or plan_direct(layout, dtype)
    if found is not None:
        return found.scratch()
    rows = _rows(op.args, inputs[0], inputs[1])
    if rows is None:
        return _scratch(op, inputs, outputs)
    sizes = [inputs[1].size, *(rows.columns_size, rows.stacked_size, rows.turned_size) * LANES]
    return [spec((size,), rows.dtype) for size in sizes]


@kernel(*CONVOLUTIONS, binds=True, scratch=forward_scratch)
def convolution(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Run:
    """``Y = W columns(X) + b``."""
    bias = inputs[2] if len(inputs) > 2 else None
    return bind_convolution(inputs[0], inputs[1], bias, outputs[0], args, ctx.scratch)


def bind_convolution(
    x: Array,
    w: Array,
    bias: Array | None,
    y: Array,
    args: Arguments,
    scratch: Sequence[Array],
    after: After | None = None,
) -> Run:
    """The convolution: matrix products for each row of a block of images, or for the whole block.

    ``after`` gives what is done to each part of Y as soon as it is there.
    """
    layout = _layout(args, x, w)
    winograd = _winograd(layout, x.dtype)
    if winograd is not None:
        return _by_winograd(winograd, x, w, bias, y, scratch, after)
    direct = plan_direct(layout, x.dtype)
    if direct is not None:
        return bind_direct(direct, x, w, bias, y, scratch, after)
    rows = _rows(args, x, w)
    if rows is None:
        return _by_blocks(layout, x, w, bias, y, scratch, after)
    filters, *memory = scratch
    by_lane = list(zip(memory[::3], memory[1::3], memory[2::3], strict=True))
    lanes = bind_rows(rows, x, y, filters, bias, by_lane, after)

    def run() -> None:
        order_filters(rows, w, filters)
        run_lanes(lanes, rows.work)

    return run


def _by_blocks(
    layout: Layout,
    x: Array,
    w: Array,
    bias: Array | None,
    y: Array,
    scratch: Sequence[Array],
    after: After | None,
) -> Run:
    spreads, stacks = spread_blocks(layout, x, scratch[0]), stack_blocks(layout, y, scratch[1])
    ends = [None if after is None else after((slice(*block),)) for block in layout.blocks()]

    def run() -> None:
        filters = _filter_matrices(layout, w)
        for spread, (results, copy, products), end in zip(spreads, stacks, ends, strict=True):
            spread.gather()
            product(filters, spread.matrices, products)
            if bias is not None:
                np.add(products, bias.reshape(*products.shape[:2], 1), out=products)
            if copy is not None:
                np.copyto(results, copy, casting="same_kind")
            if end is not None:
                end()

    return run


def _has_data_gradient(args: Arguments, outputs: Sequence[Any]) -> bool:
    """Whether dX is among the outputs."""
    return len(outputs) == (2 if args.no_bias else 3)


class _Backward(NamedTuple):
    """How gradients are made; all ``None``: those of filters and of images from one set of columns."""

    filters: WinogradPlan | None
    images: WinogradPlan | None
    phases: PhasePlan | None
    #: Of all gradients; nothing else then.
    whole: DirectPlan | TapPlan | MirroredPlan | None = None


#: What binds a plan of all gradients.
_BIND_WHOLE: Final[dict[type, Callable[..., Run]]] = {
    DirectPlan: bind_direct_gradient,
    TapPlan: bind_taps,
    MirroredPlan: bind_mirrored,
}


def _backward(layout: Layout, dtype: np.dtype, has_data: bool) -> _Backward:
    whole: DirectPlan | TapPlan | MirroredPlan | None = plan_direct_gradient(layout, dtype)
    filters = _winograd(layout, dtype)
    images = _backward_winograd(layout, dtype) if has_data else None
    if whole is None and filters is None and images is None:
        whole = _backward_taps(layout, has_data) or (plan_mirrored(layout) if has_data else None)
    if whole is not None:
        return _Backward(None, None, None, whole)
    if not has_data:
        return _Backward(filters, None, None)
    phases = None if images is not None else _backward_phases(layout)
    return _Backward(None if images is None and phases is None else filters, images, phases)


def _gradient_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    layout = _layout(op.args, inputs[0], inputs[1])
    plans = _backward(layout, inputs[0].dtype, _has_data_gradient(op.args, op.outputs))
    if plans.whole is not None:
        return plans.whole.gradient_scratch()
    wanted = [
        _column_scratch(op, layout, inputs, outputs)
        if plans.filters is None
        else filter_gradient_scratch(plans.filters)
    ]
    wanted += [plan.scratch() for plan in (plans.images, plans.phases) if plan is not None]
    # The gradients of filters and of images are made one after the other.
    size = max(sum(_aligned(s.size) for s in specs) for specs in wanted)
    return [spec((size,), layout.dtype)]


def _aligned(size: int) -> int:
    """Elements after which the next piece of memory begins at a cache line again."""
    return -(-size // 16) * 16


def _pieces(memory: Array, specs: Sequence[TensorSpec]) -> Arrays:
    """Flat arrays of these sizes, one after the other in flat memory."""
    starts = itertools.accumulate((_aligned(s.size) for s in specs), initial=0)
    return tuple(memory[start : start + s.size] for start, s in zip(starts, specs, strict=False))


def _column_scratch(
    op: Operator, layout: Layout, inputs: Sequence[Any], outputs: Sequence[Any]
) -> list[TensorSpec]:
    """Memory for all gradients without Winograd's tiles."""
    tiles = plan_tiles(layout)
    if tiles is not None:
        return tiles.scratch(inputs[0].dtype)
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
    dx = outputs[-1] if _has_data_gradient(args, outputs) else None
    plans = _backward(layout, x.dtype, dx is not None)
    if plans.whole is not None:
        bound: Run = _BIND_WHOLE[type(plans.whole)](plans.whole, x, w, dy, dw, db, dx, ctx.scratch)
        return bound
    (memory,) = ctx.scratch
    apart = plans.images is not None or plans.phases is not None
    if plans.filters is not None:
        own = _pieces(memory, filter_gradient_scratch(plans.filters))
        from_tiles = bind_filter_gradient(plans.filters, x, dy, dw, own)
        filters = in_turn(
            from_tiles, partial(np.add.reduce, dy, axis=(0, 2, 3), out=db) if db is not None else None
        )
    else:
        own = _pieces(memory, _column_scratch(ctx.op, layout, inputs, outputs))
        filters = _gradients(layout, x, w, dy, dw, db, None if apart else dx, own)
    data: Run | None = None
    if plans.images is not None:
        own = _pieces(memory, plans.images.scratch())
        data = _by_winograd(plans.images, dy, mirrored_filters(w), None, outputs[-1], own)
    elif plans.phases is not None:
        data = bind_phases(plans.phases, w, dy, outputs[-1], _pieces(memory, plans.phases.scratch()))
    return in_turn(filters, data)


def _gradients(
    layout: Layout,
    x: Array,
    w: Array,
    dy: Array,
    dw: Array,
    db: Array | None,
    dx: Array | None,
    scratch: Arrays,
) -> Run:
    """All gradients from one set of columns."""
    tiles = plan_tiles(layout)
    if tiles is not None:
        return bind_tiles(tiles, x, w, dy, dw, db, dx, scratch)
    spreads, stacks = spread_blocks(layout, x, scratch[0]), stack_blocks(layout, dy, scratch[1])
    backs = spread_blocks(layout, dx, scratch[0]) if dx is not None else []
    axes = tuple(range(dy.ndim - 1)) if layout.window.channels_last else (0, *range(2, dy.ndim))
    part = memory_of(dw.size if len(spreads) > 1 else 0, layout.dtype, scratch[2])[: dw.size]
    direct = dw.dtype == layout.dtype and dw.flags.c_contiguous
    total = dw if direct else memory_of(dw.size, layout.dtype, scratch[3])
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
        for i, (spread, (gradients, copy, products)) in enumerate(zip(spreads, stacks, strict=False)):
            if copy is not None:
                np.copyto(copy, gradients, casting="same_kind")
            spread.gather()
            transposed = spread.matrices.transpose(0, 2, 1)
            if i == 0:
                product(products, transposed, total)
            else:
                product(products, transposed, part)
                np.add(total, part, out=total)
            if dx is not None:
                # The columns of X are not needed any more: their memory takes those of dX.
                product(filters, products, backs[i].matrices)
                backs[i].scatter()
        if not direct:
            np.copyto(dw, total.reshape(dw.shape), casting="same_kind")
        if db is not None:
            # With out=db NumPy would round float16 again and again.
            np.copyto(db, np.add.reduce(dy, axis=axes, dtype=layout.dtype), casting="same_kind")

    return run
