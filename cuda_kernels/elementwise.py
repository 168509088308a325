"""Launchers of the elementwise arithmetic of two tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpunet.arguments import Arguments
from gpunet.broadcasting import align, legacy_shape
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import device_errors
from gpunet.cuda_kernels.broadcast import (
    against_binary,
    against_shapes,
    against_sum,
    binary_kernels,
    launch_binary,
    launch_sum,
    plan_sum,
)
from gpunet.cuda_kernels.guards import behind, guard, guard_scratch
from gpunet.cuda_kernels.launch import elementwise, in_order, prepare
from gpunet.cuda_kernels.pieces import (
    SIGNLESS,
    Buffers,
    Launch,
    copy_launch,
    is_same,
    map_launch,
    nothing,
    signless,
)
from gpunet.cuda_kernels.signature import FLOATS, HALVES, NUMBERS, Kernel
from gpunet.cuda_kernels.unary import NEGATIVE
from gpunet.dtypes import is_float, is_half
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.specs import Shape, TensorSpec

Specs = Sequence[Any]

_BINARY: Final = {
    type: binary_kernels(
        "elementwise",
        type.lower(),
        "T",
        "T",
        strided=type != "Pow",  # exponents lie along bases
        T=FLOATS if type in ("Div", "Pow") else SIGNLESS,
    )
    for type in ("Add", "Sub", "Mul", "Div", "Pow")
}
#: With results in float32, to be summed.
_UNROUNDED: Final = {
    type: binary_kernels("elementwise", f"{type.lower()}_wide", "T", "float", T=HALVES)
    for type in ("Mul", "Div")
}
_MUL_INTO_WIDE = Kernel(
    "elementwise", "mul_into_wide", "const float* a, const T* b, float* y, int64 n", T=HALVES
)
_MUL_INTO_NARROW = Kernel(
    "elementwise", "mul_into_narrow", "const float* a, const T* b, T* y, int64 n", T=HALVES
)
#: ``c = a + b`` for tensors of one shape.
ADD: Final = _BINARY["Add"].same
_WHOLE: Final = tuple(t for t in NUMBERS if t not in FLOATS)
_QUOTIENT: Final = binary_kernels("elementwise", "quotient", "T", "T", T=_WHOLE)
_QUOTIENT_CHECK = Kernel(
    "elementwise", "quotient_check", "const T* b, uint64* errors, uint64 code, int64 n", T=_WHOLE
)
_POWER = Kernel("elementwise", "power_fwd", "const T* x, T* y, int64 n, double exponent", T=FLOATS)
_MUL_BWD = Kernel(
    "elementwise", "mul_bwd", "const T* dc, const T* a, const T* b, T* da, T* db, int64 n", T=SIGNLESS
)
_DIV_BWD = Kernel(
    "elementwise", "div_bwd", "const T* dc, const T* b, const T* c, T* da, T* db, int64 n", T=FLOATS
)


@kernel("Add", "Sub", "Mul", device="cuda", binds=True, against=against_binary)
def arithmetic(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``C = A + B``, ``C = A - B``, ``C = A B``."""
    a, b, c = map(signless, (*inputs, *outputs))
    return launch_binary(ctx, _BINARY[ctx.op.type], a, b, c, align(args, a.shape, b.shape))


