"""NumPy kernels of the updates of single rows.

The rows are gathered, updated with the step of the dense kernel and written back. Indices that occur several
times are handled in rounds: the n-th occurrences of all indices together, so that each round touches a row
once and the order within a row is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.optimizer import (
    adadelta_step,
    adagrad_step,
    adam_correction,
    adam_moments,
    ftrl_step,
    momentum_step,
    storm_rate,
    storm_step,
    sum_of_squares,
)
from gpunet.errors import KernelError
from gpunet.kernels import KernelContext, kernel

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]


def check_rows(indices: Array, rows: int) -> Array:
    """The indices as a vector; raises :class:`KernelError` for one out of range."""
    flat = indices.reshape(-1)
    if flat.size and (flat.min() < 0 or flat.max() >= rows):
        position = int(np.flatnonzero((flat < 0) | (flat >= rows))[0])
        raise KernelError(
            f"index {flat[position]} at position {position} of input indices is out of range, wanted 0 to "
            f"{rows - 1}"
        )
    return flat


def rounds(indices: Array) -> Iterator[Array]:
    """Positions of the first occurrences of all indices, then of the second ones, and so on."""
    if not indices.size:
        return
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    lengths = np.diff(np.append(starts, ordered.size))
    occurrence = np.arange(ordered.size) - np.repeat(starts, lengths)
    for n in range(int(lengths.max())):
        yield order[occurrence == n]


def blocks(grad: Array, param: Array, indices: Array) -> Array:
    """The gradient with one row for each index."""
    return grad.reshape(indices.size, *param.shape[1:])


@kernel("SparseMomentumSGDUpdate")
def sparse_momentum_sgd_update(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """The step goes to the first output."""
    grad, moment, lr, param, indices = inputs
    rows = check_rows(indices, len(param))
    g, steps = blocks(grad, param, rows), np.empty((rows.size, *param.shape[1:]), param.dtype)
    for positions in rounds(rows):
        chosen = rows[positions]
        step, m = g[positions], moment[chosen]
        momentum_step(step, m, lr.item(), step, m, args, np.empty_like(m))
        moment[chosen] = m
        param[chosen] -= step
        steps[positions] = step
    np.copyto(outputs[0], steps.reshape(outputs[0].shape))


@kernel("SparseAdagrad")
def sparse_adagrad(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Adagrad without decay."""
    param, moment, indices, grad, lr = inputs
    rows = check_rows(indices, len(param))
    g = blocks(grad, param, rows)
    for positions in rounds(rows):
        chosen = rows[positions]
        w, h = param[chosen], moment[chosen]
        adagrad_step(w, h, g[positions], lr.item(), w, h, args, 1.0, np.empty_like(w), np.empty_like(w))
        param[chosen], moment[chosen] = w, h


def row_means_of_squares(g: Array) -> Array:
    """Mean of the squares of each row, with dimensions of 1 in place of the others."""
    axes = tuple(range(1, g.ndim))
    return (g * g).mean(axis=axes, keepdims=True) if axes else g * g


