"""Paged attention on TPUs with attnops' own kernels."""

from .attend import PageArrays, paged_attention_tpu
from .geometry import Geometry, Layout, Options
from .limits import advice, chosen_sizes, max_vmem, reasons_against
from .memory import scalar_words, several_rows, vmem_parts, vmem_room
from .selected import by_pieces

__all__ = [
    "Geometry",
    "Layout",
    "Options",
    "PageArrays",
    "advice",
    "by_pieces",
    "chosen_sizes",
    "max_vmem",
    "paged_attention_tpu",
    "reasons_against",
    "scalar_words",
    "several_rows",
    "vmem_parts",
    "vmem_room",
]
