"""NumPy kernels of the dense parameter updates.

Each update is a plain function over arrays (``*_step``), which the sparse updates call for the rows that they
change. Outputs may be the inputs of their in-place pairs; ``t``, ``s`` are scratch arrays of the parameter's
shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.pieces import bound, in_pieces
from gpunet.errors import KernelError
from gpunet.kernels import KernelContext, ScratchFunction, kernel
from gpunet.operator import Operator
from gpunet.specs import TensorSpec

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]


def scratch_like_input(count: int) -> ScratchFunction:
    """``count`` scratch arrays that look like input 0."""

    def scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
        return [inputs[0]] * count

    return scratch


def sum_of_squares(x: Array) -> float:
    """``sum(x^2)``."""
    return float(np.vdot(x, x))


def momentum_step(
    g: Array, m: Array, lr: float, new_g: Array, new_m: Array, args: Arguments, t: Array
) -> None:
    """``m' = mu m + lr g``.

    The step ``m'``, or ``lr g + mu m'`` with Nesterov (which is ``(1 + mu) m' - mu m``).
    """
    np.multiply(g, lr, out=new_g)
    np.multiply(m, args.momentum, out=new_m)
    np.add(new_m, new_g, out=new_m)
    if args.nesterov:
        np.multiply(new_m, args.momentum, out=t)
        np.add(new_g, t, out=new_g)
    else:
        np.copyto(new_g, new_m)


@kernel("MomentumSGD", scratch=scratch_like_input(1))
def momentum_sgd(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Moment and step, without the update."""
    g, m, lr = inputs
    momentum_step(g, m, lr.item(), outputs[0], outputs[1], args, ctx.scratch[0])


def momentum_sgd_update(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Moment and step, and ``param' = param - step``."""
    g, m, lr, param = inputs
    momentum_step(g, m, lr.item(), outputs[0], outputs[1], args, ctx.scratch[0])
    np.subtract(param, outputs[0], out=outputs[2])


kernel("MomentumSGDUpdate", binds=True, scratch=scratch_like_input(1))(in_pieces(bound(momentum_sgd_update)))


def adagrad_step(
    w: Array,
    h: Array,
    g: Array,
    lr: float,
    new_w: Array,
    new_h: Array,
    args: Arguments,
    decay: float,
    t: Array,
    s: Array,
    rate: Array | None = None,
    update: Array | None = None,
) -> None:
    """``h' = decay h + g^2``, ``rate = lr / (sqrt(h') + eps)``, ``update = rate g``, ``w' = w + update``."""
    if args.weight_decay:
        np.multiply(w, args.weight_decay, out=s)
        g = np.add(s, g, out=s)
    np.multiply(g, g, out=t)
    if decay != 1:
        np.multiply(h, decay, out=new_h)
        np.add(new_h, t, out=new_h)
    else:
        np.add(h, t, out=new_h)
    np.sqrt(new_h, out=t)
    np.add(t, args.epsilon, out=t)
    np.divide(lr, t, out=t)
    if rate is not None:
        np.copyto(rate, t)
    np.multiply(t, g, out=t)
    if update is not None:
        np.copyto(update, t)
    np.add(w, t, out=new_w)


@kernel("Adagrad", scratch=scratch_like_input(2))
def adagrad(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """One step for the whole parameter."""
    w, h, g, lr = inputs
    t, s = ctx.scratch
    adagrad_step(w, h, g, lr.item(), outputs[0], outputs[1], args, args.decay, t, s, *outputs[2:])


def adadelta_step(
    w: Array,
    h: Array,
    d: Array,
    g: Array,
    lr: float,
    new_w: Array,
    new_h: Array,
    new_d: Array,
    args: Arguments,
    t: Array,
    s: Array,
) -> None:
    """``h' = r h + (1-r) g^2``, ``u = g sqrt((d + eps) / (h' + eps))``, ``d' = r d + (1-r) u^2``.

    Then ``w' = w + lr u``.
    """
    decay, epsilon = args.decay, args.epsilon
    np.multiply(g, g, out=t)
    np.multiply(t, 1 - decay, out=t)
    np.multiply(h, decay, out=new_h)
    np.add(new_h, t, out=new_h)
    np.add(d, epsilon, out=t)
    np.sqrt(t, out=t)
    np.add(new_h, epsilon, out=s)
    np.sqrt(s, out=s)
    np.divide(t, s, out=t)
    np.multiply(t, g, out=t)
    np.multiply(t, t, out=s)
    np.multiply(s, 1 - decay, out=s)
    np.multiply(d, decay, out=new_d)
    np.add(new_d, s, out=new_d)
    np.multiply(t, lr, out=t)
    np.add(w, t, out=new_w)


@kernel("Adadelta", scratch=scratch_like_input(2))
def adadelta(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """One step for the whole parameter."""
    w, h, d, g, lr = inputs
    new_w, new_h, new_d = outputs
    t, s = ctx.scratch
    adadelta_step(w, h, d, g, lr.item(), new_w, new_h, new_d, args, t, s)


@kernel("RmsProp", scratch=scratch_like_input(1))
def rmsprop(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``ms' = ms + (1-r)(g^2 - ms)``, ``mom' = mu mom + lr g / sqrt(eps + ms')``."""
    g, ms, mom, lr = inputs
    new_g, new_ms, new_mom = outputs
    (t,) = ctx.scratch
    np.multiply(g, g, out=t)
    np.subtract(t, ms, out=t)
    np.multiply(t, 1 - args.decay, out=t)
    np.add(ms, t, out=new_ms)
    np.add(new_ms, args.epsilon, out=t)
    np.sqrt(t, out=t)
    np.divide(g, t, out=t)
    np.multiply(t, lr.item(), out=t)
    np.multiply(mom, args.momentum, out=new_mom)
    np.add(new_mom, t, out=new_mom)
    np.copyto(new_g, new_mom)


def adam_moments(m: Array, v: Array, g: Array, new_m: Array, new_v: Array, args: Arguments, t: Array) -> None:
    """``m' = b1 m + (1-b1) g``, ``v' = b2 v + (1-b2) g^2``."""
    np.multiply(g, 1 - args.beta1, out=t)
    np.multiply(m, args.beta1, out=new_m)
    np.add(new_m, t, out=new_m)
    np.multiply(g, g, out=t)
    np.multiply(t, 1 - args.beta2, out=t)
    np.multiply(v, args.beta2, out=new_v)
    np.add(new_v, t, out=new_v)


def adam_correction(args: Arguments, iteration: int) -> float:
    """``sqrt(1 - b2^t) / (1 - b1^t)`` at ``t = iteration + 1``."""
    t = iteration + 1
    beta1: float = args.beta1
    beta2: float = args.beta2
    return math.sqrt(1 - beta2**t) / (1 - beta1**t)


def adam(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Moments, then ``w' = w + lr c m' / (sqrt(v') + eps)``."""
    w, m, v, g, lr, iteration = inputs
    new_w, new_m, new_v, *effective = outputs
    (t,) = ctx.scratch
    adam_moments(m, v, g, new_m, new_v, args, t)
    np.sqrt(new_v, out=t)
    np.add(t, args.epsilon, out=t)
    np.divide(new_m, t, out=t)
    correction = adam_correction(args, iteration.item())
    if effective:
        np.multiply(t, correction, out=effective[0])
    np.multiply(t, lr.item() * correction, out=t)
    np.add(w, t, out=new_w)


kernel("Adam", binds=True, scratch=scratch_like_input(1))(in_pieces(bound(adam)))


@kernel("Wngrad", scratch=scratch_like_input(1))
def wngrad(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``w' = w + lr g / (b + eps)``, ``b' = b + sum(g^2) / (b + eps)``."""
    w, b, g, lr = inputs
    new_w, new_b, *rest = outputs
    (t,) = ctx.scratch
    scale = np.float64(b.item() + args.epsilon)  # NumPy's number, for infinity rather than an exception at 0
    rate = float(lr.item() / scale)
    np.multiply(g, rate, out=t)
    np.add(w, t, out=new_w)
    np.add(b, float(sum_of_squares(g) / scale), out=new_b)
    if rest:
        rest[0].fill(rate)
    if len(rest) > 1:
        np.copyto(rest[1], t)


def storm_rate(total: float, lr: float, args: Arguments) -> tuple[float, float]:
    """Rate and ``1 - alpha`` from the new sum of squares."""
    total += args.beta
    rate = lr * total ** (-1 / 3) if total else math.inf
    return rate, 1 - args.momentum * rate * rate


def storm_step(
    w: Array, m: Array, g: Array, rate: float, keep: float, new_w: Array, new_m: Array, t: Array
) -> None:
    """``m' = g + keep (m - g)``, ``w' = w + rate m'``."""
    np.subtract(m, g, out=t)
    np.multiply(t, keep, out=t)
    np.add(g, t, out=new_m)
    np.multiply(new_m, rate, out=t)
    np.add(w, t, out=new_w)


@kernel("Storm", scratch=scratch_like_input(1))
def storm(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """The sum of squares first, then the step with the rate that follows from it."""
    w, m, total, g, lr = inputs
    np.add(total, sum_of_squares(g), out=outputs[2])
    rate, keep = storm_rate(outputs[2].item(), lr.item(), args)
    storm_step(w, m, g, rate, keep, outputs[0], outputs[1], ctx.scratch[0])


def ftrl_step(
    w: Array, nz: Array, g: Array, new_w: Array, new_nz: Array, alpha: float, args: Arguments
) -> None:
    """The proximal step; ``nz`` has a last axis of two: n (sum of squares) and z."""
    n, z = nz[..., 0], nz[..., 1]
    new_n = n + g * g
    root = np.sqrt(new_n)
    new_z = z + g - (root - np.sqrt(n)) / alpha * w
    step = (args.lambda1 * np.sign(new_z) - new_z) / ((args.beta + root) / alpha + args.lambda2)
    np.multiply(step, np.abs(new_z) > args.lambda1, out=new_w)
    new_nz[..., 0], new_nz[..., 1] = new_n, new_z


@kernel("Ftrl")
def ftrl(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """One step; a fourth input takes the place of the argument alpha."""
    w, nz, g = inputs[:3]
    alpha = inputs[3].item() if len(inputs) > 3 else args.alpha
    result = np.empty((*w.shape, 2), w.dtype)
    ftrl_step(w, nz.reshape(*w.shape, 2), g.reshape(w.shape), outputs[0], result, alpha, args)
    np.copyto(outputs[1], result.reshape(nz.shape))


@kernel("Lars")
def lars(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``trust / (|dX| / |X| + wd + offset)`` between the bounds."""
    x, dx, decay, trust, upper = inputs
    norm = math.sqrt(sum_of_squares(x))
    factor = 1.0
    if norm > 0:
        ratio = np.float64(
            math.sqrt(sum_of_squares(dx)) / norm
        )  # NumPy's number, for infinity rather than an exception at 0
        factor = float(trust.item() / (ratio + decay.item() + args.offset))
    outputs[0].fill(max(min(factor, upper.item()), args.lr_min))


@kernel("WeightScale")
def weight_scale(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Scales in iterations that are multiples of the step."""
    w, iteration = inputs
    t = iteration.item() + 1
    if t % args.stepsize == 0 and t < args.upper_bound_iter:
        np.multiply(w, args.scale, out=outputs[0])
    else:
        np.copyto(outputs[0], w)


@kernel("YellowFin", scratch=scratch_like_input(1))
def yellowfin(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """A momentum step with the tuned values so far, then new statistics and new values from them."""
    w, m, lr, mu, window, g_avg, g2_avg, memory, g, iteration = inputs
    new_w, new_m, new_lr, new_mu, new_window, new_g_avg, new_g2_avg, new_memory = outputs
    (t,) = ctx.scratch
    step, beta, epsilon = iteration.item(), args.beta, args.epsilon
    if step < 1:
        raise KernelError(
            f"input iter is {step}, wanted at least 1: Iter or AtomicIter counts up ahead of the update"
        )
    rate, momentum = lr.item(), mu.item()

    np.multiply(g, rate, out=t)
    if args.nesterov:
        # w' = w - (1 + mu) m' + mu m is w - lr g - mu m', as m' = mu m + lr g.
        np.subtract(w, t, out=new_w)
        np.multiply(m, momentum, out=new_m)
        np.add(new_m, t, out=new_m)
        np.multiply(new_m, momentum, out=t)
        np.subtract(new_w, t, out=new_w)
    else:
        np.multiply(m, momentum, out=new_m)
        np.add(new_m, t, out=new_m)
        np.subtract(w, new_m, out=new_w)

    debias = 1 / (1 - beta**step) if args.zero_debias else 1.0
    np.multiply(g, 1 - beta, out=t)
    np.multiply(g_avg, beta, out=new_g_avg)
    np.add(new_g_avg, t, out=new_g_avg)
    np.multiply(t, g, out=t)
    np.multiply(g2_avg, beta, out=new_g2_avg)
    np.add(new_g2_avg, t, out=new_g2_avg)

    norm2 = max(epsilon, sum_of_squares(g))
    np.copyto(new_window, window)
    flat = new_window.reshape(-1)
    flat[(step - 1) % args.curv_win_width] = math.log(norm2)
    np.copyto(new_window, flat.reshape(new_window.shape))
    seen = flat[: min(args.curv_win_width, step)]
    observed = (math.sqrt(norm2), norm2, float(seen.min()), float(seen.max()))
    *old, old_distance = memory.ravel().tolist()
    averages = [beta * mean + (1 - beta) * new for mean, new in zip(old, observed, strict=True)]
    averages.append(beta * old_distance + (1 - beta) * averages[0] / averages[1])
    np.copyto(new_memory, np.asarray(averages, new_memory.dtype).reshape(new_memory.shape))
    if step <= 1:
        np.copyto(new_lr, lr)
        np.copyto(new_mu, mu)
        return
    _, mean_norm2, low, high, distance = (debias * value for value in averages)
    variance = max(epsilon, mean_norm2 - debias * debias * sum_of_squares(new_g_avg))
    tuned_rate, tuned_momentum = tune(
        max(epsilon, math.exp(low)), max(epsilon, math.exp(high)), distance, variance
    )
    np.copyto(new_lr, beta * rate + (1 - beta) * tuned_rate)
    np.copyto(new_mu, beta * momentum + (1 - beta) * tuned_momentum)


def tune(low: float, high: float, distance: float, variance: float) -> tuple[float, float]:
    """Rate and momentum that minimise the bound on the distance to the optimum after one step.

    See https://arxiv.org/abs/1706.03471.

    Args:
        low: smallest curvature seen.
        high: largest curvature seen.
        distance: estimated distance to the optimum.
        variance: of the gradient.
    """
    # The root of momentum is the real root of p x = (1 - x)^3 with p = (distance low)^2 / (2 variance), by
    # Cardano's formula for y = x - 1: y^3 + p y + p = 0; it is at least the value that the spread of
    # curvatures demands.
    p = (distance * low) ** 2 / (2 * variance)
    w = -(((math.sqrt(p * p + 4 / 27 * p**3) + p) / 2) ** (1 / 3))
    root = w - p / 3 / w + 1 if w else 1.0
    spread = math.sqrt(high / low)
    momentum = max(root * root, ((spread - 1) / (spread + 1)) ** 2)
    return (1 - math.sqrt(momentum)) ** 2 / low, momentum
