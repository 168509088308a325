"""Every CUDA kernel on the simulated device against the NumPy kernels, over the tables of tests/operators.

Whole numbers, bools and random bits are equal; floats agree to the tolerances below.
"""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import gpunet
from gpunet import kernels, schema
from gpunet.backends import backend
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import launch
from gpunet.cuda_kernels.signature import FLOATS
from gpunet.cuda_kernels.sim import toolchain
from gpunet.devices import parse_device
from gpunet.dtypes import BFLOAT16, is_bfloat16, is_float
from gpunet.errors import GpunetError, GradientError
from gpunet.gradient_check import SEED, gradient_steps, inplace_definitions, run, runs_on, specs_of
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from tests.op_check import OpCase, copies, make_operator

if toolchain.find() is None:
    pytest.skip(toolchain.MISSING, allow_module_level=True)

TOLERANCE = {"float16": 2e-3, "bfloat16": 2**-7, "float32": 1e-5, "float64": 1e-12}
#: Random operators whose floats are not only random bits: they go through a logarithm and a sine, in which
#: libraries differ in the last place, or are computed from X.
ROUNDED = {"GaussianFill", "MSRAFill", "Dropout"}

CASES: list[OpCase] = []
for path in sorted((pathlib.Path(__file__).parent / "operators").glob("cases_*.py")):
    CASES += [c for c in importlib.import_module(f"tests.operators.{path.stem}").CASES if c.raises is None]


