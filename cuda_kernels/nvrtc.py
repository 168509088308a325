"""Compiles CUDA sources to cubins with NVRTC; needs the CUDA wheels but no GPU and no driver.

Every module is one translation unit: its expanded source (:mod:`gpunet.cuda_kernels.sources`) and a
``static_assert`` for each declared function, so that a launch can never pass other arguments than the source
takes. Cubins are kept on disk under a name made of the source, the options and the version of NVRTC.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import re
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from gpunet.cuda_kernels import cache, signature, sources
from gpunet.errors import DeviceError, KernelError

INSTALL: Final = "wanted the CUDA packages: pip install 'gpunet[cuda12]' (or cuda13 for a CUDA 13 driver)"
#: No contraction of a*b+c: results agree with the CPU's and the simulated device's; kernels that gain from it
#: (matrix products) call fma themselves.
OPTIONS: Final = ("-std=c++17", "--fmad=false", "-Xptxas=-v", *signature.DEFINES)

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


@dataclass
class Usage:
    """What one function takes: registers a thread, bytes of stack, of registers spilled to memory, of static
    shared memory.
    """

    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    shared: int = 0


@dataclass
class Cubin:
    """A compiled module.

    Attributes:
        code: the ELF image.
        log: what the compiler said.
        usage: by function, as ptxas reports it.
    """

    code: bytes
    log: str = ""
    usage: dict[str, Usage] = field(default_factory=dict)


@functools.cache
def bindings() -> Any:
    """CuPy's NVRTC bindings; raises :class:`DeviceError` with what is missing."""
    try:
        nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        raise DeviceError(f"cannot compile CUDA kernels: {error}; {INSTALL}") from error
    return nvrtc


@functools.cache
def headers() -> str:
    """Folder of CUDA's own headers (cuda_fp16.h, cuda_bf16.h)."""
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
    except ImportError as error:
        raise DeviceError(f"cannot find the headers of CUDA: {error}; {INSTALL}") from error
    found = pathfinder.find_nvidia_header_directory("cudart")
    if found is None or not (Path(found) / "cuda_fp16.h").is_file():
        raise DeviceError(f"cannot find cuda_fp16.h of the CUDA runtime; {INSTALL}")
    return str(found)


def supported(capability: int) -> int:
    """The newest architecture that the installed NVRTC knows and a device of ``capability`` (90 for 9.0)
    runs: itself, or an older one of the same generation.
    """
    known = [int(a) for a in bindings().getSupportedArchs()]
    usable = [a for a in known if a // 10 == capability // 10 and a <= capability]
    if not usable:
        raise DeviceError(
            f"NVRTC {'.'.join(map(str, bindings().getVersion()))} makes no code for compute capability "
            f"{capability / 10}, wanted one of {', '.join(str(a / 10) for a in known)}"
        )
    return max(usable)


def compile_module(module: str, arch: int, options: tuple[str, ...] = ()) -> Cubin:
    """The cubin of ``cuda_kernels/<module>.cu`` for an architecture (90 for sm_90), from the cache if it is
    there.

    Raises:
        KernelError: the source does not compile, or a function has other parameters than declared; with the
            compiler's messages.
        DeviceError: NVRTC or the headers are missing.
    """
    return compile_text(
        f"{module}.cu", f"{sources.expand(module)}\n{signature_checks(module)}", arch, options
    )


def declared_functions(module: str) -> dict[str, str]:
    """Names and C++ parameter types of all functions that are declared of a module."""
    return {
        kernel.function_name(*types): kernel.cpp_parameters(*types)
        for kernel in list(signature.declared.values())
        if kernel.module == module
        for types in kernel.instances()
    }


def signature_checks(module: str) -> str:
    """C++ to append to a module; it fails to compile where parameters are not those declared."""
    lines = [
        f'#line 1 "signatures of {module}.cu"',
        "template <typename A, typename B> struct GpunetSame { static constexpr bool value = false; };",
        "template <typename A> struct GpunetSame<A, A> { static constexpr bool value = true; };",
    ]
    lines += [
        f"static_assert(GpunetSame<decltype(&{name}), void (*)({parameters})>::value, "
        f'"{name} is declared in Python with ({parameters})");'
        for name, parameters in declared_functions(module).items()
    ]
    return "\n".join(lines) + "\n"


def compile_text(name: str, text: str, arch: int, options: tuple[str, ...] = ()) -> Cubin:
    """The cubin of a source; see :func:`compile_module`."""
    nvrtc = bindings()
    flags = (f"-arch=sm_{arch}", *OPTIONS, *options)
    version = ".".join(map(str, nvrtc.getVersion()))
    path = cache.folder("cubin") / f"{cache.key(text, *flags, version)}.cubin"
    found = _read(path)
    if found is not None:
        return found
    program = nvrtc.createProgram(text, name, (), ())
    try:
        try:
            nvrtc.compileProgram(program, [*flags, f"-I{headers()}"])
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise KernelError(f"{name} does not compile for sm_{arch} ({error}):\n{log}") from None
        log = nvrtc.getProgramLog(program).rstrip("\0")
        result = Cubin(bytes(nvrtc.getCUBIN(program)), log, usage(log))
    finally:
        nvrtc.destroyProgram(program)
    numbers = {name: asdict(u) for name, u in result.usage.items()}
    digest = hashlib.sha256(result.code).hexdigest()
    head = json.dumps({"sha256": digest, "log": log, "usage": numbers}).encode()
    cache.write(path, struct.pack("<I", len(head)) + head + result.code)
    return result


def _read(path: Path) -> Cubin | None:
    """A cached cubin; ``None`` if there is none or it is damaged."""
    try:
        data = path.read_bytes()
        (size,) = struct.unpack_from("<I", data)
        head = json.loads(data[4 : 4 + size])
        code = data[4 + size :]
        if hashlib.sha256(code).hexdigest() != head["sha256"]:
            return None
        return Cubin(code, head["log"], {name: Usage(**u) for name, u in head["usage"].items()})
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None


def usage(log: str) -> dict[str, Usage]:
    """What ``ptxas -v`` reports, by function."""
    result: dict[str, Usage] = {}
    current: Usage | None = None
    for line in log.splitlines():
        entry = _ENTRY.search(line)
        if entry:
            current = result[entry.group(1)] = Usage()
        elif current is not None:
            spill, used = _SPILL.search(line), _USED.search(line)
            if spill:
                current.stack, current.spill_stores, current.spill_loads = map(int, spill.groups())
            elif used:
                current.registers, current.shared = int(used.group(1)), int(used.group(2) or 0)
    return result


def functions(code: bytes) -> set[str]:
    """Names of the kernels in a cubin: an ELF image with a section ``.text.NAME`` for each."""
    if not code.startswith(b"\x7fELF\x02\x01"):
        raise KernelError("a cubin is not a little-endian 64-bit ELF image")
    (offset,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names = struct.unpack_from("<HHH", code, 0x3A)
    starts = [struct.unpack_from("<I", code, offset + i * size)[0] for i in range(count)]
    (table,) = struct.unpack_from("<Q", code, offset + names * size + 0x18)
    found = set()
    for start in starts:
        begin = table + start
        name = code[begin : code.index(b"\0", begin)].decode()
        if name.startswith(".text."):
            found.add(name.removeprefix(".text."))
    return found
