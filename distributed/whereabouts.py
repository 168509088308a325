"""What this process is at, for messages about a rank that the others wait for."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

_LIBRARY: Final = Path(sysconfig.get_paths()["stdlib"])


def doing() -> str:
    """The operator whose kernel a thread is in, with the line of code; else the line of the main thread.

    The calling thread does not count. A line is that of the innermost function outside of Python's own
    library.
    """
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    for innermost in frames.values():
        for frame in _outwards(innermost):
            # Kernels are given a context, which knows their operator. To look at the variables of a function
            # keeps their values until it returns, so only those with such a variable are looked at.
            if "ctx" not in (*frame.f_code.co_varnames, *frame.f_code.co_freevars):
                continue
            where = getattr(getattr(frame.f_locals.get("ctx"), "op", None), "where", None)
            if isinstance(where, str):
                return f"in {where} ({_line(innermost)})"
    main = frames.get(threading.main_thread().ident or 0)
    return "" if main is None else f"in {_line(main)}"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _line(innermost: FrameType) -> str:
    frame = next((f for f in _outwards(innermost) if not _is_library(f.f_code.co_filename)), innermost)
    return f"{frame.f_code.co_name}, {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_library(file: str) -> bool:
    path = Path(file)
    return file.startswith("<frozen") or (_LIBRARY in path.parents and "site-packages" not in path.parts)
