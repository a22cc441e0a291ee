"""The wire format of protocol buffers, down to fields: numbers and values, without a schema."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Fields", "fields_of", "varint"]

Fields = dict[int, list[int | bytes]]
_FIXED = {1: 8, 5: 4}


def varint(data: bytes, at: int) -> tuple[int, int]:
    """(the number at a position, the position after it). Errors: ValueError where there is none."""
    value = shift = 0
    while shift < 64:
        if at >= len(data):
            break
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at
    raise ValueError(f"no varint ends at byte {at} of {len(data)}")


def fields_of(data: bytes) -> Fields:
    """The fields of a message by number; fixed-width numbers are left out. Errors: ValueError if the data isn't a message."""
    fields: Fields = {}
    for number, value in _walk(data):
        fields.setdefault(number, []).append(value)
    return fields


def _walk(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if number == 0 or kind not in (0, 1, 2, 5):
            raise ValueError(f"field {number} of kind {kind}")
        if kind == 0:
            value, at = varint(data, at)
            yield number, value
            continue
        if kind == 2:
            size, at = varint(data, at)
        else:
            size = _FIXED[kind]
        if at + size > len(data):
            raise ValueError(f"field {number} ends after the message")
        if kind == 2:
            yield number, data[at : at + size]
        at += size
