"""Dense parameter updates.

MomentumSGD, MomentumSGDUpdate, Adagrad, Adadelta, RmsProp, Adam, Wngrad, YellowFin, Storm, Ftrl, Lars,
WeightScale.

Learning rates carry their own sign: Caffe2's updates add ``lr * step`` (so a rate is negative) except where
said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from gpunet.arguments import Bool, Float, Int
from gpunet.errors import ArgumentError
from gpunet.operator import Operator
from gpunet.operators.learning_rate import ITERATION, REALS
from gpunet.rules import flops_per_input, want_same_type, want_shape, want_size
from gpunet.schema import Input, Output, register
from gpunet.specs import BlobSpec, TensorSpec

Infer = Callable[[Operator, Sequence[TensorSpec]], list[BlobSpec]]

LR: Final = Input("lr", "learning rate, one element", REALS)
ITER: Final = Input("iter", "iteration number, one element, counted from 1 by Iter", ITERATION)
PARAM: Final = Input("param", "parameter to update", REALS)
GRAD: Final = Input("grad", "gradient of the parameter", REALS)
NEW_PARAM: Final = Output("output_param", "updated parameter")


def state(name: str, doc: str) -> Input:
    """An input that holds optimizer state of the parameter's shape."""
    return Input(name, doc, REALS)


