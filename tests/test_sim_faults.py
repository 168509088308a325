"""Planted faults of kernels are found on the simulated device and named."""

import re
from typing import Any

import numpy as np
import pytest

from gpunet.buffers import Buffer
from gpunet.cuda_kernels import launch
from gpunet.errors import GpunetError, KernelError
from tests.sim_kernels import FOLDER, Sim, needs_compiler

pytestmark = needs_compiler


def caught(sim: Sim, *arguments: Any, **options: Any) -> str:
    """The message of a launch that fails; the device works afterwards."""
    with pytest.raises(KernelError) as found:
        sim.run(*arguments, **options)
    y = sim.put(np.zeros(256, "float32"), "y")
    sim.run("rotate", (sim.put(np.arange(256, dtype="float32"), "x"), y), (1, 256))
    np.testing.assert_array_equal(y.numpy(), np.roll(np.arange(256), -1))
    return str(found.value)


@pytest.mark.parametrize("count", [1, 8, 1000, 1023, 4096])
@pytest.mark.parametrize("index", ["-1", "n", "n+100", "-100000", "3*n+50000", "-(10**12)"])
def test_write_out_of_range(count: int, index: str) -> None:
    sim = Sim()
    others = [sim.put(np.zeros(4096, "float32"), f"other{i}") for i in range(4)]
    y = sim.put(np.zeros(count, "float32"), "fc1")
    at = eval(index, {"n": count})
    message = caught(sim, "write_at", (y, at, 37), (3, 16))
    assert message.startswith("kernel 'write_at' (sim_indexing.cu)")
    assert (
        f"wrote element {at} of argument 'y', buffer 'fc1' (float32 {count}): valid are 0 to {count - 1}"
        in message
    )
    assert "block (2, 0, 0), thread (5, 0, 0)" in message or "found after the launch" in message
    assert all((other.numpy() == 0).all() for other in others)


@pytest.mark.parametrize(
    ("count", "index"), [(4, 4), (1024, 1024), (1024, -1), (1000, 10**6), (1000, -(10**5))]
)
def test_read_out_of_range(count: int, index: int) -> None:
    sim = Sim()
    x, y = sim.put(np.zeros(count, "float32"), "data"), sim.put(np.zeros(4, "float32"), "y")
    message = caught(sim, "read_at", (x, y, index))
    expected = f"block (0, 0, 0), thread (0, 0, 0): read element {index} of argument 'x', buffer 'data'"
    assert expected in message


@pytest.mark.parametrize(("count", "index"), [(5, 5), (3, 3), (8, -1)])
def test_read_close_to_a_block_is_not_a_number(count: int, index: int) -> None:
    sim = Sim()
    x, y = sim.put(np.zeros(count, "float32"), "x"), sim.put(np.zeros(4, "float32"), "y")
    sim.run("read_at", (x, y, index))
    assert np.isnan(y.numpy()[0])


def test_fresh_memory_is_not_a_number() -> None:
    sim = Sim()
    for dtype in ("float16", "float32", "float64"):
        memory = sim.backend.allocate(256)
        assert np.isnan(Buffer(sim.backend, memory, (4,), dtype).numpy()).all()


def test_null_pointer() -> None:
    message = caught(Sim(), "write_at", (None, 5, 0))
    assert "wrote byte 20 behind a null pointer (null are the arguments 'y')" in message


def test_freed_buffer() -> None:
    sim = Sim()
    y = sim.put(np.zeros(10, "float32"), "conv1_w")
    run = sim.prepare("write_at", (y, 0, 0))
    run()
    y.memory._release()
    # What was queued before it was freed may use it; what is queued afterwards must not.
    sim.backend.stream.synchronize()
    run()
    freed = (
        r"kernel 'write_at' \(sim_indexing.cu\), block \(0, 0, 0\), thread \(0, 0, 0\): "
        r"wrote freed buffer 'conv1_w' \(float32 10\), argument 'y'"
    )
    with pytest.raises(KernelError, match=freed):
        sim.backend.stream.synchronize()
    with pytest.raises(KernelError, match=r"buffer 'conv1_w'.* is freed"):
        y.numpy()
    sim.backend.fill(y, 0, sim.backend.stream)
    with pytest.raises(KernelError, match=r"fill: buffer 'conv1_w'.* is freed"):
        sim.backend.stream.synchronize()


def test_overwritten_end_of_a_block_is_found_when_it_is_freed() -> None:
    sim = Sim()
    y = sim.put(np.zeros(5, "float32"), "y")

    def overwrite(array: Any) -> None:
        np.lib.stride_tricks.as_strided(array, (6,), (4,))[5] = 1

    sim.backend.call_host(overwrite, [y], sim.backend.stream)
    sim.backend.stream.synchronize()
    y.memory._release()
    with pytest.raises(GpunetError, match=r"memory behind a block .* was overwritten"):
        sim.backend.stream.synchronize()


def test_barrier_that_part_of_a_block_reaches() -> None:
    sim = Sim()
    y = sim.put(np.zeros(64, "float32"), "y")
    message = caught(sim, "partial", (y, 40), (2, 64))
    lines = (FOLDER / "sim_barriers.cu").read_text().splitlines()
    kernel = next(i for i, text in enumerate(lines) if "void partial" in text)
    line = next(i for i, text in enumerate(lines, 1) if i > kernel and "__syncthreads" in text)
    assert message.startswith(
        "kernel 'partial' (sim_barriers.cu), block (0, 0, 0): a barrier that not all threads reach"
    )
    assert re.search(
        rf"threads 0-39 wait at __syncthreads \(\S*sim_barriers.cu:{line}\); threads 40-63 have exited",
        message,
    )
    sim.run("partial", (y, 64), (1, 64))
    assert (y.numpy() == 1).all()


