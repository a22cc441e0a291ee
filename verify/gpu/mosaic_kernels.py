"""Kernels of Pallas' Mosaic GPU flavour in a compiled program: their names in its text, and their binaries.

Such a kernel is called by a function of its own for the host, which is compiled too and holds the binary. How many blocks it
launches, and with how much shared memory, is in that function's instructions, so it can't be read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from struct import error as StructError
from struct import unpack_from
from typing import Any

import jax

from .cubin import ELF, CubinFunction, cubin_functions
from .records import records

__all__ = ["TARGET", "mosaic_binaries", "mosaic_function", "mosaic_name"]

TARGET = 'custom_call_target="mosaic_gpu'
_NAMED = re.compile(r'op_name="(?:[^"]*/)?([^"/]+)/mpmd_map"')
_SUFFIX = "_mosaic_gpu_kernel"  # of a kernel's function
_CUDA = 190  # the machine of an ELF file


def mosaic_name(text: str) -> str | None:
    """The name of the kernel whose call begins at the start of the text."""
    named = _NAMED.search(text.partition("\n")[0])
    return None if named is None else named[1]


def mosaic_binaries(compiled: Any, capability: tuple[int, int]) -> dict[str, set[bytes]]:
    """Kernel -> its binaries; {} where the program's file can't be read, for example without cramjam."""
    found: dict[str, set[bytes]] = {}
    try:
        file = compiled.runtime_executable().serialize()
        binaries = [binary for record in records(file) for binary in _binaries(record)]
    except (ValueError, ImportError, jax.errors.JaxRuntimeError):
        return {}
    for binary in binaries:
        try:
            function = mosaic_function(binary, capability)
        except ValueError:
            continue
        found.setdefault(function.name.removesuffix(_SUFFIX), set()).add(binary)
    return found


def mosaic_function(binary: bytes, capability: tuple[int, int]) -> CubinFunction:
    """The kernel's function in its binary, to which NVIDIA's linker adds some that check tensor memory. Errors: ValueError
    without one."""
    (function,) = (one for one in cubin_functions(binary, capability) if one.name.endswith(_SUFFIX))
    return function


def _binaries(data: bytes) -> Iterator[bytes]:
    """The GPU binaries anywhere in the bytes."""
    at = data.find(ELF)
    while at >= 0:
        try:
            (machine,) = unpack_from("<H", data, at + 18)
            tables = unpack_from("<QQ", data, at + 0x20)  # of segments, and of sections
            sizes = unpack_from("<HHHH", data, at + 0x36)
        except StructError:
            return
        if machine == _CUDA:
            yield data[at : at + max(start + math.prod(sizes[2 * i : 2 * i + 2]) for i, start in enumerate(tables))]
        at = data.find(ELF, at + len(ELF))