def elementwise(*outputs: int, like: tuple[int, ...], single: tuple[int, ...]) -> Infer:
    """Outputs look like the inputs ``outputs``.

    Inputs ``like`` have the shape and type of input 0, inputs ``single`` one element.
    """

    def infer(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
        for i in like:
            want_shape(op, inputs, i, inputs[0].shape, f"the shape of {op.schema.input_at(0).name}")
        for i in single:
            want_size(op, inputs, i, 1)
        want_same_type(op, inputs, 0, *like)
        return [inputs[i] for i in outputs]

    return infer


def check_positive(*names: str) -> Callable[[Operator], None]:
    """A check that the arguments are not negative."""

    def check(op: Operator) -> None:
        for name in names:
            value = getattr(op.args, name)
            if value < 0:
                raise ArgumentError(f"argument {name!r} is {value:g}, wanted at least 0")

    return check


MOMENTUM_ARGS: Final = (
    Float("momentum", 0.0, "factor of the old moment"),
    Bool("nesterov", False, "Nesterov's momentum"),
)
_MOMENTUM_DOC = (
    "``moment' = momentum * moment + lr * grad``; ``grad' = moment'``, with Nesterov "
    "``grad' = (1 + momentum) moment' - momentum * moment``. The rate is positive: the step ``grad'`` is "
    "subtracted"
)
_MOMENTUM_INPUTS = [GRAD, state("moment", "running sum of steps"), LR]
_MOMENTUM_OUTPUTS = [Output("output_grad", "step to subtract"), Output("output_moment", "updated moment")]

register(
    "MomentumSGD",
    inputs=_MOMENTUM_INPUTS,
    outputs=_MOMENTUM_OUTPUTS,
    infer=elementwise(0, 1, like=(1,), single=(2,)),
    args=MOMENTUM_ARGS,
    inplace=[(0, 0), (1, 1)],
    flops=flops_per_input(4),
    doc=f"{_MOMENTUM_DOC} by a later operator.",
)
register(
    "MomentumSGDUpdate",
    inputs=[*_MOMENTUM_INPUTS, PARAM],
    outputs=[*_MOMENTUM_OUTPUTS, NEW_PARAM],
    infer=elementwise(0, 1, 3, like=(1, 3), single=(2,)),
    args=MOMENTUM_ARGS,
    inplace=[(0, 0), (1, 1), (3, 2)],
    flops=flops_per_input(5),
    doc=f"{_MOMENTUM_DOC} from the parameter.",
)

ADAGRAD_ARGS: Final = (
    Float("epsilon", 1e-5, "added to the root of the sum of squares"),
    Float("decay", 1.0, "factor of the old sum of squares"),
    Float("weight_decay", 0.0, "this much of the parameter is added to the gradient"),
)
register(
    "Adagrad",
    inputs=[PARAM, state("moment", "sum of squared gradients"), GRAD, LR],
    outputs=[
        NEW_PARAM,
        Output("output_moment", "updated sum of squared gradients"),
        Output("output_effective_lr", "rate of each element", optional=True),
        Output("output_update", "step that was added", optional=True),
    ],
    infer=elementwise(0, 1, 0, 0, like=(1, 2), single=(3,)),
    args=ADAGRAD_ARGS,
    inplace=[(0, 0), (1, 1)],
    check=check_positive("epsilon"),
    flops=flops_per_input(7),
    doc="``g = grad + weight_decay * param``; ``moment' = decay * moment + g^2``; "
    "``param' = param + lr * g / (sqrt(moment') + epsilon)`` (https://jmlr.org/papers/v12/duchi11a.html).",
)

ADADELTA_ARGS: Final = (
    Float("epsilon", 1e-5, "added under the roots"),
    Float("decay", 0.95, "factor of the old averages"),
)
register(
    "Adadelta",
    inputs=[
        PARAM,
        state("moment", "average of squared gradients"),
        state("moment_delta", "average of squared steps"),
        GRAD,
        LR,
    ],
    outputs=[
        NEW_PARAM,
        Output("output_moment", "updated average"),
        Output("output_moment_delta", "updated average"),
    ],
    infer=elementwise(0, 1, 2, like=(1, 2, 3), single=(4,)),
    args=ADADELTA_ARGS,
    inplace=[(0, 0), (1, 1), (2, 2)],
    check=check_positive("epsilon"),
    flops=flops_per_input(14),
    doc="``moment' = decay * moment + (1 - decay) grad^2``; ``step = grad sqrt(moment_delta + epsilon) / "
    "sqrt(moment' + epsilon)``; "
    "``moment_delta' = decay * moment_delta + (1 - decay) step^2``; ``param' = param + lr * step`` "
    "(https://arxiv.org/abs/1212.5701).",
)

register(
    "RmsProp",
    inputs=[
        GRAD,
        state("mean_squares", "average of squared gradients"),
        state("momentum", "running sum of steps"),
        LR,
    ],
    outputs=[
        Output("output_grad", "step to add"),
        Output("output_mean_squares", "updated average"),
        Output("output_momentum", "updated running sum, equal to the step"),
    ],
    infer=elementwise(0, 1, 2, like=(1, 2), single=(3,)),
    args=[
        Float("decay", 0.9, "factor of the old average"),
        Float("momentum", 0.0, "factor of the old step"),
        Float("epsilon", 1e-5, "added under the root"),
    ],
    inplace=[(0, 0), (1, 1), (2, 2)],
    check=check_positive("epsilon"),
    flops=flops_per_input(9),
    doc="``ms' = ms + (1 - decay) (grad^2 - ms)``; ``mom' = momentum * mom + lr * grad / sqrt(epsilon + "
    "ms')``; ``grad' = mom'``. "
    "A later operator adds the step to the parameter.",
)

#: The moments of Adam and its kind, and how they give them back.
MOMENTS: Final = (
    state("moment_1", "average of gradients"),
    state("moment_2", "average of squared gradients"),
)
NEW_MOMENTS: Final = (
    Output("output_moment_1", "updated average"),
    Output("output_moment_2", "updated average"),
)
ADAM_ARGS: Final = (
    Float("beta1", 0.9, "factor of the old first moment"),
    Float("beta2", 0.999, "factor of the old second moment"),
    Float("epsilon", 1e-5, "added to the root of the second moment"),
)
register(
    "Adam",
    inputs=[
        PARAM,
        *MOMENTS,
        GRAD,
        LR,
        ITER,
    ],
    outputs=[
        NEW_PARAM,
        *NEW_MOMENTS,
        Output("output_grad", "effective gradient: the step without the rate", optional=True),
    ],
    infer=elementwise(0, 1, 2, 0, like=(1, 2, 3), single=(4, 5)),
    args=ADAM_ARGS,
    inplace=[(0, 0), (1, 1), (2, 2)],
    check=check_positive("epsilon"),
    flops=flops_per_input(12),
    doc="``m' = beta1 m + (1 - beta1) grad``; ``v' = beta2 v + (1 - beta2) grad^2``; ``param' = param + lr "
    "c m' / (sqrt(v') + epsilon)`` "
    "with ``c = sqrt(1 - beta2^t) / (1 - beta1^t)`` and ``t = iter + 1`` (https://arxiv.org/abs/1412.6980).",
)


def _infer_wngrad(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    param, total, *_ = inputs
    want_size(op, inputs, 1, 1)
    want_shape(op, inputs, 2, param.shape, "the shape of param")
    want_size(op, inputs, 3, 1)
    want_same_type(op, inputs, 0, 1, 2)
    return [param, total, total, param]


WNGRAD_ARGS: Final = (Float("epsilon", 1e-5, "added to the scale"),)
register(
    "Wngrad",
    inputs=[PARAM, Input("seq_b", "scale of the steps, one element", REALS), GRAD, LR],
    outputs=[
        NEW_PARAM,
        Output("output_seq_b", "updated scale"),
        Output("output_effective_lr", "rate that was used, one element", optional=True),
        Output("output_update", "step that was added", optional=True),
    ],
    infer=_infer_wngrad,
    args=WNGRAD_ARGS,
    inplace=[(0, 0), (1, 1)],
    check=check_positive("epsilon"),
    flops=flops_per_input(4),
    doc="``param' = param + lr * grad / (b + epsilon)``; ``b' = b + sum(grad^2) / (b + epsilon)`` "
    "(https://arxiv.org/abs/1803.02865).",
)


def _infer_storm(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    param, moment, total, _, _ = inputs
    for i in (1, 3):
        want_shape(op, inputs, i, param.shape, "the shape of param")
    for i in (2, 4):
        want_size(op, inputs, i, 1)
    want_same_type(op, inputs, 0, 1, 2, 3)
    return [param, moment, total]


#: What Storm keeps between updates, and how it gives that back.
STORM_STATE: Final = (
    state("moment", "gradient estimate"),
    Input("grad_sq_sum", "sum of squared gradients, one element", REALS),
)
STORM_OUTPUTS: Final = (
    NEW_PARAM,
    Output("output_moment", "updated estimate"),
    Output("output_grad_sq_sum", "updated sum"),
)
STORM_ARGS: Final = (
    Float("momentum", 10.0, "scales how fast the moment follows the gradient"),
    Float("beta", 0.1, "added to the sum of squares"),
)
register(
    "Storm",
    inputs=[
        PARAM,
        *STORM_STATE,
        GRAD,
        LR,
    ],
    outputs=STORM_OUTPUTS,
    infer=_infer_storm,
    args=STORM_ARGS,
    inplace=[(0, 0), (1, 1), (2, 2)],
    check=check_positive("momentum", "beta"),
    flops=flops_per_input(7),
    doc="``s' = s + sum(grad^2)``; ``r = lr (beta + s')^(-1/3)``; ``m' = grad + (1 - momentum r^2) (m - "
    "grad)``; "
    "``param' = param + r m'`` (https://arxiv.org/abs/1905.10018).",
)


def _infer_ftrl(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    var = inputs[0]
    want_size(op, inputs, 1, 2 * var.size, "two numbers for each element of var")
    want_size(op, inputs, 2, var.size, "the size of var")
    want_same_type(op, inputs, 0, 1, 2)
    if len(inputs) > 3:
        want_size(op, inputs, 3, 1)
    return [var, inputs[1]]


def _check_ftrl(op: Operator) -> None:
    if op.args.alpha <= 0:
        raise ArgumentError(f"argument 'alpha' is {op.args.alpha:g}, wanted more than 0")


FTRL_ARGS: Final = (
    Float("alpha", 0.005, "learning rate"),
    Float("beta", 1.0, "smoothing of the rate"),
    Float("lambda1", 0.001, "strength of the L1 regularisation"),
    Float("lambda2", 0.001, "strength of the L2 regularisation"),
)
register(
    "Ftrl",
    inputs=[
        Input("var", "parameter to update", REALS),
        Input("n_z", "for each element the pair n (sum of squares) and z, so twice the size of var", REALS),
        GRAD,
        Input("alpha", "learning rate in place of the argument, one element", REALS, optional=True),
    ],
    outputs=[Output("output_var", "updated parameter"), Output("output_n_z", "updated pairs")],
    infer=_infer_ftrl,
    args=FTRL_ARGS,
    inplace=[(0, 0), (1, 1)],
    check=_check_ftrl,
    flops=flops_per_input(16),
    doc="``n' = n + grad^2``; ``z' = z + grad - (sqrt(n') - sqrt(n)) / alpha * var``; ``var' = 0`` where "
    "``|z'| <= lambda1``, else "
    "``(lambda1 sign(z') - z') / ((beta + sqrt(n')) / alpha + lambda2)`` (McMahan et al., Ad click "
    "prediction, 2013).",
)


def _infer_lars(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    want_shape(op, inputs, 1, inputs[0].shape, "the shape of X")
    for i in (2, 3, 4):
        want_size(op, inputs, i, 1)
    want_same_type(op, inputs, 0, 1)
    return [inputs[0].with_shape(1)]


register(
    "Lars",
    inputs=[
        Input("X", "parameter", REALS),
        Input("dX", "its gradient", REALS),
        Input("wd", "weight decay, one element", REALS),
        Input("trust", "trust coefficient, one element", REALS),
        Input("lr_max", "upper bound, one element", REALS),
    ],
    outputs=[Output("lr_rescaled", "factor for the learning rate of this parameter, shape 1")],
    infer=_infer_lars,
    args=[
        Float("offset", 0.5, "added to the ratio of the norms"),
        Float("lr_min", 0.02, "lower bound"),
    ],
    flops=flops_per_input(4),
    doc="``trust / (|dX| / |X| + wd + offset)``, or 1 where ``|X| = 0``, between ``lr_min`` and ``lr_max`` "
    "(https://arxiv.org/abs/1708.03888).",
)


def _infer_weight_scale(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    want_size(op, inputs, 1, 1)
    return [inputs[0]]


def _check_weight_scale(op: Operator) -> None:
    if op.args.stepsize <= 0:
        raise ArgumentError(f"argument 'stepsize' is {op.args.stepsize}, wanted more than 0")


_NEVER: Final = 2**63 - 1
register(
    "WeightScale",
    inputs=[Input("w", "parameter", REALS), ITER],
    outputs=[Output("nw", "scaled parameter")],
    infer=_infer_weight_scale,
    args=[
        Int("stepsize", _NEVER, "iterations between scalings"),
        Int("upper_bound_iter", _NEVER, "no scaling from this iteration on"),
        Float("scale", 1.0, "factor"),
    ],
    inplace=[(0, 0)],
    check=_check_weight_scale,
    flops=flops_per_input(1),
    doc="``nw = scale * w`` where ``t = iter + 1`` is a multiple of ``stepsize`` below "
    "``upper_bound_iter``, else ``nw = w``.",
)


def _infer_yellowfin(op: Operator, inputs: Sequence[Any]) -> list[BlobSpec]:
    param = inputs[0]
    for i in (1, 5, 6, 8):
        want_shape(op, inputs, i, param.shape, "the shape of param")
    for i in (2, 3, 9):
        want_size(op, inputs, i, 1)
    want_size(op, inputs, 4, op.args.curv_win_width, "argument 'curv_win_width'")
    want_size(op, inputs, 7, 5)
    want_same_type(op, inputs, *range(9))
    return list(inputs[:8])


def _check_yellowfin(op: Operator) -> None:
    if op.args.curv_win_width <= 0:
        raise ArgumentError(f"argument 'curv_win_width' is {op.args.curv_win_width}, wanted more than 0")
    if not 0 <= op.args.beta < 1:
        raise ArgumentError(f"argument 'beta' is {op.args.beta:g}, wanted at least 0 and less than 1")


_YELLOWFIN_STATE: Final = (
    ("moment", "running sum of steps"),
    ("lr", "average of tuned learning rates, one element"),
    ("mu", "average of tuned momentum coefficients, one element"),
    ("curv_win", "logarithms of the last squared gradient norms, curv_win_width elements"),
    ("g_avg", "average of gradients"),
    ("g2_avg", "average of squared gradients"),
    (
        "scalars_memory",
        "averages of |g|, |g|^2, their smallest and largest logarithm in the window, and the distance, 5 "
        "elements",
    ),
)
register(
    "YellowFin",
    inputs=[PARAM, *(Input(name, doc, REALS) for name, doc in _YELLOWFIN_STATE), GRAD, ITER],
    outputs=[NEW_PARAM, *(Output(f"output_{name}", f"updated {doc}") for name, doc in _YELLOWFIN_STATE)],
    infer=_infer_yellowfin,
    args=[
        Float("beta", 0.999, "factor of the old averages"),
        Int("curv_win_width", 20, "steps over which the extremes of the gradient norm are taken"),
        Float("epsilon", 1e-6, "lower bound of norms and variance"),
        Bool("nesterov", False, "Nesterov's momentum"),
        Bool("zero_debias", True, "divide averages by 1 - beta^iter"),
    ],
    inplace=[(i, i) for i in range(8)],
    check=_check_yellowfin,
    flops=flops_per_input(16),
    doc="A momentum step with the averaged rate and coefficient, which are then tuned from the gradient's "
    "statistics "
    "(https://arxiv.org/abs/1706.03471): ``moment' = mu * moment + lr * grad``; ``param' = param - "
    "moment'``.",
)
