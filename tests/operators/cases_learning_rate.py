"""Table rows of the iteration counters and learning-rate schedules."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(71)


def at(iteration: int) -> list[np.ndarray]:
    return [np.array([iteration], np.int64)]


def rate(iteration: int, expected: float, policy: str, base_lr: float = 0.5, **args: Any) -> OpCase:
    """A row whose expected rate is worked out by hand."""
    return OpCase(
        "LearningRate",
        at(iteration),
        {"policy": policy, "base_lr": base_lr, **args},
        reference=lambda i: np.float64(expected),
        empty=False,  # the iteration is one number
        id=f"{policy}-{iteration}",
    )


WARMUP = {"start_warmup_multiplier": 0.25, "constant_warmup_num_iter": 4, "linear_warmup_num_iter": 6}
COMPOSITE = {
    "sub_policy_num_iters": [3, 5],
    "sub_policy_0_policy": "fixed",
    "sub_policy_0_lr_scale": 0.5,
    "sub_policy_1_policy": "exp",
    "sub_policy_1_gamma": 0.5,
}


def refused(error: type[Exception], text: str, iteration: np.ndarray | None = None, **args: Any) -> OpCase:
    inputs = at(1) if iteration is None else [iteration]
    return OpCase("LearningRate", inputs, {"base_lr": 0.1, **args}, raises=(error, text), id=text[:40])


def is_free_lock(outputs: list[Any], inputs: list[Any]) -> None:
    (lock,) = outputs
    assert lock.acquire(blocking=False)
    lock.release()


def adapted(
    lr: np.ndarray, grad: np.ndarray, effective: np.ndarray, alpha: float, normalized: bool
) -> np.ndarray:
    product = sum(g * e for g, e in zip(grad.ravel(), effective.ravel(), strict=True))
    if not normalized:
        return lr - alpha * product
    return lr * (
        1
        - alpha
        * product
        / max(np.linalg.norm(grad.ravel()), 1e-12)
        / max(np.linalg.norm(effective.ravel()), 1e-12)
    )


def adaption(shape: tuple[int, ...], alpha: float, normalized: bool) -> OpCase:
    return OpCase(
        "LearningRateAdaption",
        [np.array([0.3], np.float32), *rng.standard_normal((2, *shape)).astype(np.float32)],
        {"lr_alpha": alpha, "normalized_lr_adaption": normalized},
        reference=lambda lr, g, e: adapted(lr, g, e, alpha, normalized),
        empty=(1, 2),
        id=f"{shape}-{normalized}",
    )


CASES = [
    rate(7, 0.5, "fixed"),
    rate(8, 0.5 * 0.1**2, "step", stepsize=4, gamma=0.1),
    rate(3, 0.5 * 0.9**3, "exp", gamma=0.9),
    rate(12, 0.5 * (1 + 0.25 * 12) ** -0.5, "inv", gamma=0.25, power=0.5),
    rate(75, 0.5 * 0.25**2, "poly", max_iter=100, power=2.0),
    rate(101, math.nan, "poly", max_iter=100, power=0.5),
    rate(4, 0.5 * 0.2, "gate", num_iter=5, multiplier_1=0.2, multiplier_2=3.0),
    rate(5, 0.5 * 3, "gate", num_iter=5, multiplier_1=0.2, multiplier_2=3.0),
    rate(5, 0.5 * 0.6, "linearWarmup", num_iter=10, start_multiplier=0.2),
    rate(10, 0.5, "linearWarmup", num_iter=10, start_multiplier=0.2),
    rate(9, 0.5 * 0.3, "constantWarmup", num_iter=10, multiplier=0.3),
    rate(4, 0.5 * 0.4, "pieceWarmup", m1=0.2, n1=4, m2=0.4, n2=8, m3=0.7),
    rate(8, 0.5 * 0.7, "pieceWarmup", m1=0.2, n1=4, m2=0.4, n2=8, m3=0.7),
    rate(
        110, 0.5 * 0.5, "hill", num_iter=10, start_multiplier=0.0, gamma=0.03, power=0.5, end_multiplier=0.1
    ),
    rate(
        10**6, 0.5 * 0.1, "hill", num_iter=10, start_multiplier=0.0, gamma=0.03, power=0.5, end_multiplier=0.1
    ),
    rate(15, 0.5 * 0.75, "slope", num_iter_1=10, multiplier_1=1.0, num_iter_2=20, multiplier_2=0.5),
    rate(6, 0.0, "alter", active_period=5, inactive_period=3, active_first=True),
    rate(2, 0.0, "alter", active_period=5, inactive_period=3, active_first=False),
    rate(4, 2.0, "cyclical", max_lr=2.0, stepsize=4),
    rate(12, 0.5 + 1.5 * 0.5, "cyclical", max_lr=2.0, stepsize=4, decay=0.5),
    rate(25, 0.5 * (0.1 + 0.5) / 2 * 0.9**2, "cosine", max_lr=0.5, min_lr=0.1, period=10, lr_shrink=0.9),
    rate(20, 0.5 * (0.1 + 0.5) / 2, "cosine", max_lr=0.5, min_lr=0.1, period=10, t_mult=2.0, lr_shrink=1.0),
    rate(7, 0.5 * 0.625, "constantThenLinearWarmup", **WARMUP),
    rate(12, 0.5 + 1.5 * 0.5, "compositeCyclical", cyclical_max_lr=2.0, cyclical_step_size=4, **WARMUP),
    rate(15, 0.5 * 0.3, "compositeCosine", cosine_period=10, cosine_lr_shrink=1.0, **WARMUP),
    rate(3, 0.5 * 0.5, "composite", **COMPOSITE),
    rate(4, 0.5 * 0.5**4, "composite", **COMPOSITE),
    rate(100, 0.5 * 0.5**100, "composite", **COMPOSITE),
    refused(ArgumentError, "did you mean step", policy="stepp"),
    refused(ArgumentError, "wanted one of fixed, step", policy="zigzag"),
    refused(ArgumentError, "argument 'policy' is missing"),
    refused(ArgumentError, "argument 'gamma' is missing", policy="exp"),
    refused(
        ArgumentError,
        "argument 'stepsize' of policy 'step' is 0, wanted more than 0",
        policy="step",
        stepsize=0,
        gamma=0.5,
    ),
    refused(ArgumentError, "wanted more than 'num_iter_1' (9)", policy="slope", num_iter_1=9, num_iter_2=9),
    refused(ArgumentError, "add up to 0", policy="alter", active_period=0, inactive_period=0),
    refused(ArgumentError, "divides by it", policy="cyclical", base_lr=0.0, stepsize=3),
    refused(
        ArgumentError, "'sub_policy_num_iters' is [3, 0]", policy="composite", sub_policy_num_iters=[3, 0]
    ),
    refused(ArgumentError, "'sub_policy_0_policy' is missing", policy="composite", sub_policy_num_iters=[3]),
    refused(
        ArgumentError,
        "not composite itself",
        policy="composite",
        sub_policy_num_iters=[3],
        sub_policy_0_policy="composite",
    ),
    refused(
        ArgumentError,
        "'sub_policy_1_gamma' of policy 'exp' is -1",
        policy="composite",
        **{**COMPOSITE, "sub_policy_1_gamma": -1.0},
    ),
    refused(DataTypeError, "wanted one of int64", np.array([1], np.float32), policy="fixed"),
    refused(ShapeError, "has 2 elements, wanted 1", np.array([1, 2]), policy="fixed"),
    OpCase("Iter", [], reference=lambda: np.array([1])),
    OpCase("Iter", at(0), reference=lambda i: i + 1, empty=False),  # the iteration is one number
    OpCase("Iter", [np.array(2**40)], reference=lambda i: np.array(2**40 + 1)),
    OpCase("Iter", [np.array([1.0], np.float32)], raises=(DataTypeError, "wanted one of int64")),
    OpCase("AtomicIter", [threading.Lock(), np.array([0])], reference=lambda m, i: np.array([1])),
    OpCase("AtomicIter", [threading.Lock(), np.array(41)], reference=lambda m, i: np.array(42)),
    OpCase("AtomicIter", [threading.Lock(), np.array([[6]])], reference=lambda m, i: np.array([[7]])),
    OpCase("AtomicIter", [threading.Lock(), np.array([1, 2])], raises=(ShapeError, "wanted 1")),
    OpCase("CreateMutex", [], check=is_free_lock, id="free"),
    adaption((5,), 0.01, True),
    adaption((3, 1, 2), 0.5, True),
    adaption((4, 7), 0.2, False),
    OpCase(
        "LearningRateAdaption",
        [np.ones(1, np.float32), np.ones(3, np.float32), np.ones(2, np.float32)],
        raises=(ShapeError, "wanted 3"),
    ),
]
