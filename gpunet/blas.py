"""Threads of NumPy's BLAS: one while nets run, what the process has set at other times.

OpenBLAS cuts the depth of some products in another way with several threads than with one, and sums parts of
dot products of its threads: its results depend on their number. Its threads also take cores that other lanes
of an engine use. So nets keep it to one thread, and kernels cut their large products themselves, the same way
always (:mod:`gpunet.cpu_fallback.products`). Where NumPy has another BLAS, nothing is set.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

_MAPS: Final = Path("/proc/self/maps")


class Library:
    """One OpenBLAS of this process.

    Args:
        get: tells the number of threads.
        set: changes it.
    """

    def __init__(self, get: Callable[[], int], set: Callable[[int], Any]) -> None:
        self.get = get
        self.set = set


def _paths() -> Iterator[str]:
    """OpenBLAS libraries that this process has loaded, NumPy's own first."""
    if sys.platform == "linux":
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
        # Five columns stand before the path, which may hold blanks.
        mapped = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
        found = sorted(path for path in mapped if "openblas" in Path(path).name)
        yield from sorted(found, key=lambda path: "numpy" not in path)
        return
    package = Path(np.__file__).parent
    for folder in (package.parent / "numpy.libs", package / ".dylibs"):
        yield from sorted(str(path) for path in folder.glob("*openblas*"))


def _open(path: str) -> Library | None:
    """The library at a path, which is loaded already; ``None`` where it is not what its name says."""
    try:
        # With the interpreter lock held: the calls take less time than letting go of it.
        library = ctypes.PyDLL(path)
    except OSError:
        return None
    for before in ("scipy_", ""):
        for after in ("64_", ""):
            get = getattr(library, f"{before}openblas_get_num_threads{after}", None)
            set = getattr(library, f"{before}openblas_set_num_threads{after}", None)
            if get is not None and set is not None:
                get.argtypes, get.restype = (), ctypes.c_int
                set.argtypes, set.restype = (ctypes.c_int,), None
                return Library(get, set)
    return None


@functools.cache
def openblas() -> Library | None:
    """NumPy's OpenBLAS; ``None`` where NumPy has another BLAS, or the process' libraries cannot be told."""
    try:
        return next((library for path in _paths() if (library := _open(path)) is not None), None)
    except OSError:
        return None


class OneThread:
    """A context, for any number of threads at once, in which BLAS has one thread.

    Args:
        library: tells whose threads; asked when a context begins.
    """

    def __init__(self, library: Callable[[], Library | None] = openblas) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._inside = 0
        self._before = 1

    def __enter__(self) -> None:
        library = self._library()
        if library is None:
            return
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = library.get()
                if self._before > 1:
                    library.set(1)

    def __exit__(self, *error: object) -> None:
        library = self._library()
        if library is None:
            return
        with self._lock:
            self._inside -= 1
            if not self._inside and self._before > 1:
                library.set(self._before)


#: That of all workspaces: BLAS is one in a process.
ONE_BLAS_THREAD: Final = OneThread()
