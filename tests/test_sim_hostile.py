"""Kernels that misbehave end with an error that says what they did, and leave process and device usable."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest

from gpunet.cuda_kernels import sources
from gpunet.cuda_kernels.sim import toolchain
from gpunet.errors import DeviceError, KernelError
from tests.sim_kernels import Sim, declare, declared, needs_compiler

pytestmark = needs_compiler


def caught(sim: Sim, name: str, arguments: tuple[Any, ...], *more: Any, **options: Any) -> str:
    """The message of a launch that fails; the device works afterwards."""
    with pytest.raises(KernelError) as found:
        sim.run(name, arguments, *more, **options)
    y = sim.put(np.zeros(256, "float32"), "y")
    sim.run("rotate", (sim.put(np.arange(256, dtype="float32"), "x"), y), (1, 256))
    np.testing.assert_array_equal(y.numpy(), np.roll(np.arange(256), -1))
    return str(found.value)


def one(sim: Sim) -> Any:
    return sim.put(np.ones(1, "float32"), "y")


@pytest.mark.parametrize("kind", range(5), ids=["store", "library", "barrier", "warp", "spin"])
def test_endless_loop(kind: int) -> None:
    sim = Sim(timeout=0.2)
    flag = sim.put(np.zeros(1, "int32"), "flag")
    began = time.process_time()
    message = caught(sim, "endless", (one(sim), flag, kind), (2, 32))
    assert re.match(
        r"kernel 'endless' \(sim_hostile.cu\), block \(0, 0, 0\), thread \(\d+, 0, 0\): "
        r"ran for more than 0.2 seconds of processor time: an endless loop, or it waits",
        message,
    )
    assert time.process_time() - began < 20


def test_more_blocks_than_there_is_time_for() -> None:
    sim = Sim(timeout=0.2)
    assert "ran for more than 0.2 seconds" in caught(sim, "many_blocks", (one(sim),), (2**31 - 1, 32))


def test_no_limit_and_a_limit_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Sim().backend.milliseconds == 120_000
    monkeypatch.setenv("GPUNET_SIM_TIMEOUT", "1.5")
    assert Sim().backend.milliseconds == 1500
    sim = Sim(timeout=0)
    y = one(sim)
    sim.run("many_blocks", (y,), (1000, 32))
    assert y.numpy()[0] == 32_001
    for wrong in ("soon", "-1", "inf", "nan"):
        monkeypatch.setenv("GPUNET_SIM_TIMEOUT", wrong)
        with pytest.raises(
            DeviceError, match=f"GPUNET_SIM_TIMEOUT is '{wrong}', wanted seconds, or 0 for no"
        ):
            Sim()


def test_the_limit_is_that_of_a_launch() -> None:
    """Many short launches together may take longer."""
    sim = Sim(timeout=0.2)
    y = one(sim)
    began = time.process_time()
    launches = 0
    while time.process_time() - began < 0.6:
        for _ in range(20):
            sim.prepare("many_blocks", (y,), (100, 256))()
        sim.backend.stream.synchronize()
        launches += 20
    assert y.numpy()[0] == 1 + launches * 25_600 or launches > 600


@pytest.mark.parametrize("index", [0, 50_000, 99_999])
def test_local_array_larger_than_the_stack(index: int) -> None:
    sim = Sim()
    assert "overflowed its stack: too deep a recursion or too large a local array" in caught(
        sim, "large_frame", (one(sim), index)
    )


def test_more_shared_memory_than_a_block_has() -> None:
    sim = Sim()
    assert caught(sim, "much_shared", (one(sim),), (1, 32)).endswith(
        "49600 bytes of shared memory in a block with 'more' of 9600 bytes, wanted at most 49152"
    )
    assert "wanted at most 49152" in caught(sim, "much_shared", (one(sim),), (1, 32), shared=12_000)
    message = caught(sim, "vast_shared", (one(sim),))
    assert f"{1 << 36} bytes of shared memory in a block with 'tile'" in message


def test_division_that_overflows() -> None:
    sim = Sim()
    y = sim.put(np.ones(1, "int32"), "y")
    assert "or the smallest one by -1" in caught(sim, "divide", (y, -(2**31), -1))


@pytest.mark.parametrize("address", [0, 8])
def test_call_of_no_function(address: int) -> None:
    sim = Sim()
    assert "null" in caught(sim, "call_address", (one(sim), address))


def test_misaligned_vector() -> None:
    sim = Sim()
    x, y = sim.put(np.arange(16, dtype="float32"), "x"), sim.put(np.zeros(4, "float32"), "y")
    assert "null or misaligned pointer" in caught(sim, "misaligned_vector", (x, y, 1))
    sim.run("misaligned_vector", (x, y, 4))
    np.testing.assert_array_equal(y.numpy(), [4, 5, 6, 7])


def test_misaligned_access(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUNET_SIM_BOUNDS", "1")
    sim = Sim()
    x, y = sim.put(np.arange(4, dtype="float32"), "data"), one(sim)
    assert caught(sim, "misaligned", (x, y, 5)).endswith(
        "read element 1 of argument 'x', buffer 'data' (float32 4), "
        "at an address that is no multiple of 4 bytes"
    )
    sim.run("misaligned", (x, y, 8))
    assert y.numpy()[0] == 2


def test_trap() -> None:
    sim = Sim()
    y = sim.put(np.zeros(4, "float32"), "y")
    assert re.search(
        r"block \(0, 0, 0\), thread \(2, 0, 0\): trap \(\S*sim_hostile.cu:\d+\)",
        caught(sim, "give_up", (y,), (1, 4)),
    )


def test_what_kernels_print_is_there_once_the_stream_was_waited_for(
    capfd: pytest.CaptureFixture[str],
) -> None:
    sim = Sim()
    sim.run("say", (7,), (2, 1))
    assert capfd.readouterr().out == "number 7 of block 0\nnumber 7 of block 1\n"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("y[0] = 1", r"sim_rejected_0.cu:3:.*expected.*;"),
        ("y[0] = __reduce_add_sync(0xffffffffu, 1);", r"sim_rejected_1.cu:3:.*__reduce_add_sync"),
        ("y[0] = x;", r"sim_rejected_2.cu:3:.*\bx\b"),
        ('asm("mov.u32 %0, %laneid;" : "=r"(*(int*)y));', r"sim_rejected_3.cu:3:"),
    ],
    ids=["syntax", "unknown warp function", "unknown name", "PTX"],
)
def test_sources_that_do_not_compile(body: str, found: str, request: pytest.FixtureRequest) -> None:
    number = re.search(r"sim_rejected_\d", found)
    assert number is not None
    module = number[0]
    sources.register_source(
        module, f'#include "gpunet.cuh"\nextern "C" __global__ void wrong(float* y) {{\n  {body}\n}}\n'
    )
    with declared(declare(module, "wrong", "float* y")), pytest.raises(DeviceError) as caught:
        toolchain.build_module(module)
    message = str(caught.value)
    assert message.startswith(f"cannot build the CUDA module '{module}' for the simulated device:\n")
    assert re.search(found, message)


def test_a_kernel_that_the_source_does_not_have() -> None:
    sources.register_source("sim_nothing", '#include "gpunet.cuh"\n')
    with declared(declare("sim_nothing", "missing", "float* y")), pytest.raises(DeviceError, match="missing"):
        toolchain.build_module("sim_nothing")
