"""cubin_functions: what a compiled GPU binary, an ELF file, says about each of its kernels."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from struct import calcsize, unpack_from
from typing import NamedTuple

__all__ = ["ELF", "RESERVED", "CubinFunction", "cubin_functions"]

ELF = b"\x7fELF"
_SECTION = "<IIQQQQIIQQ"
_SYMBOLS, _SYMBOL = 2, "<IBBHQQ"
# Attributes of the section .nv.info, by the numbers that NVIDIA's tools print as EIATTR_*. Each value is a pair of words; the
# first is the function's index among the symbols.
_REGISTERS, _FRAME = 0x2F, 0x11
_THREADS = 0x05  # in the section of a kernel: three sizes
_SIZED = 4  # the form of an attribute preceded by its size; others have a two-byte value
_RESERVED_SINCE = (9, 0)  # from this capability on a kernel's own section includes the driver's part
RESERVED = 1024  # bytes of shared memory that the driver reserves in every block


class CubinFunction(NamedTuple):
    """A kernel of a binary: registers per thread, bytes of stack per thread (which holds spilled registers), bytes of shared
    memory fixed at compile time, and the most threads of a block, if that is fixed too."""

    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    threads: int | None = None


def cubin_functions(data: bytes, capability: tuple[int, int]) -> tuple[CubinFunction, ...]:
    """The kernels of a binary. Errors: ValueError if the bytes aren't a GPU binary."""
    try:
        return tuple(_functions(data, capability))
    except (struct.error, IndexError, OverflowError, UnicodeDecodeError) as bad:
        raise ValueError(f"not a GPU binary: {bad}") from None


def _functions(data: bytes, capability: tuple[int, int]) -> Iterator[CubinFunction]:
    if not data.startswith(ELF):
        raise ValueError("not an ELF file")
    (start,) = unpack_from("<Q", data, 0x28)
    size, count, names_at = unpack_from("<HHH", data, 0x3A)
    sections = [unpack_from(_SECTION, data, start + i * size) for i in range(count)]

    def text(section: tuple[int, ...], at: int) -> str:
        begin = section[4] + at
        return data[begin : data.index(b"\0", begin)].decode()

    named = {text(sections[names_at], section[0]): section for section in sections}
    symbols = next((section for section in sections if section[1] == _SYMBOLS), None)
    if symbols is None or ".nv.info" not in named:
        return
    strings, step = sections[symbols[6]], calcsize(_SYMBOL)
    functions = [text(strings, unpack_from(_SYMBOL, data, symbols[4] + at)[0]) for at in range(0, symbols[5], step)]
    registers, frames = dict[int, int](), dict[int, int]()
    for attribute, value in _attributes(data, named[".nv.info"]):
        if attribute in (_REGISTERS, _FRAME) and len(value) == 8:
            function, number = unpack_from("<II", value)
            (registers if attribute == _REGISTERS else frames)[function] = number
    for at, number in registers.items():
        name = functions[at]
        section = named.get(f".nv.shared.{name}")
        shared = 0 if section is None else section[5]
        if capability >= _RESERVED_SINCE:
            shared = max(0, shared - RESERVED)
        yield CubinFunction(name, number, frames.get(at, 0), shared, _threads(data, named.get(f".nv.info.{name}")))


def _threads(data: bytes, section: tuple[int, ...] | None) -> int | None:
    values = () if section is None else _attributes(data, section)
    return next((math.prod(unpack_from("<III", value)) for attribute, value in values if attribute == _THREADS), None)


def _attributes(data: bytes, section: tuple[int, ...]) -> Iterator[tuple[int, bytes]]:
    at, end = section[4], section[4] + section[5]
    while at < end:
        form, attribute, size = unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield attribute, data[at : at + size]
            at += size
