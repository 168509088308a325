"""Builds CUDA sources and the simulated device's runtime with a C++ compiler of the host, cached on disk."""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpunet.cuda_kernels import cache, signature, sources
from gpunet.errors import DeviceError

FOLDER: Final = Path(__file__).resolve().parent
#: No -ffast-math, no fused multiply-add: results are those of the C++ as written.
FLAGS: Final = (
    *("-O2", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-aliasing"),
    *(
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fstack-clash-protection",
        "-w",
        "-DGPUNET_SIM",
        *signature.DEFINES,
    ),
)
_CLANG_CHECKS: Final = ("-asan-instrumentation-with-call-threshold=0", "-asan-stack=0", "-asan-globals=0")
MISSING: Final = (
    "the simulated device needs a C++ compiler: install g++ or clang++ with the system's package manager, "
    "or `pip install ziglang`, or set GPUNET_SIM_CXX to the command of one"
)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the command, and what its builds depend on (command and version)."""

    command: tuple[str, ...]
    identity: str


def find() -> Compiler | None:
    """The compiler: ``GPUNET_SIM_CXX``, else the first found of g++, clang++, the package ``ziglang``."""
    return _find(os.environ.get("GPUNET_SIM_CXX"), os.environ.get("PATH"))


@functools.cache
def _find(override: str | None, path: str | None) -> Compiler | None:
    if override:
        return _identify(tuple(shlex.split(override)))
    for name in ("g++", "clang++"):
        if shutil.which(name, path=path):
            found = _identify((name,))
            if found is not None:
                return found
    if importlib.util.find_spec("ziglang") is not None:
        # By default zig checks for undefined behaviour, with a library, and compiles for this processor.
        return _identify(
            (sys.executable, "-m", "ziglang", "c++", "-fno-sanitize=undefined", "-mcpu=baseline")
        )
    return None


def _identify(command: tuple[str, ...]) -> Compiler | None:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    if done.returncode != 0:
        return None
    return Compiler(
        command, f"{shlex.join(command)}\n{done.stdout}\n{platform.system()} {platform.machine()}"
    )


def checks_bounds() -> bool:
    """Whether modules are built with a check of every access (``GPUNET_SIM_BOUNDS``)."""
    return os.environ.get("GPUNET_SIM_BOUNDS", "0") not in ("", "0")


def _module_flags() -> tuple[str, ...]:
    """Further flags of modules: the instrumentation for :func:`checks_bounds`, and ``GPUNET_SIM_FLAGS``."""
    extra = tuple(shlex.split(os.environ.get("GPUNET_SIM_FLAGS", "")))
    if not checks_bounds():
        return extra
    if "clang" in _compiler().identity:
        instrument = tuple(word for check in _CLANG_CHECKS for word in ("-mllvm", check))
    else:
        instrument = tuple(word for check in _CLANG_CHECKS for word in ("--param", check.removeprefix("-")))
    return ("-fsanitize=kernel-address", *instrument, *extra)


def build_runtime() -> Path:
    """The shared library of the runtime, built if need be. Raises :class:`DeviceError`."""
    text = (FOLDER / "runtime.cpp").read_text(encoding="utf-8")
    name = f"libgpunet_sim_{_hash([text, *_headers()])}.so"
    return _build(f'#line 1 "cuda_kernels/sim/runtime.cpp"\n{text}', "the runtime", name)


def build_module(module: str) -> Path:
    """The shared library of a module of kernels, with a launcher of each declared instance of its kernels.

    Raises:
        DeviceError: there is no compiler; the source does not compile; a kernel is not as declared.
    """
    # Linked by its name: the loader takes the one that is loaded already.
    runtime = build_runtime()
    text = rewrite_shared(sources.expand(module)) + launchers(module)
    link = (f"-L{runtime.parent}", f"-l:{runtime.name}", "-Wl,-Bsymbolic")
    flags = _module_flags()
    name = f"{_hash([text, runtime.name, *flags, *_headers()])}.so"
    return _build(text, f"the CUDA module {module!r}", name, flags, link)


def launchers(module: str) -> str:
    """C++ text of the launchers of a module's declared kernels, with the checks of their signatures."""
    lines = [f'\n#line 1 "launchers of {module}.cu"\n']
    for (owner, _), kernel in signature.declared.items():
        if owner != module:
            continue
        for types in kernel.instances():
            name = kernel.function_name(*types)
            parameters = kernel.cpp_parameters(*types)
            each = [p.strip() for p in parameters.split(",")]
            message = f"kernel '{name}': its parameters in the source are not the declared ({parameters})"
            arguments = ", ".join(f"*({p}*)params[{i}]" for i, p in enumerate(each))
            check = f"gpunet_sim::Signature<decltype(&{name}), void (*)({parameters})>::value"
            lines.append(
                f'static_assert({check}, "{message}");\n'
                f'extern "C" GPUNET_SIM_EXPORT void gpunet_call_{name}(void** params) {{\n'
                f"  do {name}({arguments}); while (gpunet_sim::next_thread());\n}}\n"
            )
    return "".join(lines)


_TOKEN: Final = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'
    r"(?P<dynamic>\bextern\s+__shared__\s+(?P<rest>[^;]+);)|(?P<static>\b__shared__\s+(?P<body>[^;]+);)",
    re.DOTALL,
)
_ALIGN: Final = re.compile(r"(__align__|alignas)\s*\([^()]*\)|__attribute__\s*\(\(.*?\)\)\s*")
_DECLARATOR: Final = re.compile(r"^(?P<type>.*?)(?P<name>\w+)\s*(?P<dims>(\[.*\])?)\s*$", re.DOTALL)


