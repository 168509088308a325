"""The race checker on recorded runs of the simulated device: it finds nothing in runs as they are,
and planted faults in others.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import gpunet
from gpunet import backends, memory_plan
from gpunet.cli import main
from gpunet.cli.nets import load_net
from gpunet.cuda_kernels.multi_tensor import TensorList
from gpunet.cuda_kernels.sim import recording, streams
from gpunet.cuda_kernels.sim_backend import SimBackend
from gpunet.definitions import make_operator
from gpunet.devices import parse_device
from gpunet.errors import DeviceError
from gpunet.kernels import KernelContext
from gpunet.operator import Operator
from gpunet.proto import NetDef
from gpunet.races import Access, Race, Record, find_races
from gpunet.records import record_run
from tests.sim_kernels import Sim, needs_compiler

pytestmark = needs_compiler
SIM = parse_device("sim:0")
ENGINES = {
    "simple": {},
    "async_scheduling": {"engine": "async_scheduling", "streams": 4, "workers": 2},
    "graph": {"engine": "graph", "streams": 3},
}


def recorded(monkeypatch: Any, net: str, seed: int = 0, runs: int = 3, **options: Any) -> list[Record]:
    monkeypatch.setitem(backends._open, SIM, SimBackend(SIM, seed=seed))
    workspace, program = load_net(net, batch_size=2).create("sim:0", **options)
    return record_run(workspace, program.name, runs)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", ["lenet", "mlp", pytest.param("resnet20", marks=pytest.mark.slow)])
def test_runs_have_no_races(monkeypatch: Any, model: str, engine: str, seed: int) -> None:
    assert set(gpunet.zoo.MODELS) == {"lenet", "mlp", "resnet20"}, "a new model wants its row"
    records = recorded(monkeypatch, f"zoo:{model}", seed, **ENGINES[engine])
    assert not find_races(records)
    work = [record for record in records if record.accesses]
    kernels = {record.lane for record in work if not record.label.startswith("copy ")}
    copies = {record.lane for record in work} - kernels
    assert len(kernels) == ENGINES[engine].get("streams", 1)
    assert len(copies) == (engine == "async_scheduling"), "rates come on a stream of copies"
    assert sum("momentum_sgd" in record.label for record in work) % 3 == 0
    assert all(a.start < a.stop and a.space == "sim:0" for record in work for a in record.accesses)


def test_copies_have_streams_of_their_own(monkeypatch: Any) -> None:
    monkeypatch.setitem(backends._open, SIM, SimBackend(SIM, seed=4))
    ops = [
        make_operator(*op) for op in (("Tanh", ["x"], ["a"]), ("Sqr", ["a"], ["b"]), ("Exp", ["b"], ["c"]))
    ]
    ops[1].device_option.device_type = 0
    net = NetDef(name="there and back", op=ops, external_input=["x"], external_output=["c"])
    ws = gpunet.Workspace("sim:0")
    ws.feed("x", np.ones((3, 5), dtype=np.float32))
    ws.create(net, engine="async_scheduling", streams=2, workers=1)
    records = record_run(ws, net.name, 2)
    lanes = {label: {r.lane for r in records if r.label == label} for label in (r.label for r in records)}
    out, back = lanes["copy of 'a'"], lanes["copy to 'b'"]
    kernels = lanes["tanh_fwd_f32"] | lanes["exp_fwd_f32"]
    assert (len(out), len(back)) == (1, 1)
    assert not out & back
    assert not (out | back) & kernels
    assert not find_races(records)


def branches(count: int = 3) -> NetDef:
    """Branches of their own streams, joined at the end."""
    ops = []
    for b in range(count):
        ops += [
            make_operator("Scale", ["x"], [f"a{b}"], scale=b + 1.0),
            make_operator("Tanh", [f"a{b}"], [f"b{b}"]),
            make_operator("Sigmoid", [f"b{b}"], [f"c{b}"]),
        ]
    ops.append(make_operator("Sum", [f"c{b}" for b in range(count)], ["y"]))
    return NetDef(name="branches", op=ops, external_input=["x"], external_output=["y"])


def branches_on_streams(monkeypatch: Any, runs: int = 2, **options: Any) -> list[Record]:
    monkeypatch.setitem(backends._open, SIM, SimBackend(SIM, seed=3))
    ws = gpunet.Workspace("sim:0")
    ws.feed("x", np.ones((8, 100), np.float32))
    ws.create(branches(), engine="async_scheduling", streams=3, without=["fusion", "in_place"], **options)
    ws.run("branches")
    return record_run(ws, "branches", runs)


def test_every_single_missing_wait_is_found(monkeypatch: Any) -> None:
    """A run waits six times: two side streams for the main one, the sum for two branches, the main stream for
    the side streams (which the sum has done already). There are three runs; the last two are recorded.
    """
    wait = streams.SimStream.wait

    def without(number: int) -> tuple[int, list[Race]]:
        counter = itertools.count()

        def lossy(self: Any, event: Any) -> None:
            if next(counter) != number:
                wait(self, event)

        monkeypatch.setattr(streams.SimStream, "wait", lossy)
        records = branches_on_streams(monkeypatch)
        return next(counter), find_races(records)

    assert without(-1) == (18, [])
    for number in range(12, 16):
        _, found = without(number)
        text = "; ".join(map(str, found))
        assert re.search(r"sum_fwd_f32 \(stream 0\) reads 'c[12]'", text), f"wait {number}: {text}"
        assert re.search(r"\w+_fwd_f32 \(stream [12]\) writes '[ac][12]'", text), f"wait {number}: {text}"
        assert "of sim:0 are touched in no fixed order" in text


def test_memory_that_is_reused_too_early_is_found(monkeypatch: Any) -> None:
    assert not find_races(branches_on_streams(monkeypatch))

    def in_order_of_issue(schedule: Any, positions: Any) -> Any:
        return np.array([[p - 1] * len(schedule.lanes) for p in positions])

    monkeypatch.setattr(memory_plan, "_clocks_before", in_order_of_issue)
    found = find_races(branches_on_streams(monkeypatch))
    assert found
    assert all("in no fixed order" in str(race) for race in found)


def test_what_the_host_waits_for_is_an_order() -> None:
    sim = Sim()
    one, two = sim.backend.new_stream(), sim.backend.new_stream()
    x, y = sim.put(np.zeros(8, "float32"), "x"), sim.put(np.zeros(8, "float32"), "y")

    def races(*between: Any) -> list[Race]:
        sim.backend.synchronize()
        work = sim.backend.record_work()
        sim.backend.fill(x, 1, one)
        for call in between:
            call()
        sim.backend.copy(y, x, two)
        sim.backend.synchronize()
        assert sim.backend.record_work(on=False) is work
        return find_races(recording.as_records(work, "sim:0"))

    (race,) = races()
    assert "fill of 'x' (stream 1) writes 'x'" in str(race)
    assert "copy of 'x' to 'y' (stream 2) reads 'x'" in str(race)
    assert not races(one.synchronize)
    assert not races(lambda: one.record().synchronize())
    assert not races(lambda: two.wait(one.record()))
    assert not races(lambda: sim.backend.copy_out(np.empty(8, "float32"), x, one))
    assert races(two.synchronize)
    assert races(one.record)
    before = one.record()
    assert races(lambda: two.wait(before))


def test_what_kernels_reach_through_tables_of_addresses_is_recorded() -> None:
    sim = Sim()
    side = sim.backend.new_stream()
    tensors = [sim.put(np.ones(size, "float32"), f"w{size}") for size in (5, 7)]
    packed = [sim.put(np.zeros(12, "float32"), f"packed{i}") for i in range(2)]
    factor = sim.put(np.full(1, 2, "float32"), "factor")
    given = TensorList(tensors)

    def on(stream: Any) -> Any:
        return KernelContext(Operator.__new__(Operator), backend=sim.backend, stream=stream)

    def races(*launches: Any) -> list[Race]:
        sim.backend.synchronize()
        work = sim.backend.record_work()
        for launch in launches:
            launch()
        sim.backend.synchronize()
        sim.backend.record_work(on=False)
        return find_races(recording.as_records(work, "sim:0"))

    main = on(sim.backend.stream)
    packs = [given.pack(context, buffer) for context, buffer in zip((main, on(side)), packed, strict=True)]
    assert not races(*packs)
    found = races(packs[0], given.scale(on(side), factor))
    assert sorted(race.first_access.name for race in found) == ["w5", "w7"]
    assert not races(packs[0], given.scale(main, factor))
    finite = sim.put(np.ones(1, "int32"), "finite")
    found = races(packs[0], given.unscale(on(side), factor, finite))
    assert sorted(race.first_access.name for race in found) == ["w5", "w7"]


def test_reports_of_errors_are_no_races() -> None:
    accesses = [Access("sim:0", 0, 32, True, "errors", communal) for communal in (True, True, False)]
    records = [Record(f"stream {i}", "report", (), (access,)) for i, access in enumerate(accesses)]
    assert not find_races(records[:2])
    assert len(find_races(records)) == 2, "only among themselves"


def test_only_the_simulated_device_records() -> None:
    ws = gpunet.Workspace("cpu")
    ws.feed("x", np.ones(3, np.float32))
    ws.create(NetDef(name="n", op=[make_operator("Relu", ["x"], ["y"])]))
    with pytest.raises(
        DeviceError, match="what runs on cpu cannot be recorded, wanted a simulated device, sim:0"
    ):
        record_run(ws, "n")


def test_the_command_checks_recorded_runs(monkeypatch: Any) -> None:
    arguments = ["check-races", "zoo:mlp", "--recorded", "--engine", "async_scheduling", "--streams", "3"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "pieces of work in 3 runs on 4 streams" in result.output, "one of them is for copies"
    assert result.output.endswith("waits: no two touch the same bytes in no fixed order\n")
    monkeypatch.setattr(streams.SimStream, "wait", lambda self, event: None)
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 1
    assert "are touched in no fixed order" in result.output
