"""Models whose layers have states: what each layer declares and keeps, against transformers' own models and counts made by hand.

hybrid_truth.json was recorded by hybrid_probe.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid_models import HYBRIDS
from hybrid_probe import CASES, LENGTH, TRUTH, config_of, layers_of

from attnops import Attention, Declaration, KVCache, ModelDeclaration, OperationMetadata
from attnops.errors import ConfigError, ConfigWarning
from attnops.models.families import FAMILIES

MODELS = Path(__file__).resolve().parents[1] / "data" / "models"
RECORD = json.loads(TRUTH.read_text())["cases"]
IDS = [f"{number}-{case['config']['model_type']}" for number, case in enumerate(RECORD)]
FULL, LINEAR = "full_attention", "linear_attention"

QWEN = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "head_dim": 256,
}
QWEN |= {"num_key_value_heads": 2, "dtype": "bfloat16", "linear_num_key_heads": 16, "linear_num_value_heads": 32}
KIMI = {
    "model_type": "kimi_linear", "hidden_size": 2304, "num_hidden_layers": 27, "num_attention_heads": 32, "head_dim": 72,
    "num_key_value_heads": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "mla_use_nope": True, "model_max_length": 1048576, "dtype": "bfloat16", "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
    },
}  # fmt: skip
NEMOTRON = {
    "model_type": "nemotron_h",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dtype": "float32",
}
MAMBA = {
    "model_type": "mamba2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 16,
    "dtype": "float32",
}
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dtype": "float32",
}
GRANITE = SMALL | {"model_type": "granitemoehybrid", "mamba_n_heads": 8}


def _codes(model: ModelDeclaration) -> set[str]:
    return {note.code for note in model.notes}  # type: ignore[attr-defined]


def _config(declaration: Declaration | None) -> dict[str, Any]:
    assert declaration is not None
    return dict(declaration.metadata.get("operation_configs", {}).get(declaration.operation, {}))


# -- against transformers ----------------------------------------------------------------------------------------------


def _kept(layer: Any) -> dict[str, list[int]]:
    """What attnops keeps, with its dims in the order that transformers has."""
    found = {name: list(x.shape) for name, x in layer.cache(LENGTH).items()}
    for name in {"key", "value"} & set(found):
        tokens, heads, dim = found[name]
        found[name] = [heads, tokens, dim]
    for latent, name in (("latent", "key"), ("rotary_key", "value")):
        if latent in found:
            found[name] = [1, *found.pop(latent)]
    if "convolution" in found:  # one token more there, which the step doesn't read
        history, channels = found["convolution"]
        found["convolution"] = [channels, history + 1]
    if "state" in found and layer.recurrence.operation == "mamba2":
        heads, state, dim = found["state"]
        found["state"] = [heads, dim, state]
    return found


@pytest.mark.parametrize("case", RECORD, ids=IDS)
def test_each_layer_keeps_what_transformers_keeps(case: dict[str, Any]) -> None:
    layers = ModelDeclaration.from_config(case["config"], q_len=LENGTH, dtype="float32").layers
    assert [_kept(layer) for layer in layers] == [layer["keeps"] for layer in case["layers"]]


@pytest.mark.parametrize("case", RECORD, ids=IDS)
def test_each_layer_passes_what_transformers_passes(case: dict[str, Any]) -> None:
    layers = ModelDeclaration.from_config(case["config"], q_len=LENGTH, dtype="float32").layers
    for layer, wanted in zip(layers, case["layers"], strict=True):
        _same_attention(layer.declaration, wanted.get("attention"))
        convolution = None if layer.convolution is None else layer.convolution.shapes()
        if "convolution" in wanted:
            assert convolution is not None
            told = wanted["convolution"]
            assert convolution["weight"].shape == (told["width"], told["channels"])
            assert ("bias" in convolution) == told["bias"]
        else:
            assert convolution is None
        if "operation" in wanted:
            _same_operation(layer.recurrence, wanted["operation"])
        else:
            assert (layer.recurrence is not None) == ("decay" in wanted)


def _same_attention(declaration: Declaration | None, wanted: dict[str, Any] | None) -> None:
    assert (declaration is None) == (wanted is None)
    if declaration is None or wanted is None:
        return
    shapes, scale = declaration.call.shapes(), declaration.metadata.get("softmax_scale")
    found = {
        "q_heads": shapes["query"].shape[2],
        "head_dim": shapes["query"].shape[3],
        "value_dim": shapes["value"].shape[3],
    }
    assert found == {name: x for name, x in wanted.items() if name != "scale"}
    assert (found["head_dim"] ** -0.5 if scale is None else scale) == pytest.approx(wanted["scale"], rel=1e-6)


def _same_operation(declaration: Declaration | None, wanted: dict[str, Any]) -> None:
    assert declaration is not None
    config, shapes = _config(declaration), {name: list(x.shape[1:]) for name, x in declaration.shapes().items()}
    if "query" in wanted:
        assert {name: shapes[name] for name in ("query", "value", "decay")} == {
            name: wanted[name] for name in ("query", "value", "decay")
        }
        assert (config["gate"], config["beta_form"], config["normalise_qk"]) == ("raw", "sigmoid", wanted["normalise"])
        assert config.get("beta_max", 1) == wanted["beta_max"]
        return
    flat = declaration.operation == "mamba1"
    assert list(declaration.shapes()["A"].shape) == wanted["A"]
    assert {name: shapes[name] for name in ("x", "dt", "B")} == {
        name: wanted[name][::-1] if flat else wanted[name] for name in ("x", "dt", "B")
    }
    assert config["dt_softplus"] is wanted.get("dt_softplus", wanted.get("delta_softplus"))
    assert config.get("chunk_size") == wanted.get("chunk_size")
    assert [config.get("dt_min", 0.0), config.get("dt_max")] == wanted.get("dt_limit", [0.0, None])


def test_the_decays_of_lightning_are_the_models_times_the_noted_factor() -> None:
    (case,) = [case for case in RECORD if case["config"]["model_type"] == "minimax"]
    model = ModelDeclaration.from_config(case["config"], q_len=LENGTH, dtype="float32")
    count = next(note.values["layers"] for note in model.notes if note.code == "model.decay_of_layers")  # type: ignore[attr-defined]
    for number, layer in enumerate(case["layers"]):
        if "decay" in layer:
            own = -np.exp2(-8 * (np.arange(4) + 1) / 4)
            np.testing.assert_allclose(own * (1 - number / (count - 1 + 1e-5) + 1e-5), layer["decay"], rtol=1e-5)
    assert _config(model.layer(1).recurrence) == {"scale": 1.0, "chunk_size": 4}


def test_the_record_has_every_family() -> None:
    assert {kind for kind, _ in CASES} == {name for name, family in FAMILIES.items() if family.own_kinds}
    assert [case["config"] for case in RECORD] == [{"model_type": kind} | said for kind, said in CASES]


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "said"), CASES, ids=IDS)
def test_the_record_is_what_transformers_does(model_type: str, said: dict[str, Any]) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    (case,) = [case for case in RECORD if case["config"] == {"model_type": model_type} | said]
    assert json.loads(json.dumps(layers_of(model_type, said))) == case["layers"]


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "said"), CASES, ids=IDS)
def test_objects_of_transformers_and_their_dicts(model_type: str, said: dict[str, Any]) -> None:
    """A config object, its dict and its file's text mean the same as the few fields that were said."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    config = config_of(model_type, said)
    wanted = ModelDeclaration.from_config({"model_type": model_type} | said, q_len=LENGTH, dtype="float32").distinct
    for form in (config, config.to_dict(), json.loads(config.to_json_string(use_diff=False))):
        found = ModelDeclaration.from_config(form, q_len=LENGTH, dtype="float32")
        assert found.distinct == wanted
        assert not {"model.unknown_keys", "model.defaults"} & _codes(found)


