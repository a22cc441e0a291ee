"""The score of each layer in a model's config: ALiBi, T5's buckets, or a temperature by position.

What a family computes, with s the factor of q.k and d how far the key is before the query:

bloom: s q.k - slope d, ALiBi's slopes. mpt: the same, with slopes of its own. falcon: s (q.k - slope d), the slopes rounded to
bfloat16. T5 and its like: q.k + table[bucket]. llama4_text, layers without rotary embedding: s q.k (1 + a log(1 + floor((p + 1) /
floor_scale))) at position p.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from ..errors import shown
from ..scores import T5, ALiBi, RelativeBias, Score
from ..scores.leaves import PositionTemperature, paper_slopes
from .families import GLOBAL
from .model_config import ModelConfig
from .values import flag, positive, whole

__all__ = ["layer_score", "mpt_slopes"]


def layer_score(config: ModelConfig, kind: str, number: int, head_dim: int, causal: bool) -> Score | None:
    """The score of layer `number`, of this kind; None for plain attention. Errors: ConfigError."""
    f, heads = config.fields, config.fields["num_attention_heads"]
    if config.family == "bloom":
        return ALiBi()
    if config.family == "mpt":
        return ALiBi(tuple(mpt_slopes(heads, positive(config, "alibi_bias_max")).tolist()))
    if config.family == "falcon" and flag(config, "alibi"):
        rounded = np.asarray(paper_slopes(heads).astype(jnp.bfloat16), np.float64)
        return ALiBi(tuple((rounded / math.sqrt(head_dim)).astype(np.float32).tolist()))
    if "encoder_attention_type" in f and f["encoder_attention_type"] != "local":
        raise config.error(
            f"encoder_attention_type={shown(f['encoder_attention_type'])}: keys that are sums over blocks of tokens have no "
            "place in a declaration of attention; wanted 'local', or another part."
        )
    if "relative_attention_num_buckets" in f:
        buckets = whole(config, "relative_attention_num_buckets", minimum=4)
        distance = whole(config, "relative_attention_max_distance", minimum=buckets)
        return RelativeBias(buckets=T5(buckets, distance, bidirectional=not causal))
    if "attn_temperature_tuning" in f and _tuned(config, kind, number):
        return PositionTemperature(positive(config, "floor_scale"), positive(config, "attn_scale"))
    return None


def mpt_slopes(heads: int, largest: float) -> np.ndarray:
    """MPT's slopes, float32 [heads]: 2 ** (-largest (h + 1) / P) for the power of two P from heads up; of more than are needed,
    every other one from the second on comes first."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = 2.0 ** (-largest * np.arange(1, power + 1) / power)
    if power != heads:
        slopes = np.concatenate([slopes[1::2], slopes[::2]])[:heads]
    return slopes.astype(np.float32)


def _tuned(config: ModelConfig, kind: str, number: int) -> bool:
    """Whether a layer of llama4 scales its queries by their position: those without a rotary embedding do."""
    f = config.fields
    if not f["attn_temperature_tuning"]:
        return False
    listed = f["no_rope_layers"]
    return not listed[number] if listed else kind == GLOBAL and not (number + 1) % f["no_rope_layer_interval"]
