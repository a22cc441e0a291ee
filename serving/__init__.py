"""Page management for serving a model: which pages of a KV cache hold which sequence."""

from .page_pool import PagePool
from .page_pools import PagePools
from .results import Growth, PageCounts, PrefixMatch

__all__ = ["Growth", "PageCounts", "PagePool", "PagePools", "PrefixMatch"]