def test_metadata_leaves_states_out() -> None:
    with pytest.warns(ConfigWarning, match="1 of 2 layers are mamba2"):
        OperationMetadata.from_config(GRANITE | {"layer_types": ["mamba", "attention"]})


# -- published models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_published_models(name: str) -> None:
    """Layers as cards and configs describe them; no key is told as one that attnops doesn't know."""
    model = ModelDeclaration.from_config(MODELS / f"{name}.json", batch=2, q_len=4096)
    assert {layer.kind: list(layer.layers) for layer in model.distinct} == HYBRIDS[name]
    assert not {"model.unknown_keys", "model.defaults"} & _codes(model)


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_bytes_of_qwen3_next() -> None:
    model = ModelDeclaration.from_config(QWEN)
    state, convolution, token = 32 * 128 * 128 * 4, 3 * (2 * 16 * 128 + 32 * 128) * 2, 2 * 2 * 256 * 2
    for tokens in (32768, 1048576):
        assert model.cache_bytes(tokens) == 36 * (state + convolution) + 12 * tokens * token
        assert model.full_attention_bytes(tokens) == 48 * tokens * token


def test_bytes_of_kimi_linear() -> None:
    """Its attention keeps latents; the older names of its layers with a state, and a head_dim that is no layer's."""
    model = ModelDeclaration.from_config(KIMI)
    assert [layer.kind for layer in model.layers].count("kda") == 20
    assert model.layer(26).latent is not None
    assert model.positions == 1048576
    state, convolution, token = 32 * 128 * 128 * 4, 3 * 3 * 32 * 128 * 2, (512 + 64) * 2
    assert model.cache_bytes(1048576) == 20 * (state + convolution) + 7 * 1048576 * token
    assert model.full_attention_bytes(1048576) == 27 * 1048576 * token


