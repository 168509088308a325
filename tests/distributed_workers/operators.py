"""Nets with collectives, by every engine, on the CPU and the simulated device; `operators DEVICE`."""

from __future__ import annotations

import sys

import numpy as np

import gpunet
from gpunet import distributed
from gpunet.definitions import make_operator as op
from gpunet.proto import NetDef

SHAPE = (4, 3)


def run(device: str, engine: str, ops: list, feeds: dict[str, np.ndarray], outputs: list[str]) -> list:
    ws = gpunet.Workspace(device)
    for name, value in feeds.items():
        ws.feed(name, value)
    net = NetDef(name="n", op=ops, external_input=list(feeds), external_output=outputs, type=engine)
    ws.create(net)
    # Thrice: the engine `graph` captures in the second run.
    for _ in range(3):
        for name, value in feeds.items():
            ws.feed(name, value)
        ws.run("n")
    return [ws.fetch(name) for name in outputs]


def main() -> None:
    device = sys.argv[1]
    world = distributed.world()
    rank, size = world.rank, world.size
    have = [np.random.default_rng(r).standard_normal(SHAPE).astype(np.float32) for r in range(size)]
    x = have[rank]
    total = np.sum(have, axis=0)
    rows = np.stack([x[:1]] * size)
    scattered = np.concatenate([x.reshape(-1)] * size)
    ops = [
        op("Scale", ["x"], ["y"], scale=1.0),
        op("Allreduce", ["y"], ["y"]),
        op("Scale", ["x"], ["m"], scale=1.0),
        op("Allreduce", ["m"], ["m"], average=1),
        op("Broadcast", ["x"], ["b"], root=size - 1),
        op("Allgather", ["x"], ["g"]),
        op("ReduceScatter", ["wide"], ["s"]),
        op("NCCLAllreduce", ["x"], ["na"], op="max"),
        op("NCCLBroadcast", ["x"], ["nb"]),
        op("NCCLReduce", ["x"], ["nr"], root=0),
        op("NCCLAllGather", ["x"], ["ng"]),
        op("NCCLReduceScatter", ["rows"], ["ns"]),
        op("Barrier", [], []),
        op("Add", ["y", "m"], ["z"]),
    ]
    want = {
        "y": total,
        "m": total / size,
        "b": have[-1],
        "g": np.stack(have).reshape(-1),
        "s": total.reshape(-1),
        "na": np.max(have, axis=0),
        "nb": have[0],
        "ng": np.stack(have),
        "ns": total[:1],
        "z": total + total / size,
    }
    if rank == 0:
        want["nr"] = total
    feeds = {"x": x, "wide": scattered, "rows": rows}
    for engine in ("simple", "async_scheduling", "graph"):
        for name, got in zip(want, run(device, engine, ops, feeds, list(want)), strict=True):
            np.testing.assert_allclose(got, want[name], 1e-5, 1e-6, err_msg=f"{engine} {name}")
    common_world(device, have, rank, size)
    if rank == 0:
        print(f"{size} ranks ran nets on {device}")


def common_world(device: str, have: list[np.ndarray], rank: int, size: int) -> None:
    """Caffe2's form: a common world, and several tensors of a rank."""
    ws = gpunet.Workspace(device)
    ws.run_operator(op("CreateCommonWorld", [], ["cw"], size=size, rank=rank))
    ws.feed("a", have[rank])
    ws.feed("b", 2 * have[rank])
    ws.run_operator(op("Allreduce", ["cw", "a", "b"], ["a", "b"]))
    for name in "ab":
        np.testing.assert_allclose(ws.fetch(name), 3 * np.sum(have, axis=0), 1e-5, 1e-6)
    ws.feed("a", have[rank])
    ws.run_operator(op("Broadcast", ["cw", "a", "b"], ["a", "b"], root=size - 1))
    np.testing.assert_array_equal(ws.fetch("b"), have[-1])
    ws.run_operator(op("DestroyCommonWorld", ["cw"], ["cw"]))


main()
