"""Table rows of pooling. The reference cuts out every window by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(22)


def distinct(*shape: int) -> np.ndarray:
    """Numbers that differ by more than the steps of numeric gradients, so that no maximum changes hands."""
    return (rng.permutation(int(np.prod(shape))).reshape(shape) / 7 - 3).astype(np.float32)


def pool(
    kind: str,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    head: tuple[int, ...],
    output: tuple[int, ...],
    last: bool = False,
    include: bool = False,
) -> Callable[..., np.ndarray]:
    """Pooling by the definition, with the number of windows spelled out."""

    def reference(x: np.ndarray) -> np.ndarray:
        x = np.moveaxis(x, -1, 1) if last else x
        y = np.zeros((*x.shape[:2], *output))
        for n, c, *o in np.ndindex(*y.shape):
            starts = [i * s - h for i, s, h in zip(o, stride, head, strict=True)]
            cut = tuple(slice(max(a, 0), max(a + k, 0)) for a, k in zip(starts, kernel, strict=True))
            window = x[(n, c, *cut)]
            if kind == "Max":
                y[(n, c, *o)] = window.max()
            else:
                y[(n, c, *o)] = window.sum() / (np.prod(kernel) if include else window.size)
        return np.moveaxis(y, 1, -1) if last else y

    return reference


X = distinct(2, 3, 6, 7)
#: (id, input, arguments, kernel, stride, head, output, channels last)
_ROWS: list[
    tuple[
        str,
        np.ndarray,
        dict[str, Any],
        tuple[int, ...],
        tuple[int, ...],
        tuple[int, ...],
        tuple[int, ...],
        bool,
    ]
] = [
    ("apart", X, {"kernel": 2, "stride": 2}, (2, 2), (2, 2), (0, 0), (3, 3), False),
    ("exact", distinct(3, 2, 4, 6), {"kernel": 2, "stride": 2}, (2, 2), (2, 2), (0, 0), (2, 3), False),
    ("overlapping", X, {"kernel": 3, "stride": 2, "pad": 1}, (3, 3), (2, 2), (1, 1), (3, 4), False),
    ("gaps", X, {"kernel": 2, "stride": 3}, (2, 2), (3, 3), (0, 0), (2, 2), False),
    (
        "uneven",
        X,
        {
            "kernel_h": 2,
            "kernel_w": 3,
            "stride_h": 1,
            "stride_w": 2,
            "pad_t": 1,
            "pad_l": 0,
            "pad_b": 0,
            "pad_r": 2,
        },
        (2, 3),
        (1, 2),
        (1, 0),
        (6, 4),
        False,
    ),
    (
        "lists",
        X,
        {"kernels": [3, 2], "strides": [3, 1], "pads": [0, 1, 2, 0]},
        (3, 2),
        (3, 1),
        (0, 1),
        (2, 7),
        False,
    ),
    (
        "wide-padding",
        distinct(1, 2, 2, 3),
        {"kernel": 3, "stride": 3, "pad": 2},
        (3, 3),
        (3, 3),
        (2, 2),
        (2, 2),
        False,
    ),
    ("one", X, {"kernel": 1}, (1, 1), (1, 1), (0, 0), (6, 7), False),
    ("global", X, {"global_pooling": 1}, (6, 7), (1, 1), (0, 0), (1, 1), False),
    ("global-last", X, {"global_pooling": 1, "order": "NHWC"}, (3, 6), (1, 1), (0, 0), (1, 1), True),
    ("whole-image", X, {"kernels": [6, 7]}, (6, 7), (1, 1), (0, 0), (1, 1), False),
    ("row", X, {"kernels": [1, 7]}, (1, 7), (1, 1), (0, 0), (6, 1), False),
    ("valid", X, {"kernel": 3, "stride": 2, "legacy_pad": 1}, (3, 3), (2, 2), (0, 0), (2, 3), False),
    ("same", X, {"kernel": 3, "stride": 2, "legacy_pad": 2}, (3, 3), (2, 2), (0, 1), (3, 4), False),
    ("caffe", X, {"kernel": 3, "stride": 2, "legacy_pad": 3}, (3, 3), (2, 2), (0, 0), (3, 3), False),
    (
        "caffe-padded",
        X,
        {"kernel": 3, "stride": 2, "pad": 1, "legacy_pad": 3},
        (3, 3),
        (2, 2),
        (1, 1),
        (4, 4),
        False,
    ),
    (
        "caffe-dropped",
        distinct(1, 1, 3, 3),
        {"kernel": 2, "stride": 2, "pad": 1, "legacy_pad": 3},
        (2, 2),
        (2, 2),
        (1, 1),
        (2, 2),
        False,
    ),
    (
        "last",
        distinct(2, 5, 4, 3),
        {"kernel": 3, "stride": 2, "pad": 1, "order": "NHWC"},
        (3, 3),
        (2, 2),
        (1, 1),
        (3, 2),
        True,
    ),
    (
        "1d",
        distinct(2, 3, 8),
        {"kernels": [3], "strides": [2], "pads": [1, 0]},
        (3,),
        (2,),
        (1,),
        (4,),
        False,
    ),
    (
        "1d-last",
        distinct(2, 8, 3),
        {"kernels": [4], "strides": [3], "order": "NHWC"},
        (4,),
        (3,),
        (0,),
        (2,),
        True,
    ),
    (
        "3d",
        distinct(1, 2, 4, 3, 5),
        {"kernels": [2, 2, 3], "strides": [2, 1, 2], "pads": [0, 1, 1, 0, 0, 1]},
        (2, 2, 3),
        (2, 1, 2),
        (0, 1, 1),
        (2, 3, 3),
        False,
    ),
    (
        "3d-last",
        distinct(2, 3, 4, 3, 2),
        {"kernels": [2, 2, 2], "order": "NHWC"},
        (2, 2, 2),
        (1, 1, 1),
        (0, 0, 0),
        (2, 3, 2),
        True,
    ),
]

CASES: list[OpCase] = []
for _kind in ("Max", "Average"):
    for _id, _x, _args, _kernel, _stride, _head, _output, _last in _ROWS:
        _references: list[tuple[str, dict[str, Any], bool]] = [("", {}, False)]
        if _kind == "Average" and "pad" in _id:
            _references.append(("-counted", {"count_include_pad": 1}, True))
        for _suffix in {"", f"{_x.ndim - 2}D"}:
            for _more, _extra, _include in _references:
                CASES.append(
                    OpCase(
                        f"{_kind}Pool{_suffix}",
                        [_x],
                        {**_args, **_extra},
                        reference=pool(_kind, _kernel, _stride, _head, _output, _last, _include),
                        id=_id + _more,
                    )
                )
    CASES += [
        OpCase(
            f"{_kind}Pool1D",
            [distinct(3, 2, 5)],
            {"global_pooling": 1},
            id="global",
            reference=pool(_kind, (5,), (1,), (0,), (1,)),
        ),
        OpCase(
            f"{_kind}Pool3D",
            [distinct(1, 2, 2, 3, 2)],
            {"global_pooling": 1},
            id="global",
            reference=pool(_kind, (2, 3, 2), (1, 1, 1), (0, 0, 0), (1, 1, 1)),
        ),
        OpCase(
            f"{_kind}Pool",
            [X.astype(np.float16)],
            {"kernel": 3, "stride": 2, "pad": 1},
            id="half",
            reference=pool(_kind, (3, 3), (2, 2), (1, 1), (3, 4)),
            rtol=2e-3,
            atol=2e-3,
        ),
        OpCase(
            f"{_kind}Pool",
            [X.astype(np.float64)],
            {"kernel": 2},
            id="double",
            rtol=1e-12,
            reference=pool(_kind, (2, 2), (1, 1), (0, 0), (5, 6)),
        ),
    ]
    _errors: list[tuple[str, str, np.ndarray, dict[str, Any], type[Exception], str]] = [
        ("", "no-kernel", X, {}, ArgumentError, "argument 'kernels' is missing"),
        ("", "padding", X, {"kernel": 2, "pad": 2}, ArgumentError, "wanted less than the kernel [2, 2]"),
        (
            "",
            "caffe-padding",
            X,
            {"kernel": 2, "pad": 2, "legacy_pad": 3},
            ArgumentError,
            "wanted less than the kernel",
        ),
        ("", "dilation", X, {"kernel": 2, "dilation": 2}, ArgumentError, "pooling windows have no gaps"),
        ("", "too-small", X, {"kernel": 7}, ShapeError, "input X has 6 positions in a spatial dimension"),
        (
            "",
            "global-steps",
            X,
            {"global_pooling": 1, "stride": 2},
            ArgumentError,
            "wanted no padding, stride 1",
        ),
        ("", "rank", X[0, 0], {"kernel": 1}, ShapeError, "has 2 dimensions, wanted at least 3"),
        ("", "type", X.astype(np.int32), {"kernel": 1}, DataTypeError, "wanted one of bfloat16, float16"),
        ("1D", "rank", X, {"kernel": 1}, ShapeError, "has 4 dimensions, wanted 3"),
        ("2D", "rank", X[0], {"kernel": 1}, ShapeError, "has 3 dimensions, wanted 4"),
        ("3D", "rank", X, {"kernel": 1}, ShapeError, "has 4 dimensions, wanted 5"),
    ]
    CASES += [
        OpCase(f"{_kind}Pool{suffix}", [x], args, raises=(error, text), id=id)
        for suffix, id, x, args, error, text in _errors
    ]

#: A tie: both places that hold the maximum get the gradient. Infinite gradients stay where they belong.
_TIE = np.array([[[[2, 2, -1, 5]]]], np.float32)
CASES += [
    OpCase(
        "MaxPoolGradient",
        [_TIE, np.array([[[[2, 5]]]], np.float32), np.array([[[[3, np.inf]]]], np.float32)],
        {"kernels": [1, 2], "stride": 2},
        reference=lambda x, y, dy: np.array([[[[3, 3, 0, np.inf]]]]),
        id="ties",
        empty=(0, 1, 2),
    ),
    OpCase(
        "MaxPoolGradient",
        [X, X[:, :, 1:, 1:], X],
        {"kernel": 2},
        id="shape",
        raises=(ShapeError, "wanted 2x3x5x6 (the shape of the forward output)"),
    ),
    OpCase(
        "AveragePoolGradient",
        [X.astype(np.float16), np.zeros((2, 3, 1, 1), np.float16), np.ones((2, 3, 1, 1), np.float16)],
        {"global_pooling": 1},
        reference=lambda x, y, dy: np.full(x.shape, 1 / 42),
        id="half",
        rtol=2e-3,
        atol=2e-3,
        empty=(0, 1, 2),
    ),
]
