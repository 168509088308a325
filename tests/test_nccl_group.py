"""Several GPUs of one process: collectives by NCCL as a group, on fake bindings that move real bytes."""

from __future__ import annotations

import ctypes
import inspect
import re
from functools import partial
from typing import Any

import numpy as np
import pytest

import gpunet
from gpunet import backends
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.cuda_backend import CudaBackend
from gpunet.definitions import make_operator
from gpunet.devices import Device
from gpunet.distributed import nccl_group
from gpunet.distributed.nccl_group import DeviceGroup
from gpunet.errors import DeviceError
from gpunet.proto import NetDef
from gpunet.records import check_races
from tests import test_distributed_nccl
from tests.test_cuda_backend import fake
from tests.test_distributed_nccl import CONSTANTS, NcclError

TYPES = {1: np.uint8, 2: np.int32, 4: np.int64, 6: np.float16, 7: np.float32, 8: np.float64}


def at(pointer: int, count: int, datatype: int) -> np.ndarray:
    """The elements at an address."""
    kind = np.dtype(TYPES[datatype])
    return np.frombuffer((ctypes.c_uint8 * (count * kind.itemsize)).from_address(pointer), kind)


class Comm(test_distributed_nccl.Comm):
    """A communicator that leaves its calls to the module, which runs them when the group ends."""

    def __init__(self, module: Module, rank: int) -> None:
        super().__init__(0, b"", rank)
        self.module = module

    def __getattribute__(self, name: str) -> Any:
        if name in ("allReduce", "reduce", "broadcast", "allGather", "reduceScatter"):
            return lambda *arguments: self.module.add(self, name, arguments)
        return super().__getattribute__(name)


class Module(test_distributed_nccl.Module):
    """CuPy's module for GPUs of one process."""

    def __init__(self, cuda: Any) -> None:
        super().__init__()
        self.cuda = cuda
        self.comms: list[Comm] = []
        self.waiting: list[tuple[int, str, tuple[int, ...]]] = []
        self.depth = self.groups = 0
        self.devices: list[int] = []
        self.hangs = False
        self.NcclCommunicator = self

    def initAll(self, devices: list[int]) -> list[Comm]:  # noqa: N802
        self.devices = devices
        self.comms = [Comm(self, rank) for rank in range(len(devices))]
        return self.comms

    def groupStart(self) -> None:  # noqa: N802
        self.depth += 1

    def groupEnd(self) -> None:  # noqa: N802
        self.depth -= 1
        self.groups += 1
        calls, self.waiting = self.waiting, []
        assert [rank for rank, _, _ in calls] == list(range(len(self.comms)))
        assert len({name for _, name, _ in calls}) == 1
        for rank, name, arguments in calls:
            assert (
                len(arguments)
                == len(inspect.signature(getattr(test_distributed_nccl.Comm, name)).parameters) - 1
            )
            self.comms[rank].calls.append((name, arguments))
        # The last stream to get there does the work.
        arrived: list[int] = []
        for _, name, arguments in calls:
            self.cuda.runtime.queues[arguments[-1]].append(
                partial(self._arrive, name, arrived, [found for _, _, found in calls])
            )

    def add(self, comm: Comm, name: str, arguments: tuple[int, ...]) -> None:
        assert self.depth == 1, "calls of several GPUs from one thread have to be a group"
        assert self.cuda.runtime.device == self.devices[comm.rank]
        self.waiting.append((comm.rank, name, arguments))

    def _arrive(self, name: str, arrived: list[int], calls: list[tuple[int, ...]]) -> None:
        arrived.append(1)
        if len(arrived) < len(calls):
            return
        count, kind = calls[0][2:4]
        size = count * len(calls) if name == "reduceScatter" else count
        parts = [at(call[0], size, kind).copy() for call in calls]
        combine = {0: np.add, 2: np.maximum, 3: np.minimum, 4: np.add}.get(calls[0][4], np.add)
        for rank, call in enumerate(calls):
            if name == "broadcast":
                at(call[1], count, kind)[:] = parts[call[4]]
            elif name == "allGather":
                at(call[1], size * len(calls), kind)[:] = np.concatenate(parts)
            elif name != "reduce" or rank == call[5]:
                total = combine.reduce(parts)
                total = total / len(calls) if call[4] == 4 else total
                part = total[rank * count : (rank + 1) * count] if name == "reduceScatter" else total
                at(call[1], count, kind)[:] = part


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    """Two fake GPUs with one runtime, and NCCL between them."""
    cuda = fake(memory=64 << 20, devices=3)
    for index in range(3):
        monkeypatch.setitem(backends._open, Device("cuda", index), CudaBackend(Device("cuda", index), cuda))
    made = Module(cuda)
    query = cuda.runtime.eventQuery

    def progress(event: int) -> int:
        # The queues of the fake do not run by themselves.
        if not made.hangs:
            cuda.runtime.eventSynchronize(event)
        return int(query(event))

    monkeypatch.setattr(cuda.runtime, "eventQuery", progress)
    groups: dict[Any, DeviceGroup] = {}
    monkeypatch.setattr(nccl_group, "group", lambda d: groups.setdefault(d, DeviceGroup(d, made)))
    monkeypatch.setattr(
        "gpunet.workspace.parse_device", lambda d: Device("cuda", 0) if d == "cuda:0" else Device("cpu")
    )
    return made


