"""NumPy kernels of the elementwise combinations of any number of tensors."""

from __future__ import annotations

from functools import partial

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.pieces import in_pieces
from gpunet.cpu_fallback.precision import Array, Arrays, widened
from gpunet.cpu_fallback.steps import Specs, Step, copy_step, in_turn, is_same, keep_step, mask_scratch
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator


def _wide_scratch(op: Operator, inputs: Specs, outputs: Specs) -> Specs:
    """The whole sum, where float16 is summed in float32 or the output is also a later operand."""
    again = len(inputs) > 2 and op.outputs[0] in op.inputs[2:]
    if outputs[0].dtype == np.float16 and len(inputs) > 2:
        return [outputs[0].with_dtype(np.float32)]
    return [outputs[0]] if again else []


def _folded(function: np.ufunc, inputs: Arrays, outputs: Arrays, ctx: KernelContext) -> Step:
    """A step that folds all inputs with ``function``."""
    (y,) = outputs
    if len(inputs) == 1:
        return in_turn(copy_step(inputs[0], y))
    total = ctx.scratch[0] if ctx.scratch else y
    first = partial(function, inputs[0], inputs[1], out=total)
    rest = [partial(function, total, x, out=total) for x in inputs[2:]]
    return in_turn(first, *rest, partial(np.copyto, y, total) if total is not y else None)


@kernel("Sum", "SumInt", binds=True, scratch=_wide_scratch)
@in_pieces
def sum_all(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = X0 + X1 + ...``."""
    return _folded(np.add, inputs, outputs, ctx)


@kernel("Max", binds=True, scratch=_wide_scratch)
@in_pieces
def maximum(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = max(X0, X1, ...)``."""
    return _folded(np.maximum, inputs, outputs, ctx)


@kernel("Min", binds=True, scratch=_wide_scratch)
@in_pieces
def minimum(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = min(X0, X1, ...)``."""
    return _folded(np.minimum, inputs, outputs, ctx)


@kernel("MaxGradient", "MinGradient", binds=True, scratch=mask_scratch)
@in_pieces
def extremum_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``dX = dY`` where X is the extremum, else 0."""
    y, dy, *tensors = inputs
    (mask,) = ctx.scratch
    steps: list[Step] = []
    for x, dx in zip(tensors, outputs, strict=True):
        steps += [partial(np.equal, x, y, mask), keep_step(mask, dy, dx)]
    return in_turn(*steps)


def _term_scratch(op: Operator, inputs: Specs, outputs: Specs) -> Specs:
    """A term; and the whole sum, where float16 is summed in float32 or the output is also a later operand."""
    if len(inputs) == 2:
        return []
    (y,) = outputs
    wide = y.with_dtype(np.float32) if y.dtype == np.float16 else y
    return [wide, wide] if y.dtype == np.float16 or op.outputs[0] in op.inputs[1:] else [wide]


@kernel("WeightedSum", binds=True, scratch=_term_scratch)
@in_pieces
def weighted_sum(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = w0 X0 + w1 X1 + ...``."""
    (y,) = outputs
    x0, w0 = inputs[0], inputs[1].reshape(())
    if len(inputs) == 2:
        return partial(np.multiply, x0, w0, y)
    term = ctx.scratch[0]
    total = ctx.scratch[1] if len(ctx.scratch) > 1 else y
    rest = [(x, w.reshape(())) for x, w in zip(inputs[2::2], inputs[3::2], strict=True)]
    unchanged = is_same(x0, total)

    def run() -> None:
        if not (unchanged and w0 == 1):  # a descent step has weight 1 there: a pass over memory less
            np.multiply(x0, w0, total)
        for x, w in rest:
            np.multiply(x, w, term)
            np.add(total, term, total)

    return in_turn(run, partial(np.copyto, y, total) if total is not y else None)


@kernel("WeightedSumGradient", binds=True)
def weighted_sum_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``dX_i = w_i dY``, ``dw_i = sum(dY X_i)``."""
    dy, *pairs = inputs
    tensors, weights = pairs[::2], [w.reshape(()) for w in pairs[1::2]]
    dx, dw = outputs[: len(tensors)], outputs[len(tensors) :]

    def weight_gradients() -> None:
        for x, target in zip(tensors, dw, strict=True):
            target[...] = _inner(dy, x)

    steps = [partial(np.multiply, dy, w, target) for w, target in zip(weights, dx, strict=True)]
    return in_turn(weight_gradients if dw else None, *reversed(steps))  # the first dX may be in place of dY


def _inner(a: Array, b: Array) -> np.generic:
    """The sum of the products of all elements."""
    result: np.generic = np.vdot(widened(a), widened(b))
    return result
