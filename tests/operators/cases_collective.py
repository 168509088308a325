"""Table rows of collectives, in a process that is alone; `test_distributed_*.py` runs several ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpunet import distributed
from gpunet.errors import ArgumentError, DataTypeError, SchemaError, ShapeError
from tests.op_check import OpCase

rng = np.random.default_rng(41)
WORLD = distributed.SingleCommunicator()


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.asarray(3 * rng.standard_normal(shape)).astype(dtype)


def is_world(outputs: list[Any], inputs: list[Any]) -> None:
    assert [type(x) for x in outputs] == [distributed.SingleCommunicator]


ONE = [normal(), normal(5), normal(2, 3, dtype="float64"), normal(4, dtype="float16"), np.arange(6)]
THREE = [normal(3, 2) for _ in range(3)]
HALVES = [np.full(2, x, np.float16) for x in (2048, 1, 1)]
ROWS = [normal(3, 4) for _ in range(3)]

CASES: list[OpCase] = [
    *(
        OpCase(type, [x], reference=lambda x: x, id=f"{x.dtype}-{x.ndim}d")
        for type in ("Allreduce", "Broadcast", "NCCLAllreduce", "NCCLBroadcast", "NCCLReduce")
        for x in ONE
    ),
    OpCase("Allreduce", [WORLD, normal(4)], reference=lambda w, x: x, empty=(1,), id="world"),
    OpCase("Broadcast", [WORLD, normal(4)], reference=lambda w, x: x, empty=(1,), id="world"),
    *(
        OpCase(type, THREE, args, outputs=3, reference=lambda *x, f=f: (f(x, axis=0),) * 3, id=f.__name__)
        for type in ("Allreduce", "NCCLAllreduce")
        for f, args in (
            (np.sum, {}),
            (np.mean, {"average": 1}),
            (np.max, {"op": "max"}),
            (np.min, {"op": "min"}),
        )
    ),
    # 2048 + 1 is 2048 in float16.
    OpCase(
        "NCCLAllreduce",
        HALVES,
        outputs=3,
        reference=lambda *x: (np.full(2, 2050),) * 3,
        empty=(0, 1, 2),
        id="halves",
    ),
    OpCase("Broadcast", THREE, outputs=3, reference=lambda a, b, c: (a, a, a), id="three"),
    OpCase("NCCLBroadcast", THREE, {"root": 2}, outputs=3, reference=lambda a, b, c: (c, c, c)),
    OpCase("NCCLBroadcast", THREE, {"root": 3}, outputs=3, raises=(ArgumentError, "wanted 0 to 2")),
    OpCase("Broadcast", [normal(2)], {"root": 1}, raises=(ArgumentError, "root is 1, wanted 0 to 0")),
    OpCase("NCCLReduce", THREE, reference=lambda *x: sum(x), id="three"),
    *(OpCase("Allgather", [x], reference=lambda x: x.reshape(-1), id=f"{x.dtype}-{x.ndim}d") for x in ONE),
    OpCase("Allgather", THREE, reference=lambda *x: np.stack(x).reshape(-1), id="three"),
    OpCase("Allgather", [normal(2)], {"size": 2}, raises=(ArgumentError, "the job has 1 ranks")),
    OpCase("NCCLAllGather", [normal(2, 3)], reference=lambda x: x[None]),
    OpCase("NCCLAllGather", THREE, outputs=3, reference=lambda *x: (np.stack(x),) * 3, id="three"),
    *(
        OpCase("ReduceScatter", [x], reference=lambda x: x.reshape(-1), id=f"{x.dtype}-{x.ndim}d")
        for x in ONE
    ),
    OpCase("NCCLReduceScatter", [normal(1, 4)], reference=lambda x: x[0], empty=False),  # wants one row
    OpCase("NCCLReduceScatter", ROWS, outputs=3, reference=lambda *x: tuple(sum(x)), empty=False, id="three"),
    OpCase("NCCLReduceScatter", [normal(2, 4)], raises=(ShapeError, "wanted 1 as its first dimension")),
    OpCase("Barrier", [], outputs=0, reference=lambda: [], id="all"),
    OpCase("Barrier", [WORLD], outputs=0, reference=lambda w: [], empty=False, id="world"),  # no tensor
    OpCase("CreateCommonWorld", [], {"size": 1, "rank": 0}, check=is_world),
    OpCase("CreateCommonWorld", [], {"size": 4}, raises=(ArgumentError, "the job has 1 ranks")),
    OpCase("CreateCommonWorld", [], {"rank": 1}, raises=(ArgumentError, "this process is rank 0")),
    OpCase("CloneCommonWorld", [WORLD], check=is_world, empty=False),  # no tensor
    OpCase("DestroyCommonWorld", [WORLD], check=is_world, empty=False),  # no tensor
    OpCase("Allreduce", [np.arange(3)], {"average": 1}, raises=(DataTypeError, "a mean of int64")),
    OpCase("Allreduce", [np.array([True])], raises=(DataTypeError, "wanted a tensor of numbers")),
    OpCase("Allreduce", [normal(2), normal(3)], outputs=2, raises=(ShapeError, "does not fit"), id="shapes"),
    OpCase("Allreduce", THREE, outputs=1, raises=(SchemaError, "an output for each tensor"), id="too few"),
]
