"""Pictures as text and SVG, from plain numbers: this subpackage doesn't know masks or plans."""

from .devices import DevicePicture, Placed, Sent, Split
from .tiles import TilePicture

__all__ = ["DevicePicture", "Placed", "Sent", "Split", "TilePicture"]
