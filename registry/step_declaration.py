"""StepDeclaration: a declaration of one step over a cache's pages: the tokens of each sequence, mask, options."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StrictBool

from ..errors import ConfigError, shown
from ..masks import Mask
from ..masks.checks import LIMIT
from ..planning.cache.kv_cache import KVCache
from ..planning.unset_fields import UnsetFieldsModel
from ..scores import Score

__all__ = ["STEP_OPTIONS", "StepDeclaration"]

STEP_OPTIONS = (
    "mask", "causal", "sliding_window", "softmax_scale", "logits_soft_cap", "score", "mode", "update", "max_q_len", "return_lse",
)  # fmt: skip
"""The static arguments of a step that a declaration holds."""

_Size = Annotated[int, Field(strict=True, ge=1, le=LIMIT)]
_Count = Annotated[int, Field(strict=True, ge=0, le=LIMIT)]
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


_LISTS = ("q_lens", "kv_lens", "prefix_lengths")


class StepDeclaration(UnsetFieldsModel):
    """The step: the numbers of queries and keys of each sequence. Keys include those that the step writes.

    A number applies to all sequences; a list has one per sequence. Heads are the query's; everything else is the cache's.
    """

    model_config = ConfigDict(title="step")

    q_heads: Annotated[_Size | None, Field(description="Heads of the query; a file that is planned declares them.")] = (
        None
    )
    layer: Annotated[_Count, Field(description="Layer of the cache; layers of one group are alike.")] = 0
    sequences: Annotated[
        _Size | None,
        Field(description="Number of sequences; null: the length of the lists, else the cache's max_sequences."),
    ] = None
    q_lens: Annotated[_Count | tuple[_Count, ...], Field(description="Number of queries of each sequence.")] = 1
    kv_lens: Annotated[
        _Count | tuple[_Count, ...] | None,
        Field(description="Number of keys of each sequence; null: the cache's max_length."),
    ] = None
    tokens: Annotated[_Size | None, Field(description="Length of the token arrays; null: the number of queries.")] = (
        None
    )
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, Field(description="Dtype of the query; null: the cache's.")
    ] = None
    mode: Literal["prefill", "autoregressive", "insert", "mixed"] | None = None
    update: Literal["before", "fused", "none"] | None = None
    max_q_len: Annotated[_Size | None, Field(description="Maximum number of queries per sequence.")] = None
    mask: Mask | None = None
    causal: StrictBool | None = None
    sliding_window: _Count | tuple[_Count | None, _Count | None] | None = None
    softmax_scale: _Number | None = None
    logits_soft_cap: Annotated[_Number, Field(gt=0)] | None = None
    score: Score | None = None
    softmax_aux: Annotated[StrictBool, Field(description="Whether each head has a sink.")] = False
    selected: Annotated[
        _Size | None,
        Field(description="Number of keys that each token attends to, chosen for each; null: all that it sees."),
    ] = None
    q_positions: Annotated[
        StrictBool, Field(description="Whether each query has a position of its own, for a score by position.")
    ] = False
    spans: Annotated[
        _Size | None,
        Field(description="Length of the spans, of tokens that see one another, that each sequence's tokens form."),
    ] = None
    prefix_lengths: Annotated[
        _Count | tuple[_Count, ...] | None,
        Field(description="Number of first tokens of each sequence that see one another."),
    ] = None
    draft_tree: Annotated[
        _Size | None,
        Field(description="Drafts of the largest tree; the tokens of a sequence with no more of them are a tree."),
    ] = None
    return_lse: StrictBool = False

    def rows(self, cache: KVCache) -> tuple[tuple[int, int], ...]:
        """(queries, keys) of each sequence. Errors: ConfigError for lists of different lengths and numbers that don't fit."""
        lists = {name: len(x) for name in _LISTS if isinstance(x := getattr(self, name), tuple)}
        counts = {**lists, **({} if self.sequences is None else {"sequences": self.sequences})}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name} of {count}" for name, count in counts.items())
            raise ConfigError(f"step: {listed}; wanted one number of sequences.")
        count = next(iter(counts.values()), cache.max_sequences)
        if count > cache.max_sequences:
            raise ConfigError(
                f"step: {count} sequences; wanted at most {cache.max_sequences}, the cache's max_sequences."
            )
        kv = cache.max_length if self.kv_lens is None else self.kv_lens
        pairs = zip(_per_sequence(self.q_lens, count), _per_sequence(kv, count), strict=True)
        rows = tuple(pairs)
        for row, (q, n) in enumerate(rows):
            if n > cache.max_length or q > n:
                raise ConfigError(
                    f"step: sequence {row} has {q} queries and {n} keys; wanted at most {cache.max_length} keys, the cache's "
                    "max_length, and no more queries than keys: kv_lens include the step's own."
                )
        return rows

    def group(self, cache: KVCache) -> int:
        """The group of the cache's layers that contains the step's layer. Errors: ConfigError for an unknown layer."""
        if self.layer >= cache.layer_count:
            raise ConfigError(
                f"step.layer={shown(self.layer)}; wanted 0 to {cache.layer_count - 1}: the cache has {cache.layer_count} layers."
            )
        return cache.group_of(self.layer)

    def options(self) -> dict[str, Any]:
        """The arguments of the operation's call other than arrays."""
        return {name: getattr(self, name) for name in STEP_OPTIONS}


def _per_sequence(value: int | tuple[int, ...], count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else value