def run(
    module: Module,
    type: str,
    inputs: list[np.ndarray],
    engine: str = "simple",
    *,
    in_place: bool = False,
    groups: int = 2,
    **args: Any,
) -> list[np.ndarray]:
    """The outputs of an operator on tensors that copies have put on a GPU each."""
    net = NetDef(name="net", type=engine)
    names = [f"x{i}" for i in range(len(inputs))]
    made = [f"a{i}" for i in range(len(inputs))]
    results = made if in_place else [f"y{i}" for i in range(1 if type == "NCCLReduce" else len(inputs))]
    for i, (name, target) in enumerate(zip(names, made, strict=True)):
        op = make_operator("Copy", [name], [target])
        op.device_option.CopyFrom(Device("cuda", i).option())
        net.op.append(op)
    net.op.append(make_operator(type, made, results, **args))
    net.external_input.extend(names)
    net.external_output.extend(results)
    workspace = gpunet.Workspace("cuda:0")
    for name, value in zip(names, inputs, strict=True):
        workspace.feed(name, value)
    before = module.groups
    program = workspace.create(net)
    workspace.run(program)
    workspace.run(program)
    assert module.groups == before + groups
    assert not check_races(workspace.program("net"))
    return [workspace.fetch(name) for name in results]


RNG = np.random.default_rng(5)
PAIR = [RNG.normal(size=(2, 3)).astype(np.float32) for _ in range(2)]


@pytest.mark.parametrize("engine", ["simple", "async_scheduling", "graph"])
@pytest.mark.parametrize("in_place", [False, True])
def test_sums(module: Module, engine: str, *, in_place: bool) -> None:
    for found in run(module, "NCCLAllreduce", PAIR, engine, in_place=in_place):
        np.testing.assert_array_equal(found, PAIR[0] + PAIR[1])
    assert module.devices == [0, 1]


def test_other_operations(module: Module) -> None:
    for op, combine in (("max", np.maximum), ("min", np.minimum)):
        for found in run(module, "NCCLAllreduce", PAIR, op=op):
            np.testing.assert_array_equal(found, combine(*PAIR))
    for found in run(module, "NCCLAllreduce", PAIR, average=1):
        np.testing.assert_allclose(found, (PAIR[0] + PAIR[1]) / 2)
    for found in run(module, "NCCLBroadcast", PAIR, root=1):
        np.testing.assert_array_equal(found, PAIR[1])
    (found,) = run(module, "NCCLReduce", PAIR)
    np.testing.assert_array_equal(found, PAIR[0] + PAIR[1])
    for found in run(module, "NCCLAllGather", PAIR):
        np.testing.assert_array_equal(found, np.stack(PAIR))
    for row, found in enumerate(run(module, "NCCLReduceScatter", PAIR)):
        np.testing.assert_array_equal(found, (PAIR[0] + PAIR[1])[row])


def test_three_gpus_and_half_types(module: Module) -> None:
    parts = [np.full((4,), 2.0**i, np.float16) for i in range(3)]
    for found in run(module, "NCCLAllreduce", parts):
        np.testing.assert_array_equal(found, np.full(4, 7, np.float16))


def test_types_that_nccl_lacks_go_by_way_of_the_host(module: Module) -> None:
    parts = [np.full(4, i, np.int16) for i in (1, 2)]
    for found in run(module, "NCCLAllreduce", parts, groups=0):
        np.testing.assert_array_equal(found, [3, 3, 3, 3])


def pair(module: Module) -> tuple[DeviceGroup, list[Buffer]]:
    made = DeviceGroup((Device("cuda", 0), Device("cuda", 1)), module)
    return made, [Buffer.from_numpy(backends.backend(d), PAIR[0], "x") for d in made.devices]


def test_an_error_of_nccl_aborts_all_communicators(module: Module) -> None:
    made, buffers = pair(module)
    module.hangs = True
    module.comms[1].error = "unhandled system error"
    message = "all_reduce over NCCL on cuda:0, cuda:1 failed: unhandled system error"
    for _ in range(2):
        with pytest.raises(DeviceError, match=message):
            made.all_reduce(buffers, buffers, "sum")
    assert all(comm.aborted for comm in module.comms)
    assert module.groups == 1


def test_what_does_not_end_is_aborted(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUNET_COLLECTIVE_TIMEOUT", "0.2")
    made, buffers = pair(module)
    module.hangs = True
    with pytest.raises(
        DeviceError, match=r"broadcast over NCCL .* failed: it has taken more than 0\.2 seconds"
    ):
        made.broadcast(buffers, buffers, 0)
    assert all(comm.aborted for comm in module.comms)


def test_nccl_that_cannot_start(module: Module) -> None:
    def refuse(devices: list[int]) -> Any:
        raise NcclError("invalid device")

    module.initAll = refuse  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="NCCL cannot start on cuda:0, cuda:1: invalid device"):
        DeviceGroup((Device("cuda", 0), Device("cuda", 1)), module)


def test_names_and_arguments_are_those_of_cupy() -> None:
    nccl = test_distributed_nccl.cupy_nccl()
    source = inspect.getsource(nccl_group)
    for name in re.findall(r"self\.nccl\.(\w+)", source):
        if name not in CONSTANTS:
            assert hasattr(nccl, name), name
    assert (nccl.NcclCommunicator.initAll.__doc__ or "").startswith("NcclCommunicator.initAll(devices)")
    assert (nccl.groupStart.__doc__ or "").startswith("groupStart()")
    assert (nccl.groupEnd.__doc__ or "").startswith("groupEnd()")
    assert set(re.findall(r"comm\.(\w+)\(", source)) <= set(test_distributed_nccl.METHODS)
