"""Table rows of the elementwise arithmetic of two tensors."""

from __future__ import annotations

import math
import operator

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, KernelError, ShapeError
from tests.op_check import OpCase
from tests.operators.naive import along, each

rng = np.random.default_rng(12)


def away(*shape: int) -> np.ndarray:
    """Numbers of both signs and not near 0, to divide by."""
    return np.asarray(rng.uniform(0.5, 2, shape) * rng.choice([-1, 1], shape), np.float32)


def positive(*shape: int) -> np.ndarray:
    return np.asarray(rng.uniform(0.4, 2.5, shape), np.float32)


def whole(*shape: int) -> np.ndarray:
    return np.asarray(rng.integers(1, 60, shape) * rng.choice([-1, 1], shape))


FLOAT = {"Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": operator.truediv}
WHOLE = {**FLOAT, "Div": lambda a, b: int(a / b)}

# Shapes of A and B, and the inputs that the rule for empty tensors takes the rows of.
NUMPY = [
    ((), (), True),
    ((4,), (), True),
    ((3, 5), (3, 5), True),
    ((3, 5), (5,), True),
    ((5,), (3, 5), (1,)),
    ((3, 1), (1, 4), True),
    ((1,), (2, 3, 2), (1,)),
    ((2, 1, 3, 1), (5, 1, 2), True),
]
# Shapes, arguments beside broadcast=1, the dimension that B begins at, and the inputs to be emptied.
LEGACY = [
    ((2, 3, 4, 5), (4, 5), {}, 2, True),
    ((2, 3, 4, 5), (3, 4), {"axis": 1}, 1, True),
    ((2, 3, 4), (2,), {"axis": 0}, 0, (0, 1)),
    ((2, 3, 4, 5), (1, 4, 1), {"axis": 1}, 1, True),
    ((2, 3, 4, 5), (3,), {"axis_str": "C"}, 1, True),
    ((2, 3, 4, 5), (5,), {"axis_str": "C", "order": "NHWC"}, 3, True),
    ((2, 3), (1,), {}, 1, True),
    ((3, 3), (3,), {"axis": 0}, 0, (0, 1)),
    ((2, 3), (2, 3), {"axis": 0}, 0, True),
]

CASES: list[OpCase] = []
for _type, _function in FLOAT.items():
    CASES += [
        OpCase(_type, [away(*a), away(*b)], reference=each(_function), empty=empty) for a, b, empty in NUMPY
    ]
    CASES += [
        OpCase(
            _type,
            [away(*a), away(*b)],
            {"broadcast": 1, **args},
            reference=along(_function, axis),
            empty=empty,
        )
        for a, b, args, axis, empty in LEGACY
    ]
    CASES += [
        # Without broadcast=1 an axis has no effect: the last dimensions line up.
        OpCase(_type, [away(3, 3), away(3)], {"axis": 0}, reference=each(_function), id="unused-axis"),
        OpCase(
            _type,
            [away(4, 2).astype(np.float16), away(4, 2).astype(np.float16)],
            reference=each(_function),
            id="half",
        ),
        OpCase(
            _type,
            [away(2, 300).astype(np.float16), away(300).astype(np.float16)],
            reference=each(_function),
            gradient=(),  # checked in the other rows; this one has too many elements to be quick
            id="half-long",
        ),
    ]
    CASES += [
        OpCase(
            _type,
            [whole(*a).astype(dtype), whole(*b).astype(dtype)],
            reference=each(WHOLE[_type], dtype),
            id=f"{dtype}-{len(a)}d",
            gradient=(),  # no differences of whole numbers
        )
        for dtype in ("int32", "int64")
        for a, b in [((4, 3), (4, 3)), ((2, 5), (5,)), ((), ())]
    ]
    CASES += [
        OpCase(
            _type,
            [away(3), away(3).astype(np.float64)],
            raises=(DataTypeError, "input B (float64 3) differs in type from input A (float32 3)"),
            id="types",
        ),
        OpCase(
            _type,
            [away(2, 3), away(2)],
            raises=(ShapeError, "shapes 2x3 and 2 do not broadcast"),
            id="shapes",
        ),
        OpCase(_type, [away(2) > 0, away(2) > 0], raises=(DataTypeError, "is bool 2"), id="bool"),
    ]