def rewrite_shared(text: str) -> str:
    """Turns declarations of shared memory into those of ``gpunet_sim.h``, which check bounds and poison it.

    ``__shared__ T a[n], b;`` and ``extern __shared__ T c[];`` are understood, with any type and dimensions.
    """

    def replace(match: re.Match[str]) -> str:
        body = match["rest"] or match["body"]
        if body is None:
            return match[0]
        first, *others = _split(_ALIGN.sub("", body))
        declarator = _DECLARATOR.match(first)
        if declarator is None or not declarator["type"].strip():
            return match[0]
        type = declarator["type"].strip()
        if match["rest"]:
            result = f"GPUNET_SIM_DYNAMIC_SHARED({_shield(type)}, {declarator['name']});"
        else:
            parts = [declarator, *(_DECLARATOR.match(other.strip()) for other in others)]
            result = "; ".join(
                f"GPUNET_SIM_SHARED({_shield(type)}, {part['name']}, {part['dims']})"
                for part in parts
                if part is not None
            )
            result += ";"
        # Later lines keep their numbers.
        return result.replace("\n", " ") + "\n" * match[0].count("\n")

    return _TOKEN.sub(replace, text)


def _shield(type: str) -> str:
    """A type as one macro argument, commas inside included."""
    return f"typename gpunet_sim::Type<void({type})>::type" if "," in type else type


def _split(text: str) -> list[str]:
    """Splits at the commas outside of any brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def _headers() -> Iterator[str]:
    for path in sorted(FOLDER.glob("*.h")):
        yield path.read_text(encoding="utf-8")


def _compiler() -> Compiler:
    compiler = find()
    if compiler is None:
        raise DeviceError(MISSING)
    return compiler


def _hash(parts: Iterable[str]) -> str:
    return cache.key(_compiler().identity, *FLAGS, *parts)


def _build(text: str, what: str, name: str, flags: tuple[str, ...] = (), link: tuple[str, ...] = ()) -> Path:
    """Compiles ``text`` to a shared library of the cache; does nothing if it is there."""
    compiler = _compiler()
    folder = cache.folder("sim")
    target = folder / name
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f"{target.stem}.lock"), tempfile.TemporaryDirectory(dir=folder) as work:
            if target.is_file():
                return target
            source, result = Path(work, "source.cpp"), Path(work, target.name)
            source.write_text(text, encoding="utf-8")
            command = [
                *(*compiler.command, *FLAGS, *flags, f"-I{sources.INCLUDE}", f"-I{FOLDER}"),
                *("-x", "c++", str(source), "-x", "none"),
                *(*link, f"-Wl,-soname,{target.name}", "-o", str(result)),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise DeviceError(f"cannot build {what} for the simulated device:\n{done.stderr.strip()}")
            os.replace(result, target)
    except OSError as error:
        raise DeviceError(
            f"cannot build {what} for the simulated device in {folder}: {error}; "
            "GPUNET_CACHE_DIR names another folder"
        ) from None
    return target


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process builds; the others wait and find the result."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
