"""Iteration counters and learning-rate schedules.

Iter, AtomicIter, CreateMutex, LearningRate, LearningRateAdaption.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gpunet.arguments import REQUIRED, Arg, Arguments, Bool, Float, Int, Ints, Str, parse_arguments
from gpunet.errors import ArgumentError
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from gpunet.rules import flops_per_input, want_same_type, want_size
from gpunet.schema import INDICES, NO_GRADIENT, Input, Output, Types, register
from gpunet.specs import BlobSpec, OpaqueSpec, TensorSpec, spec

ITERATION: Final[Types] = frozenset(t for t in INDICES if t.name == "int64")
REALS: Final[Types] = frozenset(spec((), name).dtype for name in ("float32", "float64"))

# Learning-rate policies

#: A rule on one argument: what the value must satisfy, in words and as a test.
_POSITIVE: Final = ("more than 0", lambda value: value > 0)
_NOT_NEGATIVE: Final = ("at least 0", lambda value: value >= 0)


@dataclass(frozen=True)
class PolicySchema:
    """The arguments of one learning-rate policy, rules on them, and its formula in words."""

    args: tuple[Arg, ...]
    doc: str
    rules: tuple[tuple[str, tuple[str, Callable[[Any], bool]]], ...] = ()
    check: Callable[[Arguments], str] | None = None


class Policy(NamedTuple):
    """A policy with its values: what a kernel evaluates.

    ``parts`` is empty but for ``composite``: (first iteration, scale, policy) of each segment, in order.
    """

    name: str
    base_lr: float
    values: Arguments
    parts: tuple[tuple[int, float, Policy], ...] = ()


_GAMMA = Float("gamma", REQUIRED, "decay factor")
_POWER = Float("power", REQUIRED, "exponent")
_NUM_ITER = Int("num_iter", 0, "iterations of the first phase")
_START = Float("start_multiplier", 0.0, "multiplier at iteration 0")
_WARMUP = (
    Float("start_warmup_multiplier", 0.1, "multiplier during and at the start of the warm-up"),
    Int("constant_warmup_num_iter", 10_000_000, "iterations with the constant multiplier"),
    Int("linear_warmup_num_iter", 10_000_000, "iterations of the ramp from it to 1"),
)
_WARMUP_RULES = (("constant_warmup_num_iter", _NOT_NEGATIVE), ("linear_warmup_num_iter", _NOT_NEGATIVE))


def _alter_check(values: Arguments) -> str:
    total = values.active_period + values.inactive_period
    return "" if total > 0 else f"'active_period' and 'inactive_period' add up to {total}, wanted more than 0"


def _slope_check(values: Arguments) -> str:
    first, second = values.num_iter_1, values.num_iter_2
    return (
        ""
        if second > first
        else f"argument 'num_iter_2' is {second}, wanted more than 'num_iter_1' ({first})"
    )


#: The policies by name. The multiplier that the formulas give is scaled by ``base_lr``.
POLICIES: Final[dict[str, PolicySchema]] = {
    "fixed": PolicySchema((), "1"),
    "step": PolicySchema(
        (Int("stepsize", REQUIRED, "iterations between drops"), _GAMMA),
        "gamma^floor(iter / stepsize)",
        (("stepsize", _POSITIVE), ("gamma", _POSITIVE)),
    ),
    "exp": PolicySchema((_GAMMA,), "gamma^iter", (("gamma", _POSITIVE),)),
    "inv": PolicySchema(
        (_GAMMA, _POWER), "(1 + gamma iter)^-power", (("gamma", _POSITIVE), ("power", _POSITIVE))
    ),
    "poly": PolicySchema(
        (Int("max_iter", REQUIRED, "iteration at which the rate reaches 0"), _POWER),
        "(1 - iter / max_iter)^power",
        (("max_iter", _POSITIVE), ("power", _POSITIVE)),
    ),
    "gate": PolicySchema(
        (
            Float("multiplier_1", 1.0, "multiplier before num_iter"),
            Float("multiplier_2", 1.0, "multiplier from num_iter on"),
            _NUM_ITER,
        ),
        "multiplier_1 while iter < num_iter, then multiplier_2",
    ),
    "linearWarmup": PolicySchema(
        (_START, _NUM_ITER),
        "a ramp from start_multiplier to 1 over num_iter iterations, then 1",
        (("num_iter", _NOT_NEGATIVE),),
    ),
    "constantWarmup": PolicySchema(
        (Float("multiplier", 0.5, "multiplier of the first num_iter iterations"), _NUM_ITER),
        "multiplier while iter < num_iter, then 1",
        (("num_iter", _NOT_NEGATIVE),),
    ),
    "pieceWarmup": PolicySchema(
        (
            Float("m1", 0.5, "multiplier before n1"),
            Int("n1", 0, "end of the first piece"),
            Float("m2", 0.5, "multiplier between n1 and n2"),
            Int("n2", 0, "end of the second piece"),
            Float("m3", 0.5, "multiplier from n2 on"),
        ),
        "m1 while iter < n1, m2 while iter < n2, then m3",
    ),
    "hill": PolicySchema(
        (
            Int("num_iter", REQUIRED, "iterations of the warm-up"),
            _START,
            _GAMMA,
            _POWER,
            Float("end_multiplier", 0.0, "lower bound after the warm-up"),
        ),
        "a ramp from start_multiplier to 1 over num_iter iterations, "
        "then max(end_multiplier, (1 + gamma (iter - num_iter))^-power)",
        (("num_iter", _POSITIVE), ("gamma", _POSITIVE), ("power", _POSITIVE)),
    ),
    "slope": PolicySchema(
        (
            Int("num_iter_1", REQUIRED, "end of the first plateau"),
            Float("multiplier_1", 0.0, "multiplier of the first plateau"),
            Int("num_iter_2", REQUIRED, "start of the second plateau"),
            Float("multiplier_2", 0.0, "multiplier of the second plateau"),
        ),
        "multiplier_1 while iter < num_iter_1, then the larger of multiplier_2 and the straight line from "
        "(num_iter_1, multiplier_1) to (num_iter_2, multiplier_2)",
        (("num_iter_1", _POSITIVE),),
        _slope_check,
    ),
    "alter": PolicySchema(
        (
            Bool("active_first", True, "whether the active phase comes first"),
            Int("active_period", REQUIRED, "iterations with multiplier 1"),
            Int("inactive_period", REQUIRED, "iterations with multiplier 0"),
        ),
        "1 for active_period iterations and 0 for inactive_period, in turns",
        (("active_period", _NOT_NEGATIVE), ("inactive_period", _NOT_NEGATIVE)),
        _alter_check,
    ),
    "cyclical": PolicySchema(
        (
            Float("max_lr", 0.005, "peak rate of the first cycle"),
            Int("stepsize", REQUIRED, "iterations of half a cycle"),
            Float("decay", 1.0, "factor of the height a cycle"),
        ),
        "a triangle between base_lr and max_lr with period 2 stepsize, its height scaled by decay^cycle",
        (("stepsize", _POSITIVE),),
    ),
    "cosine": PolicySchema(
        (
            Float("max_lr", 0.5, "multiplier at the start of a period"),
            Float("min_lr", 0.1, "multiplier at its end"),
            Int("period", 50, "iterations of the first period"),
            Float("t_mult", 1.0, "factor of the period's length from one to the next"),
            Float("lr_shrink", 0.99, "factor of both bounds from one period to the next"),
        ),
        "(min_lr + (max_lr - min_lr) (1 + cos(pi t / T)) / 2) lr_shrink^k in period k of length T",
        (("period", _POSITIVE), ("t_mult", _POSITIVE)),
    ),
    "constantThenLinearWarmup": PolicySchema(
        _WARMUP,
        "start_warmup_multiplier, then a ramp from it to 1, then 1",
        _WARMUP_RULES,
    ),
    "compositeCyclical": PolicySchema(
        (
            *_WARMUP,
            Float("cyclical_max_lr", 0.05, "max_lr of the cyclical phase"),
            Int("cyclical_step_size", 1_000_000, "stepsize of the cyclical phase"),
            Float("cyclical_decay", 1.0, "decay of the cyclical phase"),
        ),
        "constantThenLinearWarmup, then cyclical",
        (*_WARMUP_RULES, ("cyclical_step_size", _POSITIVE)),
    ),
    "compositeCosine": PolicySchema(
        (
            *_WARMUP,
            Float("cosine_max_lr", 0.5, "max_lr of the cosine phase"),
            Float("cosine_min_lr", 0.1, "min_lr of the cosine phase"),
            Int("cosine_period", 50, "period of the cosine phase"),
            Float("cosine_t_mult", 1.0, "t_mult of the cosine phase"),
            Float("cosine_lr_shrink", 0.99, "lr_shrink of the cosine phase"),
        ),
        "constantThenLinearWarmup, then cosine",
        (*_WARMUP_RULES, ("cosine_period", _POSITIVE), ("cosine_t_mult", _POSITIVE)),
    ),
    "composite": PolicySchema(
        (Ints("sub_policy_num_iters", REQUIRED, "iterations of each segment; the last one never ends"),),
        "sub_policy_i_lr_scale times the policy sub_policy_i_policy (arguments with the prefix "
        "sub_policy_i_) in "
        "segment i; segment 0 starts at iteration 1, and iterations are not counted anew",
    ),
}

_CYCLES_OVER_BASE_LR: Final = ("cyclical", "compositeCyclical")


def parse_policy(definition: OperatorDef) -> Policy:
    """The policy of a LearningRate definition.

    Raises :class:`ArgumentError` for an unknown one or senseless values.
    """
    head = parse_arguments(definition, {arg.name: arg for arg in _HEAD})
    return _parse(definition, head.policy, head.base_lr, "")


def _parse(definition: OperatorDef, name: str, base_lr: float, prefix: str) -> Policy:
    schema = POLICIES.get(name)
    if schema is None:
        near = difflib.get_close_matches(name, POLICIES, n=3, cutoff=0.5)
        near += [p for p in POLICIES if p.lower() == name.lower() and p not in near]
        hint = f"; did you mean {', '.join(near)}?" if near else f", wanted one of {', '.join(POLICIES)}"
        raise ArgumentError(f"argument '{prefix}policy' is {name!r}, which is no learning-rate policy{hint}")
    if prefix and name == "composite":
        raise ArgumentError(
            f"argument '{prefix}policy' is 'composite', wanted a policy that is not composite itself"
        )
    values = _values(definition, schema, prefix)
    for argument, (wanted, holds) in schema.rules:
        value = getattr(values, argument)
        if not holds(value):
            raise ArgumentError(
                f"argument '{prefix}{argument}' of policy {name!r} is {value:g}, wanted {wanted}"
            )
    complaint = schema.check(values) if schema.check is not None else ""
    if complaint:
        raise ArgumentError(f"policy {name!r}: {complaint}")
    if name in _CYCLES_OVER_BASE_LR and base_lr == 0:
        raise ArgumentError(
            f"argument 'base_lr' is 0, wanted another value for policy {name!r}, which divides by it"
        )
    if name != "composite":
        return Policy(name, base_lr, values)
    return Policy(name, base_lr, values, _segments(definition, values.sub_policy_num_iters, base_lr))


def _values(definition: OperatorDef, schema: PolicySchema, prefix: str) -> Arguments:
    """Values of the policy's arguments, by their names without the prefix."""
    table = {
        f"{prefix}{a.name}": Arg(f"{prefix}{a.name}", a.kind, a.default, a.doc, a.choices)
        for a in schema.args
    }
    found = parse_arguments(definition, table)
    return Arguments({a.name: getattr(found, f"{prefix}{a.name}") for a in schema.args}, found.given)


