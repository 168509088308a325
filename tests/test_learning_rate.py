"""Learning rates against those that Caffe2 gave.

``golden/learning_rate.json`` has every policy over a range of iterations; ``null`` stands for NaN there (a
policy past its end).
"""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest

import gpunet
from gpunet.definitions import make_operator
from gpunet.operators.learning_rate import POLICIES

ROWS: list[dict[str, Any]] = json.loads(
    (pathlib.Path(__file__).parent / "golden" / "learning_rate.json").read_text()
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["args"]["policy"])
def test_rates_are_those_of_caffe2(row: dict[str, Any]) -> None:
    workspace = gpunet.Workspace("cpu")
    operator = make_operator("LearningRate", ["iter"], ["lr"], **row["args"])
    found = []
    for iteration in row["iterations"]:
        workspace.feed("iter", np.array([iteration]))
        workspace.run_operator(operator)
        found.append(workspace.fetch("lr").item())
    wanted = [math.nan if rate is None else rate for rate in row["rates"]]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_every_policy_has_rates_of_caffe2() -> None:
    assert {row["args"]["policy"] for row in ROWS} == set(POLICIES)
