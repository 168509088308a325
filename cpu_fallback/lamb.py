"""NumPy kernel of the LAMB update."""

from __future__ import annotations

import math

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.optimizer import Arrays, adam_moments, scratch_like_input, sum_of_squares
from gpunet.kernels import KernelContext, kernel


@kernel("Lamb", scratch=scratch_like_input(2))
def lamb(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Moments, the direction ``u``, then ``w' = w + lr |w| / |u| u``."""
    w, m, v, g, lr, iteration = inputs
    new_w, new_m, new_v = outputs
    u, t = ctx.scratch
    adam_moments(m, v, g, new_m, new_v, args, t)
    steps = max(1, iteration.item())
    np.multiply(new_v, 1 / (1 - args.beta2**steps), out=t)
    np.sqrt(t, out=t)
    np.add(t, args.epsilon, out=t)
    np.divide(new_m, t, out=u)
    np.multiply(u, 1 / (1 - args.beta1**steps), out=u)
    np.multiply(w, args.weight_decay, out=t)
    np.add(u, t, out=u)
    norm, length = math.sqrt(sum_of_squares(w)), math.sqrt(sum_of_squares(u))
    ratio = norm / length if norm > 0 and length > 0 else 1.0
    np.multiply(u, lr.item() * ratio, out=u)
    np.add(w, u, out=new_w)
