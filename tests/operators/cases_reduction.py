"""Rows for the reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, KernelError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(15)
LOWEST, HIGHEST = (float(f(np.finfo(np.float32))) for f in (lambda i: i.min, lambda i: i.max))


def x(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def distinct(*shape: int) -> np.ndarray:
    """Numbers that differ by more than the step of a numeric gradient."""
    return rng.permutation(np.prod(shape, dtype=int)).reshape(shape).astype(np.float32)


def i32(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


RULES: dict[str, Callable[[list[float]], float]] = {
    "Sum": sum,
    "Mean": lambda values: sum(values) / len(values) if values else 0.0,
    "Max": lambda values: max(values, default=LOWEST),
    "Min": lambda values: min(values, default=HIGHEST),
    "L1": lambda values: sum(map(abs, values)),
    "L2": lambda values: sum(v * v for v in values) ** 0.5,
}


def reduced(
    rule: str, axes: tuple[int, ...] | None = None, *, keep: bool = True
) -> Callable[..., np.ndarray]:
    """Collects the elements of each place of the output in a Python list."""

    def reference(array: np.ndarray) -> np.ndarray:
        chosen = {a % array.ndim for a in (range(array.ndim) if axes is None else axes)}
        y = np.empty([1 if a in chosen else n for a, n in enumerate(array.shape)], array.dtype)
        for place in np.ndindex(*y.shape):
            part = array[tuple(slice(None) if a in chosen else p for a, p in enumerate(place))]
            y[place] = RULES[rule](part.ravel().tolist())
        return y if keep else y.reshape([n for a, n in enumerate(array.shape) if a not in chosen])

    return reference


def front(rule: str, count: int = 1) -> Callable[..., np.ndarray]:
    """Column by column, of which the first `lengths` elements count."""

    def reference(array: np.ndarray, lengths: np.ndarray | None = None) -> np.ndarray:
        kept = array.shape[count:]
        columns = array.reshape(int(np.prod(array.shape[:count])), int(np.prod(kept))).T.tolist()
        ends = [None] * len(columns) if lengths is None else lengths.ravel().tolist()
        values = [RULES[rule](c[:end]) if c else 0.0 for c, end in zip(columns, ends, strict=True)]
        return np.array(values, array.dtype).reshape(kept)

    return reference


def back(rule: str, count: int = 1) -> Callable[..., np.ndarray]:
    def reference(array: np.ndarray, *lengths: np.ndarray) -> np.ndarray:
        kept, gone = array.shape[: array.ndim - count], array.shape[array.ndim - count :]
        rows = array.reshape(int(np.prod(kept)), int(np.prod(gone))).T
        return front(rule)(rows, *lengths).reshape(kept)

    return reference


INTEGERS = i32([3, -1, 4], [1, -5, 9])

CASES = [
    OpCase("ReduceSum", [x(2, 3, 4)], reference=reduced("Sum")),
    OpCase("ReduceSum", [x(2, 3, 4)], {"axes": [1]}, reference=reduced("Sum", (1,))),
    OpCase(
        "ReduceSum",
        [x(2, 3, 4, 2)],
        {"axes": [0, -1], "keepdims": 0},
        reference=reduced("Sum", (0, 3), keep=False),
    ),
    OpCase("ReduceSum", [x(2, 3)], {"axes": [1, 0], "keepdims": 0}, reference=reduced("Sum", keep=False)),
    OpCase("ReduceSum", [x()], {"keepdims": 0}, reference=lambda a: a),
    OpCase(
        "ReduceSum", [INTEGERS], {"axes": [0]}, reference=reduced("Sum", (0,)), gradient=()
    ),  # Integers have none.
    OpCase("ReduceSum", [np.full((4096,), 1, np.float16)], reference=lambda a: a[:1] * a.size, id="wide_sum"),
    OpCase("ReduceMean", [x(2, 3, 4)], reference=reduced("Mean")),
    OpCase(
        "ReduceMean",
        [x(2, 3, 4)],
        {"axes": [0, 2], "keepdims": 0},
        reference=reduced("Mean", (0, 2), keep=False),
    ),
    OpCase("ReduceMean", [x(5)], {"axes": [0], "keepdims": 0}, reference=reduced("Mean", keep=False)),
    OpCase(
        "ReduceMean", [np.full((4097,), 1, np.float16)], reference=lambda a: a[:1], empty=False, id="wide_sum"
    ),
    *(
        row
        for rule in ("Max", "Min")
        for row in (
            OpCase(f"Reduce{rule}", [distinct(2, 3, 4)], reference=reduced(rule)),
            OpCase(f"Reduce{rule}", [distinct(2, 3, 4)], {"axes": [1]}, reference=reduced(rule, (1,))),
            OpCase(
                f"Reduce{rule}",
                [distinct(2, 3, 4)],
                {"axes": [-1, 0], "keepdims": 0},
                reference=reduced(rule, (0, 2), keep=False),
            ),
            OpCase(f"Reduce{rule}", [INTEGERS], {"axes": [1]}, reference=reduced(rule, (1,)), gradient=()),
        )
    ),
    *(
        row
        for rule in ("L1", "L2")
        for row in (
            OpCase(f"Reduce{rule}", [x(2, 3, 4)], reference=reduced(rule)),
            OpCase(f"Reduce{rule}", [x(2, 3, 4)], {"axes": [1]}, reference=reduced(rule, (1,))),
            OpCase(
                f"Reduce{rule}",
                [x(2, 3, 4)],
                {"axes": [2, 0], "keepdims": 0},
                reference=reduced(rule, (0, 2), keep=False),
            ),
            OpCase(
                f"Reduce{rule}", [x(3, 5).astype(np.float16)], {"axes": [1]}, reference=reduced(rule, (1,))
            ),
        )
    ),
    *(
        row
        for side, rules in (("Front", front), ("Back", back))
        for rule, make in (("Sum", x), ("Mean", x), ("Max", distinct))
        for row in (
            OpCase(f"Reduce{side}{rule}", [make(3, 4)], reference=rules(rule)),
            OpCase(f"Reduce{side}{rule}", [make(2, 3, 4)], {"num_reduce_dim": 2}, reference=rules(rule, 2)),
            OpCase(f"Reduce{side}{rule}", [make(2, 3)], {"num_reduce_dim": 2}, reference=rules(rule, 2)),
            OpCase(f"Reduce{side}{rule}", [make(2, 3)], {"num_reduce_dim": 0}, reference=rules("Sum", 0)),
            OpCase(
                f"Reduce{side}{rule}",
                [make(3, 3), i32(1, 3, 2)],
                reference=rules(rule),
                empty=False,  # The lengths are for three elements.
                id="lengths",
            ),
            OpCase(f"Reduce{side}{rule}", [make(3, 2).astype(np.float16)], reference=rules(rule), id="half"),
        )
    ),
    OpCase("ReduceFrontSum", [x(3, 2), i32(0, 2)], reference=front("Sum"), empty=False, id="length_0"),
    OpCase("ReduceBackMean", [x(2, 3), i32(0, 2)], reference=back("Mean"), empty=False, id="length_0"),
    # Where several elements are the largest, each gets the gradient, as in Caffe2.
    OpCase(
        "ReduceMaxGradient",
        [np.float32([[2], [3]]), np.float32([[1, 5, 5], [0, np.inf, 1]]), np.float32([[5], [np.inf]])],
        {"axes": [1]},
        reference=lambda *_: np.array([[0, 2, 2], [0, 3, 0]]),
        empty=False,
    ),
    OpCase(
        "ReduceL2Gradient",
        [np.float32([2, 3]), np.float32([[0, 0], [3, 4]]), np.float32([0, 5])],
        {"axes": [1], "keepdims": 0},
        reference=lambda *_: np.array([[0, 0], [1.8, 2.4]]),
        empty=False,
        id="zero_norm",
    ),
    *(
        OpCase(
            f"Reduce{side}{rule}Gradient",
            [np.float32([6, 12]), np.array(shape)],
            reference=lambda *_, s=side, r=rule: (
                np.array([[6, 12]] * 3 if s == "Front" else [[6] * 3, [12] * 3]) / (3 if r == "Mean" else 1)
            ),
            empty=False,
            id="shape_input",
        )
        for side, shape in (("Front", [3, 2]), ("Back", [2, 3]))
        for rule in ("Sum", "Mean")
    ),
    # What is refused.
    OpCase("ReduceSum", [x(2, 3)], {"axes": [2]}, raises=(ArgumentError, "argument 'axes' is 2")),
    OpCase("ReduceMean", [INTEGERS], raises=(DataTypeError, "wanted one of bfloat16, float16, float32")),
    OpCase("ReduceSumGradient", [x(2), x(2, 3), x(2)], {"axes": [1]}, raises=(ShapeError, "the shape of Y")),
    OpCase(
        "ReduceFrontSum", [x(2, 3)], {"num_reduce_dim": 3}, raises=(ArgumentError, "'num_reduce_dim' is 3")
    ),
    OpCase("ReduceFrontSum", [x(2, 3), i32(1, 1)], raises=(ShapeError, "one length for each of 3")),
    OpCase("ReduceBackMax", [x(2, 3), i32(1, 4)], raises=(KernelError, "holds 4 at 1, wanted 0 to 3")),
    OpCase("ReduceFrontSumGradient", [x(2), x(2, 3)], raises=(ShapeError, "the shape of Y")),
    OpCase(
        "ReduceFrontSumGradient",
        [x(2), np.array([2, 3])],
        raises=(ShapeError, "gradient of 2 does not fit 2x3"),
    ),
    OpCase("ReduceBackMeanGradient", [x(2), i32(2, 3)], raises=(DataTypeError, "cannot be a shape")),
    OpCase("ReduceFrontMaxGradient", [x(3), x(2, 3), x(2)], raises=(ShapeError, "the shape of Y")),
]
