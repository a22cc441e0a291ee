"""Model configs: what is published of well-known models, and what is no config, contradicts itself, or can't be carried."""

from __future__ import annotations

import json
import warnings
from enum import Enum, StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid_models import HYBRIDS
from layered_models import LAYERED
from plain_cases import IMAGES

from attnops import (
    Attention,
    Causal,
    Chunked,
    Declaration,
    Full,
    LatentAttention,
    Mask,
    ModelDeclaration,
    OperationMetadata,
    SlidingWindow,
)
from attnops.errors import ConfigError, ConfigWarning, InputError
from attnops.masks import SEGMENT_IDS
from attnops.models.families import ALIASES, COMPOSITES, FAMILIES, PARTS
from attnops.planning.notes import has_note

MODELS = Path(__file__).resolve().parents[1] / "data" / "models"
SHAPES = json.loads((MODELS.parent / "model_shapes.json").read_text())["shapes"]

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "hidden_size": 64,
}
GEMMA2 = {"model_type": "gemma2", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64}


def window(tokens: int) -> Mask:
    """The last `tokens` keys, the query's own included."""
    return Causal() & SlidingWindow(left=tokens - 1, right=0)


SPANS = Causal() | SEGMENT_IDS  # tokens of one image see each other

# Name: (query heads, kv heads, dim, value dim), {mask: layers}, scale (None: 1/sqrt(dim)), soft cap, sinks.
# From the models' cards, papers and published configs.
PUBLISHED: dict[str, tuple[tuple[int, ...], dict[Mask, list[int]], float | None, float | None, bool]] = {
    "llama-3.1-8b": ((32, 8, 128, 128), {Causal(): list(range(32))}, None, None, False),
    "minimax-m2": ((48, 8, 128, 128), {Causal(): list(range(62))}, None, None, False),
    "olmoe-1b-7b": ((16, 16, 128, 128), {Causal(): list(range(16))}, None, None, False),
    "phi-2": ((32, 32, 80, 80), {Causal(): list(range(32))}, None, None, False),
    "mistral-7b-v0.1": ((32, 8, 128, 128), {window(4096): list(range(32))}, None, None, False),
    "gemma-2-27b-it": (
        (32, 16, 128, 128),
        {window(4096): list(range(0, 46, 2)), Causal(): list(range(1, 46, 2))},
        1 / 12,
        50.0,
        False,
    ),
    "gemma-3-4b-it": (
        (8, 4, 256, 256),
        {
            SPANS & SlidingWindow(left=1023, right=None): [n for n in range(34) if n not in (5, 11, 17, 23, 29)],
            SPANS: [5, 11, 17, 23, 29],
        },
        1 / 16,
        None,
        False,
    ),
    "gpt-oss-20b": (
        (64, 8, 64, 64),
        {window(128): list(range(0, 24, 2)), Causal(): list(range(1, 24, 2))},
        None,
        None,
        True,
    ),
    "qwen2.5-7b": ((28, 4, 128, 128), {Causal(): list(range(28))}, None, None, False),
    "qwen3-32b": ((64, 8, 128, 128), {Causal(): list(range(64))}, None, None, False),
    "llama-4-scout": (
        (40, 8, 128, 128),
        {Causal() & Chunked(8192): [n for n in range(48) if n % 4 != 3], Causal(): list(range(3, 48, 4))},
        None,
        None,
        False,
    ),
    "deepseek-v3": ((128, 128, 192, 128), {Causal(): list(range(61))}, 0.1352337788608801, None, False),
    # 1/sqrt(192) times the square of YaRN's 0.1 * ln(32) + 1.
    "kimi-k2": ((64, 64, 192, 128), {Causal(): list(range(61))}, 0.13086079996295005, None, False),
    "deepseek-v3.2": ((128, 128, 192, 128), {Causal(): list(range(61))}, 0.1352337788608801, None, False),
    # 0.1 * ln(64) + 1 and, of Mistral Small 4, 1/sqrt(128) with 0.1 * ln(128) + 1.
    "kimi-k2.5": ((64, 64, 192, 128), {Causal(): list(range(61))}, 0.14467962580268923, None, False),
    "mistral-small-4": ((32, 32, 128, 128), {Causal(): list(range(36))}, 0.19496949473302969, None, False),
    "longcat-flash-chat": ((64, 64, 192, 128), {Causal(): list(range(56))}, None, None, False),
    "command-a": (
        (96, 8, 128, 128),
        {window(4096): [n for n in range(64) if n % 4 != 3], Causal(): list(range(3, 64, 4))},
        None,
        None,
        False,
    ),
    "exaone-4.0-32b": (
        (40, 8, 128, 128),
        {window(4096): [n for n in range(64) if n % 4 != 3], Causal(): list(range(3, 64, 4))},
        None,
        None,
        False,
    ),
    "phi-3-mini-4k": ((32, 32, 96, 96), {window(2047): list(range(32))}, None, None, False),
    "phi-4-mini": ((24, 8, 128, 128), {window(262144): list(range(32))}, None, None, False),
    "all-minilm-l6-v2": ((12, 12, 32, 32), {Full(): list(range(6))}, None, None, False),
    "modernbert-base": (
        (12, 12, 64, 64),
        {Full(): list(range(0, 22, 3)), SlidingWindow(left=64, right=64): [n for n in range(22) if n % 3]},
        None,
        None,
        False,
    ),
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_well_known_models(name: str) -> None:
    sizes, masks, scale, cap, sinks = PUBLISHED[name]
    model = ModelDeclaration.from_config(MODELS / f"{name}.json", batch=2, q_len=512)
    assert {layer.declaration.call.mask: list(layer.layers) for layer in model.distinct} == masks
    for layer in model.distinct:
        call, metadata = layer.declaration.call, layer.declaration.operation_metadata()
        found = call.sizes()
        assert (found["q_heads"], found["kv_heads"], found["head_dim"], found["value_dim"]) == sizes
        assert (found["batch"], found["q_len"], found["kv_len"]) == (2, 512, 512)
        assert metadata.softmax_scale == (None if scale is None else pytest.approx(scale, rel=1e-12))
        assert call.logits_soft_cap == cap
        assert call.softmax_aux == ((sizes[0],) if sinks else None)
        assert metadata.causal == ("bert" not in name and "minilm" not in name)


def test_every_config_here_is_in_the_table() -> None:
    assert {path.stem for path in MODELS.glob("*.json")} == {*PUBLISHED, *LAYERED, *HYBRIDS, *IMAGES}


@pytest.mark.parametrize(
    ("name", "shape", "layer"),
    [
        ("llama-3.1-8b", "llama-3.1-8b", 0),
        ("gemma-2-27b-it", "gemma-2-27b local", 0),
        ("gemma-3-4b-it", "gemma-3-4b local", 0),
        ("gpt-oss-20b", "gpt-oss-20b sliding", 0),
        ("gpt-oss-20b", "gpt-oss-20b full", 1),
        ("qwen3-32b", "qwen3-32b", 0),
        ("mistral-7b-v0.1", "mistral-7b-v0.1", 0),
        ("phi-3-mini-4k", "phi-3-mini-4k", 0),
        ("llama-4-scout", "llama-4-scout chunked", 0),
        ("deepseek-v3", "deepseek-v3 MLA prefill", 0),
    ],
)
def test_layers_have_the_shapes_of_the_conformance_suite(name: str, shape: str, layer: int) -> None:
    """model_shapes.json was gathered from other programs than transformers."""
    known = next(s for s in SHAPES if s["name"] == shape)
    declaration = ModelDeclaration.from_config(MODELS / f"{name}.json").layer(layer).declaration
    call, metadata = declaration.call, declaration.metadata
    assert (call.q_heads, call.kv_heads, call.head_dim) == (known["hq"], known["hkv"], known["head_dim"])
    assert (call.value_dim or call.head_dim) == known["head_dim_v"]
    scale = metadata.get("softmax_scale", known["head_dim"] ** -0.5)
    assert scale == pytest.approx(known["softmax_scale"], rel=1e-12)
    assert call.logits_soft_cap == known["logits_soft_cap"]
    config = json.loads((MODELS / f"{name}.json").read_text())
    spans = config["model_type"] in ("gemma3", "gemma4")  # tokens of one image see each other
    wanted: Mask = SPANS if spans else Causal()
    if known["window"]:
        wanted = wanted & SlidingWindow(known["window"][0], None if spans else known["window"][1])
    if known["chunk"]:
        wanted = wanted & Chunked(known["chunk"])
    assert call.mask == wanted


# -- the ways in and out -----------------------------------------------------------------------------------------------


def test_a_file_a_folder_a_dict_and_an_object_mean_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA2))

    class Config:
        model_type = "gemma2"

        def to_dict(self) -> dict[str, Any]:
            return {key: value for key, value in GEMMA2.items() if key != "model_type"}

    nested = {"model_type": "gemma3", "text_config": SimpleNamespace(model_type="gemma3_text", sliding_window=16)}
    forms = [tmp_path / "config.json", str(tmp_path), GEMMA2, Config(), SimpleNamespace(**GEMMA2)]
    found = [ModelDeclaration.from_config(form).distinct for form in forms]
    assert all(other == found[0] for other in found)
    assert [layer.kind for layer in ModelDeclaration.from_config(nested).distinct] == ["local 16 spans", "global spans"]


