"""Table rows of the LAMB update."""

from __future__ import annotations

import itertools

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(34)


def lamb(w, m, v, g, lr, iteration, *, beta1=0.9, beta2=0.999, epsilon=1e-6, weight_decay=0.0):
    t = max(1, int(iteration.ravel()[0]))
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    u = m / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + epsilon) + weight_decay * w
    norm, length = np.linalg.norm(w), np.linalg.norm(u)
    ratio = norm / length if norm and length else 1.0
    return w + lr.ravel()[0] * ratio * u, m, v


def row(
    *shape: int, iteration: int, dtype: str = "float32", w: float = 1.0, g: float = 1.0, **args
) -> OpCase:
    def normal(scale: float) -> np.ndarray:
        return (scale * rng.normal(size=shape)).astype(dtype)

    return OpCase(
        "Lamb",
        [
            normal(w),
            normal(g),
            np.abs(normal(g)),
            normal(g),
            np.array([-0.01], np.float32),
            np.array([iteration], np.int64),
        ],
        args,
        outputs=3,
        reference=lambda *inputs: lamb(*inputs, **args),
        rtol=1e-4,
        empty=(0, 1, 2, 3),
        id=f"{'x'.join(map(str, shape))}-{iteration}-{dtype}-{w:g}-{g:g}",
    )


def direction(w, m, v, g, iteration, **args):
    """What a step with rate 1 adds, but for the ratio of the norms."""
    stepped, m, v = lamb(w, m, v, g, np.ones(1), iteration, **args)
    u = stepped - w
    made = m / (1 - args.get("beta1", 0.9) ** max(1, int(iteration[0])))
    made = made / (np.sqrt(v / (1 - args.get("beta2", 0.999) ** max(1, int(iteration[0])))) + 1e-6)
    made = made + args.get("weight_decay", 0.0) * w
    np.testing.assert_allclose(u, made * np.linalg.norm(w) / np.linalg.norm(made), rtol=1e-6)
    return made, m, v


def squares(starts, *tensors):
    return np.array([[(t.ravel()[a:b] ** 2).sum() for a, b in itertools.pairwise(starts)] for t in tensors])


def scaled(x, starts, norms, *, trust=1.0, offset=0.0, lowest=0.0, highest=3e38):
    result = np.array(x, np.float64)
    for i, (a, b) in enumerate(itertools.pairwise(starts)):
        w, d = np.sqrt(norms[0, i]), np.sqrt(norms[1, i])
        # An update of norm 0 has the highest factor.
        ratio = (trust / (d / w + offset) if d / w + offset else np.inf) if w else 1.0
        result[a:b] *= min(max(ratio, lowest), highest)
    return result


def floats(*shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.normal(size=shape).astype(dtype)


STARTS = np.array([2, 5, 5, 700, 905], np.int64)
NORMS = np.array([[4, 1, 0, 2], [1, 9, 5, 0]], np.float32)
PARTS = [
    OpCase(
        "LambDirection",
        [floats(7, 90), floats(7, 90), np.abs(floats(7, 90)), floats(7, 90), np.array([5], np.int64)],
        {"weight_decay": 0.1},
        outputs=3,
        reference=lambda *inputs: direction(*inputs, weight_decay=0.1),
        rtol=1e-4,
        empty=(0, 1, 2, 3),
        id="direction",
    ),
    *(
        OpCase(
            "SegmentSquares",
            [STARTS, floats(1000, dtype=dtype), floats(1000, dtype=dtype)],
            reference=squares,
            rtol=1e-4,
            empty=False,
            id=f"squares-{dtype}",
        )
        for dtype in ("float32", "float64")
    ),
    OpCase("SegmentSquares", [np.zeros(1, np.int64), floats(3)], reference=squares, empty=False, id="none"),
    OpCase("SegmentSquares", [np.zeros(0, np.int64), floats(3)], raises=(ShapeError, "at least one element")),
    OpCase("SegmentSquares", [STARTS, floats(3), floats(4)], raises=(ShapeError, "as many as the first")),
    OpCase(
        "ScaleByNorms",
        [floats(1000), STARTS, NORMS],
        {"highest": 1e6},
        reference=lambda *inputs: scaled(*inputs, highest=1e6),
        rtol=1e-5,
        empty=False,
        id="lamb",
    ),
    OpCase(
        "ScaleByNorms",
        [floats(1000, dtype="float64"), STARTS, NORMS.astype(np.float64)],
        {"trust": 0.5, "offset": 0.25, "lowest": 0.2, "highest": 0.6},
        reference=lambda *inputs: scaled(*inputs, trust=0.5, offset=0.25, lowest=0.2, highest=0.6),
        rtol=1e-5,
        empty=False,
        id="lars",
    ),
    OpCase("ScaleByNorms", [floats(9), STARTS, NORMS[0]], raises=(ShapeError, "two for each segment")),
]
CASES = [
    *PARTS,
    row(7, 300, iteration=1),
    row(7, 300, iteration=9, weight_decay=0.1, beta1=0.8, beta2=0.95, epsilon=0.01),
    row(5, iteration=0),
    row(40_000, iteration=3, dtype="float64", weight_decay=0.01),
    # Where a norm is 0 the ratio is 1.
    row(5, iteration=3, w=0.0),
    row(5, iteration=3, g=0.0),
    OpCase(
        "Lamb",
        [np.ones(3, np.float32)] * 4 + [np.ones(1, np.float32), np.ones(1, np.int64)],
        {"weight_decay": -1.0},
        outputs=3,
        raises=(ArgumentError, "'weight_decay' is -1"),
    ),
    OpCase(
        "Lamb",
        [np.ones(3, np.float32)] * 5 + [np.ones(1, np.int64)],
        outputs=3,
        raises=(ShapeError, "wanted 1"),
    ),
    OpCase(
        "Lamb",
        [np.ones(3, np.float32)] * 4 + [np.ones(1, np.float32), np.ones(1, np.float32)],
        outputs=3,
        raises=(DataTypeError, "input iter"),
    ),
]
