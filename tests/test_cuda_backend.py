"""The CUDA device on fake bindings, these against the installed CuPy, and what is said without CUDA."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpunet import backends, devices
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import cuda_backend, launch, nvrtc, signature
from gpunet.cuda_kernels.cuda_backend import Cuda, CudaBackend
from gpunet.devices import Device, parse_device
from gpunet.errors import DeviceError, KernelError
from gpunet.specs import TensorSpec
from tests.fake_cuda import Bindings, Driver, Runtime

WITHOUT_CUPY = importlib.util.find_spec("cupy_backends") is None


def fake(**runtime: int) -> Cuda:
    bindings = Bindings(**runtime)
    cuda = Cuda.__new__(Cuda)
    cuda.runtime, cuda.driver = bindings.runtime, bindings.driver
    cuda.errors = (bindings.runtime.CUDARuntimeError, bindings.driver.CUDADriverError)
    return cuda


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    monkeypatch.setattr(nvrtc, "supported", lambda capability: capability)
    monkeypatch.setattr(
        nvrtc, "compile_module", lambda module, arch: nvrtc.Cubin(f"{module} {arch}".encode())
    )
    return CudaBackend(Device("cuda"), fake(memory=64 << 20))


@pytest.fixture
def relu(monkeypatch: pytest.MonkeyPatch) -> signature.Kernel:
    monkeypatch.setattr(signature, "declared", {})
    return signature.Kernel("activation", "relu_fwd", "const T* x, T* y, int64 n", T=["float32"])


def context(backend: CudaBackend, stream: Any = None) -> Any:
    return SimpleNamespace(backend=backend, stream=stream or backend.stream)


def test_copies_there_and_back(backend: CudaBackend) -> None:
    source = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    buffer = Buffer.from_numpy(backend, source, "x")
    want = source.copy()
    source[...] = 0
    np.testing.assert_array_equal(buffer.numpy(), want)
    other = Buffer.empty(backend, buffer.spec, "y")
    backend.copy(other, buffer, backend.stream)
    np.testing.assert_array_equal(other.numpy(), want)
    backend.fill(buffer, 0, backend.stream)
    assert not buffer.numpy().any()
    np.testing.assert_array_equal(other.numpy(), want)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_copies_of_few_elements(backend: CudaBackend, shape: tuple[int, ...]) -> None:
    source = np.full(shape, 7, np.int64)
    np.testing.assert_array_equal(Buffer.from_numpy(backend, source).numpy(), source)


def test_copies_that_do_not_fit_are_refused(backend: CudaBackend) -> None:
    x, stream = Buffer.from_numpy(backend, np.zeros(4, np.float32), "x"), backend.stream
    for size in (3, 5):
        array = np.zeros(size, np.float32)
        for copy in (
            lambda array=array: backend.copy_in(x, array, stream),
            lambda array=array: backend.copy_later(x, array, stream),
            lambda array=array: backend.copy_out(array, x, stream),
            lambda array=array: backend.copy_back(array, x, stream),
        ):
            with pytest.raises(DeviceError, match=rf"of 16 bytes and {4 * size} bytes, wanted the same"):
                copy()
    frozen = np.zeros(4, np.float32)
    frozen.flags.writeable = False
    for target in (np.zeros((4, 2), np.float32)[:, 0], frozen):
        with pytest.raises(DeviceError, match="not contiguous and writeable"):
            backend.copy_out(target, x, stream)


def test_large_copies_go_in_pieces(backend: CudaBackend) -> None:
    source = np.random.default_rng(1).integers(0, 255, (9 << 20) + 3, np.uint8)
    np.testing.assert_array_equal(Buffer.from_numpy(backend, source).numpy(), source)
    assert backend.cuda.runtime.copies == [4 << 20, 4 << 20, (1 << 20) + 3] * 2


def test_a_launch(backend: CudaBackend, relu: signature.Kernel) -> None:
    x = Buffer.from_numpy(backend, np.array([-1, 2, -3, 4], np.float32), "x")
    y = Buffer.empty(backend, x.spec, "y")
    run = launch.prepare(
        context(backend), relu, (x.dtype,), (x, y, 4), launch.elementwise(4), shared=64 << 10
    )
    driver = backend.cuda.driver
    run()
    run()
    np.testing.assert_array_equal(y.numpy(), [0, 2, 0, 4])
    assert driver.modules == [b"activation 90"], "compiled and loaded once, for the device's architecture"
    assert driver.launches == [("relu_fwd_f32", (1, 1, 1, 256, 1, 1), 64 << 10)] * 2
    assert driver.attributes == [(1, 8, 64 << 10)], "more than 48 KiB of shared memory is asked for once"
    assert backend.function("activation", "relu_fwd_f32") is backend.function("activation", "relu_fwd_f32")


def test_a_launch_that_fails(backend: CudaBackend, relu: signature.Kernel) -> None:
    with pytest.raises(KernelError, match=r"module activation.cu has no kernel 'silu_fwd_f32'"):
        backend.function("activation", "silu_fwd_f32")
    x = Buffer.from_numpy(backend, np.zeros(4, np.float32), "x")
    run = launch.prepare(context(backend), relu, (x.dtype,), (x, x, 4), (2, 2048))
    with pytest.raises(
        KernelError,
        match=r"'relu_fwd_f32' failed on cuda:0 with 2x1x1 blocks of 2048x1x1 threads and 0 bytes",
    ):
        run()


def test_events_order_streams(backend: CudaBackend) -> None:
    other = backend.new_stream()
    x = Buffer.from_numpy(backend, np.zeros(4, np.uint8), "x")
    backend.stream.synchronize()
    backend.fill(x, 1, other)
    event = other.record()
    assert not event.done()
    backend.stream.wait(event)
    backend.copy(y := Buffer.empty(backend, x.spec), x, backend.stream)
    np.testing.assert_array_equal(y.numpy(), [1, 1, 1, 1])
    assert event.done()
    with pytest.raises(DeviceError, match="cannot wait for"):
        backend.stream.wait(SimpleNamespace())  # type: ignore[arg-type]


def test_a_block_used_on_two_streams_waits_for_both(backend: CudaBackend, relu: signature.Kernel) -> None:
    other = backend.new_stream()
    x = Buffer.from_numpy(backend, np.zeros(1000, np.float32), "x")
    y = Buffer.empty(backend, x.spec, "y")
    run = launch.prepare(context(backend, other), relu, (x.dtype,), (x, y, 1000), launch.elementwise(1000))
    run()
    pointers = {x.pointer, y.pointer}
    del run, x, y
    blocks = [backend.allocate(4000), backend.allocate(4000)]
    assert not pointers & {b.pointer for b in blocks}, "the launch on the other stream has not run"
    other.synchronize()
    # An event was recorded behind the launch when the blocks came back; now it is reached.
    again = [backend.allocate(4000), backend.allocate(4000)]
    assert pointers == {b.pointer for b in again}


def test_out_of_memory_names_blobs(backend: CudaBackend) -> None:
    weights = Buffer.empty(backend, TensorSpec((40 << 20,), np.dtype("uint8")), "fc6_w")
    view = Buffer(backend, weights.memory, (4,), np.float32, name="part")
    with pytest.raises(DeviceError, match=r"out of memory on cuda:0: wanted 30.0 MiB.*'fc6_w' 40.0 MiB"):
        Buffer.empty(backend, TensorSpec((30 << 20,), np.dtype("uint8")), "fc7_w")
    del weights, view
    Buffer.empty(backend, TensorSpec((60 << 20,), np.dtype("uint8")), "fc7_w")


def test_unused_memory_is_given_back(backend: CudaBackend) -> None:
    backend.stream.synchronize()
    before = backend.memory_info()[0]
    block = backend.allocate(1 << 20)
    assert backend.memory_info()[0] < before
    del block
    assert backend.empty_cache() == 1 << 20
    assert backend.memory_info() == (before, 64 << 20)


def test_errors_of_work_that_ran(backend: CudaBackend) -> None:
    event = backend.stream.record()
    backend.cuda.runtime.errors.append(700)
    for wait in (backend.stream.synchronize, event.done, event.synchronize):
        with pytest.raises(KernelError, match=r"700.*CUDA_LAUNCH_BLOCKING=1"):
            wait()
    backend.cuda.runtime.errors.clear()


def test_nothing_of_cuda_is_raised_as_it_is(backend: CudaBackend) -> None:
    """Once a kernel has broken the device, each call of CUDA fails: all say how to find the kernel."""
    stream, event = backend.new_stream(), backend.stream.record()
    x = Buffer.from_numpy(backend, np.zeros(4, np.uint8), "x")
    kept = backend.allocate(512)
    del kept
    backend.cuda.runtime.broken = 700
    for call in (
        stream.record,
        lambda: stream.wait(event),
        backend.new_stream,
        x.numpy,
        backend.empty_cache,
        backend.memory_info,
        lambda: backend.fill(x, 1, stream),
        lambda: backend.capture(lambda: None, stream),
    ):
        with pytest.raises(KernelError, match=r"failed: cudaError 700; set CUDA_LAUNCH_BLOCKING=1"):
            call()
    with pytest.raises(DeviceError, match="cannot lock 8 bytes of host memory for cuda:0: cudaError 700"):
        backend.pinned(8)
    backend.cuda.runtime.broken = 0


def test_a_device_that_another_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = fake()
    cuda.runtime.broken = 46
    with pytest.raises(DeviceError, match=r"cuda:0 cannot be used: cudaError 46; wanted a GPU"):
        CudaBackend(Device("cuda"), cuda)


def test_a_captured_stream_takes_no_copies_of_the_host(backend: CudaBackend) -> None:
    x = Buffer.from_numpy(backend, np.ones(4, np.float32), "x")
    backend.cuda.runtime.capturing.add(backend.stream.pointer)
    with pytest.raises(
        DeviceError, match="cannot copy 'x' between cuda:0 and the host on a stream that is cap"
    ):
        backend.copy_in(x, np.zeros(4, np.float32), backend.stream)
    with pytest.raises(DeviceError, match="cannot copy 'x'"):
        backend.copy_out(np.zeros(4, np.float32), x, backend.stream)


def test_host_functions_are_refused(backend: CudaBackend) -> None:
    with pytest.raises(DeviceError, match="only on the simulated device"):
        backend.call_host(lambda: None, (), backend.stream)


def test_work_is_captured_once_and_replayed(backend: CudaBackend) -> None:
    runtime = backend.cuda.runtime
    buffer = Buffer.from_numpy(backend, np.zeros(8, np.uint8), "x")
    replay = backend.capture(lambda: backend.fill(buffer, 7, backend.stream), backend.stream)
    assert buffer.numpy().tolist() == [0] * 8
    replay()
    assert buffer.numpy().tolist() == [7] * 8
    backend.fill(buffer, 1, backend.stream)
    replay()
    assert buffer.numpy().tolist() == [7] * 8
    del replay
    assert not runtime.graphs


def test_a_capture_that_fails_says_why(backend: CudaBackend) -> None:
    def issue() -> None:
        raise KernelError("the operator that failed")

    for unjoined in (True, False):
        backend.cuda.runtime.unjoined = unjoined
        with pytest.raises(KernelError, match=r"^the operator that failed$"):
            backend.capture(issue, backend.stream)
    assert not backend.stream.capturing
    assert not backend.cuda.runtime.graphs


def test_memory_kept_for_reuse_makes_room_for_modules(backend: CudaBackend) -> None:
    backend.stream.synchronize()
    backend.cuda.driver.wanted = backend.memory_info()[0]
    block = backend.allocate(1 << 20)
    with pytest.raises(DeviceError, match=r"cannot load activation.cu on cuda:0: CUDA_ERROR 2"):
        backend.function("activation", "relu_fwd_f32")
    del block
    backend.function("activation", "relu_fwd_f32")


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(DeviceError, match="there is no device cuda:2, found cuda:0, cuda:1"):
        CudaBackend(Device("cuda", 2), fake(devices=2))


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "driver", lambda: None)
    with pytest.raises(DeviceError, match=r"no NVIDIA driver \(libcuda.so.1 cannot be loaded\).*'sim:0'"):
        CudaBackend(Device("cuda"), fake(status=35))


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "driver", SimpleNamespace)
    with pytest.raises(DeviceError, match=r"no CUDA device can be used: .*100.*nvidia-smi"):
        CudaBackend(Device("cuda"), fake(status=100))


def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api.runtime", None)
    with pytest.raises(DeviceError, match=r"CuPy is not there .*pip install 'gpunet\[cuda12\]'"):
        backends.backend(Device("cuda", 7))


@pytest.mark.parametrize(
    ("gpus", "cupy", "want"), [(1, True, "cuda:0"), (2, True, "cuda:0"), (0, True, "cpu"), (1, False, "cpu")]
)
def test_the_best_device(monkeypatch: pytest.MonkeyPatch, gpus: int, cupy: bool, want: str) -> None:
    monkeypatch.setattr(devices, "gpu_count", lambda: gpus)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if cupy else None)
    assert str(parse_device("auto")) == want


class Driverless:
    def __init__(self, init: int, count: int) -> None:
        self.init = init
        self.count = count

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.init

    def cuDeviceGetCount(self, result: Any) -> int:  # noqa: N802
        result._obj.value = self.count
        return 0


@pytest.mark.parametrize(
    ("library", "count"),
    [(None, 0), (Driverless(100, 1), 0), (Driverless(0, 3), 3)],
    ids=["no driver", "driver without device", "three devices"],
)
def test_the_driver_counts(monkeypatch: pytest.MonkeyPatch, library: Any, count: int) -> None:
    monkeypatch.setattr(devices, "driver", lambda: library)
    assert devices.gpu_count.__wrapped__() == count


def test_nothing_of_cuda_is_imported_before_it_is_used() -> None:
    code = "import sys, gpunet; gpunet.Workspace('cpu'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # cuda-bindings puts an empty `cuda` there at the start of Python.
    assert not {"cupy", "cupy_backends", "cuda.bindings", "cuda.pathfinder", "nvmath", "cudnn"} & set(
        done.stdout.split()
    )


# The installed CuPy.

METHODS = [
    ("runtime" if owner is Runtime else "driver", name, len(inspect.signature(method).parameters) - 1)
    for owner in (Runtime, Driver)
    for name, method in vars(owner).items()
    if inspect.isfunction(method) and name not in ("__init__", "_check", "run")
]
CONSTANTS = {name: value for name, value in vars(Runtime).items() if isinstance(value, int)}


def bindings(module: str) -> Any:
    if WITHOUT_CUPY:
        pytest.skip(f"CuPy is not installed; {nvrtc.INSTALL}")
    return importlib.import_module(f"cupy_backends.cuda.api.{module}")


@pytest.mark.parametrize(("module", "name", "count"), METHODS, ids=[name for _, name, _ in METHODS])
def test_cupy_takes_these_arguments(module: str, name: str, count: int) -> None:
    signature = (getattr(bindings(module), name).__doc__ or "").splitlines()[0]
    inside = signature[signature.index("(") + 1 : signature.rindex(")")]
    assert signature.startswith(f"{name}(")
    assert len([p for p in inside.split(",") if p.strip()]) == count, signature


@pytest.mark.parametrize(("name", "value"), list(CONSTANTS.items()), ids=list(CONSTANTS))
def test_constants_of_cupy(name: str, value: int) -> None:
    assert getattr(bindings("runtime"), name) == value


def test_every_call_is_one_of_these() -> None:
    """The fakes, and so the checks above, know every name that the backend uses."""
    source = inspect.getsource(cuda_backend)
    used = set(re.findall(r"runtime\.(\w+)", source)) - {"CUDARuntimeError"}
    used |= set(re.findall(r"driver\.(\w+)", source)) - {"CUDADriverError"}
    known = {name for _, name, _ in METHODS} | set(CONSTANTS)
    assert used <= known
    assert known <= used


def test_errors_of_cupy() -> None:
    error = bindings("runtime").CUDARuntimeError(2)
    assert isinstance(error, RuntimeError)
    assert error.status == 2
    assert issubclass(bindings("driver").CUDADriverError, RuntimeError)


def test_without_a_gpu_the_real_bindings_say_so() -> None:
    bindings("runtime")
    if devices.gpu_count():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceError, match=r"no CUDA device can be used: "):
        cuda_backend.open_backend(Device("cuda"))