def test_names_that_metadata_takes_from_any_config() -> None:
    own = {
        "attn_dtype": jnp.float16,
        "sequence_axis_name": "cp",
        "mesh": {"tp": 2},
        "platform": "jax",
        "attn_softmax_dtype": None,
    }
    config = LLAMA | own | {"torch_dtype": "bfloat16"}
    layer = ModelDeclaration.from_config(config, metadata={"fallback": "error"}).layer(0)
    assert layer.declaration.operation_metadata() == OperationMetadata.from_config(config, fallback="error")
    made = layer.declaration.operation_metadata()
    assert (made.runtime_dtype, made.sequence_axis_name, made.platform) == (jnp.float16, "cp", None)
    assert dict(made.mesh.shape) == {"tp": 2}
    assert layer.declaration.call.dtype == "bfloat16"


def test_layers_by_number() -> None:
    model = ModelDeclaration.from_config(GEMMA2)
    assert [layer.kind for layer in model.layers] == ["local 4096", "global"] * 2
    assert model.layer(3) is model.distinct[1]
    assert model.layer(3).layers == (1, 3)
    for number in (4, -1, True):
        with pytest.raises(ConfigError, match="layers 0 to 3"):
            model.layer(number)


def test_written_files_are_declarations_that_attend(tmp_path: Path) -> None:
    model = ModelDeclaration.from_config(
        GEMMA2 | {"sliding_window": 4, "head_dim": 8}, operation="vanilla", q_len=16, metadata={"runtime_dtype": None}
    )
    paths = model.write(tmp_path / "made" / "here")
    assert [path.name for path in paths] == ["local_4.json", "global.json"]
    assert [Declaration.load(path) for path in paths] == [layer.declaration for layer in model.distinct]
    random = np.random.default_rng(0)
    x, kv = (random.standard_normal((1, 16, heads, 8), np.float32) for heads in (8, 4))
    found = np.asarray(Attention(paths[0])(x, kv, kv).attention_outputs)
    # Gemma 2 in plain NumPy: scale, cap, window of 4 keys, softmax
    q, k = np.asarray(x, np.float64), np.repeat(np.asarray(kv, np.float64), 2, axis=2)
    logits = 50.0 * np.tanh(np.einsum("bqhd,bkhd->bhqk", q, k) / 16 / 50.0)
    i, j = np.arange(16)[:, None], np.arange(16)[None, :]
    weights = np.exp(np.where((j <= i) & (j > i - 4), logits, -np.inf))
    wanted = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), k)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_decode_sees_the_window_at_each_rows_own_length() -> None:
    small = GEMMA2 | {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4, "head_dim": 8}
    model = ModelDeclaration.from_config(small, operation="vanilla", batch=2, q_len=1, kv_len=16)
    random = np.random.default_rng(2)
    query, key, value = (random.standard_normal((2, t, h, 8), np.float32) for t, h in ((1, 4), (16, 2), (16, 2)))
    lengths = np.array([9, 16], np.int32)
    logits = np.einsum("bqhd,bkhd->bhqk", query, np.repeat(np.asarray(key, np.float64), 2, axis=2)) / 16
    logits = 50.0 * np.tanh(logits / 50.0)
    keys, last = np.arange(16)[None, :], lengths[:, None] - 1
    for layer, visible in zip(model.distinct, ((keys <= last) & (keys > last - 4), keys <= last), strict=True):
        weights = np.exp(np.where(visible[:, None, None], logits, -np.inf))
        weights /= weights.sum(-1, keepdims=True)
        wanted = np.einsum("bhqk,bkhd->bqhd", weights, np.repeat(np.asarray(value, np.float64), 2, axis=2))
        found = Attention(layer.declaration)(query, key, value, kv_lengths=lengths).attention_outputs
        np.testing.assert_allclose(np.asarray(found), wanted, atol=1e-5)


