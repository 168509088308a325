"""Every row of every `cases_<family>.py`, under every rule; and no operator without rows."""

from __future__ import annotations

import importlib
import pathlib

import pytest

import gpunet
from tests import op_check

CASES: list[op_check.OpCase] = []
for path in sorted(pathlib.Path(__file__).parent.glob("cases_*.py")):
    CASES += importlib.import_module(f"tests.operators.{path.stem}").CASES
GOOD = [case for case in CASES if case.raises is None]
RULES = [
    op_check.check_values,
    op_check.check_strided,
    op_check.check_empty,
    op_check.check_inplace,
    op_check.check_gradient,
]


def ids(cases: list[op_check.OpCase]) -> list[str]:
    seen: dict[str, int] = {}
    names = []
    for case in cases:
        name = case.name()
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__.removeprefix("check_"))
@pytest.mark.parametrize("case", GOOD, ids=ids(GOOD))
def test_operator(case: op_check.OpCase, rule) -> None:
    if rule is op_check.check_inplace and not case.inplace:
        return
    rule(case)


ERRORS = [case for case in CASES if case.raises is not None]


@pytest.mark.parametrize("case", ERRORS, ids=ids(ERRORS))
def test_error(case: op_check.OpCase) -> None:
    op_check.check_raises(case)


def gradient_types(case: op_check.OpCase) -> set[str]:
    """Types of the operators that make the gradient of a row; none if the gradient refuses its arguments."""
    if not callable(gpunet.schema.lookup(case.type).gradient):
        return set()
    definition = case.definition()
    try:
        made, _ = gpunet.gradient_ops(definition, {o: f"{o}_grad" for o in definition.output})
    except gpunet.errors.GpunetError:
        return set()
    return {op.type for op in made}


def test_every_operator_has_rows() -> None:
    """Forward operators have rows; the gradient check of one makes gradient operators."""
    covered = {case.type for case in GOOD}.union(*(gradient_types(case) for case in GOOD))
    missing = sorted(set(gpunet.operator_types()) - covered)
    assert not missing, f"operators without a row in the tables: {missing}"
