"""Every CUDA source compiles for every architecture to exactly the declared kernels, without a GPU."""

from pathlib import Path

import pytest

from gpunet.cuda_kernels import nvrtc, signature, sources
from gpunet.errors import DeviceError, KernelError

ARCHITECTURES = (75, 80, 90, 100)
#: Bytes of spilled registers (stores + loads) that are accepted, by (module, architecture, function).
SPILLS: dict[tuple[str, int, str], int] = {}

MODULES = sources.modules()


@pytest.fixture(autouse=True)
def _needs_nvrtc() -> None:
    try:
        nvrtc.bindings()
        nvrtc.headers()
    except DeviceError as error:
        pytest.skip(str(error))


def test_modules_are_the_declared_ones() -> None:
    written = {module for module, _ in signature.declared if module not in sources._registered}
    assert written == set(MODULES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("module", MODULES)
def test_compiles(module: str, arch: int) -> None:
    cubin = nvrtc.compile_module(module, arch)
    declared = set(nvrtc.declared_functions(module))
    assert nvrtc.functions(cubin.code) == declared
    assert set(cubin.usage) == declared
    assert all(u.registers > 0 for u in cubin.usage.values())
    spills = {
        (module, arch, name): u.spill_stores + u.spill_loads
        for name, u in cubin.usage.items()
        if u.spill_stores + u.spill_loads
    }
    assert spills == {key: n for key, n in SPILLS.items() if key[:2] == (module, arch)}


def test_the_declared_parameters_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signature, "declared", {})
    monkeypatch.setattr(sources, "_registered", {})
    text = '#include "gpunet.cuh"\nextern "C" __global__ void twice(float* x, int64 n) {}\n'
    sources.register_source("own_twice", text)
    signature.Kernel("own_twice", "twice", "const float* x, int64 n")
    with pytest.raises(
        KernelError, match=r"twice is declared in Python with \(const float\*, int64\)"
    ) as error:
        nvrtc.compile_module("own_twice", 90)
    assert "own_twice.cu does not compile for sm_90" in str(error.value)


def test_errors_point_at_the_line_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_registered", {})
    sources.register_source("own_broken", '#include "gpunet.cuh"\n\n__global__ void f() { nothing(); }\n')
    with pytest.raises(KernelError, match=r"own_broken\.cu\(3\): error"):
        nvrtc.compile_module("own_broken", 80)


def test_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUNET_CACHE_DIR", str(tmp_path))
    text = 'extern "C" __global__ void f(float* x) { x[threadIdx.x] = 1; }\n'
    first = nvrtc.compile_text("f.cu", text, 80)
    (file,) = (tmp_path / "cubin").iterdir()
    assert nvrtc.compile_text("f.cu", text, 80) == first
    nvrtc.compile_text("f.cu", text, 90)
    nvrtc.compile_text("f.cu", text, 80, ("--fmad=true",))
    assert len(list((tmp_path / "cubin").iterdir())) == 3
    whole = file.read_bytes()
    for damaged in (whole[:100], whole[:-1], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(damaged)
        assert nvrtc.compile_text("f.cu", text, 80).code == first.code, "a damaged file is compiled again"
        assert len(file.read_bytes()) >= len(whole) - 5, "up to the digits of a compile time in the log"


def test_spills_are_seen() -> None:
    body = "".join(f"float v{i} = x[threadIdx.x + {i * 32}];" for i in range(100))
    total = "".join(f"x[threadIdx.x + {i * 32}] = v{i} * v{99 - i};" for i in range(100))
    text = f'extern "C" __global__ void f(float* x) {{ {body} __syncthreads(); {total} }}'
    usage = nvrtc.compile_text("f.cu", text, 80, ("--maxrregcount=24",)).usage["f"]
    assert (usage.registers, usage.spill_stores > 0, usage.spill_loads > 0) == (24, True, True)


@pytest.mark.parametrize(
    ("capability", "arch"), [(75, 75), (85, 80), (86, 86), (90, 90), (100, 100)], ids=str
)
def test_the_architecture_for_a_device(capability: int, arch: int) -> None:
    assert nvrtc.supported(capability) == arch


def test_an_unknown_device() -> None:
    with pytest.raises(DeviceError, match=r"no code for compute capability 3\.5, wanted one of .*9\.0"):
        nvrtc.supported(35)
