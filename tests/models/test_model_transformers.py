"""Model configs against transformers: heads, dims, scale, cap, sinks, dropout and every layer's mask.

model_truth.json was recorded by transformers_probe.py from transformers' own models.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
from plain_cases import declared_calls
from transformers_probe import CASES, LENGTH, TRUTH, config_of, layers_of

from attnops import ModelDeclaration, OperationMetadata
from attnops.errors import ConfigWarning
from attnops.models.families import COMPOSITES, FAMILIES, PARTS
from attnops.models.image_families import IMAGE_FAMILIES
from attnops.models.keys import ATTENTION, OTHER, REFUSED, kind_of_key
from attnops.models.plain_families import PLAIN_FAMILIES
from attnops.models.scored_families import SCORED_FAMILIES

RECORD = json.loads(TRUTH.read_text())
IDS = [f"{number}-{case['config']['model_type']} {case['part']}".strip() for number, case in enumerate(RECORD["cases"])]
CASE_IDS = [f"{number}-{model_type}" for number, (model_type, _) in enumerate(CASES)]


def _lengths(part: str) -> dict[str, Any]:
    """What of a case is said to from_config beside its config."""
    return {"q_len": LENGTH} | ({"part": part} if part else {}) | ({"kv_len": LENGTH} if part == "cross" else {})


def _same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert len(found) == len(wanted)
    for got, want in zip(found, wanted, strict=True):
        got, want = dict(got), dict(want)
        assert got.pop("scale") == pytest.approx(want.pop("scale"), rel=1e-6)
        # transformers repeats the keys of latent attention and of GQA before some kernels, never after
        assert got == want


@pytest.mark.parametrize("case", RECORD["cases"], ids=IDS)
def test_every_layer_is_as_transformers_runs_it(case: dict[str, Any]) -> None:
    _same(declared_calls(case["config"], case["part"]), [case["kinds"][index] for index in case["layers"]])


def test_the_record_has_every_family() -> None:
    named = {f"{case['config']['model_type']} {case['part']}".strip() for case in RECORD["cases"]}
    # test_scores_of_models.py, test_hybrid_models.py and test_plain_families.py have these.
    with_state = {name for name, family in FAMILIES.items() if family.own_kinds}
    assert named == set(FAMILIES) - {*SCORED_FAMILIES, *IMAGE_FAMILIES, *PLAIN_FAMILIES} - with_state
    wanted = [{"model_type": kind} | said for kind, said in CASES]
    assert [case["config"] for case in RECORD["cases"] if case["part"] not in ("decoder", "cross")] == wanted
    assert RECORD["length"] == LENGTH


@pytest.mark.parametrize("case", RECORD["cases"], ids=IDS)
def test_metadata_of_a_config_is_that_of_its_layers(case: dict[str, Any]) -> None:
    """from_config holds what all layers share, and warns of the rest."""
    layers = [case["kinds"][index] for index in case["layers"]]
    first = layers[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metadata = OperationMetadata.from_config(case["config"], part=case["part"] or None)
    assert metadata.dropout_prob == first["dropout"]
    causal = all(last <= row for layer in layers for row, (_, last) in enumerate(layer["rows"]))
    assert metadata.causal == causal
    scales = {layer["scale"] for layer in layers}
    whole = [[0, row if causal else LENGTH - 1] for row in range(LENGTH)]
    indexed = any(
        layer.indexer for layer in ModelDeclaration.from_config(case["config"], **_lengths(case["part"])).distinct
    )
    plain = (
        len(scales) == 1
        and not indexed
        and all(layer["rows"] == whole and layer["soft_cap"] is None and layer["sinks"] is None for layer in layers)
    )
    assert plain == (not caught)
    assert all(item.category is ConfigWarning and item.filename == __file__ for item in caught)
    if len(scales) == 1:
        default = first["head_dim"] ** -0.5
        scale = default if metadata.softmax_scale is None else metadata.softmax_scale
        assert scale == pytest.approx(first["scale"], rel=1e-6)


def _transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "said"), CASES, ids=CASE_IDS)
def test_objects_of_transformers_and_their_dicts(model_type: str, said: dict[str, Any]) -> None:
    """A config object, its dict and its file's text mean the same as the few fields that were said."""
    _transformers()
    config = config_of(model_type, said)
    for part in PARTS.get(model_type, ("",)):
        wanted = ModelDeclaration.from_config({"model_type": model_type} | said, **_lengths(part)).distinct
        for form in (config, config.to_dict(), json.loads(config.to_json_string())):
            found = ModelDeclaration.from_config(form, **_lengths(part))
            assert found.distinct == wanted
            assert not [note for note in found.notes if "not read" in note or "config doesn't have" in note]


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_defaults_are_those_of_transformers(family: str) -> None:
    """A nested config leaves out what is the default of its class, so each default has to be the same."""
    transformers = _transformers()
    model_type, _, part = family.partition(" ")
    config = transformers.AutoConfig.for_model(model_type)
    how = {"part": part} if part else {}
    # The defaults of two make no model; the third writes the usual scale into its config.
    if model_type not in ("ministral", "glm4_moe", "hyperclovax"):
        nested = {"model_type": "llava", "text_config": {"model_type": model_type}}
        found = ModelDeclaration.from_config(nested, **how)
        assert found.distinct == ModelDeclaration.from_config(config, **how).distinct
        # T5's classes have no length, and that of an image's layers follows from the image.
        assert found.positions == getattr(config, _own_name(family, "max_position_embeddings"), found.positions)
    # every key that the class has is one that attnops knows
    read = FAMILIES[family].defaults
    unknown = [key for key in config.to_dict() if key not in read and kind_of_key(key) in ("unknown", "suspicious")]
    assert [key for key in unknown if key not in FAMILIES[family].names and key not in FAMILIES[family].skips] == []


@pytest.mark.slow
@pytest.mark.parametrize("composite", sorted(name for name, whole in COMPOSITES.items() if whole.text is not None))
def test_the_text_of_a_composite_is_that_of_transformers(composite: str) -> None:
    transformers = _transformers()
    assert transformers.AutoConfig.for_model(composite).text_config.model_type == COMPOSITES[composite].text


def _own_name(family: str, key: str) -> str:
    return next((own for own, meant in FAMILIES[family].names.items() if meant == key), key)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "said"), CASES, ids=CASE_IDS)
def test_the_record_is_what_transformers_does(model_type: str, said: dict[str, Any]) -> None:
    """Make the record again, where torch is there."""
    pytest.importorskip("torch", reason="torch is not installed")
    _transformers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = layers_of(model_type, said)
    cases = [case for case in RECORD["cases"] if case["config"] == {"model_type": model_type} | said]
    assert {case["part"] for case in cases} == set(found)
    for case in cases:
        _same(found[case["part"]], [case["kinds"][index] for index in case["layers"]])


def test_the_table_of_keys_has_each_key_once() -> None:
    others = [key for keys in OTHER.values() for key in keys]
    every = [*ATTENTION, *others, *REFUSED]
    assert len(every) == len(set(every))
