"""Which cores ranks are bound to."""

from __future__ import annotations

import os

import pytest

from gpunet import distributed
from gpunet.discovery import Place
from gpunet.distributed import affinity
from gpunet.distributed.affinity import chosen_core
from gpunet.errors import DeviceError


def place(local_rank: int, local_size: int) -> Place:
    return Place("Hydra", local_rank, local_size, local_rank, local_size, "here")


@pytest.mark.parametrize(("ranks", "cores"), [(2, 2), (4, 2), (6, 2), (4, 4), (8, 4)])
def test_each_core_gets_as_many_ranks(ranks, cores):
    usable = frozenset(range(10, 10 + cores))
    chosen = [chosen_core(place(rank, ranks), usable) for rank in range(ranks)]
    assert all(chosen.count(core) == ranks // cores for core in usable)


@pytest.mark.parametrize(
    ("ranks", "cores"),
    [(1, 2), (1, 1), (3, 2), (2, 4), (6, 4)],
    ids=["alone", "alone on one", "uneven", "two cores each", "uneven, more"],
)
def test_ranks_are_left_to_the_system(ranks, cores):
    assert chosen_core(place(0, ranks), frozenset(range(cores))) is None


@pytest.mark.parametrize(("ranks", "usable", "cores"), [(2, 1, 2), (4, 2, 4)])
def test_ranks_stay_where_their_launcher_has_bound_them(ranks, usable, cores, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: frozenset(range(usable)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: pytest.fail("bound"), raising=False)
    monkeypatch.delenv(affinity.VARIABLE, raising=False)
    assert affinity.bind(place(0, ranks)) is None


def test_binding_is_undone(monkeypatch):
    allowed = {3, 5}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: frozenset(allowed), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)

    def allow(pid, cores):
        allowed.clear()
        allowed.update(cores)

    monkeypatch.setattr(os, "sched_setaffinity", allow, raising=False)
    monkeypatch.setenv(affinity.VARIABLE, "0")
    assert affinity.bind(place(1, 4)) is None
    monkeypatch.delenv(affinity.VARIABLE)
    before = affinity.bind(place(1, 4))
    assert allowed == {5}
    assert affinity.bind(place(1, 4)) is None, "it is bound"
    affinity.release(before)
    assert allowed == {3, 5}


def test_a_process_without_mpi_has_all_its_cores_again(monkeypatch):
    released = []
    monkeypatch.setattr(affinity, "bind", lambda place: frozenset({3, 5}))
    monkeypatch.setattr(affinity, "release", released.append)

    def missing():
        raise DeviceError("there is no MPI")

    monkeypatch.setattr("gpunet.distributed.mpi.MpiCommunicator", missing)
    with pytest.raises(DeviceError, match="there is no MPI"):
        distributed._make("auto", None, place(1, 4))
    assert released == [{3, 5}]
    assert distributed._cores is None
