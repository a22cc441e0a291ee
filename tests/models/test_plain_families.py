"""Families made from transformers: what attnops declares is what transformers' own models were caught calling.

tools/plain_families.py recorded plain_truth.json, where a key that matters is changed once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from image_masks_probe import CONFIGS, SPANS
from plain_cases import IMAGES, declared_calls

from attnops import Attention, Causal, Declaration, Full, ModelDeclaration, SegmentIds, SlidingWindow, mask_from_dict
from attnops.errors import ConfigError, InputError, MaskError
from attnops.masks import SEGMENT_IDS, span_ids
from attnops.models.families import ALIASES, COMPOSITES, FAMILIES
from attnops.models.plain_families import PLAIN, PLAIN_FAMILIES
from attnops.verify import reference_attention
from attnops.verify.reference import reference_gradients

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "tests" / "data" / "plain_truth.json").read_text())
CASES = {f"{case['config']['model_type']}-{number}": case for number, case in enumerate(RECORD["cases"])}


@pytest.mark.parametrize("name", CASES)
def test_every_layer_is_as_transformers_runs_it(name: str) -> None:
    case = CASES[name]
    wanted = [case["kinds"][number] for number in case["layers"]]
    found = declared_calls(case["config"], length=len(wanted[0]["rows"]))
    assert [call | {"scale": pytest.approx(call["scale"], rel=1e-5)} for call in found] == wanted


def test_the_record_has_every_family_and_what_its_keys_change() -> None:
    assert {case["config"]["model_type"] for case in RECORD["cases"]} == set(PLAIN_FAMILIES)
    assert RECORD["transformers"] == PLAIN["transformers"]
    changing = {"num_key_value_heads", "head_dim", "is_causal", "attention_multiplier", "query_pre_attn_scalar"}
    for name, family in PLAIN_FAMILIES.items():
        own = {meant: key for key, meant in family.names.items()}
        said = [case["config"] for case in RECORD["cases"] if case["config"]["model_type"] == name]
        fixed = {"head_dim"} if {"qk_rope_head_dim", "image_size"} & family.defaults.keys() else set()
        for key in changing & family.defaults.keys() - fixed:
            values = {json.dumps(config.get(own.get(key, key))) for config in said}
            assert len(values) > 1, (name, key)


def test_each_type_is_read_in_one_way_or_has_a_reason() -> None:
    by_hand = {name.partition(" ")[0] for name in FAMILIES} - set(PLAIN_FAMILIES)
    kinds = [by_hand, set(PLAIN_FAMILIES), set(ALIASES), set(COMPOSITES)]
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    assert sum(map(len, kinds)) > 250
    assert not set().union(*kinds) & set(PLAIN["unread"])
    assert all(PLAIN["unread"].values())


@pytest.mark.parametrize("name", ["deepseek_v4", "wav2vec2-conformer", "grounding-dino"])
def test_a_type_that_is_not_read_is_refused(name: str) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    with pytest.raises(ConfigError, match="model_type"):
        ModelDeclaration.from_config({"model_type": name, "text_config": {"model_type": "bert"}} | sizes)
    with pytest.raises(ConfigError, match="model_type") as caught:
        ModelDeclaration.from_config({"model_type": name} | sizes)
    assert PLAIN["unread"][name] in str(caught.value)
    assert len(str(caught.value)) < 400


_CLIP: dict[str, Any] = {
    "model_type": "clip",
    "dtype": "float32",
    "text_config": {"model_type": "clip_text_model", "num_hidden_layers": 3},
    "vision_config": {
        "model_type": "clip_vision_model",
        "image_size": 224,
        "patch_size": 32,
        "num_attention_heads": 12,
    },
}


def test_the_parts_of_a_composite() -> None:
    text = ModelDeclaration.from_config(_CLIP, q_len=77)
    assert (text.family, len(text.layers)) == ("clip_text_model", 3)
    assert text.layer(0).declaration.call.mask.describe() == "causal"
    assert ModelDeclaration.from_config(_CLIP, q_len=77, part="text").distinct == text.distinct
    vision = ModelDeclaration.from_config(_CLIP, part="vision")
    call = vision.layer(0).declaration.call
    assert vision.family == "clip_vision_model"
    assert (call.q_len, call.q_heads, call.mask.describe()) == (50, 12, "full")


@pytest.mark.parametrize(
    ("config", "part", "told"),
    [
        (_CLIP, "audio", "text, vision"),
        (_CLIP, "encoder", "clip_text_model has one attention"),
        (_CLIP | {"vision_config": 3}, "vision", "vision_config=3"),
        (_CLIP | {"vision_config": {"image_size": 224}}, "vision", "family='clip_vision_model'"),
    ],
)
def test_parts_that_are_not_there(config: dict[str, Any], part: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ModelDeclaration.from_config(config, part=part)


_SIZES = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "patch_size": 16}


@pytest.mark.parametrize(
    ("kind", "sizes", "wanted"),
    [
        ("siglip", {"image_size": 224}, [(196, 12)]),
        ("siglip2", {}, [(None, 12)]),
        ("aimv2", {"image_size": 224}, [(196, 12)]),
        ("chinese_clip", {"image_size": 224}, [(197, 12)]),
        ("sam", {"image_size": 1024, "window_size": 14, "global_attn_indexes": [2, 5, 8, 11]}, [(196, 8), (4096, 4)]),
    ],
)
def test_models_of_which_the_images_alone_are_read(kind: str, sizes: dict[str, Any], wanted: list[Any]) -> None:
    text = {} if kind == "sam" else {"text_config": {"model_type": f"{kind}_text_model"} | _SIZES}
    config = {"model_type": kind, "vision_config": {"model_type": f"{kind}_vision_model"} | _SIZES | sizes} | text
    vision = ModelDeclaration.from_config(config, part="vision", dtype="float32", batch=1)
    assert vision.family == f"{kind}_vision_model"
    assert [(layer.declaration.call.q_len, len(layer.layers)) for layer in vision.distinct] == wanted
    for part in (None, "text", "audio"):
        with pytest.raises(ConfigError, match="part='vision'"):
            ModelDeclaration.from_config(config, part=part)
    unnamed = config | {"vision_config": {"model_type": ""} | _SIZES | sizes}
    with pytest.raises(ConfigError, match=f"family='{kind}_vision_model'"):
        ModelDeclaration.from_config(unnamed, part="vision")
    by_family = {"part": "vision", "family": f"{kind}_vision_model", "dtype": "float32", "batch": 1}
    assert ModelDeclaration.from_config(unnamed, **by_family).distinct == vision.distinct
    whole = ModelDeclaration.from_config(config["vision_config"], dtype="float32", batch=1)
    assert vision.distinct == whole.distinct


@pytest.mark.parametrize("name", IMAGES)
def test_well_known_models_of_images(name: str) -> None:
    part, heads, dim, tokens, layers = IMAGES[name]
    model = ModelDeclaration.from_config(
        ROOT / "tests" / "data" / "models" / f"{name}.json", part=part, dtype="float32"
    )
    (kind,) = model.distinct
    call = kind.declaration.call
    assert (call.q_heads, call.head_dim, call.q_len, len(kind.layers)) == (heads, dim, tokens, layers)
    assert call.mask == Full()


def test_tokens_beside_the_patches() -> None:
    config = {"model_type": "dinov2_with_registers", "image_size": 224, "patch_size": 14, "num_register_tokens": 4}
    config |= {"num_hidden_layers": 12, "num_attention_heads": 6, "hidden_size": 384}
    assert ModelDeclaration.from_config(config).layer(0).declaration.call.q_len == 16 * 16 + 1 + 4
    assert ModelDeclaration.from_config(config).layer(0).kind == "grid 16x16 + 5"
    pixtral = {"model_type": "pixtral", "image_size": 64, "patch_size": 16, "hidden_size": 64, "num_attention_heads": 4}
    pixtral |= {"num_hidden_layers": 2, "head_dim": 16}
    assert ModelDeclaration.from_config(pixtral).layer(0).declaration.call.q_len == 16
    with pytest.raises(ConfigError, match="head_dim=8"):
        ModelDeclaration.from_config(pixtral | {"head_dim": 8})
    with pytest.raises(ConfigError, match="num_register_tokens"):
        ModelDeclaration.from_config(config | {"num_register_tokens": -1})


_NEW = {
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "dtype": "bfloat16",
}


def test_an_unknown_type_is_read_as_what_is_assumed() -> None:
    config = {"model_type": "brand_new"} | _NEW
    with pytest.raises(ConfigError, match="assume="):
        ModelDeclaration.from_config(config)
    read = ModelDeclaration.from_config(config, assume="llama", q_len=8)
    assert read.distinct == ModelDeclaration.from_config(config, family="llama", q_len=8).distinct
    (note,) = [note for note in read.notes if note.code == "model.assumed"]
    assert note.values == {"kind": "brand_new", "family": "llama"}
    assert note.severity != "info"


def test_what_is_assumed_changes_nothing_of_a_known_type() -> None:
    config = {"model_type": "qwen2"} | _NEW
    read = ModelDeclaration.from_config(config, assume="llama")
    assert read.family == "qwen2"
    assert "model.assumed" not in [note.code for note in read.notes]


@pytest.mark.parametrize("key", ["sliding_window", "attn_logit_softcapping", "linear_attn_ratio", "layer_types"])
def test_an_assumption_does_not_drop_a_key(key: str) -> None:
    value: Any = ["sliding_attention"] * 2 if key == "layer_types" else 4
    with pytest.raises(ConfigError, match=key):
        ModelDeclaration.from_config({"model_type": "brand_new", key: value} | _NEW, assume="llama")


def test_an_unknown_composite_is_read_as_text() -> None:
    nested = {"model_type": "brand_new_vl", "text_config": {"model_type": "qwen2"} | _NEW}
    read = ModelDeclaration.from_config(nested, assume="llama", q_len=8)
    assert read.family == "qwen2"
    assert "model.assumed_masks" in [note.code for note in read.notes]
    with pytest.raises(ConfigError, match="assume='lama'"):
        ModelDeclaration.from_config(nested | {"text_config": {"model_type": "new"} | _NEW}, assume="lama")


IMAGE_MASKS = json.loads((ROOT / "tests" / "data" / "image_masks.json").read_text())
_KINDS = {"full_attention": "global", "sliding_attention": "local"}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_tokens_of_images_see_is_what_transformers_says(name: str) -> None:
    """The masks that transformers makes of tokens with two images, or with a prefix in two parts."""
    spans = np.array([SPANS])
    spans = np.where(spans < 0, -1, 0) if name.startswith("paligemma") else spans
    ids = span_ids(spans)
    config = {"model_type": name.partition(" ")[0]} | CONFIGS[name]
    model = ModelDeclaration.from_config(config, q_len=len(SPANS))
    read = {layer.kind.partition(" ")[0]: layer.declaration.call.mask for layer in model.distinct}
    assert {_KINDS[kind] for kind in IMAGE_MASKS[name]} >= set(read)
    for kind, rows in IMAGE_MASKS[name].items():
        if _KINDS[kind] not in read:
            continue
        mask = read[_KINDS[kind]]
        filled = mask.map_leaves(lambda leaf: SegmentIds(ids, ids) if leaf == SEGMENT_IDS else leaf)
        seen = np.asarray(filled.materialise(slice(0, len(SPANS)), slice(0, len(SPANS)), query_offset=0))
        assert ["".join(str(int(cell)) for cell in row) for row in seen[0, 0]] == rows, kind


def test_a_layer_with_spans_runs_and_one_generated_token_belongs_to_none() -> None:
    config = {"model_type": "gemma3", "dtype": "float32"} | CONFIGS["gemma3"]
    model = ModelDeclaration.from_config(config, q_len=len(SPANS))
    layer = model.layer(0)
    assert (layer.kind, layer.name) == ("local 5 spans", "local_5_spans")
    query = np.random.default_rng(0).standard_normal((1, len(SPANS), 4, 16)).astype(np.float32)
    key = np.random.default_rng(1).standard_normal((1, len(SPANS), 2, 16)).astype(np.float32)
    attend = Attention(layer.declaration)
    output = attend(query, key, key, q_segment_ids=span_ids(np.array([SPANS])))
    rows = np.array([[cell == "1" for cell in row] for row in IMAGE_MASKS["gemma3"]["sliding_attention"]])
    scale = layer.declaration.operation_metadata().softmax_scale
    wanted = reference_attention(query, key, key, scale=scale, mask=rows[None, None])
    assert np.abs(np.asarray(output.attention_outputs) - wanted.output).max() < 1e-5
    with pytest.raises(InputError, match="q_segment_ids"):
        attend(query, key, key)
    text = ModelDeclaration.from_config(config, q_len=8, part="text").layer(0)
    assert (text.kind, text.declaration.call.segment_ids) == ("local 5", None)
    step = ModelDeclaration.from_config(config, q_len=1, kv_len=64, mode="autoregressive").layer(0).declaration.call
    assert (step.mask, step.segment_ids) == (Causal() & SlidingWindow(left=4, right=None), None)
    assert [group.window_tokens for group in model.layer_groups] == [5, None]


def test_a_declared_place_of_segment_ids() -> None:
    """It is written to files; other arrays of masks aren't."""
    mask = Causal() | SEGMENT_IDS
    call = {"q_len": 8, "q_heads": 1, "head_dim": 8, "segment_ids": 2, "mask": mask.to_dict()}
    declaration = Declaration.from_dict({"operation": "splash", "call": call})
    assert declaration.call.mask == mask == mask_from_dict(mask.to_dict())
    assert Declaration.from_dict(json.loads(declaration.to_json())) == declaration
    with pytest.raises(MaskError, match="kv_lengths"):
        mask_from_dict({"kind": "kv_lengths"})
    with pytest.raises(MaskError, match="unknown key"):
        mask_from_dict({"kind": "segment_ids", "query": 3})
    x = np.zeros((1, 8, 1, 8), np.float32)
    ids = np.zeros((1, 8), np.int32)
    twice = (Causal() | SEGMENT_IDS) & (SlidingWindow(left=2) | SEGMENT_IDS)
    with pytest.raises(InputError, match="at most one"):
        Attention("vanilla", mask=twice)(x, x, x, q_segment_ids=ids)
    with pytest.raises(InputError, match="thd"):
        Attention("vanilla", mask=mask)(x[0], x[0], x[0], q_segment_ids=ids[0], layout="thd")
    with pytest.raises(InputError, match="pass q_segment_ids"):
        Attention("vanilla", mask=mask)(x, x, x)


