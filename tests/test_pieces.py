"""Kernels in pieces: the same bits as whole."""

from __future__ import annotations

import numpy as np
import pytest

from gpunet import kernels
from gpunet.cpu_fallback import pieces, threads
from gpunet.crew import CREW
from gpunet.definitions import make_operator
from gpunet.gradient_check import specs_of
from gpunet.operator import Operator
from tests import op_check
from tests.operators.test_operators import GOOD, ids


def is_cut(case: op_check.OpCase) -> bool:
    """Whether the kernel binds to pieces."""
    op = Operator(case.definition())
    specs = specs_of(case.inputs)
    inferred = op.infer(specs)
    return hasattr(kernels.find(op, "cpu", specs, inferred).function, "__wrapped__")


CASES = [case for case in GOOD if is_cut(case)]


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pieces of two elements for two threads; the number of those of each kernel."""
    found: list[int] = []
    run = CREW.run
    monkeypatch.setattr(CREW, "run", lambda steps, threads: (found.append(len(steps)), run(steps, threads)))
    monkeypatch.setattr(pieces, "_BLOCK", 2)
    monkeypatch.setattr(threads, "PIECE_BYTES", 1)
    monkeypatch.setattr(threads, "THREAD_BYTES", 1)
    monkeypatch.setattr(pieces, "thread_count", lambda: 2)
    return found


def test_each_of_the_kernels_has_cases() -> None:
    types = {case.type for case in CASES}
    assert {"Relu", "ReluGradient", "Tanh", "Sum", "Add", "Scale", "WeightedSum", "Adam"} <= types


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_pieces_give_the_bits_of_the_whole(
    case: op_check.OpCase, cut: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    definition = case.definition()
    found = op_check.execute(definition, op_check.copies(case.inputs))
    shapes = {np.shape(x) for x in case.inputs if np.size(x) != 1}
    size = max(np.size(x) for x in found)
    assert cut == ([-(-size // 2)] if size > 2 and len(shapes) == 1 else [])
    monkeypatch.undo()
    wanted = op_check.execute(definition, op_check.copies(case.inputs))
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, want, strict=True)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
@pytest.mark.parametrize("first", [True, False])
def test_one_number_goes_with_all_pieces(shape: tuple[int, ...], first: bool, cut: list[int]) -> None:
    large, one = np.arange(24, dtype=np.float32).reshape(2, 3, 4), np.full(shape, 5, np.float32)
    inputs = [one, large] if first else [large, one]
    (found,) = op_check.execute(make_operator("Sub", ["a", "b"], ["c"]), inputs)
    assert cut == [12]
    np.testing.assert_array_equal(found, inputs[0] - inputs[1], strict=True)


JOINED = [case for case in GOOD if case.type in ("Concat", "DepthConcat")]


@pytest.mark.parametrize("case", JOINED, ids=ids(JOINED))
def test_parts_are_joined_in_pieces(case: op_check.OpCase, cut: list[int]) -> None:
    found = op_check.execute(case.definition(), op_check.copies(case.inputs))
    y = found[0]
    assert cut or len(case.inputs) == len(y) == 1
    np.testing.assert_array_equal(y, case.reference(*case.inputs)[0])


def test_large_tensors_are_cut_for_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "thread_count", lambda: 2)
    least = 2 * threads.THREAD_BYTES
    assert threads.cuts(least, 1) == [(0, least // 2), (least // 2, least)]
    assert threads.cuts(least // 4, 1, passes=4) == [(0, least // 8), (least // 8, least // 4)]
    assert threads.cuts(least - 1, 1) == [(0, least - 1)]
    assert len(threads.cuts(7 * threads.PIECE_BYTES, 1)) == 7
    assert threads.cuts(0, 8) == []
