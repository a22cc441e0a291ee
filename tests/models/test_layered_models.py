"""Configs of models whose layers have heads of their own, indexers, or keys of an earlier layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layered_models import (
    BLOCKS,
    DSA,
    GEMMA4,
    GLM,
    GLOBAL,
    INDEXED,
    LAYERED,
    LOCAL,
    LONGCAT,
    MIMO,
    MINIMAX,
    MISTRAL4,
    SPARSE,
    YARN,
)

from attnops import Attention, Causal, Full, LatentAttention, ModelDeclaration, OperationMetadata, SlidingWindow
from attnops.errors import ConfigError, ConfigWarning
from attnops.masks import SEGMENT_IDS

MODELS = Path(__file__).resolve().parents[1] / "data" / "models"


def _kinds(config: Any) -> list[str]:
    return [layer.kind for layer in ModelDeclaration.from_config(config).layers]


def _notes(config: Any) -> dict[str, Any]:
    return {entry.code: entry.values for entry in ModelDeclaration.from_config(config).notes}


@pytest.mark.parametrize("name", sorted(LAYERED))
def test_published_models(name: str) -> None:
    model = ModelDeclaration.from_config(MODELS / f"{name}.json", batch=2, q_len=4096)
    assert {layer.kind: list(layer.layers) for layer in model.distinct} == {
        kind: layers.numbers for kind, layers in LAYERED[name].items()
    }
    for layer in model.distinct:
        wanted, call = LAYERED[name][layer.kind], layer.declaration.call
        found = call.sizes()
        assert (found["q_heads"], found["kv_heads"]) == (wanted.q_heads, wanted.kv_heads)
        assert (found["head_dim"], found["value_dim"]) == (wanted.head_dim, wanted.value_dim)
        window = Causal() if wanted.window is None else Causal() & SlidingWindow(left=wanted.window - 1, right=0)
        if layer.kind.endswith(" spans"):
            window = (Causal() | SEGMENT_IDS) & SlidingWindow(left=(wanted.window or 0) - 1, right=None)
        assert call.mask == window
        assert call.softmax_aux == ((wanted.q_heads,) if wanted.sinks else None)
        assert dict(layer.indexer) == (wanted.indexer or {})
        scale = 1.0 if name.startswith("gemma") else None
        assert layer.declaration.operation_metadata().softmax_scale == scale
        assert (layer.latent is not None) == (name == "glm-5.2")


@pytest.mark.parametrize(
    ("file", "sizes"),
    [
        ("deepseek-v3.2", (128, 128, 64, 128, 512, 1536)),
        ("glm-5.2", (64, 192, 64, 256, 512, 2048)),
        ("kimi-k2.5", (64, 128, 64, 128, 512, 1536)),
        ("longcat-flash-chat", (64, 128, 64, 128, 512, 1536)),
        ("mistral-small-4", (32, 64, 64, 128, 256, 1024)),
    ],
)
def test_latent_sizes(file: str, sizes: tuple[int, ...]) -> None:
    for layer in ModelDeclaration.from_config(MODELS / f"{file}.json").distinct:
        assert layer.latent is not None
        latent = layer.latent.latent
        assert latent is not None
        assert latent.rope_pairs == "interleaved"
        found = (
            latent.heads,
            latent.nope_dim,
            latent.rope_dim,
            latent.value_dim,
            latent.latent_dim,
            latent.query_latent_dim,
        )
        assert found == sizes


# -- indexers ----------------------------------------------------------------------------------------------------------


def test_an_indexer_is_described_and_not_planned() -> None:
    config = DSA | {"index_topk": 16, "index_n_heads": 4, "index_head_dim": 64}
    (layer,) = ModelDeclaration.from_config(config).distinct
    assert (layer.kind, layer.name) == ("indexed 16", "indexed_16")
    assert layer.indexer == (("heads", 4), ("head_dim", 64), ("top_k", 16))
    assert layer.declaration.call.mask == Causal()
    assert _notes(config)["model.indexer"] == {"heads": 4, "head_dim": 64, "kept": "16 keys"}
    (said,) = [one for one in ModelDeclaration.from_config(config).notes if "indexer" in one and "leaves" in one]
    assert "an upper bound, without the indexer's own work" in said
    with pytest.warns(ConfigWarning, match="6 of 6 layers are indexed 16"):
        OperationMetadata.from_config(config)
    (same,) = ModelDeclaration.from_config(config | {"layer_types": [INDEXED] * 6}).distinct
    assert same == layer


def test_the_selection_is_a_mask_array_of_the_call() -> None:
    """An indexed layer attends as the model does, once it has the selection; against plain NumPy."""
    config = DSA | {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1, "index_topk": 3}
    config |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "kv_lora_rank": 10, "index_head_dim": 8}
    (layer,) = ModelDeclaration.from_config(config, operation="vanilla").distinct
    random = np.random.default_rng(0)
    shapes = ((1, 9, 2, 8), (1, 9, 2, 4), (1, 9, 10), (1, 9, 4), (10, 2, 8), (10, 2, 6))
    arrays = [random.standard_normal(shape, np.float32) for shape in shapes]
    scores = np.where(np.tri(9, dtype=bool), random.standard_normal((9, 9)), -np.inf)
    chosen = np.zeros((1, 1, 9, 9), bool)
    np.put_along_axis(chosen[0, 0], np.argsort(-scores, axis=-1)[:, :3], True, axis=-1)
    assert layer.latent is not None
    declared = layer.latent.to_dict()
    declared["latent"] |= {"query_latent_dim": None, "rope_pairs": None}  # queries are given
    found = LatentAttention(declared)(*arrays, mask=chosen).attention_outputs
    q_nope, q_rope, latent, rope, w_uk, w_uv = (np.asarray(array, np.float64) for array in arrays)
    keys = np.einsum("btl,lhd->bthd", latent, w_uk)
    logits = np.einsum("bqhd,bkhd->bhqk", q_nope, keys) + np.einsum("bqhd,bkd->bhqk", q_rope, rope)
    weights = np.exp(np.where(chosen & np.tri(9, dtype=bool), logits * 12**-0.5, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    wanted = np.einsum("bhqk,bkhd->bqhd", weights, np.einsum("btl,lhd->bthd", latent, w_uv))
    np.testing.assert_allclose(np.asarray(found), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("said", "shared"),
    [
        ({}, []),
        ({"index_topk_freq": 0}, []),
        ({"index_topk_freq": 2}, [2, 4]),  # from layer 1 on, every 2nd one has an indexer
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, [0]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [3, 4, 5]),
        ({"index_topk_pattern": "FSSFSF", "index_topk_freq": 2}, [1, 2, 4]),
        ({"index_topk_pattern": ["full", "shared"] * 3}, [1, 3, 5]),
        ({"indexer_types": ["full"] * 5 + ["shared"], "index_topk_pattern": "FSSSSS"}, [5]),
    ],
)
def test_which_layers_share_a_selection(said: dict[str, Any], shared: list[int]) -> None:
    if 0 in shared:
        with pytest.raises(ConfigError, match="layer 0 shares a selection"):
            _kinds(GLM | said)
        return
    wanted = ["indexed 2048 shared" if layer in shared else "indexed 2048" for layer in range(6)]
    assert _kinds(GLM | said) == wanted
    assert _notes(GLM | said).get("model.shared_indexer") == ({"count": len(shared)} if shared else None)
    if said:
        with pytest.raises(ConfigError, match=f"deepseek_v32 don't read {next(iter(said))}"):
            _kinds(DSA | said)


def test_blocks_of_keys_and_their_older_names() -> None:
    flat = {"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 3}
    flat |= {"index_local_blocks": 1, "layer_types": [GLOBAL] + [BLOCKS] * 5}
    model = ModelDeclaration.from_config(MINIMAX | flat)
    assert _kinds(MINIMAX | flat) == ["global"] + ["indexed 3 blocks of 4"] * 5
    assert [layer.name for layer in model.distinct] == ["global", "indexed_3_blocks_of_4"]
    assert model.layer(1).indexer == (
        ("heads", 2), ("head_dim", 8), ("block_size", 4), ("top_blocks", 3), ("local_blocks", 1),
    )  # fmt: skip
    nested = {"use_sparse_attention": True, "sparse_score_type": "max", "sparse_init_block": 0, **SPARSE}
    for more in ({}, {"sparse_disable_index_value": [0, 1, 1, 1, 1, 1]}):
        older = ModelDeclaration.from_config(MINIMAX | {"sparse_attention_config": nested | more})
        assert older.distinct == model.distinct
    assert model.layer(0).indexer == ()
    assert "model.indexer" not in _notes(MINIMAX)
    assert not any("index_" in note for note in ModelDeclaration.from_config(MINIMAX).notes)


# -- heads by layer ----------------------------------------------------------------------------------------------------


def test_mimo_under_its_own_names_and_those_of_transformers() -> None:
    own = MIMO | {
        "sliding_window_size": 4,
        "sliding_window": 4,
        "attention_chunk_size": 4,
        "swa_num_key_value_heads": 4,
    }
    own |= {
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
        "swa_head_dim": 24,
        "swa_v_head_dim": 16,
        "swa_num_attention_heads": 8,
    }
    theirs = MIMO | {"sliding_window": 5, "layer_types": [GLOBAL] + [LOCAL] * 4 + [GLOBAL]}
    assert ModelDeclaration.from_config(own).distinct == ModelDeclaration.from_config(theirs).distinct
    assert _kinds(MIMO) == ["global"] + ["local 129"] * 4 + ["global"]
    other = ModelDeclaration.from_config(
        own | {"swa_head_dim": 16, "swa_v_head_dim": 8, "swa_num_key_value_heads": 1, "add_full_attention_sink_bias": True,
               "add_swa_attention_sink_bias": False, "hybrid_layer_pattern": [1, 0, 0, 0, 0, 0]}
    )  # fmt: skip
    local, whole = other.layer(0).declaration.call, other.layer(1).declaration.call
    assert (local.kv_heads, local.head_dim, local.value_dim, local.softmax_aux) == (1, 16, 8, None)
    assert (whole.kv_heads, whole.head_dim, whole.value_dim, whole.softmax_aux) == (2, 24, 16, (8,))
    assert any("hybrid_layer_pattern" in note and "layer_types alone" in note for note in other.notes)
    with pytest.warns(ConfigWarning, match="softmax_aux, the sinks"):
        OperationMetadata.from_config(own)


def test_heads_by_layer_attend() -> None:
    model = ModelDeclaration.from_config(MIMO | {"sliding_window": 3}, operation="vanilla", q_len=7)
    random = np.random.default_rng(1)
    for layer, kv_heads in zip(model.distinct, (2, 4), strict=True):
        shapes = ((1, 7, 8, 24), (1, 7, kv_heads, 24), (1, 7, kv_heads, 16))
        query, key, value = (random.standard_normal(shape, np.float32) for shape in shapes)
        sinks = random.standard_normal(8, np.float32)
        more = {"softmax_aux": sinks} if layer.kind != "global" else {}
        found = Attention(layer.declaration)(query, key, value, **more).attention_outputs
        repeated = [np.repeat(np.asarray(array, np.float64), 8 // kv_heads, 2) for array in (key, value)]
        i, j = np.arange(7)[:, None], np.arange(7)[None]
        visible = (j <= i) & ((j > i - 3) | (layer.kind == "global"))
        logits = np.einsum("bqhd,bkhd->bhqk", query, repeated[0]) * 24**-0.5
        weights = np.exp(np.where(visible, logits, -np.inf))
        weights /= weights.sum(-1, keepdims=True) + (np.exp(sinks)[None, :, None, None] if more else 0)
        np.testing.assert_allclose(np.asarray(found), np.einsum("bhqk,bkhd->bqhd", weights, repeated[1]), atol=1e-5)


def test_gemma_4_by_kind_and_by_layer() -> None:
    by_kind = ModelDeclaration.from_config(
        GEMMA4 | {"num_global_key_value_heads": 4, "attention_k_eq_v": True, "layer_types": [LOCAL, GLOBAL] * 3}
    )
    own = {"head_dim": 32, "num_key_value_heads": 4}
    saved = {key: value for key, value in GEMMA4.items() if key != "global_head_dim"} | {
        "layer_types": [LOCAL, GLOBAL] * 3
    }
    for keys in (("01", "03", "05"), ("1", "3", "5"), (1, 3, 5)):
        by_layer = ModelDeclaration.from_config(saved | {"per_layer_config": dict.fromkeys(keys, own)})
        assert by_layer.distinct == by_kind.distinct
    assert [layer.declaration.call.kv_heads for layer in by_kind.distinct] == [2, 4]
    ungated = ModelDeclaration.from_config(GEMMA4 | {"num_global_key_value_heads": 4})
    assert [layer.declaration.call.kv_heads for layer in ungated.distinct] == [2, 2]
    assert [layer.declaration.call.head_dim for layer in ungated.distinct] == [16, 32]


def test_gemma_4s_last_layer_is_global() -> None:
    listed = GEMMA4 | {"layer_types": [GLOBAL] + [LOCAL] * 5, "sliding_window": 8}
    assert _kinds(listed) == ["global"] + ["local 8"] * 4 + ["global"]
    assert _notes(listed)["model.noted"]["key"] == "layer_types[5]"
    assert _kinds(GEMMA4 | {"num_hidden_layers": 4}) == ["local 512"] * 3 + ["global"]


def test_gemma_4_in_both_directions() -> None:
    images = ModelDeclaration.from_config(GEMMA4 | {"use_bidirectional_attention": "vision"})
    assert images.distinct == ModelDeclaration.from_config(GEMMA4).distinct
    assert any("tokens of one image" in note for note in images.notes)
    model = ModelDeclaration.from_config(GEMMA4 | {"use_bidirectional_attention": "all", "sliding_window": 6})
    assert [layer.declaration.call.mask for layer in model.distinct] == [SlidingWindow(left=4, right=4), Full()]
    assert not model.layer(0).declaration.operation_metadata().causal


def test_keys_of_earlier_layers() -> None:
    config = GEMMA4 | {"num_kv_shared_layers": 2, "layer_types": [LOCAL, GLOBAL] * 3}
    assert _kinds(config) == ["local 512", "global"] * 2 + ["local 512 shared kv", "global shared kv"]
    assert _notes(config)["model.shared_kv"] == {"sources": [2, 3], "first": 4, "last": 5}
    assert "model.shared_kv" not in _notes(GEMMA4)


# -- LongCat and Mistral 4 ---------------------------------------------------------------------------------------------


def test_longcats_layers_have_two_attentions() -> None:
    model = ModelDeclaration.from_config(LONGCAT)
    assert len(model.layers) == 6
    assert _notes(LONGCAT)["model.two_attentions"] == {"layers": 3}
    said = " ".join(model.notes)
    assert "mla_scale_q_lora=True: the model multiplies queries" in said
    assert "mla_scale_kv_lora=True: the model multiplies latents" in said
    unscaled = ModelDeclaration.from_config(LONGCAT | {"mla_scale_q_lora": False, "mla_scale_kv_lora": False})
    assert "mla_scale" not in " ".join(unscaled.notes)
    for both in ({"num_layers": 3, "num_hidden_layers": 6}, {"num_layers": None, "num_hidden_layers": 6}):
        assert ModelDeclaration.from_config(LONGCAT | both).distinct == model.distinct
    assert (
        len(
            ModelDeclaration.from_config({"model_type": "llava", "text_config": {"model_type": "longcat_flash"}}).layers
        )
        == 56
    )


def test_mistral_4s_queries_are_scaled_by_the_model() -> None:
    (note,) = [one for one in ModelDeclaration.from_config(MISTRAL4).notes if "llama_4_scaling_beta=0.1" in one]
    assert "1 + 0.1 log(1 + floor(p / 8192)), before attention" in note
    for key in ("rope_parameters", "rope_scaling"):
        model = ModelDeclaration.from_config(MISTRAL4 | {key: YARN | {"llama_4_scaling_beta": 0}})
        assert not [one for one in model.notes if "llama_4" in one]
        scale = model.layer(0).declaration.operation_metadata().softmax_scale
        assert scale == pytest.approx(128**-0.5 * (0.1 * np.log(4) + 1) ** 2, rel=1e-12)
