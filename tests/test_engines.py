"""Engines, memory plans and schedules: equal results, no races, errors that win, memory near its lower
bound.
"""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import gpunet
from gpunet.cores import BUSY_LANES
from gpunet.devices import CPU
from gpunet.engines import Step, _may_help, _Run
from gpunet.errors import BlobError, KernelError, NetError
from gpunet.memory_plan import plan
from gpunet.observers import observe
from gpunet.passes.pipeline import PASSES
from gpunet.proto import NetDef, OperatorDef
from gpunet.races import find_races
from gpunet.records import check_races, records_of
from gpunet.schedule import Lane
from gpunet.schema import lookup
from tests.nets import op

KINDS = ["Relu", "Tanh", "Sigmoid", "Add", "Mul", "Sum", "Scale"]
KINDS += ["inplace", "again", "cut", "join", "pack", "flat"]


def packed(name: str, first: str, second: str, shape: list[int], *, late: bool) -> list[OperatorDef]:
    """Two tensors on their way into a bucket and out of it; ``late``: the bucket is read behind that."""
    a, b, p = f"{name}a", f"{name}b", f"{name}p"
    ops = [
        op("ConstantFill", "", f"{name}f", shape=[1], value=0.5),
        op("Sigmoid", first, a),
        op("Tanh", second, b),
        op("PackBucket", f"{name}f {a} {b}", p),
        op("Relu", p, p),
        op("UnpackBucket", f"{p} {a} {b}", f"{a} {b}"),
        op("Tanh", b, b),
    ]
    if not late:
        return [*ops, op("Add", f"{a} {b}", name)]
    return [
        *ops,
        op("Split", p, f"{name}q {name}r", axis=0),
        op("Reshape", f"{name}q", f"{name}v {name}o", shape=shape),
        op("Sum", f"{a} {b} {name}v", name),
    ]


def test_what_breaks_by_an_interrupt_is_the_interrupt() -> None:
    run = _Run(frozenset())
    try:
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()
    except RuntimeError as error:
        run.fail(error, None)
    assert run.failure is not None
    assert isinstance(run.failure.error, KeyboardInterrupt)