def assert_equal(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Equal, NaN at the same places."""
    if is_bfloat16(want.dtype):  # of which NumPy does not know that it has NaN
        got, want = got.astype(np.float32), want.astype(np.float32)
    np.testing.assert_array_equal(got, want, err_msg=what)


def assert_agree(type: str, got: Sequence[Any], want: Sequence[Any], least: float = 0) -> None:
    """``least`` is the least relative tolerance."""
    for o, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        exact = not is_float(b.dtype) or (schema.lookup(type).random and type not in ROUNDED)
        if exact or b.size == 0:
            assert_equal(a, b, f"output {o} of {type}")
            continue
        a, b, tolerance = a.astype(np.float64), b.astype(np.float64), max(TOLERANCE[b.dtype.name], least)
        # Sums lose what is small beside their largest terms.
        largest = np.abs(b[np.isfinite(b)]).max(initial=0)
        absolute = (1e-5 if is_bfloat16(got[o].dtype) else tolerance) * largest + eps(got[o].dtype)
        np.testing.assert_allclose(a, b, tolerance, absolute, equal_nan=True, err_msg=f"output {o} of {type}")


def eps(dtype: np.dtype) -> float:
    """The distance from 1 to the next number; for bfloat16, where sums are of numbers that have fewer digits,
    a thousandth.
    """
    return 1e-3 if is_bfloat16(dtype) else float(np.finfo(dtype).eps)


def accepted(definition: OperatorDef, inputs: Sequence[Any]) -> bool:
    """Whether a CUDA kernel runs the operator on these inputs."""
    return runs_on(definition, inputs, "sim") is None


def compare(definition: OperatorDef, inputs: Sequence[Any], case: OpCase | None = None) -> None:
    want = run(definition, copies(inputs), "cpu")
    # Rows that lose digits say so.
    least = case.rtol if case is not None and case.rtol > OpCase.rtol else 0
    assert_agree(definition.type, run(definition, copies(inputs), "sim:0"), want, least)


def gradient_outputs(case: OpCase) -> list[str]:
    chosen = case.grad_outputs
    if chosen is None:
        variadic = case.outputs and schema.lookup(case.type).output_at(case.outputs).variadic
        chosen = tuple(range(case.outputs)) if variadic else (0,)
    return [case.definition().output[o] for o in chosen]


def has_gradient(case: OpCase) -> bool:
    """Whether the schema has a gradient maker and the outputs that it starts from are floats."""
    if not (case.outputs and callable(schema.lookup(case.type).gradient)):
        return False
    op = Operator(case.definition())
    outputs = dict(zip(op.outputs, op.infer(specs_of(case.inputs)), strict=True))
    return all(s is not None and is_float(s.dtype) for s in map(outputs.get, gradient_outputs(case)))


def steps_of(case: OpCase) -> Iterator[tuple[OperatorDef, list[Any]]]:
    """The operators of a row's gradient and what they are given."""
    return gradient_steps(
        case.definition(), case.inputs, of=gradient_outputs(case), may_fail=case.gradient == ()
    )


def gradient_types(case: OpCase) -> set[str]:
    """Types of the operators of the gradient that have a CUDA kernel."""
    if not has_gradient(case):
        return set()
    try:
        steps = gpunet.gradient_ops(
            case.definition(), {name: f"{name}_grad" for name in gradient_outputs(case)}
        )[0]
    except GradientError:  # these arguments have none
        return set()
    return {step.type for step in steps if kernels.exists(Operator(step), "sim")}


def accepts(case: OpCase) -> bool:
    """Whether the types of a row go together, and a CUDA kernel takes them."""
    try:
        return accepted(case.definition(), case.inputs)
    except GpunetError:
        return False


FORWARD = [case for case in CASES if accepted(case.definition(), case.inputs)]
#: Rows in bfloat16, at most so many for each operator type, from all over its table.
ROWS = 6
NARROW: list[OpCase] = []
for _group in [[c for c in FORWARD if c.type == type] for type in dict.fromkeys(c.type for c in FORWARD)]:
    _found = [] if BFLOAT16 is None else [n for c in _group for n in c.in_type(BFLOAT16) if accepts(n)]
    NARROW += _found[:: max(1, -(-len(_found) // ROWS))]
FORWARD += NARROW
CASES += NARROW
BACKWARD = [case for case in CASES if gradient_types(case)]


def ids(cases: Sequence[OpCase]) -> list[str]:
    seen: dict[str, int] = {}
    names = []
    for case in cases:
        name = case.name()
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names


@pytest.fixture(params=["whole", "small"])
def grid(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Grids as they are, and of so few threads that loops go round several times."""
    if request.param == "small":
        monkeypatch.setattr(launch, "THREADS", 32)
        monkeypatch.setattr(launch, "MAX_BLOCKS", 2)
    return str(request.param)


@pytest.mark.parametrize("case", FORWARD, ids=ids(FORWARD))
def test_forward(case: OpCase, grid: str) -> None:
    compare(case.definition(), case.inputs, case)


@pytest.mark.parametrize("case", BACKWARD, ids=ids(BACKWARD))
def test_gradient(case: OpCase) -> None:
    for definition, inputs in steps_of(case):
        if accepted(definition, inputs):
            compare(definition, inputs, case)


def emptied(case: OpCase) -> list[Any] | None:
    """The inputs of a case with a dimension of 0 in front, as the case wants it."""
    first = np.shape(case.inputs[0]) if case.inputs else ()
    if case.empty is False or not first:
        return None
    same = tuple(i for i, x in enumerate(case.inputs) if np.shape(x) == first)
    chosen = case.empty if isinstance(case.empty, tuple) else same
    return [x[:0] if i in chosen else x for i, x in enumerate(copies(case.inputs))]


EMPTY = [c for c in FORWARD if (x := emptied(c)) is not None and accepted(c.definition(), x)]


@pytest.mark.parametrize("case", EMPTY, ids=ids(EMPTY))
def test_empty(case: OpCase) -> None:
    inputs = emptied(case)
    assert inputs is not None
    compare(case.definition(), inputs)


INPLACE = [c for c in FORWARD if c.inplace and [*inplace_definitions(c.definition(), c.inputs)]]


@pytest.mark.parametrize("case", INPLACE, ids=ids(INPLACE))
def test_inplace(case: OpCase, grid: str) -> None:
    for definition in inplace_definitions(case.definition(), case.inputs):
        compare(definition, case.inputs, case)


def test_every_kernel_has_rows() -> None:
    """All operators with a CUDA kernel are run by one of the tests above, or by those below."""
    kernels.load("sim")
    covered = {case.type for case in FORWARD}.union(*map(gradient_types, BACKWARD))
    covered |= {type for type, _, _ in LARGE}
    registered = {type for type, kind, _ in kernels._kernels if kind == "cuda"}
    assert sorted(registered - covered) == []


# Sizes that end inside of a vector, a block, a grid; and sums that are cut into slices.

rng = np.random.default_rng(21)


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def broadcast_gradient(type: str, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[str, list[Any], Any]:
    full = np.broadcast_shapes(a, b)
    x, y = normal(*a), 2 + np.abs(normal(*b))
    result = [x / y] if type == "DivGradient" else []
    return type, [normal(*full), x, y, *result], {}


LARGE: list[tuple[str, list[Any], dict[str, Any]]] = []
for _n in (1, 7, 255, 1031, 5003):
    for _dtype in FLOATS:
        _x, _y = normal(_n, dtype=_dtype), normal(_n, dtype=_dtype)
        _scalar = np.array([0.5], _dtype)
        LARGE += [(type, [_x], {}) for type in ("Relu", "Sigmoid", "Sign", "SumElements", "SumSqrElements")]
        LARGE += [(type, [_x, _y], {}) for type in ("ReluGradient", "Add", "Mul", "Sum", "Max", "LE")]
        LARGE += [
            ("Copy", [_x], {}),
            ("Scale", [_x], {"scale": 0.3}),
            ("Sum", [_x, _y] * 9, {}),
            ("WeightedSum", [_x, _scalar, _y, _scalar] * 3, {}),
            ("WeightedSumGradient", [_y, _x, _scalar, _y, _scalar], {"grad_on_w": 1}),
            ("SumElements", [_x], {"average": 1}),
            *(("Cast", [_x], {"to": _half}) for _half in FLOATS if _half.endswith("16")),
            ("Cast", [_x], {"to": "int8"}),
            ("Dropout", [_x], {"ratio": 0.4}),
            ("DropoutGrad", [_x, _y > 0], {"ratio": 0.4}),
        ]
    LARGE += [
        (type, [], {"shape": [_n, 1], **args})
        for type, args in (
            ("UniformFill", {"min": -3.0, "max": 5.0}),
            ("Float16UniformFill", {"min": -3.0, "max": 5.0}),
            ("UniformIntFill", {"min": -7, "max": 100}),
            ("UniformIntFill", {"min": -(2**31), "max": 2**31 - 1}),
            ("GaussianFill", {"mean": 1.0, "std": 2.0}),
            ("XavierFill", {}),
            ("MSRAFill", {}),
            ("RangeFill", {}),
            ("ConstantFill", {"value": 2.5}),
            *(("ConstantFill", {"value": 0.3, "dtype": _half}) for _half in FLOATS if _half.endswith("16")),
            *(("DiagonalFill", {"value": 0.3, "dtype": _half}) for _half in FLOATS if _half.endswith("16")),
            ("ConstantFill", {"value": 3, "dtype": "int8"}),
            ("ConstantFill", {"value": 1, "dtype": "bool"}),
        )
    ]
    LARGE.append(("SumElementsInt", [rng.integers(-(2**31), 2**31, _n).astype(np.int32)], {}))
for _dtype in ("int8", "uint8", "int16", "uint16", "int32", "int64"):
    _limits = np.iinfo(_dtype)
    _x, _y, _row = (
        rng.integers(_limits.min, _limits.max, s, _dtype, endpoint=True) for s in ((90, 7), (90, 7), (7,))
    )
    LARGE += [(type, [_x], {}) for type in ("Negative", "Sign", "SumElementsInt")]
    LARGE += [(type, [_x, b], {}) for type in ("Add", "Sub", "Mul", "GT", "NE") for b in (_y, _row)]
    LARGE += [(type, [_x, _y, _x], {}) for type in ("Sum", "SumInt", "Max", "Min")]
    LARGE += [(f"{type}Gradient", [_x, _y, b], {}) for type in ("Add", "Sub", "Mul") for b in (_y, _row)]
for _dtype in FLOATS:
    _x, _y, _row = (1 + np.abs(normal(*s, dtype=_dtype)) for s in ((90, 7), (90, 7), (7,)))
    LARGE += [(type, [_x, _y, _y], {}) for type in ("MulGradient", "Min")]
    LARGE += [("DivGradient", [_x, _x, _y, _y], {}), ("SumElementsGradient", [_x, _row[:1]], {})]
    LARGE += [("Pow", [_x], {"exponent": 1.5}), ("Pow", [_x, _y], {}), ("Pow", [_x, _row], {"broadcast": 1})]
    LARGE += [
        (type, [*first, _x, _row[:1].astype(w), _y, _row[1:2].astype(w)], {})
        for type, first in (("WeightedSum", []), ("WeightedSumGradient", [_y]))
        for w in FLOATS
    ]
_small = np.array([0, 1, 2, 100, 127])
_types = (*FLOATS, "int8", "uint8", "int16", "uint16", "int32", "int64", "bool")
LARGE += [
    ("Cast", [np.tile(_small, 11).astype(a)], {"to": {"float32": "float", "float64": "double"}.get(b, b)})
    for a in _types
    for b in _types
]
for _a, _b in (
    ((9000,), (1,)),
    ((3000, 10), (10,)),
    ((700, 3, 40), (3, 1)),
    ((33, 70), (33, 1)),
    ((50, 1, 40), (30, 1)),
    ((3, 1, 5, 1, 7, 1), (1, 4, 1, 6, 1, 2)),
):
    LARGE += [
        broadcast_gradient(type, _a, _b)
        for type in ("AddGradient", "SubGradient", "MulGradient", "DivGradient")
    ]
    LARGE += [(type, [normal(*_a), 1 + np.abs(normal(*_b))], {}) for type in ("Add", "Div", "GT")]


def large_id(row: tuple[str, list[Any], dict[str, Any]]) -> str:
    type, inputs, args = row
    shapes = "_".join("x".join(map(str, x.shape)) for x in inputs[:3])
    dtype = inputs[0].dtype.name if inputs else ""
    return "-".join(
        filter(None, [type, shapes, dtype, *(f"{k}{v}".replace(" ", "") for k, v in args.items())])
    )


def large_definition(type: str, inputs: Sequence[Any], args: dict[str, Any]) -> OperatorDef:
    outputs = 2 if type == "Dropout" else 1
    if type == "WeightedSumGradient":
        outputs = len(inputs) - 1 if args else len(inputs) // 2
    if type in ("AddGradient", "SubGradient", "MulGradient", "DivGradient"):
        outputs = 2
    return make_operator(
        type, [f"in{i}" for i in range(len(inputs))], [f"out{o}" for o in range(outputs)], **args
    )


@pytest.mark.parametrize("row", LARGE, ids=large_id)
def test_large(row: tuple[str, list[Any], dict[str, Any]], grid: str) -> None:
    type, inputs, args = row
    definition = large_definition(type, inputs, args)
    assert accepted(definition, inputs)
    compare(definition, inputs)


def shifted(array: np.ndarray) -> Buffer:
    """A copy on the simulated device that begins one element behind the start of its block."""
    device = backend(parse_device("sim:0"))
    whole = Buffer.from_numpy(device, np.append(np.zeros(1, array.dtype), array))
    return Buffer(device, whole.memory, array.shape, array.dtype, array.itemsize)


def kernel_of(op: Operator, inputs: Sequence[Any]) -> kernels.Kernel:
    specs = specs_of(inputs)
    return kernels.find(op, "sim", specs, op.infer(specs)[: len(op.outputs)])


def largest(type: str) -> OpCase | None:
    """The row of a type with most elements, of those that are launches on arrays."""
    rows = [c for c in FORWARD if c.type == type and all(isinstance(x, np.ndarray) for x in c.inputs)]
    rows = [c for c in rows if kernel_of(Operator(c.definition()), c.inputs).binds]
    return max(rows, key=lambda c: sum(x.size for x in c.inputs), default=None)


UNALIGNED = [
    (large_definition(*row), row[1])
    for row in LARGE
    if row[0] != "Copy" and (not row[1] or row[1][0].size in (1031, 630))
]
UNALIGNED += [
    (c.definition(), list(c.inputs))
    for c in map(largest, dict.fromkeys(c.type for c in FORWARD))
    if c is not None
]


@pytest.mark.parametrize(
    ("definition", "inputs"), UNALIGNED, ids=[f"{i}-{row[0].type}" for i, row in enumerate(UNALIGNED)]
)
def test_unaligned(definition: OperatorDef, inputs: list[Any]) -> None:
    """Buffers that cannot be read 16 bytes at a time give the same bits."""
    op = Operator(definition)
    specs = specs_of(inputs)
    outputs = op.infer(specs)[: len(definition.output)]
    found = kernel_of(op, inputs)
    wanted = found.scratch(op, specs, outputs) if found.scratch else ()
    device = backend(parse_device("sim:0"))
    names = list(definition.input)
    over = {o: names.index(name) for o, name in enumerate(definition.output) if name in names}
    results = []
    for place in (shifted, lambda array: Buffer.from_numpy(device, array)):
        context = kernels.KernelContext(op, seed=SEED, operator_id=7, backend=device, stream=device.stream)
        context.scratch = tuple(Buffer.empty(device, s) for s in wanted)
        context.step_buffer = Buffer.from_numpy(device, np.array([3], np.uint64))
        given = tuple(map(place, inputs))
        targets = tuple(
            given[over[o]] if o in over else place(np.ones(s.shape, s.dtype)) for o, s in enumerate(outputs)
        )
        found.function(given, targets, op.args, context)()
        results.append([target.numpy() for target in targets])
    for a, b in zip(*results, strict=True):
        assert_equal(a, b, f"output of {definition.type}")
