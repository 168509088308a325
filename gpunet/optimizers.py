"""Optimizers: they append the operators that update a model's parameters to its main net.

An optimizer is a description; :meth:`Optimizer.apply` adds, in this order: weight decay into the gradients,
the norm of all gradients, the iteration counter, the learning rate, and one update for each parameter that
has a gradient. Blob names and structure are Caffe2's: ``optimizer_iteration`` and ``iteration_mutex``,
``<parameter>_momentum``, ``<parameter>_first_moment`` and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from gpunet.devices import Device
from gpunet.errors import ArgumentError, GradientError
from gpunet.gradient_maker import GradientSlice
from gpunet.schedules import Fixed, Schedule
from gpunet.schedules import schedule as schedule_of_policy

if TYPE_CHECKING:
    from gpunet.model import Model, Parameter

ITERATION: Final = "optimizer_iteration"
MUTEX: Final = "iteration_mutex"
ONE: Final = "ONE"
#: Prefix of the blobs that measure and limit the norm of the gradients.
_CLIP: Final = "norm_clipped_grad_update"


class Parts(Protocol):
    """What an optimizer asks for sums over whole parameters where those that it updates are parts of them, in
    several processes (:mod:`gpunet.distributed.sharding`).
    """

    def add_others(self, blob: str) -> None:
        """Appends what adds to a sum over this process's elements those of the others, in place."""

    def squares(self, part: str, tensors: Sequence[str]) -> tuple[str, str]:
        """Appends the squared norms of tensors that are laid out like a part.

        Returns two blobs: where each parameter begins in the part, and the squares, over all processes, by
        tensor and parameter.
        """


