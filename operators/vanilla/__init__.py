"""vanilla: attention in plain XLA."""

from .operation import NATIVE, NativeAttention, Vanilla, VanillaConfig

__all__ = ["NATIVE", "NativeAttention", "Vanilla", "VanillaConfig"]