def test_layers_that_differ_in_scale_have_names_of_their_own(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 3, "n_head": 2, "n_embd": 32, "scale_attn_by_inverse_layer_idx": True}
    model = ModelDeclaration.from_config(gpt2)
    assert [layer.name for layer in model.distinct] == ["global_layer_0", "global_layer_1", "global_layer_2"]
    assert [layer.declaration.call.softmax_scale for layer in model.distinct] == pytest.approx([1 / 4, 1 / 8, 1 / 12])
    assert len(model.write(tmp_path)) == 3
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="wanted a folder"):
        model.write(tmp_path / "file")


def test_lengths_of_a_cache() -> None:
    call = ModelDeclaration.from_config(LLAMA, q_len=16, kv_len=64).distinct[0].declaration.call
    assert (call.query_offset, call.kv_lengths) == (48, None)
    cached: list[dict[str, Any]] = [{"q_len": 1, "kv_len": 64}]
    cached += [{"q_len": 4, "kv_len": 64, "mode": mode} for mode in ("insert", "decode", "__autoregressive__")]
    for given in cached:
        call = ModelDeclaration.from_config(LLAMA, **given).distinct[0].declaration.call
        assert (call.query_offset, call.kv_lengths) == (None, True)
    for given, says in (
        ({"kv_len": 64}, "without q_len"),
        ({"q_len": 65, "kv_len": 64}, "more than kv_len"),
        ({"q_len": 0}, "q_len"),
        ({"q_len": 4, "mode": "guess"}, "mode"),
        ({"layout": "btd"}, "layout"),
        ({"dtype": "int8"}, "dtype"),
        ({"metadata": {"softmax": 1}, "operation": "vanilla"}, None),
    ):
        if says is None:  # metadata is checked where it is used
            made = ModelDeclaration.from_config(LLAMA, **given).distinct[0].declaration
            with pytest.raises(ConfigError, match="unknown field 'softmax'"):
                made.operation_metadata()
            continue
        with pytest.raises((ConfigError, InputError), match=says):
            ModelDeclaration.from_config(LLAMA, **given)
    bert = LLAMA | {"model_type": "bert"}
    with pytest.raises(ConfigError, match="both directions"):
        ModelDeclaration.from_config(bert, q_len=1, kv_len=64)


