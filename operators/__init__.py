"""The operations. One file each; the registry imports one only when it is asked for."""

from .base import Operation
from .local import Dropout, LocalCall, LocalMask, LocalOutput
from .output import AttentionOutput

__all__ = ["AttentionOutput", "Dropout", "LocalCall", "LocalMask", "LocalOutput", "Operation"]
