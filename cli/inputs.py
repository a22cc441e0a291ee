"""Read a call's arrays from .npz and .safetensors files, and write results to them atomically."""

from __future__ import annotations

import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from ..distribution import with_extras
from ..errors import InputError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["check_output_path", "read_arrays", "write_arrays"]

_SUFFIXES = (".npz", ".safetensors")
_SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return all arrays of a file by name. Errors: InputError for a file that can't be read; pickles are refused."""
    _check_suffix(path)
    if path.is_dir():
        raise InputError(f"{path}: is a directory; wanted a .npz or .safetensors file.")
    if not path.exists():
        raise InputError(f"{path}: no such file; wanted a .npz or .safetensors file with query, key and value.")
    return _read_npz(path) if path.suffix == ".npz" else _read_safetensors(path)


def check_output_path(path: Path) -> None:
    """Check before anything runs that a path can be written. Errors: InputError."""
    _check_suffix(path)
    if path.is_dir():
        raise InputError(f"{path}: is a directory; wanted the name of a file.")
    if not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} doesn't exist; make it first.")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path}: the folder {path.parent} can't be written to.")
    if path.suffix == ".safetensors":
        _safetensors(path)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """Write a file atomically: a reader sees the old file or the new one, never a partial one. Returns notes on what was
    changed.

    NumPy's format has no bfloat16: in .npz it becomes float32, which is exact.
    """
    notes: list[str] = []
    stored = dict(arrays)
    if path.suffix == ".npz":
        for name, array in arrays.items():
            if array.dtype == jnp.bfloat16:
                stored[name] = array.astype(np.float32)
                notes.append(f"{name} is bfloat16, written as float32: .npz has no bfloat16 (.safetensors has)")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            if path.suffix == ".npz":
                np.savez(file, allow_pickle=False, **stored)
            else:
                file.write(_safetensors(path).save({name: np.ascontiguousarray(x) for name, x in stored.items()}))
        _as_new_file(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"{path}: can't be written: {error.strerror or error}.") from None
    finally:
        Path(temporary).unlink(missing_ok=True)
    return tuple(notes)


def _as_new_file(name: str) -> None:
    # mkstemp creates files that only their owner can read; a result should have the permissions of any new file.
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(name, 0o666 & ~mask)


def _check_suffix(path: Path) -> None:
    if path.suffix not in _SUFFIXES:
        raise InputError(f"{path}: wanted a name that ends in {' or '.join(_SUFFIXES)}.")


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    try:
        # Opened here: given a path, np.load leaves a broken archive open.
        with path.open("rb") as raw:
            file = np.load(raw, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise InputError(f"{path}: holds one array; wanted an archive of named ones, as np.savez writes.")
            with file:
                for name in file.files:
                    array = file[name]  # jax supports only this machine's byte order
                    arrays[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, InputError):
            raise
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "pickle" in text.lower():
            text = "it holds pickled objects, which are never loaded; save plain arrays with np.savez"
        if "dtype descriptor" in text:  # NumPy writes fp8 this way, but can't read it
            text = f"{text}; .npz has no bfloat16 and no fp8: use .safetensors"
        raise InputError(f"{path}: not a readable .npz: {text}.") from None
    for name, array in arrays.items():
        if array.dtype.kind == "V":
            hint = ".npz has no bfloat16 and no fp8; use .safetensors, or save float32"
            raise InputError(f"{path}: {name} has dtype {array.dtype}: {hint}.")
    return arrays


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    _safetensors(path)
    from safetensors import SafetensorError, deserialize

    tensors: dict[str, np.ndarray] = {}
    try:
        # safetensors.numpy.load supports neither bfloat16 nor fp8, so the bytes are read here.
        for name, tensor in deserialize(path.read_bytes()):
            if tensor["dtype"] not in _SAFETENSORS:
                dtypes = ", ".join(_SAFETENSORS)
                raise InputError(f"{path}: {name} has dtype {tensor['dtype']}; wanted one of {dtypes}.")
            dtype = jnp.dtype(_SAFETENSORS[tensor["dtype"]])
            tensors[name] = np.frombuffer(tensor["data"], dtype).reshape(tensor["shape"])
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a readable .safetensors: {str(error).splitlines()[0]}.") from None
    return tensors


def _safetensors(path: Path) -> ModuleType:
    try:
        import safetensors.numpy
    except ImportError:
        raise InputError(
            f"{path}: needs safetensors; pip install '{with_extras('safetensors')}', or use .npz."
        ) from None
    return safetensors.numpy