# -- notes -------------------------------------------------------------------------------------------------------------


def _notes(config: Any) -> dict[str, Any]:
    return {entry.code: entry.values for entry in ModelDeclaration.from_config(config).notes}


def test_what_was_decided_is_told() -> None:
    notes = _notes(GEMMA2 | {"my_new_thing": 3})
    assert set(notes) == {"model.defaults", "model.unknown_keys", "model.no_dtype"}
    fields = {"sliding_window=4096", "attn_logit_softcapping=50.0", "num_key_value_heads=4"}
    assert fields <= set(notes["model.defaults"]["fields"])
    assert notes["model.unknown_keys"] == {"keys": ["my_new_thing"]}
    notes = _notes(MODELS / "gemma-3-4b-it.json")
    assert notes["model.nested_config"] == {"key": "text_config", "kind": "gemma3"}
    assert "num_attention_heads=8" in notes["model.defaults"]["fields"]
    assert notes["model.spans"] == {}
    assert _notes(MODELS / "llama-3.1-8b.json") == {}
    of_v3 = {"model.defaults": {"fields": ["rope_interleave=True"], "model": "deepseek_v3"}}
    assert _notes(MODELS / "deepseek-v3.json") == of_v3
    types = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window_pattern": 6, "sliding_window": 8}
    assert _notes(LLAMA | {"model_type": "cohere2"} | types)["model.layer_types"] == {
        "patterns": ["sliding_window_pattern"]
    }


def test_the_same_said_twice() -> None:
    for names in (("torch_dtype", "dtype"), ("dtype", "torch_dtype")):
        for values in (("bfloat16", None), (None, "bfloat16"), ("bfloat16", "bfloat16")):
            said = dict(zip(names, values, strict=True))
            assert ModelDeclaration.from_config(LLAMA | said).layer(0).declaration.call.dtype == "bfloat16"


def test_a_window_that_is_off_is_told() -> None:
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 16}
    model = ModelDeclaration.from_config(qwen)
    assert [layer.kind for layer in model.distinct] == ["global"]
    assert _notes(qwen)["model.window_off"] == {"size": 16}
    assert "model.window_off" not in _notes(qwen | {"use_sliding_window": False})


def test_keys_that_are_passed_over_on_purpose() -> None:
    odd = LLAMA | {"attention_flavour": "vanilla", "sliding_window": 4}
    with pytest.raises(ConfigError, match="attention_flavour='vanilla' may concern attention"):
        ModelDeclaration.from_config(odd)
    with pytest.raises(ConfigError, match="don't read sliding_window"):
        ModelDeclaration.from_config(odd, ignore="attention_flavour")
    model = ModelDeclaration.from_config(odd, ignore=("attention_flavour", "sliding_window"))
    ignored = [entry.values for entry in model.notes if entry.code == "model.ignored_keys"]
    assert ignored == [{"keys": ["attention_flavour", "sliding_window"]}]
    with pytest.raises(ConfigError, match=r"ignore names 'attention_flavor'.*Did you mean 'attention_flavour'"):
        ModelDeclaration.from_config(odd, ignore=["attention_flavor"])
    assert ModelDeclaration.from_config(odd, family="mistral", ignore=["attention_flavour"]).layers[0].kind == "local 4"