@kernel("Div", device="cuda", binds=True, scratch=guard_scratch, against=against_binary)
def div(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``C = A / B``; whole numbers are divided towards zero."""
    guarding, inputs = guard(inputs, ctx)
    a, b = inputs
    if not is_float(a.dtype):
        errors = device_errors.report(
            ctx, "divisor B has a 0 at position {index}, wanted no zeros in whole-number division"
        )
        check = prepare(ctx, _QUOTIENT_CHECK, (b.dtype,), (b, *errors, b.size), elementwise(b.size))
        divide = launch_binary(ctx, _QUOTIENT, a, b, outputs[0], align(args, a.shape, b.shape))
        return behind(guarding, in_order(check, divide))
    return behind(guarding, arithmetic(inputs, outputs, args, ctx))


def _against_power(op: Operator, inputs: Specs, outputs: Specs) -> str | None:
    return against_binary(op, inputs, outputs) if len(inputs) == 2 else None


@kernel("Pow", device="cuda", binds=True, scratch=guard_scratch, against=_against_power)
def power(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = X^E``, or ``X^exponent``."""
    guarding, inputs = guard(inputs, ctx)
    if len(inputs) == 2:
        return behind(guarding, arithmetic(inputs, outputs, args, ctx))
    return behind(guarding, map_launch(ctx, _POWER, (inputs[0], outputs[0]), args.exponent))


# Gradients. Their scratch: (Mul, Div) the gradient before it is summed, then the totals of slices of a sum.


def _operands(op: Operator, inputs: Specs) -> tuple[Shape, Shape, Shape]:
    """Shapes of A, B and the result, of equal rank; also of buffers."""
    if op.type == "DivGradient" and len(inputs) == 3:  # B, C, dC
        return align(op.args, inputs[1].shape, inputs[0].shape)
    return align(op.args, inputs[1].shape, inputs[2].shape)


def _against_gradient(op: Operator, inputs: Specs, outputs: Specs) -> str | None:
    a, b, full = _operands(op, inputs)
    against = against_sum(full, a) or against_sum(full, b)
    if against is None and op.type in ("MulGradient", "DivGradient"):
        against = against_shapes(a, b, full)
    return against


def _partial(full: Shape, *shapes: Shape) -> list[TensorSpec]:
    """The largest scratch that the sums to these shapes want; none if they want none."""
    found = [spec for shape in shapes if (spec := plan_sum(full, shape).partial) is not None]
    return [max(found, key=lambda spec: spec.size)] if found else []


def _sum_scratch(op: Operator, inputs: Specs, outputs: Specs) -> Specs:
    a, b, full = _operands(op, inputs)
    return _partial(full, a, b)


def _product_scratch(op: Operator, inputs: Specs, outputs: Specs) -> Specs:
    a, b, full = _operands(op, inputs)
    # In float32 for half types: what is summed is rounded once.
    dtype = np.dtype(np.float32) if is_half(inputs[0].dtype) else inputs[0].dtype
    products = [TensorSpec(full, dtype)] if full != a or full != b else []
    return [*products, *_partial(full, a, b)]


def _sum_into(
    ctx: KernelContext,
    source: Buffer,
    target: Buffer,
    full: Shape,
    shape: Shape,
    partial: Sequence[Buffer],
    *,
    negate: bool = False,
) -> Launch:
    """Sums ``source`` to the shape of ``target``; where nothing is summed it copies, or changes the sign."""
    if shape != full:
        return launch_sum(ctx, source, target, full, shape, partial[0] if partial else None, negate=negate)
    if negate:
        return map_launch(ctx, NEGATIVE, (source, target))
    return copy_launch(ctx, source, target)


@kernel(
    "AddGradient", "SubGradient", device="cuda", binds=True, scratch=_sum_scratch, against=_against_gradient
)
def add_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dA = dC``, ``dB = dC`` or ``-dC``, summed to their shapes."""
    dc, da, db = map(signless, (inputs[0], *outputs))
    a, b, full = _operands(ctx.op, inputs)
    negate = ctx.op.type == "SubGradient"
    first = _sum_into(ctx, dc, da, full, a, ctx.scratch)
    second = _sum_into(ctx, dc, db, full, b, ctx.scratch, negate=negate)  # it may be in place of dC
    return in_order(first, second)


@kernel("MulGradient", device="cuda", binds=True, scratch=_product_scratch, against=_against_gradient)
def mul_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dA = dC B``, ``dB = dC A``, summed to their shapes."""
    dc, a, b, da, db = map(signless, (*inputs, *outputs))
    a_shape, b_shape, full = _operands(ctx.op, inputs)
    if a_shape == b_shape == full:
        arguments = (dc, a, b, da, db, dc.size)
        grid = elementwise(dc.size, per_thread=16 // dc.dtype.itemsize)
        return prepare(ctx, _MUL_BWD, (dc.dtype,), arguments, grid)
    product, partial = signless(ctx.scratch[0]), ctx.scratch[1:]
    launches = []
    for target, shape, other, other_shape in ((da, a_shape, b, b_shape), (db, b_shape, a, a_shape)):
        result = target if shape == full else product
        kernels = _BINARY if result.dtype == dc.dtype else _UNROUNDED
        multiply = launch_binary(ctx, kernels["Mul"], dc, other, result, (full, other_shape, full))
        summed = _sum_into(ctx, result, target, full, shape, partial)
        launches.append(multiply if summed is nothing else in_order(multiply, summed))
    if is_same(dc, da):
        launches.reverse()  # the gradient that is in place of dC comes last
    return in_order(*launches)


def _div_gradient_scratch(op: Operator, inputs: Specs, outputs: Specs) -> Specs:
    return [*_product_scratch(op, inputs, outputs), *guard_scratch(op, inputs, outputs)]


@kernel("DivGradient", device="cuda", binds=True, scratch=_div_gradient_scratch, against=_against_gradient)
def div_gradient(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``dA = dC / B``, ``dB = -dC C / B``, summed to their shapes."""
    guarding, inputs = guard(inputs, ctx)
    if len(inputs) == 3:
        b, c, dc = inputs
    else:
        dc, _, b, c = inputs
    da, db = outputs
    a_shape, b_shape, full = _operands(ctx.op, inputs)
    if a_shape == b_shape == full:
        arguments = (dc, b, c, da, db, dc.size)
        grid = elementwise(dc.size, per_thread=16 // dc.dtype.itemsize)
        return behind(guarding, prepare(ctx, _DIV_BWD, (dc.dtype,), arguments, grid))
    product, *partial = ctx.scratch if args.epsilon <= 0 else ctx.scratch[:-1]
    if product.dtype != dc.dtype:
        sources, targets = (dc, b, c), (da, db)
        steps = _div_gradient_unrounded(ctx, sources, targets, (a_shape, b_shape, full), product, partial)
        return in_order(guarding, *steps)
    quotient = da if a_shape == full else product
    gradient = db if b_shape == full else product
    return in_order(
        guarding,
        launch_binary(ctx, _BINARY["Div"], dc, b, quotient, (full, b_shape, full)),
        _sum_into(ctx, quotient, da, full, a_shape, partial),  # before the scratch is used again
        launch_binary(ctx, _BINARY["Mul"], quotient, c, gradient, (full, full, full)),
        _sum_into(ctx, gradient, db, full, b_shape, partial, negate=True),
    )


def _div_gradient_unrounded(
    ctx: KernelContext,
    sources: tuple[Buffer, Buffer, Buffer],
    targets: tuple[Buffer, Buffer],
    shapes: tuple[Shape, Shape, Shape],
    quotient: Buffer,
    partial: Sequence[Buffer],
) -> list[Launch]:
    """The gradient in a half type where something is summed, with the quotient in float32. dA may be in place
    of dC.
    """
    (dc, b, c), (da, db), (a_shape, b_shape, full) = sources, targets, shapes
    divided = (full, b_shape, full)
    types, grid = (c.dtype,), elementwise(c.size)
    steps = [launch_binary(ctx, _UNROUNDED["Div"], dc, b, quotient, divided)]
    if a_shape == full:
        steps.append(launch_binary(ctx, _BINARY["Div"], dc, b, da, divided))
    else:
        steps.append(_sum_into(ctx, quotient, da, full, a_shape, partial))
    if b_shape == full:
        steps.append(prepare(ctx, _MUL_INTO_NARROW, types, (quotient, c, db, c.size), grid))
        return [*steps, map_launch(ctx, NEGATIVE, (db, db))]
    steps.append(prepare(ctx, _MUL_INTO_WIDE, types, (quotient, c, quotient, c.size), grid))
    return [*steps, _sum_into(ctx, quotient, db, full, b_shape, partial, negate=True)]


def _against_like(op: Operator, inputs: Specs, outputs: Specs) -> str | None:
    a, b = inputs
    return against_sum(a.shape, legacy_shape(op.args, a.shape, b.shape))


def _like_scratch(op: Operator, inputs: Specs, outputs: Specs) -> Specs:
    a, b = inputs
    return _partial(a.shape, legacy_shape(op.args, a.shape, b.shape))


@kernel("SumReduceLike", device="cuda", binds=True, scratch=_like_scratch, against=_against_like)
def sum_reduce_like(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Sums A to the shape of B."""
    a, b = inputs
    shape = legacy_shape(args, a.shape, b.shape)
    return _sum_into(ctx, a, outputs[0], a.shape, shape, ctx.scratch)
