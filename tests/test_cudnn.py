"""cuDNN: every graph gets a plan for described GPUs; plans are kept, loaded and executed."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpunet import backends, devices
from gpunet.backends import backend
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import (
    convolution,
    cudnn,
    cudnn_cache,
    cudnn_execution,
    nvrtc,
)
from gpunet.cuda_kernels import cudnn_normalization as batch_norm
from gpunet.cuda_kernels.cuda_backend import CudaBackend
from gpunet.cuda_kernels.cudnn_cache import Plan, PlanCache, plan_key
from gpunet.cuda_kernels.cudnn_graphs import Convolution, MatrixProduct, Settings, packed
from gpunet.cuda_kernels.cudnn_norm_graphs import BatchNorm
from gpunet.cuda_kernels.sim import toolchain
from gpunet.definitions import make_operator
from gpunet.devices import Device
from gpunet.errors import DeviceError, KernelError
from gpunet.kernels import KernelContext, find, reason_against, wanted_scratch
from gpunet.operator import Operator
from gpunet.specs import spec
from tests.fake_cudnn import Library, Times
from tests.gpu import plan as planner
from tests.test_cuda_backend import fake

ROOT = Path(__file__).parent.parent
COMPILER = toolchain.find()
MISSING = (
    "nvidia-cudnn-frontend is not installed"
    if importlib.util.find_spec("cudnn") is None
    else "there is no compiler for the stub of libcuda"
    if COMPILER is None and devices.driver() is None
    else ""
)
needs_cudnn = pytest.mark.skipif(bool(MISSING), reason=MISSING)


# Planning for described devices, in processes of their own: other tests must not see the stub of libcuda.


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("cudnn")
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    found = os.environ | {"GPUNET_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if devices.driver() is None:
        stub = folder / "libcuda.so.1"
        source = Path(__file__).parent / "gpu" / "stub_libcuda.c"
        assert COMPILER is not None
        command = [*COMPILER.command, "-x", "c", "-shared", "-fPIC", "-O2", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([*command, "-o", str(stub), str(source)], check=True)
        libraries = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
        found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
    return found


def planned(environment: dict[str, str], *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.gpu.plan", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def unplanned(lines: list[dict[str, Any]]) -> list[str]:
    """What has no plan, though nothing speaks against it."""
    for line in lines:
        assert "reason" in line or line["loaded"] == line["workspace"] <= Settings().workspace
    return [line["reason"] for line in lines if "reason" in line and line["against"] is None]


@needs_cudnn
@pytest.mark.parametrize("device", ["h200", "t4"])
def test_plain_convolutions_have_plans(environment: dict[str, str], device: str) -> None:
    lines = planned(environment, "quick", device)
    assert len(lines) == len(planner.table("quick"))
    assert unplanned(lines) == []


@pytest.mark.slow
@needs_cudnn
@pytest.mark.parametrize("device", planner.DEVICES)
@pytest.mark.parametrize("name", [*planner.TABLES][1:])
def test_every_graph_has_a_plan(environment: dict[str, str], device: str, name: str) -> None:
    lines = planned(environment, name, device)
    assert len(lines) == len(planner.table(name))
    missing = unplanned(lines)
    if (name, device) == ("norms", "t4"):
        # cuDNN normalizes batches from sm_80 on; kernels of our own do before.
        assert all("batch normalization" in reason for reason in missing)
        assert len(missing) == sum(isinstance(d, BatchNorm) for d in planner.table(name))
    elif (name, device) == ("bfloat16", "t4"):
        # sm_75 has no bfloat16: the direct kernels convolve, those of batch norm and of products are ours.
        assert len(missing) == len(lines)
    else:
        assert missing == []


@needs_cudnn
def test_a_plan_outlives_its_process(environment: dict[str, str], tmp_path: Path) -> None:
    environment = environment | {"GPUNET_CACHE_DIR": str(tmp_path)}
    (first,), (second,) = planned(environment, "keep", "a100"), planned(environment, "keep", "a100")
    assert (first.pop("made"), second.pop("made")) == (1, 0)
    assert first == second
    whole, partial = first["execute"]
    assert "handle is NULL" in whole
    assert "missing a buffer for tensor uid" in partial
    (other,) = planned(environment, "keep", "a10")
    assert other["made"] == 1


@needs_cudnn
def test_the_front_end_has_what_is_called(environment: dict[str, str]) -> None:
    (names,) = planned(environment, "names")
    assert {"io_data_type", "intermediate_data_type", "compute_data_type"} <= set(names["pygraph"])
    assert {"handle", "sm_version", "device_property", "name"} <= set(names["pygraph"])
    assert {"handle", "stream"} <= set(names["set_stream"])
    assert names["pygraph.execute"][1:4] == ["tensor_dict", "workspace", "handle"]
    assert {"dim", "stride", "data_type", "is_pass_by_value", "name", "uid"} <= set(names["pygraph.tensor"])
    assert names["pygraph.build_plan_at_index"] == ["self", "index"]
    assert names["pygraph.deselect_workspace_greater_than"] == ["self", "workspace_limit"]
    called = set(re.findall(r"graph\.(\w+)\(", Path(cudnn.__file__).read_text()))
    called |= {"deserialize", "conv_fprop", "conv_dgrad", "conv_wgrad", "matmul", "batchnorm", "layernorm"}
    assert [name for name in called if f"pygraph.{name}" not in names] == []
    assert {"create_handle", "destroy_handle", "create_device_properties", "backend_version"} <= set(names)
    notes = Settings().forbidden(Convolution("forward", "float32", *SHAPES))
    assert set(notes) <= set(names["numerical_note"])
    assert {"A", "FALLBACK"} <= set(names["heur_mode"])
    assert "TRAINING" in names["norm_forward_phase"]
    version = tuple(int(part) for part in names["version"][0].split(".")[:2])
    pin = re.search(r"nvidia-cudnn-frontend>=([\d.]+),<([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert pin is not None
    low, high = (tuple(int(part) for part in text.split(".")) for text in pin.groups())
    assert low <= version < high


# Descriptors.

X, W, Y, ONE = (2, 3, 8, 8), (4, 3, 3, 3), (2, 4, 8, 8), (1, 1)
SHAPES = (X, W, Y, ONE, ONE, ONE, ONE)
GRAPH = Convolution("forward", "float32", *SHAPES)


def test_operands_are_numbered_in_order() -> None:
    graph = dataclasses.replace(GRAPH, channels_last=True, epilogue=("scale", "bias", "add", "relu"))
    operands = graph.operands()
    assert list(operands) == ["x", "w", "scale", "bias", "add", "y"]
    assert [name for name, operand in operands.items() if operand.output] == ["y"]
    assert operands["x"].strides == (192, 1, 24, 3)
    assert operands["scale"].shape == (1, 4, 1, 1)
    assert list(dataclasses.replace(GRAPH, kind="data").operands()) == ["w", "y", "x"]
    assert list(dataclasses.replace(GRAPH, kind="filter").operands()) == ["x", "y", "w"]
    assert packed((2, 3, 4, 5)) == (60, 20, 5, 1)


def test_what_cudnn_is_not_asked_for() -> None:
    assert GRAPH.against() is None
    changed = functools.partial(dataclasses.replace, GRAPH)
    assert "none below 0" in str(changed(head=(0, -1)).against())
    assert changed(x=(0, 3, 8, 8)).against() == "there is nothing to compute"
    assert "channels innermost only" in str(changed(epilogue=("add",)).against())
    assert "wants a multiple of 8" in str(BatchNorm("float16", (2, 12, 5, 5)).against())
    assert BatchNorm("float32", (2, 12, 5, 5)).against() is None
    odd = MatrixProduct("float16", 33, 77, 51, trans_b=True)
    assert "wants even numbers" in str(odd.against())
    instead = odd.as_convolution()
    assert instead is not None
    assert (instead.x, instead.w, instead.y) == ((33, 51, 1, 1), (77, 51, 1, 1), (33, 77, 1, 1))
    plain = MatrixProduct("float16", 33, 77, 51)
    for changes in ({"trans_a": True, "trans_b": True}, {"batch": 2}, {"epilogue": ("relu",)}):
        assert dataclasses.replace(plain, **changes).as_convolution() is None


def operator(type: str = "Conv", inputs: int = 2, outputs: int = 1, **args: Any) -> Operator:
    given, made = [f"i{i}" for i in range(inputs)], [f"o{i}" for i in range(outputs)]
    if type == "SpatialBN" and outputs == 5:
        made[1:3] = given[3:5]
    return Operator(make_operator(type, given, made, **args))


def test_operators_become_graphs() -> None:
    op = operator(kernels=[3], strides=[2], pads=[1, 2], dilations=[2], group=2)
    found = convolution.descriptor("forward", op, spec((5, 4, 20), "float32"), spec((6, 2, 3), "float32"))
    assert (found.x, found.w, found.y) == ((5, 4, 1, 20), (6, 2, 1, 3), (5, 6, 1, 10))
    assert (found.head, found.tail, found.stride, found.dilation) == ((0, 1), (0, 2), (1, 2), (1, 2))
    op = operator(kernel=3, pad_t=0, pad_l=1, pad_b=2, pad_r=3, order="NHWC")
    images, filters = spec((2, 9, 7, 3), "float16"), spec((4, 3, 3, 3), "float16")
    found = convolution.descriptor("filter", op, images, filters, bias=True)
    assert (found.x, found.w, found.y) == ((2, 3, 9, 7), (4, 3, 3, 3), (2, 4, 9, 9))
    assert (found.head, found.tail, found.channels_last) == ((0, 1), (2, 3), True)


# Keys and the cache.


def test_keys_differ_when_anything_does() -> None:
    device = planner.target("h200").properties
    keys = [plan_key(device, GRAPH, Settings(), ("92800", "1.28.0"))]
    for field, value in {
        "kind": "filter",
        "dtype": "float16",
        "x": (3, *X[1:]),
        "w": (4, 3, 1, 1),
        "y": (2, 4, 4, 4),
        "stride": (2, 2),
        "dilation": (2, 2),
        "head": (0, 1),
        "tail": (0, 1),
        "channels_last": True,
        "epilogue": ("bias",),
        "result": "float64",
    }.items():
        changed = dataclasses.replace(GRAPH, **{field: value})
        keys.append(plan_key(device, changed, Settings(), ("92800", "1.28.0")))
    fields = {field.name for field in dataclasses.fields(Convolution)}
    assert len(keys) == len(fields) + 1
    for changes in ({"tf32": True}, {"deterministic": False}, {"workspace": 1}, {"tune": 2}):
        keys.append(plan_key(device, GRAPH, Settings(**changes), ("92800", "1.28.0")))
    for versions in (("92801", "1.28.0"), ("92800", "1.27.0")):
        keys.append(plan_key(device, GRAPH, Settings(), versions))
    keys += [plan_key(planner.target(name).properties, GRAPH, Settings(), ()) for name in planner.DEVICES]
    assert len(set(keys)) == len(keys)
    board = json.dumps(json.loads(device) | {"cudaDeviceId": 3})
    assert plan_key(board, GRAPH, Settings(), ("92800", "1.28.0")) == keys[0]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("GPUNET_CACHE_DIR", str(tmp_path))
    return tmp_path / "cudnn"


def test_plans_are_kept(folder: Path) -> None:
    plans, made = PlanCache(2), []

    def make(key: str) -> Plan:
        made.append(key)
        return Plan(key, f"engine {key}", 7, bytes(range(256)))

    for key in ("a", "b", "a", "c", "a"):
        assert plans.find(key, functools.partial(make, key)).name == f"engine {key}"
    assert (made, len(plans)) == (["a", "b", "c"], 2)
    assert PlanCache().find("b", functools.partial(make, "b")).data == bytes(range(256))
    assert made == ["a", "b", "c"]
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b"", lambda b: b"{}\n" + b, lambda b: b"\xff" + b]
)
def test_damaged_plans_are_made_again(folder: Path, damage: Any) -> None:
    plan = Plan("a", "engine", 7, b"data")
    cudnn_cache.write(plan)
    assert cudnn_cache.read("a") == plan
    file = cudnn_cache.path("a")
    file.write_bytes(damage(file.read_bytes()))
    assert cudnn_cache.read("a") is None
    assert PlanCache().find("a", lambda: plan) == plan
    assert cudnn_cache.read("a") == plan


def test_a_missing_plan_is_asked_for_once(folder: Path) -> None:
    plans, asked = PlanCache(), []

    def make() -> Plan:
        asked.append(1)
        raise cudnn.NoPlanError("no plan")

    for _ in range(3):
        with pytest.raises(cudnn.NoPlanError, match="no plan"):
            plans.find("a", make)
    assert len(asked) == 1


def test_what_may_pass_is_not_kept(folder: Path) -> None:
    plans, plan = PlanCache(), Plan("a", "eng0", 0, b"data")
    answers: list[Any] = [MemoryError(), plan]

    def make() -> Plan:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return plan

    with pytest.raises(MemoryError):
        plans.find("a", make)
    assert plans.find("a", make) == plan


# Settings.


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GPUNET_TF32", "GPUNET_DETERMINISTIC", "GPUNET_CUDNN_WORKSPACE", "GPUNET_CUDNN_TUNE"):
        monkeypatch.delenv(name, raising=False)
    default = cudnn.settings()
    assert (default.tf32, default.deterministic) == (False, True)
    assert {"TENSOR_CORE", "DOWN_CONVERT_INPUTS", "NONDETERMINISTIC"} <= set(default.forbidden(GRAPH))
    half = dataclasses.replace(GRAPH, dtype="float16")
    assert default.forbidden(half) == ["REDUCED_PRECISION_REDUCTION", "NONDETERMINISTIC"]
    monkeypatch.setenv("GPUNET_TF32", "1")
    monkeypatch.setenv("GPUNET_DETERMINISTIC", "0")
    monkeypatch.setenv("GPUNET_CUDNN_WORKSPACE", "3")
    assert cudnn.settings().workspace == 3 << 20
    assert cudnn.settings().forbidden(GRAPH) == ["REDUCED_PRECISION_REDUCTION"]
    monkeypatch.setenv("GPUNET_CUDNN_TUNE", "0")
    with pytest.raises(DeviceError, match="GPUNET_CUDNN_TUNE is '0', wanted a whole number of at least 1"):
        cudnn.settings()


def test_one_reason_is_picked() -> None:
    error = RuntimeError(
        "No valid engine configs\n"
        "Warning: CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH; Reason: only on other devices\n"
        "Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: c % elements_per_ldg != 0\n"
        "Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: ptr->isSupported()\n)"
    )
    assert cudnn.message(error) == "c % elements_per_ldg != 0"
    assert cudnn.message(RuntimeError("")) == "RuntimeError"


# Execution, on a fake of the library and of CUDA.


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Library:
    made = Library()
    monkeypatch.setattr(cudnn, "library", lambda: made)
    monkeypatch.setattr(cudnn_execution, "reason_against", lambda b: "a GPU" if b.simulated else None)
    monkeypatch.setattr(cudnn_execution, "PLANS", PlanCache())
    monkeypatch.setattr(cudnn_execution, "_told", set())
    for name in ("GPUNET_TF32", "GPUNET_DETERMINISTIC", "GPUNET_CUDNN_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GPUNET_CUDNN_TUNE", "1")
    return made


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    monkeypatch.setattr(nvrtc, "supported", lambda capability: capability)
    made = CudaBackend(Device("cuda"), fake(memory=64 << 20))
    monkeypatch.setattr(backends, "_open", {made.device: made})
    return made


def buffers(gpu: CudaBackend, graph: Any) -> dict[str, Buffer]:
    return {
        name: Buffer.empty(gpu, spec(operand.shape, operand.dtype), name)
        for name, operand in graph.operands().items()
        if not operand.value
    }


def test_a_graph_is_executed(library: Library, gpu: CudaBackend) -> None:
    context = KernelContext(operator(), backend=gpu, stream=gpu.stream)
    wanted = cudnn_execution.workspace(GRAPH)
    assert wanted == spec((512,), np.uint8)  # that of eng1: eng0 uses tensor cores
    given, scratch = buffers(gpu, GRAPH), Buffer.empty(gpu, wanted, "scratch")
    launch = cudnn_execution.prepare(context, GRAPH, given, scratch)
    assert library.executed == []
    launch()
    launch()
    name, operands, workspace, handle = library.executed[0]
    assert (name, workspace) == ("eng1", scratch.pointer)
    assert operands == {1: given["x"].pointer, 2: given["w"].pointer, 3: given["y"].pointer}
    assert handle.stream == gpu.stream.pointer
    assert library.executed[1] == library.executed[0]
    assert library.built == ["eng1"]


def test_handles_are_of_a_thread_and_a_stream(library: Library, gpu: CudaBackend) -> None:
    second = gpu.new_stream()
    scratch = Buffer.empty(gpu, spec((512,), np.uint8))
    launches = [
        cudnn_execution.prepare(
            KernelContext(operator(), backend=gpu, stream=s), GRAPH, buffers(gpu, GRAPH), scratch
        )
        for s in (gpu.stream, second, second)
    ]

    def launch_all() -> None:
        for launch in launches:
            launch()

    launch_all()
    thread = threading.Thread(target=launch_all)
    thread.start()
    thread.join()
    handles = [handle for *_, handle in library.executed]
    assert [h.stream for h in handles] == [gpu.stream.pointer, *[second.pointer] * 2] * 2
    assert handles[1] is handles[2]
    assert len({id(h) for h in handles}) == 4


def test_handles_end_with_their_stream(library: Library, gpu: CudaBackend) -> None:
    stream = gpu.new_stream()
    for one in (stream, gpu.stream):
        cudnn_execution.device(gpu).handle(one)
    first, second = library.handles
    del stream, one
    gc.collect()
    assert first.destroyed
    assert not second.destroyed


@pytest.mark.parametrize(
    ("taken", "fastest"), [([3.0, 2.0], "eng2"), ([1.0, 2.0], "eng1"), ([1.0, 2.0, 0.5], "eng1")]
)
def test_the_fastest_plan_is_remembered(
    library: Library, gpu: CudaBackend, monkeypatch: pytest.MonkeyPatch, taken: list[float], fastest: str
) -> None:
    # Each plan is timed five times: two plans share what ten pairs of events took.
    Times([time for time in taken for _ in range(5)]).add_to(gpu.cuda.runtime)
    monkeypatch.setenv("GPUNET_CUDNN_TUNE", "8")
    events = len(gpu.cuda.runtime.events)
    assert cudnn_execution.find(gpu, GRAPH).name == fastest
    assert len(gpu.cuda.runtime.events) == events
    assert library.built == ["eng1", "eng2"]
    assert len(library.executed) == 12
    cudnn_execution.PLANS.clear()
    assert cudnn_execution.find(gpu, GRAPH).name == fastest
    assert library.built == ["eng1", "eng2"]
    monkeypatch.setenv("GPUNET_CUDNN_TUNE", "1")
    assert cudnn_execution.find(gpu, GRAPH).name == "eng1"


def test_plans_that_fail_are_not_the_fastest(
    library: Library, gpu: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    Times([1.0]).add_to(gpu.cuda.runtime)
    monkeypatch.setenv("GPUNET_CUDNN_TUNE", "8")
    library.failing = {"eng1"}
    assert cudnn_execution.find(gpu, GRAPH).name == "eng2"


def test_what_is_allowed_decides(library: Library, gpu: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUNET_TF32", "1")
    assert cudnn_execution.find(gpu, GRAPH).name == "eng0"
    monkeypatch.setenv("GPUNET_TF32", "0")
    monkeypatch.setenv("GPUNET_CUDNN_WORKSPACE", "0")
    with pytest.raises(cudnn.NoPlanError, match=r"of 5 none builds without .*NONDETERMINISTIC in 0 bytes"):
        cudnn_execution.find(gpu, GRAPH)
    monkeypatch.setenv("GPUNET_DETERMINISTIC", "0")
    assert cudnn_execution.find(gpu, GRAPH).name == "eng4"


def test_what_is_wrong_is_said(library: Library, gpu: CudaBackend) -> None:
    context = KernelContext(operator(), backend=gpu, stream=gpu.stream)
    given, scratch = buffers(gpu, GRAPH), Buffer.empty(gpu, spec((512,), np.uint8))
    with pytest.raises(cudnn.NoPlanError, match=r"none builds without .* in 0 bytes of workspace"):
        cudnn_execution.prepare(context, GRAPH, given, None)
    with pytest.raises(KernelError, match="operand 'w' is missing, wanted 432 bytes"):
        cudnn_execution.prepare(context, GRAPH, given | {"w": None}, scratch)
    with pytest.raises(KernelError, match="operand 'w' is 2048 bytes, wanted 432 bytes"):
        cudnn_execution.prepare(context, GRAPH, given | {"w": given["y"]}, scratch)
    crooked = Buffer(gpu, gpu.allocate(4096), W, np.float32, 4)
    with pytest.raises(cudnn.NoPlanError, match="'w' does not begin at a multiple of 16 bytes"):
        cudnn_execution.prepare(context, GRAPH, given | {"w": crooked}, scratch)
    launch = cudnn_execution.prepare(context, GRAPH, given, scratch)
    library.failing = {"eng1"}
    with pytest.raises(
        KernelError, match=r"cuDNN failed on cuda:0 with convolution forward .*\(eng1\): it is broken"
    ):
        launch()


def test_a_plan_fits_into_the_scratch_that_there_is(library: Library, gpu: CudaBackend) -> None:
    context = KernelContext(operator(), backend=gpu, stream=gpu.stream)
    given, scratch = buffers(gpu, GRAPH), Buffer.empty(gpu, cudnn_execution.workspace(GRAPH))
    assert scratch.nbytes == 512
    # The plan is forgotten, and another one is the fastest now.
    cudnn_execution.PLANS.clear()
    cudnn_cache.path(plan_key(*key_of(gpu))).unlink()
    library.plans = {"eng2": (1024, ""), "eng5": (256, "")}
    cudnn_execution.prepare(context, GRAPH, given, scratch)()
    assert library.executed[-1][0] == "eng5"


def key_of(gpu: CudaBackend) -> tuple[Any, ...]:
    properties = cudnn_execution.device(gpu).target.properties
    return properties, GRAPH, cudnn.settings(), cudnn.versions()


def test_scratch_is_that_of_the_device_that_it_is_for(
    library: Library, gpu: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = CudaBackend(Device("cuda", 1), fake(devices=2, memory=64 << 20))
    monkeypatch.setattr(backends, "_open", {gpu.device: gpu, second.device: second})
    planned: list[Device] = []
    sizes = {gpu.device: 4096, second.device: 512}

    def plan(backend: Any, descriptor: Any, allowed: Any = None) -> Plan:
        planned.append(backend.device)
        return Plan("key", "engine", sizes[backend.device], b"")

    monkeypatch.setattr(cudnn_execution, "find", plan)
    op = operator(kernel=3, pad=1)
    inputs = [spec(X, "float32"), spec(W, "float32")]
    outputs = op.infer(inputs)
    found = find(op, "cuda", inputs, outputs)
    for device in sizes:
        assert [s.nbytes for s in wanted_scratch(found, op, inputs, outputs, device)] == [sizes[device]]
    assert planned == list(sizes), "no plan is made for the other device"
    assert cudnn_execution.workspace(GRAPH).nbytes == 4096


def test_a_plan_that_cannot_be_loaded_is_none(library: Library, gpu: CudaBackend) -> None:
    context = KernelContext(operator(), backend=gpu, stream=gpu.stream)
    given, scratch = buffers(gpu, GRAPH), Buffer.empty(gpu, spec((512,), np.uint8))
    cudnn_execution.find(gpu, GRAPH)
    library.plans = {}
    with pytest.raises(cudnn.NoPlanError, match="plan eng1 cannot be loaded: eng1 is unknown"):
        cudnn_execution.prepare(context, GRAPH, given, scratch)


def test_batch_normalization_passes_numbers(library: Library, gpu: CudaBackend) -> None:
    op = operator("SpatialBN", 5, 5, engine="CUDNN", epsilon=0.25, momentum=0.75)
    x, c = spec((2, 8, 3, 3), "float32"), spec((8,), "float32")
    inputs, outputs = [x, *[c] * 4], [x, *[c] * 4]
    found = find(op, "cuda", inputs, outputs)
    assert found.engine == "CUDNN"
    given = tuple(Buffer.empty(gpu, s) for s in inputs)
    made = tuple(Buffer.empty(gpu, s) for s in outputs)
    assert found.scratch is not None
    scratch = tuple(Buffer.empty(gpu, s) for s in found.scratch(op, inputs, outputs))
    context = KernelContext(op, backend=gpu, stream=gpu.stream, scratch=scratch)
    launch = found.function(given, made, op.args, context)  # keeps the numbers
    launch()
    (_, operands, _, _), names = (
        library.executed[-1],
        list(batch_norm.descriptor(op, x, backward=False).operands()),
    )
    by_name = {name: operands[uid] for uid, name in enumerate(names, 1)}
    assert ctypes.c_float.from_address(by_name["momentum"]).value == 0.25
    assert ctypes.c_float.from_address(by_name["epsilon"]).value == 0.25
    assert [by_name[n] for n in ("new_mean", "saved_inv_std")] == [made[1].pointer, made[4].pointer]
    testing = operator("SpatialBN", 5, 1, is_test=1)
    assert "in training only" in str(batch_norm._against(testing, inputs, outputs[:1]))
    several = operator("SpatialBN", 7, 5, num_batches=2)
    assert "one batch at a time" in str(batch_norm._against(several, inputs, outputs))
    odd = [spec((2, 6, 3, 3), "float32"), *[spec((6,), "float32")] * 4]
    assert find(op, "cuda", odd, odd).engine == ""


# Where there is no cuDNN.


@pytest.mark.skipif(COMPILER is None, reason=toolchain.MISSING)
def test_the_simulated_device_asks_for_no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = backend(Device("sim"))
    monkeypatch.setattr(backends, "_open", {sim.device: sim})
    assert cudnn_execution.workspace(GRAPH).nbytes == 0
    with pytest.raises(cudnn.NoPlanError, match="cuDNN needs a GPU"):
        cudnn_execution.find(sim, GRAPH)
    op, inputs = operator(kernel=3, pad=1), [spec(X, "float32"), spec(W, "float32")]
    assert reason_against(op, "sim", inputs, op.infer(inputs)) is None


def test_without_the_front_end(gpu: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'gpunet[cuda12]'" in str(cudnn.reason_against(gpu))
    assert cudnn_execution.workspace(GRAPH).nbytes == 0
    with pytest.raises(cudnn.NoPlanError, match="nvidia-cudnn-frontend is not installed"):
        cudnn_execution.find(gpu, GRAPH)