# -- what is refused ---------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"model_type": None}, "no model_type"),
    ({"model_type": "lama"}, "Did you mean 'llama'"),
    ({"model_type": "rwkv"}, "not one that attnops can read"),
    ({"num_attention_heads": None}, "num_attention_heads missing"),
    ({"num_attention_heads": 0}, "num_attention_heads=0; wanted a whole number from 1"),
    ({"num_attention_heads": True}, "num_attention_heads=True"),
    ({"num_attention_heads": "8"}, "num_attention_heads='8'"),
    ({"num_attention_heads": 8.0}, "num_attention_heads=8.0"),
    ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
    ({"hidden_size": 65}, "hidden_size=65 is not a multiple of num_attention_heads=8"),
    ({"num_key_value_heads": 3}, "num_attention_heads=8 is not a multiple of num_key_value_heads=3"),
    ({"head_dim": 0}, "head_dim=0"),
    ({"sliding_window": 8}, "models of type llama don't read sliding_window"),
    ({"query_pre_attn_scalar": 64}, "don't read query_pre_attn_scalar"),
    ({"attention_dropout": 1.0}, "attention_dropout=1.0; wanted a probability"),
    ({"torch_dtype": "int8"}, "dtype='int8'; wanted one of float32, bfloat16, float16"),
    (
        {"torch_dtype": "bfloat16", "dtype": "float16"},
        "torch_dtype='bfloat16' and dtype='float16' contradict each other",
    ),
    ({"alibi": True}, "ALiBi adds a bias"),
    ({"position_embedding_type": "relative_key"}, "a kind of position embedding that may add terms to the logits"),
    ({"add_cross_attention": True}, "cross-attention"),
    ({"is_encoder_decoder": True}, "don't read is_encoder_decoder"),
    ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
    ({"is_causal": "no"}, "is_causal='no'; wanted true or false"),
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window=0"),
    ({"model_type": "mistral", "sliding_window": 4, "layer_types": ["full_attention"] * 2}, "don't read layer_types"),
    (
        {"model_type": "qwen3", "layer_types": ["full_attention"]},
        "1 entries; wanted a list with one entry for each of 2",
    ),
    ({"model_type": "qwen3", "layer_types": "full_attention"}, "wanted a list"),
    ({"model_type": "qwen3", "layer_types": ["full_attention", "local"]}, r"layer_types\[1\] is 'local'"),
    ({"model_type": "qwen3", "layer_types": ["linear_attention", "full_attention"]}, "linear attention"),
    ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, "use_sliding_window is false"),
    ({"model_type": "gemma2", "sliding_window": None}, "sliding_window is null"),
    ({"model_type": "gemma2", "sliding_window_size": 8}, "contradict each other"),
    ({"model_type": "gemma2", "query_pre_attn_scalar": -1}, "query_pre_attn_scalar=-1; wanted a positive number"),
    ({"model_type": "gemma2", "attn_logit_softcapping": "50"}, "attn_logit_softcapping='50'"),
    ({"model_type": "gemma2", "use_bidirectional_attention": True}, "builds a causal mask for gemma2 anyway"),
    ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern=0"),
    ({"model_type": "llama4_text", "attention_chunk_size": None}, "attention_chunk_size is missing"),
    ({"model_type": "llama4_text", "no_rope_layers": [1]}, "no_rope_layers: got 1 entries"),
    ({"model_type": "llama4_text", "is_causal": False}, "is_causal is false"),
    ({"model_type": "modernbert", "local_attention": 1}, "local_attention=1; wanted a whole number from 2"),
    ({"model_type": "granite", "attention_multiplier": 0}, "attention_multiplier=0"),
    ({"model_type": "deepseek_v3", "qk_head_dim": 100}, "add up to 192"),
    ({"model_type": "deepseek_v3", "num_key_value_heads": 4}, "latent attention"),
    (
        {
            "model_type": "deepseek_v3",
            "num_key_value_heads": 8,
            "rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0},
        },
        "rope_scaling.factor=None; wanted a positive number",
    ),
    (
        {"model_type": "deepseek_v3", "rope_scaling": {"a": 1}, "rope_parameters": {"a": 2}},
        "rope_parameters and rope_scaling contradict each other",
    ),
    ({"model_type": "molmo2", "text_config": {}}, "doesn't know what else its layers see"),
    ({"model_type": "llava", "text_config": {}}, "text_config has no model_type"),
    ({"model_type": "llava", "text_config": [1]}, r"text_config=\[1\]; wanted an object"),
]


