"""Launchers of the reductions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpunet.arguments import Arguments
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.device_errors import report
from gpunet.cuda_kernels.launch import Grid, blocks, columns, elementwise, in_order, prepare, rows, slices
from gpunet.cuda_kernels.pieces import Buffers, Launch, nothing
from gpunet.cuda_kernels.signature import FLOATS, NUMBERS, Kernel
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.reduction import reduced_axes, split_at
from gpunet.specs import Shape, TensorSpec


def _kernels(name: str) -> tuple[Kernel, Kernel]:
    whole = Kernel(
        "reduction",
        name,
        "const T* x, T* y, uint8* partial, const int32* lengths, uint64* errors, uint64 code, int32 across, "
        "int32 kind, double divisor, int64 kept, int64 reduced, int64 slices, int32 kept_dims, int64 k0, "
        "int64 k1, int64 k2, int64 ks0, int64 ks1, int64 ks2, int64 ks3, int32 reduced_dims, int64 r0, "
        "int64 r1, int64 r2, int64 rs0, int64 rs1, int64 rs2, int64 rs3",
        T=NUMBERS,
    )
    of_slices = Kernel(
        "reduction",
        f"{name}_slices",
        "const uint8* partial, T* y, const int32* lengths, int32 kind, double divisor, int64 kept, "
        "int64 slices",
        T=NUMBERS,
    )
    return whole, of_slices


_SUM: Final = _kernels("reduce_sum")
_EXTREME: Final = _kernels("reduce_extreme")
_BWD = Kernel(
    "reduction",
    "reduce_bwd",
    "const T* dy, const T* x, const T* y, T* dx, int64 n, int32 kind, double factor, int64 n0, int64 n1, "
    "int64 n2, int64 n3, int64 n4, int64 n5, int64 n6, int64 s0, int64 s1, int64 s2, int64 s3, int64 s4, "
    "int64 s5, int64 s6, int64 s7",
    T=FLOATS,
)
_ENDS_BWD = Kernel(
    "reduction",
    "reduce_ends_bwd",
    "const T* dy, const T* x, const T* y, const int32* lengths, T* dx, uint64* errors, uint64 code, "
    "int64 kept, int64 reduced, int32 front, int32 kind",
    T=FLOATS,
)

#: Kernels and number of what is computed, by the last part of the operator's name.
_KINDS: Final = {
    "Sum": (_SUM, 0),
    "Mean": (_SUM, 1),
    "L1": (_SUM, 2),
    "L2": (_SUM, 3),
    "Max": (_EXTREME, 0),
    "Min": (_EXTREME, 1),
}
#: Dimensions that stay, and that are reduced, after neighbours of one kind are joined.
_MAX_DIMS: Final = 4
#: From this many elements on, a row of neighbouring elements is reduced by a block.
_ROW: Final = 32


@dataclass(frozen=True)
class _Dimension:
    kept: bool
    size: int
    stride: int


def _joined(shape: Shape, axes: Sequence[int]) -> list[_Dimension]:
    """The dimensions, innermost first; neighbours of one kind are one, those of size 1 are none."""
    found: list[_Dimension] = []
    stride = 1
    for axis in reversed(range(len(shape))):
        kept, size = axis not in axes, shape[axis]
        if size != 1:
            if found and found[-1].kept == kept:
                last = found.pop()
                found.append(_Dimension(kept, last.size * size, last.stride))
            else:
                found.append(_Dimension(kept, size, stride))
        stride *= size
    return found


@dataclass(frozen=True)
class _Plan:
    """How a reduction is shared among blocks, each of which takes ``across`` results at a time."""

    kept: int
    reduced: int
    slices: int
    across: int
    threads: int
    kept_dims: tuple[_Dimension, ...]
    reduced_dims: tuple[_Dimension, ...]

    @property
    def grid(self) -> Grid:
        tiles = -(-self.kept // self.across)
        return blocks(tiles * self.slices, self.threads)

    @property
    def shape(self) -> tuple[int, ...]:
        return (
            *(self.kept, self.reduced, self.slices),
            *_arguments(self.kept_dims),
            *_arguments(self.reduced_dims),
        )


def _arguments(dims: Sequence[_Dimension]) -> tuple[int, ...]:
    """Number, sizes and strides, padded."""
    padding = _MAX_DIMS - len(dims)
    sizes = [d.size for d in dims] + [1] * padding
    return (len(dims), *sizes[:-1], *(d.stride for d in dims), *[0] * padding)


def _plan(shape: Shape, axes: Sequence[int]) -> _Plan:
    dims = _joined(shape, axes)
    kept = math.prod(n for a, n in enumerate(shape) if a not in axes)
    reduced = math.prod(shape[a] for a in axes)
    if kept == 1 or (dims and not dims[0].kept and reduced >= _ROW):
        across, threads = 1, rows(1, reduced)[1]
    else:
        across, threads = columns(kept, reduced)
    cuts = slices(-(-kept // across), reduced, threads // across)
    groups = (tuple(d for d in dims if d.kept), tuple(d for d in dims if not d.kept))
    return _Plan(kept, reduced, cuts, across, threads, *groups)


def _too_many(shape: Shape, axes: Sequence[int]) -> str | None:
    dims = _joined(shape, axes)
    kept = sum(d.kept for d in dims)
    if max(kept, len(dims) - kept) > _MAX_DIMS:
        return (
            f"it reduces {len(dims) - kept} separate runs of dimensions and keeps {kept}, wanted at most "
            f"{_MAX_DIMS} of each"
        )
    return None


def reduction_scratch(shape: Shape, axes: Sequence[int]) -> list[TensorSpec]:
    """The scratch that :func:`reduction_launch` wants."""
    plan = _plan(shape, axes)
    return [TensorSpec((plan.kept * plan.slices * 8 if plan.slices > 1 else 0,), np.dtype(np.uint8))]


def reduction_launch(
    ctx: KernelContext,
    what: str,
    x: Buffer,
    y: Buffer,
    axes: Sequence[int],
    partial: Buffer,
    lengths: Buffer | None = None,
) -> Launch:
    """``Y = reduced X``.

    Args:
        ctx: the context of the operator.
        what: ``Sum``, ``Mean``, ``L1``, ``L2``, ``Max`` or ``Min``.
        x: the tensor.
        y: the result, of the same type.
        axes: dimensions of X to reduce.
        partial: scratch of :func:`reduction_scratch`.
        lengths: for each result how many of its elements, from the first on, count.
    """
    (whole, of_slices), kind = _KINDS[what]
    plan = _plan(x.shape, axes)
    if plan.kept == 0:
        return nothing
    divisor = max(plan.reduced, 1)
    data = (x, y, partial, lengths, *_lengths_error(ctx, lengths, plan.reduced))
    first = prepare(ctx, whole, (x.dtype,), (*data, plan.across, kind, divisor, *plan.shape), plan.grid)
    if plan.slices == 1:
        return first
    rest = (partial, y, lengths, kind, divisor, plan.kept, plan.slices)
    return in_order(first, prepare(ctx, of_slices, (x.dtype,), rest, rows(plan.kept, plan.slices)))


def _lengths_error(ctx: KernelContext, lengths: Buffer | None, reduced: int) -> tuple[Buffer | None, int]:
    if lengths is None:
        return None, 0
    return report(ctx, f"input lengths holds {{value}} at {{index}}, wanted 0 to {reduced}")


def _what(op: Operator) -> str:
    name = op.type.removeprefix("Reduce").removesuffix("Gradient")
    return name.removeprefix("Front").removeprefix("Back")


def _axes_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    shape: Shape = inputs[0].shape
    return reduction_scratch(shape, reduced_axes(op, len(shape)))


def _against(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    shape: Shape = inputs[0].shape
    return _too_many(shape, reduced_axes(op, len(shape)))


@kernel(
    *(f"Reduce{what}" for what in _KINDS),
    device="cuda",
    binds=True,
    scratch=_axes_scratch,
    against=_against,
)
def reduce(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The sum, mean, norm, largest or smallest value over dimensions."""
    (x,), (y,), (partial,) = inputs, outputs, ctx.scratch
    axes = reduced_axes(ctx.op, x.ndim)
    return reduction_launch(ctx, _what(ctx.op), x, y, axes, partial)