@pytest.mark.parametrize("strategy", ["none", "gather", "ring", "ulysses"])
@pytest.mark.parametrize(
    ("operation", "config"), [("vanilla", {}), ("splash", {"interpret": True}), ("flash_attn2", {"interpret": True})]
)
def test_a_place_of_segment_ids_with_kernels_meshes_and_gradients(
    operation: str, config: dict[str, Any], strategy: str
) -> None:
    """Against the float64 reference, whose mask is written by hand."""
    tokens, window = 256, 100
    spans = np.full((2, tokens), -1)
    spans[0, 20:150], spans[1, 200:230] = 0, 3
    at = np.arange(tokens)
    same = (spans[:, :, None] == spans[:, None, :]) & (spans[:, :, None] >= 0)
    seen = ((at[None] <= at[:, None])[None] | same) & (at[None] > at[:, None] - window)[None]
    query, key, value, cotangent = np.random.default_rng(0).standard_normal((4, 2, tokens, 4, 64)).astype(np.float32)
    fields: dict[str, Any] = {"operation_configs": {operation: config} if config else {}}
    if strategy != "none":
        fields |= {"mesh": jax.make_mesh((2, 4), ("fsdp", "sp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)}
        fields |= {"sequence_parallel": strategy}
    mask = (Causal() | SEGMENT_IDS) & SlidingWindow(left=window - 1, right=None)
    attend = Attention(operation, mask=mask, **fields)

    def outputs(*arrays: Any) -> Any:
        return attend(*arrays, q_segment_ids=span_ids(spans)).attention_outputs

    found, back = jax.vjp(jax.jit(outputs), query, key, value)
    assert attend.plans[0].implementation.endswith(".forward_native") == (not config)
    arguments: dict[str, Any] = {"scale": 64**-0.5, "mask": seen[:, None]}
    wanted = reference_attention(query, key, value, **arguments)
    gradients = reference_gradients(query, key, value, cotangent, **arguments)
    for got, right in zip(
        (found, *back(jnp.asarray(cotangent))),
        (wanted.output, *(gradients[name] for name in ("query", "key", "value"))),
        strict=True,
    ):
        assert np.abs(np.asarray(got) - right).max() < 1e-4


@pytest.mark.parametrize("spans", [np.zeros(4, np.int32), np.zeros((1, 4), np.float32)])
def test_spans_that_are_no_integers_of_rank_2(spans: Any) -> None:
    with pytest.raises(MaskError, match="spans"):
        span_ids(spans)