def _segments(
    definition: OperatorDef, lengths: Sequence[int], base_lr: float
) -> tuple[tuple[int, float, Policy], ...]:
    if not lengths or min(lengths) <= 0:
        raise ArgumentError(
            f"argument 'sub_policy_num_iters' is {list(lengths)}, wanted the iterations (more than 0) of "
            f"each segment"
        )
    start, parts = 1, []
    for i, length in enumerate(lengths):
        prefix = f"sub_policy_{i}_"
        policy, scale = Str(f"{prefix}policy", REQUIRED), Float(f"{prefix}lr_scale", 1.0)
        head = parse_arguments(definition, {policy.name: policy, scale.name: scale})
        part = _parse(definition, getattr(head, policy.name), base_lr, prefix)
        parts.append((start, float(getattr(head, scale.name)), part))
        start += length
    return tuple(parts)


_HEAD: Final = (
    Float(
        "base_lr",
        REQUIRED,
        "factor of the policy's multiplier; its sign says whether updates add or subtract",
    ),
    Str("policy", REQUIRED, f"one of {', '.join(POLICIES)}"),
)


def _all_policy_args() -> list[Arg]:
    """Every argument that some policy reads, once.

    The policies hold the defaults, so here they are ``None``.
    """
    users: dict[str, list[str]] = {}
    first: dict[str, Arg] = {}
    for name, schema in POLICIES.items():
        for arg in schema.args:
            users.setdefault(arg.name, []).append(name)
            first.setdefault(arg.name, arg)
    return [Arg(a.name, a.kind, None, f"{a.doc} ({', '.join(users[a.name])})") for a in first.values()]


