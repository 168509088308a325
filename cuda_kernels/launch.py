"""Launches: arguments checked against the declared signature once, when a program is bound; then only put on
the stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from gpunet.backends import Reached
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.signature import Kernel, scalar
from gpunet.errors import DataTypeError, DeviceError, KernelError
from gpunet.kernels import KernelContext

THREADS: Final = 256
#: Enough blocks to fill any GPU of today several times; loops in the kernels do the rest.
MAX_BLOCKS: Final = 65_535
#: Blocks to aim at in reductions, and elements a thread to reduce at least.
_WANTED_BLOCKS: Final = 1024
_PER_THREAD: Final = 16

Grid = tuple[int, int]


def elementwise(count: int, *, per_thread: int = 1) -> Grid:
    """(blocks, threads) for a grid-stride loop over ``count`` elements."""
    blocks = -(-count // (THREADS * per_thread))
    return max(1, min(blocks, MAX_BLOCKS)), THREADS


def rows(count: int, width: int) -> Grid:
    """(blocks, threads) for kernels in which a block reduces a row of ``width`` elements and strides over
    ``count`` rows.

    Threads are a power of two and a multiple of the warp, as the block reductions of include/gpunet.cuh want.
    """
    threads = 32
    while threads < min(width, THREADS):
        threads *= 2
    return max(1, min(count, MAX_BLOCKS)), threads


def one_block(count: int) -> Grid:
    """(1, threads) for kernels in which a single block reduces ``count`` elements."""
    threads = 32
    while threads < min(count, 1024):
        threads *= 2
    return 1, threads


def columns(count: int, depth: int) -> tuple[int, int]:
    """(across, threads) for kernels in which a block reduces ``across`` neighbouring columns of ``depth``
    elements, ``threads // across`` threads a column.

    Both are powers of two. Where columns are short, a thread has one to itself.
    """

    def power(n: int, limit: int) -> int:
        found = 1
        while found < min(n, limit):
            found *= 2
        return found

    deep = power(depth, THREADS // power(count, 32))
    across = power(count, THREADS // deep)
    return across, max(32, across * deep)


def blocks(count: int, threads: int) -> Grid:
    """(blocks, threads) for kernels whose blocks stride over ``count`` pieces of work."""
    return max(1, min(count, MAX_BLOCKS)), threads


def slices(tiles: int, depth: int, deep: int) -> int:
    """How many pieces a reduction over ``depth`` elements is cut into to make enough blocks for a GPU.

    Without cuts it has ``tiles`` blocks, in which ``deep`` threads share the elements of a result.
    """
    return max(1, min(_WANTED_BLOCKS // max(1, tiles), depth // (deep * _PER_THREAD)))


def prepare(
    ctx: KernelContext,
    kernel: Kernel,
    types: tuple[np.dtype, ...],
    arguments: tuple[Any, ...],
    grid: Grid,
    *,
    shared: int = 0,
    reads: Sequence[Buffer] = (),
    writes: Sequence[Buffer] = (),
) -> Callable[[], None]:
    """Checks ``arguments`` against the signature and returns the launch, ready to be repeated.

    Args:
        ctx: the context of the operator, with the device and the stream.
        kernel: the declared kernel.
        types: element types for its type parameters.
        arguments: a :class:`Buffer` for each pointer (``None`` passes a null pointer), a number for each
            scalar.
        grid: from :func:`elementwise` or :func:`rows`.
        shared: bytes of dynamic shared memory.
        reads: what the kernel reads through addresses that it finds in memory.
        writes: what it writes, and may read, in that way.

    Raises:
        KernelError: another number of arguments, or a number where a buffer is wanted and the reverse.
        DataTypeError: a buffer of another element type, or a combination that is not instantiated.
        DeviceError: a buffer of another device.
    """
    name = kernel.function_name(*types)
    if len(arguments) != len(kernel.parameters):
        raise KernelError(f"kernel {name!r} got {len(arguments)} arguments, wanted {len(kernel.parameters)}")
    backend = ctx.backend
    values = []
    for parameter, argument in zip(kernel.parameters, arguments, strict=True):
        if parameter.pointer:
            values.append(
                ctypes.c_void_p(
                    _address(name, parameter.name, argument, kernel.element_type(parameter, types), backend)
                )
            )
        elif isinstance(argument, (int, float, np.generic, bool)):
            values.append(scalar(parameter.type, argument))
        else:
            raise KernelError(
                f"kernel {name!r}: argument {parameter.name!r} is {argument!r}, wanted a {parameter.type}"
            )
    params: Any = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    params.values = values  # live as long as it
    function = backend.function(kernel.module, name)
    blocks, threads = (grid[0], 1, 1), (grid[1], 1, 1)
    stream = ctx.stream
    for argument in (*arguments, *reads, *writes):
        if isinstance(argument, Buffer):
            argument.memory.used_on(stream)
    behind = (Reached(tuple(reads), tuple(writes)),) if reads or writes else ()

    def launch(_given: tuple[Any, ...] = (*arguments, *behind)) -> None:
        function.launch(blocks, threads, shared, params, stream, _given)

    return launch


def _address(kernel: str, name: str, argument: Any, wanted: np.dtype, backend: Any) -> int | None:
    if argument is None:
        return None
    if not isinstance(argument, Buffer):
        raise KernelError(
            f"kernel {kernel!r}: argument {name!r} is {type(argument).__name__}, wanted a buffer"
        )
    if argument.dtype != wanted:
        raise DataTypeError(f"kernel {kernel!r}: argument {name!r} holds {argument.dtype}, wanted {wanted}")
    if argument.backend is not backend:
        raise DeviceError(
            f"kernel {kernel!r}: argument {name!r} is on {argument.backend.device}, wanted {backend.device}"
        )
    return argument.pointer


def in_order(*launches: Callable[[], None]) -> Callable[[], None]:
    """Several launches as one."""
    if len(launches) == 1:
        return launches[0]

    def run() -> None:
        for launch in launches:
            launch()

    return run
