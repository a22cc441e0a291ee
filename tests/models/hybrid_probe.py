"""What transformers' own models with states keep of a sequence, and what they pass to their operations.

With transformers and torch installed, `python tests/models/hybrid_probe.py` writes tests/data/hybrid_truth.json from tiny random
models, which test_hybrid_models.py compares with.
"""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any

__all__ = ["CASES", "LENGTH", "TRUTH", "config_of", "layers_of"]

TRUTH = Path(__file__).parents[1] / "data" / "hybrid_truth.json"
LENGTH = 6

_SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
_MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 4, "mamba_chunk_size": 16}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_KIMI = {
    "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "linear_head_dim": 8,
    "linear_num_heads": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4,
}  # fmt: skip
_NEMOTRON = {key: value for key, value in _SMALL.items() if key != "num_hidden_layers"} | {
    "head_dim": 16, "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 4, "chunk_size": 16,
}  # fmt: skip
_FULL, _LINEAR = "full_attention", "linear_attention"

CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_next", _SMALL | _DELTA | _EXPERTS | {"head_dim": 16}),
    ("qwen3_next", _SMALL | _DELTA | _EXPERTS | {"head_dim": 16, "layer_types": [_FULL, _LINEAR] * 2}),
    ("qwen3_5_text", _SMALL | _DELTA | {"head_dim": 16, "full_attention_interval": 2, "linear_conv_kernel_dim": 3}),
    ("qwen3_5_moe_text", _SMALL | _DELTA | _EXPERTS | {"head_dim": 16}),
    ("olmo_hybrid", _SMALL),
    ("olmo_hybrid", _SMALL | _DELTA | {"linear_allow_neg_eigval": False}),
    ("kimi_linear", _SMALL | _KIMI | {"num_hidden_layers": 6}),
    ("minimax", _SMALL | {"head_dim": 16, "block_size": 4, "num_local_experts": 2}),
    ("mamba2", {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 4,
                "use_conv_bias": False, "time_step_limit": [0.0, 0.5], "chunk_size": 16}),
    ("falcon_h1", _SMALL | _MAMBA | {"mamba_d_ssm": 48}),
    ("falcon_h1", _SMALL | _MAMBA | {"mamba_d_ssm": None, "mamba_d_head": 8}),
    ("granitemoehybrid", _SMALL | _MAMBA | {"layer_types": ["mamba", "attention"] * 2, "mamba_d_head": 8, "mamba_d_conv": 3}),
    ("nemotron_h", _NEMOTRON | {"hybrid_override_pattern": "M-*M"}),
    ("nemotron_h", _NEMOTRON | {"layers_block_type": [_LINEAR, "mlp", _FULL], "time_step_min": 0.01}),
    ("bamba", _SMALL | _MAMBA | {"attn_layer_indices": [1, 2]}),
    ("zamba2", _SMALL | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "n_mamba_heads": 4,
                         "mamba_ngroups": 2, "mamba_d_state": 4, "num_key_value_heads": 4, "chunk_size": 16}),
    ("lfm2", _SMALL | {"full_attn_idxs": [1, 3]}),
    ("lfm2", _SMALL | {"layer_types": ["conv", _FULL, "conv", "conv"], "conv_L_cache": 4, "conv_bias": True}),
    ("jamba", _SMALL | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4}),
]  # fmt: skip
"""(model_type, what its config says): small sizes, and everything of layers with a state that the family reads."""

# Sizes that keep the models small and say nothing about these layers.
_REST: dict[str, Any] = {
    "vocab_size": 64,
    "intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_REST_OF = {
    "mamba2": {"vocab_size": 64},
    "granitemoehybrid": _REST | {"num_local_experts": 2, "shared_intermediate_size": 16},
}
_DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
_SCANS = ("mamba2_chunk_scan", "mamba_selective_scan")