@dataclass
class Optimizer:
    """What all optimizers have.

    Attributes:
        learning_rate: the rate, more than 0.
        schedule: how the rate changes; a :class:`gpunet.schedules.Schedule` or the name of a policy without
            arguments.
        weight_decay: this much of each parameter marked ``decay`` is added to its gradient.
        clip_norm: upper bound of the Euclidean norm of all gradients together (after weight decay); 0 for
            none. For sparse gradients the norm of their values counts.
    """

    learning_rate: float
    _: KW_ONLY
    schedule: Schedule | str | None = None
    weight_decay: float = 0.0
    clip_norm: float = 0.0

    #: Whether the LearningRate operator gets the rate with a minus, so that the update adds the step.
    _negative_rate: ClassVar[bool] = True
    #: Names of numbers that must be at least 0, and of those that must also be less than 1.
    _not_negative: ClassVar[tuple[str, ...]] = ()
    _below_one: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        self._parts: Parts | None = None
        kind = type(self).__name__
        names = ("learning_rate", "weight_decay", "clip_norm", *self._not_negative, *self._below_one)
        for name in names:
            if not isinstance(getattr(self, name), Real):
                raise ArgumentError(f"{kind}: {name} is {getattr(self, name)!r}, wanted a number")
        if not self.learning_rate > 0:
            raise ArgumentError(f"{kind}: learning_rate is {self.learning_rate!r}, wanted more than 0")
        for name in ("weight_decay", "clip_norm", *self._not_negative):
            if not getattr(self, name) >= 0:
                raise ArgumentError(f"{kind}: {name} is {getattr(self, name)!r}, wanted at least 0")
        for name in self._below_one:
            if not 0 <= getattr(self, name) < 1:
                raise ArgumentError(
                    f"{kind}: {name} is {getattr(self, name)!r}, wanted at least 0 and less than 1"
                )
        if isinstance(self.schedule, str):
            self.schedule = schedule_of_policy(self.schedule)
        elif not isinstance(self.schedule, (Schedule, type(None))):
            raise ArgumentError(
                f"{kind}: schedule is {self.schedule!r}, wanted one of gpunet.schedules or a policy's name"
            )

    def apply(self, model: Model, *, parts: Parts | None = None) -> None:
        """Appends the updates of all parameters that have a gradient; ``parts`` is for those that are parts
        of parameters.

        Raises :class:`GradientError` where there is none (``model.add_gradients`` comes first), where an
        optimizer was applied before, or where a sparse gradient is not supported; :class:`ArgumentError`
        where the schedule's values make no sense. The model is unchanged then.
        """
        self._parts = parts
        updates = self._updates(model)
        rate_arguments = self._rate_arguments()
        _separate(model, updates)
        if self.weight_decay:
            self._add_weight_decay(model, updates)
        ratio = _add_norm_ratio(model, updates, self.clip_norm, parts) if self.clip_norm else None
        _add_iteration(model)
        rate = ""
        if rate_arguments:
            rate = _fresh(model, f"{type(self).__name__}_{{}}_lr")
            model.net.add("LearningRate", [ITERATION], [rate], base_lr=self._base_rate(), **rate_arguments)
        if ratio is not None:
            rate = self._scale(model, updates, rate, ratio)
        for parameter, gradient in updates:
            if isinstance(gradient, GradientSlice):
                self._update_sparse(model, parameter.name, gradient, rate)
            else:
                self._update(model, parameter.name, gradient, rate)

    # What an optimizer defines

    def _update(self, model: Model, name: str, gradient: str, rate: str) -> None:
        """Appends the update of one parameter with a dense gradient."""
        raise GradientError(
            f"{type(self).__name__} has no update for the dense gradient of parameter {name!r}"
        )

    def _update_sparse(self, model: Model, name: str, gradient: GradientSlice, rate: str) -> None:
        """Appends the update of one parameter with a sparse gradient."""
        raise GradientError(self._no_sparse(name))

    def _sparse_supported(self) -> bool:
        """Whether sparse gradients can be handled with these settings."""
        return type(self)._update_sparse is not Optimizer._update_sparse

    def _scale(self, model: Model, updates: Sequence[Update], rate: str, ratio: str) -> str:
        """Applies the clipping ratio; returns the rate for the updates."""
        for _, gradient in updates:
            blob = gradient.values if isinstance(gradient, GradientSlice) else gradient
            model.net.add("Mul", [blob, ratio], [blob], broadcast=1)
        return rate

    # Parts

    def _no_sparse(self, name: str) -> str:
        return (
            f"the gradient of parameter {name!r} is sparse, which {self!r} does not support, "
            "wanted SGD, Adagrad without decay, Adadelta, Adam or Wngrad"
        )

    def _base_rate(self) -> float:
        return float(-self.learning_rate if self._negative_rate else self.learning_rate)

    def _rate_arguments(self) -> dict[str, Any]:
        """Arguments of the LearningRate operator, checked; empty where the optimizer uses none."""
        from gpunet.definitions import make_operator
        from gpunet.operator import Operator

        chosen = self.schedule if isinstance(self.schedule, Schedule) else Fixed()
        arguments = chosen.arguments()
        Operator(make_operator("LearningRate", [ITERATION], ["lr"], base_lr=self._base_rate(), **arguments))
        return arguments

    def _updates(self, model: Model) -> list[Update]:
        if model.net.makes(ITERATION):
            raise GradientError(f"model {model.name!r} has an optimizer already, wanted one call of apply")
        updates = [(p, p.gradient) for p in model.params if p.gradient is not None]
        if not updates:
            raise GradientError(
                f"no parameter of model {model.name!r} has a gradient, wanted model.add_gradients(loss) "
                f"before an optimizer"
            )
        for parameter, gradient in updates:
            if isinstance(gradient, GradientSlice):
                if not self._sparse_supported():
                    raise GradientError(self._no_sparse(parameter.name))
                if self.weight_decay and parameter.decay:
                    raise GradientError(
                        f"the gradient of parameter {parameter.name!r} is sparse, which weight decay does "
                        f"not support, "
                        "wanted weight_decay=0 or the parameter marked with decay=False"
                    )
        return updates

    def _add_weight_decay(self, model: Model, updates: Sequence[Update]) -> None:
        decayed = [(p.name, g) for p, g in updates if p.decay and isinstance(g, str)]
        if not decayed:
            return
        one = _constant(model, ONE, (1,), 1.0)
        factor = _constant(model, "wd", (1,), self.weight_decay)
        for name, gradient in decayed:
            model.net.add("WeightedSum", [gradient, one, name, factor], [gradient])


