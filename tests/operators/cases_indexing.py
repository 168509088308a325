"""Rows for Gather, TopK, ArgMax and the like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, KernelError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(14)


def x(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def distinct(*shape: int) -> np.ndarray:
    """Numbers that differ by more than the step of a numeric gradient."""
    return rng.permutation(np.prod(shape, dtype=int)).reshape(shape).astype(np.float32)


def i64(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


def i32(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def picked(axis: int) -> Callable[..., np.ndarray]:
    """One index after the other, one dimension of the indices after the other."""

    def reference(data: np.ndarray, indices: np.ndarray) -> np.ndarray:
        y = np.empty((*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]), data.dtype)
        before = (slice(None),) * axis
        for place in np.ndindex(*indices.shape):
            y[(*before, *place)] = data[(*before, indices[place])]
        return y

    return reference


def picked_inside(axis: int) -> Callable[..., np.ndarray]:
    """As `picked`, separately for each element of the dimensions before the axis."""

    def reference(data: np.ndarray, indices: np.ndarray) -> np.ndarray:
        y = np.empty((*indices.shape, *data.shape[axis + 1 :]), data.dtype)
        for place in np.ndindex(*indices.shape):
            y[place] = data[(*place[:axis], indices[place])]
        return y

    return reference


def summed(rows: int | None = None) -> Callable[..., np.ndarray]:
    def reference(indices: np.ndarray, values: np.ndarray, like: np.ndarray | None = None) -> np.ndarray:
        count = len(like) if like is not None else rows if rows is not None else max(indices) + 1
        y = np.zeros((count, *values.shape[1:]), values.dtype)
        for index, row in zip(indices, values, strict=True):
            y[index] += row
        return y

    return reference


def largest(k: int, axis: int = -1, *, flat: bool = False) -> Callable[..., list[np.ndarray]]:
    """Sorts pairs of (-value, index) line by line in Python."""

    def reference(array: np.ndarray, *_: Any) -> list[np.ndarray]:
        places = np.moveaxis(np.arange(array.size).reshape(array.shape), axis, -1)
        lines = np.moveaxis(array, axis, -1)
        values = np.zeros((*lines.shape[:-1], k), array.dtype)
        indices, flats = np.full(values.shape, -1), np.full(values.shape, -1)
        for line in np.ndindex(*lines.shape[:-1]):
            for j, (value, i) in enumerate(sorted((-v, i) for i, v in enumerate(lines[line].tolist()))[:k]):
                values[line][j], indices[line][j], flats[line][j] = -value, i, places[line][i]
        values, indices, flats = (np.moveaxis(a, -1, axis) for a in (values, indices, flats))
        return [values, indices, flats.reshape(-1)][: 2 + flat]

    return reference


def first_best(axis: int, sign: int, *, keep: bool = True) -> Callable[[np.ndarray], np.ndarray]:
    def reference(array: np.ndarray) -> np.ndarray:
        lines = np.moveaxis(array, axis, -1)
        y = np.empty(lines.shape[:-1], np.int64)
        for line in np.ndindex(*y.shape):
            y[line] = min(range(lines.shape[-1]), key=lambda i: (-sign * lines[line][i], i))
        return np.expand_dims(y, axis) if keep else y

    return reference


STRINGS = np.array([[b"a", b"bc"], [b"", b"d"]], object)
TIES = i32([3, 1, 3, 2, 3], [0, 0, 0, 0, 0], [-1, 5, 5, -1, 2])

CASES = [
    # Indices into dimension 0 stay while the data is emptied: the output is the empty data then.
    OpCase("Gather", [x(5, 3), i64(4, 0, 4)], reference=picked(0)),
    OpCase("Gather", [x(6), i32([1, 2], [5, 0])], reference=picked(0)),
    OpCase("Gather", [x(5, 3, 2), i64()], reference=picked(0)),
    OpCase("Gather", [x(5, 3), np.array(2)], reference=picked(0)),
    OpCase("Gather", [x(5, 3), i64(-1, -5, 2)], reference=picked(0), gradient=(), id="from_the_end"),
    OpCase("Gather", [x(2, 4, 3), i32(3, 0, 0)], {"axis": 1}, reference=picked(1)),
    OpCase("Gather", [x(2, 3, 4), i64([0, 3], [3, 1])], {"axis": 2}, reference=picked(2)),
    OpCase("Gather", [x(2, 4), i64(-1, 1)], {"axis": 1, "wrap_indices": 1}, reference=picked(1)),
    OpCase("Gather", [x(5, 3), i32(1, 1, 2)], {"dense_gradient": 1}, reference=picked(0)),
    OpCase(
        "Gather",
        [x(2, 4, 3), i32([3, 0, 3], [1, 2, 2])],
        {"axis": 1, "match_outer": 1},
        reference=picked_inside(1),
        empty=(0, 1),
    ),
    OpCase(
        "Gather",
        [x(2, 3, 4), i64([[3, 0], [1, 1], [2, 0]], [[0, 0], [2, 3], [1, 3]])],
        {"axis": 2, "match_outer": 1},
        reference=picked_inside(2),
        empty=(0, 1),
    ),
    OpCase("Gather", [STRINGS, i32(1, 1)], reference=picked(0), gradient=()),  # Strings have none.
    OpCase("Gather", [TIES, i32(2)], reference=picked(0), gradient=()),  # Nor have integers.
    OpCase("BatchGather", [x(3, 4, 2), i32(3, 1, 3)], reference=picked(1)),
    OpCase("BatchGather", [x(2, 5), i64([0, 4], [4, 4])], reference=picked(1)),
    OpCase(
        "BatchGather",
        [x(2, 4, 3), i32([3, 0], [1, 1])],
        {"match_outer": 1},
        reference=picked_inside(1),
        empty=(0, 1),
    ),
    OpCase("BatchGather", [x(2, 4).astype(np.float16), i32(3)], reference=picked(1)),
    # Without `like`, no rows are known when the indices are emptied.
    OpCase("SparseToDense", [i32(3, 0, 3), x(3, 2), x(5, 2)], reference=summed(), empty=(0, 1)),
    OpCase("SparseToDense", [i64(3, 0, 3), x(3, 2)], reference=summed(), empty=(0, 1)),
    OpCase("SparseToDense", [i64(1, 1), x(2)], {"output_first_dim": 4}, reference=summed(4), empty=(0, 1)),
    OpCase("SparseToDense", [i64(1, 1), TIES[:2]], reference=summed(), gradient=(), empty=(0, 1)),
    OpCase("TopK", [distinct(3, 5)], {"k": 2}, outputs=2, reference=largest(2)),
    OpCase("TopK", [distinct(3, 5)], {"k": 5}, outputs=3, reference=largest(5, flat=True)),
    OpCase("TopK", [distinct(2, 4, 3)], {"k": 2, "axis": 1}, outputs=3, reference=largest(2, 1, flat=True)),
    OpCase("TopK", [distinct(4, 2)], {"k": 3, "axis": 0}, outputs=2, reference=largest(3, 0)),
    OpCase("TopK", [distinct(7)], {"k": 1}, outputs=2, reference=largest(1)),
    OpCase("TopK", [distinct(2, 3)], {"k": 5}, outputs=3, reference=largest(5, flat=True), id="too_few"),
    OpCase("TopK", [TIES], {"k": 3}, outputs=3, reference=largest(3, flat=True), gradient=(), id="ties"),
    OpCase("TopK", [TIES], {"k": 1}, outputs=3, reference=largest(1, flat=True), gradient=(), id="ties"),
    OpCase("TopK", [distinct(3, 40)], {"k": 4}, outputs=3, reference=largest(4, flat=True)),
    OpCase(
        "TopK",
        [rng.integers(0, 12, (3, 40)).astype(np.int32)],
        {"k": 4},
        outputs=3,
        reference=largest(4, flat=True),
        gradient=(),
        id="many_ties",
    ),
    OpCase("TopK", [distinct(2, 6), i64(4)], outputs=3, reference=largest(4, flat=True)),
    OpCase(
        "TopK",
        [np.float32([1, np.nan, 3, np.inf, -np.inf])],
        {"k": 5},
        outputs=2,
        reference=lambda a: (np.array([np.nan, np.inf, 3, 1, -np.inf]), np.array([1, 3, 2, 0, 4])),
        gradient=(),
        empty=False,  # The reference is for these values.
    ),
    # A dimension without elements has no largest one: rows along dimension 0 do not run emptied.
    OpCase("ArgMax", [distinct(3, 4)], reference=first_best(-1, 1)),
    OpCase("ArgMax", [distinct(3, 4, 2)], {"axis": 1, "keepdims": 0}, reference=first_best(1, 1, keep=False)),
    OpCase("ArgMax", [TIES], {"axis": 0}, reference=first_best(0, 1), empty=False),
    OpCase("ArgMax", [TIES], {"keepdims": 0}, reference=first_best(-1, 1, keep=False)),
    OpCase("ArgMin", [distinct(3, 4)], reference=first_best(-1, -1)),
    OpCase(
        "ArgMin", [distinct(3, 4, 2)], {"axis": -2, "keepdims": 0}, reference=first_best(1, -1, keep=False)
    ),
    OpCase("ArgMin", [distinct(5)], {"keepdims": 0}, reference=first_best(0, -1, keep=False), empty=False),
    OpCase("ArgMin", [TIES], reference=first_best(-1, -1)),
    # What is refused.
    OpCase(
        "Gather", [x(3, 2), i64([0, 1], [3, 0])], raises=(KernelError, "holds 3 at [1, 0], wanted -3 to 2")
    ),
    OpCase(
        "Gather", [x(3, 2), i64(0, -1)], {"axis": 1}, raises=(KernelError, "holds -1 at [1], wanted 0 to 1")
    ),
    OpCase("Gather", [x(3, 2), x(1)], raises=(DataTypeError, "wanted one of int32, int64")),
    OpCase("Gather", [x(3, 2), i32(0)], {"axis": 2}, raises=(ArgumentError, "argument 'axis' is 2")),
    OpCase("Gather", [x(3, 2), i32(0)], {"axis": 1, "match_outer": 1}, raises=(ShapeError, "(match_outer)")),
    OpCase("BatchGather", [x(3, 2), i32(-1)], raises=(KernelError, "wanted 0 to 1")),
    OpCase("BatchGather", [x(3), i32(0)], raises=(ArgumentError, "argument 'axis' is 1")),
    OpCase(
        "BatchGatherGradient",
        [x(3, 2), i32(0), x(3, 2)],
        raises=(ShapeError, "the shape of the forward output"),
    ),
    OpCase("BatchGatherGradient", [x(3, 2), i32(2), x(3, 1)], raises=(KernelError, "holds 2 at [0]")),
    OpCase(
        "SparseToDense", [i32(3), x(1, 2), x(3, 2)], raises=(KernelError, "holds 3 at [0], wanted 0 to 2")
    ),
    OpCase("SparseToDense", [i32(-1), x(1, 2)], raises=(KernelError, "holds -1 at [0]")),
    OpCase("SparseToDense", [i32(0), x(2, 2)], raises=(ShapeError, "wanted a row an index")),
    OpCase("SparseToDense", [i32(0), x(1, 2), x(3, 3)], raises=(ShapeError, "wanted equal rows")),
    OpCase("TopK", [x(3)], outputs=2, raises=(ArgumentError, "argument 'k' is 0")),
    OpCase("TopK", [x(3), i32(0)], outputs=2, raises=(KernelError, "input k is 0")),
    OpCase("TopK", [x()], {"k": 1}, outputs=2, raises=(ArgumentError, "argument 'axis' is -1")),
    OpCase("TopKGradient", [x(2), i64(0, 3), x(3)], raises=(KernelError, "holds 3 at [1]")),
    OpCase("TopKGradient", [x(2), i64(0), x(3)], raises=(ShapeError, "the shape of dvalues")),
    OpCase("ArgMax", [x(2, 0)], raises=(ShapeError, "is empty along dimension 1")),
    OpCase("ArgMin", [x()], raises=(ArgumentError, "argument 'axis' is -1")),
]