def test_the_cache_of_latents_and_states_is_declared_by_its_groups() -> None:
    """No size is left for the cache itself to declare."""
    model = ModelDeclaration.from_config(KIMI)
    states, latents = model.layer_groups
    assert (latents.kind, latents.head_dim, latents.value_dim, latents.kv_heads) == ("latent", 512 + 64, 512, None)
    assert latents.layers == (3, 7, 11, 15, 19, 23, 26)
    assert states.kind == "state"
    cache = KVCache(layers=model.layer_groups, page_size=128, bytes_per_device=2**30, max_sequences=4, max_length=4096)
    assert KVCache.from_json(cache.to_json()) == cache
    plan = cache.plan()
    assert plan.refused == ()
    state, convolution = 32 * 128 * 128 * 4, 3 * 3 * 32 * 128 * 2
    assert plan.groups[0].sequence_bytes == 20 * (state + convolution)
    assert plan.groups[1].get("kv_pages").fitted.shape[2:] == (128, 640)
    whole = {
        "kv_heads": 1,
        "layers": [{"layers": [0]}, {"layers": [1], "kind": "latent", "head_dim": 96, "value_dim": 64}],
    }
    with pytest.raises(ConfigError, match="head_dim is missing"):
        KVCache.from_dict({**whole, "bytes_per_device": 2**30, "max_sequences": 4, "max_length": 4096})


def test_bytes_of_models_without_attention_and_with_windows() -> None:
    model = ModelDeclaration.from_config(MAMBA)
    assert model.cache_bytes(1) == model.cache_bytes(2**20) == 2 * (8 * 128 * 16 + 3 * (128 + 2 * 8 * 128)) * 4
    assert (model.full_attention_bytes(8), model.positions) == (None, None)
    assert "model.no_attention" in _codes(model)
    window = SMALL | {"model_type": "mistral"}
    local = ModelDeclaration.from_config(window | {"num_key_value_heads": 1, "sliding_window": 100})
    assert [local.cache_bytes(tokens) for tokens in (10, 1000)] == [2 * 10 * 2 * 16 * 4, 2 * 100 * 2 * 16 * 4]
    assert local.full_attention_bytes(1000) == 2 * 1000 * 2 * 16 * 4
    bert = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"} | {"model_type": "bert"}
    assert ModelDeclaration.from_config(bert).cache_bytes(1000) == 0


# -- declarations ------------------------------------------------------------------------------------------------------


def test_declarations_of_a_hybrid_run_and_continue() -> None:
    """Each declaration of a layer runs as it is; a past makes them start from a state."""
    config = GRANITE | {
        "layer_types": ["mamba", "attention"],
        "mamba_d_state": 4,
        "mamba_expand": 1,
        "mamba_n_groups": 2,
    }
    for how, carried in (({"q_len": 5}, False), ({"q_len": 1, "kv_len": 9, "mode": "autoregressive"}, True)):
        first, second = ModelDeclaration.from_config(config, batch=2, operation="vanilla", **how).layers
        assert (list(first.declarations), list(second.declarations)) == (["mamba2", "mamba2_causal_conv1d"], ["global"])
        for declaration in first.declarations.values():
            again = Declaration.from_json(declaration.to_json())
            assert again == declaration
            arrays = again.draw(0)
            assert ("initial_state" in arrays) == carried
            output = Attention(again)(**again.call_arguments({name: jnp.asarray(x) for name, x in arrays.items()}))
            assert bool(jnp.isfinite(output.attention_outputs).all())
            assert output.state.shape == (
                2,
                *first.cache(1)["state" if again.operation == "mamba2" else "convolution"].shape,
            )


