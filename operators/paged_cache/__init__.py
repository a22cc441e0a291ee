"""The arrays of a declared KV cache, and operations on them other than attention."""

from .attend import PagedOutput, attend
from .batch import RaggedBatch
from .dense import dense_insert
from .insert import insert
from .offload import SavedSequence, extract, restore
from .pages import copy, scrub
from .state import CacheShardings, CacheState, LayerPages, init, shardings
from .state_batch import StateBatch
from .token_slots import token_slots

__all__ = [
    "CacheShardings",
    "CacheState",
    "LayerPages",
    "PagedOutput",
    "RaggedBatch",
    "SavedSequence",
    "StateBatch",
    "attend",
    "copy",
    "dense_insert",
    "extract",
    "init",
    "insert",
    "restore",
    "scrub",
    "shardings",
    "token_slots",
]