Update = tuple["Parameter", str | GradientSlice]


@dataclass
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum: ``m' = momentum m + rate grad``, ``param' = param - m'``.

    With Nesterov's momentum ``param' = param - ((1 + momentum) m' - momentum m)``.
    """

    _: KW_ONLY
    momentum: float = 0.0
    nesterov: bool = False

    _below_one: ClassVar[tuple[str, ...]] = ("momentum",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ArgumentError("SGD: nesterov is set but momentum is 0, wanted a momentum of more than 0")

    def _base_rate(self) -> float:
        # MomentumSGDUpdate subtracts its step; WeightedSum adds it.
        return float(self.learning_rate if self.momentum else -self.learning_rate)

    def _scale(self, model: Model, updates: Sequence[Update], rate: str, ratio: str) -> str:
        # The step is proportional to rate times gradient, so one product with the rate serves all parameters.
        scaled: str = model.net.add("Mul", [rate, ratio], [f"{rate}_scaled"], broadcast=1)
        return scaled

    def _update(self, model: Model, name: str, gradient: str, rate: str) -> None:
        if not self.momentum:
            model.net.add("WeightedSum", [name, _constant(model, ONE, (1,), 1.0), gradient, rate], [name])
            return
        moment = model.add_state(f"{name}_momentum", like=name)
        model.net.add(
            "MomentumSGDUpdate",
            [gradient, moment, rate, name],
            [gradient, moment, name],
            momentum=float(self.momentum),
            nesterov=int(self.nesterov),
        )

    def _update_sparse(self, model: Model, name: str, gradient: GradientSlice, rate: str) -> None:
        indices, values = gradient
        if not self.momentum:
            one = _constant(model, ONE, (1,), 1.0)
            model.net.add("ScatterWeightedSum", [name, one, indices, values, rate], [name])
            return
        moment = model.add_state(f"{name}_momentum", like=name)
        model.net.add(
            "SparseMomentumSGDUpdate",
            [values, moment, rate, name, indices],
            [values, moment, name],
            momentum=float(self.momentum),
            nesterov=int(self.nesterov),
        )


@dataclass
class Adagrad(Optimizer):
    """Rates that fall with the sum of squared gradients (https://jmlr.org/papers/v12/duchi11a.html)."""

    learning_rate: float = 0.01
    _: KW_ONLY
    epsilon: float = 1e-4
    decay: float = 1.0

    _not_negative: ClassVar[tuple[str, ...]] = ("epsilon", "decay")

    def _sparse_supported(self) -> bool:
        return self.decay == 1

    def _update(self, model: Model, name: str, gradient: str, rate: str) -> None:
        squares = model.add_state(f"{name}_squared_sum", like=name)
        model.net.add(
            "Adagrad",
            [name, squares, gradient, rate],
            [name, squares],
            epsilon=float(self.epsilon),
            decay=float(self.decay),
        )

    def _update_sparse(self, model: Model, name: str, gradient: GradientSlice, rate: str) -> None:
        squares = model.add_state(f"{name}_squared_sum", like=name)
        model.net.add(
            "SparseAdagrad", [name, squares, *gradient, rate], [name, squares], epsilon=float(self.epsilon)
        )


@dataclass
class Adadelta(Optimizer):
    """Steps in the unit of the parameter, from averages of squares (https://arxiv.org/abs/1212.5701)."""

    learning_rate: float = 1.0
    _: KW_ONLY
    epsilon: float = 1e-4
    decay: float = 0.95

    _not_negative: ClassVar[tuple[str, ...]] = ("epsilon",)
    _below_one: ClassVar[tuple[str, ...]] = ("decay",)

    def _state(self, model: Model, name: str) -> list[str]:
        names = (f"{name}_squared_moment", f"{name}_squared_moment_delta")
        return [model.add_state(blob, like=name) for blob in names]

    def _update(self, model: Model, name: str, gradient: str, rate: str) -> None:
        state = self._state(model, name)
        arguments = {"epsilon": float(self.epsilon), "decay": float(self.decay)}
        model.net.add("Adadelta", [name, *state, gradient, rate], [name, *state], **arguments)

    def _update_sparse(self, model: Model, name: str, gradient: GradientSlice, rate: str) -> None:
        state = self._state(model, name)
        arguments = {"epsilon": float(self.epsilon), "decay": float(self.decay)}
        model.net.add("SparseAdadelta", [name, *state, *gradient, rate], [name, *state], **arguments)


@dataclass
class RmsProp(Optimizer):
    """Gradients over the root of their average square, with momentum (Tieleman and Hinton, 2012)."""

    learning_rate: float = 0.01
    _: KW_ONLY
    decay: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-5

    _not_negative: ClassVar[tuple[str, ...]] = ("epsilon",)
    _below_one: ClassVar[tuple[str, ...]] = ("decay", "momentum")

    def _update(self, model: Model, name: str, gradient: str, rate: str) -> None:
        state = [model.add_state(f"{name}_{what}", like=name) for what in ("mean_squares", "momentum")]
        model.net.add(
            "RmsProp",
            [gradient, *state, rate],
            [gradient, *state],
            decay=float(self.decay),
            momentum=float(self.momentum),
            epsilon=float(self.epsilon),
        )
        model.net.add("Add", [name, gradient], [name])


@dataclass
class Adam(Optimizer):
    """Averages of gradients over the root of averages of their squares (https://arxiv.org/abs/1412.6980)."""

    learning_rate: float = 0.001
    _: KW_ONLY
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    _not_negative: ClassVar[tuple[str, ...]] = ("epsilon",)
    _below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2")

    def _arguments(self) -> dict[str, float]:
        return {"beta1": float(self.beta1), "beta2": float(self.beta2), "epsilon": float(self.epsilon)}

    def _state(self, model: Model, name: str) -> list[str]:
        return [model.add_state(f"{name}_{which}_moment", like=name) for which in ("first", "second")]

    def _update(self, model: Model, name: str, gradient: str, rate: str) -> None:
        state = self._state(model, name)
        model.net.add("Adam", [name, *state, gradient, rate, ITERATION], [name, *state], **self._arguments())

    def _update_sparse(self, model: Model, name: str, gradient: GradientSlice, rate: str) -> None:
        state = self._state(model, name)
        model.net.add(
            "SparseAdam", [name, *state, *gradient, rate, ITERATION], [name, *state], **self._arguments()
        )


@dataclass
class Wngrad(Optimizer):
    """One rate a parameter, which falls with the squared norm of its gradients (https://arxiv.org/abs/1803.02865).

    ``initial_scale`` is what the rate is divided by at first.
    """

    learning_rate: float = 1.0
    _: KW_ONLY
    epsilon: float = 1e-9
    initial_scale: float = 100.0

    _not_negative: ClassVar[tuple[str, ...]] = ("epsilon", "initial_scale")

    def _update(self, model: Model, name: str, gradient: str, rate: str) -> None:
        scale = model.add_state(f"{name}_moment", shape=(1,), value=self.initial_scale)
        model.net.add("Wngrad", [name, scale, gradient, rate], [name, scale], epsilon=float(self.epsilon))

    def _update_sparse(self, model: Model, name: str, gradient: GradientSlice, rate: str) -> None:
        scale = model.add_state(f"{name}_moment", shape=(1,), value=self.initial_scale)
        model.net.add(
            "SparseWngrad", [name, scale, *gradient, rate], [name, scale], epsilon=float(self.epsilon)
        )


@dataclass
class YellowFin(Optimizer):
    """Momentum SGD that tunes rate and momentum of each parameter itself (https://arxiv.org/abs/1706.03471).

    ``learning_rate`` and ``momentum`` are where it starts; it takes no schedule.
    """

    learning_rate: float = 0.1
    _: KW_ONLY
    momentum: float = 0.0
    beta: float = 0.999
    curv_win_width: int = 20
    epsilon: float = 1e-6
    nesterov: bool = False
    zero_debias: bool = True

    _not_negative: ClassVar[tuple[str, ...]] = ("epsilon",)
    _below_one: ClassVar[tuple[str, ...]] = ("momentum", "beta")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule is not None:
            raise ArgumentError(
                f"YellowFin: schedule is {self.schedule!r}, wanted none: it tunes the rate itself"
            )
        if self.curv_win_width < 1:
            raise ArgumentError(f"YellowFin: curv_win_width is {self.curv_win_width!r}, wanted at least 1")

    def _rate_arguments(self) -> dict[str, Any]:
        return {}

    def _update(self, model: Model, name: str, gradient: str, rate: str) -> None:
        state = [
            model.add_state(f"{name}_moment", like=name),
            model.add_state(f"{name}_lr_avg", shape=(1,), value=self.learning_rate),
            model.add_state(f"{name}_mu_avg", shape=(1,), value=self.momentum),
            model.add_state(f"{name}_curv_win", shape=(self.curv_win_width,)),
            model.add_state(f"{name}_g_avg", like=name),
            model.add_state(f"{name}_g2_avg", like=name),
            model.add_state(f"{name}_scalars_memory", shape=(5,)),
        ]
        model.net.add(
            "YellowFin",
            [name, *state, gradient, ITERATION],
            [name, *state],
            beta=float(self.beta),
            epsilon=float(self.epsilon),
            curv_win_width=int(self.curv_win_width),
            nesterov=int(self.nesterov),
            zero_debias=int(self.zero_debias),
        )


def _constant(model: Model, name: str, shape: tuple[int, ...], value: float) -> str:
    """A blob that init_net fills; no training state, so a checkpoint does not bring back an old value."""
    if not model.init_net.makes(name):
        model.init_net.add("ConstantFill", [], [name], shape=list(shape), value=float(value))
    return name


def _fresh(model: Model, pattern: str) -> str:
    number = 0
    while model.net.makes(pattern.format(number)):
        number += 1
    return pattern.format(number)


def _separate(model: Model, updates: list[Update]) -> None:
    """Copies gradients that several parameters share: updates and weight decay write them in place."""
    seen: set[str] = set()
    for i, (parameter, gradient) in enumerate(updates):
        blob = gradient.values if isinstance(gradient, GradientSlice) else gradient
        if blob in seen:
            blob = model.net.add("Copy", [blob], [f"{parameter.name}_own_grad"])
            own = GradientSlice(gradient.indices, blob) if isinstance(gradient, GradientSlice) else blob
            updates[i] = (parameter, own)
        seen.add(blob)


def _add_norm_ratio(model: Model, updates: Sequence[Update], clip_norm: float, parts: Parts | None) -> str:
    """Appends ``clip_norm / max(clip_norm, norm of all gradients)``; returns its blob."""
    net = model.net
    squares = []
    for i, (_, gradient) in enumerate(updates):
        blob = gradient.values if isinstance(gradient, GradientSlice) else gradient
        squares.append(net.add("SumSqrElements", [blob], [f"{_CLIP}/grad_{i}_squared_sum"]))
    net.add("Sum", squares, [f"{_CLIP}/grad_squared_full_sum"])
    if parts is not None:
        parts.add_others(f"{_CLIP}/grad_squared_full_sum")
    net.add("Pow", [f"{_CLIP}/grad_squared_full_sum"], [f"{_CLIP}/global_norm"], exponent=0.5)
    limit = _constant(model, f"{_CLIP}/clip_norm", (), clip_norm)
    net.add("Max", [f"{_CLIP}/global_norm", limit], [f"{_CLIP}/max_norm"])
    ratio: str = net.add("Div", [limit, f"{_CLIP}/max_norm"], [f"{_CLIP}/norm_ratio"])
    return ratio


def _add_iteration(model: Model) -> None:
    """Appends the counter, on the CPU. It runs ahead of what reads it: the first step sees iteration 1."""
    host = Device("cpu").option()
    model.add_state(ITERATION, shape=(1,), value=0, dtype="int64")
    model.init_net.add("CreateMutex", [], [MUTEX], device_option=host)
    model.net.add("AtomicIter", [MUTEX, ITERATION], [ITERATION], device_option=host)
