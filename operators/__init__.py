"""The operations, one file each; the registry imports one only when it is requested."""

from .call.base import Operation
from .call.local import LocalCall, LocalOutput
from .call.output import AttentionOutput
from .kernels.local_mask import Dropout, LocalMask

__all__ = ["AttentionOutput", "Dropout", "LocalCall", "LocalMask", "LocalOutput", "Operation"]
