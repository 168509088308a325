"""Updates of single rows: ScatterWeightedSum and the sparse forms of the optimizers, all in place.

``indices`` holds rows of the parameter and ``grad`` one block for each; an index that occurs again is updated
again, in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from gpunet.arguments import Bool, Float
from gpunet.errors import SchemaError, ShapeError
from gpunet.operator import Operator
from gpunet.operators.learning_rate import REALS
from gpunet.operators.optimizer import (
    ADADELTA_ARGS,
    ADAM_ARGS,
    FTRL_ARGS,
    GRAD,
    ITER,
    LR,
    MOMENTS,
    MOMENTUM_ARGS,
    NEW_MOMENTS,
    NEW_PARAM,
    PARAM,
    STORM_ARGS,
    STORM_OUTPUTS,
    STORM_STATE,
    WNGRAD_ARGS,
    check_positive,
    state,
)
from gpunet.rules import describe, flops_per_input, want_same_type, want_shape, want_size
from gpunet.schema import INDICES, Input, Output, register
from gpunet.specs import BlobSpec, TensorSpec, format_shape

ROWS: Final = Input("indices", "rows of the parameter to update", INDICES)


def want_blocks(op: Operator, inputs: Sequence[TensorSpec], param: int, indices: int, grad: int) -> None:
    """Raises ShapeError unless ``grad`` holds one block of the parameter's rows for each index."""
    if inputs[param].rank == 0:
        raise ShapeError(f"{describe(op, param, inputs[param])} has no rows, wanted at least 1 dimension")
    block = math.prod(inputs[param].shape[1:])
    want_size(
        op,
        inputs,
        grad,
        inputs[indices].size * block,
        f"a row of {format_shape(inputs[param].shape[1:])} for each of {inputs[indices].size} indices",
    )


