"""Timelines: traces that Perfetto can read, and the memory that a plan is made from."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

import gpunet
from gpunet.cuda_kernels.sim import toolchain
from gpunet.definitions import make_operator
from gpunet.profiler import profile
from gpunet.proto import NetDef
from gpunet.timeline import memory_curves, save_memory, save_trace, trace


def branches(count: int = 3) -> NetDef:
    net = NetDef(name="n", external_input=["x"], external_output=["y"])
    for b in range(count):
        net.op.append(make_operator("Relu", ["x"], [f"a{b}"]))
        net.op.append(make_operator("Tanh", [f"a{b}"], [f"b{b}"]))
    net.op.append(make_operator("Sum", [f"b{b}" for b in range(count)], ["y"]))
    return net


def workspace(device: str = "cpu", **options) -> gpunet.Workspace:
    ws = gpunet.Workspace(device)
    ws.feed("x", np.ones((64, 256), dtype=np.float32))
    ws.create(branches(), without=["fusion", "common_subexpressions"], **options)
    return ws


def traced(ws: gpunet.Workspace) -> list[dict]:
    return trace(profile(ws, "n", iterations=2))["traceEvents"]


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_a_row_for_each_lane_and_a_slice_for_each_operator(device):
    if device != "cpu" and toolchain.find() is None:
        pytest.skip(toolchain.MISSING)
    ws = workspace(device, engine="async_scheduling", workers=2, streams=2)
    events = traced(ws)
    slices = [e for e in events if e["ph"] == "X" and e["cat"] != "run"]
    assert Counter(e["cat"] for e in slices) == {"Relu": 6, "Tanh": 6, "Sum": 2}
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in slices)
    rows = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in slices} < rows
    names = [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    assert names == ["net n", device]
    kind = "thread" if device == "cpu" else "stream"
    assert f"{kind} 1" in [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    (first,) = [e for e in slices if e["name"] == "Relu a0"][:1]
    assert first["args"] == {
        "operator": "[Relu] op 0 'a0' in net 'n'",
        "inputs": ["x: float32 64x256"],
        "outputs": ["a0: float32 64x256"],
    }
    runs = [e for e in events if e.get("cat") == "run"]
    assert [e["name"] for e in runs] == ["run 0", "run 1"]
    assert runs[0]["ts"] + runs[0]["dur"] <= runs[1]["ts"]


def test_arrows_for_waits_go_from_lane_to_lane():
    ws = workspace(engine="async_scheduling", workers=2)
    events = traced(ws)
    (segment,) = ws.program("n").segments()
    waits = sum(len(item.waits) for item in segment.compiled.schedule.items)
    assert waits > 0
    starts, ends = ([e for e in events if e["ph"] == phase] for phase in "sf")
    assert len(starts) == len(ends) == 2 * waits
    for start, end in zip(starts, ends, strict=True):
        assert start["id"] == end["id"]
        assert start["tid"] != end["tid"]
        assert start["ts"] <= end["ts"]


def test_a_net_in_order_has_one_row_and_no_arrows(tmp_path):
    found = profile(workspace(), "n", iterations=1)
    save_trace(tmp_path / "t.json", found)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert len({e["tid"] for e in events if e["ph"] == "X"}) == 1
    assert not [e for e in events if e["ph"] in "sf"]


def test_live_memory_reaches_the_lower_bound():
    ws = workspace()
    ws.program("n").prepare()
    (curve,) = memory_curves(ws.program("n"))
    size = 64 * 256 * 4
    (segment,) = ws.program("n").segments()
    assert max(curve.live) == curve.lower_bound == segment.compiled.memory.lower_bound[curve.device]
    assert curve.arena >= curve.lower_bound
    assert curve.live[0] == size
    assert curve.live[-1] == 3 * size
    assert len(curve.live) == len(curve.labels) == 7
    assert curve.labels[-1] == "[Sum] op 6 'y' in net 'n'"


@pytest.mark.parametrize("keep", [["y"], ["y", *(f"{n}{b}" for n in "ab" for b in range(3))]])
def test_memory_is_drawn(tmp_path, keep):
    ws = workspace(keep=keep)
    ws.run("n")
    save_memory(tmp_path / "m.png", ws.program("n"))
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
