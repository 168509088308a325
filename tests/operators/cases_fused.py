"""Table rows of the operator that stands for a run of elementwise operators."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from gpunet.definitions import make_operator
from gpunet.errors import ArgumentError, ShapeError
from gpunet.proto import NetDef
from tests.op_check import OpCase

rng = np.random.default_rng(23)


def normal(*shape: int) -> np.ndarray:
    return np.asarray(rng.standard_normal(shape), np.float32)


def body(*lines: str, inputs: int, **args: Any) -> NetDef:
    """``"Add x0 x1"`` gives t0, the next line t1; ``args`` are those of the last operator."""
    net = NetDef(external_input=[f"x{i}" for i in range(inputs)])
    for number, line in enumerate(lines):
        type, *operands = line.split()
        given = args if number == len(lines) - 1 else {}
        net.op.append(make_operator(type, operands, [f"t{number}"], **given))
    return net


def row(
    lines: list[str], inputs: list[np.ndarray], reference: Any = None, *, operands: Any = None, **options: Any
) -> OpCase:
    """A row; ``operands`` are shapes of the inputs with ones added."""
    args = options.pop("args", {})
    shapes = operands or [x.shape for x in inputs]
    shape = np.broadcast_shapes(*shapes)
    return OpCase(
        "FusedElementwise",
        inputs,
        {
            "body": body(*lines, inputs=len(inputs), **args),
            "shape": list(shape),
            "operands": list(itertools.chain(*shapes)),
        },
        reference=reference,
        # The shape is an argument.
        empty=False,
        id=options.pop("id", "_".join(line.split()[0] for line in lines)),
        **options,
    )


def relu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, 0)


CASES = [
    row(["Add x0 x1", "Relu t0"], [normal(3, 5), normal(3, 5)], lambda a, b: relu(a + b)),
    # A later operand is read by the last operator: it may be where the result goes.
    row(["Mul x0 x1", "Sum t0 x1 x0"], [normal(4), normal(4)], lambda a, b: a * b + a + b),
    row(
        ["Sigmoid x0", "AbsGradient x1 t0"],
        [normal(7), normal(7)],
        lambda a, b: np.sign(b) / (1 + np.exp(-a)),
    ),
    row(["Sqr x0", "AbsGradient t0 x0"], [normal(40)], lambda a: a * (a != 0)),
    row(
        ["Scale x0", "Mul t0 x1", "Sub t1 x2", "Div t2 x3"],
        [normal(4, 3, 5, 2), normal(3), np.array(2.0, np.float32), normal(4, 1, 5, 1)],
        lambda a, b, c, d: (a * b.reshape(3, 1, 1) - c) / d,
        operands=[(4, 3, 5, 2), (1, 3, 1, 1), (1, 1, 1, 1), (4, 1, 5, 1)],
        id="broadcast",
        rtol=1e-4,
    ),
    row(
        ["Add x0 x1", "Tanh t0"],
        [normal(6, 1), normal(1, 5)],
        lambda a, b: np.tanh(a + b),
        id="broadcast both",
    ),
    row(
        ["Sub x0 x1", "Sqr t0", "AveragedLoss t1"],
        [normal(30, 41), normal(30, 41)],
        lambda a, b: np.mean((a - b) ** 2),
        id="mean",
    ),
    row(
        ["Mul x0 x1", "SumElements t0"],
        [normal(5, 7), normal(7)],
        lambda a, b: (a * b).sum(),
        operands=[(5, 7), (1, 7)],
        id="sum",
    ),
    row(
        ["Abs x0", "ReduceMean t0"],
        [normal(3, 50)],
        lambda a: np.abs(a).mean(keepdims=True),
        id="mean that keeps dimensions",
    ),
    row(
        ["Add x0 x1", "Relu t0"],
        [normal(9).astype(np.float16), normal(9).astype(np.float16)],
        lambda a, b: relu((a + b).astype(np.float16)),
        id="half",
    ),
    row(
        ["GT x0 x1", "Not t0", "Cast t1"],
        [normal(11), normal(11)],
        lambda a, b: (a <= b).astype(np.float64),
        id="bools",
    ),
    row(
        ["Relu x0", "Add t0 x1"],
        [normal(3), normal(4)],
        operands=[(3,), (3,)],
        raises=(ShapeError, "has 4 elements, wanted 3"),
    ),
    OpCase(
        "FusedElementwise",
        [normal(3)],
        {"body": body("Relu x0", inputs=1), "shape": [3], "operands": [3, 3]},
        raises=(ArgumentError, "do not fit 1 inputs, wanted a shape for each"),
    ),
    row(["AveragedLoss x0"], [normal(3)], raises=(ArgumentError, "wanted one that gives its input")),
    OpCase(
        "FusedElementwise",
        [normal(3)],
        {"body": body("Relu x0", inputs=1), "shape": [3, 1], "operands": [1, 3]},
        raises=(ArgumentError, "wanted the shape (3, 1)"),
    ),
]
