"""Reductions, losses and normalization on the simulated device: sizes cut into slices, and bad data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import gpunet
from gpunet import backends
from gpunet.cuda_kernels import reduction
from gpunet.cuda_kernels.signature import FLOATS
from gpunet.cuda_kernels.sim_backend import SimBackend
from gpunet.definitions import make_operator
from gpunet.devices import Device
from gpunet.errors import KernelError
from gpunet.proto import OperatorDef
from tests.op_check import OpCase
from tests.operators import cases_loss, cases_reduction, cases_softmax
from tests.test_sim_operators import accepted, compare, grid  # noqa: F401 (a fixture)

rng = np.random.default_rng(31)
Row = tuple[str, list[Any], dict[str, Any]]


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def positive(*shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.uniform(0.5, 2.0, shape).astype(dtype)


def labels(classes: int, count: int, dtype: str = "int32") -> np.ndarray:
    return rng.integers(0, classes, count).astype(dtype)


# Dimensions to keep and to reduce: innermost, outermost, in between, long, short, of size 1, empty.
SHAPES: list[tuple[tuple[int, ...], list[int]]] = [
    ((20_011,), [0]),
    ((9001, 3), [0]),
    ((3, 9001), [1]),
    ((700, 40), [0]),
    ((300, 2), [1]),
    ((50, 33, 40), [1]),
    ((37, 40, 9), [0, 2]),
    ((1, 5, 1, 7), [1]),
    ((2, 3, 4, 5, 6, 7), [0, 2, 4]),
    ((2, 3, 4, 5, 6, 7), [1, 3, 5]),
    ((2,) * 8, [0, 2, 4, 6]),
    ((2, 0, 3), [1]),
    ((2, 0, 3), [0]),
]
ROWS: list[Row] = []
for _shape, _axes in SHAPES:
    ROWS += [(f"Reduce{r}", [positive(*_shape)], {"axes": _axes}) for r in ("Sum", "Mean", "L1", "L2")]
    ROWS += [(f"Reduce{r}", [normal(*_shape)], {"axes": _axes}) for r in ("Max", "Min")]
    _y = positive(*(1 if a in _axes else n for a, n in enumerate(_shape)))
    ROWS += [
        (f"Reduce{r}Gradient", [_y, positive(*_shape), _y + 1], {"axes": _axes})
        for r in ("Mean", "Max", "L1", "L2")
    ]
for _dtype in reduction.NUMBERS[len(FLOATS) :]:
    _x = rng.integers(np.iinfo(_dtype).min, np.iinfo(_dtype).max, (300, 40), endpoint=True, dtype=_dtype)
    ROWS += [(f"Reduce{r}", [_x], {"axes": [axis]}) for r in ("Sum", "Max", "Min") for axis in (0, 1)]
    ROWS.append(("ReduceMax", [np.zeros((3, 0), _dtype)], {"axes": [1]}))
_special = normal(5, 40)
_special[1, 7], _special[2], _special[3, 39] = np.nan, -np.inf, np.inf
ROWS += [(f"Reduce{r}", [_special], {"axes": [1]}) for r in ("Sum", "Max", "Min")]
for _side, _shape in (("Front", (900, 70)), ("Front", (9001, 3)), ("Back", (70, 900)), ("Back", (3, 9001))):
    _k, _n = (_shape[1], _shape[0]) if _side == "Front" else _shape
    _lengths = rng.integers(0, _n + 1, _k).astype(np.int32)
    for _rule in ("Sum", "Mean", "Max"):
        _y = [positive(_k)] if _rule == "Max" else []
        ROWS += [(f"Reduce{_side}{_rule}", [positive(*_shape), *more], {}) for more in ([], [_lengths])] + [
            (f"Reduce{_side}{_rule}Gradient", [positive(_k), positive(*_shape), *_y, *more], {})
            for more in ([], [_lengths])
        ]
for _dtype in ("float32", "float16", "float64"):
    _x, _label = normal(37, 1031, dtype=_dtype), labels(1031, 37, "int64")
    _p = positive(37, 1031, dtype=_dtype) / 1031
    _wanted = _x.astype(np.float64)
    _wanted = (np.exp(_wanted) / np.exp(_wanted).sum(axis=1, keepdims=True)).astype(_dtype)
    _weight, _one = positive(37, dtype=_dtype), np.array([0.7], _dtype)
    ROWS += [
        ("Softmax", [_x], {}),
        ("SoftmaxGradient", [_p, _x], {}),
        ("SoftmaxWithLoss", [_x, _label, _weight], {"scale": 0.5}),
        ("SoftmaxWithLossGradient", [_x, _label, _weight, _p, _one], {"scale": 0.5}),
        ("LabelCrossEntropy", [_p, _label], {}),
        ("LabelCrossEntropyGradient", [_p, _label, _weight], {}),
        ("CrossEntropy", [_p, _p], {}),
        ("CrossEntropyGradient", [_p, _p, _weight], {}),
        ("AveragedLoss", [_p], {}),
        ("SquaredL2Distance", [_x, _p], {}),
        ("SquaredL2DistanceGradient", [_x, _p, _weight], {}),
        ("SigmoidCrossEntropyWithLogits", [_x, _p], {}),
        ("SigmoidCrossEntropyWithLogitsGradient", [_weight, _x, _p], {}),
        ("Accuracy", [_x, _label], {"top_k": 500}),
    ]
    if _dtype != "float16":  # in half precision 1031 probabilities do not sum to 1 within 1e-5
        ROWS.append(("SoftmaxWithLoss", [_x, _wanted, _weight], {"label_prob": 1}))
        ROWS.append(("SoftmaxWithLossGradient", [_x, _wanted, _weight, _p, _one], {"label_prob": 1}))
for _shape in ((9, 8, 31, 17), (4, 70, 6, 8), (600, 3), (5, 33, 1, 1), (2, 3, 90, 101)):
    for _order in ("NCHW", "NHWC"):
        _c = _shape[1] if _order == "NCHW" else _shape[-1]
        for _dtype, _wide in (("float32", "float32"), ("float16", "float32"), ("float64", "float64")):
            _x, _dy = normal(*_shape, dtype=_dtype) + 2, positive(*_shape, dtype=_dtype)
            _a, _b, _m, _v = (positive(_c, dtype=_wide) for _ in range(4))
            ROWS += [
                ("SpatialBN", [_x, _a, _b, _m, _v], {"order": _order, "is_test": 0}),
                ("SpatialBN", [_x, _a, _b, _m, _v], {"order": _order, "is_test": 1}),
                ("SpatialBNGradient", [_x, _a, _dy, _m, _v], {"order": _order}),
                ("SpatialBNGradient", [_x, _a, _dy, _m, _v, _b, _m], {"order": _order, "num_batches": 3}),
            ]
        if len(_shape) == 4:
            _lrn = {"size": 5, "alpha": 0.5, "beta": 0.75, "order": _order}
            ROWS += [
                ("LRN", [normal(*_shape)], _lrn),
                ("LRNGradient", [normal(*_shape) for _ in "xyd"], _lrn),
            ]


def row_id(row: Row) -> str:
    type, inputs, args = row
    shapes = "_".join("x".join(map(str, x.shape)) for x in inputs[:2])
    return "-".join(
        [type, shapes, inputs[0].dtype.name, *(f"{k}{v}".replace(" ", "") for k, v in args.items())]
    )


def definition_of(type: str, inputs: Sequence[Any], args: dict[str, Any]) -> OperatorDef:
    names = [f"in{i}" for i in range(len(inputs))]
    counts = {"SoftmaxWithLoss": 2, "SquaredL2DistanceGradient": 2, "SpatialBNGradient": 3, "LRN": 2}
    outputs = [f"out{o}" for o in range(counts.get(type, 1))]
    if type == "SpatialBN" and not args["is_test"]:
        outputs += ["in3", "in4", "saved_mean", "saved_inv_std"]
    return make_operator(type, names, outputs, **args)


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_large(row: Row, grid: str) -> None:  # noqa: F811
    type, inputs, args = row
    definition = definition_of(type, inputs, args)
    assert accepted(definition, inputs)
    compare(definition, inputs)


def test_slices_are_made() -> None:
    plans = [reduction._plan(shape, axes) for shape, axes in SHAPES]
    assert {p.slices > 1 for p in plans} == {p.across > 1 for p in plans} == {True, False}


def test_too_many_dimensions_stay_on_the_cpu() -> None:
    definition = make_operator("ReduceSum", ["in0"], ["out0"], axes=[0, 2, 4, 6, 8])
    assert not accepted(definition, [normal(*(2,) * 10)])
    workspace = gpunet.Workspace("sim:0")
    workspace.feed("in0", np.ones((2,) * 10, np.float32))
    workspace.run_operator(definition)
    assert (workspace.fetch("out0") == 32).all()


@pytest.fixture(params=["forward", "reverse", "random"])
def ordered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> gpunet.Workspace:
    """A workspace on a device whose threads run in another order."""
    device = Device("sim", 31)
    monkeypatch.setitem(backends._open, device, SimBackend(device, order=request.param))
    return gpunet.Workspace(str(device), strict=True)


def feed(workspace: gpunet.Workspace, inputs: Sequence[Any]) -> None:
    for i, x in enumerate(inputs):
        workspace.feed(f"in{i}", x)


REFUSED = [
    case
    for cases in (cases_loss.CASES, cases_reduction.CASES, cases_softmax.CASES)
    for case in cases
    if case.raises is not None and case.raises[0] is KernelError
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name())
def test_bad_data_is_reported(case: OpCase, ordered: gpunet.Workspace) -> None:
    """As by the NumPy kernel, once the result is fetched; and only once."""
    assert case.raises is not None
    feed(ordered, case.inputs)
    ordered.run_operator(case.definition())
    with pytest.raises(KernelError) as error:
        ordered.fetch("out0")
    assert case.raises[1] in str(error.value)
    assert str(error.value).startswith(f"[{case.type}] op 'out0'")
    ordered.fetch("out0")


@pytest.mark.parametrize(
    ("type", "more"),
    [
        ("SoftmaxWithLossGradient", [positive(500, 5), np.ones(1, np.float32)]),
        ("LabelCrossEntropyGradient", [positive(500)]),
        ("LabelCrossEntropy", []),
        ("SoftmaxWithLoss", []),
        ("Accuracy", []),
    ],
)
def test_the_first_of_many_bad_labels(type: str, more: list[Any], ordered: gpunet.Workspace) -> None:
    label = labels(5, 500)
    label[[30, 31, 499]] = -7, 6, 5
    label[100:400] = 9
    inputs = [positive(500, 5), label, *more]
    feed(ordered, inputs)
    ordered.run_operator(definition_of(type, inputs, {}))
    with pytest.raises(KernelError, match=r"label 30 is -7, wanted 0 to 4 \(5 classes\)"):
        ordered.fetch("out0")


def test_the_first_of_several_bad_operators(ordered: gpunet.Workspace) -> None:
    feed(ordered, [positive(4, 5), np.full(4, 8, np.int32), positive(4, 3)])
    net = gpunet.proto.NetDef(
        name="losses",
        op=[
            make_operator("LabelCrossEntropy", ["in0", "in1"], ["first"]),
            make_operator("LabelCrossEntropy", ["in2", "in1"], ["second"]),
        ],
    )
    ordered.create(net)
    ordered.run("losses")
    with pytest.raises(KernelError, match=r"op 0 'first' in net 'losses': label 0 is 8, wanted 0 to 4"):
        ordered.fetch("second")
    ordered.feed("in1", np.zeros(4, np.int32))
    ordered.run("losses")
    np.testing.assert_allclose(ordered.fetch("second"), -np.log(ordered.fetch("in2")[:, 0]), rtol=1e-6)


def test_threads_do_not_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of threads changes no bit: the device runs each launch in three orders and compares."""
    device = Device("sim", 32)
    monkeypatch.setitem(backends._open, device, SimBackend(device, check_order=True))
    workspace = gpunet.Workspace(str(device), strict=True)
    seen = set()
    for type, inputs, args in ROWS:
        if type not in seen and inputs[0].dtype == np.float32:
            seen.add(type)
            feed(workspace, inputs)
            definition = definition_of(type, inputs, args)
            workspace.run_operator(definition)
            workspace.fetch("out0")
    assert len(seen) == len({row[0] for row in ROWS})
