"""Files that can be made again: compiled kernels, cuDNN plans, measured choices."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path


def folder(kind: str) -> Path:
    """The folder ``kind`` in ``GPUNET_CACHE_DIR`` or ``~/.cache/gpunet``; it need not exist yet."""
    root = os.environ.get("GPUNET_CACHE_DIR")
    return (Path(root) if root else Path.home() / ".cache" / "gpunet") / kind


def key(*parts: str) -> str:
    """A file name for what is made of these texts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:40]


def write(path: Path, data: bytes) -> None:
    """Writes a file so that other processes see all of it or nothing.

    A cache that cannot be written is no error: the work is done again next time.
    """
    name = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except OSError:
        if name is not None:  # of a full disk, say
            with contextlib.suppress(OSError):
                Path(name).unlink(missing_ok=True)
