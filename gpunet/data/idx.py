"""MNIST's IDX files: two zero bytes, a type byte, the number of dimensions, big-endian sizes and elements."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gpunet.data.errors import DatasetError
from gpunet.errors import FormatError

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_DIMENSIONS = 32
_PIECE = 1 << 20


def load_idx(path: str | os.PathLike[str], *, max_bytes: int = 1 << 32) -> npt.NDArray[Any]:
    """Reads an IDX file, plain or compressed with gzip (told apart by their first bytes, not by their names).

    Args:
        path: the file.
        max_bytes: refuse files whose header announces more element bytes than this.

    Returns:
        A writable array in native byte order: uint8, int8, int16, int32, float32 or float64.

    Raises:
        DatasetError: the file does not exist or cannot be opened.
        FormatError: the file is no IDX file, is truncated, has bytes after its elements, is damaged, or
            announces more than ``max_bytes``.
    """
    path = Path(path)
    try:
        with path.open("rb") as plain:
            compressed = plain.read(2) == _GZIP_MAGIC
            plain.seek(0)
            if compressed:
                with gzip.GzipFile(fileobj=plain, mode="rb") as unpacked:
                    return _read(path, unpacked, max_bytes)
            return _read(path, plain, max_bytes)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FormatError(f"{path}: damaged or truncated gzip file: {error}") from error
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read(path: Path, stream: BinaryIO | gzip.GzipFile, max_bytes: int) -> npt.NDArray[Any]:
    start = stream.read(4)
    if len(start) < 4 or start[:2] != b"\0\0":
        raise FormatError(
            f"{path}: starts with {start.hex(' ') or 'nothing'}, an IDX file with 00 00, type, rank"
        )
    code, dimensions = start[2], start[3]
    if code not in _TYPES:
        wanted = ", ".join(f"0x{known:02x}" for known in _TYPES)
        raise FormatError(f"{path}: IDX element type is 0x{code:02x}, wanted one of {wanted}")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise FormatError(f"{path}: IDX header has {dimensions} dimensions, wanted 1 to {_MAX_DIMENSIONS}")
    sizes = stream.read(4 * dimensions)
    if len(sizes) < 4 * dimensions:
        raise FormatError(
            f"{path}: IDX header ends after {4 + len(sizes)} bytes, wanted {4 + 4 * dimensions}"
        )
    shape = tuple(np.frombuffer(sizes, dtype=">u4").tolist())
    dtype = np.dtype(_TYPES[code])
    wanted_bytes = math.prod(shape) * dtype.itemsize
    if wanted_bytes > max_bytes:
        raise FormatError(
            f"{path}: IDX header announces shape {shape} of {dtype.name}, {wanted_bytes} bytes; "
            f"at most {max_bytes} are read"
        )
    data = _read_at_most(stream, wanted_bytes + 1)
    if len(data) != wanted_bytes:
        found = "more" if len(data) > wanted_bytes else str(len(data))
        raise FormatError(
            f"{path}: IDX header announces shape {shape} of {dtype.name}, {wanted_bytes} bytes, "
            f"but {found} follow"
        )
    return np.frombuffer(data, dtype=dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def _read_at_most(stream: BinaryIO | gzip.GzipFile, count: int) -> bytearray:
    """Reads in pieces: memory grows with what the file really holds, not with what its header announces."""
    data = bytearray()
    while len(data) < count:
        piece = stream.read(min(_PIECE, count - len(data)))
        if not piece:
            break
        data += piece
    return data
