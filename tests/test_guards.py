"""The argument ``epsilon``: values and gradients stay finite at 0, and are as always away from it."""

from __future__ import annotations

import numpy as np
import pytest

import gpunet
from gpunet.arguments import parse_arguments
from gpunet.cuda_kernels.sim import toolchain
from gpunet.definitions import make_operator
from gpunet.errors import ArgumentError
from gpunet.gradients import gradient_ops
from gpunet.proto import NetDef
from gpunet.schema import lookup

EPSILON = 0.25
X = np.array([[0, 0.1, -0.1, 0.25], [1, 2, -3, 0.5]])
A = np.array([[1, -2, 3, 4], [5, -6, 7, 0]])
ROW = np.array([0, -0.1, 2, -4])


def raised(x):
    return np.maximum(x, EPSILON)


def divided(a, b):
    near = np.abs(b) <= EPSILON
    return np.where(near, 0, a / np.where(near, 1, b))


def inside(x):
    return x > EPSILON


#: Operator, further arguments, inputs, value, and the gradient of each input for dY = 1.
CASES = {
    "Log": ({}, [X], lambda x: np.log(raised(x)), [lambda x: inside(x) / raised(x)]),
    "Sqrt": ({}, [X], lambda x: np.sqrt(raised(x)), [lambda x: inside(x) * 0.5 / np.sqrt(raised(x))]),
    "Rsqrt": ({}, [X], lambda x: raised(x) ** -0.5, [lambda x: inside(x) * -0.5 * raised(x) ** -1.5]),
    "Reciprocal": ({}, [X], lambda x: divided(1, x), [lambda x: -divided(divided(1, x), x)]),
    "Pow": (
        {"exponent": -1.5},
        [X],
        lambda x: raised(x) ** -1.5,
        [lambda x: inside(x) * -1.5 * raised(x) ** -2.5],
    ),
    "Pow of two": (
        {},
        [X, A / 4],
        lambda x, e: raised(x) ** e,
        [
            lambda x, e: inside(x) * e * raised(x) ** (e - 1),
            lambda x, e: np.log(raised(x)) * raised(x) ** e,
        ],
    ),
    "Div": (
        {},
        [A, X],
        divided,
        [lambda a, b: divided(1, b) + 0 * a, lambda a, b: -divided(divided(a, b), b)],
    ),
    "Div along": (
        {"broadcast": 1},
        [A, ROW],
        divided,
        [
            lambda a, b: divided(1, b) + 0 * a,
            lambda a, b: -divided(divided(a, b), b).sum(axis=0),
        ],
    ),
}
NAMES = ("x", "e")


def devices():
    missing = toolchain.find() is None
    return ["cpu", pytest.param("sim:0", marks=pytest.mark.skipif(missing, reason=toolchain.MISSING))]


def run(case: str, device: str, dtype: str, epsilon: float, without=()) -> list[np.ndarray]:
    """The value, and the gradients of the inputs."""
    arguments, inputs, *_ = CASES[case]
    names = NAMES[: len(inputs)]
    definition = make_operator(case.split()[0], names, ["y"], epsilon=epsilon, **arguments)
    backward, gradients = gradient_ops(definition, {"y": "dy"})
    net = NetDef(name="n", op=[definition, *backward], external_input=[*names, "dy"])
    ws = gpunet.Workspace(device, strict=True)
    for name, value in zip(names, inputs, strict=True):
        ws.feed(name, value.astype(dtype))
    ws.feed("dy", np.ones(X.shape, dtype))
    wanted = ["y", *(gradients[name] for name in names)]
    ws.create(net, keep=wanted, without=without)
    ws.run("n")
    return [ws.fetch(name) for name in wanted]


@pytest.mark.parametrize("without", [(), ("fusion",)], ids=["fused", "apart"])
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (case, dtype)
        for case in CASES
        for dtype in ("float32", "float64", "float16")
        # Caffe2's gradient of a power by a tensor is one of float32 alone.
        if case != "Pow of two" or dtype == "float32"
    ],
)
def test_guarded_values_and_gradients(case, dtype, device, without):
    _, inputs, value, slopes = CASES[case]
    values = [v.astype(dtype).astype(np.float64) for v in inputs]
    wanted = [value(*values), *(slope(*values) for slope in slopes)]
    tolerance = {"float16": 5e-3, "float32": 1e-5, "float64": 1e-12}[dtype]
    for found, want in zip(run(case, device, dtype, EPSILON, without), wanted, strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("case", CASES)
def test_without_it_nothing_is_guarded(case, device):
    assert not all(np.isfinite(found).all() for found in run(case, device, "float32", 0.0))


@pytest.mark.parametrize("device", devices())
def test_a_guarded_quotient_keeps_what_is_not_finite_and_signs_of_zeros(device, monkeypatch):
    """One by one and fused, a numerator over a divisor near 0 is as over infinity."""
    monkeypatch.setattr("gpunet.passes.fusion.CPU_ELEMENTS", 1)
    ops = [
        make_operator("Div", ["a", "b"], ["q"], epsilon=EPSILON),
        make_operator("Negative", ["q"], ["y"]),
    ]
    a = np.array([3, -3, np.nan, np.inf, 5], np.float32)
    b = np.array([0, 0, 0, 0.1, np.nan], np.float32)
    for without in ((), ("fusion",)):
        ws = gpunet.Workspace(device)
        ws.feed("a", a)
        ws.feed("b", b)
        ws.create(NetDef(name="n", op=ops, external_input=["a", "b"]), keep=["y"], without=without)
        ws.run("n")
        (segment,) = ws.program("n").segments()
        assert len(segment.binding.steps) == (2 if without else 1)
        found = ws.fetch("y")
        np.testing.assert_array_equal(found, [0, 0, np.nan, np.nan, np.nan])
        assert np.signbit(found[:2]).tolist() == [True, False]


def test_whole_numbers_are_not_guarded():
    ws = gpunet.Workspace("cpu")
    ws.feed("a", np.ones(3, np.int32))
    with pytest.raises(
        ArgumentError, match=r"'epsilon' is 0.5 and input B \(int32 3\), wanted floats to guard"
    ):
        ws.run_operator(make_operator("Div", ["a", "a"], ["y"], epsilon=0.5))


@pytest.mark.parametrize("type", [t for t in gpunet.operator_types() if "epsilon" in lookup(t).arg_table])
def test_an_epsilon_that_is_no_number_is_refused(type):
    with pytest.raises(ArgumentError, match="argument 'epsilon' is nan, wanted a number"):
        parse_arguments(make_operator(type, [], [], epsilon=float("nan")), lookup(type).arg_table)
