"""Rows for Concat, Split, Slice and Tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, KernelError, SchemaError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(13)


def x(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def joined(axis: int) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Row after row along the axis, by lists."""

    def reference(*inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = [row for a in inputs for row in np.moveaxis(a, axis, 0)]
        return np.moveaxis(np.array(rows), 0, axis), np.array([a.shape[axis] for a in inputs])

    return reference


def stacked(axis: int) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    return lambda *inputs: (np.moveaxis(np.array(inputs), 0, axis), np.ones(len(inputs), int))


def concat(arrays: list[np.ndarray], reference: Any, args: dict[str, Any], **more: Any) -> OpCase:
    return OpCase(more.pop("type", "Concat"), arrays, args, outputs=2, reference=reference, **more)


def parts(axis: int, *sizes: int) -> Callable[..., list[np.ndarray]]:
    def reference(array: np.ndarray, *_: Any) -> list[np.ndarray]:
        rows = list(np.moveaxis(array, axis, 0))
        cut = []
        for size in sizes:
            cut.append(
                np.moveaxis(
                    np.array(rows[:size]).reshape(size, *np.moveaxis(array, axis, 0).shape[1:]), 0, axis
                )
            )
            rows = rows[size:]
        return cut

    return reference


def rows_of(axis: int) -> Callable[..., list[np.ndarray]]:
    return lambda array, *_: list(np.moveaxis(array, axis, 0))


def split(
    array: np.ndarray, reference: Any, outputs: int, args: dict[str, Any], *sizes: int, **more: Any
) -> OpCase:
    inputs = [array, i32(*sizes)] if sizes else [array]
    return OpCase(more.pop("type", "Split"), inputs, args, outputs=outputs, reference=reference, **more)


def kept(*chosen: tuple[int, int]) -> Callable[..., np.ndarray]:
    """The elements whose index in each dimension lies in the (first, last + 1) range, one by one."""

    def reference(array: np.ndarray, *_: Any) -> np.ndarray:
        ranges = [range(*pair) for pair in chosen] + [range(n) for n in array.shape[len(chosen) :]]
        y = np.empty([len(r) for r in ranges], array.dtype)
        for place in np.ndindex(*y.shape):
            y[place] = array[tuple(r[p] for r, p in zip(ranges, place, strict=True))]
        return y

    return reference


def repeated(tiles: int, axis: int) -> Callable[..., np.ndarray]:
    def reference(array: np.ndarray, *_: Any) -> np.ndarray:
        y = np.empty([n * tiles if a == axis else n for a, n in enumerate(array.shape)], array.dtype)
        for place in np.ndindex(*y.shape):
            y[place] = array[tuple(p % n for p, n in zip(place, array.shape, strict=True))]
        return y

    return reference


def repeated_all(array: np.ndarray, repeats: np.ndarray) -> np.ndarray:
    for axis, count in enumerate(repeats.ravel()):
        array = repeated(int(count), axis)(array)
    return array


STRINGS = np.array([[b"a", b"bc"], [b"", b"d"]], object)

# Integers and strings have no gradient (`gradient=()`).
CASES = [
    concat([x(2, 3), x(2, 1), x(2, 4)], joined(1), {}, empty=(0, 1, 2)),
    concat([x(2, 3), x(5, 3)], joined(0), {"axis": 0}),
    concat([x(2, 3, 2), x(2, 3, 5)], joined(2), {"axis": -1}, empty=(0, 1)),
    concat([x(2, 2, 2, 3), x(2, 2, 2, 1)], joined(3), {"order": "NHWC"}, empty=(0, 1)),
    concat([x(2, 2, 3), x(2, 3, 3)], joined(1), {"order": "NCHW"}, empty=(0, 1)),
    concat([x(3, 2)], joined(1), {}),
    concat([x(3), x(3)], stacked(1), {"axis": 1, "add_axis": 1}),
    concat([x(2, 3), x(2, 3), x(2, 3)], stacked(2), {"axis": -1, "add_axis": 1}),
    concat([x(2, 3), x(2, 3)], stacked(0), {"axis": 0, "add_axis": 1}),
    concat([i32(1, 2), i32(3)], joined(0), {"axis": 0}, gradient=()),
    concat([STRINGS, STRINGS], joined(0), {"axis": 0}, gradient=()),
    concat([x(2, 3, 2), x(2, 1, 2)], joined(1), {}, type="DepthConcat", empty=(0, 1)),
    concat([x(2, 2, 2, 3), x(2, 2, 2, 1)], joined(3), {"order": "NHWC"}, type="DepthConcat", empty=(0, 1)),
    concat([x(1, 2), x(1, 2)], joined(1), {}, type="DepthConcat"),
    split(x(2, 6), parts(1, 2, 2, 2), 3, {}),
    split(x(5, 3), parts(0, 1, 4), 2, {"axis": 0, "split": [1, 4]}, empty=False),  # Sizes are for five rows.
    split(x(2, 3, 4), parts(2, 3, 0, 1), 3, {"axis": -1, "split": [3, 0, 1]}),
    split(x(2, 2, 2, 4), parts(3, 2, 2), 2, {"order": "NHWC"}),
    split(x(2, 3, 2), rows_of(1), 3, {"axis": 1, "add_axis": 1}),
    split(x(4, 3), parts(0, 3, 1), 2, {"axis": 0}, 3, 1, empty=False),  # Sizes are for four rows.
    split(x(2, 6), parts(1, 1, 5), 2, {}, 1, 5),
    split(x(2, 2, 3), rows_of(2), 3, {"axis": 2, "add_axis": 1}, 1, 1, 1),
    split(x(3, 4), parts(1, 4), 1, {}),
    split(STRINGS, parts(1, 1, 1), 2, {}, gradient=()),
    OpCase("Split", [x(2, 4)], outputs=2, reference=parts(1, 2, 2), grad_outputs=(1,), id="one_gradient"),
    split(x(2, 4, 3), parts(1, 2, 2), 2, {}, type="DepthSplit"),
    split(x(2, 2, 2, 3), parts(3, 1, 2), 2, {"order": "NHWC"}, 1, 2, type="DepthSplit"),
    split(x(1, 3), parts(1, 1, 2), 2, {"split": [1, 2]}, type="DepthSplit"),
    OpCase(
        "Slice", [x(4, 5)], {"starts": [0, 1], "ends": [-1, 3]}, reference=kept((0, 4), (1, 3)), empty=False
    ),
    OpCase("Slice", [x(4, 5)], {"starts": [0, 1], "ends": [-1, -2]}, reference=lambda a: np.array(a[:, 1:4])),
    OpCase("Slice", [x(4, 5, 2)], {"starts": [1], "ends": [3]}, reference=kept((1, 3)), empty=False),
    OpCase("Slice", [x(4)], {"starts": [-3], "ends": [9]}, reference=kept((2, 4)), empty=False),
    OpCase(
        "Slice", [x(3, 4)], {"starts": [0, 2], "ends": [-1, 2]}, reference=lambda a: a[:, :0], gradient=()
    ),
    OpCase(
        "Slice",
        [x(3, 4, 3)],
        {"starts": [1, 0, 1], "ends": [2, 3, -1]},
        reference=kept((1, 2), (0, 3), (1, 3)),
        empty=False,
    ),
    OpCase("Slice", [x(3, 4), i32(0, 1), i32(-1, 3)], reference=lambda a, *_: a[:, 1:3]),
    OpCase("Slice", [x(3, 4), np.array([2]), np.array([-1])], reference=kept((2, 3)), empty=False),
    OpCase(
        "Slice", [STRINGS], {"starts": [0, 1], "ends": [-1, -1]}, reference=lambda a: a[:, 1:], gradient=()
    ),
    OpCase("Tile", [x(2, 3)], {"tiles": 3, "axis": 1}, reference=repeated(3, 1)),
    OpCase("Tile", [x(2, 3)], {"tiles": 2}, reference=repeated(2, 0)),
    OpCase("Tile", [x(2, 3, 2)], {"tiles": 2, "axis": -2}, reference=repeated(2, 1)),
    OpCase("Tile", [x(3)], {"tiles": 1}, reference=repeated(1, 0)),
    OpCase("Tile", [x(3)], {"tiles": 0}, reference=repeated(0, 0), gradient=()),  # dX cannot be told from dY.
    OpCase("Tile", [x(2, 3), i32(2), i32(-1)], reference=repeated(2, 1)),
    OpCase("Tile", [x(2, 3), np.array(3)], {"axis": 1}, reference=repeated(3, 1)),
    OpCase("Tile", [STRINGS], {"tiles": 2}, reference=repeated(2, 0), gradient=()),
    OpCase("NumpyTile", [x(2, 3), np.array([2, 1])], reference=repeated_all),
    OpCase("NumpyTile", [x(2, 1, 3), np.array([1, 3, 2])], reference=repeated_all),
    OpCase("NumpyTile", [STRINGS, i32(0, 2)], reference=repeated_all),
    # What is refused.
    concat(
        [x(2, 3), x(3, 3)],
        None,
        {},
        raises=(ShapeError, "input X[1] ('in1', float32 3x3) does not fit input X[0] ('in0', float32 2x3)"),
    ),
    concat([x(2, 3), x(2)], None, {}, raises=(ShapeError, "does not fit")),
    concat([x(2, 3), i32(1)], None, {}, raises=(DataTypeError, "wanted one type")),
    concat([x(2, 3), x(2, 4)], None, {"axis": 1, "add_axis": 1}, raises=(ShapeError, "wanted equal sizes")),
    concat([x(2, 3)], None, {"axis": 2}, raises=(ArgumentError, "argument 'axis' is 2")),
    concat([x(2, 3)], None, {"axis": 1, "order": "NCHW"}, raises=(ArgumentError, "wanted only one")),
    concat([x(2, 3)], None, {"order": "NWHC"}, raises=(ArgumentError, "wanted one of 'NCHW', 'NHWC'")),
    concat([x(3)], None, {}, raises=(ArgumentError, "argument 'order' is 1")),
    OpCase("Concat", [x(2, 3)], raises=(SchemaError, "has 1 output, wanted 2")),
    split(x(2, 5), None, 2, {}, raises=(ShapeError, "cannot be split equally in 2")),
    split(x(2, 5), None, 2, {"split": [2, 2]}, raises=(ShapeError, "add up to 5")),
    split(x(2, 5), None, 2, {}, 6, -1, raises=(ShapeError, "none negative")),
    split(x(2, 4), None, 2, {"add_axis": 1, "split": [2, 2]}, raises=(ShapeError, "wanted only 1 to drop")),
    OpCase("Slice", [x(3, 4)], {"starts": [2], "ends": [1]}, raises=(ShapeError, "range 2:1 makes no sense")),
    OpCase("Slice", [x(3, 4)], {"starts": [2], "ends": [1, 2]}, raises=(ShapeError, "wanted equally many")),
    OpCase("Slice", [x(3), i32(-9), i32(2)], raises=(ShapeError, "range -9:2 makes no sense")),
    OpCase("Slice", [x(3), i32(1)], raises=(SchemaError, "has 2 inputs, wanted 1 or 3")),
    OpCase("Tile", [x(3)], {"tiles": -1}, raises=(ArgumentError, "tiles is -1")),
    OpCase("Tile", [x()], {"tiles": 2}, raises=(ArgumentError, "argument 'axis' is 0")),
    OpCase("Tile", [x(3), i32(1, 2)], raises=(KernelError, "input tiles has 2 elements")),
    OpCase("TileGradient", [x(5)], {"tiles": 2}, raises=(ShapeError, "no multiple of tiles 2")),
    OpCase(
        "SliceGradient",
        [x(5), x(3)],
        {"starts": [1], "ends": [3]},
        raises=(KernelError, "the shape of the slice"),
    ),
    OpCase("NumpyTile", [x(2, 3), i32(1)], raises=(ShapeError, "wanted one a dimension")),
    OpCase("NumpyTile", [x(2), i32(-1)], raises=(KernelError, "wanted no negative number")),
]
