"""The records in a compiled GPU program's file, in Riegeli's format.

The format: https://github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md. XLA writes plain chunks of records
("r"), compressed or not; jax 0.12 nests one file inside another.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from struct import unpack
from typing import Any

from .wire import varint

__all__ = ["records"]

_SIGNATURE = bytes.fromhex("83af70d10d884a3f")  # of a file's first block
_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 1 << 16, 24, 40
_RECORDS = ord("r")
_MODULES = {"b": "brotli", "z": "zstd", "s": "snappy"}


def records(data: bytes) -> Iterator[bytes]:
    """The records of the first file in the bytes; a file inside a record is expanded into its records.

    Errors: ValueError for another format, ImportError if it is compressed and cramjam isn't installed.
    """
    start = data.find(_SIGNATURE)
    if start < 0:
        raise ValueError("it holds no file of records")
    for count, chunk in _chunks(data[start:]):
        for record in _of_chunk(count, chunk):
            if record.startswith(_SIGNATURE):
                yield from records(record)
            else:
                yield record


def _chunks(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number of records, data) of each chunk of records. A header precedes each block, even in the middle of a chunk."""
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        parts = []
        while size > 0 and at < len(data):
            if at % _BLOCK == 0:
                at += _BLOCK_HEADER
            part = data[at : at + min(size, _BLOCK - at % _BLOCK)]
            parts.append(part)
            at, size = at + len(part), size - len(part)
            if not part:
                break
        return b"".join(parts)

    while at < len(data):
        header = take(_CHUNK_HEADER)
        if len(header) < _CHUNK_HEADER:
            return
        _, size, _, kind_and_count, _ = unpack("<QQQQQ", header)
        if size > len(data):  # what follows the file
            return
        chunk = take(size)
        kind, count = kind_and_count & 0xFF, kind_and_count >> 8
        if kind == _RECORDS and chunk:
            yield count, chunk
        elif kind not in (_RECORDS, 0, ord("s"), ord("m"), ord("p")):  # signature, metadata, padding
            raise ValueError(f"chunks of kind {kind}")


def _of_chunk(count: int, chunk: bytes) -> Iterator[bytes]:
    compression = chr(chunk[0])
    size, at = varint(chunk, 1)
    sizes, values = (_plain(compression, part) for part in (chunk[at : at + size], chunk[at + size :]))
    place = start = 0
    for _ in range(count):
        length, place = varint(sizes, place)
        yield values[start : start + length]
        start += length


def _plain(compression: str, data: bytes) -> bytes:
    if compression == "\0":
        return data
    if compression not in _MODULES:
        raise ValueError(f"compression {compression!r}")
    if importlib.util.find_spec("cramjam") is None:
        raise ImportError("cramjam")
    codec: Any = getattr(importlib.import_module("cramjam"), _MODULES[compression])
    _, at = varint(data, 0)  # the size before compression
    unpacked = codec.decompress_raw if compression == "s" else codec.decompress
    try:
        return bytes(unpacked(data[at:]))
    except Exception as error:  # raised by cramjam
        raise ValueError(f"{_MODULES[compression]}: {error}") from None
