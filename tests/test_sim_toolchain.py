"""Building kernels for the simulated device: compilers, declarations, sources, cache."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from gpunet.cuda_kernels import sources
from gpunet.cuda_kernels.sim import toolchain
from gpunet.errors import DeviceError, SchemaError
from tests.sim_kernels import FOLDER, Sim, declare, declared, needs_compiler

SOURCE = """
#include "gpunet.cuh"
extern "C" __global__ void scale(const float* x, float* y, int64 n) { y[n] = x[n] * 2; }
"""


@needs_compiler
@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ("const float* x, float* y", "scale"),
        ("const float* x, float* y, int64 n, int64 m", "scale"),
        ("const float* x, float* y, int32 n", "scale"),
        ("float* x, float* y, int64 n", "scale"),
        ("const float* x, double* y, int64 n", "scale"),
    ],
)
def test_wrong_declaration_is_an_error_at_build(
    parameters: str,
    found: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = re.sub(r"\W+", "_", request.node.name)
    sources.register_source(module, SOURCE)
    with declared(declare(module, "scale", parameters)), pytest.raises(DeviceError) as caught:
        toolchain.build_module(module)
    message = str(caught.value)
    declaration = ", ".join(re.sub(r" \w+$", "", part) for part in parameters.split(", "))
    assert f"kernel 'scale': its parameters in the source are not the declared ({declaration})" in message


@needs_compiler
def test_errors_name_file_and_line() -> None:
    sources.register_source(
        "sim_bad_syntax", '#include "gpunet.cuh"\n\n__global__ void f() { undefined_name = 1; }\n'
    )
    with pytest.raises(
        DeviceError, match=r"(?s)cannot build the CUDA module .*sim_bad_syntax.cu:3:.*undefined_name"
    ):
        toolchain.build_module("sim_bad_syntax")


@needs_compiler
def test_kernel_missing_from_the_source() -> None:
    sources.register_source("sim_missing", SOURCE)
    with declared(declare("sim_missing", "scaled", "float* x")), pytest.raises(DeviceError, match="scaled"):
        toolchain.build_module("sim_missing")


def test_unknown_module_and_taken_name() -> None:
    with pytest.raises(DeviceError, match=r"cannot read the CUDA source .*no_such_module\.cu"):
        sources.expand("no_such_module")
    with pytest.raises(SchemaError, match="'activation' exists already"):
        sources.register_source("activation", "")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUNET_SIM_CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("GPUNET_CACHE_DIR", str(tmp_path))
    assert toolchain.find() is None
    with pytest.raises(DeviceError, match=r"needs a C\+\+ compiler: install g\+\+ or clang\+\+ .* ziglang"):
        toolchain.build_module("activation")


def test_order_in_which_compilers_are_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def install(name: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho {name} 1.0\n")
        path.chmod(0o755)

    monkeypatch.delenv("GPUNET_SIM_CXX", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    monkeypatch.setattr(toolchain.shutil, "which", lambda name, path: (tmp_path / name).is_file() or None)
    install("clang++")
    toolchain._find.cache_clear()
    assert (found := toolchain.find()) is not None
    assert found.command == ("clang++",)
    install("g++")
    toolchain._find.cache_clear()
    assert (found := toolchain.find()) is not None
    assert found.command == ("g++",)
    assert "g++ 1.0" in found.identity
    monkeypatch.setenv("GPUNET_SIM_CXX", "clang++ -O1")
    assert (found := toolchain.find()) is not None
    assert found.command == ("clang++", "-O1")
    toolchain._find.cache_clear()


@needs_compiler
def test_builds_are_kept_until_a_source_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUNET_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "sim_cached.cu"
    header = tmp_path / "factor.cuh"
    header.write_text("#pragma once\n#define FACTOR 2\n")
    source.write_text(
        '#include "gpunet.cuh"\n#include "factor.cuh"\n__global__ void f(float* y) { y[0] = FACTOR; }\n'
    )
    sources.register_source("sim_cached", source)
    first = toolchain.build_module("sim_cached")
    time = first.stat().st_mtime_ns
    assert toolchain.build_module("sim_cached") == first
    assert first.stat().st_mtime_ns == time
    header.write_text("#pragma once\n#define FACTOR 3\n")
    second = toolchain.build_module("sim_cached")
    assert second != first
    with declared(declare("sim_cached", "f", "float* y")):
        assert toolchain.build_module("sim_cached") not in (first, second)
    left = sorted(path.suffix for path in (tmp_path / "cache" / "sim").iterdir())
    assert left == [".lock"] * 4 + [".so"] * 4


@needs_compiler
def test_builds_at_the_same_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUNET_CACHE_DIR", str(tmp_path))
    code = "from gpunet.cuda_kernels.sim import toolchain; print(toolchain.build_module('activation'))"
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    paths = {process.communicate()[0] for process in running}
    assert len(paths) == 1
    assert Path(paths.pop().strip()).is_file()


def test_expansion_keeps_lines_and_includes_once(tmp_path: Path) -> None:
    (tmp_path / "one.cuh").write_text("#pragma once\nint one;\n")
    (tmp_path / "two.cuh").write_text('#include "one.cuh"\nint two;\n')
    source = tmp_path / "sim_expanded.cu"
    source.write_text(
        '#include "one.cuh"\n#include "two.cuh"\n#include "unknown.h"\n#include <math.h>\nint three;\n'
    )
    sources.register_source("sim_expanded", source)
    text = sources.expand("sim_expanded")
    assert text.count("int one;") == text.count("int two;") == 1
    assert '#include "unknown.h"' in text
    assert "#include <math.h>" in text
    assert "#pragma once" not in text
    name, line, places = "", 0, {}
    for row in text.splitlines():
        if (directive := re.match(r'#line (\d+) "(.*)"', row)) is not None:
            line, name = int(directive[1]), Path(directive[2]).name
            continue
        places[row] = (name, line)
        line += 1
    assert places["int one;"] == ("one.cuh", 2)
    assert places["int two;"] == ("two.cuh", 2)
    assert places["int three;"] == ("sim_expanded.cu", 5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "__shared__ float a[3][4], b;",
            "GPUNET_SIM_SHARED(float, a, [3][4]); GPUNET_SIM_SHARED(float, b, );",
        ),
        (
            "extern __shared__ __align__(16) unsigned char raw[];",
            "GPUNET_SIM_DYNAMIC_SHARED(unsigned char, raw);",
        ),
        (
            "__shared__ typename A<T>::type s[N * (2)];",
            "GPUNET_SIM_SHARED(typename A<T>::type, s, [N * (2)]);",
        ),
        (
            "__shared__ P<int, 3> q[2];",
            "GPUNET_SIM_SHARED(typename gpunet_sim::Type<void(P<int, 3>)>::type, q, [2]);",
        ),
        ("// in __shared__ memory;\nint x;", "// in __shared__ memory;\nint x;"),
        ("/* __shared__ int y; */", "/* __shared__ int y; */"),
    ],
)
def test_rewriting_of_shared_memory(text: str, expected: str) -> None:
    assert toolchain.rewrite_shared(text) == expected


@needs_compiler
def test_contexts_of_the_c_library(tmp_path: Path) -> None:
    """Where there is no assembly for the processor: the same kernels through ucontext."""
    compiler = toolchain.find()
    assert compiler is not None
    code = (
        "import numpy as np; from tests.sim_kernels import Sim; s = Sim();"
        "x = np.arange(256, dtype='float32');"
        "y = s.put(x, 'y'); s.run('rotate', (s.put(x, 'x'), y), (1, 256));"
        "assert (y.numpy() == np.roll(x, -1)).all();\n"
        "try: s.run('write_at', (y, 256, 0))\nexcept Exception as e: print(e, flush=True)\n"
        "s.run('rotate', (s.put(x, 'x'), y), (1, 256))\nassert (y.numpy() == np.roll(x, -1)).all()"
    )
    command = " ".join([*compiler.command, "-DGPUNET_SIM_UCONTEXT"])
    env = os.environ | {"GPUNET_SIM_CXX": command, "GPUNET_CACHE_DIR": str(tmp_path)}
    root = FOLDER.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "wrote element 256 of argument 'y'" in done.stdout


@needs_compiler
def test_faults_outside_of_launches_keep_their_handler() -> None:
    code = (
        "import faulthandler, ctypes, sys; faulthandler.enable();"
        "from tests.sim_kernels import Sim; import numpy as np; s = Sim();"
        "y = s.put(np.zeros(4, 'float32'), 'y');\n"
        "try: s.run('write_at', (y, 4, 0))\nexcept Exception as e: print(e, flush=True)\n"
        "s.backend.call_host(lambda a: ctypes.string_at(8), [y], s.backend.stream)\n"
        "s.backend.stream.synchronize()"
    )
    root = FOLDER.parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert "wrote element 4 of argument 'y'" in done.stdout
    assert done.returncode < 0
    assert "Fatal Python error: Segmentation fault" in done.stderr


@needs_compiler
def test_launches_from_several_threads() -> None:
    def work(seed: int) -> None:
        sim = Sim(seed=seed)
        x = np.full(256, seed, "float32")
        y = sim.put(x, "y")
        for _ in range(50):
            sim.run("rotate", (sim.put(x, "x"), y), (1, 256))
        results.append(bool((y.numpy() == seed).all()))

    results: list[bool] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


def examples() -> list[tuple[str, str]]:
    """Each program of the page on debugging kernels, with what it prints last."""
    text = (FOLDER.parent.parent / "docs" / "cuda.md").read_text(encoding="utf-8")
    section = text[text.index("## Debugging a kernel") : text.index("## How kernels are compiled")]
    return re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def test_every_example_of_the_documentation_tells_its_output() -> None:
    text = (FOLDER.parent.parent / "docs" / "cuda.md").read_text(encoding="utf-8")
    section = text[: text.index("## How kernels are compiled")]
    assert len(examples()) == section.count("```python") == 3


@needs_compiler
@pytest.mark.parametrize(("code", "output"), examples(), ids=["index", "barrier", "streams"])
def test_examples_of_the_documentation(code: str, output: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    root = str(FOLDER.parent.parent)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stderr or done.stdout).splitlines()[-1] == output.strip()


@needs_compiler
def test_flags_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    sources.register_source(
        "sim_flags", '#include "gpunet.cuh"\n#if CHOICE != 2\n#error wrong choice\n#endif\n'
    )
    with pytest.raises(DeviceError, match=r"sim_flags\.cu:3.*wrong choice"):
        toolchain.build_module("sim_flags")
    monkeypatch.setenv("GPUNET_SIM_FLAGS", "-DCHOICE=2")
    toolchain.build_module("sim_flags")