CASES += [
    OpCase(
        "Add",
        [away(2, 3), away(1, 1, 1)],
        {"broadcast": 1},
        reference=lambda a, b: a + b.item(),
        id="one-element",
    ),
    OpCase(
        "Add",
        [away(2, 3, 4), away(2, 1, 4)],
        {"broadcast": 1},
        raises=(ShapeError, "B (2x1x4) does not fit A (2x3x4)"),
        id="inner-one",
    ),
    OpCase(
        "Add",
        [away(3), away(2, 3)],
        {"broadcast": 1},
        raises=(ShapeError, "B (2x3) has 2 dimensions, wanted at most the 1 of A (3)"),
        id="larger",
    ),
    OpCase(
        "Add",
        [away(2, 3), away(3)],
        {"broadcast": 1, "axis": 2},
        raises=(ArgumentError, "argument 'axis' is 2, wanted 0 to 1"),
        id="axis",
    ),
    OpCase(
        "Add",
        [away(2, 3), away(3)],
        {"broadcast": 1, "axis_str": "Q"},
        raises=(ArgumentError, "argument 'axis_str' is 'Q', wanted one letter of 'NCHW'"),
        id="letter",
    ),
    OpCase(
        "Add",
        [away(2, 3), away(3)],
        {"broadcast": 1, "axis_str": "C", "axis": 1},
        raises=(ArgumentError, "wanted one"),
        id="both",
    ),
    *(
        OpCase(
            "Div",
            [
                np.array([np.iinfo(dtype).min, min(np.iinfo(dtype).max, 2**52 + 1), 7, 9], dtype),
                np.array([-1 if np.iinfo(dtype).min else 3, 2, 2, 5]).astype(dtype),
            ],
            # Towards zero; the quotient that does not fit wraps around.
            reference=lambda a, b: np.array(
                [
                    abs(int(x)) // abs(int(y)) * (1 if (x < 0) == (y < 0) else -1)
                    for x, y in zip(a, b, strict=True)
                ]
            ).astype(a.dtype),
            gradient=(),  # no differences of whole numbers
            empty=False,  # there are four divisors
            id=f"limits-{dtype}",
        )
        for dtype in ("int8", "uint8", "int16", "uint16", "int32", "int64")
    ),
    OpCase(
        "Div",
        [np.array([[4, 5, 6]]), np.array([[2, 1, 0]])],
        raises=(KernelError, "divisor B has a 0 at index (0, 2)"),
        id="zero",
    ),
    OpCase(
        "Div",
        [np.array([1, -1, 0], np.float32), np.zeros(3, np.float32)],
        reference=lambda a, b: np.array([np.inf, -np.inf, np.nan]),
        gradient=(),  # no differences at infinity
        id="float-zero",
    ),
]


def sums(axis: int, shape: tuple[int, ...]):
    def reference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        result = np.zeros(shape if a.size else b.shape)
        for position in np.ndindex(*a.shape):
            own = position[axis : axis + len(shape)]
            result[tuple(0 if n == 1 else i for i, n in zip(own, result.shape, strict=True))] += a[position]
        return result

    return reference


