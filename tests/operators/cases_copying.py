"""Table rows of copies and type conversions."""

from __future__ import annotations

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, SchemaError
from gpunet.proto import TensorProto
from tests.op_check import OpCase
from tests.operators.naive import each

rng = np.random.default_rng(16)


def normal(*shape: int) -> np.ndarray:
    return np.asarray(3 * rng.standard_normal(shape), np.float32)


VALUES = [
    normal(),
    normal(5),
    normal(2, 3, 4),
    normal(3, 2).astype(np.float16),
    np.arange(6).reshape(3, 2),
    np.array([True, False, True]),
    np.array([b"one", b"", b"three"], dtype=object),
]

CASES: list[OpCase] = []
for _type in (
    "Copy",
    "CopyFromCPUInput",
    "EnsureCPUOutput",
    "CopyCPUToGPU",
    "CopyGPUToCPU",
    "Alias",
    "StopGradient",
):
    CASES += [
        OpCase(
            _type,
            [x],
            reference=lambda x: x,
            gradient=None if x.dtype.kind == "f" else (),  # no differences of other types
            id=f"{x.dtype}-{x.ndim}d",
        )
        for x in VALUES
    ]
    CASES.append(OpCase(_type, [], raises=(SchemaError, "has 0 inputs, wanted 1"), id="none"))

CASES += [
    *(
        OpCase("CopyOnDeviceLike", [x, normal(2)], reference=lambda x, like: x, id=f"{x.ndim}d")
        for x in VALUES[:3]
    ),
    # Its gradient is on purpose not a derivative.
    *(
        OpCase("ZeroGradient", [x], outputs=0, reference=lambda x: [], gradient=(), id=f"{x.ndim}d")
        for x in VALUES[:3]
    ),
    OpCase("ZeroGradient", [normal(2)], raises=(SchemaError, "has 1 output, wanted 0"), id="output"),
]


def whole(bits: int, signed: bool):
    """Python's conversion to a whole number, wrapped to a width."""

    def convert(x: float) -> int:
        value = int(x) % 2**bits
        return value - 2**bits if signed and value >= 2 ** (bits - 1) else value

    return convert


CONVERSIONS = {
    "float32": float,
    "float64": float,
    "float16": float,
    "int8": whole(8, True),
    "uint8": whole(8, False),
    "int16": whole(16, True),
    "uint16": whole(16, False),
    "int32": whole(32, True),
    "int64": whole(64, True),
    "bool": bool,
}
SOURCES = {
    "float32": np.array([[1.75, -2.5, 0.0], [100.25, -0.5, 3.0]], np.float32),
    "float64": np.array([0.1, -7.9]),
    "float16": np.array([0.5, -2.75, 11], np.float16),
    "int32": np.array([[3, -1], [0, 40000]], np.int32),
    "int64": np.array(40000),
    "uint8": np.array([0, 255, 127], np.uint8),
    "bool": np.array([True, False]),
}
NUMBERS = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "uint8": TensorProto.UINT8,
    "int32": TensorProto.INT32,
}

# `from_type` is what the gradient needs; differences can be taken only from float to float.
for _from, _x in SOURCES.items():
    for _to, _convert in CONVERSIONS.items():
        if _from.startswith("float") and _to.startswith("u"):
            _x = np.abs(_x)  # negative floats to unsigned integers are left open
        CASES.append(
            OpCase(
                "Cast",
                [_x],
                {"to": {"float32": "float", "float64": "double"}.get(_to, _to), "from_type": _from},
                reference=each(_convert, _to if not _to.startswith("float") else np.float64),
                gradient=(),
                id=f"{_from}-{_to}",
            )
        )

CASES += [
    *(
        OpCase(
            "Cast",
            [SOURCES["float32"]],
            {"to": int(number), "from_type": "FLOAT"},
            reference=lambda x, _to=_to: (
                x if _to.startswith("float") else np.abs(np.trunc(x)).astype(_to) * np.sign(x).astype(_to)
            ),
            gradient=(),
            id=f"number-{_to}",
        )
        for _to, number in NUMBERS.items()
        if _to != "uint8"
    ),
    OpCase(
        "Cast",
        [normal(2, 3).astype(np.float64)],
        {"to": "double", "from_type": "double"},
        reference=lambda x: x,
    ),
    OpCase("Cast", [normal(2, 3)], {"from_type": "float"}, reference=lambda x: x, gradient=(), id="default"),
    OpCase(
        "Cast",
        [np.array([[1, -0.5], [1e20, np.inf]], np.float32)],
        {"to": "string", "from_type": "float"},
        reference=lambda x: np.array(
            [[b"1.000000", b"-0.500000"], [b"100000002004087734272.000000", b"inf"]], dtype=object
        )[: len(x)],
        gradient=(),
        id="text",
    ),
    OpCase(
        "Cast",
        [np.array([7, -12], np.int32)],
        {"to": "STRING", "from_type": "int32"},
        reference=lambda x: np.array([b"7", b"-12"], dtype=object)[: len(x)],
        gradient=(),
        id="text-whole",
    ),
    OpCase("Cast", [normal(2)], {"to": "quaternion"}, raises=(ArgumentError, "quaternion"), id="name"),
    OpCase("Cast", [VALUES[-1]], {"to": "float"}, raises=(DataTypeError, "is string 3"), id="from-text"),
    # A difference of 1e-5 is lost in float16.
    *(OpCase("FloatToHalf", [normal(*s)], reference=lambda x: x, gradient=()) for s in [(), (5,), (2, 3, 4)]),
    OpCase(
        "FloatToHalf",
        [np.array([1e6, -1e6, 3], np.float32)],
        reference=lambda x: np.array([np.inf, -np.inf, 3])[: len(x)],
        gradient=(),
        id="beyond",
    ),
    OpCase(
        "FloatToHalf",
        [np.array([1e6, -1e6, 3], np.float32)],
        {"clip": 1},
        reference=lambda x: np.array([65504, -65504, 3])[: len(x)],
        gradient=(),
        id="clip",
    ),
    *(
        OpCase("HalfToFloat", [normal(*s).astype(np.float16)], reference=lambda x: x, gradient=())
        for s in [(), (5,), (2, 3, 4)]
    ),
    OpCase(
        "HalfToFloat", [normal(2)], raises=(DataTypeError, "is float32 2, wanted one of float16"), id="float"
    ),
]
