"""Page management for serving a model: which pages and slots of a cache hold which sequence."""

from .page_pool import PagePool
from .page_pools import PagePools
from .results import Growth, PageCounts, PrefixMatch, SlotCounts, SlotGrowth, SlotMatch
from .state_slots import StateSlots

__all__ = [
    "Growth", "PageCounts", "PagePool", "PagePools", "PrefixMatch", "SlotCounts", "SlotGrowth", "SlotMatch", "StateSlots",
]  # fmt: skip