#: Number of the gradient, by the last part of the forward operator's name.
_GRADIENTS: Final = {"Sum": 0, "Mean": 0, "Max": 1, "Min": 1, "L1": 2, "L2": 3}


def _against_gradient(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    shape: Shape = outputs[0].shape
    return _too_many(shape, reduced_axes(op, len(shape)))


@kernel(
    *(f"Reduce{what}Gradient" for what in _GRADIENTS),
    device="cuda",
    binds=True,
    against=_against_gradient,
)
def reduce_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The gradient of X from those of the values that it was reduced to."""
    (dy, x, y), (dx,) = inputs, outputs
    what = _what(ctx.op)
    axes = reduced_axes(ctx.op, x.ndim)
    sizes: list[int] = []
    strides: list[int] = []
    stride = 1
    for d in _joined(x.shape, axes):
        sizes.append(d.size)
        strides.append(stride if d.kept else 0)
        stride *= d.size if d.kept else 1
    padding = 2 * _MAX_DIMS - len(sizes)
    factor = 1 / max(math.prod(x.shape[a] for a in axes), 1) if what == "Mean" else 1.0
    arguments = (
        *(dy, x, y, dx, dx.size, _GRADIENTS[what], factor),
        *(sizes + [1] * padding)[:-1],
        *(strides + [0] * padding),
    )
    return prepare(ctx, _BWD, (dx.dtype,), arguments, elementwise(dx.size))


def _end_axes(op: Operator, rank: int) -> tuple[int, ...]:
    cut = split_at(op, rank)
    return tuple(range(cut) if "Front" in op.type else range(cut, rank))


def _end_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    shape: Shape = inputs[0].shape
    return reduction_scratch(shape, _end_axes(op, len(shape)))


@kernel(
    *(f"Reduce{side}{what}" for side in ("Front", "Back") for what in ("Sum", "Mean", "Max")),
    device="cuda",
    binds=True,
    scratch=_end_scratch,
)
def reduce_front_back(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The sum, mean or largest value over the first or last dimensions, of the first elements that count."""
    x, lengths = inputs[0], inputs[1] if len(inputs) == 2 else None
    (y,), (partial,) = outputs, ctx.scratch
    if x.size == 0:
        backend, stream = ctx.backend, ctx.stream
        return lambda: backend.fill(y, 0, stream)
    return reduction_launch(ctx, _what(ctx.op), x, y, _end_axes(ctx.op, x.ndim), partial, lengths)


@kernel(
    *(f"Reduce{side}{what}Gradient" for side in ("Front", "Back") for what in ("Sum", "Mean", "Max")),
    device="cuda",
    binds=True,
)
def reduce_front_back_gradient(
    inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext
) -> Launch:
    """``dY``, or ``dY / n``, in all places that were summed; ``dY`` where the largest value was."""
    dy, (dx,) = inputs[0], outputs
    kind = ("Sum", "Mean", "Max").index(_what(ctx.op))
    x, y, *rest = inputs[1:] if kind == 2 else (None, None, *inputs[2:])
    lengths = rest[0] if rest else None
    axes = _end_axes(ctx.op, dx.ndim)
    reduced = math.prod(dx.shape[a] for a in axes)
    kept = math.prod(n for a, n in enumerate(dx.shape) if a not in axes)
    arguments = (
        *(dy, x, y, lengths, dx, *_lengths_error(ctx, lengths, reduced)),
        *(kept, reduced, "Front" in ctx.op.type, kind),
    )
    return prepare(ctx, _ENDS_BWD, (dx.dtype,), arguments, elementwise(dx.size))
