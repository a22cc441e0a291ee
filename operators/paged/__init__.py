"""The operation `paged`, and the names by which others know it."""

from .operation import Paged
from .paged_config import PagedConfig
from .presets import PagedFlashAttention, RaggedPageAttentionV2, RaggedPageAttentionV3, UnifiedAttention

__all__ = [
    "Paged",
    "PagedConfig",
    "PagedFlashAttention",
    "RaggedPageAttentionV2",
    "RaggedPageAttentionV3",
    "UnifiedAttention",
]
