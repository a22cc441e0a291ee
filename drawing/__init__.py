"""Pictures as text and SVG, from plain numbers: this subpackage doesn't know masks or plans."""

from .devices import DevicePicture, DrawnTensor, Split, Transfer
from .heat import HeatPicture
from .tiles import TilePicture

__all__ = ["DevicePicture", "DrawnTensor", "HeatPicture", "Split", "TilePicture", "Transfer"]