def _check_policy(op: Operator) -> None:
    parse_policy(op.definition)


def _infer_learning_rate(op: Operator, inputs: Sequence[Any]) -> list[BlobSpec]:
    want_size(op, inputs, 0, 1)
    return [spec((), "float32")]


register(
    "LearningRate",
    host=True,
    inputs=[Input("iter", "iteration number, one element, counted from 1 by Iter", ITERATION)],
    outputs=[Output("lr", "the rate of this iteration, a scalar (float32)")],
    infer=_infer_learning_rate,
    args=[*_HEAD, *_all_policy_args()],
    gradient=NO_GRADIENT,
    check=_check_policy,
    doc="``lr = base_lr * multiplier(iter)``, where the policy gives the multiplier: "
    + "; ".join(f"``{name}``: {schema.doc}" for name, schema in POLICIES.items())
    + ".",
)


# Counters


def _infer_iter(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    if not inputs:
        return [spec((1,), "int64")]
    want_size(op, inputs, len(inputs) - 1, 1)
    return [inputs[-1]]


register(
    "Iter",
    host=True,
    inputs=[Input("iter", "iteration number, one element", ITERATION, optional=True)],
    outputs=[Output("iter", "the number plus 1")],
    infer=_infer_iter,
    enforce_inplace=[(0, 0)],
    gradient=NO_GRADIENT,
    doc="Counts iterations: adds 1 in place. Without an input it gives the number of the net's current "
    "run, from 1.",
)


def _infer_atomic_iter(op: Operator, inputs: Sequence[Any]) -> list[BlobSpec]:
    want_size(op, inputs, 1, 1)
    return [inputs[1]]


register(
    "AtomicIter",
    host=True,
    inputs=[
        Input("mutex", "made by CreateMutex, held during the update", None),
        Input("iter", "iteration number, one element", ITERATION),
    ],
    outputs=[Output("iter", "the number plus 1")],
    infer=_infer_atomic_iter,
    enforce_inplace=[(1, 0)],
    gradient=NO_GRADIENT,
    doc="Adds 1 in place while it holds the mutex, so that nets that run at the same time count once each.",
)


def _infer_mutex(op: Operator, inputs: Sequence[Any]) -> list[BlobSpec]:
    return [OpaqueSpec("mutex")]


register(
    "CreateMutex",
    host=True,
    outputs=[Output("mutex", "an unlocked mutex")],
    infer=_infer_mutex,
    dynamic=True,
    doc="Makes a mutex.",
)


def _infer_adaption(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    want_size(op, inputs, 0, 1)
    want_size(op, inputs, 2, inputs[1].size, "the size of grad")
    want_same_type(op, inputs, 1, 2)
    return [inputs[0]]


register(
    "LearningRateAdaption",
    inputs=[
        Input("lr", "learning rate, one element", REALS),
        Input("grad", "gradient of this iteration", REALS),
        Input("effgrad", "effective gradient of the last update, of the size of grad", REALS),
    ],
    outputs=[Output("output_lr", "the adapted learning rate")],
    infer=_infer_adaption,
    args=[
        Float("lr_alpha", 0.01, "rate at which the learning rate is changed"),
        Bool(
            "normalized_lr_adaption",
            True,
            "use the cosine of the angle between the gradients instead of their product",
        ),
    ],
    inplace=[(0, 0)],
    gradient=NO_GRADIENT,
    flops=flops_per_input(6, 1),
    doc="Hypergradient descent (https://arxiv.org/abs/1703.04782): ``lr - lr_alpha grad.effgrad``, or "
    "``lr (1 - lr_alpha cos(grad, effgrad))`` where normalised.",
)
