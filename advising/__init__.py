"""What to declare for a target: meshes, strategies, operations and blocks are planned and estimated, and the best compiled."""

from .advice import Advice
from .search import advise

__all__ = ["Advice", "advise"]
