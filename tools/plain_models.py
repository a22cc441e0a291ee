"""Small models of transformers, and what is caught of their calls of attention: for tools/plain_families.py."""

from __future__ import annotations

import copy
import inspect
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "models"))

from plain_cases import LENGTH, declared_calls  # noqa: E402
from transformers_probe import caught  # noqa: E402

__all__ = ["ROOT", "Unread", "calls_of", "declared_calls", "own_names", "pair_of", "small_config", "tried"]

_SECONDS = 60

_SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 8,
    "max_position_embeddings": 64, "intermediate_size": 32, "vocab_size": 64, "ffn_dim": 32, "n_inner": 32,
    "moe_intermediate_size": 32, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1, "moe_num_experts": 4, "moe_k": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "ffn_hidden_size": 32, "embedding_size": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.25, "layerdrop": 0.0, "drop_path_rate": 0.0,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "encoder_layers": 8, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "d_model": 32,
    "encoder_layerdrop": 0.0, "rotary_dim": 8, "max_window_layers": 3, "use_sliding_window": True,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    **{name: {"hidden_size": 512} for name in ("qwen2_vl_text", "qwen2_5_vl_text")},
    **{name: {"hidden_size": 256} for name in ("glm4v_text", "glm4v_moe_text", "glm_image_text", "glm_ocr_text")},
    **{name: {"head_dim": 16} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe")},
    "pixtral": {"hidden_size": 64},
}


class Unread(Exception):
    """Why a type isn't taken."""


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Unread(f"took more than {seconds} s to build")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def small_config(model_type: str) -> dict[str, Any]:
    """The keys of a small config, in the type's own names."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    said, own = config.to_dict(), own_names(config)
    nested = [key for key, value in said.items() if key.endswith("_config") and isinstance(value, dict)]
    if nested:
        raise Unread(f"has configs of several parts: {', '.join(sorted(nested))}")
    small = {own.get(key, key): value for key, value in _SMALL.items()}
    small = {key: value for key, value in small.items() if key in said and not isinstance(said[key], list | dict)}
    if said.get("head_dim") is not None and "qk_rope_head_dim" not in said:
        small["head_dim"] = 16
    if "image_size" in said and "patch_size" in said:
        sides = [3 * side for side in pair_of(said["patch_size"])]
        small["image_size"] = sides[0] if isinstance(said["image_size"], int) else sides
    return small | _OWN.get(model_type, {})


_ALSO = {
    "attention_dropout": ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout_rate", "attn_dropout"),
    "attn_logit_softcapping": ("attn_logit_soft_cap",),
}


def own_names(config: Any) -> dict[str, str]:
    """Our name of a key -> the type's, where they differ."""
    own, said = dict(getattr(type(config), "attribute_map", None) or {}), config.to_dict()
    if own.get("head_dim") == "qk_rope_head_dim":
        del own["head_dim"]  # which is only a part of a head
    for key, others in _ALSO.items():
        named = [other for other in others if other in said]
        if own.get(key, key) not in said and named:
            own[key] = named[0]
    return own


def _inputs(config: Any, model: Any) -> dict[str, Any]:
    import torch

    taken = set(inspect.signature(model.forward).parameters)
    if "input_ids" in taken:
        given: dict[str, Any] = {"input_ids": torch.full((1, LENGTH), 3)}
    elif "spatial_shapes" in taken:
        patch = config.num_channels * config.patch_size**2
        given = {"pixel_values": torch.zeros(1, LENGTH, patch), "pixel_attention_mask": torch.ones(1, LENGTH)}
        given["spatial_shapes"] = torch.tensor([[4, LENGTH // 4]])
    elif "pixel_values" in taken:
        side, channels = getattr(config, "image_size", 32), getattr(config, "num_channels", 3)
        height, width = (side, side) if isinstance(side, int) else side
        given = {"pixel_values": torch.zeros(1, channels, height, width)}
    elif "input_values" in taken:
        given = {"input_values": torch.zeros(1, 8000)}
    elif "input_features" in taken:
        bins = getattr(config, "num_mel_bins", 80)
        given = {"input_features": torch.zeros(1, bins, 2 * LENGTH)}
    else:
        raise Unread(f"takes {', '.join(sorted(taken)[:3])}, and neither tokens, an image nor sound")
    return given


def calls_of(model_type: str, said: dict[str, Any]) -> list[dict[str, Any]]:
    """What is caught of each layer. Errors: Unread."""
    from transformers import AutoConfig

    try:
        with _limited(_SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = AutoConfig.for_model(model_type, **copy.deepcopy(said))
            calls = caught(config, lambda model: _inputs(config, model))
    except Unread:
        raise
    except Exception as error:
        told = re.sub(r" from '/[^']*'?", "", " ".join(str(error).split()))[:120]  # no paths of this machine
        raise Unread(f"a small model can't be built or run here: {type(error).__name__}: {told}") from error
    if not calls:
        raise Unread("its code doesn't call attention through transformers' interface")
    if any(call["rows"] is None for call in calls):
        raise Unread("its mask has holes in a row")
    if any(call["more"] for call in calls):
        raise Unread(f"passes attention more than a mask: {', '.join(sorted({m for c in calls for m in c['more']}))}")
    return [{key: value for key, value in call.items() if key != "more"} for call in calls]


def tried(model_type: str, said: dict[str, Any]) -> list[dict[str, Any]] | None:
    try:
        return calls_of(model_type, said)
    except Unread:
        return None


def pair_of(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)  # type: ignore[return-value]
