"""Messages to bytes and files, and back; with what :mod:`gpunet.tensorformat` does for tensors and blobs.

Everything that comes from outside is checked before memory is taken for it, and whatever is wrong with it
becomes a :class:`~gpunet.errors.FormatError`. Nothing here, nor anywhere in gpunet, reads pickles.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, EncodeError, Message

from gpunet.errors import FormatError
from gpunet.tensorformat import (
    blob_from_proto,
    blob_to_proto,
    tensor_from_chunks,
    tensor_from_proto,
    tensor_to_chunks,
    tensor_to_proto,
)
from gpunet.textformat import format_text, parse_text, require_complete

M = TypeVar("M", bound=Message)
AnyPath: TypeAlias = str | os.PathLike[str]

__all__ = [
    "MAX_MESSAGE_BYTES",
    "atomic_file",
    "atomic_write",
    "blob_from_proto",
    "blob_to_proto",
    "load",
    "parse",
    "parse_text",
    "read_file",
    "save",
    "tensor_from_chunks",
    "tensor_from_proto",
    "tensor_to_chunks",
    "tensor_to_proto",
]

#: Protobuf's own limit for a message, in bytes.
MAX_MESSAGE_BYTES = 2**31 - 1

TEXT_SUFFIXES = frozenset({".pbtxt", ".prototxt", ".textproto", ".txt"})

# A binary message holds such a byte almost surely (field 2 starts with 0x12), a text never does.
_NOT_IN_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")

# ---------------------------------------------------------------------------------------------------------
# Messages


def parse(
    message_type: type[M], data: bytes | bytearray | memoryview, *, what: str, limit: int = MAX_MESSAGE_BYTES
) -> M:
    """Reads one message from its binary form.

    Args:
        message_type: class of the message.
        data: exactly one serialized message.
        what: what is being read, for errors (a path, say).
        limit: largest size in bytes that is accepted.

    Raises:
        FormatError: more than ``limit`` bytes; not a message of this type (damaged, cut off, nested too
            deeply, text that is not UTF-8); a missing required field.
    """
    name = message_type.DESCRIPTOR.name
    _require_size(memoryview(data).nbytes, limit, what, name)
    data = bytes(data)
    message = message_type()
    try:
        message.ParseFromString(data)
    except (DecodeError, RecursionError, ValueError) as error:
        raise FormatError(
            f"{what}: the {len(data)} bytes are not a {name}: damaged, cut off or nested too deeply ({error})"
        ) from None
    require_complete(message, what)
    if not data.isascii():
        _require_utf8(message, what)
    return message


def load(source: AnyPath | bytes, message_type: type[M], *, limit: int = MAX_MESSAGE_BYTES) -> M:
    """Reads one message from a file (or from a file's bytes), binary or text.

    A file whose name ends as in ``TEXT_SUFFIXES`` is text, and so is any that holds only printable UTF-8 and
    reads as text; everything else is binary.

    Raises:
        FormatError: empty, more than ``limit`` bytes, not a regular file, or no message of this type.
        OSError: the file does not exist, is a directory, or cannot be read.
    """
    name = message_type.DESCRIPTOR.name
    if isinstance(source, bytes):
        data, what, is_text = source, f"{name} bytes", False
        _require_size(len(data), limit, what, name)
    else:
        what = os.fspath(source)
        data = read_file(source, limit=limit, what=name)
        is_text = Path(what).suffix.lower() in TEXT_SUFFIXES
    if not data.strip():
        raise FormatError(f"{what}: empty ({len(data)} bytes), wanted a {name}")
    text = _as_text(data)
    if text is None:
        return parse(message_type, data, what=what, limit=limit)
    try:
        return parse_text(message_type, text, what=what)
    except FormatError:
        # A short binary message can be all printable. A text that parses as one sets no known field.
        if not is_text:
            with contextlib.suppress(FormatError):
                message = parse(message_type, data, what=what, limit=limit)
                if message.ListFields():
                    return message
        raise


def save(path: AnyPath, message: Message) -> None:
    """Writes one message to a file, as text where the name ends as in ``TEXT_SUFFIXES``, atomically.

    Raises:
        FormatError: the message is empty (such a file could not be told from a truncated one), lacks a
            required field, is nested too deeply, or is larger than ``MAX_MESSAGE_BYTES``.
        OSError: the file cannot be written.
    """
    what = os.fspath(path)
    name = message.DESCRIPTOR.name
    require_complete(message, what)
    try:
        data = message.SerializeToString(deterministic=True)
    except (EncodeError, RecursionError, ValueError) as error:
        raise FormatError(f"{what}: the {name} cannot be written ({error})") from None
    if not 0 < len(data) <= MAX_MESSAGE_BYTES:
        raise FormatError(f"{what}: found a {name} of {len(data)} bytes, wanted 1 to {MAX_MESSAGE_BYTES}")
    if Path(what).suffix.lower() in TEXT_SUFFIXES:
        data = format_text(message).encode("utf-8")
    atomic_write(path, data)


def _require_size(size: int, limit: int, what: str, name: str) -> None:
    if size > limit:
        raise FormatError(f"{what}: found {size} bytes, wanted a {name} of at most {limit} bytes")


def _require_utf8(message: Message, what: str) -> None:
    """Refuses string fields that are not UTF-8, which protobuf takes and gives back as ``bytes``."""
    waiting = [message]
    while waiting:
        current = waiting.pop()
        for field, value in current.ListFields():
            if field.type == field.TYPE_STRING:
                for text in [value] if isinstance(value, (str, bytes)) else value:
                    if isinstance(text, bytes):
                        raise FormatError(f"{what}: found {text[:40]!r} in {field.full_name}, wanted UTF-8")
            elif field.type == field.TYPE_MESSAGE:
                waiting.extend([value] if isinstance(value, Message) else value)


def _as_text(data: bytes) -> str | None:
    if _NOT_IN_TEXT.search(data):
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


# ---------------------------------------------------------------------------------------------------------
# Files


def read_file(path: AnyPath, *, limit: int = MAX_MESSAGE_BYTES, what: str = "file") -> bytes:
    """The bytes of a regular file of at most ``limit`` bytes; ``what`` says in errors what it should hold.

    Raises:
        FormatError: larger than ``limit``, or a pipe or device.
        OSError: the file does not exist, is a directory, or cannot be read.
    """
    name = os.fspath(path)
    try:
        status = os.stat(name)
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise FormatError(f"{name}: found a pipe or device, wanted a regular file with a {what}")
        with open(name, "rb") as file:
            _require_size(status.st_size, limit, name, what)
            return file.read(limit + 1)
    except OSError as error:
        raise type(error)(error.errno, f"cannot read the {what}: {error.strerror}", name) from None
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError(f"{name!r} cannot be a path: {error}") from None


def atomic_write(path: AnyPath, data: bytes) -> None:
    """Writes a file so that at every moment, power cuts included, the path holds the old content or the new.

    Raises:
        OSError: the folder does not exist or cannot be written, or the disk is full; the old file is left.
    """
    with atomic_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def atomic_file(path: AnyPath) -> Iterator[BinaryIO]:
    """A file to write, whose content replaces that of ``path`` where the block ends without an error.

    The content goes to a temporary file in the same folder, is forced to the disk, and replaces the path.
    A link stays a link; an existing file keeps its permissions.

    Raises:
        OSError: as for :func:`atomic_write`.
    """
    target = os.path.realpath(os.fspath(path))
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, f".{os.path.basename(target)[:200]}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as file:
            with contextlib.suppress(FileNotFoundError):
                os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise type(error)(error.errno, f"cannot write: {error.strerror}", os.fspath(path)) from None
        raise
    _sync_folder(folder)


def _sync_folder(folder: str) -> None:
    """Forces a rename to the disk, where the system can open folders."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