@pytest.mark.parametrize(("changes", "says"), BAD, ids=[says[:40] for _, says in BAD])
def test_configs_that_make_no_sense(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ModelDeclaration.from_config(LLAMA | changes)


@pytest.mark.parametrize("key", ["num_attention_heads", "num_hidden_layers", "hidden_size"])
def test_configs_that_lack_something(key: str) -> None:
    short = {name: value for name, value in LLAMA.items() if name != key}
    with pytest.raises(ConfigError, match=f"{key} missing"):
        ModelDeclaration.from_config(short)
    if key == "hidden_size":
        assert ModelDeclaration.from_config(short | {"head_dim": 16}).distinct[0].declaration.call.head_dim == 16


def test_the_familys_own_names_are_the_ones_that_are_missed() -> None:
    with pytest.raises(ConfigError, match="n_layer, n_head, n_embd missing"):
        ModelDeclaration.from_config({"model_type": "gpt2", "vocab_size": 5})
    with pytest.raises(ConfigError, match="n_head=4 and num_attention_heads=8 contradict each other"):
        ModelDeclaration.from_config({"model_type": "gpt2", "n_head": 4, "num_attention_heads": 8})
    with pytest.raises(ConfigError, match="don't read attention_dropout"):
        ModelDeclaration.from_config(LLAMA | {"model_type": "bert", "attention_dropout": 0.2})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "wanted the config.json of a model: an object"),
        ("{", "not JSON at line 1"),
        ('{"model_type": "llama", "model_type": "gemma"}', "appears twice"),
        ('{"model_type": "llama", "num_hidden_layers": NaN}', "NaN is not a JSON number"),
        ('{"operation": "splash", "call": {}}', "no model_type"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as error:
        ModelDeclaration.from_config(path)
    assert str(path) in str(error.value)


def test_what_is_no_config_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ModelDeclaration.from_config(tmp_path / "nothing.json")
    with pytest.raises(ConfigError, match="got int"):
        ModelDeclaration.from_config(3)
    with pytest.raises(ConfigError, match="family 'lama' is not one"):
        ModelDeclaration.from_config(LLAMA, family="lama")


# -- OperationMetadata.from_config -------------------------------------------------------------------------------------


def test_metadata_of_a_model() -> None:
    metadata = OperationMetadata.from_config(str(MODELS / "llama-3.1-8b.json"), blocksize_q=256)
    assert metadata == OperationMetadata(runtime_dtype="bfloat16", blocksize_q=256)
    bert = OperationMetadata.from_config(MODELS / "all-minilm-l6-v2.json")
    assert bert == OperationMetadata(causal=False, dropout_prob=0.1)
    assert OperationMetadata.from_config(MODELS / "all-minilm-l6-v2.json", causal=True, dropout_prob=0.0).causal
    scale = OperationMetadata.from_config(MODELS / "deepseek-v3.json").softmax_scale
    assert scale == pytest.approx(0.1352337788608801, rel=1e-12)


def test_what_metadata_cannot_hold_is_told() -> None:
    with pytest.warns(ConfigWarning) as caught:
        metadata = OperationMetadata.from_config(MODELS / "gemma-2-27b-it.json")
    assert metadata.softmax_scale == pytest.approx(1 / 12)
    (warning,) = caught
    for said in ("23 of 46 layers are local 4096", "logits_soft_cap=50", "ModelDeclaration"):
        assert said in str(warning.message)
    assert warning.filename == __file__
    with pytest.warns(ConfigWarning, match="sinks"):
        OperationMetadata.from_config(MODELS / "gpt-oss-20b.json")
    with pytest.warns(ConfigWarning, match="return_weights=True"):
        OperationMetadata.from_config(LLAMA | {"output_attentions": True})


def test_a_config_with_a_frameworks_names_is_read_both_ways() -> None:
    more = {"attn_dtype": "float16", "attn_softmax_dtype": "float64", "partition_axis": {"head_axis": "model"}}
    metadata = OperationMetadata.from_config(GEMMA2 | more | {"layer_types": ["full_attention"] * 4,
        "attn_logit_softcapping": None, "torch_dtype": "bfloat16"})  # fmt: skip
    assert metadata == OperationMetadata(
        runtime_dtype="float16",
        runtime_softmax_dtype="float64",
        partition_axis={"head_axis": "model"},
        softmax_scale=1 / 16,
    )
    with pytest.raises(ConfigError, match="no model_type"):
        OperationMetadata.from_config({"num_attention_heads": 8})
    with pytest.raises(ConfigError, match="no model_type"):
        OperationMetadata.from_config(SimpleNamespace(num_attention_heads=8))


def test_a_frameworks_object_gives_its_own_names_alone() -> None:
    """Its model gives the rest in each call, so nobody is warned, and its many other attributes are its own."""

    class Platform(Enum):
        TPU = "tpu"
        PALLAS = "pallas"
        TRITON = "triton"
        JAX = "jax"

    class Backend(StrEnum):
        TPU = "tpu"
        TT = "tt"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for platform, wanted in (
            (Platform.TPU, "tpu"),
            (Platform.PALLAS, None),
            (Platform.JAX, None),
            ("triton", None),
        ):
            config = SimpleNamespace(
                **GEMMA2, attn_dtype="bfloat16", attn_mechanism="splash", platform=platform, backend=Backend.TPU
            )
            metadata = OperationMetadata.from_config(config)
            assert (metadata.platform, metadata.backend) == (wanted, "tpu")
            assert metadata == OperationMetadata(runtime_dtype="bfloat16", platform=wanted, backend="tpu")
    with pytest.raises(ConfigError, match="backend="):
        OperationMetadata.from_config(SimpleNamespace(attn_dtype="bfloat16", backend=Backend.TT))
    with pytest.raises(ConfigError, match="platform="):  # said to attnops itself, it is a slip
        OperationMetadata(platform=Platform.PALLAS)


def test_families_aliases_and_composites_are_disjoint() -> None:
    assert not set(FAMILIES) & set(COMPOSITES) | set(FAMILIES) & set(ALIASES) | set(ALIASES) & set(COMPOSITES)
    assert {*ALIASES.values(), *(kind for whole in COMPOSITES.values() for kind in whole.parts.values())} <= {
        *FAMILIES,
        *PARTS,
    }


def test_an_alias_is_read_as_its_family() -> None:
    model = ModelDeclaration.from_config(MODELS / "kimi-k2.json")
    assert model.family == "deepseek_v3"
    assert any("kimi_k2" in note for note in model.notes)
    text = json.loads((MODELS / "kimi-k2.json").read_text())
    nested = ModelDeclaration.from_config({"model_type": "kimi_k25", "text_config": text})
    assert nested.distinct[0].declaration == model.distinct[0].declaration
    assert ModelDeclaration.from_config(text | {"model_type": "x"}, family="kimi_k2").distinct == model.distinct


def test_a_composite_whose_text_is_at_the_top_level() -> None:
    """The keys of a text beside its composite's model_type: transformers would read none of them."""
    flat = json.loads((MODELS / "llama-4-scout.json").read_text())["text_config"]
    with pytest.raises(ConfigError, match="family='llama4_text'"):
        ModelDeclaration.from_config(flat | {"model_type": "llama4"})
    whole = ModelDeclaration.from_config(MODELS / "llama-4-scout.json", dtype="bfloat16")
    read = ModelDeclaration.from_config(flat | {"model_type": "llama4"}, family="llama4_text", dtype="bfloat16")
    assert [layer.declaration for layer in read.distinct] == [layer.declaration for layer in whole.distinct]
    with pytest.raises(ConfigError, match="family='llama4_text'"):
        ModelDeclaration.from_config({"model_type": "llama4", "text_config": {"num_hidden_layers": 2}})


# -- keys that change nothing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"position_embedding_type": "rope_gptj"},
        {"full_attn_mod": 1},
        {"layer_types": ["full_attention"] * 2},
        {"scale_attn_weights": True},
        {"_flash_attn_2_enabled": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_keys_that_state_what_holds_anyway(changes: dict[str, Any]) -> None:
    assert ModelDeclaration.from_config(LLAMA | changes).distinct == ModelDeclaration.from_config(LLAMA).distinct


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type"),
        ({"full_attn_mod": 2}, "full_attn_mod"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 2}, "layer_types"),  # its layers are all local
        ({"model_type": "gpt_neox", "head_dim": 16}, "head_dim"),
    ],
)
def test_keys_that_would_change_something(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        ModelDeclaration.from_config({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"} | changes)


def test_keys_of_other_families_that_agree() -> None:
    """A head_dim that follows from the sizes, global layers where there is no window, and the pooler of old BERTs."""
    neox = {"model_type": "gpt_neox", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64}
    assert ModelDeclaration.from_config(neox | {"head_dim": 8}).distinct == ModelDeclaration.from_config(neox).distinct
    mistral = LLAMA | {"model_type": "mistral", "sliding_window": None, "layer_types": ["full_attention"] * 2}
    assert [layer.kind for layer in ModelDeclaration.from_config(mistral).distinct] == ["global"]
    bert = neox | {"model_type": "bert", "pooler_num_attention_heads": 12, "position_embedding_type": "absolute"}
    assert ModelDeclaration.from_config(bert).distinct[0].declaration.call.q_heads == 8


EXAONE = {
    "model_type": "exaone4",
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "hidden_size": 64,
    "sliding_window": 8,
}


def test_a_pattern_of_letters() -> None:
    """EXAONE's documentation: repeated from layer 0, and the last layer is global. Only layer_types is read."""
    local, whole = "sliding_attention", "full_attention"
    letters = EXAONE | {"num_key_value_heads": 8, "sliding_window_pattern": "LG"}
    for types, told in (([local, whole, local, whole, whole], False), ([local, whole, local, whole, local], True)):
        model = ModelDeclaration.from_config(letters | {"layer_types": types})
        assert [layer.kind for layer in model.layers] == ["local 8" if kind == local else "global" for kind in types]
        assert has_note(model.notes, "model.layer_types") == told
    for pattern in ("LG", "", "LX"):
        with pytest.raises(ConfigError, match="sliding_window_pattern"):
            ModelDeclaration.from_config(letters | {"sliding_window_pattern": pattern})
    with pytest.raises(ConfigError, match="sliding_window_pattern"):
        ModelDeclaration.from_config(letters | {"sliding_window_pattern": "LX", "layer_types": [whole] * 5})


# -- encoder-decoders --------------------------------------------------------------------------------------------------

# Whisper large-v3-turbo: 32 layers in the encoder, 4 in the decoder, 20 heads of 64.
WHISPER = {
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "d_model": 1280,
    "num_hidden_layers": 32,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "decoder_layers": 4,
    "decoder_attention_heads": 20,
    "max_source_positions": 1500,
    "max_target_positions": 448,
}


def test_parts_of_an_encoder_decoder() -> None:
    found = {part: ModelDeclaration.from_config(WHISPER, part=part) for part in ("encoder", "decoder", "cross")}
    assert {part: len(model.layers) for part, model in found.items()} == {"encoder": 32, "decoder": 4, "cross": 4}
    assert {part: model.positions for part, model in found.items()} == {"encoder": 1500, "decoder": 448, "cross": 448}
    masks = {part: model.layer(0).declaration.call.mask for part, model in found.items()}
    assert masks == {"encoder": Full(), "decoder": Causal(), "cross": Full()}
    cross = ModelDeclaration.from_config(WHISPER, part="cross", q_len=1, kv_len=1500, mode="autoregressive")
    call = cross.layer(0).declaration.call
    assert (call.q_len, call.kv_len, call.kv_lengths, call.query_offset) == (1, 1500, None, None)
    for arguments, says in (
        ({}, "3 attentions; give part= one of encoder, decoder, cross"),
        ({"part": "both"}, "part='both'; wanted one of encoder, decoder, cross"),
        ({"part": "cross", "q_len": 4}, "the keys of cross-attention are the encoder's"),
    ):
        with pytest.raises(ConfigError, match=says):
            ModelDeclaration.from_config(WHISPER, **arguments)
    with pytest.raises(ConfigError, match="llama has one attention: leave it out"):
        ModelDeclaration.from_config(LLAMA, part="decoder")
    for kind in ("moonshine", "t5gemma"):  # that they aren't read is why, whatever the part
        with pytest.raises(ConfigError, match=f"model_type '{kind}' is not one that attnops can read"):
            ModelDeclaration.from_config({"model_type": kind, "is_encoder_decoder": True}, part="encoder")
    with pytest.raises(ConfigError, match="contradict each other"):
        ModelDeclaration.from_config(WHISPER | {"num_hidden_layers": 30}, part="encoder")
    assert not OperationMetadata.from_config(WHISPER, part="encoder").causal
    assert OperationMetadata.from_config(WHISPER, part="decoder").causal
    with pytest.raises(ConfigError, match=r"part for a SimpleNamespace"):
        OperationMetadata.from_config(SimpleNamespace(attn_dtype="bfloat16"), part="decoder")


@pytest.mark.parametrize(
    ("file", "heads", "scale"), [("deepseek-v3", 128, 0.1352337788608801), ("kimi-k2", 64, 0.13086079996295005)]
)
def test_latent_attention_is_declared_beside_a_key_for_each_head(file: str, heads: int, scale: float) -> None:
    """The sizes that both models publish: 128 without positions, 64 with, values of 128, latents of 512."""
    model = ModelDeclaration.from_config(
        MODELS / f"{file}.json", operation="vanilla", q_len=64, metadata={"fallback": "error"}
    )
    (layer,) = model.distinct
    assert layer.latent is not None
    sizes = layer.latent.latent
    assert sizes is not None
    assert (sizes.heads, sizes.nope_dim, sizes.rope_dim, sizes.value_dim, sizes.latent_dim) == (
        heads,
        128,
        64,
        128,
        512,
    )
    assert (sizes.query_latent_dim, sizes.rope_pairs) == (1536, "interleaved")
    attend = LatentAttention(layer.latent)
    shapes = ((1, 64, 512), (1, 64, 64), (512, heads, 128), (512, heads, 128))
    made = {"query_latent": (1, 64, 1536), "w_uq": (1536, heads, 192), "q_cos": (1, 64, 32), "q_sin": (1, 64, 32)}
    given = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in made.items()}
    arrays = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)
    plan = attend.plan(None, None, *arrays, **given).inner
    assert plan.problem.softmax_scale == pytest.approx(scale, rel=1e-12)
    assert plan.problem.mask == Causal(offset=0)
    assert layer.declaration.latent is None
    assert layer.declaration.call.head_dim == 192


def test_without_latents_there_is_no_such_declaration() -> None:
    assert all(layer.latent is None for layer in ModelDeclaration.from_config(MODELS / "llama-3.1-8b.json").distinct)
    text = json.loads((MODELS / "deepseek-v3.json").read_text())
    with pytest.raises(ConfigError, match="kv_lora_rank"):
        ModelDeclaration.from_config(text | {"kv_lora_rank": -1})
