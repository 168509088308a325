"""GPUNET_SIM_BOUNDS=1: every access of a kernel is checked against the buffers of its launch."""

from __future__ import annotations

import numpy as np
import pytest

from gpunet.buffers import Buffer
from gpunet.errors import KernelError
from tests.sim_kernels import Sim, needs_compiler

pytestmark = needs_compiler


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Sim:
    monkeypatch.setenv("GPUNET_SIM_BOUNDS", "1")
    return Sim()


def arena(sim: Sim, count: int, names: str) -> list[Buffer]:
    """Buffers of ``count`` floats side by side in one block of memory."""
    memory = sim.backend.allocate(4 * count * len(names))
    buffers = [
        Buffer(sim.backend, memory, (count,), "float32", 4 * count * i, name) for i, name in enumerate(names)
    ]
    for buffer in buffers:
        sim.backend.fill(buffer, 0, sim.backend.stream)
    return buffers


def test_correct_kernels_pass(sim: Sim) -> None:
    _, x, _, y, _ = arena(sim, 8, "axbyc")
    sim.backend.copy_in(x, np.arange(8, dtype="float32"), sim.backend.stream)
    sim.run("copy_at", (x, y, 7, 0), (1, 4))
    assert y.numpy()[0] == 7
    source = sim.put(np.ones(256, "float32"), "x")
    total = sim.put(np.zeros(1, "float32"), "total")
    sim.run("sums", (source, total), (1, 256))
    assert total.numpy()[0] == 256


@pytest.mark.parametrize(("index", "done"), [(8, "read"), (-1, "read"), (8, "wrote"), (-1, "wrote")])
def test_neighbours_in_one_block_of_memory(sim: Sim, index: int, done: str) -> None:
    _, x, _, y, _ = arena(sim, 8, "axbyc")
    read, write = (index, 0) if done == "read" else (0, index)
    with pytest.raises(KernelError) as caught:
        sim.run("copy_at", (x, y, read, write), (1, 4))
    name = "x" if done == "read" else "y"
    expected = (
        f"thread (0, 0, 0): {done} element {index} of argument '{name}', buffer '{name}' (float32 8): valid"
    )
    assert expected in str(caught.value)


@pytest.mark.parametrize(("count", "index"), [(5, -1), (5, 5), (7, 7)])
def test_reads_close_to_a_block(sim: Sim, count: int, index: int) -> None:
    x, y = sim.put(np.zeros(count, "float32"), "x"), sim.put(np.zeros(4, "float32"), "y")
    with pytest.raises(KernelError, match=rf"read element {index} of argument 'x'"):
        sim.run("copy_at", (x, y, index, 0), (1, 4))


def test_writes_to_const_arguments(sim: Sim) -> None:
    x, y = sim.put(np.zeros(4, "float32"), "x"), sim.put(np.zeros(4, "float32"), "y")
    with pytest.raises(KernelError, match=r"wrote element 2 of argument 'x', buffer 'x' .*, which is const"):
        sim.run("write_const", (x, y, 2))
    # In place: the same buffer as another argument that may be written.
    sim.run("write_const", (x, x, 2))


def test_tables_of_addresses_reach_other_blocks_that_are_not_freed(sim: Sim) -> None:
    x, y = sim.put(np.full(4, 3, "float32"), "x"), sim.put(np.zeros(4, "float32"), "y")
    table = sim.put(np.array([x.pointer], "uint64"), "table")
    sim.run("through_table", (table, y))
    assert y.numpy()[0] == 3
    x.memory._release()
    with pytest.raises(KernelError, match="read a freed block of 16 bytes"):
        sim.run("through_table", (table, y))
