"""DevicePicture: which part of each tensor every device of a mesh holds, and what is sent, as text and SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .devices_svg import devices_svg
from .devices_text import devices_text
from .pictures import Picture

__all__ = ["DevicePicture", "DrawnTensor", "Split", "Transfer"]


@dataclass(frozen=True)
class Split:
    """One dimension of a tensor: its name, its length, the mesh axes that split it, and the number of parts."""

    name: str
    size: int
    axes: tuple[str, ...]
    parts: int

    def range(self, part: int) -> str:
        """The indices of a part, such as `0:256`."""
        step = self.size // self.parts
        return f"{part * step}:{(part + 1) * step}"


@dataclass(frozen=True)
class DrawnTensor:
    """Tensors with the same placement. shapes: those of the whole and of a device's part, as text.

    device_parts: for each device, in the mesh's order, its part along each dimension.
    dropped: (mesh axis, dimension, why) for declared axes that can't be used.
    """

    names: tuple[str, ...]
    spec: str
    shapes: str
    dims: tuple[Split, ...]
    device_parts: tuple[tuple[int, ...], ...]
    dropped: tuple[tuple[str, str, str], ...] = ()

    @property
    def copies(self) -> int:
        """The number of devices that hold each part."""
        return len(self.device_parts) // math.prod(dim.parts for dim in self.dims)

    def first_holder(self, device: int) -> int:
        """The first device with the same part."""
        return self.device_parts.index(self.device_parts[device])


@dataclass(frozen=True)
class Transfer:
    """What groups of devices send. kind: 'all-gather', 'ring', 'permute', 'all-to-all' or 'all-reduce'. groups: places in the
    mesh."""

    what: str
    kind: str
    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    why: str


@dataclass(frozen=True)
class DevicePicture(Picture):
    """`print` shows the text, a notebook the SVG. mesh: (axis, size). ids: the ids of the mesh's devices, in its order."""

    title: str
    mesh: tuple[tuple[str, int], ...]
    ids: tuple[int, ...]
    tensors: tuple[DrawnTensor, ...]
    sent: tuple[Transfer, ...]
    repeated: tuple[str, ...] = ()

    def text(self) -> str:
        """The picture as text for a terminal, in 80 columns and plain characters."""
        return devices_text(self)

    def svg(self) -> str:
        """The picture as SVG for a page, in light and dark, without fonts or scripts from elsewhere."""
        return devices_svg(self)
