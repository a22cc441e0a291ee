"""Layers whose heads differ, and layers that attend to the keys of an earlier one: mimo_v2_flash and gemma4_text."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import is_whole, shown
from ..planning.notes import Note, note
from .family import GLOBAL, LOCAL
from .layers import LayerHeads
from .model_config import ModelConfig
from .values import flag, whole

__all__ = ["layer_heads", "shared_keys"]


def layer_heads(config: ModelConfig, kind: str, number: int) -> LayerHeads | None:
    """The heads of layer `number`, of this kind; None if all layers have the same. Errors: ConfigError."""
    f = config.fields
    if "swa_head_dim" in f:
        return _of_windows(config) if kind == LOCAL else _of_whole(config)
    if "global_head_dim" in f:
        return _by_layer(config, number) if f["per_layer_config"] is not None else _by_kind(config, kind)
    return None


def _of_windows(config: ModelConfig) -> LayerHeads:
    """MiMo's local layers: twice as many key heads, unless the config says otherwise."""
    f = config.fields
    heads = whole(config, "num_attention_heads")
    if f["swa_num_attention_heads"] not in (None, heads):
        raise config.error(
            f"swa_num_attention_heads={shown(f['swa_num_attention_heads'])} and num_attention_heads={heads}; wanted as many "
            "query heads in all layers."
        )
    kv_heads = 2 * whole(config, "num_key_value_heads")
    if f["swa_num_key_value_heads"] is not None:
        kv_heads = whole(config, "swa_num_key_value_heads")
    head_dim, value_dim = (
        whole(config, own if f[own] is not None else common)
        for own, common in (("swa_head_dim", "head_dim"), ("swa_v_head_dim", "v_head_dim"))
    )
    return _checked(
        config,
        LayerHeads(kv_heads, head_dim, value_dim, _sinks(config, "add_swa_attention_sink_bias", True)),
        "local layers",
    )


def _of_whole(config: ModelConfig) -> LayerHeads:
    kv_heads, head_dim, value_dim = (whole(config, key) for key in ("num_key_value_heads", "head_dim", "v_head_dim"))
    return LayerHeads(kv_heads, head_dim, value_dim, _sinks(config, "add_full_attention_sink_bias", False))


def _sinks(config: ModelConfig, key: str, default: bool) -> bool:
    """Whether layers have sinks; the default is what transformers' layers have, which don't read the key."""
    return default if config.fields[key] is None else flag(config, key)


def _by_kind(config: ModelConfig, kind: str) -> LayerHeads:
    """Gemma 4's global layers: a head dim of their own, and key heads if their keys and values have one projection."""
    f = config.fields
    kv_heads, head_dim = whole(config, "num_key_value_heads"), whole(config, "head_dim")
    if kind == GLOBAL:
        head_dim = whole(config, "global_head_dim")
        if f["num_global_key_value_heads"] is not None and flag(config, "attention_k_eq_v"):
            kv_heads = whole(config, "num_global_key_value_heads")
    return _checked(config, LayerHeads(kv_heads, head_dim, head_dim), f"{kind} layers")


def _by_layer(config: ModelConfig, number: int) -> LayerHeads:
    """The same, as transformers writes it."""
    kv_heads, head_dim = whole(config, "num_key_value_heads"), whole(config, "head_dim")
    for key, value in config.fields["per_layer_config"].get(number, {}).items():
        if not is_whole(value, 1):
            raise config.error(f"per_layer_config[{number}].{key}={shown(value)}; wanted a whole number from 1 up.")
        kv_heads, head_dim = (value, head_dim) if key == "num_key_value_heads" else (kv_heads, value)
    return _checked(config, LayerHeads(kv_heads, head_dim, head_dim), f"layer {number}")


def _checked(config: ModelConfig, heads: LayerHeads, where: str) -> LayerHeads:
    q_heads = whole(config, "num_attention_heads")
    if q_heads % heads.kv_heads:
        raise config.error(
            f"num_attention_heads={q_heads} is not a multiple of the {heads.kv_heads} key heads of {where}."
        )
    return heads


def shared_keys(config: ModelConfig, kinds: Sequence[str], notes: list[Note]) -> dict[int, int]:
    """For each of the layers without keys of their own the one whose keys it reads: the last of its kind that has some. Errors:
    ConfigError."""
    count = len(kinds)
    if not config.fields.get("num_kv_shared_layers"):
        return {}
    first = count - whole(config, "num_kv_shared_layers", maximum=count)
    own = kinds[:first]
    missing = sorted(set(kinds) - set(own))
    if missing:
        raise config.error(
            f"num_kv_shared_layers={count - first} of {count} layers: before layer {first} there is no {missing[0]} layer whose "
            "keys the shared ones could use; wanted fewer."
        )
    read = {layer: first - 1 - list(reversed(own)).index(kinds[layer]) for layer in range(first, count)}
    notes.append(note("model.shared_kv", sources=sorted({*read.values()}), first=first, last=count - 1))
    return read