def sparse(
    *outputs: int,
    like: tuple[int, ...] = (),
    single: tuple[int, ...] = (),
    indices: int,
    grad: int,
    param: int = 0,
) -> Callable[[Operator, Sequence[TensorSpec]], list[BlobSpec]]:
    """Outputs look like inputs ``outputs``; ``like`` have the parameter's shape, ``single`` one element."""

    def infer(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
        for i in like:
            want_shape(op, inputs, i, inputs[param].shape, "the shape of param")
        for i in single:
            want_size(op, inputs, i, 1)
        want_same_type(op, inputs, param, *like, grad)
        want_blocks(op, inputs, param, indices, grad)
        return [inputs[i] for i in outputs]

    return infer


register(
    "SparseMomentumSGDUpdate",
    inputs=[GRAD, state("moment", "running sum of steps"), LR, PARAM, ROWS],
    outputs=[Output("output_grad", "step to subtract"), Output("output_moment", "updated moment"), NEW_PARAM],
    infer=sparse(0, 1, 3, like=(1,), single=(2,), indices=4, grad=0, param=3),
    args=MOMENTUM_ARGS,
    inplace=[(0, 0)],
    enforce_inplace=[(1, 1), (3, 2)],
    flops=flops_per_input(5),
    doc="MomentumSGDUpdate of the rows in ``indices``.",
)

_MOMENT_OUT: Final = Output("output_moment", "updated sum of squared gradients")
_SPARSE_ADAGRAD_ARGS: Final = (
    Float("epsilon", 1e-5, "added to the root of the sum of squares"),
    Float("weight_decay", 0.0, "this much of the parameter is added to the gradient"),
)
register(
    "SparseAdagrad",
    inputs=[PARAM, state("moment", "sum of squared gradients"), ROWS, GRAD, LR],
    outputs=[NEW_PARAM, _MOMENT_OUT],
    infer=sparse(0, 1, like=(1,), single=(4,), indices=2, grad=3),
    args=_SPARSE_ADAGRAD_ARGS,
    enforce_inplace=[(0, 0), (1, 1)],
    check=check_positive("epsilon"),
    flops=flops_per_input(7, 3),
    doc="Adagrad (without decay) of the rows in ``indices``.",
)


def _infer_rowwise_adagrad(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    want_blocks(op, inputs, 0, 2, 3)
    want_size(op, inputs, 1, inputs[0].shape[0], "one for each row of param")
    want_size(op, inputs, 4, 1)
    want_same_type(op, inputs, 0, 1, 3)
    return [inputs[0], inputs[1]]


register(
    "RowWiseSparseAdagrad",
    inputs=[PARAM, Input("moment", "sum of mean squared gradients, one for each row", REALS), ROWS, GRAD, LR],
    outputs=[NEW_PARAM, _MOMENT_OUT],
    infer=_infer_rowwise_adagrad,
    args=_SPARSE_ADAGRAD_ARGS,
    enforce_inplace=[(0, 0), (1, 1)],
    check=check_positive("epsilon"),
    flops=flops_per_input(5, 3),
    doc="Adagrad with one rate a row: ``g = grad + weight_decay * param``; ``moment' = moment + mean(g^2)``; "
    "``param' = param + lr * g / (sqrt(moment') + epsilon)``.",
)

register(
    "SparseAdadelta",
    inputs=[
        PARAM,
        state("moment", "average of squared gradients"),
        state("moment_delta", "average of squared steps"),
        ROWS,
        GRAD,
        LR,
    ],
    outputs=[
        NEW_PARAM,
        Output("output_moment", "updated average"),
        Output("output_moment_delta", "updated average"),
    ],
    infer=sparse(0, 1, 2, like=(1, 2), single=(5,), indices=3, grad=4),
    args=ADADELTA_ARGS,
    enforce_inplace=[(0, 0), (1, 1), (2, 2)],
    check=check_positive("epsilon"),
    flops=flops_per_input(14, 4),
    doc="Adadelta of the rows in ``indices``.",
)

_ADAM_OUTPUTS: Final = (
    NEW_PARAM,
    *NEW_MOMENTS,
    Output("output_grad", "effective gradient: the step without the rate", optional=True),
)
register(
    "SparseAdam",
    inputs=[PARAM, *MOMENTS, ROWS, GRAD, LR, ITER],
    outputs=_ADAM_OUTPUTS,
    infer=sparse(0, 1, 2, 4, like=(1, 2), single=(5, 6), indices=3, grad=4),
    args=[*ADAM_ARGS, Bool("enableRAdam", False, "rectified Adam (https://arxiv.org/abs/1908.03265)")],
    enforce_inplace=[(0, 0), (1, 1), (2, 2)],
    check=check_positive("epsilon"),
    flops=flops_per_input(12, 4),
    doc="Adam of the rows in ``indices``. Rectified: the step is scaled by the rectification term of the "
    "paper, and is "
    "``lr m' / (1 - beta1^t)`` while the approximated moving average is shorter than 5.",
)


def _infer_rowwise_adam(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    want_blocks(op, inputs, 0, 3, 4)
    want_shape(op, inputs, 1, inputs[0].shape, "the shape of param")
    want_size(op, inputs, 2, inputs[0].shape[0], "one for each row of param")
    for i in (5, 6):
        want_size(op, inputs, i, 1)
    want_same_type(op, inputs, 0, 1, 2, 4)
    return [inputs[0], inputs[1], inputs[2], inputs[4]]


register(
    "RowWiseSparseAdam",
    inputs=[
        PARAM,
        MOMENTS[0],
        Input("moment_2", "average of mean squared gradients, one for each row", REALS),
        ROWS,
        GRAD,
        LR,
        ITER,
    ],
    outputs=_ADAM_OUTPUTS,
    infer=_infer_rowwise_adam,
    args=ADAM_ARGS,
    enforce_inplace=[(0, 0), (1, 1), (2, 2)],
    check=check_positive("epsilon"),
    flops=flops_per_input(10, 4),
    doc="SparseAdam with one second moment a row, of the row's mean squared gradient.",
)


def _infer_sparse_scalar_state(op: Operator, inputs: Sequence[Any]) -> list[BlobSpec]:
    """SparseWngrad: (param, seq_b, indices, grad, lr); seq_b has one element."""
    want_blocks(op, inputs, 0, 2, 3)
    want_size(op, inputs, 1, 1)
    want_size(op, inputs, 4, 1)
    want_same_type(op, inputs, 0, 1, 3)
    return [inputs[0], inputs[1]]


register(
    "SparseWngrad",
    inputs=[PARAM, Input("seq_b", "scale of the steps, one element", REALS), ROWS, GRAD, LR],
    outputs=[NEW_PARAM, Output("output_seq_b", "updated scale")],
    infer=_infer_sparse_scalar_state,
    args=WNGRAD_ARGS,
    enforce_inplace=[(0, 0), (1, 1)],
    check=check_positive("epsilon"),
    flops=flops_per_input(4, 3),
    doc="Wngrad of the rows in ``indices``, but with ``b' = b + sum(grad^2) / b``; nothing changes where "
    "there are none.",
)


def _infer_sparse_storm(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    want_blocks(op, inputs, 0, 4, 3)
    want_shape(op, inputs, 1, inputs[0].shape, "the shape of param")
    for i in (2, 5):
        want_size(op, inputs, i, 1)
    want_same_type(op, inputs, 0, 1, 2, 3)
    return [inputs[0], inputs[1], inputs[2]]


register(
    "SparseStorm",
    inputs=[
        PARAM,
        *STORM_STATE,
        GRAD,
        ROWS,
        LR,
    ],
    outputs=STORM_OUTPUTS,
    infer=_infer_sparse_storm,
    args=STORM_ARGS,
    enforce_inplace=[(0, 0), (1, 1), (2, 2)],
    check=check_positive("momentum", "beta"),
    flops=flops_per_input(7, 3),
    doc="Storm of the rows in ``indices``; nothing changes where there are none.",
)


def _infer_sparse_ftrl(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    want_blocks(op, inputs, 0, 2, 3)
    want_size(op, inputs, 1, 2 * inputs[0].size, "two numbers for each element of var")
    want_same_type(op, inputs, 0, 1, 3)
    if len(inputs) > 4:
        want_size(op, inputs, 4, 1)
    return [inputs[0], inputs[1]]


register(
    "SparseFtrl",
    inputs=[
        Input("var", "parameter to update", REALS),
        Input("n_z", "for each element the pair n (sum of squares) and z, so twice the size of var", REALS),
        ROWS,
        GRAD,
        Input("alpha", "learning rate in place of the argument, one element", REALS, optional=True),
    ],
    outputs=[Output("output_var", "updated parameter"), Output("output_n_z", "updated pairs")],
    infer=_infer_sparse_ftrl,
    args=FTRL_ARGS,
    enforce_inplace=[(0, 0), (1, 1)],
    flops=flops_per_input(16, 3),
    doc="Ftrl of the rows in ``indices``.",
)


def _check_scatter(op: Operator) -> None:
    found = len(op.inputs)
    if found < 5 or found % 2 == 0:
        raise SchemaError(
            f"has {found} inputs, wanted X_0, weight_0, indices and then pairs of X_i, weight_i"
        )


def _infer_scatter(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    for i in range(3, len(inputs), 2):
        want_same_type(op, inputs, 0, i)
        want_blocks(op, inputs, 0, 2, i)
    for i in (1, *range(4, len(inputs), 2)):
        want_size(op, inputs, i, 1)
    return [inputs[0]]


def _scatter_flops(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return (len(inputs) - 2) * inputs[3].size


register(
    "ScatterWeightedSum",
    inputs=[
        Input("X_0", "tensor to update, at least 1 dimension", REALS),
        Input("weight_0", "factor of the old rows, one element", REALS),
        ROWS,
        Input(
            "X_1",
            "rows to add, one block for each index; then its weight, and more such pairs",
            REALS,
            variadic=True,
        ),
    ],
    outputs=[Output("X_0", "the updated tensor")],
    infer=_infer_scatter,
    enforce_inplace=[(0, 0)],
    check=_check_scatter,
    flops=_scatter_flops,
    doc="``X_0[i] = weight_0 X_0[i] + sum over k of weight_k X_k[j]`` for each index ``i = indices[j]``. "
    "An index that occurs n times scales "
    "its row n times, then all its blocks are added.",
)
