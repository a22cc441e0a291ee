"""Operation configs: frozen, strict, unset apart from None, and messages in the kernel's language."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import types
from collections import namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from toy_operations import ToyConfig

from attnops.errors import ConfigError
from attnops.operators.splash import SplashConfig
from attnops.operators.vanilla import VanillaConfig
from attnops.planning import OperationConfig
from attnops.registry import OperationRegistry

FIELDS = {"block_q": 256, "block_kv": None, "q_layout": "seq_minor"}


def sources(fields):
    """The same fields in every form that `coerce` takes."""
    return {
        "dict": dict(fields),
        "mapping": types.MappingProxyType(fields),
        "namespace": types.SimpleNamespace(**fields),
        "dataclass": dataclasses.make_dataclass("Config", list(fields))(**fields),
        "namedtuple": namedtuple("Config", list(fields))(**fields),
        "config": SplashConfig(**fields),
    }


@pytest.mark.parametrize("form", sources(FIELDS))
def test_coerce_takes_dicts_and_objects(form):
    config = SplashConfig.coerce(sources(FIELDS)[form])
    assert config == SplashConfig(**FIELDS)
    assert config.is_set("block_kv")
    assert config.block_kv is None
    assert not config.is_set("block_q_dkv")


@pytest.mark.parametrize("form", ["dict", "namespace", "dataclass", "namedtuple"])
def test_a_field_that_is_not_one_is_refused_in_every_form(form):
    with pytest.raises(ConfigError, match=r"unknown field 'block_qq'.*Did you mean 'block_q'"):
        SplashConfig.coerce(sources_of_typo()[form])


def sources_of_typo():
    fields = {"block_q": 256, "block_qq": 1}
    return {
        "dict": fields,
        "namespace": types.SimpleNamespace(**fields),
        "dataclass": dataclasses.make_dataclass("Config", list(fields))(**fields),
        "namedtuple": namedtuple("Config", list(fields))(**fields),
    }


def test_all_known_names_are_in_the_message_and_all_problems_are_told():
    with pytest.raises(ConfigError) as error:
        SplashConfig.coerce({"blok_q": 128, "interprt": True, "block_kv": 1000})
    text = str(error.value)
    assert "Did you mean 'block_q'" in text
    assert "Did you mean 'interpret'" in text
    assert "block_kv=1000" in text
    assert "block_kv_dkv_compute" in text
    assert text.startswith("SplashConfig: ")


@pytest.mark.parametrize("bad", ["text", 3, None, [1], True])
def test_what_has_no_fields_is_refused(bad):
    with pytest.raises(ConfigError, match=r"wanted a config, a dict, or an object|SplashConfig: "):
        SplashConfig.coerce(bad)


def test_the_config_of_another_operation_is_refused():
    with pytest.raises(ConfigError, match="VanillaConfig is the config of 'vanilla', wanted SplashConfig"):
        SplashConfig.coerce(VanillaConfig())
    with pytest.raises(ConfigError, match="operation='vanilla'"):
        SplashConfig.coerce({"operation": "vanilla"})
    with pytest.raises(ConfigError, match="schema_version"):
        SplashConfig.coerce({"schema_version": 2})


# -- the kernel's language -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "near"),
    [
        ("block_kv", 1000, "896, 1024"),
        ("block_kv", 1, "128"),
        ("block_kv", 129, "128, 256"),
        ("block_q_dkv", 200, "128, 256"),
        ("block_q", 12, "128"),
        ("block_kv_compute_in", 192, "128, 256"),
    ],
)
def test_a_size_that_is_no_multiple_says_the_nearest(field, value, near):
    with pytest.raises(ConfigError) as error:
        SplashConfig.coerce({field: value})
    text = str(error.value)
    assert f"{field}={value} is not a multiple of 128; nearest: {near}" in text
    for size in near.split(", "):
        assert getattr(SplashConfig.coerce({field: int(size)}), field) == int(size)


@given(st.integers(1, 10**6))
def test_the_nearest_sizes_are_the_nearest(value):
    try:
        SplashConfig.coerce({"block_kv": value})
    except ConfigError as error:
        near = [int(text) for text in str(error).rpartition("nearest: ")[2].split(", ")]
        below, above = max(s for s in [0, *range(128, value + 1, 128)][-1:]), -(-value // 128) * 128
        assert near == ([below, above] if below else [above])
        assert value % 128
    else:
        assert value % 128 == 0


@pytest.mark.parametrize("bad", [0, -128, True, "128", 128.0, float("nan")])
def test_sizes_are_positive_integers(bad):
    with pytest.raises(ConfigError, match=r"block_kv=.*is not a positive integer"):
        SplashConfig.coerce({"block_kv": bad})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_kv": 512, "block_kv_compute": 384}, "block_kv=512 is not a multiple of block_kv_compute=384"),
        ({"use_fused_bwd_kernel": True, "block_q_dq": 128}, "has no effect"),
        ({"block_kv_dkv_sums": 128, "block_q_dq": 128}, "block_q_dq=128 has no effect"),
        ({"use_fused_bwd_kernel": False, "block_kv_dkv_sums": 128}, "block_kv_dkv_sums=128 has no effect"),
        (
            {"block_kv_dkv": 256, "block_kv_dkv_sums": 384},
            "block_kv_dkv_sums=384 is not a multiple of block_kv_dkv=256",
        ),
        ({"block_kv_dkv": None, "block_kv_dkv_sums": 192}, "block_kv_dkv_sums=192 is not a multiple of 128"),
        ({"q_layout": "sequence_minor"}, "q_layout='sequence_minor'.*head_dim_minor"),
    ],
)
def test_fields_that_do_not_go_together(fields, message):
    with pytest.raises(ConfigError, match=message):
        SplashConfig.coerce(fields)


@pytest.mark.parametrize(
    ("fields", "message"), [({"block_kv": 1000}, "nearest: 896, 1024"), ({"blokc_q": 128}, "Did you mean 'block_q'")]
)
def test_the_constructor_speaks_the_same(fields, message):
    with pytest.raises(ConfigError, match=message):
        SplashConfig(**fields)


# -- identity --------------------------------------------------------------------------------------------------------


def test_frozen():
    config = SplashConfig(block_q=128)
    with pytest.raises(ValidationError, match="frozen"):
        config.block_q = 256
    with pytest.raises(ValidationError, match="frozen"):
        del config.block_q


def test_unset_is_not_none():
    unset, none = SplashConfig(), SplashConfig(block_q=None)
    assert unset.block_q is none.block_q is None
    assert unset != none
    assert len({unset, none}) == 2
    assert not unset.is_set("block_q")
    assert none.is_set("block_q")
    assert "block_q" not in unset.to_dict()
    assert none.to_dict()["block_q"] is None


def test_a_default_that_was_given_is_given():
    default, said = SplashConfig(), SplashConfig(interpret=False)
    assert default.interpret == said.interpret
    assert default != said
    assert said.to_dict()["interpret"] is False


def test_the_tag_carries_no_choice():
    assert SplashConfig(operation="splash", schema_version=1) == SplashConfig()
    assert hash(SplashConfig(operation="splash")) == hash(SplashConfig())


def test_configs_of_different_operations_differ():
    assert VanillaConfig() != SplashConfig()
    assert VanillaConfig() == VanillaConfig()
    assert (VanillaConfig() == "vanilla") is False


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "block_q": st.sampled_from([None, 128, 256]),
        "block_kv": st.sampled_from([None, 512]),
        "block_kv_compute": st.sampled_from([None, 128]),
        "use_fused_bwd_kernel": st.booleans(),
        "v_layout": st.sampled_from(["head_dim_minor", "seq_minor"]),
        "residual_checkpoint_name": st.sampled_from([None, "", "attn"]),
    },
)


@given(VALUES, VALUES)
def test_equality_and_hash_are_those_of_the_given_fields(one, other):
    first, second = SplashConfig(**one), SplashConfig(**other)
    assert (first == second) == (one == other)
    if one == other:
        assert hash(first) == hash(second)


@given(VALUES)
def test_round_trips(fields):
    config = SplashConfig(**fields)
    data = json.loads(json.dumps(config.to_dict(), allow_nan=False))
    assert data == {"operation": "splash", "schema_version": 1} | fields
    for again in (
        SplashConfig.coerce(data),
        SplashConfig.model_validate_json(json.dumps(data)),
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
    ):
        assert again == config
        assert hash(again) == hash(config)
        assert {name for name in fields if again.is_set(name)} == set(fields)


def test_with_fields_validates_and_keeps_what_was_given():
    config = SplashConfig(block_q=None, block_kv=512)
    assert config.with_fields({"block_kv": 256}) == SplashConfig(block_q=None, block_kv=256)
    with pytest.raises(ConfigError, match="nearest"):
        config.with_fields({"block_kv": 1000})
    with pytest.raises(ConfigError, match="Did you mean"):
        config.with_fields({"block_kvv": 128})


@pytest.mark.parametrize("name", OperationRegistry.names())
def test_json_schema_of_every_operation(name):
    config = OperationRegistry.get(name).config
    schema = json.loads(json.dumps(config.model_json_schema()))
    assert set(schema["properties"]) == set(config.model_fields)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["operation"]["const"] == name
    assert schema["properties"]["schema_version"]["const"] == 1
    assert config().to_dict() == {"operation": name, "schema_version": 1}
    with pytest.raises(ConfigError, match="unknown field 'no_such_field'"):
        config.coerce({"no_such_field": 1})


def test_json_schema_of_splash_completes_names_and_choices():
    properties = SplashConfig.model_json_schema()["properties"]
    assert properties["q_layout"]["enum"] == ["head_dim_minor", "seq_minor"]
    assert {"type": "integer"} in properties["block_kv"]["anyOf"]
    assert {"type": "null"} in properties["block_kv"]["anyOf"]


def test_numbers_of_a_config_are_finite():
    class Scaled(OperationConfig):
        operation: str = "scaled"
        factor: float = 1.0

    assert Scaled.coerce({"factor": 2}).factor == 2.0
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="finite"):
            Scaled.coerce({"factor": bad})


def test_block_sizes_of_the_metadata_feed_only_known_fields():
    for name in OperationRegistry.names():
        config = OperationRegistry.get(name).config
        assert set(config.feeds.values()) <= set(config.model_fields)
        assert set(config.feeds) <= {"blocksize_q", "blocksize_k", "blocksize_b"}
    assert ToyConfig.feeds == {"blocksize_q": "block"}