def test_barriers_in_two_branches() -> None:
    sim = Sim()
    y = sim.put(np.zeros(64, "float32"), "y")
    message = caught(sim, "divergent", (y, 32), (1, 64))
    assert re.search(r"threads 0-31 wait at __syncthreads .*; threads 32-63 wait at __syncthreads", message)
    sim.run("divergent", (y, 64), (1, 64))


def test_warp_operation_that_cannot_end() -> None:
    sim = Sim()
    message = caught(sim, "stuck", (sim.put(np.zeros(1, "float32"), "y"),), (1, 32))
    assert "threads 0-15 wait at __syncthreads" in message
    assert re.search(r"threads 16-31 wait at __shfl_sync \(\S*sim_warps.cu:\d+\)", message)


def test_lane_outside_of_its_mask() -> None:
    sim = Sim()
    message = caught(sim, "left_out", (sim.put(np.zeros(1, "float32"), "y"),), (1, 32))
    assert "__shfl_sync with mask 0x0000ffff, which leaves out the calling lane 16" in message


@pytest.mark.parametrize("name", ["rotate_racing", "count_racing"])
def test_missing_barrier(name: str) -> None:
    sim = Sim(check_order=True)
    y = sim.put(np.zeros(256, "float32" if name == "rotate_racing" else "int32"), "out")
    x = (sim.put(np.arange(256, dtype="float32"), "x"),) if name == "rotate_racing" else ()
    message = caught(sim, name, (*x, y), (1, 256))
    assert re.match(
        rf"kernel '{name}' \(sim_barriers.cu\): element \d+ of argument 'y', buffer 'out' \(\w+ 256\)",
        message,
    )
    assert message.endswith("a barrier or an atomic is missing")


def test_without_check_order_the_race_is_only_a_wrong_result() -> None:
    sim = Sim()
    y = sim.put(np.zeros(256, "float32"), "out")
    sim.run("rotate_racing", (sim.put(np.arange(256, dtype="float32"), "x"), y), (1, 256))
    assert np.isnan(y.numpy()).any()


@pytest.mark.parametrize(
    ("index", "found"), [(8, "byte 32 of"), (10**5, "byte 400000 of"), (-1, "outside of")]
)
def test_shared_memory_out_of_range(index: int, found: str) -> None:
    sim = Sim()
    y = sim.put(np.zeros(1, "float32"), "y")
    message = caught(sim, "shared_at", (y, index))
    assert found in message
    assert "the shared variable 'tile' of 32 bytes" in message
    sim.run("shared_at", (y, 7))


@pytest.mark.parametrize("index", [4, 5, -1, 1000])
def test_dynamic_shared_memory_out_of_range(index: int) -> None:
    sim = Sim()
    y = sim.put(np.zeros(1, "float32"), "y")
    assert "of its 16 bytes of dynamic shared memory" in caught(sim, "dynamic_at", (y, index), shared=16)


def test_division_by_zero_assertion_and_stack() -> None:
    sim = Sim()
    y = sim.put(np.ones(1, "int32"), "y")
    assert "thread (0, 0, 0): divided an integer by zero" in caught(sim, "divide", (y, 5, 0))
    one = sim.put(np.ones(1, "float32"), "y")
    assert re.search(
        r"assertion failed: y\[0\] == 0.0f \(\S*sim_indexing.cu:\d+\)", caught(sim, "stop", (one,))
    )
    assert "overflowed its stack" in caught(sim, "recurse", (one, 1000))


@pytest.mark.parametrize(
    ("grid", "shared", "found"),
    [
        ((1, 1025), 0, "1025x1x1 threads in a block, wanted 1 to 1024"),
        ((0, 1), 0, "a grid of 0x1x1 blocks"),
        ((1, 1), 1 << 20, "1048576 bytes of dynamic shared memory, wanted at most 49152"),
    ],
)
def test_impossible_launch(grid: tuple[int, int], shared: int, found: str) -> None:
    sim = Sim()
    y = sim.put(np.zeros(1, "float32"), "y")
    assert found in caught(sim, "write_at", (y, 0, 0), grid, shared=shared)


def test_the_first_error_is_raised_once() -> None:
    sim = Sim()
    y = sim.put(np.zeros(4, "float32"), "y")
    sim.prepare("write_at", (y, 100, 0))()
    sim.prepare("write_at", (y, 200, 0))()
    sim.prepare("write_at", (y, 3, 0))()
    with pytest.raises(KernelError, match="element 100 of"):
        sim.backend.stream.synchronize()
    sim.backend.stream.synchronize()
    np.testing.assert_array_equal(y.numpy(), [0, 0, 0, 1])


def test_wrong_arguments_are_refused_before_the_launch() -> None:
    sim = Sim()
    y = sim.put(np.zeros(4, "float32"), "y")
    with pytest.raises(KernelError, match="'write_at' got 2 arguments, wanted 3"):
        sim.prepare("write_at", (y, 0))
    with pytest.raises(GpunetError, match="holds int32, wanted float32"):
        sim.prepare("write_at", (sim.put(np.zeros(4, "int32"), "y"), 0, 0))


def test_grids_of_launch_helpers_cover_every_element() -> None:
    sim = Sim()
    for count in (1, 255, 256, 257, 100_000):
        x = sim.put(np.ones(count, "float16"), "x")
        y = sim.put(np.zeros(count, "float32"), "y")
        sim.run("half_to_float", (x, y, count), launch.elementwise(count))
        assert (y.numpy() == 1).all()
