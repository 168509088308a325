"""The LAMB update, for large batches."""

from __future__ import annotations

from gpunet.arguments import Float
from gpunet.operators.optimizer import GRAD, ITER, LR, NEW_PARAM, PARAM, check_positive, elementwise, state
from gpunet.rules import flops_per_input
from gpunet.schema import Output, register

register(
    "Lamb",
    inputs=[
        PARAM,
        state("moment_1", "average of gradients"),
        state("moment_2", "average of squared gradients"),
        GRAD,
        LR,
        ITER,
    ],
    outputs=[
        NEW_PARAM,
        Output("output_moment_1", "updated average"),
        Output("output_moment_2", "updated average"),
    ],
    infer=elementwise(0, 1, 2, like=(1, 2, 3), single=(4, 5)),
    args=[
        Float("beta1", 0.9, "factor of the old average of gradients"),
        Float("beta2", 0.999, "factor of the old average of squared gradients"),
        Float("epsilon", 1e-6, "added under the fraction"),
        Float("weight_decay", 0.0, "part of the parameter that is added to the direction"),
    ],
    inplace=[(0, 0), (1, 1), (2, 2)],
    check=check_positive("epsilon", "weight_decay"),
    flops=flops_per_input(18),
    doc="``m' = beta1 m + (1 - beta1) grad``; ``v' = beta2 v + (1 - beta2) grad^2``; "
    "``u = m' / (1 - beta1^t) / (sqrt(v' / (1 - beta2^t)) + epsilon) + weight_decay param``; "
    "``param' = param + lr |param| / |u| u``, with the factor 1 where a norm is 0, and ``t = iter`` "
    "(https://arxiv.org/abs/1904.00962, algorithm 2).",
)
