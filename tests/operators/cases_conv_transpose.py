"""Table rows of the transposed convolution; the reference adds the filter of each element of X by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, SchemaError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(22)


def normal(*shape: int) -> np.ndarray:
    return np.asarray(rng.normal(0.1, 1.0, shape), np.float32)


def spread(
    stride: tuple[int, ...],
    head: tuple[int, ...] = (),
    tail: tuple[int, ...] = (),
    adj: tuple[int, ...] = (),
    group: int = 1,
    last: bool = False,
) -> Callable[..., np.ndarray]:
    """By the definition, on an output that padding is cut from afterwards."""

    def reference(x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
        if last:
            x, w = np.moveaxis(x, -1, 1), np.moveaxis(w, -1, 1)
        zeros = (0,) * len(stride)
        before, after, more = head or zeros, tail or zeros, adj or zeros
        kernel, (channels, made) = w.shape[2:], w.shape[:2]
        sizes = [(n - 1) * s + k + a for n, s, k, a in zip(x.shape[2:], stride, kernel, more, strict=True)]
        y = np.zeros((x.shape[0], made * group, *sizes))
        for n, c, *o in np.ndindex(*x.shape):
            first = c // (channels // group) * made
            at = tuple(slice(i * s, i * s + k) for i, s, k in zip(o, stride, kernel, strict=True))
            y[(n, slice(first, first + made), *at)] += x[(n, c, *o)] * w[c]
        kept = tuple(slice(h, n - t) for h, t, n in zip(before, after, sizes, strict=True))
        y = y[(slice(None), slice(None), *kept)]
        if b is not None:
            y += b.reshape(-1, *(1,) * len(stride))
        return np.moveaxis(y, 1, -1) if last else y

    return reference


X, W, B = normal(2, 4, 5, 6), normal(4, 3, 3, 2), normal(3)
LAST, LAST_FILTER = normal(2, 5, 4, 4), normal(4, 3, 2, 3)


def row(inputs: list[np.ndarray], id: str, reference: Any, **args: Any) -> OpCase:
    return OpCase("ConvTranspose", inputs, args, reference=reference, id=id, rtol=1e-4, atol=1e-5)


CASES: list[OpCase] = [
    row([X, W, B], "filter-says-size", spread((1, 1))),
    row([X, W], "no-bias", spread((2, 2), (1, 1), (1, 1)), kernel_h=3, kernel_w=2, stride=2, pad=1),
    row(
        [X, W, B],
        "sides",
        spread((2, 3), (1, 0), (0, 1), (1, 2)),
        kernels=[3, 2],
        stride_h=2,
        stride_w=3,
        pad_t=1,
        pad_l=0,
        pad_b=0,
        pad_r=1,
        adj_h=1,
        adj_w=2,
    ),
    row(
        [X, normal(4, 3, 3, 3)],
        "adj",
        spread((2, 2), (1, 1), (1, 1), (1, 1)),
        kernel=3,
        stride=2,
        pad=1,
        adj=1,
    ),
    row([X, W, B], "a-whole-step", spread((2, 3), adj=(2, 3)), strides=[2, 3], adjs=[2, 3]),
    row([X, normal(4, 3, 1, 1), B], "pointwise", spread((1, 1)), kernel=1),
    row([X, normal(4, 3, 1, 1), B], "pointwise-adj", spread((1, 1), adj=(1, 0)), kernel=1, adjs=[1, 0]),
    row([X, normal(4, 3, 1, 1)], "gaps", spread((3, 3), (2, 2), (2, 2)), kernel=1, stride=3, pad=2),
    row([X, W], "same-takes-no-padding", spread((2, 2)), stride=2, pad=1, legacy_pad=2),
    row([X, W], "valid", spread((2, 2)), stride=2, legacy_pad=1),
    row(
        [X, normal(4, 2, 3, 3), normal(4)],
        "groups",
        spread((2, 1), (1, 1), (1, 1), group=2),
        strides=[2, 1],
        pad=1,
        group=2,
    ),
    row([X, normal(4, 1, 3, 3), normal(4)], "depthwise", spread((2, 2), group=4), stride=2, group=4),
    row([normal(3, 20, 3, 4), normal(20, 70, 3, 3)], "many-channels", spread((2, 2)), stride=2),
    row([normal(9, 2, 7, 7), normal(2, 3, 5, 5), B], "several-blocks", spread((1, 1), (2, 2), (2, 2)), pad=2),
    row([normal(1, 1, 1, 1), normal(1, 2, 3, 3)], "one-pixel", spread((2, 2)), stride=2),
    # Order of dimensions.
    row(
        [LAST, LAST_FILTER, B],
        "last",
        spread((2, 1), (0, 1), (1, 0), last=True),
        strides=[2, 1],
        pads=[0, 1, 1, 0],
        order="NHWC",
    ),
    row(
        [LAST, normal(4, 3, 3, 2), normal(4)],
        "last-groups",
        spread((2, 2), adj=(1, 0), group=2, last=True),
        stride=2,
        adjs=[1, 0],
        group=2,
        order="NHWC",
    ),
    row([LAST, normal(4, 1, 1, 3)], "last-pointwise", spread((1, 1), last=True), kernel=1, order="NHWC"),
    # Other numbers of dimensions.
    row(
        [normal(2, 3, 7), normal(3, 2, 4), normal(2)],
        "signal",
        spread((3,), (1,), (0,), (2,)),
        kernels=[4],
        strides=[3],
        pads=[1, 0],
        adjs=[2],
    ),
    row(
        [normal(2, 2, 3, 2, 3), normal(2, 2, 2, 3, 1)],
        "volume",
        spread((1, 2, 2), (1, 0, 0), (0, 1, 0), (0, 0, 1)),
        kernels=[2, 3, 1],
        strides=[1, 2, 2],
        pads=[1, 0, 0, 0, 1, 0],
        adjs=[0, 0, 1],
    ),
    # Element types.
    *(
        OpCase(
            "ConvTranspose",
            [a.astype(dtype) for a in (X, W, B)],
            {"stride": 2, "pad": 1},
            id=dtype,
            reference=spread((2, 2), (1, 1), (1, 1)),
            rtol=tolerance,
            atol=tolerance,
        )
        for dtype, tolerance in (("float16", 4e-3), ("float64", 1e-12))
    ),
]

_ERRORS: list[tuple[str, list[np.ndarray], dict[str, Any], type[Exception], str]] = [
    (
        "channels",
        [X, W[:3]],
        {},
        ShapeError,
        "input X (float32 2x4x5x6) has 4 channels, filter W (3x3x3x2) wants 3",
    ),
    ("groups", [X, W], {"group": 3}, ShapeError, "has 4 channels, wanted a multiple of 3 groups"),
    ("group", [X, W], {"group": 0}, ArgumentError, "argument 'group' is 0, wanted at least 1"),
    ("rank", [X[0, 0], W], {}, ShapeError, "has 2 dimensions, wanted at least 3"),
    ("filter-rank", [X, W[0]], {}, ShapeError, "filter W (3x3x2) has 3 dimensions, wanted 4"),
    (
        "kernel",
        [X, W],
        {"kernel": 3},
        ShapeError,
        "filter W (4x3x3x2) is 3x2 in space, arguments want kernel 3x3",
    ),
    (
        "adj",
        [X, W],
        {"stride": 2, "adj": 3},
        ArgumentError,
        "argument 'adjs' is [3, 3], wanted numbers of at most the strides [2, 2]",
    ),
    (
        "negative-adj",
        [X, W],
        {"adj": -1},
        ArgumentError,
        "argument 'adjs' is [-1, -1], wanted numbers of at least 0",
    ),
    (
        "negative-pad",
        [X, W],
        {"pad": -1},
        ArgumentError,
        "argument 'pads' is [-1, -1, -1, -1], wanted numbers of at least 0",
    ),
    (
        "stride",
        [X, W],
        {"stride": 0},
        ArgumentError,
        "argument 'strides' is [0, 0], wanted numbers of at least 1",
    ),
    ("legacy_pad", [X, W], {"legacy_pad": 3}, ArgumentError, "wanted one of 0, 1, 2"),
    (
        "nothing-left",
        [X, W],
        {"pad": 4},
        ShapeError,
        "the output has [-1, -1], wanted at least 1 in each dimension",
    ),
    ("bias", [X, W, normal(4)], {}, ShapeError, "input b (float32 4) does not fit, wanted 3"),
    ("types", [X, W.astype(np.float64)], {}, DataTypeError, "differs in type"),
]
CASES += [
    OpCase("ConvTranspose", x, args, raises=(error, text), id=id) for id, x, args, error, text in _ERRORS
]
CASES += [
    OpCase(
        "ConvTransposeGradient",
        [X, W, normal(2, 3, 7, 8)],
        {},
        id="shape",
        raises=(ShapeError, "wanted 2x3x7x7 (the shape of the forward output)"),
    ),
    OpCase(
        "ConvTransposeGradient",
        [X, W, normal(2, 3, 7, 7)],
        {"no_bias": 1},
        outputs=3,
        id="no_bias",
        raises=(SchemaError, "has 3 outputs with no_bias, wanted 1 or 2"),
    ),
]
