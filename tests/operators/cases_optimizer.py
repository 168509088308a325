"""Table rows of the dense parameter updates. The references update one element after another."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, KernelError, SchemaError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(72)
SHAPES = [(5,), (3, 1, 4), (2, 3, 2, 2), ()]


def normal(*shape: int) -> np.ndarray:
    return np.asarray(rng.standard_normal(shape), np.float32)


def positive(*shape: int) -> np.ndarray:
    return np.asarray(rng.uniform(0.1, 2.0, shape), np.float32)


def one(value: float, *shape: int) -> np.ndarray:
    return np.full(shape, value, np.float32)


def elementwise(update: Callable[..., tuple[float, ...]]) -> Callable[..., list[np.ndarray]]:
    """A reference from a rule for one element.

    Tensors of the shape of input 0 are taken apart, the others are numbers.
    """

    def reference(*inputs: np.ndarray) -> list[np.ndarray]:
        shape = inputs[0].shape
        columns = [
            x.ravel() if x.shape == shape and x.size != 1 else np.full(math.prod(shape), x.item())
            for x in inputs
        ]
        rows = [update(*map(float, values)) for values in zip(*columns, strict=True)]
        count = len(update(*[1.0] * len(inputs)))
        return [np.array([row[k] for row in rows]).reshape(shape) for k in range(count)]

    return reference


def momentum(mu: float, nesterov: bool) -> Callable[..., tuple[float, ...]]:
    def update(g: float, m: float, lr: float, *param: float) -> tuple[float, ...]:
        new = mu * m + lr * g
        step = (1 + mu) * new - mu * m if nesterov else new
        return (step, new, *(w - step for w in param))

    return update


def adagrad(epsilon: float, decay: float, weight_decay: float) -> Callable[..., tuple[float, ...]]:
    def update(w: float, h: float, g: float, lr: float) -> tuple[float, ...]:
        g += weight_decay * w
        h = decay * h + g * g
        rate = lr / (math.sqrt(h) + epsilon)
        return w + rate * g, h, rate, rate * g

    return update


def adadelta(epsilon: float, decay: float) -> Callable[..., tuple[float, ...]]:
    def update(w: float, h: float, d: float, g: float, lr: float) -> tuple[float, ...]:
        h = decay * h + (1 - decay) * g * g
        step = math.sqrt(d + epsilon) / math.sqrt(h + epsilon) * g
        return w + lr * step, h, decay * d + (1 - decay) * step * step

    return update


def rmsprop(decay: float, mu: float, epsilon: float) -> Callable[..., tuple[float, ...]]:
    def update(g: float, ms: float, mom: float, lr: float) -> tuple[float, ...]:
        ms = decay * ms + (1 - decay) * g * g
        mom = mu * mom + lr * g / math.sqrt(ms + epsilon)
        return mom, ms, mom

    return update


def adam(beta1: float, beta2: float, epsilon: float) -> Callable[..., tuple[float, ...]]:
    def update(w: float, m: float, v: float, g: float, lr: float, i: float) -> tuple[float, ...]:
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        t = i + 1
        # The paper's form: moments without bias, and epsilon scaled to match.
        unbiased_m, unbiased_v = m / (1 - beta1**t), v / (1 - beta2**t)
        step = unbiased_m / (math.sqrt(unbiased_v) + epsilon / math.sqrt(1 - beta2**t))
        return w + lr * step, m, v, step

    return update


def ftrl(
    w: np.ndarray, nz: np.ndarray, g: np.ndarray, alpha: float, beta: float, l1: float, l2: float
) -> list[np.ndarray]:
    new_w, pairs = [], []
    for x, (n, z), d in zip(w.ravel(), nz.reshape(-1, 2), g.ravel(), strict=True):
        z += d - (math.sqrt(n + d * d) - math.sqrt(n)) / alpha * x
        n += d * d
        new_w.append(
            0.0 if abs(z) <= l1 else -(z - math.copysign(l1, z)) / ((beta + math.sqrt(n)) / alpha + l2)
        )
        pairs.append((n, z))
    return [np.array(new_w).reshape(w.shape), np.array(pairs).reshape(nz.shape)]


def wngrad(epsilon: float) -> Callable[..., list[np.ndarray]]:
    def reference(w: np.ndarray, b: np.ndarray, g: np.ndarray, lr: np.ndarray) -> list[np.ndarray]:
        scale = b.item() + epsilon
        step = g * lr.item() / scale
        total = b + sum(x * x for x in g.ravel()) / scale
        return [w + step, total, np.full_like(b, lr.item() / scale), step]

    return reference


def storm(mu: float, beta: float) -> Callable[..., list[np.ndarray]]:
    def reference(
        w: np.ndarray, m: np.ndarray, total: np.ndarray, g: np.ndarray, lr: np.ndarray
    ) -> list[np.ndarray]:
        total = total + sum(x * x for x in g.ravel())
        rate = lr.item() / np.cbrt(beta + total.item())
        alpha = mu * rate**2
        new_m = alpha * g + (1 - alpha) * m
        return [w + rate * new_m, new_m, total]

    return reference


def lars(offset: float, lower: float) -> Callable[..., np.ndarray]:
    def reference(
        x: np.ndarray, dx: np.ndarray, wd: np.ndarray, trust: np.ndarray, upper: np.ndarray
    ) -> np.ndarray:
        norm, slope = np.linalg.norm(x.ravel()), np.linalg.norm(dx.ravel())
        factor = trust.item() * norm / (slope + (wd.item() + offset) * norm) if norm else 1.0
        return np.array([np.clip(factor, lower, upper.item())])

    return reference


def first(count: int, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The first outputs of a reference."""
    return lambda *inputs: reference(*inputs)[:count]