def test_layers_with_attention_and_a_state_have_both() -> None:
    config = SMALL | {"model_type": "falcon_h1"}
    model = ModelDeclaration.from_config(config | {"key_multiplier": 0.5}, q_len=8, metadata={"mesh": {"tp": 1}})
    (layer,) = model.distinct
    assert (layer.kind, layer.name) == ("global + mamba2", "global_and_mamba2")
    assert list(layer.declarations) == [
        "global_and_mamba2",
        "global_and_mamba2_mamba2",
        "global_and_mamba2_causal_conv1d",
    ]
    assert all(one.metadata["mesh"] == {"tp": 1} for one in layer.declarations.values())
    assert {"model.attention_and_state", "model.noted"} <= _codes(model)
    assert "model.noted" not in _codes(ModelDeclaration.from_config(config | {"key_multiplier": 1.0}))


def test_a_users_config_goes_before_the_models() -> None:
    configs = {"mamba2": {"chunk_size": 32}, "splash": {"block_q": 128}}
    layer = ModelDeclaration.from_config(MAMBA, metadata={"operation_configs": configs}).layer(0)
    assert _config(layer.recurrence) == {"dt_softplus": True, "chunk_size": 32}
    assert layer.recurrence is not None
    assert layer.recurrence.metadata["operation_configs"]["splash"] == {"block_q": 128}


def test_layers_without_attention_or_state() -> None:
    model = ModelDeclaration.from_config(NEMOTRON | {"hybrid_override_pattern": "M-*E"}, q_len=8)
    assert [layer.kind for layer in model.layers] == ["mamba2", "mlp", "global", "moe"]
    assert (model.layer(1).declarations, model.layer(1).cache(8)) == ({}, {})
    listed = ModelDeclaration.from_config(
        NEMOTRON | {"layers_block_type": ["mamba", "mlp", "attention", "moe"]}, q_len=8
    )
    assert listed.distinct == model.distinct
    assert [(group.layers, group.kind) for group in model.layer_groups] == [((0,), "state"), ((2,), None)]
    assert model.stateless_layers == (1, 3)


def test_older_names_of_minimax() -> None:
    old = SMALL | {"model_type": "minimax_m1", "num_hidden_layers": 4}
    model = ModelDeclaration.from_config(old | {"attn_type_list": [0, 0, 0, 1]})
    assert [layer.kind for layer in model.layers] == ["lightning"] * 3 + ["global"]
    assert "model.alias" in _codes(model)
    local = ModelDeclaration.from_config(
        old | {"model_type": "minimax", "sliding_window": 8, "layer_types": [FULL, LINEAR] * 2}
    )
    assert [layer.kind for layer in local.layers] == ["local 8", "lightning"] * 2


def test_limits_in_a_file_and_as_transformers_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text in ("Infinity", '{"__float__": "Infinity"}'):
        path.write_text(json.dumps(MAMBA)[:-1] + f', "time_step_limit": [0.001, {text}]}}')
        assert _config(ModelDeclaration.from_config(path).layer(0).recurrence)["dt_min"] == 0.001
    for text in ("NaN", "-Infinity"):
        path.write_text(json.dumps(MAMBA)[:-1] + f', "time_step_limit": [0.001, {text}]}}')
        with pytest.raises(ConfigError, match="is not a JSON number"):
            ModelDeclaration.from_config(path)


def test_what_the_model_does_itself_is_noted() -> None:
    model = ModelDeclaration.from_config(MAMBA | {"hidden_act": "gelu", "chunk_size": 48})
    assert {"model.convolution_activation", "model.chunks"} <= _codes(model)
    layer = model.layer(0)
    assert _config(layer.convolution) == {}
    assert "chunk_size" not in _config(layer.recurrence)
    lfm = SMALL | {"model_type": "lfm2"}
    assert "model.gated_convolution" in _codes(ModelDeclaration.from_config(lfm | {"full_attn_idxs": [0]}))
    assert "model.gated_convolution" not in _codes(ModelDeclaration.from_config(lfm))
    jamba = lfm | {"model_type": "jamba"}
    assert "model.normalised_dt" in _codes(ModelDeclaration.from_config(jamba))
    limit = NEMOTRON | {"hybrid_override_pattern": "M", "time_step_limit": [0.0, 1.0]}
    assert "model.unread_limit" in _codes(ModelDeclaration.from_config(limit))