def config_of(model_type: str, said: dict[str, Any]) -> Any:
    """The config object of transformers."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **copy.deepcopy(_REST_OF.get(model_type, _REST) | said))


def layers_of(model_type: str, said: dict[str, Any]) -> list[dict[str, Any]]:
    """What each layer keeps after a prompt, without the batch, and what it passed to its operation."""
    import torch
    from transformers import AttentionInterface, AutoModel
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    torch.manual_seed(0)
    config = config_of(model_type, said)
    passed: list[dict[str, Any]] = []
    attended: list[dict[str, Any]] = []

    def attends(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **more: Any) -> Any:
        sizes = {"q_heads": query.shape[1], "head_dim": query.shape[3], "value_dim": value.shape[3], "scale": scaling}
        attended.append(sizes)
        return torch.zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register("attnops_hybrid", attends)
    AttentionMaskInterface.register("attnops_hybrid", eager_mask)
    how = {} if model_type == "mamba2" else {"attn_implementation": "attnops_hybrid"}
    model = AutoModel.from_config(config, **how).eval()
    code = importlib.import_module(type(model).__module__)
    for name in (*_DELTA_RULES, *_SCANS):
        if hasattr(code, name):
            setattr(code, name, _caught(getattr(code, name), name in _DELTA_RULES, passed))
    for name, x in model.named_parameters():
        if name.endswith(("b_proj.weight", "in_proj_ba.weight", "in_proj_b.weight")):
            x.data *= 1e4  # so that beta comes near its largest
    with torch.no_grad():
        made = model(torch.full((1, LENGTH), 3), use_cache=True)
    cache = getattr(made, "past_key_values", None) or made.cache_params
    layers = [{"keeps": {}} | _parts(layer) for layer in model.layers]
    for number, layer in enumerate(layers):
        held = cache.layers[number] if number < len(cache.layers) else None
        for name, x in _held(held):
            layer["keeps"][name] = list(x.shape[1:])
        slots = getattr(cache, "linear_cache", [])
        if number < len(slots) and len(slots[number]):
            layer["keeps"]["state"] = list(slots[number].shape[1:])
    with_state = [layer for layer in layers if "state" in layer["keeps"]]
    for layer, one in zip(with_state, passed, strict=bool(passed)):
        layer["operation"] = one
    for layer, one in zip([layer for layer in layers if "key" in layer["keeps"]], attended, strict=True):
        layer["attention"] = one
    return layers


def _held(held: Any) -> list[tuple[str, Any]]:
    found = []
    for name, attribute in (("key", "keys"), ("value", "values")):
        x = getattr(held, attribute, None)
        if x is not None and x.numel():
            found.append((name, x))
    for name, attribute in (("convolution", "conv_states"), ("state", "recurrent_states")):
        x = (getattr(held, attribute, None) or {}).get(0)
        if x is not None:
            found.append((name, x))
    return found


def _caught(original: Any, delta: bool, passed: list[dict[str, Any]]) -> Any:
    """The operation, which also records what was passed to it."""

    def record(*arrays: Any, **options: Any) -> Any:
        if delta:
            query, _, value = arrays[:3]
            own = {"query": _shape(query), "value": _shape(value), "decay": _shape(options["g"])}
            own |= {"beta_max": round(float(options["beta"].max())), "normalise": options["use_qk_l2norm_in_kernel"]}
        else:
            x, dt, rate, b, _ = arrays[:5]
            own = {"x": _shape(x), "dt": _shape(dt), "A": list(rate.shape), "B": _shape(b)}
            named = ("chunk_size", "dt_softplus", "delta_softplus", "dt_limit")
            own |= {name: options[name] for name in named if name in options}
            if "dt_limit" in own:
                own["dt_limit"] = [x if x < float("inf") else None for x in own["dt_limit"]]
        passed.append(own)
        return original(*arrays, **options)

    return record


def _shape(x: Any) -> list[int]:
    return list(x.shape[1:])


def _parts(layer: Any) -> dict[str, Any]:
    """The convolution of a layer, and the decays of lightning."""
    found: dict[str, Any] = {}
    for module in layer.modules():
        if type(module).__name__ == "Conv1d":
            channels, _, width = module.weight.shape
            found["convolution"] = {"channels": channels, "width": width, "bias": module.bias is not None}
        if hasattr(module, "slope_rate"):
            found["decay"] = [-float(x) for x in module.slope_rate.flatten()]
    return found


def main() -> None:
    import transformers

    cases = [{"config": {"model_type": kind} | said, "layers": layers_of(kind, said)} for kind, said in CASES]
    text = json.dumps({"transformers": transformers.__version__, "length": LENGTH, "cases": cases})
    TRUTH.write_text(text.replace('{"config"', '\n{"config"') + "\n")


if __name__ == "__main__":
    main()
