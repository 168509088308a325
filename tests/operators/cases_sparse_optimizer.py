"""Table rows of the updates of single rows.

The references update one row after another with the rule for one element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gpunet.errors import DataTypeError, KernelError, SchemaError, ShapeError
from tests.op_check import OpCase
from tests.operators.cases_optimizer import (
    adadelta,
    adagrad,
    adam,
    ftrl,
    momentum,
    normal,
    one,
    positive,
    wngrad,
)

#: Shapes of the parameter, with rows to update: one of them several times, none, in two dimensions.
PLACES = [
    ((6,), np.array([4, 0, 5])),
    ((5, 3), np.array([1, 1, 4, 1], np.int32)),
    ((4, 2, 3), np.array([[3, 0], [0, 2]])),
    ((3, 2), np.array([], np.int64)),
]


def by_row(
    update: Callable[..., tuple[float, ...]], states: int, step_output: bool = False
) -> Callable[..., list[np.ndarray]]:
    """A reference for (param, states..., indices, grad, numbers...).

    Outputs are the updated ones, then the last value of the rule.
    """

    def reference(param: np.ndarray, *rest: np.ndarray) -> list[np.ndarray]:
        kept, indices, grad, numbers = rest[:states], rest[states], rest[states + 1], rest[states + 2 :]
        tensors = [param.copy(), *(x.copy() for x in kept)]
        flat = [x.reshape(len(param), -1) for x in tensors]
        blocks = grad.reshape(indices.size, flat[0].shape[1])
        steps = np.zeros(blocks.shape)
        for position, row in enumerate(indices.ravel()):
            for column in range(flat[0].shape[1]):
                old = [float(x[row, column]) for x in flat]
                new = update(*old, float(blocks[position, column]), *(float(x.item()) for x in numbers))
                for x, value in zip(flat, new[: len(flat)], strict=True):
                    x[row, column] = value
                steps[position, column] = new[-1]
        return [*tensors, *([steps.reshape(grad.shape)] if step_output else [])]

    return reference


def radam(beta1: float, beta2: float, epsilon: float) -> Callable[..., tuple[float, ...]]:
    """Algorithm 2 of https://arxiv.org/abs/1908.03265, with Adam's epsilon and 5 as the shortest average."""
    plain = adam(beta1, beta2, epsilon)

    def update(w: float, m: float, v: float, g: float, lr: float, i: float) -> tuple[float, ...]:
        _, m, v, step = plain(w, m, v, g, lr, i)
        t, longest = i + 1, 2 / (1 - beta2) - 1
        length = longest - 2 * t * beta2**t / (1 - beta2**t)
        if length >= 5:
            step *= math.sqrt(
                (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
            )
        else:
            step = m / (1 - beta1**t)
        return w + lr * step, m, v, step

    return update


def momentum_update(mu: float, nesterov: bool) -> Callable[..., list[np.ndarray]]:
    """Inputs in the order of SparseMomentumSGDUpdate."""
    rule = momentum(mu, nesterov)

    def update(w: float, m: float, g: float, lr: float) -> tuple[float, ...]:
        step, m, w = rule(g, m, lr, w)
        return w, m, step

    rows = by_row(update, 1, step_output=True)

    def reference(
        g: np.ndarray, m: np.ndarray, lr: np.ndarray, w: np.ndarray, indices: np.ndarray
    ) -> list[np.ndarray]:
        new_w, new_m, steps = rows(w, m, indices, g, lr)
        return [steps, new_m, new_w]

    return reference


def rowwise(rule: Callable[..., Any]) -> Callable[..., list[np.ndarray]]:
    """A reference for (param, states..., last state with one number a row, indices, grad, numbers...)."""

    def reference(*inputs: np.ndarray) -> list[np.ndarray]:
        at = next(i for i, x in enumerate(inputs) if x.dtype.kind == "i")
        tensors = [x.copy() for x in inputs[:at]]
        indices, grad, numbers = inputs[at], inputs[at + 1], [x.item() for x in inputs[at + 2 :]]
        blocks = grad.reshape(indices.size, *tensors[0].shape[1:])
        steps = np.zeros(blocks.shape)
        for position, row in enumerate(indices.ravel()):
            *new, steps[position] = rule(*(x[row] for x in tensors), blocks[position], *numbers)
            for x, value in zip(tensors, new, strict=True):
                x[row] = value
        return [*tensors, steps.reshape(grad.shape)]

    return reference


def rowwise_adagrad(epsilon: float, decay: float) -> Callable[..., Any]:
    def rule(w: np.ndarray, h: float, g: np.ndarray, lr: float) -> tuple[Any, ...]:
        g = g + decay * w
        h += np.mean(g**2)
        return w + lr * g / (math.sqrt(h) + epsilon), h, g

    return rule


def rowwise_adam(beta1: float, beta2: float, epsilon: float) -> Callable[..., Any]:
    def rule(w: np.ndarray, m: np.ndarray, v: float, g: np.ndarray, lr: float, i: int) -> tuple[Any, ...]:
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * np.mean(g**2)
        step = m * math.sqrt(1 - beta2 ** (i + 1)) / (1 - beta1 ** (i + 1)) / (math.sqrt(v) + epsilon)
        return w + lr * step, m, v, step

    return rule


def sparse_wngrad(epsilon: float) -> Callable[..., list[np.ndarray]]:
    dense = wngrad(epsilon)

    def reference(
        w: np.ndarray, b: np.ndarray, i: np.ndarray, g: np.ndarray, lr: np.ndarray
    ) -> list[np.ndarray]:
        new = w.copy()
        for row, block in zip(i.ravel(), g.reshape(i.size, *w.shape[1:]), strict=True):
            new[row] = dense(new[row], b, block, lr)[0]
        return [new, b + (g**2).sum() / b]

    return reference


def sparse_storm(mu: float, beta: float) -> Callable[..., list[np.ndarray]]:
    def reference(w, m, total, g, i, lr):  # type: ignore[no-untyped-def]
        w, m, total = w.copy(), m.copy(), total + (g**2).sum()
        rate = lr.item() * (beta + total.item()) ** (-1 / 3)
        for row, block in zip(i.ravel(), g.reshape(i.size, *w.shape[1:]), strict=True):
            m[row] = block + (1 - mu * rate**2) * (m[row] - block)
            w[row] += rate * m[row]
        return [w, m, total]

    return reference


def sparse_ftrl(w: np.ndarray, nz: np.ndarray, i: np.ndarray, g: np.ndarray) -> list[np.ndarray]:
    w, nz = w.copy(), nz.copy()
    for row, block in zip(i.ravel(), g.reshape(i.size, *w.shape[1:]), strict=True):
        w[row], nz[row] = ftrl(np.asarray(w[row]), nz[row], np.asarray(block), 0.1, 0.5, 0.4, 0.05)
    return [w, nz]


def scatter(x: np.ndarray, weight: np.ndarray, i: np.ndarray, *pairs: np.ndarray) -> np.ndarray:
    x = x.copy()
    for row in i.ravel():
        x[row] *= weight.item()
    for blocks, factor in zip(pairs[::2], pairs[1::2], strict=True):
        for row, block in zip(i.ravel(), blocks.reshape(i.size, *x.shape[1:]), strict=True):
            x[row] += factor.item() * block
    return x


CASES: list[OpCase] = []
for number, (shape, rows) in enumerate(PLACES):
    grad_shape = (*rows.shape, *shape[1:])
    down, nesterov, decay = one(-0.2, 1), bool(number % 2), 0.1 * (number % 2)

    def case(
        type: str,
        inputs: list[Any],
        outputs: int,
        reference: Callable[..., Any],
        args: dict[str, Any] | None = None,
        number: int = number,
    ) -> OpCase:
        # Without rows to update there is nothing to empty, and with them the rows must exist.
        return OpCase(
            type, inputs, args or {}, outputs=outputs, reference=reference, empty=False, id=str(number)
        )

    CASES += [
        case(
            "SparseMomentumSGDUpdate",
            [normal(*grad_shape), normal(*shape), -down, normal(*shape), rows],
            3,
            momentum_update(0.6, nesterov),
            {"momentum": 0.6, "nesterov": nesterov},
        ),
        case(
            "SparseAdagrad",
            [normal(*shape), positive(*shape), rows, normal(*grad_shape), down],
            2,
            by_row(adagrad(0.01, 1.0, decay), 1),
            {"epsilon": 0.01, "weight_decay": decay},
        ),
        case(
            "RowWiseSparseAdagrad",
            [normal(*shape), positive(shape[0]), rows, normal(*grad_shape), down],
            2,
            lambda *inputs, decay=decay: rowwise(rowwise_adagrad(0.01, decay))(*inputs)[:2],
            {"epsilon": 0.01, "weight_decay": decay},
        ),
        case(
            "SparseAdadelta",
            [normal(*shape), positive(*shape), positive(*shape), rows, normal(*grad_shape), down],
            3,
            by_row(adadelta(0.02, 0.6), 2),
            {"epsilon": 0.02, "decay": 0.6},
        ),
        case(
            "RowWiseSparseAdam",
            [
                normal(*shape),
                normal(*shape),
                positive(shape[0]),
                rows,
                normal(*grad_shape),
                down,
                np.array([3]),
            ],
            4,
            rowwise(rowwise_adam(0.8, 0.95, 0.01)),
            {"beta1": 0.8, "beta2": 0.95, "epsilon": 0.01},
        ),
        case(
            "SparseStorm",
            [normal(*shape), normal(*shape), one(2.0, 1), normal(*grad_shape), rows, down],
            3,
            sparse_storm(5.0, 0.2),
            {"momentum": 5.0, "beta": 0.2},
        ),
        case(
            "SparseWngrad",
            [normal(*shape), one(3.0, 1), rows, normal(*grad_shape), down],
            2,
            sparse_wngrad(0.1),
            {"epsilon": 0.1},
        ),
        case(
            "SparseFtrl",
            [normal(*shape), positive(*shape, 2), rows, normal(*grad_shape)],
            2,
            sparse_ftrl,
            {"alpha": 0.1, "beta": 0.5, "lambda1": 0.4, "lambda2": 0.05},
        ),
        case(
            "ScatterWeightedSum",
            [
                normal(*shape),
                one(0.5 + 0.5 * (number % 2), 1),
                rows,
                normal(*grad_shape),
                one(-0.3),
                normal(*grad_shape),
                one(2.0, 1),
            ],
            1,
            scatter,
        ),
    ]
    for rectified, iteration in ((False, 2), (True, 0), (True, 20)):
        rule = (radam if rectified else adam)(0.8, 0.95, 0.01)
        CASES.append(
            case(
                "SparseAdam",
                [
                    normal(*shape),
                    normal(*shape),
                    positive(*shape),
                    rows,
                    normal(*grad_shape),
                    down,
                    np.array([iteration]),
                ],
                4,
                by_row(rule, 2, step_output=True),
                {"beta1": 0.8, "beta2": 0.95, "epsilon": 0.01, "enableRAdam": rectified},
            )
        )

W, G, LR = normal(3, 2), normal(2, 2), one(0.1, 1)
CASES += [
    OpCase(
        "SparseAdagrad",
        [W, W, np.array([0, 3]), G, LR],
        outputs=2,
        raises=(KernelError, "index 3 at position 1 of input indices is out of range, wanted 0 to 2"),
    ),
    OpCase(
        "ScatterWeightedSum",
        [W, LR, np.array([-1, 0]), G, LR],
        raises=(KernelError, "index -1 at position 0"),
    ),
    OpCase("ScatterWeightedSum", [W, LR, np.array([0, 1]), G], raises=(SchemaError, "has 4 inputs")),
    OpCase(
        "ScatterWeightedSum",
        [W, LR, np.array([0, 1, 2]), G, LR],
        raises=(ShapeError, "for each of 3 indices"),
    ),
    OpCase(
        "SparseAdam",
        [W, W, normal(2, 2), np.array([0, 1]), G, LR, np.array([1])],
        outputs=3,
        raises=(ShapeError, "the shape of param"),
    ),
    OpCase(
        "SparseAdadelta",
        [W, W, W, one(1, 2), G, LR],
        outputs=3,
        raises=(DataTypeError, "wanted one of int32, int64"),
    ),
    OpCase(
        "SparseMomentumSGDUpdate",
        [one(1.0, 2), one(1.0), LR, one(1.0), np.array([0, 1])],
        outputs=3,
        raises=(ShapeError, "has no rows"),
    ),
    OpCase(
        "RowWiseSparseAdagrad",
        [W, W, np.array([0, 1]), G, LR],
        outputs=2,
        raises=(ShapeError, "one for each row"),
    ),
    OpCase(
        "RowWiseSparseAdam",
        [W, W, W, np.array([0, 1]), G, LR, np.array([1])],
        outputs=3,
        raises=(ShapeError, "one for each row"),
    ),
    OpCase("SparseStorm", [W, W, W, G, np.array([0, 1]), LR], outputs=3, raises=(ShapeError, "wanted 1")),
    OpCase("SparseWngrad", [W, W, np.array([0, 1]), G, LR], outputs=2, raises=(ShapeError, "wanted 1")),
    OpCase(
        "SparseFtrl",
        [W, W, np.array([0, 1]), G],
        outputs=2,
        raises=(ShapeError, "two numbers for each element"),
    ),
]