def yellowfin(
    beta: float, width: int, epsilon: float, nesterov: bool, debias: bool
) -> Callable[..., list[Any]]:
    """YellowFin as in the paper; the cubic is solved by bisection."""

    def mean(old: Any, new: Any) -> Any:
        return beta * old + (1 - beta) * new

    def reference(w, m, lr, mu, window, g_avg, g2_avg, memory, g, iteration):  # type: ignore[no-untyped-def]
        t = iteration.item()
        new_m = mu.item() * m + lr.item() * g
        new_w = w - (1 + mu.item()) * new_m + mu.item() * m if nesterov else w - new_m
        factor = 1 / (1 - beta**t) if debias else 1.0
        square = max(epsilon, float((g * g).sum()))
        new_window = window.copy()
        new_window.reshape(-1)[(t - 1) % width] = math.log(square)
        seen = new_window.ravel()[: min(t, width)]
        norm, norm2 = mean(memory[0], math.sqrt(square)), mean(memory[1], square)
        low, high = mean(memory[2], seen.min()), mean(memory[3], seen.max())
        distance = mean(memory[4], norm / norm2)
        new_g_avg = mean(g_avg, g)
        outputs = [
            new_w,
            new_m,
            lr,
            mu,
            new_window,
            new_g_avg,
            mean(g2_avg, g * g),
            np.array([norm, norm2, low, high, distance]),
        ]
        if t > 1:
            least, most = (max(epsilon, math.exp(factor * x)) for x in (low, high))
            variance = max(epsilon, factor * norm2 - factor**2 * float((new_g_avg**2).sum()))
            p = (factor * distance * least) ** 2 / (2 * variance)
            left, right = 0.0, 1.0
            for _ in range(200):
                middle = (left + right) / 2
                left, right = (middle, right) if p * middle < (1 - middle) ** 3 else (left, middle)
            ratio = math.sqrt(most / least)
            tuned = max(left**2, ((ratio - 1) / (ratio + 1)) ** 2)
            outputs[2] = mean(lr, (1 - math.sqrt(tuned)) ** 2 / least)
            outputs[3] = mean(mu, tuned)
        return outputs

    return reference


def yellowfin_case(
    shape: tuple[int, ...], iteration: int, beta: float, width: int, nesterov: bool, debias: bool
) -> OpCase:
    state = [one(0.3, 1), one(0.4, 1), normal(width), normal(*shape), positive(*shape), positive(5)]
    return OpCase(
        "YellowFin",
        [normal(*shape), normal(*shape), *state, normal(*shape), np.array([iteration])],
        {"beta": beta, "curv_win_width": width, "nesterov": nesterov, "zero_debias": debias},
        outputs=8,
        reference=yellowfin(beta, width, 1e-6, nesterov, debias),
        rtol=1e-4,
        id=f"{shape}-{iteration}-{nesterov}-{debias}",
    )


