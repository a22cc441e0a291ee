"""The arrays of a declared KV cache, and operations on them other than attention."""

from .attend import PagedOutput, attend
from .batch import RaggedBatch
from .dense import dense_insert
from .insert import insert
from .layer_arrays import LayerPages, LayerStates
from .offload import SavedSequence, extract, restore
from .pages import copy, scrub
from .state import CacheState, init
from .state_batch import StateBatch
from .state_shardings import CacheShardings, shardings
from .token_slots import token_slots

__all__ = [
    "CacheShardings",
    "CacheState",
    "LayerPages",
    "LayerStates",
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
