"""Cases of the matrix products."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, SchemaError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(11)


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums of products, one element at a time."""
    out = np.zeros((a.shape[0], b.shape[1]))
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            out[i, j] = sum(a[i, k] * b[k, j] for k in range(a.shape[1]))
    return out


def flat(x: np.ndarray, axis: int) -> np.ndarray:
    return x.reshape(int(np.prod(x.shape[:axis])), int(np.prod(x.shape[axis:])))


def fc(axis: int = 1, axis_w: int = 1, transposed: bool = False) -> Any:
    def reference(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
        weights = flat(w, axis_w) if transposed else flat(w, axis_w).T
        return (product(flat(x, axis), weights) + b).reshape(*x.shape[:axis], len(b))

    return reference


def matmul(axis_a: int = 1, axis_b: int = 1, trans_a: bool = False, trans_b: bool = False) -> Any:
    def reference(a: np.ndarray, b: np.ndarray, like: np.ndarray | None = None) -> np.ndarray:
        left, right = flat(a, axis_a), flat(b, axis_b)
        result = product(left.T if trans_a else left, right.T if trans_b else right)
        return result if like is None else result.reshape(like.shape)

    return reference


def batch(formula: str) -> Any:
    return lambda a, b: np.einsum(formula, a, b)


FC_CASES = [
    OpCase("FC", [normal(4, 6), normal(3, 6), normal(3)], reference=fc()),
    OpCase("FC", [normal(2, 3, 5), normal(7, 15), normal(7)], {"axis": 1}, reference=fc()),
    OpCase("FC", [normal(2, 3, 5), normal(7, 5), normal(7)], {"axis": -1}, reference=fc(2)),
    OpCase("FC", [normal(3, 2, 2), normal(5, 2, 2), normal(5)], reference=fc()),
    OpCase("FC", [normal(2, 4), normal(2, 3, 4), normal(6)], {"axis_w": 2}, reference=fc(axis_w=2)),
    OpCase(
        "FC", [normal(1, 1), normal(1, 1), normal(1)], {"no_gradient_to_input": 1}, reference=fc(), empty=(0,)
    ),
    OpCase(
        "FC",
        [normal(4, 6, dtype="float16"), normal(3, 6, dtype="float16"), normal(3, dtype="float16")],
        reference=fc(),
    ),
    OpCase(
        "FC",
        [normal(4, 6), normal(3, 5), normal(3)],
        raises=(ShapeError, "has 6 features from axis 1 on, input W (float32 3x5) wants 5"),
    ),
    OpCase(
        "FC",
        [normal(4, 6), normal(3, 6), normal(4)],
        raises=(ShapeError, "input b (float32 4) does not fit, wanted 3"),
    ),
    OpCase(
        "FC",
        [normal(4, 6), normal(3, 6), normal(3, dtype="float64")],
        raises=(DataTypeError, "wanted one type"),
    ),
    OpCase(
        "FC",
        [normal(4, 6), normal(3, 6), normal(3)],
        {"axis": 2},
        raises=(ArgumentError, "argument 'axis' is 2"),
    ),
    OpCase("FC", [normal(4, 6), normal(3, 6)], raises=(SchemaError, "has 2 inputs, wanted 3")),
    OpCase("FC", [np.ones((4, 6), np.int32), normal(3, 6), normal(3)], raises=(DataTypeError, "input X")),
    OpCase("FCTransposed", [normal(4, 6), normal(6, 3), normal(3)], reference=fc(transposed=True)),
    OpCase(
        "FCTransposed",
        [normal(2, 3, 5), normal(5, 7), normal(7)],
        {"axis": 2},
        reference=fc(2, transposed=True),
    ),
    OpCase(
        "FCTransposed", [normal(3, 8), normal(2, 4, 5), normal(5)], {"axis_w": -1}, reference=fc(1, 2, True)
    ),
    OpCase("FCTransposed", [normal(4, 6), normal(3, 6), normal(3)], raises=(ShapeError, "wants 3")),
    OpCase(
        "FCGradient",
        [normal(4, 6), normal(3, 6), normal(4, 2)],
        outputs=3,
        raises=(ShapeError, "has 8 elements, wanted 12"),
    ),
    OpCase(
        "FCTransposedGradient",
        [normal(4, 6), normal(6, 3), normal(4)],
        outputs=2,
        raises=(ShapeError, "wanted 12"),
    ),
]

MATMUL_CASES = [
    OpCase("MatMul", [normal(4, 5), normal(5, 3)], reference=matmul()),
    OpCase(
        "MatMul", [normal(5, 4), normal(5, 3)], {"trans_a": 1}, reference=matmul(trans_a=True), empty=False
    ),  # K would be 0 in A only
    OpCase("MatMul", [normal(4, 5), normal(3, 5)], {"trans_b": 1}, reference=matmul(trans_b=True)),
    OpCase(
        "MatMul",
        [normal(5, 4), normal(3, 5)],
        {"trans_a": 1, "trans_b": 1},
        reference=matmul(1, 1, True, True),
        empty=False,
    ),  # as above
    OpCase("MatMul", [normal(1, 1), normal(1, 1)], reference=matmul(), empty=(0,)),
    OpCase("MatMul", [normal(4, 5, 1), normal(5, 1, 3)], {"axis_a": 1, "axis_b": 2}, reference=matmul(1, 2)),
    # The gradient is defined where the axes are 1.
    OpCase("MatMul", [normal(2, 3, 4), normal(4, 2, 3)], {"axis_a": -1}, reference=matmul(2, 1), gradient=()),
    OpCase(
        "MatMul",
        [normal(2, 3, 4), normal(3, 4, 5), normal(2, 5, 1)],
        {"axis_b": 2},
        reference=matmul(1, 2),
        gradient=(),
        empty=(0, 2),
    ),
    OpCase("MatMul", [normal(4, 5, dtype="float16"), normal(5, 3, dtype="float16")], reference=matmul()),
    OpCase(
        "MatMul",
        [normal(4, 5), normal(4, 3)],
        raises=(ShapeError, "is a matrix with 5 columns, input B (float32 4x3) one with 4 rows"),
    ),
    OpCase(
        "MatMul",
        [normal(4, 5), normal(5, 3), normal(11)],
        raises=(ShapeError, "input shape_like (float32 11) has 11 elements, wanted 12"),
    ),
    OpCase("MatMul", [normal(4, 5), normal(5, 3)], {"axis_b": 3}, raises=(ArgumentError, "'axis_b' is 3")),
    OpCase(
        "MatMul", [normal(4, 5), normal(5, 3, dtype="float64")], raises=(DataTypeError, "wanted one type")
    ),
]

BATCH_CASES = [
    OpCase("BatchMatMul", [normal(4, 5), normal(5, 3)], reference=batch("ij,jk->ik")),
    OpCase("BatchMatMul", [normal(2, 3, 4), normal(2, 4, 5)], reference=batch("nij,njk->nik"), empty=(0, 1)),
    OpCase(
        "BatchMatMul",
        [normal(2, 4, 3), normal(2, 4, 5)],
        {"trans_a": 1},
        reference=batch("nji,njk->nik"),
        empty=(0, 1),
    ),
    OpCase(
        "BatchMatMul",
        [normal(2, 3, 3, 4), normal(2, 3, 5, 4)],
        {"trans_b": 1},
        reference=batch("mnij,mnkj->mnik"),
        empty=(0, 1),
    ),
    OpCase(
        "BatchMatMul",
        [normal(2, 4, 3), normal(2, 5, 4)],
        {"trans_a": 1, "trans_b": 1},
        reference=batch("nji,nkj->nik"),
        empty=(0, 1),
    ),
    OpCase(
        "BatchMatMul",
        [normal(2, 3, 4, dtype="float16"), normal(2, 4, 5, dtype="float16")],
        reference=batch("nij,njk->nik"),
        empty=(0, 1),
    ),
    # There is no gradient with broadcast.
    OpCase(
        "BatchMatMul",
        [normal(3, 4), normal(2, 4, 5)],
        {"broadcast": 1},
        reference=batch("ij,njk->nik"),
        gradient=(),
    ),
    OpCase(
        "BatchMatMul",
        [normal(2, 1, 3, 4), normal(6, 5, 4)],
        {"broadcast": 1, "trans_b": 1},
        reference=batch("mxij,nkj->mnik"),
        gradient=(),
    ),
    OpCase(
        "BatchMatMul",
        [normal(4), normal(2, 4, 5)],
        {"broadcast": 1},
        reference=batch("j,njk->nk"),
        gradient=(),
        empty=(1,),
    ),
    OpCase(
        "BatchMatMul",
        [normal(2, 4, 3), normal(4)],
        {"broadcast": 1, "trans_a": 1},
        reference=batch("nji,j->ni"),
        gradient=(),
    ),
    # Vectors broadcast without being asked to; a gradient would need the shapes.
    OpCase(
        "BatchMatMul", [normal(4), normal(2, 4, 5)], reference=batch("j,njk->nk"), gradient=(), empty=(1,)
    ),
    OpCase(
        "BatchMatMul",
        [normal(4), normal(4)],
        {"broadcast": 1},
        reference=lambda a, b: np.array([(a * b).sum()]),
        gradient=(),
    ),
    OpCase(
        "BatchMatMul",
        [normal(2, 3, 4), normal(2, 3, 5)],
        raises=(ShapeError, "has 4 columns after transposition"),
    ),
    OpCase(
        "BatchMatMul",
        [normal(2, 3, 4), normal(1, 4, 5)],
        raises=(ShapeError, "wanted equal ones or broadcast=1"),
    ),
    OpCase(
        "BatchMatMul",
        [normal(2, 3, 4), normal(3, 4, 5)],
        {"broadcast": 1},
        raises=(ShapeError, "batch dimensions 2 and 3"),
    ),
    OpCase(
        "BatchMatMul", [normal(), normal(4, 5)], raises=(ShapeError, "has 0 dimensions, wanted at least 1")
    ),
]

CASES = FC_CASES + MATMUL_CASES + BATCH_CASES