def weight_scale(iteration: int, factor: float, **args: Any) -> OpCase:
    return OpCase(
        "WeightScale",
        [normal(3, 5), np.array([iteration])],
        args,
        reference=lambda w, i: factor * w,
        id=f"{iteration}-{factor}",
    )


CASES: list[OpCase] = []
for number, shape in enumerate(SHAPES):
    mu, lr = 0.3 * number, one(0.05 * (number + 1), *((1,) if number % 2 else ()))
    down = np.negative(lr, out=np.empty_like(lr))
    for nesterov in (False, True):
        args = {"momentum": mu, "nesterov": nesterov}
        rule = elementwise(momentum(mu, nesterov))
        CASES += [
            OpCase("MomentumSGD", [normal(*shape), normal(*shape), lr], args, outputs=2, reference=rule),
            OpCase(
                "MomentumSGDUpdate",
                [normal(*shape), normal(*shape), lr, normal(*shape)],
                args,
                outputs=3,
                reference=rule,
            ),
        ]
    decay, weight_decay = 1 - 0.2 * number, 0.1 * (number % 2)
    CASES.append(
        OpCase(
            "Adagrad",
            [normal(*shape), positive(*shape), normal(*shape), down],
            {"epsilon": 0.01, "decay": decay, "weight_decay": weight_decay},
            outputs=2 + min(number, 2),
            reference=first(2 + min(number, 2), elementwise(adagrad(0.01, decay, weight_decay))),
        )
    )
    CASES.append(
        OpCase(
            "Adadelta",
            [normal(*shape), positive(*shape), positive(*shape), normal(*shape), down],
            {"epsilon": 0.02, "decay": 0.6},
            outputs=3,
            reference=elementwise(adadelta(0.02, 0.6)),
        )
    )
    CASES.append(
        OpCase(
            "RmsProp",
            [normal(*shape), positive(*shape), normal(*shape), down],
            {"decay": 0.7, "momentum": mu, "epsilon": 0.01},
            outputs=3,
            reference=elementwise(rmsprop(0.7, mu, 0.01)),
        )
    )
    CASES.append(
        OpCase(
            "Adam",
            [normal(*shape), normal(*shape), positive(*shape), normal(*shape), down, np.array([number])],
            {"beta1": 0.8, "beta2": 0.95, "epsilon": 0.01},
            outputs=3 + number % 2,
            reference=first(3 + number % 2, elementwise(adam(0.8, 0.95, 0.01))),
        )
    )
    CASES.append(
        OpCase(
            "Wngrad",
            [normal(*shape), one(3.0, 1), normal(*shape), down],
            {"epsilon": 0.1},
            outputs=2 + min(number, 2),
            reference=first(2 + min(number, 2), wngrad(0.1)),
        )
    )
    CASES.append(
        OpCase(
            "Storm",
            [normal(*shape), normal(*shape), one(2.0, 1), normal(*shape), down],
            {"momentum": 5.0, "beta": 0.2},
            outputs=3,
            reference=storm(5.0, 0.2),
        )
    )
    CASES.append(
        OpCase(
            "Ftrl",
            [normal(*shape), positive(*shape, 2), normal(*shape)],
            {"alpha": 0.1, "beta": 0.5, "lambda1": 0.4, "lambda2": 0.05},
            outputs=2,
            reference=lambda w, nz, g: ftrl(w, nz, g, 0.1, 0.5, 0.4, 0.05),
            empty=(0, 1, 2),
        )
    )
    CASES.append(
        OpCase(
            "Lars",
            [normal(*shape), normal(*shape), one(0.1, 1), one(0.7, 1), one(0.5 + number, 1)],
            {"offset": 0.2, "lr_min": 0.1},
            reference=lars(0.2, 0.1),
        )
    )

