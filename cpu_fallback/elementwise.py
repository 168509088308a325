"""NumPy kernels of the elementwise arithmetic of two tensors.

Kernels here are bound: what they return is, in the simplest cases, the NumPy call itself with its arguments.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from gpunet.arguments import Arguments
from gpunet.broadcasting import align, legacy_shape
from gpunet.cpu_fallback.guards import guard, guard_scratch
from gpunet.cpu_fallback.pieces import in_pieces
from gpunet.cpu_fallback.precision import Array, Arrays
from gpunet.cpu_fallback.steps import Specs, Step, copy_step, in_turn, is_same, wide_constant
from gpunet.errors import KernelError
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.specs import Shape


def lined_up(inputs: Arrays, args: Arguments) -> tuple[Array, Array]:
    """Views of A and B that NumPy broadcasts against each other."""
    a, b = inputs
    if a.shape == b.shape or not args.broadcast:
        return a, b
    return a, b.reshape(legacy_shape(args, a.shape, b.shape))


def sum_into(source: Array, target: Array, shape: Shape) -> Step | None:
    """A step that sums ``source`` over the dimensions where ``shape`` has a 1 and ``source`` has not.

    ``shape`` is that of ``target`` with ones added to have as many dimensions as ``source``. Where nothing is
    summed the step copies, and there is none if both are the same memory.
    """
    view = target.reshape(shape)
    axes = tuple(i for i, (m, n) in enumerate(zip(source.shape, shape, strict=True)) if m != n)
    if axes and target.dtype == np.float16:

        def run() -> None:
            # With out=view NumPy would round what it has summed so far, again and again.
            np.copyto(view, np.add.reduce(source, axis=axes, dtype=np.float32, keepdims=True), "same_kind")

        return run
    if axes:
        return partial(np.add.reduce, source, axis=axes, dtype=source.dtype, out=view, keepdims=True)
    return copy_step(source, view)


@kernel("Add", binds=True)
@in_pieces
def add(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``C = A + B``."""
    return partial(np.add, *lined_up(inputs, args), outputs[0])


