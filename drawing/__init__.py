"""Pictures as text and SVG, from plain numbers: this subpackage doesn't know masks or plans."""

from .devices import DevicePicture, DrawnTensor, Split, Transfer
from .tiles import TilePicture

__all__ = ["DevicePicture", "DrawnTensor", "Split", "TilePicture", "Transfer"]
