"""Training with large batches: the optimizers LARS and LAMB, learning rates for a batch size, and warm-up.

Both scale the step of each weight by the ratio of two norms. Biases, and the scales of normalisation, which
have no weight decay (``Parameter.decay``), get none of that in LARS, and no weight decay in LAMB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from gpunet.errors import ArgumentError
from gpunet.gradient_maker import GradientSlice
from gpunet.optimizers import ITERATION, SGD, Optimizer, Parts, Update
from gpunet.schedules import Composite, Fixed, LinearWarmup, Schedule, Segment

if TYPE_CHECKING:
    from gpunet.model import Model

_RULES: Final = ("linear", "sqrt")


@dataclass
class LARS(SGD):
    """SGD whose rate for each weight is ``trust |w| / (|grad| + weight_decay |w| + offset |w|)`` times the
    learning rate (https://arxiv.org/abs/1708.03888).

    Weight decay is added after the norm of the gradient is taken, and after clipping.

    Attributes:
        trust: the factor of the ratio.
        offset: added to the ratio of the norms.
        lowest, highest: bounds of the factor.
    """

    _: KW_ONLY
    momentum: float = 0.9
    trust: float = 0.001
    offset: float = 0.0
    lowest: float = 0.0
    highest: float = 10.0

    _not_negative: ClassVar[tuple[str, ...]] = ("offset", "lowest")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.trust > 0 or not self.highest > self.lowest:
            raise ArgumentError(
                f"LARS: trust is {self.trust!r}, lowest {self.lowest!r} and highest {self.highest!r}, wanted "
                "a trust of more than 0, and lowest below highest"
            )

    def _sparse_supported(self) -> bool:
        return False

    def _add_weight_decay(self, model: Model, updates: Sequence[Update]) -> None:
        """Later, in the update: the norm of the gradient does not include it."""

    def _update(self, model: Model, name: str, gradient: str, rate: str) -> None:
        decayed = next(p.decay for p in model.params if p.name == name)
        if decayed and self._parts is not None:
            self._scale_part(model, self._parts, name, gradient)
        elif decayed:
            factor = f"{name}_lars"
            numbers = {"wd": self.weight_decay, "trust": self.trust, "lr_max": self.highest}
            blobs = [model.add_blob(f"lars_{n}", (1,), value=float(v)) for n, v in numbers.items()]
            model.net.add(
                "Lars",
                [name, gradient, *blobs],
                [factor],
                offset=float(self.offset),
                lr_min=float(self.lowest),
            )
            rate = model.net.add("Mul", [rate, factor], [f"{factor}_rate"])
            self._decay(model, name, gradient)
        super()._update(model, name, gradient, rate)

    def _scale_part(self, model: Model, parts: Parts, name: str, gradient: str) -> None:
        """The factors, in the gradient of a part of several weights."""
        starts, squares = parts.squares(name, [name, gradient])
        self._decay(model, name, gradient)
        model.net.add(
            "ScaleByNorms",
            [gradient, starts, squares],
            [gradient],
            trust=float(self.trust),
            offset=float(self.weight_decay + self.offset),
            lowest=float(self.lowest),
            highest=float(self.highest),
        )

    def _decay(self, model: Model, name: str, gradient: str) -> None:
        if self.weight_decay:
            one = model.add_blob("lars_one", (1,), value=1.0)
            decay = model.add_blob("lars_wd", (1,), value=float(self.weight_decay))
            model.net.add("WeightedSum", [gradient, one, name, decay], [gradient])

    def _update_sparse(self, model: Model, name: str, gradient: GradientSlice, rate: str) -> None:
        Optimizer._update_sparse(self, model, name, gradient, rate)


@dataclass
class LAMB(Optimizer):
    """Adam's direction with weight decay, scaled to the norm of the parameter
    (https://arxiv.org/abs/1904.00962).
    """

    learning_rate: float = 0.001
    _: KW_ONLY
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6

    _not_negative: ClassVar[tuple[str, ...]] = ("epsilon",)
    _below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2")

    def _add_weight_decay(self, model: Model, updates: Sequence[Update]) -> None:
        """Part of the direction, and not of the gradient."""

    def _update(self, model: Model, name: str, gradient: str, rate: str) -> None:
        decay = self.weight_decay if next(p.decay for p in model.params if p.name == name) else 0.0
        state = [model.add_state(f"{name}_{which}_moment", like=name) for which in ("first", "second")]
        arguments = {"beta1": float(self.beta1), "beta2": float(self.beta2), "epsilon": float(self.epsilon)}
        arguments["weight_decay"] = float(decay)
        if self._parts is None:
            model.net.add("Lamb", [name, *state, gradient, rate, ITERATION], [name, *state], **arguments)
            return
        direction = gradient
        model.net.add("LambDirection", [name, *state, gradient, ITERATION], [direction, *state], **arguments)
        starts, squares = self._parts.squares(name, [name, direction])
        model.net.add("ScaleByNorms", [direction, starts, squares], [direction])
        one = model.add_blob("lamb_one", (1,), value=1.0)
        model.net.add("WeightedSum", [name, one, direction, rate], [name])


def scaled_rate(rate: float, batch_size: int, base_batch_size: int = 256, rule: str = "linear") -> float:
    """The learning rate for another batch size than ``rate`` was found for.

    ``linear`` is the rule for SGD (https://arxiv.org/abs/1706.02677), ``sqrt`` the one for Adam and LAMB.
    ``batch_size`` is that of all ranks together.

    Raises:
        ArgumentError: a number that is not positive, or another rule.
    """
    if not rate > 0 or batch_size < 1 or base_batch_size < 1:
        raise ArgumentError(
            f"rate is {rate!r}, batch_size {batch_size!r} and base_batch_size {base_batch_size!r}, "
            "wanted more than 0"
        )
    if rule not in _RULES:
        raise ArgumentError(f"rule is {rule!r}, wanted {' or '.join(_RULES)}")
    factor = batch_size / base_batch_size
    return rate * (factor if rule == "linear" else math.sqrt(factor))


def warm_up(steps: int, then: Schedule | None = None, start: float = 0.0) -> Schedule:
    """A ramp from ``start`` times the rate to the rate over ``steps`` iterations, and ``then`` a schedule.

    ``then`` sees iterations counted from the beginning of training.

    Raises:
        ArgumentError: a negative number, or ``start`` above 1.
    """
    if steps < 0 or not 0 <= start <= 1:
        raise ArgumentError(f"steps is {steps!r} and start {start!r}, wanted 0 or more, and 0 to 1")
    ramp = LinearWarmup(start_multiplier=start, num_iter=steps)
    if then is None or isinstance(then, Fixed):
        return ramp
    # Segments end at iterations, and the last one never does.
    return Composite([Segment(steps, ramp), Segment(1, then)])
