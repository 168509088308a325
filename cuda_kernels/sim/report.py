"""Errors of kernels on the simulated device in words: kernel, block, thread, argument, buffer, element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from gpunet.buffers import Buffer
from gpunet.cuda_kernels.signature import Parameter
from gpunet.cuda_kernels.sim import library
from gpunet.errors import KernelError

#: Each pointer parameter of a launch with what was passed for it.
Pointers: TypeAlias = Sequence[tuple[Parameter, Any]]


def describe(kernel: str, module: str, pointers: Pointers) -> KernelError:
    """The error for what stopped the last launch of the runtime."""
    report = library.runtime().report()
    place = f"kernel {kernel!r} ({module}.cu)"
    thread = f"{place}, block {_triple(report.block)}, thread {_triple(report.thread)}"
    line = f" ({report.file.decode()}:{report.line})" if report.line else ""
    text = report.text.decode(errors="replace")
    done = {library.READ: "read", library.WRITE: "wrote"}.get(report.access, "accessed")
    match report.kind:
        case library.ACCESS:
            return KernelError(f"{thread}: {done} {_address(report.address, report.access, pointers, text)}")
        case library.CANARY:
            where = _address(report.address, report.access, pointers, text)
            return KernelError(f"{place}: {done} {where} (found after the launch)")
        case library.SHARED_ACCESS if report.access:
            return KernelError(f"{thread}: {done} {text}")
        case library.SHARED_ACCESS:
            return KernelError(f"{place}: {text} (found after the launch)")
        case library.BARRIER | library.WARP:
            what = (
                "a barrier that not all threads reach"
                if report.kind == library.BARRIER
                else "a warp operation that cannot end"
            )
            return KernelError(
                f"{place}, block {_triple(report.block)}: {what}: {text}{'' if ':' in text else line}"
            )
        case library.CONFIGURATION:
            return KernelError(f"{place}: cannot launch: {text}")
        case _:
            return KernelError(f"{thread}: {text}{line}")


def argument(parameter: Parameter, buffer: Any) -> str:
    """An argument of a launch in words."""
    return f"argument {parameter.name!r}, buffer {buffer.name!r} ({buffer.spec})"


def _triple(numbers: Any) -> str:
    return "({}, {}, {})".format(*numbers)


def _address(address: int, access: int, pointers: Pointers, text: str) -> str:
    info = library.runtime().find(address)
    buffers = [(p, b) for p, b in pointers if isinstance(b, Buffer)]
    here = [
        (p, b) for p, b in buffers if info is not None and info.base <= b.pointer < info.base + info.length
    ]
    note = ""
    if info is not None and info.freed:
        return next(
            (f"freed buffer {b.name!r} ({b.spec}), argument {p.name!r}" for p, b in here),
            f"a freed block of {info.nbytes} bytes",
        )
    if address < 2**32:
        null = [p.name for p, b in pointers if b is None]
        which = f" (null are the arguments {', '.join(map(repr, null))})" if null else ""
        # The address of a fault for a misaligned vector access is not told either.
        where = f"byte {address} behind a null pointer" if address else "through a null or misaligned pointer"
        return where + which
    if info is not None and not here:
        before = address < info.pointer
        distance = info.pointer - address if before else address - info.pointer - info.nbytes
        note = f"{distance} bytes {'before' if before else 'behind'} a block that is no argument"
    elif info is None:
        note = f"address {address:#x} is no device memory"
    if not here and access == library.WRITE:
        buffers = [(p, b) for p, b in buffers if not p.const]
    if not buffers:
        return f"memory: {note}"
    buffers = here or buffers
    note = f" ({note}; taken for the nearest one)" if note else ""
    parameter, buffer = min(buffers, key=lambda each: _distance(address, each[1]))
    index = (address - buffer.pointer) // buffer.dtype.itemsize
    valid = f"valid are 0 to {buffer.size - 1}" if buffer.size else "it is empty"
    if text:
        return f"element {index} of {argument(parameter, buffer)}, {text}"
    return f"element {index} of {argument(parameter, buffer)}: {valid}{note}"


def _distance(address: int, buffer: Buffer) -> int:
    return max(buffer.pointer - address, address - (buffer.pointer + buffer.nbytes - 1), 0)


def differences(
    pointers: Pointers, first: dict[int, bytes], second: dict[int, bytes], base: dict[int, int]
) -> Iterator[tuple[Parameter, Buffer, int]]:
    """(parameter, buffer, first differing element) of each argument that two runs of a launch left different.

    ``first`` and ``second`` hold the bytes of each block by its address, ``base`` the block of each pointer.
    """
    for parameter, buffer in pointers:
        if not isinstance(buffer, Buffer) or buffer.pointer not in base or not buffer.nbytes:
            continue
        block = base[buffer.pointer]
        start = buffer.pointer - block
        one, two = (each[block][start : start + buffer.nbytes] for each in (first, second))
        if one != two:
            at = next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
            yield parameter, buffer, at // buffer.dtype.itemsize
