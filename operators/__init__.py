"""The operations, one file each; the registry imports one only when it is requested."""

from .base import Operation
from .kernels.local_mask import Dropout, LocalMask
from .local import LocalCall, LocalOutput
from .output import AttentionOutput

__all__ = ["AttentionOutput", "Dropout", "LocalCall", "LocalMask", "LocalOutput", "Operation"]