def test_an_event_that_wakes_nobody_ends_a_run_and_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that an interrupt has left in the middle: it is set, and raises."""
    workspace = gpunet.Workspace("cpu")
    workspace.feed("x", np.ones(3, np.float32))
    ops = [op("Scale", "x", "a"), op("Scale", "x", "b"), op("Sum", "a b", "y")]
    workspace.create(NetDef(name="net", op=ops, external_input=["x"]), engine="async_scheduling", workers=2)
    workspace.run("net")
    dead: list[object] = []
    monkeypatch.setattr(threading, "excepthook", dead.append)

    class Event(threading.Event):
        broken = True

        def set(self) -> None:
            if Event.broken and threading.current_thread() is not threading.main_thread():
                Event.broken = False
                self._flag = True
                raise RuntimeError("release unlocked lock")
            super().set()

    monkeypatch.setattr(threading, "Event", Event)
    with pytest.raises(RuntimeError, match="release unlocked lock"):
        workspace.run("net")
    assert not dead
    workspace.run("net")


@st.composite
def nets(draw: st.DrawFn) -> NetDef:
    """Random graphs of cheap operators on tensors of a random shape, one of the net's arguments: shared
    inputs, several uses, in-place writes, views, tensors that are joined and packed, blobs written again.
    """
    blobs = ["x0", "x1", "x2"]
    shape = [draw(st.sampled_from([2, 4, 10])), draw(st.sampled_from([1, 5, 32, 64]))]
    net = NetDef(name="random", external_input=blobs)
    net.arg.add(name="shape", ints=shape)
    pick = lambda: draw(st.sampled_from(blobs))  # noqa: E731
    for number in range(draw(st.integers(1, 24))):
        kind = draw(st.sampled_from(KINDS))
        name = f"y{number}"
        if kind == "inplace":
            target = pick()
            net.op.append(op("Tanh", target, target))
            continue
        if kind == "again":
            net.op.append(op("Add", f"{pick()} {pick()}", f"{name}"))
            net.op.append(op("Relu", name, name))
        elif kind == "cut":
            # Two parts, of which one is written in place, and joined again the other way round.
            net.op.append(op("Split", pick(), f"{name}a {name}b", axis=0))
            part = draw(st.sampled_from("ab"))
            net.op.append(op("Tanh", f"{name}{part}", f"{name}{part}"))
            net.op.append(op("Concat", f"{name}b {name}a", f"{name} {name}s", axis=0))
        elif kind == "join":
            net.op.append(op("Sigmoid", pick(), f"{name}a"))
            net.op.append(op("Relu", pick(), f"{name}b"))
            net.op.append(op("Concat", f"{name}a {name}b", f"{name}j {name}s", axis=0))
            net.op.append(op(draw(st.sampled_from(["Tanh", "Scale"])), f"{name}j", f"{name}k"))
            net.op.append(op("Split", f"{name}k", f"{name} {name}r", axis=0))
        elif kind == "pack":
            net.op.extend(packed(name, pick(), pick(), shape, late=draw(st.booleans())))
        elif kind == "flat":
            net.op.append(op("Reshape", pick(), f"{name}v {name}o", shape=[-1]))
            net.op.append(op("Sigmoid", f"{name}v", f"{name}w"))
            net.op.append(op("Reshape", f"{name}w", f"{name} {name}n", shape=shape))
        elif kind in ("Add", "Mul"):
            net.op.append(op(kind, f"{pick()} {pick()}", name))
        elif kind == "Sum":
            net.op.append(op(kind, " ".join(pick() for _ in range(draw(st.integers(1, 4)))), name))
        elif kind == "Scale":
            net.op.append(op(kind, pick(), name, scale=0.5))
        else:
            net.op.append(op(kind, pick(), name))
        blobs.append(name)
    net.external_output.extend(
        draw(st.lists(st.sampled_from(blobs[3:] or ["x0"]), min_size=1, max_size=3, unique=True))
    )
    return net


def feed_inputs(ws: gpunet.Workspace, net: NetDef) -> None:
    for i in range(3):
        ws.feed(f"x{i}", np.random.default_rng(i).normal(size=[*net.arg[0].ints]).astype(np.float32))


def outcome(net: NetDef, **options) -> tuple[dict[str, np.ndarray], gpunet.Workspace]:
    ws = gpunet.Workspace("cpu")
    feed_inputs(ws, net)
    ws.create(net, **options)
    ws.run(net.name, 2)
    names = [*net.external_output, "x0", "x1", "x2"]
    return {name: ws.fetch(name) for name in names}, ws


OPTIONAL = tuple(p.name for p in PASSES if p.optional)


@hypothesis.given(nets())
@hypothesis.settings(max_examples=25)
def test_every_engine_gives_the_same_bits(net):
    want, _ = outcome(net, keep=[o for d in net.op for o in d.output], without=["memory_plan", *OPTIONAL])
    for engine in ("simple", "async_scheduling"):
        for workers in (1, 3):
            for without in ((), ("memory_plan",), OPTIONAL):
                got, ws = outcome(net, engine=engine, workers=workers, without=without)
                for name, value in want.items():
                    np.testing.assert_array_equal(
                        got[name], value, err_msg=f"{name} with {engine} {workers} {without}"
                    )
                assert not check_races(ws.program(net.name))


def branches(count: int = 4) -> NetDef:
    ops = []
    for b in range(count):
        ops += [
            op("Scale", "x", f"a{b}", scale=b + 1.0),
            op("Relu", f"a{b}", f"b{b}"),
            op("Sigmoid", f"b{b}", f"c{b}"),
        ]
    ops.append(op("Sum", " ".join(f"c{b}" for b in range(count)), "y"))
    return NetDef(name="branches", op=ops, external_input=["x"], external_output=["y"])


def ran(net: NetDef, shape: tuple[int, ...] = (64, 1024), **options) -> gpunet.Workspace:
    ws = gpunet.Workspace("cpu")
    ws.feed("x", np.ones(shape, dtype=np.float32))
    ws.create(net, **options)
    ws.run(net.name)
    return ws


def test_branches_run_in_lanes_of_their_own():
    (segment,) = ran(branches(), engine="async_scheduling", workers=2).program("branches").segments()
    assert len(segment.compiled.schedule.lanes) == 2
    waits = sum(len(item.waits) for item in segment.compiled.schedule.items)
    assert 1 <= waits <= 4, "only the edges that cross lanes are waited for"


@pytest.mark.parametrize("engine", ["async_scheduling", "graph"])
def test_without_a_schedule_there_is_one_lane(engine):
    for without, lanes in (((), 4), (["schedule"], 1)):
        ws = ran(branches(), (64, 1024), engine=engine, workers=4, without=without)
        assert len(ws.program("branches").segments()[0].compiled.schedule.lanes) == lanes


def test_a_long_branch_has_a_lane_of_its_own():
    """Two short branches, and then one as long as both: it shares its lane with neither."""
    ops, ends = [], []
    for branch, depth in enumerate([3, 3, 6]):
        names = ["x", *(f"b{branch}d{d}" for d in range(depth))]
        ops += [op("Scale", a, b, scale=branch + 2.0) for a, b in itertools.pairwise(names)]
        ends.append(names[-1])
    ops.append(op("Sum", " ".join(ends), "y"))
    net = NetDef(name="uneven", op=ops, external_input=["x"], external_output=["y"])
    ws = ran(net, engine="async_scheduling", workers=2, without=["in_place"])
    (segment,) = ws.program("uneven").segments()
    items = segment.compiled.schedule.items[:-1]
    counts = [sum(item.lane.number == lane for item in items) for lane in range(2)]
    assert sorted(counts) == [6, 6]


def test_busy_lanes_are_counted_while_they_run():
    """Two lanes are at work at once; afterwards none is, even if an operator fails."""
    ws = ran(branches(), engine="async_scheduling", workers=2)
    seen = []
    with observe(ws, "branches", after=lambda call: seen.append(BUSY_LANES.others)):
        ws.run("branches")
    assert max(seen) <= 1
    assert BUSY_LANES.others == 0
    net = branches()
    net.op.insert(2, op("LabelCrossEntropy", "x label", "l"))
    net.external_input.append("label")
    net.external_output.append("l")
    ws.feed("x", np.full((4, 4), 0.25, dtype=np.float32))
    ws.feed("label", np.array([0, 1, 2, 99], dtype=np.int32))
    ws.create(net, engine="dag", workers=3, overwrite=True)
    with pytest.raises(KernelError, match="99"):
        ws.run(net.name)
    assert BUSY_LANES._busy == 0


def test_lanes_of_collectives_and_of_gpus_take_no_pieces_of_others():
    """They would be late for what they wait for."""

    def step(type: str, stream=None) -> Step:
        node = SimpleNamespace(op=SimpleNamespace(schema=lookup(type)))
        return Step(print, (), node, Lane(CPU), stream=stream)

    assert _may_help(step("Relu"))
    assert not _may_help(step("Allreduce"))
    assert not _may_help(step("Relu", stream="stream"))


def test_a_missing_wait_is_a_race():
    (segment,) = ran(branches(), engine="dag", workers=2).program("branches").segments()
    good = records_of(segment)
    assert not find_races(good)
    waiting = max(range(len(good)), key=lambda i: len(good[i].waits))
    broken = [*good]
    broken[waiting] = type(good[waiting])(good[waiting].lane, good[waiting].label, (), good[waiting].accesses)
    found = find_races(broken)
    assert found
    assert any("Sum" in str(race) and "no fixed order" in str(race) for race in found)


def test_memory_that_is_reused_too_early_is_a_race():
    """Two values that are live at once, put in the same place: seen with one lane's schedule used for
    another's plan.
    """
    ws = ran(branches(), engine="async_scheduling", workers=2, without=["in_place"])
    (segment,) = ws.program("branches").segments()
    compiled = segment.compiled
    offsets = compiled.memory.offsets
    biggest = sorted(offsets, key=lambda s: offsets[s])
    records = records_of(segment)
    places = {v: s for v, s in compiled.places.items() if s.internal}
    first, last = biggest[0], biggest[-1]
    shift = offsets[last] - offsets[first]
    moved = {v.name for v, s in places.items() if s is last}
    assert shift > 0
    assert moved
    broken = [
        type(r)(
            r.lane,
            r.label,
            r.waits,
            tuple(
                type(a)(a.space, a.start - shift, a.stop - shift, a.write, a.name) if a.name in moved else a
                for a in r.accesses
            ),
        )
        for r in records
    ]
    assert find_races(broken)


def test_planned_memory_is_near_its_lower_bound():
    ops = [op("Relu", f"x{i}" if i else "x", f"x{i + 1}") for i in range(20)]
    net = NetDef(name="chain", op=ops, external_input=["x"], external_output=["x20"])
    (segment,) = ran(net, without=["in_place"]).program("chain").segments()
    memory = segment.compiled.memory
    (device,) = memory.arenas
    assert memory.unplanned[device] == 19 * 64 * 1024 * 4
    assert memory.arenas[device] == memory.lower_bound[device] == 2 * 64 * 1024 * 4
    unshared = plan(segment.compiled.schedule, segment.compiled.places, share=False)
    assert unshared.arenas[device] == unshared.unplanned[device]


def test_blobs_that_are_not_kept_say_so():
    ws = ran(branches())
    with pytest.raises(BlobError, match=r"blob 'a0' is internal to net 'branches'.*keep=\['a0'\]"):
        ws.fetch("a0")
    ws = ran(branches(), keep=["y", "a0"])
    assert ws.fetch("a0").shape == (64, 1024)


def test_the_first_error_wins_and_leaves_the_workspace_usable():
    net = branches()
    net.op.insert(2, op("LabelCrossEntropy", "x label", "l"))
    net.external_input.append("label")
    net.external_output.append("l")
    ws = gpunet.Workspace("cpu")
    ws.feed("x", np.full((4, 4), 0.25, dtype=np.float32))
    ws.create(net, engine="dag", workers=3)
    ws.feed("label", np.array([0, 1, 2, 99], dtype=np.int32))
    for _ in range(3):
        with pytest.raises(KernelError, match=r"\[LabelCrossEntropy\] op 2 'l' in net 'branches'.*99"):
            ws.run(net.name)
    ws.feed("label", np.array([0, 1, 2, 3], dtype=np.int32))
    ws.run(net.name)
    assert ws.fetch("y").shape == (4, 4)


def test_num_workers_and_type_of_the_net_choose(monkeypatch):
    net = branches()
    monkeypatch.setattr("gpunet.options.usable_cores", lambda: {3, 4, 8})
    assert ran(net, engine="dag").program("branches").options.workers == 3
    net.type, net.num_workers = "dag", 3
    program = ran(net).program("branches")
    assert (program.options.engine, program.options.workers) == ("async_scheduling", 3)
    with pytest.raises(NetError, match=r"cannot switch off pass 'nope', wanted one of .*memory_plan"):
        ran(net, without=["nope"])
    with pytest.raises(NetError, match="workers is -1"):
        ran(net, workers=-1)


@pytest.mark.parametrize("engine", ["simple", "async_scheduling"])
def test_shapes_change_and_edge_sizes_run(engine):
    ws = gpunet.Workspace("cpu")
    ws.create(branches(), engine=engine, workers=2)
    for shape in [(4, 4), (0, 3), (7, 9), (4, 4)]:
        ws.feed("x", np.ones(shape, dtype=np.float32))
        ws.run("branches")
        assert ws.fetch("y").shape == shape
    ws.create(NetDef(name="empty"), engine=engine)
    ws.run("empty")


@pytest.mark.parametrize("engine", ["simple", "async_scheduling"])
def test_ten_thousand_operators(engine):
    ops = [op("Relu", f"x{i}" if i else "x", f"x{i + 1}") for i in range(10_000)]
    net = NetDef(name="long", op=ops, external_input=["x"], external_output=["x10000"])
    assert ran(net, (2,), engine=engine, workers=2).fetch("x10000").tolist() == [1, 1]


def test_training_with_lanes_equals_training_without():
    def losses(**options) -> list[float]:
        model = gpunet.zoo.build("lenet", (1, 8, 8), 10) if hasattr(gpunet.zoo, "build") else None
        model.add_gradients("loss")
        gpunet.optimizers.SGD(0.05, momentum=0.9).apply(model)
        ws = gpunet.Workspace("cpu", seed=1)
        ws.run_once(model.init_net)
        rng = np.random.default_rng(0)
        ws.feed("data", rng.normal(size=(16, 1, 8, 8)).astype(np.float32))
        ws.feed("label", rng.integers(0, 10, 16).astype(np.int32))
        ws.create(model.net, **options)
        result = []
        for _ in range(4):
            ws.run(model.net)
            result.append(float(ws.fetch("loss")))
        assert not check_races(ws.program(model.net.name))
        return result

    want = losses()
    assert losses(keep=["loss"]) == want
    assert losses(engine="async_scheduling", workers=3, keep=["loss"]) == want


def test_control_inputs_order_operators():
    """Two operators that share no blob, in two lanes: a control input makes the second wait."""
    ops = [op("Scale", "x", "a", scale=2.0), op("Scale", "x", "b", scale=3.0), op("Sum", "a b", "y")]
    ops[1].control_input.append("a")
    net = NetDef(name="n", op=ops, external_input=["x"], external_output=["y"])
    (segment,) = ran(net, engine="dag", workers=2).program("n").segments()
    assert segment.compiled.schedule.ordered(0, 1)
    ops[1].ClearField("control_input")
    net = NetDef(name="n", op=ops, external_input=["x"], external_output=["y"])
    (segment,) = ran(net, engine="dag", workers=2).program("n").segments()
    assert not segment.compiled.schedule.ordered(0, 1)
