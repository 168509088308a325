"""Table rows of convolution; the reference goes through every number by itself, on explicit padding."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, SchemaError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(21)


def normal(*shape: int) -> np.ndarray:
    return np.asarray(rng.normal(0.1, 1.0, shape), np.float32)


def convolve(
    stride: tuple[int, ...],
    head: tuple[int, ...],
    tail: tuple[int, ...],
    dilation: tuple[int, ...] | None = None,
    group: int = 1,
    last: bool = False,
) -> Callable[..., np.ndarray]:
    """Convolution by the definition: a loop over all outputs, with a sum over the window."""

    def reference(x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
        if last:
            x, w = np.moveaxis(x, -1, 1), np.moveaxis(w, -1, 1)
        steps = dilation or (1,) * len(stride)
        kernel = w.shape[2:]
        padded = np.pad(x, [(0, 0), (0, 0), *zip(head, tail, strict=True)])
        sizes = [
            (n - d * (k - 1) - 1) // s + 1
            for n, k, s, d in zip(padded.shape[2:], kernel, stride, steps, strict=True)
        ]
        filters, channels = w.shape[:2]
        y = np.zeros((x.shape[0], filters, *sizes))
        for n, m, *o in np.ndindex(*y.shape):
            first = m // (filters // group) * channels
            for c, *k in itertools.product(range(channels), *map(range, kernel)):
                at = tuple(i * s + j * d for i, s, j, d in zip(o, stride, k, steps, strict=True))
                y[(n, m, *o)] += padded[(n, first + c, *at)] * w[(m, c, *k)]
            if b is not None:
                y[(n, m, *o)] += b[m]
        return np.moveaxis(y, 1, -1) if last else y

    return reference


X, W, B = normal(2, 3, 5, 6), normal(4, 3, 3, 2), normal(4)
IMAGE, FILTER = normal(2, 4, 6, 5), normal(4, 2, 3, 3)
LAST, LAST_FILTER = normal(2, 5, 4, 4), normal(6, 3, 2, 4)


def row(inputs: list[np.ndarray], id: str, reference: Any, type: str = "Conv", **args: Any) -> OpCase:
    return OpCase(type, inputs, args, reference=reference, id=id, rtol=1e-4, atol=1e-5)


def cropped(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return convolve((1, 1), (0, 1), (0, 0))(x[:, :, :-1], w)


CASES: list[OpCase] = [
    row([X, W], "negative-padding", cropped, pads=[0, 1, -1, 0]),
    # Spellings of the arguments.
    row([X, W, B], "filter-says-size", convolve((1, 1), (0, 0), (0, 0))),
    row(
        [X, W, B],
        "kernel_h",
        convolve((2, 1), (1, 0), (0, 1)),
        kernel_h=3,
        kernel_w=2,
        stride_h=2,
        stride_w=1,
        pad_t=1,
        pad_l=0,
        pad_b=0,
        pad_r=1,
    ),
    row(
        [X, W], "kernels", convolve((1, 2), (1, 1), (2, 0)), kernels=[3, 2], strides=[1, 2], pads=[1, 1, 2, 0]
    ),
    row([X, normal(2, 3, 3, 3)], "kernel", convolve((2, 2), (1, 1), (1, 1)), kernel=3, stride=2, pad=1),
    row(
        [X, normal(2, 3, 2, 2)],
        "dilation",
        convolve((1, 1), (1, 1), (1, 1), (2, 2)),
        kernel=2,
        pad=1,
        dilation=2,
    ),
    row(
        [X, normal(2, 3, 2, 2)],
        "dilation_h",
        convolve((1, 2), (0, 0), (0, 0), (3, 1)),
        kernel=2,
        strides=[1, 2],
        dilation_h=3,
        dilation_w=1,
    ),
    row([X, normal(5, 3, 5, 6), normal(5)], "global", convolve((1, 1), (0, 0), (0, 0)), global_pooling=1),
    row([X, normal(2, 3, 3, 3)], "same", convolve((2, 2), (1, 0), (1, 1)), kernel=3, stride=2, legacy_pad=2),
    row([X, normal(2, 3, 3, 3)], "valid", convolve((2, 2), (0, 0), (0, 0)), kernel=3, stride=2, legacy_pad=1),
    row([X, normal(2, 3, 2, 2)], "caffe", convolve((2, 2), (0, 0), (2, 0)), kernel=2, stride=2, legacy_pad=3),
    # Sizes.
    row(
        [normal(3, 4, 3, 2), normal(5, 4, 1, 1), normal(5)],
        "pointwise",
        convolve((1, 1), (0, 0), (0, 0)),
        kernel=1,
    ),
    row(
        [normal(3, 4, 5, 4), normal(5, 4, 1, 1)],
        "pointwise-steps",
        convolve((2, 3), (0, 0), (0, 0)),
        strides=[2, 3],
    ),
    row(
        [normal(2, 2, 3, 4), normal(3, 2, 1, 1)],
        "pointwise-padded",
        convolve((1, 1), (1, 2), (1, 2)),
        pads=[1, 2, 1, 2],
    ),
    row([normal(1, 1, 1, 1), normal(1, 1, 3, 3)], "mostly-padding", convolve((1, 1), (3, 3), (3, 3)), pad=3),
    row(
        [normal(5, 2, 4, 3), normal(3, 2, 3, 3), normal(3)],
        "odd-batch",
        convolve((1, 1), (1, 1), (1, 1)),
        pad=1,
    ),
    # Groups.
    row(
        [IMAGE, FILTER, normal(4)],
        "groups",
        convolve((1, 2), (1, 1), (1, 1), group=2),
        kernel=3,
        strides=[1, 2],
        pad=1,
        group=2,
    ),
    row(
        [IMAGE, normal(8, 1, 3, 3), normal(8)],
        "depthwise",
        convolve((1, 1), (1, 1), (1, 1), group=4),
        kernel=3,
        pad=1,
        group=4,
    ),
    # Channels last.
    row(
        [LAST, normal(3, 2, 3, 4), normal(3)],
        "last",
        convolve((1, 2), (1, 1), (0, 1), last=True),
        kernels=[2, 3],
        strides=[1, 2],
        pads=[1, 1, 0, 1],
        order="NHWC",
    ),
    row(
        [normal(2, 5, 4, 6), LAST_FILTER[:, :, :, :3], normal(6)],
        "last-groups",
        convolve((1, 1), (1, 1), (1, 1), (2, 1), group=2, last=True),
        kernels=[3, 2],
        dilations=[2, 1],
        pad=1,
        group=2,
        order="NHWC",
    ),
    row(
        [LAST, normal(3, 1, 1, 4)],
        "last-pointwise",
        convolve((1, 1), (0, 0), (0, 0), last=True),
        order="NHWC",
    ),
    # Other numbers of dimensions.
    row(
        [normal(2, 3, 9), normal(4, 3, 3), normal(4)],
        "1d",
        convolve((2,), (1,), (2,)),
        kernels=[3],
        strides=[2],
        pads=[1, 2],
    ),
    row(
        [normal(2, 7, 2), normal(3, 2, 2), normal(3)],
        "1d-last",
        convolve((1,), (1,), (0,), (3,), last=True),
        kernels=[2],
        pads=[1, 0],
        dilations=[3],
        order="NHWC",
    ),
    row(
        [normal(2, 2, 3, 4, 3), normal(3, 2, 2, 3, 2), normal(3)],
        "3d",
        convolve((1, 2, 1), (1, 1, 0), (0, 1, 1)),
        kernels=[2, 3, 2],
        strides=[1, 2, 1],
        pads=[1, 1, 0, 0, 1, 1],
    ),
    row(
        [normal(1, 2, 3, 2, 3, 2), normal(2, 2, 2, 1, 2, 2)],
        "4d",
        convolve((1, 1, 2, 1), (0,) * 4, (0,) * 4),
        strides=[1, 1, 2, 1],
    ),
    row(
        [normal(2, 3, 9), normal(4, 3, 3), normal(4)],
        "bias",
        convolve((1,), (1,), (1,)),
        "Conv1D",
        kernel=3,
        pad=1,
    ),
    row(
        [normal(3, 2, 4), normal(1, 2, 2)],
        "plain",
        convolve((2,), (0,), (0,)),
        "Conv1D",
        kernels=[2],
        strides=[2],
    ),
    row(
        [normal(1, 4, 5), normal(2, 2, 1)],
        "groups",
        convolve((1,), (0,), (0,), group=2),
        "Conv1D",
        kernels=[1],
        group=2,
    ),
    row([X, W, B], "bias", convolve((1, 1), (0, 0), (0, 0)), "Conv2D", kernels=[3, 2]),
    row([IMAGE, FILTER], "groups", convolve((1, 1), (0, 0), (0, 0), group=2), "Conv2D", kernel=3, group=2),
    row(
        [LAST, normal(3, 3, 3, 4)],
        "last",
        convolve((2, 2), (1, 1), (1, 1), last=True),
        "Conv2D",
        kernel=3,
        stride=2,
        pad=1,
        order="NHWC",
    ),
    row(
        [normal(1, 2, 3, 3, 3), normal(2, 2, 2, 2, 2), normal(2)],
        "bias",
        convolve((1,) * 3, (0,) * 3, (0,) * 3),
        "Conv3D",
        kernels=[2, 2, 2],
    ),
    row(
        [normal(2, 1, 3, 2, 4), normal(2, 1, 1, 2, 3)],
        "steps",
        convolve((2, 1, 1), (0, 1, 0), (0, 0, 1)),
        "Conv3D",
        kernels=[1, 2, 3],
        strides=[2, 1, 1],
        pads=[0, 1, 0, 0, 0, 1],
    ),
    row(
        [normal(2, 3, 2, 3, 2), normal(2, 2, 1, 2, 2)],
        "last",
        convolve((1,) * 3, (1, 0, 0), (0,) * 3, last=True),
        "Conv3D",
        kernels=[2, 1, 2],
        pads=[1, 0, 0, 0, 0, 0],
        order="NHWC",
    ),
    # Element types.
    OpCase(
        "Conv",
        [X.astype(np.float16), W.astype(np.float16), B.astype(np.float16)],
        {"pad": 1},
        id="half",
        reference=convolve((1, 1), (1, 1), (1, 1)),
        rtol=2e-3,
        atol=2e-3,
    ),
    OpCase(
        "Conv",
        [LAST.astype(np.float16), normal(3, 2, 2, 4).astype(np.float16)],
        {"order": "NHWC"},
        id="half-last",
        reference=convolve((1, 1), (0, 0), (0, 0), last=True),
        rtol=2e-3,
        atol=2e-3,
    ),
    OpCase(
        "Conv",
        [X.astype(np.float64), W.astype(np.float64), B.astype(np.float64)],
        id="double",
        reference=convolve((1, 1), (0, 0), (0, 0)),
        rtol=1e-12,
        atol=1e-12,
    ),
]

_ERRORS: list[tuple[str, str, list[np.ndarray], dict[str, Any], type[Exception], str]] = [
    (
        "Conv",
        "channels",
        [normal(8, 3, 24, 24), normal(64, 4, 7, 7)],
        {},
        ShapeError,
        "input X (float32 8x3x24x24) has 3 channels, filter W (64x4x7x7) wants 4",
    ),
    ("Conv", "group-channels", [IMAGE, FILTER], {"group": 3}, ShapeError, "wants 6 (2 in each of 3 groups)"),
    (
        "Conv",
        "group-filters",
        [IMAGE, normal(5, 2, 3, 3)],
        {"group": 2},
        ShapeError,
        "wanted a multiple of 2 groups",
    ),
    (
        "Conv",
        "group",
        [IMAGE, FILTER],
        {"group": 0},
        ArgumentError,
        "argument 'group' is 0, wanted at least 1",
    ),
    ("Conv", "rank", [X[0, 0], W], {}, ShapeError, "has 2 dimensions, wanted at least 3"),
    ("Conv", "filter-rank", [X, W[0]], {}, ShapeError, "filter W (3x3x2) has 3 dimensions, wanted 4"),
    (
        "Conv",
        "kernel",
        [X, W],
        {"kernel": 3},
        ShapeError,
        "filter W (4x3x3x2) is 3x2 in space, arguments want kernel 3x3",
    ),
    (
        "Conv",
        "kernels",
        [X, W],
        {"kernels": [3]},
        ArgumentError,
        "argument 'kernels' is [3], wanted 2 numbers",
    ),
    ("Conv", "kernel_h", [X, W], {"kernel_h": 3}, ArgumentError, "wanted 'kernel_h' and 'kernel_w' for two"),
    (
        "Conv",
        "stride",
        [X, W],
        {"stride": 0},
        ArgumentError,
        "argument 'strides' is [0, 0], wanted numbers of at least 1",
    ),
    ("Conv", "pads", [X, W], {"pads": [1, 1]}, ArgumentError, "argument 'pads' is [1, 1], wanted 4 numbers"),
    (
        "Conv",
        "negative-pad",
        [X, W],
        {"pad": -1, "legacy_pad": 3},
        ArgumentError,
        "wanted numbers of at least 0",
    ),
    ("Conv", "pad_t", [X, W], {"pad_t": 1}, ArgumentError, "wanted all four for two, or 'pads'"),
    ("Conv", "two-paddings", [X, W], {"pad": 1, "legacy_pad": 2}, ArgumentError, "beside explicit padding"),
    ("Conv", "same-dilated", [X, W], {"dilation": 2, "legacy_pad": 2}, ArgumentError, "wanted dilation 1"),
    ("Conv", "legacy_pad", [X, W], {"legacy_pad": 4}, ArgumentError, "wanted one of 0, 1, 2, 3"),
    ("Conv", "order", [X, W], {"order": "CHWN"}, ArgumentError, "wanted one of 'NCHW', 'NHWC'"),
    ("Conv", "global-padded", [X, W], {"global_pooling": 1, "pad": 1}, ArgumentError, "wanted no padding"),
    (
        "Conv",
        "too-small",
        [X, normal(4, 3, 7, 2)],
        {},
        ShapeError,
        "input X has 5 positions in a spatial dimension",
    ),
    ("Conv", "bias", [X, W, normal(3)], {}, ShapeError, "input b (float32 3) does not fit, wanted 4"),
    ("Conv", "types", [X, W.astype(np.float64)], {}, DataTypeError, "differs in type"),
    (
        "Conv",
        "whole-numbers",
        [np.ones((1, 1, 2, 2), np.int32), W],
        {},
        DataTypeError,
        "wanted one of bfloat16, float16",
    ),
    ("Conv1D", "rank", [X, W], {}, ShapeError, "has 4 dimensions, wanted 3"),
    ("Conv2D", "rank", [normal(1, 1, 3), normal(1, 1, 3)], {}, ShapeError, "has 3 dimensions, wanted 4"),
    ("Conv3D", "rank", [X, W], {}, ShapeError, "has 4 dimensions, wanted 5"),
    (
        "ConvGradient",
        "shape",
        [X, W, normal(2, 4, 3, 4)],
        {},
        ShapeError,
        "wanted 2x4x3x5 (the shape of the forward output)",
    ),
]
CASES += [OpCase(t, x, args, raises=(error, text), id=id) for t, id, x, args, error, text in _ERRORS]
CASES.append(
    OpCase(
        "ConvGradient",
        [X, W, normal(2, 4, 3, 5)],
        {"no_bias": 1},
        outputs=3,
        id="no_bias",
        raises=(SchemaError, "has 3 outputs with no_bias, wanted 1 or 2"),
    )
)
