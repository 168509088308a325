"""bfloat16 wherever float16 is taken: every row of the tables again, on rounded inputs.

On the CPU an operator gives what it gives in float32, rounded (bit for bit, if nothing is rounded before).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpunet
from gpunet import gradient_check, kernels
from gpunet.definitions import make_operator
from gpunet.dtypes import is_float
from gpunet.errors import DataTypeError, GpunetError
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from tests import op_check
from tests.operators.test_operators import GOOD, ids

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALF = np.dtype(np.float16)
#: These round what is between the operators that they consist of, or keep the error of rounding.
ROUND_WITHIN = {"FusedConv", "FusedElementwise", "FusedFC", "RoundWithFeedback"}


def rounded(type: str, values: Sequence[Any], dtype: Any) -> list[Any]:
    """The inputs, with bfloat16 numbers in arrays of ``dtype`` where an operator takes float16."""
    declared = gpunet.schema.lookup(type)
    result = []
    for i, x in enumerate(values):
        types = declared.input_at(i).types or ()
        if isinstance(x, np.ndarray) and x.dtype in (np.float32, HALF) and HALF in types:
            x = x.astype(BFLOAT16).astype(dtype)
        result.append(x)
    return result


def takes_half(case: op_check.OpCase) -> bool:
    inputs = rounded(case.type, case.inputs, HALF)
    return any(getattr(x, "dtype", None) == HALF for x in inputs) and case.type != "HalfToFloat"


CASES = [case for case in GOOD if takes_half(case)]


def equal(got: Any, want: Any) -> bool:
    return np.array_equal(got, want, equal_nan=is_float(want.dtype))


def check(definition: OperatorDef, values: Sequence[Any], *, exact: bool) -> None:
    single, narrow = (rounded(definition.type, values, t) for t in (np.float32, BFLOAT16))
    op = Operator(definition)
    try:
        op.infer(gradient_check.specs_of(rounded(definition.type, values, HALF)))
    except DataTypeError:
        with pytest.raises(DataTypeError):
            op.infer(gradient_check.specs_of(narrow))
        return
    try:
        wanted = op_check.execute(definition, op_check.copies(single))
    except GpunetError as error:  # of the data: rounded probabilities do not sum to 1
        with pytest.raises(type(error)):
            op_check.execute(definition, op_check.copies(narrow))
        return
    found = op_check.execute(definition, op_check.copies(narrow))
    halves = half_outputs(definition, values)
    for o, (got, want) in enumerate(zip(found, wanted, strict=True)):
        if not isinstance(want, np.ndarray):
            continue
        if want.dtype == np.float32 and halves[o]:
            assert got.dtype == BFLOAT16
            with np.errstate(all="ignore"):
                want = want.astype(BFLOAT16)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        if exact:
            assert equal(got, want), f"output {o}: {got}, wanted {want}"
        elif is_float(want.dtype):
            np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), 2**-6, 2**-6)


def half_outputs(definition: OperatorDef, values: Sequence[Any]) -> list[bool]:
    """Which outputs are float16 where the inputs are."""
    op, inputs = Operator(definition), rounded(definition.type, values, HALF)
    inferred = op.infer(gradient_check.specs_of(inputs))
    if None in inferred:
        inferred = gradient_check.specs_of(op_check.execute(definition, inputs))
    return [getattr(s, "dtype", None) == HALF for s in inferred]


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_operator(case: op_check.OpCase) -> None:
    check(case.definition(), case.inputs, exact=case.type not in ROUND_WITHIN)


def steps_of(case: op_check.OpCase) -> list[tuple[OperatorDef, list[Any]]]:
    definition = case.definition()
    if not gradient_check.has_gradient(definition):
        return []
    of = None if case.grad_outputs is None else [definition.output[o] for o in case.grad_outputs]
    return list(gradient_check.gradient_steps(definition, case.inputs, of=of, may_fail=True))


DIFFERENTIABLE = [case for case in CASES if gradient_check.has_gradient(case.definition())]


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=ids(DIFFERENTIABLE))
def test_gradient(case: op_check.OpCase) -> None:
    for step, inputs in steps_of(case):
        check(step, inputs, exact=step.type not in ROUND_WITHIN)


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_in_place(case: op_check.OpCase) -> None:
    """In every in-place pair of bfloat16 that the schema allows."""
    inputs = rounded(case.type, case.inputs, BFLOAT16)
    try:
        Operator(case.definition()).infer(gradient_check.specs_of(inputs))
        op_check.execute(case.definition(), op_check.copies(inputs))
    except GpunetError:
        return
    if case.inplace:
        narrow = copy.copy(case)
        narrow.inputs = inputs
        op_check.check_inplace(narrow)


def test_nets_run_in_bfloat16() -> None:
    """Through the workspace: inferred, planned, bound, with a dynamic operator in between."""
    ws = gpunet.Workspace("cpu", seed=3)
    x = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6).astype(BFLOAT16)
    w, b = np.linspace(-1, 1, 18).reshape(3, 6).astype(BFLOAT16), np.ones(3, BFLOAT16)
    for name, value in {"x": x, "w": w, "b": b, "shape": np.array([2, 6])}.items():
        ws.feed(name, value)
    net = gpunet.Net("net")
    net.add("FC", ["x", "w", "b"], ["y"])
    net.add("Relu", ["y"], ["y"])
    net.add("Reshape", ["y", "shape"], ["z", "old"])
    net.add("Softmax", ["z"], ["p"])
    net.add("ConstantFill", ["p"], ["one"], value=1.0, dtype="bfloat16")
    net.add("Sum", ["p", "one"], ["s"])
    net.add("Cast", ["s"], ["out"], to="float32")
    ws.create(net)
    ws.run(net, 2)
    y = np.maximum(x.astype(np.float32) @ w.astype(np.float32).T + 1, 0).astype(BFLOAT16)
    assert np.array_equal(ws.fetch("y"), y)
    assert ws.fetch("z").dtype == BFLOAT16
    p = np.exp(y.reshape(2, 6).astype(np.float64))
    p = (p / p.sum(1, keepdims=True)).astype(BFLOAT16)
    np.testing.assert_array_equal(ws.fetch("p"), p)
    np.testing.assert_array_equal(ws.fetch("out"), (p.astype(np.float32) + 1).astype(BFLOAT16))


def test_kernels_that_take_it_keep_no_copies() -> None:
    x = gpunet.specs.spec((2, 3), BFLOAT16)
    for type, copies in (("Copy", 0), ("Relu", 2)):
        op = Operator(make_operator(type, ["x"], ["y"]))
        found = kernels.find(op, "cpu", [x], [x])
        assert len(found.scratch(op, [x], [x]) if found.scratch else ()) == copies
