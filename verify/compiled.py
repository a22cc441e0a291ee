"""What a compiled program says of itself: its kernels' VMEM, its memory and its work; and why it didn't compile."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import jax

from ..planning.text import bytes_text

__all__ = ["Failure", "KernelUse", "failure", "kernels", "program_text", "too_much_hbm"]

_CALL = re.compile(r"%([\w.\-]+) = [^\n]*? custom-call\(")
_CONFIG = "backend_config="
_VMEM = 1  # memory space
_MIB = 1 << 20


class KernelUse(NamedTuple):
    """A Pallas kernel of a program: the bytes of scoped VMEM that it takes, and its limit if one was requested."""

    name: str
    vmem_used: int | None
    vmem_limit: int | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return self._asdict()


def program_text(compiled: Any) -> str | None:
    """The text of a compiled program; None where this jaxlib can't read libtpu's program.

    This happens with jaxlib 0.10 and libtpu 0.0.51 for large programs on tpu7x: "async-update instruction should have 1
    operands".
    """
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return None


def kernels(text: str) -> tuple[KernelUse, ...]:
    """The kernels of a compiled program, in program order."""
    uses = []
    calls = list(_CALL.finditer(text))
    ends = [call.start() for call in calls[1:]] + [len(text)]
    for call, end in zip(calls, ends, strict=bool(calls)):
        # Not line by line: a kernel's metadata may hold newlines.
        part = text[call.start() : end]
        if 'custom_call_target="tpu_custom_call"' not in part:
            continue
        config: dict[str, Any] = {}
        at = part.find(_CONFIG + "{")
        if at >= 0:
            config = json.JSONDecoder(strict=False).raw_decode(part[at + len(_CONFIG) :])[0]
        used, limit = (
            next((int(c["size"]) for c in config.get(key, ()) if int(c["memory_space"]) == _VMEM), None)
            for key in ("used_scoped_memory_configs", "scoped_memory_configs")
        )
        uses.append(KernelUse(re.sub(r"\.\d+$", "", call[1]), used, limit))
    return tuple(uses)


class Failure(NamedTuple):
    """Why a program didn't compile. memory: 'vmem', 'hbm', 'shared' (of a GPU) or None. needed, available: bytes; these and
    kernel only where the compiler reports them."""

    message: str
    memory: str | None = None
    needed: int | None = None
    available: int | None = None
    kernel: str | None = None


_SCOPED = re.compile(
    r"allocating on stack for %([\w.\-]+).*?size ([\d.]+[KMG]?) and limit ([\d.]+[KMG]?) exceeded", re.DOTALL
)
_VMEM_OF_CHIP = re.compile(r"Used ([\d.]+[KMG]?) of ([\d.]+[KMG]?) vmem", re.IGNORECASE)
_SHARED = re.compile(r"Shared memory size limit exceeded: requested (\d+), available: (\d+)")
_PTXAS = re.compile(r"'gpu\.binary' op ptxas.*for architecture|SM version specified by \.target", re.DOTALL)
_CUDNN = re.compile(r"cuDNN not found")
_HBM = re.compile(r"temporaries \(([\d.]+[KMG]?)\) exceeds available HBM \(([\d.]+[KMG]?)\)")
_HBM_ANY = re.compile(r"Used ([\d.]+[KMG]?) of ([\d.]+[KMG]?) hbm", re.IGNORECASE)


def failure(error: Exception) -> Failure:
    """Translate the compiler's error into attnops' words."""
    text = str(error)
    if match := _SCOPED.search(text):
        kernel, needed, limit = re.sub(r"\.\d+$", "", match[1]), _bytes(match[2]), _bytes(match[3])
        return Failure(
            f"{kernel} needs {bytes_text(needed)} of VMEM and may take {bytes_text(limit)}: "
            f"{bytes_text(needed - limit)} too much",
            "vmem",
            needed,
            limit,
            kernel,
        )
    if match := _VMEM_OF_CHIP.search(text):
        needed, limit = _bytes(match[1]), _bytes(match[2])
        return Failure(
            f"a kernel needs {bytes_text(needed)} of VMEM; there are {bytes_text(limit)}: "
            f"{bytes_text(needed - limit)} too much",
            "vmem",
            needed,
            limit,
        )
    if match := _SHARED.search(text):
        needed, limit = int(match[1]), int(match[2])
        return Failure(
            f"a kernel asks for {bytes_text(needed)} of shared memory per block; there are {bytes_text(limit)}: "
            f"{bytes_text(needed - limit)} too much",
            "shared",
            needed,
            limit,
        )
    if match := _HBM.search(text) or _HBM_ANY.search(text):
        return too_much_hbm(_bytes(match[1]), _bytes(match[2]))
    if _PTXAS.search(text):
        return Failure(
            "Mosaic GPU compiles for one architecture of GPUs in a process, and this one has compiled for another. Hint: compile "
            "in a process of its own, as attnops verify does for each architecture"
        )
    if _CUDNN.search(text):
        return Failure("cuDNN isn't installed, which this requires on a GPU. Hint: pip install nvidia-cudnn-cu13")
    first = next(iter(text.strip().splitlines()), "no word")
    return Failure(f"{type(error).__name__}: {first}")


def too_much_hbm(needed: int, limit: int) -> Failure:
    """The failure of a program that needs more HBM at its peak than a device has."""
    return Failure(
        f"a device needs {bytes_text(needed)} of HBM and has {bytes_text(limit)}: {bytes_text(needed - limit)} too much",
        "hbm",
        needed,
        limit,
    )


def _bytes(text: str) -> int:
    scale = {"K": 1 << 10, "M": _MIB, "G": 1 << 30}.get(text[-1], 1)
    return round(float(text.rstrip("KMG")) * scale)