CASES += [
    OpCase("SumReduceLike", [away(*a), away(*b)], args, reference=sums(axis, b), empty=empty, rtol=1e-4)
    for a, b, args, axis, empty in LEGACY
]
CASES += [
    OpCase("SumReduceLike", [away(40, 300), away(300)], reference=sums(1, (300,)), rtol=1e-4),
    OpCase(
        "SumReduceLike",
        [np.full((5000, 2), 1.0, np.float16), np.zeros(2, np.float16)],
        reference=lambda a, b: np.full(2, float(len(a))),  # beyond 2048 float16 alone cannot count
        id="half",
    ),
    OpCase(
        "SumReduceLike", [away(2, 3), away(2)], raises=(ShapeError, "B (2) does not fit A (2x3)"), id="shapes"
    ),
    OpCase(
        "AddGradient",
        [away(2, 3), away(2, 3), away(2, 2)],
        outputs=2,
        raises=(ShapeError, "do not broadcast"),
        id="shapes",
    ),
    OpCase(
        "MulGradient",
        [away(2, 4), away(2, 3), away(2, 3)],
        outputs=2,
        raises=(ShapeError, "input dC (float32 2x4) does not fit, wanted 2x3"),
        id="shapes",
    ),
    *(
        OpCase(
            f"{_type}Gradient",
            [away(3, 2), away(3, 2), away(3, 2)],
            outputs=2,
            reference=lambda dc, a, b, _da=_da, _db=_db: (_da(dc, a, b), _db(dc, a, b)),
        )
        for _type, _da, _db in (
            ("Add", lambda dc, a, b: dc, lambda dc, a, b: dc),
            ("Sub", lambda dc, a, b: dc, lambda dc, a, b: -dc),
            ("Mul", lambda dc, a, b: dc * b, lambda dc, a, b: dc * a),
        )
    ),
    # B is broadcast, while dA may be in place of dC.
    *(
        OpCase(
            f"{_type}Gradient",
            [away(3, 2), away(3, 2), away(*_b), *([away(3, 2)] if _type == "Div" else [])],
            {"broadcast": 1, "axis": _axis},
            outputs=2,
            reference=lambda *xs, _f=_function, _axis=_axis: _summed_gradient(_f, _axis, *xs),
            empty=(0, 1, 2, 3)[: 2 if _axis else 3]
            if _type != "Div"
            else (0, 1, 3)
            if _axis
            else (0, 1, 2, 3),
            id=f"along-{_axis}",
        )
        for _type, _function in (
            ("Add", lambda dc, a, b, c: (dc, dc)),
            ("Sub", lambda dc, a, b, c: (dc, -dc)),
            ("Mul", lambda dc, a, b, c: (dc * b, dc * a)),
            ("Div", lambda dc, a, b, c: (dc / b, -dc * c / b)),
        )
        for _b, _axis in (((3,), 0), ((2,), 1))
    ),
    OpCase(
        "DivGradient",
        [away(3, 2), away(3, 2), away(3, 2), away(3, 2)],
        outputs=2,
        reference=lambda dc, a, b, c: (dc / b, -dc * c / b),
    ),
    OpCase(
        "DivGradient",
        [away(3, 2), away(3, 2), away(3, 2)],
        outputs=2,
        reference=lambda b, c, dc: (dc / b, -dc * c / b),
        id="old-form",
    ),
    OpCase(
        "DivGradient",
        [away(2), away(3, 2), away(3, 2)],
        outputs=2,
        reference=lambda b, c, dc: (dc / b, (-dc * c / b).sum(0)),
        empty=(1, 2),
        id="old-form-broadcast",
    ),
    OpCase(
        "DivGradient",
        [away(4, 3, 2), away(3, 2), away(3, 2)],
        outputs=2,
        raises=(ShapeError, "B (float32 4x3x2) is larger than C (float32 3x2)"),
        id="old-form-shapes",
    ),
]


def _summed_gradient(function, axis, dc, a, b, c=None):
    da, db = function(dc, a, b[:, None] if axis == 0 else b, c)
    return da, db.sum(1 - axis)


EXPONENTS = [2.0, 1.0, 0.5, -1.0, 3.25, -1.75, 0.0]
CASES += [
    OpCase("Pow", [positive(3, 4)], {"exponent": e}, reference=each(lambda x, e=e: math.pow(x, e)))
    for e in EXPONENTS
]
CASES += [
    OpCase("Pow", [positive(*shape)], {"exponent": 1.5}, reference=each(lambda x: math.pow(x, 1.5)))
    for shape in [(), (5,), (2, 1, 3, 2)]
]
CASES += [
    # With two inputs the gradient starts from a float32 ConstantFill: see test_elementwise_gradients.py.
    OpCase("Pow", [positive(3, 2), away(3, 2)], reference=each(math.pow), gradient=()),
    OpCase("Pow", [positive(), away()], reference=each(math.pow), gradient=()),
    OpCase("Pow", [positive(3, 4), away(4)], {"broadcast": 1}, reference=along(math.pow, 1), gradient=()),
    OpCase(
        "Pow",
        [positive(2, 3, 4), away(3)],
        {"broadcast": 1, "axis": 1},
        reference=along(math.pow, 1),
        gradient=(),
    ),
    OpCase(
        "Pow",
        [positive(2, 3).astype(np.float16)],
        {"exponent": 3.0},
        reference=each(lambda x: x**3),
        id="half",
    ),
    OpCase("Pow", [positive(2, 3)], raises=(ArgumentError, "argument 'exponent' is missing"), id="missing"),
    OpCase(
        "Pow",
        [positive(2, 3), away(3)],
        raises=(ShapeError, "wanted equal shapes or broadcast=1"),
        id="shapes",
    ),
]
