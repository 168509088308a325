"""Tensors that are written where the operator that joins them would copy them: gradients in their bucket."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpunet
from gpunet.cpu_fallback.joining import _concat_pieces
from gpunet.distributed.data_parallel import parallelize
from gpunet.optimizers import SGD
from gpunet.proto import NetDef, OperatorDef
from gpunet.races import find_races
from gpunet.records import check_races, record_run
from gpunet.zoo import build
from tests.nets import DEVICES, nodes_of, op

#: 256 bytes, so that what follows it in memory is aligned.
ROWS, COLUMNS = 2, 32
X = np.linspace(-2, 2, ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)


def run(ops: list[OperatorDef], device: str, keep: list[str], **options: Any) -> gpunet.Workspace:
    """The net ``n`` of x, 2x in z, a factor in f, and 3, 3, 3… in v."""
    workspace = gpunet.Workspace(device)
    given = {"x": X, "z": 2 * X, "f": np.float32([0.5]), "v": np.full(2 * X.size, 3, np.float32)}
    given |= {f"m{i}": np.eye(COLUMNS, dtype=np.float32) for i in range(5)}
    for name, value in given.items():
        workspace.feed(name, value)
    workspace.create(NetDef(name="n", op=ops, external_input=list(given)), keep=keep, **options)
    workspace.run("n", 2)
    assert not check_races(workspace.program("n"))
    return workspace


def held(workspace: gpunet.Workspace) -> list[list[str]]:
    """For each operator that joins or packs, the inputs that lie in its output."""
    nodes = [node for node in nodes_of(workspace) if node.op and node.op.type in ("Concat", "PackBucket")]
    return [[node.inputs[i].name for i in node.holds] for node in nodes]


def steps(device: str, without: tuple[str, ...]) -> tuple[list[float], dict[str, np.ndarray], list[Any]]:
    """Two steps of data-parallel training: losses, parameters, and the nodes."""
    model = build("mlp", (1, 8, 8), 10)
    model.add_gradients("loss")
    ranks = parallelize(model, bucket_bytes=60_000)
    SGD(0.05, momentum=0.9, weight_decay=1e-3).apply(model)
    workspace = gpunet.Workspace(device, seed=2)
    workspace.run_once(model.init_net)
    ranks.start(workspace)
    net = workspace.create(
        model.net, engine="async_scheduling", keep=["loss", *ranks.kept_blobs], without=without
    )
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(2):
        workspace.feed("data", rng.random((8, 1, 8, 8), dtype=np.float32))
        workspace.feed("label", rng.integers(0, 10, 8).astype(np.int32))
        workspace.run(net)
        losses.append(float(workspace.fetch("loss")))
    if device != "cpu":
        assert not find_races(record_run(workspace, net, 2))
    return (
        losses,
        {p.name: workspace.fetch(p.name) for p in model.params},
        workspace.program(net).segments(),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_written_into_their_buckets(device: str) -> None:
    losses, parameters, (segment,) = steps(device, ())
    compiled = segment.compiled
    packs = [node for node in compiled.graph.nodes if node.op and node.op.type == "PackBucket"]
    assert len(packs) > 1
    for pack in packs:
        bucket = pack.outputs[0]
        storage = compiled.places[bucket]
        gradients = pack.inputs[1:]
        offsets = np.cumsum([0, *(g.nbytes for g in gradients)])
        aligned = [i for i, start in enumerate(offsets[:-1]) if start % 256 == 0]
        assert list(pack.holds) == [i + 1 for i in aligned]
        assert sum(gradients[i].nbytes for i in aligned) > 0.99 * bucket.nbytes
        for i in aligned:
            assert compiled.places[gradients[i]] is storage
            assert storage.extent(gradients[i]) == (offsets[i], offsets[i + 1])
        # What was summed is there, too, for the updates.
        unpack = next(
            n
            for n in compiled.graph.nodes
            if n.op and n.op.type == "UnpackBucket" and compiled.places[n.inputs[0]] is storage
        )
        assert [compiled.places[unpack.outputs[i]] is storage for i in range(len(gradients))] == [
            i in aligned for i in range(len(gradients))
        ]
    other_losses, other_parameters, (other,) = steps(device, ("in_place",))
    assert losses == other_losses
    for name, value in parameters.items():
        np.testing.assert_array_equal(value, other_parameters[name])
    arena, without = (sum(found.memory.arenas.values()) for found in (compiled, other.compiled))
    assert arena < 0.7 * without, "gradients are in memory once"


@pytest.mark.parametrize("device", DEVICES)
def test_branches_write_where_they_are_joined(device: str) -> None:
    ops = [op("Scale", "x", f"a{i}", scale=i + 1.0) for i in range(4)]
    ops += [op("Relu", f"a{i}", f"b{i}") for i in range(4)]
    ops += [op("Concat", "b0 b1 b2 b3", "c s", axis=0), op("Tanh", "c", "y")]
    workspace = run(ops, device, ["y"], engine="async_scheduling", workers=2, without=["fusion"])
    assert held(workspace) == [["b0", "b1", "b2", "b3"]]
    want = np.tanh(np.concatenate([np.maximum((i + 1) * X, 0) for i in range(4)]))
    np.testing.assert_allclose(workspace.fetch("y"), want, rtol=1e-6)
    # The branches are not in each other's way.
    (segment,) = workspace.program("n").segments()
    assert len({item.lane for item in segment.compiled.schedule.items}) > 1


def test_parts_that_are_there_are_not_copied() -> None:
    y = np.zeros((1, 4, 3), np.float32)
    inside, outside = np.ascontiguousarray(y[:, :0]), np.ones((1, 2, 3), np.float32)
    inside = y.reshape(-1)[:6].reshape(1, 2, 3)
    assert _concat_pieces([inside, y.reshape(-1)[6:].reshape(1, 2, 3)], 1, y) == []
    (step,) = _concat_pieces([inside, outside], 1, y)
    step()
    np.testing.assert_array_equal(y, np.concatenate([inside, outside], 1))


PRODUCE = [op("Sigmoid", "x", "a"), op("Tanh", "z", "b")]
PACK = [*PRODUCE, op("PackBucket", "f a b", "p")]
UNPACK = [op("UnpackBucket", "p a b", "a b"), op("Add", "a b", "y")]
A, B = 1 / (1 + np.exp(-X)), np.tanh(2 * X)
HALF = np.concatenate([A, B]).reshape(-1) / 2
CASES = {
    "packed": ([*PACK, *UNPACK], [["a", "b"]], {"y": (A + B) / 2}),
    "an input is read later": (
        [*PACK, op("Relu", "a", "r"), *UNPACK],
        [["b"]],
        {"r": A, "y": (A + B) / 2},
    ),
    "an input is kept": ([*PACK, op("Scale", "p", "y")], [["b"]], {"a": A, "y": HALF}),
    "the whole is kept": (PACK, [[]], {"p": HALF}),
    "not aligned": (
        [
            op("Slice", "x", "s", starts=[0, 0], ends=[2, 30]),
            op("Sigmoid", "s", "a"),
            op("Tanh", "z", "b"),
            op("PackBucket", "f a b", "p"),
            op("Scale", "p", "y"),
        ],
        [["a"]],
        {"y": np.concatenate([A[:, :30].reshape(-1), B.reshape(-1)]) / 2},
    ),
    "the same twice": (
        [*PRODUCE, op("Concat", "a b a", "c i", axis=0), op("Scale", "c", "y")],
        [["b"]],
        {"y": np.concatenate([A, B, A])},
    ),
    "another type": (
        [*PRODUCE, op("PackBucket", "f a b", "p", dtype="float16"), op("HalfToFloat", "p", "y")],
        [[]],
        {"y": HALF.astype(np.float16)},
    ),
    "the bucket is read behind the unpacking": (
        [*PACK, op("UnpackBucket", "v a b", "a b"), op("Scale", "p", "q"), op("Add", "a b", "y")],
        [[]],
        {"q": HALF, "y": np.full_like(X, 6)},
    ),
    "what is made of the bucket is read behind the unpacking": (
        [
            *PACK,
            op("Scale", "p", "q"),
            op("UnpackBucket", "v a b", "a b"),
            op("Tanh", "q", "t"),
            op("Add", "a b", "y"),
        ],
        [["a", "b"]],
        {"t": np.tanh(HALF), "y": np.full_like(X, 6)},
    ),
    "a part of something": (
        [
            *PRODUCE,
            op("Concat", "a b", "c i", axis=0),
            op("Relu", "c", "w"),
            op("Split", "w", "d e", axis=0),
            op("Concat", "e d", "g j", axis=0),
            op("Scale", "g", "y"),
        ],
        [["a", "b"], []],
        {"y": np.concatenate([np.maximum(B, 0), A])},
    ),
    "joined twice": (
        [
            *PRODUCE,
            op("Concat", "a b", "c i", axis=0),
            op("Relu", "x", "d"),
            op("Concat", "c d", "e j", axis=0),
            op("Scale", "e", "y"),
        ],
        [["a", "b"], ["d"]],
        {"y": np.concatenate([A, B, np.maximum(X, 0)])},
    ),
    "inner dimension": (
        [*PRODUCE, op("Concat", "a b", "c i", axis=1), op("Scale", "c", "y")],
        [[]],
        {"y": np.concatenate([A, B], 1)},
    ),
    "written in place before": (
        [*PRODUCE, op("Relu", "b", "b"), op("PackBucket", "f a b", "p"), *UNPACK],
        [["a", "b"]],
        {"y": (A + np.maximum(B, 0)) / 2},
    ),
    "written in place behind": (
        [*PACK, *UNPACK[:1], op("Tanh", "b", "b"), *UNPACK[1:]],
        [["a", "b"]],
        {"y": A / 2 + np.tanh(B / 2)},
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_what_may_be_held(case: str, device: str) -> None:
    ops, want, values = CASES[case]
    for engine in ("simple", "async_scheduling"):
        workspace = run(ops, device, list(values), engine=engine, workers=2, without=["fusion"])
        assert held(workspace) == want
        for name, value in values.items():
            np.testing.assert_allclose(workspace.fetch(name), value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("seed", range(30))
def test_parts_lie_where_nothing_else_is_needed_any_more(seed: int) -> None:
    """Parts are written in several lanes, in no order; what was there before must be over for all of them."""
    rng = np.random.default_rng(seed)
    ops, ends = [], []
    for branch in range(int(rng.integers(2, 6))):
        last = "x"
        for depth in range(int(rng.integers(1, 6))):
            ops.append(op("MatMul", f"{last} m{branch}", f"t{branch}_{depth}"))
            last = f"t{branch}_{depth}"
        ends.append(last)
    order = rng.permutation(len(ops))
    placed = {"x"}
    mixed: list[OperatorDef] = []
    while len(mixed) < len(ops):
        for i in order:
            if ops[i] not in mixed and ops[i].input[0] in placed:
                mixed.append(ops[i])
                placed.add(ops[i].output[0])
                break
    mixed += [op("Concat", " ".join(ends), "c i", axis=0), op("Tanh", "c", "y")]
    workspace = run(mixed, "cpu", ["y"], engine="async_scheduling", workers=3)
    assert held(workspace) == [ends]
    np.testing.assert_allclose(workspace.fetch("y"), np.tanh(np.concatenate([X] * len(ends))), rtol=1e-6)
