"""Learning-rate schedules: how the rate of an optimizer changes with the iteration.

A schedule gives a multiplier of the optimizer's rate. Each class is one policy of the LearningRate operator,
and its fields are that policy's arguments, with the same names and defaults; the formulas are in the
operator's documentation. Iterations count from 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from gpunet.errors import ArgumentError


@dataclass(frozen=True)
class Schedule:
    """Base of the schedules."""

    #: Name of the policy of the LearningRate operator.
    policy: ClassVar[str]

    def arguments(self) -> dict[str, Any]:
        """Arguments of the LearningRate operator, all but ``base_lr``."""
        return {"policy": self.policy} | {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Fixed(Schedule):
    """1 throughout."""

    policy: ClassVar[str] = "fixed"


@dataclass(frozen=True)
class Step(Schedule):
    """``gamma^floor(iter / stepsize)``."""

    policy: ClassVar[str] = "step"
    stepsize: int
    gamma: float


@dataclass(frozen=True)
class Exponential(Schedule):
    """``gamma^iter``."""

    policy: ClassVar[str] = "exp"
    gamma: float


@dataclass(frozen=True)
class Inverse(Schedule):
    """``(1 + gamma iter)^-power``."""

    policy: ClassVar[str] = "inv"
    gamma: float
    power: float


@dataclass(frozen=True)
class Polynomial(Schedule):
    """``(1 - iter / max_iter)^power``; not a number past ``max_iter`` for fractional powers."""

    policy: ClassVar[str] = "poly"
    max_iter: int
    power: float


@dataclass(frozen=True)
class Gate(Schedule):
    """``multiplier_1`` before iteration ``num_iter``, ``multiplier_2`` from it on."""

    policy: ClassVar[str] = "gate"
    multiplier_1: float = 1.0
    multiplier_2: float = 1.0
    num_iter: int = 0


@dataclass(frozen=True)
class LinearWarmup(Schedule):
    """A ramp from ``start_multiplier`` to 1 over ``num_iter`` iterations, then 1."""

    policy: ClassVar[str] = "linearWarmup"
    start_multiplier: float = 0.0
    num_iter: int = 0


@dataclass(frozen=True)
class ConstantWarmup(Schedule):
    """``multiplier`` before iteration ``num_iter``, then 1."""

    policy: ClassVar[str] = "constantWarmup"
    multiplier: float = 0.5
    num_iter: int = 0


@dataclass(frozen=True)
class PieceWarmup(Schedule):
    """``m1`` before iteration ``n1``, ``m2`` before ``n2``, then ``m3``."""

    policy: ClassVar[str] = "pieceWarmup"
    m1: float = 0.5
    n1: int = 0
    m2: float = 0.5
    n2: int = 0
    m3: float = 0.5


@dataclass(frozen=True)
class Hill(Schedule):
    """A ramp up to 1 at ``num_iter``, then an inverse decay down to ``end_multiplier``."""

    policy: ClassVar[str] = "hill"
    num_iter: int
    gamma: float
    power: float
    start_multiplier: float = 0.0
    end_multiplier: float = 0.0


@dataclass(frozen=True)
class Slope(Schedule):
    """``multiplier_1`` before ``num_iter_1``, falling straight to ``multiplier_2`` at ``num_iter_2``."""

    policy: ClassVar[str] = "slope"
    num_iter_1: int
    num_iter_2: int
    multiplier_1: float = 0.0
    multiplier_2: float = 0.0


@dataclass(frozen=True)
class Alternate(Schedule):
    """1 for ``active_period`` iterations and 0 for ``inactive_period``, in turns."""

    policy: ClassVar[str] = "alter"
    active_period: int
    inactive_period: int
    active_first: bool = True


@dataclass(frozen=True)
class Cyclical(Schedule):
    """A triangle between the optimizer's rate and ``max_lr`` (a rate), with period ``2 stepsize``."""

    policy: ClassVar[str] = "cyclical"
    stepsize: int
    max_lr: float = 0.005
    decay: float = 1.0


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from ``max_lr`` to ``min_lr`` (multipliers) over each period (https://arxiv.org/abs/1608.03983)."""

    policy: ClassVar[str] = "cosine"
    max_lr: float = 0.5
    min_lr: float = 0.1
    period: int = 50
    t_mult: float = 1.0
    lr_shrink: float = 0.99


@dataclass(frozen=True)
class ConstantThenLinearWarmup(Schedule):
    """``start_warmup_multiplier``, then a ramp from it to 1, then 1."""

    policy: ClassVar[str] = "constantThenLinearWarmup"
    start_warmup_multiplier: float = 0.1
    constant_warmup_num_iter: int = 10_000_000
    linear_warmup_num_iter: int = 10_000_000


@dataclass(frozen=True)
class WarmupThenCyclical(ConstantThenLinearWarmup):
    """The warm-up of :class:`ConstantThenLinearWarmup`, then :class:`Cyclical`."""

    policy: ClassVar[str] = "compositeCyclical"
    cyclical_max_lr: float = 0.05
    cyclical_step_size: int = 1_000_000
    cyclical_decay: float = 1.0


@dataclass(frozen=True)
class WarmupThenCosine(ConstantThenLinearWarmup):
    """The warm-up of :class:`ConstantThenLinearWarmup`, then :class:`Cosine`."""

    policy: ClassVar[str] = "compositeCosine"
    cosine_max_lr: float = 0.5
    cosine_min_lr: float = 0.1
    cosine_period: int = 50
    cosine_t_mult: float = 1.0
    cosine_lr_shrink: float = 0.99


@dataclass(frozen=True)
class Segment:
    """A part of a :class:`Composite`: ``scale`` times ``schedule`` for ``num_iter`` iterations."""

    num_iter: int
    schedule: Schedule
    scale: float = 1.0


@dataclass(frozen=True)
class Composite(Schedule):
    """One schedule after the other; the last one never ends. Iterations are not counted anew in each."""

    policy: ClassVar[str] = "composite"
    segments: Sequence[Segment]

    def arguments(self) -> dict[str, Any]:
        """Arguments of the LearningRate operator: those of segment ``i`` begin with ``sub_policy_i_``."""
        result: dict[str, Any] = {
            "policy": self.policy,
            "sub_policy_num_iters": [segment.num_iter for segment in self.segments],
        }
        for i, segment in enumerate(self.segments):
            values = segment.schedule.arguments() | {"lr_scale": float(segment.scale)}
            result |= {f"sub_policy_{i}_{name}": value for name, value in values.items()}
        return result


SCHEDULES: dict[str, type[Schedule]] = {
    kind.policy: kind
    for kind in (
        Fixed,
        Step,
        Exponential,
        Inverse,
        Polynomial,
        Gate,
        LinearWarmup,
        ConstantWarmup,
        PieceWarmup,
        Hill,
        Slope,
        Alternate,
        Cyclical,
        Cosine,
        ConstantThenLinearWarmup,
        WarmupThenCyclical,
        WarmupThenCosine,
        Composite,
    )
}


def schedule(policy: str, **arguments: Any) -> Schedule:
    """The schedule of a policy by its name in nets: ``schedule("step", stepsize=1000, gamma=0.1)``.

    Raises :class:`ArgumentError` for an unknown policy, an argument that it does not have, or a missing one.
    """
    kind = SCHEDULES.get(policy)
    if kind is None:
        near = difflib.get_close_matches(policy, SCHEDULES, n=3, cutoff=0.5)
        near += [name for name in SCHEDULES if name.lower() == policy.lower() and name not in near]
        hint = f"; did you mean {', '.join(near)}?" if near else f", wanted one of {', '.join(SCHEDULES)}"
        raise ArgumentError(f"{policy!r} is no learning-rate policy{hint}")
    try:
        return kind(**arguments)
    except TypeError:
        wanted = ", ".join(field.name for field in fields(kind)) or "none"
        given = ", ".join(arguments) or "none"
        raise ArgumentError(f"policy {policy!r} got the arguments {given}, wanted {wanted}") from None
