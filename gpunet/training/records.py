"""The file format of checkpoints: records with a checksum each, and one over the whole file.

    magic    8 bytes: 0x89 "GPUNET" 0x0a
    version  4 bytes
    records  kind (1 byte), length of the payload (8 bytes), payload, CRC-32 of kind, length and payload (4
    bytes)

Numbers are little-endian and unsigned. The records are, in this order: one ``M``, a JSON object in UTF-8;
any number of ``B``, each a serialized ``BlobProto``, where a large tensor takes several in a row
(``content_chunk_id`` of ``content_num_chunks``, each with its ``segment``); one ``E``, the SHA-256 of
everything before it. Nothing follows.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Final

import numpy as np

from gpunet.errors import CheckpointError, FormatError
from gpunet.proto import BlobProto, TensorProto
from gpunet.serialization import (
    MAX_MESSAGE_BYTES,
    AnyPath,
    atomic_file,
    blob_from_proto,
    blob_to_proto,
    parse,
    tensor_from_chunks,
    tensor_to_chunks,
)
from gpunet.tensorformat import CHUNK_ELEMENTS

MAGIC: Final = b"\x89GPUNET\n"
VERSION: Final = 1

_METADATA: Final = b"M"
_BLOB: Final = b"B"
_END: Final = b"E"
_VERSION_FORMAT: Final = struct.Struct("<I")
_HEAD: Final = struct.Struct("<cQ")
_CRC: Final = struct.Struct("<I")
_MAX_METADATA_BYTES: Final = 1 << 28
_MAX_RECORD_BYTES: Final = {_METADATA: _MAX_METADATA_BYTES, _BLOB: MAX_MESSAGE_BYTES, _END: 32}


def write_records(path: AnyPath, metadata: Mapping[str, Any], blobs: Iterable[tuple[str, Any]]) -> None:
    """Writes a file of this format atomically, one piece of a tensor at a time.

    Args:
        path: the file.
        metadata: what JSON can hold.
        blobs: name and value (an array, ``bytes`` or a :class:`gpunet.QuantizedTensor`) of each blob.

    Raises:
        DataTypeError: a blob is of a kind that cannot be stored.
        OSError: the file cannot be written; what was there is left.
    """
    with atomic_file(path) as file:
        out = _Writer(file)
        out.write(MAGIC + _VERSION_FORMAT.pack(VERSION))
        out.record(_METADATA, json.dumps(metadata, allow_nan=True).encode())
        for name, value in blobs:
            for proto in _pieces(name, value):
                out.record(_BLOB, proto.SerializeToString())
        out.record(_END, out.digest.digest())


def read_records(path: AnyPath) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata and the blobs of a file, after every check has passed.

    Raises:
        CheckpointError: the file is no such file, of another version, damaged or cut off; the message says
            where.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        try:
            return _read(file, os.fstat(file.fileno()).st_size)
        except FormatError as error:
            raise CheckpointError(f"checkpoint {os.fspath(path)}: {error}") from None


class _Writer:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.digest.update(data)

    def record(self, kind: bytes, payload: bytes) -> None:
        head = _HEAD.pack(kind, len(payload))
        self.write(head)
        self.write(payload)
        self.write(_CRC.pack(zlib.crc32(payload, zlib.crc32(head))))


def _pieces(name: str, value: Any) -> Iterator[BlobProto]:
    if not isinstance(value, np.ndarray):
        yield blob_to_proto(name, value)
        return
    count = max(1, -(-value.size // CHUNK_ELEMENTS))
    for index, tensor in enumerate(tensor_to_chunks(value, name, elements=CHUNK_ELEMENTS, bytes_holder=True)):
        yield BlobProto(
            name=name, type="Tensor", tensor=tensor, content_num_chunks=count, content_chunk_id=index
        )


def _read(file: BinaryIO, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    digest = hashlib.sha256()
    start = file.read(len(MAGIC) + _VERSION_FORMAT.size)
    if not start.startswith(MAGIC):
        raise FormatError(
            f"starts with {start[:8].hex(' ') or 'nothing'}, wanted {MAGIC.hex(' ')}: no checkpoint of gpunet"
        )
    if len(start) < len(MAGIC) + _VERSION_FORMAT.size:
        raise FormatError(f"ends after {size} bytes, inside the version")
    (version,) = _VERSION_FORMAT.unpack(start[len(MAGIC) :])
    if version != VERSION:
        raise FormatError(f"has version {version} of the format, wanted {VERSION}")
    digest.update(start)
    metadata: dict[str, Any] | None = None
    blobs = _Blobs()
    while True:
        at = file.tell()
        before = digest.digest()
        kind, payload = _record(file, size, digest)
        if (metadata is None) != (kind == _METADATA):
            raise FormatError(
                f"record {kind!r} at byte {at} is out of order, wanted one {_METADATA!r}, at the start"
            )
        if kind == _END:
            break
        if kind == _METADATA:
            metadata = _parse_metadata(payload)
        else:
            blobs.add(parse(BlobProto, payload, what=f"record at byte {at}"))
    if payload != before:
        raise FormatError("the SHA-256 of the file is not the one at its end: damaged")
    if file.tell() != size:
        raise FormatError(f"{size - file.tell()} bytes follow the last record at byte {at}, wanted none")
    return metadata or {}, blobs.finished()


def _record(file: BinaryIO, size: int, digest: Any) -> tuple[bytes, bytes]:
    """Kind and payload of the next record, whose checksum is right."""
    at = file.tell()
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise FormatError(f"is cut off: ends at byte {size}, wanted a record at byte {at}")
    kind, length = _HEAD.unpack(head)
    limit = _MAX_RECORD_BYTES.get(kind)
    if limit is None:
        raise FormatError(f"record at byte {at} is of kind {kind!r}, wanted one of M, B, E: damaged")
    left = size - file.tell() - _CRC.size
    if length > limit:
        raise FormatError(f"record {kind!r} at byte {at} has {length} bytes, wanted at most {limit}: damaged")
    if length > left:
        raise FormatError(
            f"is cut off: the record at byte {at} has {length} bytes, the file {max(left, 0)} more"
        )
    payload = file.read(length)
    stored = file.read(_CRC.size)
    actual = _CRC.pack(zlib.crc32(payload, zlib.crc32(head)))
    if stored != actual:
        raise FormatError(
            f"record {kind!r} at byte {at}: CRC-32 {actual[::-1].hex()}, wanted {stored[::-1].hex()}: damaged"
        )
    for part in (head, payload, stored):
        digest.update(part)
    return kind, payload


def _parse_metadata(payload: bytes) -> dict[str, Any]:
    try:
        metadata = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the metadata are not JSON ({error})") from None
    if not isinstance(metadata, dict):
        raise FormatError(f"the metadata are a JSON {type(metadata).__name__}, wanted an object")
    return metadata


class _Blobs:
    """Puts blobs together from their pieces, which come one after another."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._name = ""
        self._tensors: list[TensorProto] = []

    def add(self, proto: BlobProto) -> None:
        pieces = max(proto.content_num_chunks, 1)
        if self._tensors and proto.name != self._name:
            raise FormatError(f"blob {self._name!r} lacks pieces, wanted them one after another")
        if proto.name in self._values:
            raise FormatError(f"blob {proto.name!r} is there twice")
        if proto.content_chunk_id != len(self._tensors):
            raise FormatError(
                f"blob {proto.name!r}: found piece {proto.content_chunk_id} of {pieces}, "
                f"wanted piece {len(self._tensors)}"
            )
        if pieces == 1:
            self._values[proto.name] = blob_from_proto(proto)
            return
        self._name = proto.name
        self._tensors.append(proto.tensor)
        if len(self._tensors) == pieces:
            self._values[proto.name] = tensor_from_chunks(self._tensors)
            self._tensors = []

    def finished(self) -> dict[str, Any]:
        if self._tensors:
            raise FormatError(f"blob {self._name!r} lacks pieces after the first {len(self._tensors)}")
        return self._values
