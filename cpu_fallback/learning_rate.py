"""NumPy kernels of the iteration counters and learning-rate schedules."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.kernels import KernelContext, kernel
from gpunet.operators.learning_rate import Policy, parse_policy

Arrays = tuple[npt.NDArray[Any], ...]
#: From the iteration number to the factor of ``base_lr``.
Multiplier = Callable[[int], float]


@kernel("Iter")
def iteration(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``iter + 1``; the number of the run, where there is no input."""
    if inputs:
        np.add(inputs[0], 1, out=outputs[0])
    else:
        outputs[0].fill(ctx.run.step + 1)


@kernel("AtomicIter")
def atomic_iteration(inputs: tuple[Any, ...], outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``iter + 1`` under the mutex."""
    with inputs[0]:
        np.add(inputs[1], 1, out=outputs[0])


@kernel("CreateMutex")
def create_mutex(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> list[Any]:
    """A lock of the ``threading`` module."""
    return [threading.Lock()]


@kernel("LearningRate", binds=True)
def learning_rate(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Callable[[], None]:
    """``base_lr`` times the policy's multiplier, computed in float64."""
    iteration, rate = inputs[0], outputs[0]
    multiplier, base = make_multiplier(parse_policy(ctx.op.definition)), args.base_lr

    def run() -> None:
        rate[...] = base * multiplier(iteration.item())

    return run


@kernel("LearningRateAdaption")
def learning_rate_adaption(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``lr - alpha g.e`` or ``lr (1 - alpha g.e / (|g| |e|))``."""
    lr, grad, effective = inputs
    product = float(np.vdot(grad, effective))
    if not args.normalized_lr_adaption:
        np.subtract(lr, args.lr_alpha * product, out=outputs[0])
        return
    norms = [max(math.sqrt(float(np.vdot(x, x))), 1e-12) for x in (grad, effective)]
    np.multiply(lr, 1 - args.lr_alpha * product / (norms[0] * norms[1]), out=outputs[0])


# Policies: each makes its multiplier from the parsed values


def make_multiplier(policy: Policy) -> Multiplier:
    """The multiplier of a policy as a function of the iteration."""
    if policy.parts:
        return _composite([(start, scale, make_multiplier(part)) for start, scale, part in policy.parts])
    return _MAKERS[policy.name](policy.values, policy.base_lr)


def _power(base: float, exponent: float) -> float:
    """``base ** exponent`` with C's results out of range.

    NaN for a fractional power of a negative number, infinity on overflow.
    """
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return math.inf
    except ValueError:
        return math.inf if base == 0 else math.nan


def _fixed(v: Arguments, base_lr: float) -> Multiplier:
    return lambda i: 1.0


def _step(v: Arguments, base_lr: float) -> Multiplier:
    return lambda i: _power(v.gamma, i // v.stepsize)


def _exp(v: Arguments, base_lr: float) -> Multiplier:
    return lambda i: _power(v.gamma, i)


def _inv(v: Arguments, base_lr: float) -> Multiplier:
    return lambda i: _power(1 + v.gamma * i, -v.power)


def _poly(v: Arguments, base_lr: float) -> Multiplier:
    return lambda i: _power(1 - i / v.max_iter, v.power)


def _gate(v: Arguments, base_lr: float) -> Multiplier:
    return lambda i: v.multiplier_1 if i < v.num_iter else v.multiplier_2


def _ramp(start: float, length: int) -> Multiplier:
    """From ``start`` at iteration 0 straight to 1 at iteration ``length``, then 1."""
    return lambda i: start + (1 - start) * i / length if i < length else 1.0


def _linear_warmup(v: Arguments, base_lr: float) -> Multiplier:
    return _ramp(v.start_multiplier, v.num_iter)


def _constant_warmup(v: Arguments, base_lr: float) -> Multiplier:
    return lambda i: v.multiplier if i < v.num_iter else 1.0


def _piece_warmup(v: Arguments, base_lr: float) -> Multiplier:
    return lambda i: v.m1 if i < v.n1 else v.m2 if i < v.n2 else v.m3


def _hill(v: Arguments, base_lr: float) -> Multiplier:
    ramp, decay, length = _ramp(v.start_multiplier, v.num_iter), _inv(v, base_lr), v.num_iter
    return lambda i: ramp(i) if i < length else max(v.end_multiplier, decay(i - length))


def _slope(v: Arguments, base_lr: float) -> Multiplier:
    slope = (v.multiplier_2 - v.multiplier_1) / (v.num_iter_2 - v.num_iter_1)

    def multiplier(i: int) -> float:
        if i < v.num_iter_1:
            return float(v.multiplier_1)
        # A rising line stays below its end, so the maximum jumps there at once: Caffe2's rule, made for
        # falling lines.
        line: float = v.multiplier_1 + slope * (i - v.num_iter_1)
        return max(float(v.multiplier_2), line)

    return multiplier


def _alter(v: Arguments, base_lr: float) -> Multiplier:
    total = v.active_period + v.inactive_period
    first, second = (1.0, 0.0) if v.active_first else (0.0, 1.0)
    boundary = v.active_period if v.active_first else v.inactive_period
    return lambda i: first if i % total < boundary else second


def _triangle(base_lr: float, max_lr: float, stepsize: int, decay: float) -> Multiplier:
    height = abs(max_lr) / abs(base_lr) - 1

    def multiplier(i: int) -> float:
        cycle = i // (2 * stepsize)
        distance = abs(i / stepsize - 2 * cycle - 1)
        return 1 + height * max(0.0, 1 - distance) * _power(decay, cycle)

    return multiplier


def _cyclical(v: Arguments, base_lr: float) -> Multiplier:
    return _triangle(base_lr, v.max_lr, v.stepsize, v.decay)


def _waves(max_lr: float, min_lr: float, period: int, t_mult: float, lr_shrink: float) -> Multiplier:
    def multiplier(i: int) -> float:
        if t_mult == 1:
            k, length = float(i // period), float(period)
            t = i - k * length
        else:
            # Periods form a geometric series: period k starts at period (1 - t_mult^k) / (1 - t_mult).
            passed = 1 - i / period * (1 - t_mult)
            if passed <= 0:  # a shrinking series has ended: no period is left
                return math.nan
            k = float(math.floor(math.log(passed) / math.log(t_mult)))
            length = _power(t_mult, k) * period
            t = i - (1 - _power(t_mult, k)) / (1 - t_mult) * period
        return (min_lr + (max_lr - min_lr) * (1 + math.cos(math.pi * t / length)) / 2) * _power(lr_shrink, k)

    return multiplier


def _cosine(v: Arguments, base_lr: float) -> Multiplier:
    return _waves(v.max_lr, v.min_lr, v.period, v.t_mult, v.lr_shrink)


def _constant_then_linear(v: Arguments, base_lr: float) -> Multiplier:
    start, constant = v.start_warmup_multiplier, v.constant_warmup_num_iter
    ramp = _ramp(start, v.linear_warmup_num_iter)
    return lambda i: start if i < constant else ramp(i - constant)


def _after_warmup(v: Arguments, base_lr: float, then: Multiplier) -> Multiplier:
    warmup, length = _constant_then_linear(v, base_lr), v.constant_warmup_num_iter + v.linear_warmup_num_iter
    return lambda i: warmup(i) if i < length else then(i - length)


def _composite_cyclical(v: Arguments, base_lr: float) -> Multiplier:
    triangle = _triangle(base_lr, v.cyclical_max_lr, v.cyclical_step_size, v.cyclical_decay)
    return _after_warmup(v, base_lr, triangle)


def _composite_cosine(v: Arguments, base_lr: float) -> Multiplier:
    waves = _waves(v.cosine_max_lr, v.cosine_min_lr, v.cosine_period, v.cosine_t_mult, v.cosine_lr_shrink)
    return _after_warmup(v, base_lr, waves)


def _composite(parts: list[tuple[int, float, Multiplier]]) -> Multiplier:
    def multiplier(i: int) -> float:
        # The first segment also serves an iteration before its start, the last one all that follow.
        chosen = parts[0]
        for part in parts:
            if part[0] <= i:
                chosen = part
        return chosen[1] * chosen[2](i)

    return multiplier


_MAKERS: Final[dict[str, Callable[[Arguments, float], Multiplier]]] = {
    "fixed": _fixed,
    "step": _step,
    "exp": _exp,
    "inv": _inv,
    "poly": _poly,
    "gate": _gate,
    "linearWarmup": _linear_warmup,
    "constantWarmup": _constant_warmup,
    "pieceWarmup": _piece_warmup,
    "hill": _hill,
    "slope": _slope,
    "alter": _alter,
    "cyclical": _cyclical,
    "cosine": _cosine,
    "constantThenLinearWarmup": _constant_then_linear,
    "compositeCyclical": _composite_cyclical,
    "compositeCosine": _composite_cosine,
}
