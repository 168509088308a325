"""The race checker alone: against a comparison of all pairs, and with very many records."""

import itertools
import time
from collections.abc import Sequence

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import gpunet
from gpunet.definitions import make_operator
from gpunet.proto import NetDef
from gpunet.races import Access, Record, find_races
from gpunet.records import check_races


@st.composite
def recordings(draw: st.DrawFn) -> list[Record]:
    """A few records in a few lanes, with waits, on few bytes of two memories."""
    records: list[Record] = []
    for index in range(draw(st.integers(0, 14))):
        accesses = []
        for number in range(draw(st.integers(0, 3))):
            start, size = draw(st.integers(0, 11)), draw(st.integers(0, 5))
            space, write, communal = draw(st.sampled_from("ab")), draw(st.booleans()), draw(st.booleans())
            accesses.append(Access(space, start, start + size, write, f"blob{number}", communal))
        waits = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        lane = draw(st.sampled_from("xyz"))
        records.append(Record(lane, f"op{index}", tuple(sorted(waits)), tuple(accesses)))
    return records


def ordered_pairs(records: Sequence[Record]) -> set[tuple[int, int]]:
    """Pairs of positions of which the first has ended when the second one begins."""
    before: list[set[int]] = []
    for index, record in enumerate(records):
        direct = {*record.waits, *(i for i in range(index) if records[i].lane == record.lane)}
        before.append(direct.union(*(before[i] for i in direct)))
    return {(i, index) for index, known in enumerate(before) for i in known}


def conflict(a: Access, b: Access) -> bool:
    meets = a.space == b.space and max(a.start, b.start) < min(a.stop, b.stop)
    return meets and (a.write or b.write) and not (a.communal and b.communal)


@hypothesis.given(recordings())
@hypothesis.settings(max_examples=300, deadline=None)
def test_the_pairs_are_those_of_comparing_all(records: list[Record]) -> None:
    ordered = ordered_pairs(records)
    wanted = {
        (records[i].label, records[j].label, a.name, b.name)
        for i, j in itertools.combinations(range(len(records)), 2)
        for a, b in itertools.product(records[i].accesses, records[j].accesses)
        if (i, j) not in ordered and conflict(a, b)
    }
    found = [
        (r.first.label, r.second.label, r.first_access.name, r.second_access.name)
        for r in find_races(records)
    ]
    assert len(found) == len(set(found))
    assert set(found) == wanted


def test_a_wait_for_what_comes_later_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"record 0 \(op\) waits for record 0, wanted an earlier one"):
        find_races([Record("x", "op", (0,), ())])


def chain(length: int) -> list[Record]:
    """Steps of two lanes in turn; each waits for the one before, and reads and writes the same bytes."""
    accesses = (Access("cpu", 0, 64, write=False), Access("cpu", 0, 64, write=True))
    return [Record("xy"[i % 2], f"op{i}", (i - 1,) if i else (), accesses) for i in range(length)]


def seconds(length: int) -> float:
    records = chain(length)
    begin = time.process_time()
    assert not find_races(records)
    return time.process_time() - begin


def test_time_grows_with_the_records_not_with_their_pairs() -> None:
    # Ten times the records in their pairs would be a hundred times the work.
    assert seconds(20_000) < 40 * max(seconds(2_000), 1e-3)


def test_one_race_among_ten_thousand_records_is_found() -> None:
    records = chain(10_000)
    stray = Access("cpu", 60, 80, write=False, name="stray")
    records.append(Record("z", "late", (9_998,), (stray,)))
    (race,) = find_races(records)
    assert (race.first.label, race.second.label) == ("op9999", "late")


def test_a_net_of_ten_thousand_operators_is_proven() -> None:
    net = NetDef(name="long", external_input=["x"], external_output=["y0"])
    net.op.extend(
        make_operator("Relu", [f"y{i % 7}" if i else "x"], [f"y{(i + 1) % 7}"]) for i in range(10_000)
    )
    workspace = gpunet.Workspace("cpu")
    workspace.feed("x", np.ones((2, 3), np.float32))
    name = workspace.create(net, engine="async_scheduling", workers=2, without=["fusion"])
    workspace.program(name).prepare()
    assert not check_races(workspace.program(name))
