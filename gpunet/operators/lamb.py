"""The LAMB update, for large batches, and its parts for parameters that are shared between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpunet.arguments import Float
from gpunet.errors import ShapeError
from gpunet.operator import Operator
from gpunet.operators.learning_rate import ITERATION, REALS
from gpunet.operators.optimizer import (
    GRAD,
    ITER,
    LR,
    MOMENTS,
    NEW_MOMENTS,
    NEW_PARAM,
    PARAM,
    check_positive,
    elementwise,
)
from gpunet.rules import flops_per_input, want_same_type, want_size
from gpunet.schema import Input, Output, register
from gpunet.specs import BlobSpec, TensorSpec, spec

_ARGUMENTS: Final = (
    Float("beta1", 0.9, "factor of the old average of gradients"),
    Float("beta2", 0.999, "factor of the old average of squared gradients"),
    Float("epsilon", 1e-6, "added under the fraction"),
    Float("weight_decay", 0.0, "part of the parameter that is added to the direction"),
)
_STARTS: Final = Input(
    "starts", "where each segment begins, in order, and where the last one ends", ITERATION
)

register(
    "Lamb",
    inputs=[PARAM, *MOMENTS, GRAD, LR, ITER],
    outputs=[
        NEW_PARAM,
        *NEW_MOMENTS,
    ],
    infer=elementwise(0, 1, 2, like=(1, 2, 3), single=(4, 5)),
    args=_ARGUMENTS,
    inplace=[(0, 0), (1, 1), (2, 2)],
    check=check_positive("epsilon", "weight_decay"),
    flops=flops_per_input(18),
    doc="``m' = beta1 m + (1 - beta1) grad``; ``v' = beta2 v + (1 - beta2) grad^2``; "
    "``u = m' / (1 - beta1^t) / (sqrt(v' / (1 - beta2^t)) + epsilon) + weight_decay param``; "
    "``param' = param + lr |param| / |u| u``, with the factor 1 where a norm is 0, and ``t = iter`` "
    "(https://arxiv.org/abs/1904.00962, algorithm 2).",
)

register(
    "LambDirection",
    inputs=[PARAM, *MOMENTS, GRAD, ITER],
    outputs=[
        Output("direction", "u of Lamb"),
        *NEW_MOMENTS,
    ],
    infer=elementwise(0, 1, 2, like=(1, 2, 3), single=(4,)),
    args=_ARGUMENTS,
    inplace=[(1, 1), (2, 2), (3, 0)],
    check=check_positive("epsilon", "weight_decay"),
    flops=flops_per_input(15),
    doc="Lamb without its last step: the moments and the direction ``u``, element by element.",
)


def _want_starts(op: Operator, found: TensorSpec) -> int:
    if len(found.shape) != 1 or found.size < 1:
        raise ShapeError(f"starts has shape {found.shape}, wanted one dimension, with at least one element")
    return found.size - 1


def _infer_squares(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    count = _want_starts(op, inputs[0])
    want_same_type(op, inputs, *range(1, len(inputs)))
    for index in range(2, len(inputs)):
        want_size(op, inputs, index, inputs[1].size, "as many as the first tensor")
    return [spec((len(inputs) - 1, count), inputs[1].dtype)]


register(
    "SegmentSquares",
    inputs=[_STARTS, Input("tensor", "tensors of one size and type", REALS, variadic=True)],
    outputs=[Output("squares", "sums of squares, shape (tensors, segments)")],
    infer=_infer_squares,
    flops=flops_per_input(2),
    doc="Sums of squares of segments of tensors: segment ``i`` is from element ``starts[i]`` to "
    "``starts[i + 1]``. Ranks that have parts of parameters in a row learn the norms of the parameters by "
    "adding these up.",
)


def _infer_scaled(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    want_same_type(op, inputs, 0, 2)
    want_size(op, inputs, 2, 2 * _want_starts(op, inputs[1]), "two for each segment")
    return [inputs[0]]


register(
    "ScaleByNorms",
    inputs=[
        Input("X", "a tensor in segments", REALS),
        _STARTS,
        Input(
            "squares", "squared norms of parameters, and behind them those of updates, one a segment", REALS
        ),
    ],
    outputs=[Output("Y", "X times a factor for each segment; elements in none are left alone")],
    infer=_infer_scaled,
    args=[
        Float("trust", 1.0, "factor of the ratio"),
        Float("offset", 0.0, "added to the ratio of update and parameter"),
        Float("lowest", 0.0, "lower bound"),
        Float("highest", 3e38, "upper bound"),
    ],
    inplace=[(0, 0)],
    check=check_positive("offset", "lowest"),
    flops=flops_per_input(1),
    doc="The factor of a segment is ``trust / (|update| / |parameter| + offset)``, or 1 where "
    "``|parameter| = 0``, between ``lowest`` and ``highest``: that of Lars, and with the defaults that of "
    "Lamb.",
)
