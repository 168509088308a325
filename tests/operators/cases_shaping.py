"""Rows for the operators that change or tell shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(12)
STRINGS = np.array([[b"a", b"bc"], [b"", b"d"]], object)


def x(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def elements(*shape: int) -> Callable[..., np.ndarray]:
    """The elements in row-major order, in this shape, put there one by one."""

    def reference(array: np.ndarray, *_: Any) -> np.ndarray:
        y = np.empty(shape, array.dtype)
        for place, value in zip(np.ndindex(shape), array.flat, strict=True):
            y[place] = value
        return y

    return reference


def and_old_shape(*shape: int) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    return lambda array, *_: (elements(*shape)(array), np.array(array.shape))


def moved(*axes: int) -> Callable[[np.ndarray], np.ndarray]:
    """Element by element: the output at `p` is the input at `q`, where `q[axes[i]] = p[i]`."""

    def reference(array: np.ndarray) -> np.ndarray:
        y = np.empty([array.shape[a] for a in axes], array.dtype)
        for place in np.ndindex(*y.shape):
            source = [0] * len(axes)
            for a, p in zip(axes, place, strict=True):
                source[a] = p
            y[place] = array[tuple(source)]
        return y

    return reference


def shape_input(*values: int, dtype: str = "int64") -> np.ndarray:
    return np.array(values, dtype)


def reshape(array: np.ndarray, shape: list[int], result: tuple[int, ...], **more: Any) -> OpCase:
    return OpCase("Reshape", [array], {"shape": shape}, outputs=2, reference=and_old_shape(*result), **more)


def reshape_by(array: np.ndarray, shape: np.ndarray, result: tuple[int, ...], **more: Any) -> OpCase:
    return OpCase("Reshape", [array, shape], outputs=2, reference=and_old_shape(*result), **more)


# Integers and strings have no gradient (`gradient=()`).
CASES = [
    # The new shape has no room for an emptied input.
    reshape(x(2, 3, 4), [4, 6], (4, 6), empty=False),
    reshape(x(2, 3, 4), [2, 3, 4], (2, 3, 4), empty=False),
    reshape(x(2, 3, 4), [0, -1, 2], (2, 6, 2)),
    reshape(x(6), [-1, 1, 3], (2, 1, 3)),
    reshape(x(1), [], (), empty=False),
    reshape(x(), [1, -1], (1, 1)),
    reshape(x(0, 3), [0, -1], (0, 0)),
    reshape(x(2, 0, 3), [0], (0,), id="literal_zero", gradient=(), empty=False),  # Nothing to differentiate.
    reshape(np.arange(6, dtype=np.int32), [3, -1], (3, 2), gradient=()),
    reshape(STRINGS, [4], (4,), empty=False, gradient=()),
    reshape_by(x(2, 3, 4), shape_input(-1, 8), (3, 8)),
    reshape_by(x(2, 3, 4), shape_input(0, 2, 6, dtype="int32"), (2, 2, 6)),
    reshape_by(x(5), shape_input(1, 5), (1, 5), empty=False),
    OpCase("Flatten", [x(2, 3, 4)], reference=elements(2, 12)),
    OpCase("Flatten", [x(2, 3, 4, 5)], {"axis": 2}, reference=elements(6, 20)),
    OpCase("Flatten", [x(3, 4)], {"axis": 0}, reference=elements(1, 12)),
    OpCase("Flatten", [x(3, 4)], {"axis": 2}, reference=elements(12, 1)),
    OpCase("Flatten", [STRINGS], reference=elements(2, 2), gradient=()),
    OpCase("FlattenToVec", [x(2, 3, 4)], reference=elements(24)),
    OpCase("FlattenToVec", [x(5)], reference=elements(5)),
    OpCase("FlattenToVec", [x(1, 1, 7).astype(np.float16)], reference=elements(7)),
    OpCase("ResizeLike", [x(2, 6), x(3, 4)], reference=elements(3, 4), empty=(0, 1)),
    OpCase("ResizeLike", [x(8), x(2, 2, 2).astype(np.int32)], reference=elements(2, 2, 2), empty=(0, 1)),
    OpCase(
        "ResizeLike", [np.arange(1, 2), x()], reference=elements(), empty=False
    ),  # A scalar is never empty.
    OpCase("Squeeze", [x(1, 3, 1, 2)], {"dims": [0, 2]}, reference=elements(3, 2), empty=False),
    OpCase("Squeeze", [x(3, 1, 1)], {"dims": [2, 1, 2]}, reference=elements(3)),
    OpCase("Squeeze", [x(4, 1, 2)], {"dims": [1]}, reference=elements(4, 2)),
    OpCase("ExpandDims", [x(3, 2)], {"dims": [0, 2]}, reference=elements(1, 3, 1, 2)),
    OpCase("ExpandDims", [x(5)], {"dims": [1, 1, 2]}, reference=elements(5, 1, 1)),
    OpCase("ExpandDims", [x()], {"dims": [0]}, reference=elements(1)),
    OpCase("PrependDim", [x(6, 2)], {"dim_size": 3}, reference=elements(3, 2, 2)),
    OpCase("PrependDim", [x(4)], {"dim_size": 1}, reference=elements(1, 4)),
    OpCase("PrependDim", [x(4, 3, 2)], {"dim_size": 4}, reference=elements(4, 1, 3, 2)),
    OpCase("MergeDim", [x(3, 2, 2)], reference=elements(6, 2)),
    OpCase("MergeDim", [x(1, 5)], reference=elements(5)),
    OpCase("MergeDim", [np.arange(8).reshape(4, 1, 2)], reference=elements(4, 2)),
    OpCase("Transpose", [x(2, 3, 4)], reference=moved(2, 1, 0)),
    OpCase("Transpose", [x(2, 3, 4, 5)], {"axes": [2, 0, 3, 1]}, reference=moved(2, 0, 3, 1)),
    OpCase("Transpose", [x(3, 3)], {"axes": [0, 1]}, reference=moved(0, 1)),
    OpCase("Transpose", [x(7)], reference=moved(0)),
    OpCase("Transpose", [STRINGS], {"axes": [1, 0]}, reference=moved(1, 0), gradient=()),
    OpCase("Transpose", [np.arange(6).reshape(2, 3)], reference=moved(1, 0), gradient=()),
    OpCase("NCHW2NHWC", [x(2, 3, 4, 5)], reference=moved(0, 2, 3, 1)),
    OpCase("NCHW2NHWC", [x(1, 5, 3)], reference=moved(0, 2, 1)),
    OpCase("NCHW2NHWC", [x(2, 1, 2, 3, 2)], reference=moved(0, 2, 3, 4, 1)),
    OpCase("NHWC2NCHW", [x(2, 3, 4, 5)], reference=moved(0, 3, 1, 2)),
    OpCase("NHWC2NCHW", [x(1, 5, 3)], reference=moved(0, 2, 1)),
    OpCase("NHWC2NCHW", [x(2, 1, 2, 3, 2)], reference=moved(0, 4, 1, 2, 3)),
    OpCase("Shape", [x(2, 3, 4)], reference=lambda a: np.array(a.shape)),
    OpCase("Shape", [x(2, 3, 4)], {"axes": [2, 0, -1]}, reference=lambda a: np.array([4, len(a), 4])),
    OpCase("Shape", [x()], reference=lambda a: np.array([], int)),
    OpCase("Size", [x(2, 3, 4)], reference=lambda a: np.array(len(a) * 12)),
    OpCase("Size", [x()], reference=lambda a: np.array(1)),
    OpCase("Size", [STRINGS], reference=lambda a: np.array(2 * len(a))),
    # What is refused.
    OpCase(
        "Reshape", [x(2, 3)], {"shape": [4, 2]}, outputs=2, raises=(ShapeError, "[4, 2] has no room for 2x3")
    ),
    OpCase("Reshape", [x(2, 3)], {"shape": [-1, -1]}, outputs=2, raises=(ShapeError, "at most one -1")),
    OpCase("Reshape", [x(2, 3)], {"shape": [-1, 4]}, outputs=2, raises=(ShapeError, "wanted 6 elements")),
    OpCase("Reshape", [x(2, 3)], {"shape": [6, 1, 0]}, outputs=2, raises=(ShapeError, "copies a dimension")),
    OpCase("Reshape", [x(2, 3)], outputs=2, raises=(ArgumentError, "has neither of argument 'shape'")),
    OpCase(
        "Reshape",
        [x(6), shape_input(6)],
        {"shape": [6]},
        outputs=2,
        raises=(ArgumentError, "has both of argument 'shape'"),
    ),
    OpCase("Reshape", [x(6), shape_input(4)], outputs=2, raises=(ShapeError, "has no room for 6")),
    OpCase("Reshape", [x(6), x(1)], outputs=2, raises=(DataTypeError, "wanted one of int32, int64")),
    OpCase(
        "Reshape",
        [x(6), shape_input(2, 3).reshape(1, 2)],
        outputs=2,
        raises=(DataTypeError, "cannot be a shape"),
    ),
    OpCase("Flatten", [x(2, 3)], {"axis": 3}, raises=(ArgumentError, "argument 'axis' is 3")),
    OpCase("ResizeLike", [x(2, 3), x(5)], raises=(ShapeError, "differ in size")),
    OpCase("Squeeze", [x(2, 1)], {"dims": [0]}, raises=(ShapeError, "has 2 in dimension 0")),
    OpCase("Squeeze", [x(2, 1)], {"dims": [2]}, raises=(ShapeError, "has no dimension 2")),
    OpCase("Squeeze", [x(2, 1)], {"dims": []}, raises=(ArgumentError, "wanted at least one dimension")),
    OpCase("ExpandDims", [x(2)], {"dims": [2]}, raises=(ShapeError, "too few dimensions")),
    OpCase("ExpandDims", [x(2)], {"dims": [-1]}, raises=(ArgumentError, "none negative")),
    OpCase("PrependDim", [x(5)], {"dim_size": 2}, raises=(ShapeError, "wanted a divisor")),
    OpCase("MergeDim", [x(5)], raises=(ShapeError, "has 1 dimensions")),
    OpCase("Transpose", [x(2, 3)], {"axes": [0, 0]}, raises=(ArgumentError, "wanted a permutation")),
    OpCase("NCHW2NHWC", [x(2, 3)], raises=(ShapeError, "wanted at least 3")),
    OpCase("Shape", [x(2)], {"axes": [1]}, raises=(ArgumentError, "argument 'axes' is 1")),
]
