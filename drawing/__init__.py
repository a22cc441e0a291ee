"""Pictures as text and as SVG, of plain numbers: this room knows nothing of masks or plans."""

from .devices import DevicePicture, Placed, Sent, Split
from .tiles import TilePicture

__all__ = ["DevicePicture", "Placed", "Sent", "Split", "TilePicture"]