def test_the_state_dtype_is_the_configs() -> None:
    config = NEMOTRON | {"hybrid_override_pattern": "M*", "mamba_ssm_cache_dtype": "bfloat16"}
    layer = ModelDeclaration.from_config(config).layer(0)
    assert _config(layer.recurrence)["state_dtype"] == "bfloat16"
    assert layer.cache(1)["state"].dtype == jnp.bfloat16
    assert isinstance(layer.cache(1)["convolution"], jax.ShapeDtypeStruct)
    with pytest.raises(ConfigError, match=r"mamba_ssm_cache_dtype='float16'; wanted float32 or bfloat16"):
        ModelDeclaration.from_config(config | {"mamba_ssm_cache_dtype": "float16"})


BAD: list[tuple[dict[str, Any], str]] = [
    (QWEN | {"linear_num_key_heads": 5}, "linear_num_value_heads=32 is not a multiple of linear_num_key_heads=5"),
    (QWEN | {"full_attention_interval": 0}, "full_attention_interval=0; wanted a whole number"),
    (QWEN | {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1; wanted a whole number from 2"),
    (QWEN | {"layer_types": ["conv"] * 48}, r"layer_types\[0\] is 'conv'"),
    (QWEN | {"is_causal": False}, "is_causal is false, but linear_attention layers"),
    (QWEN | {"linear_heads": 4}, "linear_heads=4 may concern attention"),
    (KIMI | {"linear_attn_config": [1]}, "linear_attn_config=.*wanted an object"),
    (KIMI | {"linear_attn_config": {"gate": 1}}, "linear_attn_config.gate=1"),
    (
        KIMI | {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2]}},
        "each layer from 1 to num_hidden_layers=27",
    ),
    (KIMI | {"mla_use_nope": False}, "mla_use_nope=False"),
    (NEMOTRON | {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern='MX'"),
    (NEMOTRON | {"hybrid_override_pattern": "M*", "layers_block_type": ["mlp", "mlp"]}, "contradict each other"),
    (NEMOTRON | {"sliding_window": 8}, "don't read sliding_window"),
    (MAMBA | {"is_causal": False}, "is_causal is false"),
    (MAMBA | {"num_heads": 7}, "mamba_n_heads=7"),
    (MAMBA | {"time_step_limit": [1.0, 0.5]}, "time_step_limit="),
    (MAMBA | {"time_step_limit": 3}, "time_step_limit=3"),
    (MAMBA | {"n_groups": 3}, "mamba_n_heads=8 is not a multiple of mamba_n_groups=3"),
    (MAMBA | {"num_key_value_heads": 4}, "don't read num_key_value_heads"),
    (MAMBA | {"num_attention_heads": 4}, "don't read num_attention_heads"),
    (GRANITE | {"mamba_n_heads": 48}, "mamba_n_heads=48"),
    (GRANITE | {"model_type": "zamba2", "kv_channels": 3}, "kv_channels isn't 16"),
    (GRANITE | {"model_type": "bamba", "attn_layer_indices": [2]}, "attn_layer_indices="),
    (GRANITE | {"model_type": "jamba", "attn_layer_offset": 8}, "attn_layer_period=8"),
    (GRANITE | {"model_type": "lfm2", "full_attn_idxs": [0], "layer_types": ["conv", "conv"]}, "contradict each other"),
    (GRANITE | {"model_type": "minimax", "attn_type_list": [2, 0]}, "attn_type_list="),
]


@pytest.mark.parametrize(("config", "says"), BAD, ids=[says[:40] for _, says in BAD])
def test_configs_that_make_no_sense(config: dict[str, Any], says: str) -> None:
    if config["model_type"] in ("jamba", "lfm2", "minimax", "bamba", "zamba2") and "bamba" not in says:
        config = {key: value for key, value in config.items() if key != "mamba_n_heads"}
    with pytest.raises(ConfigError, match=says):
        ModelDeclaration.from_config(config)