@kernel("Sub", binds=True)
@in_pieces
def sub(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``C = A - B``."""
    return partial(np.subtract, *lined_up(inputs, args), outputs[0])


@kernel("Mul", binds=True)
@in_pieces
def mul(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``C = A B``."""
    return partial(np.multiply, *lined_up(inputs, args), outputs[0])


@kernel("Div", binds=True, scratch=guard_scratch)
def div(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``C = A / B``; whole numbers are divided towards zero."""
    guarding, inputs = guard(inputs, ctx)
    a, b = lined_up(inputs, args)
    (c,) = outputs
    if c.dtype.kind == "f":
        return in_turn(guarding, partial(np.divide, a, b, c))

    def divide() -> None:
        if not b.all():
            index = tuple(int(i) for i in np.argwhere(inputs[1] == 0)[0])
            raise KernelError(f"divisor B has a 0 at index {index}, wanted no zeros in whole-number division")
        multiple = np.subtract(a, np.fmod(a, b))  # fmod has the sign of A: what is left divides exactly
        np.floor_divide(multiple, b, out=c)

    return divide


@kernel("AddGradient", binds=True)
def add_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``dA = dC``, ``dB = dC``, summed to their shapes."""
    dc, a, b = inputs
    a_shape, b_shape, _ = align(args, a.shape, b.shape)
    return in_turn(sum_into(dc, outputs[0], a_shape), sum_into(dc, outputs[1], b_shape))


@kernel("SubGradient", binds=True)
def sub_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``dA = dC``, ``dB = -dC``, summed to their shapes."""
    dc, a, b = inputs
    da, db = outputs
    a_shape, b_shape, _ = align(args, a.shape, b.shape)
    first = sum_into(dc, da, a_shape)  # dB comes second: it may be in place of dC
    if b_shape == dc.shape:
        return in_turn(first, partial(np.negative, dc, db.reshape(b_shape)))
    return in_turn(first, sum_into(dc, db, b_shape), partial(np.negative, db, db))


def _product_scratch(op: Operator, inputs: Specs, outputs: Specs) -> Specs:
    """Room for the gradient before it is summed, where an operand was broadcast."""
    full = inputs[2] if op.type == "DivGradient" and len(inputs) == 3 else inputs[0]
    if full.dtype == np.float16:  # what is summed is rounded once
        full = full.with_dtype(np.float32)
    return [full] if full.size == 0 or any(output.size != full.size for output in outputs) else []


def _unsummed(target: Array, shape: Shape, full: Shape, ctx: KernelContext) -> Array:
    return target.reshape(shape) if shape == full else ctx.scratch[0]


def _into(function: np.ufunc, a: Array, b: Array, target: Array) -> Step:
    """``target = function(a, b)``, computed in the widest of their types."""
    if target.dtype == a.dtype == b.dtype:
        return partial(function, a, b, target)
    return partial(function, a, b, target, dtype=np.result_type(a, b, target))


@kernel("MulGradient", binds=True, scratch=_product_scratch)
def mul_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``dA = dC B``, ``dB = dC A``, summed to their shapes."""
    dc, a, b = inputs
    a_shape, b_shape, full = align(args, a.shape, b.shape)
    steps = []
    factors = b.reshape(b_shape), a.reshape(a_shape)
    for target, shape, other in zip(outputs, (a_shape, b_shape), factors, strict=True):
        product = _unsummed(target, shape, full, ctx)
        steps.append(in_turn(_into(np.multiply, dc, other, product), sum_into(product, target, shape)))
    if is_same(dc, outputs[0].reshape(a_shape)):
        steps.reverse()  # the gradient that is in place of dC comes last
    return in_turn(*steps)


def _div_gradient_scratch(op: Operator, inputs: Specs, outputs: Specs) -> Specs:
    return [*_product_scratch(op, inputs, outputs), *guard_scratch(op, inputs, outputs)]


@kernel("DivGradient", binds=True, scratch=_div_gradient_scratch)
def div_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``dA = dC / B``, ``dB = -dC C / B``, summed to their shapes."""
    guarding, inputs = guard(inputs, ctx)
    if len(inputs) == 3:
        b, c, dc = inputs
        shape_of_a = c.shape
    else:
        dc, a, b, c = inputs
        shape_of_a = a.shape
    da, db = outputs
    a_shape, b_shape, full = align(args, shape_of_a, b.shape)
    divisor = b.reshape(b_shape)
    wide = dc.dtype == np.float16 and (a_shape != full or b_shape != full)
    quotient = ctx.scratch[0] if wide else _unsummed(da, a_shape, full, ctx)
    product = _unsummed(db, b_shape, full, ctx)
    return in_turn(
        guarding,
        _into(np.divide, dc, divisor, quotient),
        sum_into(quotient, da, a_shape),  # before the scratch is used again
        _into(np.multiply, quotient, c, product),
        sum_into(product, db, b_shape),
        partial(np.negative, db, db),
    )


@kernel("SumReduceLike", binds=True)
def sum_reduce_like(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """Sums A to the shape of B."""
    a, b = inputs
    return in_turn(sum_into(a, outputs[0], legacy_shape(args, a.shape, b.shape)))


#: Exponents that NumPy has a faster function for than its general power.
_POWERS: dict[float, np.ufunc] = {2.0: np.square, 1.0: np.positive, 0.5: np.sqrt, -1.0: np.reciprocal}


@kernel("Pow", binds=True, scratch=guard_scratch)
def power(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = X^E``, or ``X^exponent``."""
    guarding, inputs = guard(inputs, ctx)
    if len(inputs) == 2:
        return in_turn(guarding, partial(np.power, *lined_up(inputs, args), outputs[0]))
    (x,) = inputs
    function = _POWERS.get(args.exponent)
    if function is not None:
        return in_turn(guarding, partial(function, x, outputs[0]))
    return in_turn(guarding, partial(np.power, x, wide_constant(args.exponent, x), outputs[0]))