@kernel("RowWiseSparseAdagrad")
def rowwise_sparse_adagrad(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """One sum of squares a row."""
    param, moment, indices, grad, lr = inputs
    rows = check_rows(indices, len(param))
    g, state = blocks(grad, param, rows), moment.reshape(-1)
    for positions in rounds(rows):
        chosen = rows[positions]
        w = param[chosen]
        decayed = g[positions] + args.weight_decay * w if args.weight_decay else g[positions]
        h = state[chosen] + row_means_of_squares(decayed).reshape(-1)
        state[chosen] = h
        rate = lr.item() / (np.sqrt(h) + args.epsilon)
        param[chosen] = w + rate.reshape(-1, *(1,) * (w.ndim - 1)) * decayed
    np.copyto(outputs[1], state.reshape(moment.shape))


@kernel("SparseAdadelta")
def sparse_adadelta(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Adadelta of the rows."""
    param, moment, delta, indices, grad, lr = inputs
    rows = check_rows(indices, len(param))
    g = blocks(grad, param, rows)
    for positions in rounds(rows):
        chosen = rows[positions]
        w, h, d = param[chosen], moment[chosen], delta[chosen]
        t, s = np.empty_like(w), np.empty_like(w)
        adadelta_step(w, h, d, g[positions], lr.item(), w, h, d, args, t, s)
        param[chosen], moment[chosen], delta[chosen] = w, h, d


def rectified(args: Arguments, iteration: int) -> tuple[float, bool]:
    """Factor of RAdam's step, and whether the step is divided by the root of the second moment."""
    t, longest = iteration + 1, 2 / (1 - args.beta2) - 1
    length = longest - 2 * t * args.beta2**t / (1 - args.beta2**t)
    if length < 5:
        return 1 / (1 - args.beta1**t), False
    term = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return math.sqrt(term) * adam_correction(args, iteration), True


@kernel("SparseAdam")
def sparse_adam(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Adam or rectified Adam of the rows."""
    param, moment1, moment2, indices, grad, lr, iteration = inputs
    rows = check_rows(indices, len(param))
    g, effective = blocks(grad, param, rows), np.empty((rows.size, *param.shape[1:]), param.dtype)
    factor, divide = adam_correction(args, iteration.item()), True
    if args.enableRAdam:
        factor, divide = rectified(args, iteration.item())
    for positions in rounds(rows):
        chosen = rows[positions]
        m, v = moment1[chosen], moment2[chosen]
        adam_moments(m, v, g[positions], m, v, args, np.empty_like(m))
        step = factor * m
        if divide:
            step /= np.sqrt(v) + args.epsilon
        param[chosen] += lr.item() * step
        moment1[chosen], moment2[chosen], effective[positions] = m, v, step
    if len(outputs) > 3:
        np.copyto(outputs[3], effective.reshape(outputs[3].shape))


@kernel("RowWiseSparseAdam")
def rowwise_sparse_adam(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Adam with one second moment a row."""
    param, moment1, moment2, indices, grad, lr, iteration = inputs
    rows = check_rows(indices, len(param))
    g, effective = blocks(grad, param, rows), np.empty((rows.size, *param.shape[1:]), param.dtype)
    factor, state = adam_correction(args, iteration.item()), moment2.reshape(-1)
    for positions in rounds(rows):
        chosen, block = rows[positions], g[positions]
        m = args.beta1 * moment1[chosen] + (1 - args.beta1) * block
        v = args.beta2 * state[chosen] + (1 - args.beta2) * row_means_of_squares(block).reshape(-1)
        step = factor * m / (np.sqrt(v) + args.epsilon).reshape(-1, *(1,) * (m.ndim - 1))
        param[chosen] += lr.item() * step
        moment1[chosen], state[chosen], effective[positions] = m, v, step
    np.copyto(outputs[2], state.reshape(moment2.shape))
    if len(outputs) > 3:
        np.copyto(outputs[3], effective.reshape(outputs[3].shape))


@kernel("SparseWngrad")
def sparse_wngrad(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Wngrad of the rows; the scale grows by all blocks."""
    param, scale, indices, grad, lr = inputs
    rows = check_rows(indices, len(param))
    if not rows.size:
        return
    divisor = np.float64(
        scale.item() + args.epsilon
    )  # NumPy's number, for infinity rather than an exception at 0
    np.add.at(param, rows, float(lr.item() / divisor) * blocks(grad, param, rows))
    # Caffe2 leaves out epsilon here, unlike in Wngrad.
    np.add(scale, float(sum_of_squares(grad) / np.float64(scale.item())), out=outputs[1])


@kernel("SparseStorm")
def sparse_storm(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Storm of the rows; the sum of squares grows by all blocks."""
    param, moment, total, grad, indices, lr = inputs
    rows = check_rows(indices, len(param))
    if not rows.size:
        return
    np.add(total, sum_of_squares(grad), out=outputs[2])
    rate, keep = storm_rate(outputs[2].item(), lr.item(), args)
    g = blocks(grad, param, rows)
    for positions in rounds(rows):
        chosen = rows[positions]
        w, m = param[chosen], moment[chosen]
        storm_step(w, m, g[positions], rate, keep, w, m, np.empty_like(w))
        param[chosen], moment[chosen] = w, m


@kernel("SparseFtrl")
def sparse_ftrl(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Ftrl of the rows."""
    param, pairs, indices, grad = inputs[:4]
    alpha = inputs[4].item() if len(inputs) > 4 else args.alpha
    rows = check_rows(indices, len(param))
    g, state = blocks(grad, param, rows), pairs.reshape(*param.shape, 2)
    for positions in rounds(rows):
        chosen = rows[positions]
        w, nz = param[chosen], state[chosen]
        ftrl_step(w, nz, g[positions], w, nz, alpha, args)
        param[chosen], state[chosen] = w, nz
    np.copyto(outputs[1], state.reshape(pairs.shape))


@kernel("ScatterWeightedSum")
def scatter_weighted_sum(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Scales the rows, then adds the blocks in order."""
    weight, indices = inputs[1].item(), inputs[2]
    result = outputs[0]
    rows = check_rows(indices, len(result))
    if weight != 1:
        for positions in rounds(rows):
            result[rows[positions]] *= weight
    for x, w in zip(inputs[3::2], inputs[4::2], strict=True):
        np.add.at(result, rows, w.item() * blocks(x, result, rows))
