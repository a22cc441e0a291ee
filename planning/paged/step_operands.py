"""The operands of a step over a cache's pages: tokens of all sequences along one axis, and the specs of each."""

from __future__ import annotations

from jax.sharding import PartitionSpec

from ...sharding import Operand, OperandTable, axes_at
from ..cache.cache_checks import axis_names
from ..cache.cache_plan import CachePlan

__all__ = ["INDEX_STEP", "RESULTS_OF_INDEX_STEPS", "RESULTS_OF_STEPS", "STEP_OPERANDS", "step_spec", "token_specs"]

STEP_OPERANDS = OperandTable(
    Operand("query", ("tokens", "heads", "head_dim"), gradient=False, inside_dtype="runtime"),
    Operand("key", ("tokens", "kv_heads", "head_dim"), dtype="stored", gradient=False),
    Operand("value", ("tokens", "kv_heads", "value_dim"), dtype="stored", gradient=False),
    Operand("key_scale", ("tokens", "kv_heads"), gradient=False),
    Operand("value_scale", ("tokens", "kv_heads"), gradient=False),
    Operand("softmax_aux", ("heads",), gradient=False, feature="sinks"),
    Operand("selected", ("tokens", "selected"), dtype="integers", gradient=False, feature="selected"),
    Operand("q_positions", ("tokens",), dtype="integers", gradient=False, feature="positions"),
    Operand("spans", ("tokens", "two"), dtype="integers", gradient=False, feature="spans"),
    Operand("prefix_lengths", ("sequences",), dtype="integers", gradient=False, feature="prefix_lengths"),
    Operand(
        "draft_tree", ("sequences", "drafts", "drafts_seen"), dtype="booleans", gradient=False, feature="draft_tree"
    ),
)
RESULTS_OF_STEPS = (
    Operand("output", ("tokens", "heads", "value_dim"), gradient=False, inside_dtype="runtime"),
    Operand("lse", ("tokens", "heads"), gradient=False, inside_dtype="float32"),
)

# Those of a step that selects. Every device that has a sequence's pages scores all index heads.
INDEX_STEP = OperandTable(
    Operand("index_query", ("tokens", "index_heads", "index_dim"), gradient=False),
    Operand("index_key", ("tokens", "index_dim"), dtype="stored", gradient=False),
    Operand("index_weights", ("tokens", "index_heads"), gradient=False),
    Operand("key_scale", ("tokens",), gradient=False),
)
RESULTS_OF_INDEX_STEPS = (
    Operand("positions", ("tokens", "top_k"), dtype="integers", gradient=False),
    Operand("counts", ("tokens",), dtype="integers", gradient=False),
)


def step_spec(cache: CachePlan, dims: tuple[str, ...]) -> PartitionSpec:
    """The spec of an array over these dims, from the specs of a cache's plan.

    Heads of key and value arrive unrepeated, so they are split only if they needn't be repeated.
    """
    pages = cache.pages_array.fitted.spec
    split, heads = (axes_at(pages, index) or None for index in (0, cache.heads_at))
    along = axis_names(cache.cache.page_sequence_axis)
    tokens = tuple(name for name in split or () if name not in along) or None
    axes = {"tokens": tokens, "sequences": tokens, "heads": heads, "kv_heads": heads if cache.kv_repeat == 1 else None}
    return PartitionSpec(*map(axes.get, dims))


def token_specs(cache: CachePlan) -> tuple[PartitionSpec, PartitionSpec]:
    """(spec of query and output, spec of key and value), [tokens, heads, dim]."""
    return step_spec(cache, STEP_OPERANDS["query"].dims), step_spec(cache, STEP_OPERANDS["key"].dims)
