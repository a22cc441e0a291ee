"""Pictures as text and as SVG, of plain numbers: this room knows nothing of masks or plans."""

from .tiles import TilePicture

__all__ = ["TilePicture"]
