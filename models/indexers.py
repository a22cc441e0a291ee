"""The indexer of a model's layers: which keys it leaves to each query, its sizes, and which layers use another layer's selection.

DeepSeek's and GLM's leaves the keys with the largest sums over its heads; MiniMax's leaves blocks of keys, for each group of
query heads its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import shown
from ..planning.notes import Note, note
from .family import INDEXED
from .model_config import ModelConfig
from .values import whole

__all__ = ["indexed_kinds", "indexer_of"]

_BY_KEY = {"heads": "index_n_heads", "head_dim": "index_head_dim", "top_k": "index_topk"}
_BY_BLOCK = {
    "heads": "index_n_heads", "head_dim": "index_head_dim", "block_size": "index_block_size", "top_blocks": "index_topk_blocks",
}  # fmt: skip
_MODES = {"F": "full", "S": "shared"}


def indexer_of(config: ModelConfig) -> tuple[tuple[str, int], ...]:
    """(name, size) of the indexer of a family that has one, else (). Errors: ConfigError for sizes that don't fit each other."""
    f = config.fields
    if "index_topk" in f:
        found = {name: whole(config, key) for name, key in _BY_KEY.items()}
        rotated = whole(config, "qk_rope_head_dim")
        if found["head_dim"] < rotated:
            raise config.error(
                f"index_head_dim={found['head_dim']} is less than qk_rope_head_dim={rotated}, the part of it that is rotated."
            )
        return tuple(found.items())
    if "index_topk_blocks" in f:
        found = {name: whole(config, key) for name, key in _BY_BLOCK.items()}
        heads = whole(config, "num_attention_heads")
        if heads % found["heads"]:
            raise config.error(
                f"num_attention_heads={heads} is not a multiple of index_n_heads={found['heads']}: each head of the indexer "
                "picks blocks for as many heads."
            )
        return (*found.items(), ("local_blocks", whole(config, "index_local_blocks", minimum=0)))
    return ()


def indexed_kinds(config: ModelConfig, types: Sequence[str], notes: list[Note]) -> list[str | None]:
    """What each indexed layer is called, None for the other layers; notes say what the plan leaves out. Errors: ConfigError."""
    sizes = dict(indexer_of(config)) if INDEXED in types else {}
    if not sizes:
        return [None] * len(types)
    blocks = f"{sizes['top_blocks']} blocks of {sizes['block_size']}" if "top_blocks" in sizes else None
    label = f"indexed {blocks or sizes['top_k']}"
    kept = f"{blocks} keys" if blocks else f"{sizes['top_k']} keys"
    notes.append(note("model.indexer", heads=sizes["heads"], head_dim=sizes["head_dim"], kept=kept))
    modes = _modes(config, len(types)) if "indexer_types" in config.fields else ["full"] * len(types)
    if "shared" in modes:
        notes.append(note("model.shared_indexer", count=modes.count("shared")))
    return [
        f"{label}{' shared' * (mode == 'shared')}" if kind == INDEXED else None
        for kind, mode in zip(types, modes, strict=True)
    ]


def _modes(config: ModelConfig, count: int) -> list[str]:
    """'full' or 'shared' for each layer: listed, as letters, or by an interval, the first that the config has."""
    f = config.fields
    key = "indexer_types" if f["indexer_types"] is not None else "index_topk_pattern"
    listed = f[key]
    if listed is None:
        interval = whole(config, "index_topk_freq", minimum=0) or 1
        start = whole(config, "index_skip_topk_offset", minimum=0)
        modes = ["shared" if max(layer - start + 1, 0) % interval else "full" for layer in range(count)]
    elif isinstance(listed, str) and key == "index_topk_pattern":
        modes = [_MODES.get(letter, letter) for letter in listed]
    elif isinstance(listed, list | tuple):
        modes = list(listed)
    else:
        raise config.error(f"{key}={shown(listed)}; wanted a list of 'full' and 'shared', one for each layer.")
    if len(modes) != count:
        raise config.error(f"{key}: got {len(modes)} entries; wanted one for each of {count} layers.")
    for number, mode in enumerate(modes):
        if mode not in _MODES.values():
            raise config.error(f"{key}[{number}] is {shown(mode)}; wanted 'full' or 'shared'.")
    if modes[0] == "shared":
        raise config.error(f"{key}: layer 0 shares a selection, but there is no layer before it; wanted 'full'.")
    return modes