CASES += [
    OpCase(
        "Ftrl",
        [normal(4), positive(4, 2), normal(4), one(0.05, 1)],
        outputs=2,
        reference=lambda w, nz, g, alpha: ftrl(w, nz, g, alpha.item(), 1.0, 0.001, 0.001),
        empty=(0, 1, 2),
        id="alpha-as-input",
    ),
    OpCase(
        "Lars",
        [one(0.0, 3), normal(3), one(0.1, 1), one(0.7, 1), one(0.5, 1)],
        reference=lambda *_: np.array([0.5]),
        id="zero-parameter",
    ),
    OpCase(
        "Lars",
        [normal(3), one(0.0, 3), one(0.0, 1), one(0.7, 1), one(0.5, 1)],
        {"offset": 0.0},
        reference=lambda *_: np.array([0.5]),
        empty=False,  # without elements the factor is 1 and not infinite
        id="zero-gradient",
    ),
    yellowfin_case((4,), 1, 0.9, 5, False, True),
    yellowfin_case((2, 3), 2, 0.9, 5, False, True),
    yellowfin_case((2, 1, 3), 3, 0.8, 4, True, True),
    yellowfin_case((7,), 11, 0.999, 4, True, False),
    weight_scale(9, 0.5, stepsize=10, upper_bound_iter=20, scale=0.5),
    weight_scale(8, 1.0, stepsize=10, upper_bound_iter=20, scale=0.5),
    weight_scale(19, 1.0, stepsize=10, upper_bound_iter=20, scale=0.5),
    # What is refused
    OpCase(
        "MomentumSGDUpdate",
        [normal(3), normal(3), one(0.1, 1), normal(4)],
        outputs=3,
        raises=(ShapeError, "wanted 3 (the shape of grad)"),
    ),
    OpCase(
        "MomentumSGD",
        [normal(3), normal(3), one(0.1, 2)],
        outputs=2,
        raises=(ShapeError, "has 2 elements, wanted 1"),
    ),
    OpCase(
        "Adagrad",
        [normal(3), normal(3), normal(3).astype(np.float64), one(0.1, 1)],
        outputs=2,
        raises=(DataTypeError, "differs in type"),
    ),
    OpCase(
        "Adagrad",
        [normal(3), normal(3), normal(3), one(0.1, 1)],
        outputs=1,
        raises=(SchemaError, "1 output, wanted 2 to 4"),
    ),
    OpCase(
        "Adadelta",
        [normal(3), normal(3), normal(3), normal(3), one(0.1, 1)],
        {"epsilon": -1.0},
        outputs=3,
        raises=(ArgumentError, "argument 'epsilon' is -1, wanted at least 0"),
    ),
    OpCase(
        "RmsProp", [normal(3), normal(3), normal(2), one(0.1, 1)], outputs=3, raises=(ShapeError, "wanted 3")
    ),
    OpCase(
        "Adam",
        [normal(3), normal(3), normal(3), normal(3), one(0.1, 1), one(1.0, 1)],
        outputs=3,
        raises=(DataTypeError, "wanted one of int64"),
    ),
    OpCase(
        "Wngrad", [normal(3), normal(3), normal(3), one(0.1, 1)], outputs=2, raises=(ShapeError, "wanted 1")
    ),
    OpCase(
        "Storm",
        [normal(3), normal(3), normal(3), normal(3), one(0.1, 1)],
        outputs=3,
        raises=(ShapeError, "wanted 1"),
    ),
    OpCase(
        "Ftrl",
        [normal(3), normal(3), normal(3)],
        outputs=2,
        raises=(ShapeError, "two numbers for each element"),
    ),
    OpCase(
        "Ftrl",
        [normal(3), normal(3, 2), normal(3)],
        {"alpha": 0.0},
        outputs=2,
        raises=(ArgumentError, "wanted more than 0"),
    ),
    OpCase("Lars", [normal(3), normal(2), *[one(0.1, 1)] * 3], raises=(ShapeError, "the shape of X")),
    OpCase(
        "WeightScale",
        [normal(3), np.array([1])],
        {"stepsize": 0},
        raises=(ArgumentError, "wanted more than 0"),
    ),
]

BAD_YELLOWFIN = yellowfin_case((3,), 0, 0.9, 5, False, True)
CASES += [
    OpCase(
        "YellowFin",
        BAD_YELLOWFIN.inputs,
        BAD_YELLOWFIN.args,
        outputs=8,
        raises=(KernelError, "input iter is 0, wanted at least 1"),
    ),
    OpCase(
        "YellowFin",
        BAD_YELLOWFIN.inputs,
        {"curv_win_width": 20},
        outputs=8,
        raises=(ShapeError, "argument 'curv_win_width'"),
    ),
    OpCase(
        "YellowFin",
        BAD_YELLOWFIN.inputs,
        {"beta": 1.0},
        outputs=8,
        raises=(ArgumentError, "wanted at least 0 and less than 1"),
    ),
]
