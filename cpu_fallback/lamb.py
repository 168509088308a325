"""NumPy kernels of the LAMB update and its parts."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.optimizer import Array, Arrays, adam_moments, scratch_like_input, sum_of_squares
from gpunet.kernels import KernelContext, kernel


def _direction(inputs: Arrays, outputs: Arrays, args: Arguments, t: Array) -> None:
    w, m, v, g, iteration = inputs
    u, new_m, new_v = outputs
    adam_moments(m, v, g, new_m, new_v, args, t)
    steps = max(1, iteration.item())
    np.multiply(new_v, 1 / (1 - args.beta2**steps), out=t)
    np.sqrt(t, out=t)
    np.add(t, args.epsilon, out=t)
    np.divide(new_m, t, out=u)
    np.multiply(u, 1 / (1 - args.beta1**steps), out=u)
    np.multiply(w, args.weight_decay, out=t)
    np.add(u, t, out=u)


@kernel("LambDirection", scratch=scratch_like_input(1))
def lamb_direction(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Moments and the direction ``u``."""
    _direction(inputs, outputs, args, ctx.scratch[0])


@kernel("Lamb", scratch=scratch_like_input(2))
def lamb(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Moments, the direction ``u``, then ``w' = w + lr |w| / |u| u``."""
    w, m, v, g, lr, iteration = inputs
    new_w, new_m, new_v = outputs
    u, t = ctx.scratch
    _direction((w, m, v, g, iteration), (u, new_m, new_v), args, t)
    norm, length = math.sqrt(sum_of_squares(w)), math.sqrt(sum_of_squares(u))
    ratio = norm / length if norm > 0 and length > 0 else 1.0
    np.multiply(u, lr.item() * ratio, out=u)
    np.add(w, u, out=new_w)


def _segments(starts: Array, size: int) -> list[slice]:
    ends = np.clip(starts, 0, size).tolist()
    return [slice(begin, end) for begin, end in pairwise(ends)]


@kernel("SegmentSquares")
def segment_squares(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Sums of squares of segments."""
    starts, *tensors = inputs
    for row, tensor in zip(outputs[0], tensors, strict=True):
        flat = tensor.reshape(-1)
        for i, part in enumerate(_segments(starts, flat.size)):
            row[i] = sum_of_squares(flat[part])


@kernel("ScaleByNorms")
def scale_by_norms(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``trust / (|update| / |parameter| + offset)`` times each segment."""
    x, starts, squares = inputs
    np.copyto(outputs[0], x)
    y = outputs[0].reshape(-1)
    norms = np.sqrt(squares.reshape(2, -1).astype(np.float64))
    for i, part in enumerate(_segments(starts, y.size)):
        norm, length = norms[:, i]
        factor = args.trust / (length / norm + args.offset) if norm > 0 else 1.0
        y[part] *= max(min(float(factor), args.highest), args.lowest)
