"""How broadcast operands lie in memory along a result.

Prepares launches of the kernels of include/broadcast.cuh and of the sums of include/sums.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpunet.broadcasting import align, collapse, strides_along
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.launch import THREADS, elementwise, in_order, prepare, rows
from gpunet.cuda_kernels.pieces import SIGNLESS, Launch
from gpunet.cuda_kernels.signature import HALVES, Kernel
from gpunet.errors import KernelError
from gpunet.kernels import KernelContext
from gpunet.operator import Operator
from gpunet.specs import Shape, TensorSpec, format_shape

#: Parameters behind the three pointers of a kernel for operands along the result, and for any strides.
ALONG: Final = "int64 n, int64 a_inner, int64 a_count, int64 b_inner, int64 b_count"
STRIDED: Final = "int64 n, int64 n1, int64 n2, int64 n3, int64 n4, int64 n5" + "".join(
    f", int64 {operand}{d}" for operand in "ab" for d in range(6)
)
_MAX_DIMENSIONS: Final = 6
_TOO_MANY: Final = f"it broadcasts along more than {_MAX_DIMENSIONS} dimensions that cannot be taken together"


def run_along(shape: Shape, full: Shape) -> tuple[int, int] | None:
    """(inner, count) if an operand of ``shape`` has ``count`` elements that cover ``inner`` neighbours of the
    result each, over and over; ``None`` if it does not lie like that.
    """
    groups = collapse(full, strides_along(shape, full))
    moving = [i for i, (_, (stride,)) in enumerate(groups) if stride]
    if not moving:
        return 1, 1
    if len(moving) > 1:
        return None
    (at,) = moving
    return math.prod(size for size, _ in groups[at + 1 :]), groups[at][0]


@dataclass(frozen=True)
class BinaryKernels:
    """The kernels of a function of two operands: equal shapes, along the result, any strides (``None`` where
    operands never lie like that).
    """

    same: Kernel
    along: Kernel
    strided: Kernel | None


def binary_kernels(
    module: str,
    name: str,
    element: str,
    result: str,
    extra: str = "",
    *,
    strided: bool = True,
    **types: Sequence[str],
) -> BinaryKernels:
    """Declares ``name_fwd``, ``name_along`` and, if wanted, ``name_strided``."""

    def declare(suffix: str, parameters: str) -> Kernel:
        pointers = f"const {element}* a, const {element}* b, {result}* c"
        return Kernel(module, f"{name}_{suffix}", f"{pointers}, {parameters}{extra}", **types)

    return BinaryKernels(
        declare("fwd", "int64 n"),
        declare("along", ALONG),
        declare("strided", STRIDED) if strided else None,
    )


def against_shapes(a: Shape, b: Shape, full: Shape) -> str | None:
    """Why the kernels cannot run operands of these shapes (of equal rank)."""
    if run_along(a, full) and run_along(b, full):
        return None
    groups = collapse(full, strides_along(a, full), strides_along(b, full))
    return _TOO_MANY if len(groups) > _MAX_DIMENSIONS else None


def against_binary(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    """Why the kernels cannot run an operator on its two operands."""
    return against_shapes(*align(op.args, inputs[0].shape, inputs[1].shape))


def launch_binary(
    ctx: KernelContext,
    kernels: BinaryKernels,
    a: Buffer,
    b: Buffer,
    c: Buffer,
    shapes: tuple[Shape, Shape, Shape],
    extra: tuple[Any, ...] = (),
) -> Launch:
    """The launch of ``c = f(a, b)``; ``shapes`` of a, b and c are of equal rank, as from ``align``."""
    types = (a.dtype,) if kernels.same.types else ()
    a_shape, b_shape, full = shapes
    n = math.prod(full)
    if a_shape == b_shape:
        per_thread = 16 // max(a.dtype.itemsize, c.dtype.itemsize)
        grid = elementwise(n, per_thread=per_thread)
        return prepare(ctx, kernels.same, types, (a, b, c, n, *extra), grid)
    along = run_along(a_shape, full), run_along(b_shape, full)
    if along[0] and along[1]:
        return prepare(ctx, kernels.along, types, (a, b, c, n, *along[0], *along[1], *extra), elementwise(n))
    if kernels.strided is None:
        raise KernelError(
            f"operands of shapes {format_shape(a_shape)} and {format_shape(b_shape)} do not lie along "
            f"{format_shape(full)}, which is all that kernel {kernels.along.name!r} is made for"
        )
    groups = collapse(full, strides_along(a_shape, full), strides_along(b_shape, full))
    padded = [(1, (0, 0))] * (_MAX_DIMENSIONS - len(groups)) + groups
    sizes = [size for size, _ in padded[1:]]
    strides = [stride[operand] for operand in (0, 1) for _, stride in padded]
    return prepare(ctx, kernels.strided, types, (a, b, c, n, *sizes, *strides, *extra), elementwise(n))


# Sums to the shape of an operand.

_DIMENSIONS: Final = (
    "int64 k1, int64 k2, int64 p0, int64 p1, int64 p2, int64 r1, int64 r2, int64 q0, int64 q1, int64 q2"
)


def _sum_kernels(suffix: str, element: str, types: Sequence[str]) -> tuple[Kernel, Kernel]:
    """The kernels for any strides, and for the columns of a matrix."""
    data, end = f"const {element}* x, T* y, uint8* partial", "int64 slices, int32 negate"
    return (
        Kernel(
            "elementwise",
            f"sum_strided{suffix}",
            f"{data}, int64 kept, int64 reduced, int64 slices, {_DIMENSIONS}, int32 negate",
            T=types,
        ),
        Kernel("elementwise", f"sum_columns{suffix}", f"{data}, int64 rows, int64 columns, {end}", T=types),
    )


def _slice_kernel(suffix: str, types: Sequence[str]) -> Kernel:
    parameters = "const uint8* partial, T* y, int64 kept, int64 slices, int32 negate"
    return Kernel("elementwise", f"sum_slices{suffix}", parameters, T=types)


_SUMS: Final = (*_sum_kernels("", "T", SIGNLESS), _slice_kernel("", SIGNLESS))
#: With sums in float64.
_WIDE_SUMS: Final = (*_sum_kernels("_wide", "T", ["float32"]), _slice_kernel("_wide", ["float32"]))
#: Of float32 to half types.
_NARROWED_SUMS: Final = (*_sum_kernels("_narrowed", "float", HALVES), _SUMS[2])
#: Blocks that are worth having, and elements of a sum for each thread below which it is not cut into slices.
#: They decide the order of additions, so they do not depend on the device.
_WANTED_BLOCKS: Final = 1024
_PER_THREAD: Final = 16


@dataclass(frozen=True)
class SumPlan:
    """A sum of the elements of a contiguous tensor to a shape.

    Attributes:
        groups: (size, whether kept) of the dimensions, taken together where neighbours are alike.
        kept, reduced: numbers of results, and of summands of each.
        slices: how many parts each sum is cut into.
    """

    groups: tuple[tuple[int, bool], ...]
    kept: int
    reduced: int
    slices: int

    @property
    def columns(self) -> bool:
        """Whether it sums the columns of a matrix."""
        return len(self.groups) == 2 and self.groups[1][1] and self.groups[1][0] >= 8

    @property
    def partial(self) -> TensorSpec | None:
        """Scratch for the totals of the slices."""
        if self.slices == 1:
            return None
        return TensorSpec((self.slices * self.kept * 8,), np.dtype(np.uint8))


def plan_sum(full: Shape, shape: Shape) -> SumPlan:
    """How to sum a tensor of shape ``full`` to ``shape`` (of equal rank)."""
    groups: list[tuple[int, bool]] = []
    for whole, size in zip(full, shape, strict=True):
        kept = whole == size
        if whole == 1:
            continue
        if groups and groups[-1][1] == kept:
            groups[-1] = (groups[-1][0] * whole, kept)
        else:
            groups.append((whole, kept))
    results = math.prod(size for size, kept in groups if kept)
    reduced = math.prod(size for size, kept in groups if not kept)
    plan = SumPlan(tuple(groups), results, reduced, 1)
    blocks, threads = (-(-results // 32), THREADS // 32) if plan.columns else (results, THREADS)
    slices = min(-(-reduced // (threads * _PER_THREAD)), _WANTED_BLOCKS // max(1, blocks))
    return SumPlan(plan.groups, results, reduced, max(1, slices))


def against_sum(full: Shape, shape: Shape) -> str | None:
    """Why no kernel can make the sum."""
    return _TOO_MANY if len(plan_sum(full, shape).groups) > _MAX_DIMENSIONS else None


def launch_sum(
    ctx: KernelContext,
    x: Buffer,
    y: Buffer,
    full: Shape,
    shape: Shape,
    partial: Buffer | None,
    *,
    negate: bool = False,
    wide: bool = False,
) -> Launch:
    """Launches that sum ``x`` of shape ``full`` into ``y`` of ``shape``, and change the sign if asked for.

    Both are of one of the types ``SIGNLESS``, or float32 is summed to a half type. ``partial`` is the scratch
    of the plan. There must be something to sum: ``shape`` differs from ``full``. ``wide`` sums float32 in
    float64.
    """
    plan, types = plan_sum(full, shape), (y.dtype,)
    found = _WIDE_SUMS if wide and x.dtype == np.float32 else _SUMS
    by_stride, by_column, of_slices = found if x.dtype == y.dtype else _NARROWED_SUMS
    kept, slices = plan.kept, plan.slices
    if plan.columns:
        arguments: tuple[Any, ...] = (x, y, partial, plan.reduced, kept, slices, int(negate))
        first = prepare(ctx, by_column, types, arguments, rows(-(-kept // 32) * slices, THREADS))
    else:
        sizes: dict[bool, list[int]] = {True: [], False: []}
        strides: dict[bool, list[int]] = {True: [], False: []}
        step = 1
        for size, is_kept in reversed(plan.groups):
            sizes[is_kept].insert(0, size)
            strides[is_kept].insert(0, step)
            step *= size
        dimensions = []
        for is_kept in (True, False):
            missing = _MAX_DIMENSIONS // 2 - len(sizes[is_kept])
            dimensions += ([1] * missing + sizes[is_kept])[1:] + [0] * missing + strides[is_kept]
        arguments = (x, y, partial, kept, plan.reduced, slices, *dimensions, int(negate))
        grid = rows(kept * slices, -(-plan.reduced // slices))
        first = prepare(ctx, by_stride, types, arguments, grid)
    if slices == 1:
        return first
    last = (partial, y, kept, slices, int(negate))
    return in_order(first, prepare(ctx, of_slices, types, last, rows(kept, slices)))
