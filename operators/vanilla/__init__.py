"""vanilla: attention in plain XLA."""

from .operation import NATIVE, NativeAttention, Vanilla
from .vanilla_config import VanillaConfig

__all__ = ["NATIVE", "NativeAttention", "Vanilla", "VanillaConfig"]
