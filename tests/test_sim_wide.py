"""The branches of kernels for tensors whose places need 64 bits.

Such tensors are too large for tests. A build of the kernels in which no place above 4 fits into 32 bits takes
these branches for the small ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from gpunet.cuda_kernels.sim import toolchain
from gpunet.definitions import make_operator
from gpunet.gradient_check import run
from gpunet.proto import NetDef, OperatorDef
from tests.op_check import OpCase, copies
from tests.test_sim_operators import (
    BACKWARD,
    FORWARD,
    LARGE,
    accepted,
    assert_agree,
    large_definition,
    steps_of,
)

if toolchain.find() is None:
    pytest.skip(toolchain.MISSING, allow_module_level=True)

# It builds seven modules anew.
pytestmark = pytest.mark.slow

#: A device of its own, since devices keep the kernels that they have built.
DEVICE = "sim:11"
#: Types of each kind of index: along and strided operands, copies, windows, reductions, channels.
TYPES = (
    *("Add", "GT", "Transpose", "Concat", "Tile", "MaxPool", "AveragePool"),
    *("ReduceSum", "ReduceMean", "ReduceMax", "SpatialBN"),
)
ROWS = 5


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUNET_SIM_FLAGS", "-DGPUNET_NARROW=4")


def some(cases: list[OpCase], type: str) -> list[OpCase]:
    """Rows of a type, from all over its table."""
    found = [case for case in cases if case.type == type]
    return found[:: max(1, -(-len(found) // ROWS))]


def steps() -> Iterator[tuple[OperatorDef, list[np.ndarray]]]:
    for type in TYPES:
        yield from ((case.definition(), case.inputs) for case in some(FORWARD, type))
        for case in some(BACKWARD, type):
            yield from steps_of(case)
    for type, inputs, args in LARGE:
        if type.endswith("Gradient") and inputs[0].ndim > 1:
            yield large_definition(type, inputs, args), inputs
    # A row by each way in which fused operators find their operands.
    x = np.random.default_rng(3).normal(size=(3, 4, 5)).astype(np.float32)
    for end in ("Relu", "SumElements"):
        for other in ((3, 4, 5), (4, 1), (3, 1, 5)):
            body = NetDef(
                external_input=["x0", "x1"],
                op=[make_operator("Add", ["x0", "x1"], ["t0"]), make_operator(end, ["t0"], ["t1"])],
                external_output=["t1"],
            )
            operands = [*x.shape, *(1,) * (3 - len(other)), *other]
            fused = make_operator(
                "FusedElementwise", ["x", "y"], ["z"], body=body, shape=x.shape, operands=operands
            )
            yield fused, [x, np.ones(other, np.float32)]


STEPS = [step for step in steps() if accepted(*step)]


@pytest.mark.parametrize("step", STEPS, ids=[f"{i}-{step[0].type}" for i, step in enumerate(STEPS)])
def test_places_of_64_bits(step: tuple[OperatorDef, list[np.ndarray]]) -> None:
    definition, inputs = step
    want = run(definition, copies(inputs), "cpu")
    assert_agree(definition.type, run(definition, copies(inputs), DEVICE), want)
