"""Every operator against what the original Caffe2 computes; `tests/golden/README.md` describes the files."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import gpunet
from gpunet.proto import NetDef, OperatorDef

FOLDER = Path(__file__).parent / "golden" / "operators"
FILES = sorted(FOLDER.glob("*.npz"))
# Relative and absolute tolerance.
FLOAT, HALF = (1e-4, 1e-5), (2e-3, 2e-3)


class Case(NamedTuple):
    """One recorded run of one operator."""

    op: OperatorDef
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]
    about: dict[str, Any]


def cases(path: Path) -> Iterator[Case]:
    with np.load(path, allow_pickle=False) as file:
        for i, about in enumerate(json.loads(str(file["meta"]))):
            inputs, outputs = (
                [file[f"{i}/{side}/{j}"] for j in range(len(about[side]))] for side in ("inputs", "outputs")
            )
            yield Case(OperatorDef.FromString(file[f"{i}/op"].tobytes()), inputs, outputs, about)


def difference(got: Any, wanted: np.ndarray, *, values: bool = True) -> str:
    """How an output differs from the recorded one, if it does. Random values: ``values=False``."""
    got = np.asarray(got)
    if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        return f"is {got.dtype} {got.shape}, wanted {wanted.dtype} {wanted.shape}"
    if not values:
        return ""
    if wanted.dtype.kind != "f":
        return "" if np.array_equal(got, wanted) else f"has {np.count_nonzero(got != wanted)} wrong elements"
    rtol, atol = HALF if wanted.dtype == np.float16 else FLOAT
    wrong = ~np.isclose(got, wanted, rtol=rtol, atol=atol, equal_nan=True)
    return f"has wrong elements, such as {got[wrong][0]}, wanted {wanted[wrong][0]}" if wrong.any() else ""


def essence(op: OperatorDef) -> tuple[Any, ...]:
    """What must agree of a gradient operator; the order of its arguments means nothing."""
    arguments = sorted((arg.name, arg.SerializeToString()) for arg in op.arg)
    return op.type, list(op.input), list(op.output), op.engine, arguments


def wrong_values(case: Case) -> Iterator[str]:
    workspace = gpunet.Workspace("cpu")
    for name, value in zip(case.op.input, case.inputs, strict=True):
        workspace.feed(name, value)
    workspace.run_operator(case.op)
    for name, wanted in zip(case.op.output, case.outputs, strict=True):
        found = difference(workspace.fetch(name), wanted, values=case.about["deterministic"] is not False)
        if found:
            yield f"output {name!r} {found}"


def wrong_gradient(case: Case) -> Iterator[str]:
    recorded = case.about["gradient"]
    if not isinstance(recorded, dict):
        return
    made, _ = gpunet.gradient_ops(case.op, {name: f"{name}_grad" for name in case.op.output})
    wanted = [OperatorDef.FromString(base64.b64decode(text)) for text in recorded["ops"]]
    if [essence(op) for op in made] != [essence(op) for op in wanted]:
        yield f"gradient operators {[essence(op) for op in made]}, wanted {[essence(op) for op in wanted]}"


def wrong_shapes(case: Case) -> Iterator[str]:
    """Where Caffe2 inferred a shape and was right, gpunet must too; whatever gpunet infers must be true."""
    known = {name: (value.shape, value.dtype) for name, value in zip(case.op.input, case.inputs, strict=True)}
    inferred = gpunet.infer(NetDef(op=[case.op]), known)
    recorded = case.about["inferred_shapes"]
    shapes = recorded if isinstance(recorded, dict) else {}
    for name, output in zip(case.op.output, case.outputs, strict=True):
        dims, _, unknown = shapes.get(name, ((), 0, True))
        expected = not unknown and tuple(dims) == output.shape
        if (name in inferred or expected) and inferred.get(name) != (output.shape, output.dtype):
            yield f"{name!r} inferred as {inferred.get(name)}, wanted {output.dtype} {output.shape}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_agrees_with_caffe2(path: Path) -> None:
    problems = []
    for case in cases(path):
        special = [extra for side in ("inputs", "outputs") for extra in case.about[side] if extra]
        assert not special, f"{case.about['id']} holds {special}, wanted plain tensors"
        for check in (wrong_values, wrong_gradient, wrong_shapes):
            try:
                problems += [f"{case.about['id']}: {problem}" for problem in check(case)]
            except Exception as error:
                problems.append(f"{case.about['id']}: {check.__name__}: {type(error).__name__}: {error}")
    assert not problems, "\n".join(problems)


def test_every_registered_type_that_was_recorded_is_here() -> None:
    recorded = set((FOLDER / "recorded.txt").read_text(encoding="utf-8").split())
    here = {path.stem for path in FILES}
    assert here == recorded & set(gpunet.operator_types()), (
        "wanted TYPE.npz of every registered type in recorded.txt"
    )
