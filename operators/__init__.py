"""The operations, one file each; the registry imports one only when it is requested."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .call.base import Operation
    from .call.local import LocalCall, LocalOutput
    from .call.output import AttentionOutput
    from .kernels.local_mask import Dropout, LocalMask

__all__ = ["AttentionOutput", "Dropout", "LocalCall", "LocalMask", "LocalOutput", "Operation"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__getattr__ = lazy_names(
    __name__,
    {
        "AttentionOutput": "call.output",
        "Dropout": "kernels.local_mask",
        "LocalCall": "call.local",
        "LocalMask": "kernels.local_mask",
        "LocalOutput": "call.local",
        "Operation": "call.base",
    },
)
