"""launches: the kernels of a compiled GPU program in program order: grids, blocks, shared memory and binaries."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from .cubin import ELF
from .records import records
from .wire import Fields, fields_of

__all__ = ["Launch", "launches", "program_name"]

# XLA's CustomKernelProto: name, kernel (with its binary), blocks {2: {1, 2, 3}}, threads {1: {1, 2, 3}}, bytes of shared memory.
# https://github.com/openxla/xla/blob/main/xla/backends/gpu/codegen/kernels/custom_kernel.proto
_NAME, _KERNEL, _BLOCKS, _THREADS, _SHARED = 1, 2, 3, 4, 6
_COPY = re.compile(r"__\d+$")  # suffix of a name that occurs more than once in a program


class Launch(NamedTuple):
    """A kernel that a program launches: the blocks of its grid, the threads per block, the bytes of shared memory that a block
    requests at launch, and its binary."""

    name: str
    blocks: int
    threads: int
    shared_bytes: int
    cubin: bytes


def program_name(function: str) -> str:
    """The name that a function's kernel has in the program, where several may have it."""
    return _COPY.sub("", function)


def launches(compiled: Any) -> tuple[Launch, ...] | None:
    """The kernels of a compiled program; None where its file can't be read, for example without cramjam.

    A kernel in a loop is listed once.
    """
    try:
        file = compiled.runtime_executable().serialize()
        return tuple(launch for record in records(file) for launch in _inside(record))
    except (ValueError, ImportError, jax.errors.JaxRuntimeError):
        return None


def _inside(data: bytes) -> Iterator[Launch]:
    if ELF not in data or data.startswith(ELF):
        return
    try:
        fields = fields_of(data)
    except ValueError:
        return
    if launch := _launch(fields):
        yield launch
        return
    for values in fields.values():
        for value in values:
            if isinstance(value, bytes):
                yield from _inside(value)


def _launch(fields: Fields) -> Launch | None:
    name, kernel = _single_value(fields, _NAME), _single_value(fields, _KERNEL)
    blocks, threads = (_sizes(_single_value(fields, number), inner) for number, inner in ((_BLOCKS, 2), (_THREADS, 1)))
    if not isinstance(name, bytes) or not isinstance(kernel, bytes) or blocks is None or threads is None:
        return None
    if not name.isascii() or (cubin := _binary(kernel)) is None:
        return None
    shared = _single_value(fields, _SHARED)
    return Launch(program_name(name.decode()), blocks, threads, shared if isinstance(shared, int) else 0, cubin)


def _single_value(fields: Fields, number: int) -> int | bytes | None:
    values = fields.get(number, [])
    return values[0] if len(values) == 1 else None


def _sizes(data: int | bytes | None, inner: int) -> int | None:
    """The product of three sizes; None if the data isn't such a message."""
    try:
        sizes = _single_value(fields_of(data), inner) if isinstance(data, bytes) else None
        numbers = fields_of(sizes) if isinstance(sizes, bytes) else {}
    except ValueError:
        return None
    dimensions = [n for values in numbers.values() for n in values if isinstance(n, int)]
    return math.prod(dimensions) if dimensions and set(numbers) <= {1, 2, 3} else None


def _binary(data: bytes) -> bytes | None:
    """The binary in a message, at any depth."""
    if data.startswith(ELF):
        return data
    if ELF not in data:
        return None
    try:
        fields = fields_of(data)
    except ValueError:
        return None
    inside = (_binary(value) for values in fields.values() for value in values if isinstance(value, bytes))
    return next((binary for binary in inside if binary is not None), None)
