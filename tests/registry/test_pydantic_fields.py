"""Masks, configs, metadata, declarations and Attention as fields of pydantic models: what comes back is what was put in."""

from __future__ import annotations

import functools
import json
import operator
import pickle
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, PlainSerializer, TypeAdapter, ValidationError, create_model
from test_metadata_json import METADATA
from toy_operations import ToyConfig

from attnops import Attention, OperationMetadata, OperationRegistry
from attnops.authoring import Operation
from attnops.errors import ConfigError
from attnops.masks import Causal, Chunked, Full, Lengths, Mask, Not, Prefix, SlidingWindow
from attnops.operators.sequence_operations import RingConfig
from attnops.operators.splash import SplashConfig
from attnops.operators.vanilla import VanillaConfig
from attnops.planning import OperationConfig
from attnops.registry.declaration import CallDeclaration, Declaration

# What may be asked of pydantic's methods without naming a field to leave out.
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"by_alias": True},
    {"round_trip": True},
    {"exclude_unset": True},
    {"exclude_none": True},
    {"exclude_defaults": True},
    {"exclude_unset": True, "exclude_none": True, "exclude_defaults": True, "by_alias": True, "round_trip": True},
    {"serialize_as_any": True},
    {"warnings": "error"},
)
NAMES = OperationRegistry.names()
KINDS = (Mask, OperationConfig, SplashConfig, OperationMetadata, CallDeclaration, Declaration, Attention)
SIZES = {"q_len": 16, "q_heads": 2, "head_dim": 8}

LEAVES = st.one_of(
    st.just(Full()),
    st.builds(Causal, st.none() | st.integers(-9, 9)),
    st.builds(SlidingWindow, st.integers(0, 9), st.none() | st.integers(0, 9), st.none() | st.integers(-9, 9)),
    st.builds(SlidingWindow, st.none(), st.integers(0, 9)),
    st.builds(Chunked, st.integers(1, 9), st.none() | st.integers(-9, 9)),
    st.builds(Prefix, st.integers(0, 9)),
)
MASKS = st.recursive(
    LEAVES, lambda m: st.one_of(m.map(Not), st.builds(operator.and_, m, m), st.builds(operator.or_, m, m)), max_leaves=5
)


def choices(annotation: Any) -> list[Any]:
    """Values of a config field's type."""
    origin = get_origin(annotation)
    if origin is Literal:
        return list(get_args(annotation))
    if origin is Annotated:
        return choices(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [value for part in get_args(annotation) for value in choices(part)]
    known = {int: [128, 256, 1024], bool: [True, False], str: ["kept"], type(None): [None], float: [0.5]}
    return known[annotation]


@st.composite
def configs(draw: Any, name: str) -> OperationConfig:
    kind = OperationRegistry.get(name).config
    free = sorted(set(kind.model_fields) - {"operation", "schema_version"})
    chosen = draw(st.lists(st.sampled_from(free), max_size=4, unique=True)) if free else []
    fields = {field: draw(st.sampled_from(choices(kind.model_fields[field].annotation))) for field in chosen}
    try:
        return kind(**fields)
    except ConfigError:  # fields that don't go together
        reject()


ANY_CONFIG = st.sampled_from(NAMES).flatmap(configs)
CALLS = st.fixed_dictionaries(
    {},
    optional={
        "batch": st.integers(1, 3),
        "kv_len": st.none() | st.just(16),
        "kv_heads": st.none() | st.just(2),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
        "mode": st.sampled_from([None, "train"]),
        "mask": st.none() | MASKS,
        "sliding_window": st.integers(0, 9) | st.tuples(st.integers(0, 9), st.none()),
        "softmax_scale": st.none() | st.floats(0.1, 1),
        "segment_ids": st.none() | st.integers(1, 4),
        "kv_lengths": st.none() | st.just(True),
        "kv_scales": st.none(),
        "bias": st.none() | st.just((1, 1, 16, 16)),
    },
).map(lambda fields: CallDeclaration(**SIZES, **fields))
FILES = st.fixed_dictionaries(
    {"operation": st.sampled_from([n for n in NAMES if issubclass(OperationRegistry.get(n), Operation)])},
    optional={
        "$schema": st.none() | st.just("./attnops.schema.json"),
        "schema_version": st.just(1),
        "enabled": st.booleans(),
        "metadata": st.fixed_dictionaries(
            {},
            optional={
                "softmax_scale": st.none() | st.floats(0.1, 1),
                "causal": st.booleans(),
                "sequence_axis_name": st.just("cp"),
                "mesh": st.just({"tp": 2}),
            },
        ),
        "call": CALLS,
    },
).map(Declaration.model_validate)


@functools.cache
def holder(kind: Any) -> type[BaseModel]:
    """A model with fields of a type, as anybody writes it."""
    fields: dict[str, Any] = {
        "alone": (kind, ...),
        "maybe": (kind | None, None),
        "either": (int | kind, 3),
        "many": (list[kind], ...),
        "named": (dict[str, kind], ...),
    }
    return create_model("Holder", **fields)


def given_of(value: Any) -> Any:
    """Which fields a value says are given, at every depth."""
    if isinstance(value, OperationMetadata):
        return {name: given_of(config) for name, config in value.operation_configs.items()}
    if isinstance(value, OperationConfig | CallDeclaration | Declaration):
        tags = type(value).tags
        return {n: given_of(getattr(value, n)) for n in value.model_fields_set - tags}
    return value


def comes_back(kind: Any, value: Any, asked: dict[str, Any]) -> None:
    model = holder(kind)
    held: Any = model(alone=value, maybe=value, either=value, many=[value], named={"a": value})
    for again in (
        model.model_validate(held.model_dump(**asked)),
        model.model_validate(held.model_dump(mode="json", **asked)),
        model.model_validate_json(held.model_dump_json(**asked)),
    ):
        assert again == held
        for other in (again.alone, again.maybe, again.either, *again.many, again.named["a"]):
            assert type(other) is type(value)
            assert given_of(other) == given_of(value)
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    assert adapter.validate_python(adapter.dump_python(value, **asked)) == value
    assert adapter.validate_json(adapter.dump_json(value, **asked)) == value


QUICK = settings(max_examples=12, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
ASKED = st.sampled_from(WAYS)


@QUICK
@given(MASKS, ASKED)
def test_masks_come_back(mask: Mask, asked: dict[str, Any]) -> None:
    comes_back(Mask, mask, asked)


@pytest.mark.parametrize("name", NAMES)
def test_configs_of_every_operation_come_back(name: str) -> None:
    kind = OperationRegistry.get(name).config

    @QUICK
    @given(configs(name), ASKED)
    def check(config: OperationConfig, asked: dict[str, Any]) -> None:
        comes_back(kind, config, asked)
        comes_back(OperationConfig, config, asked)  # by its tag
        assert kind.model_validate_json(config.model_dump_json()) == config
        assert kind.model_validate(config.model_dump()) == config

    check()


@settings(QUICK, max_examples=8)
@given(METADATA, ASKED)
def test_metadata_comes_back(fields: dict[str, Any], asked: dict[str, Any]) -> None:
    comes_back(OperationMetadata, OperationMetadata(**fields), asked)


@QUICK
@given(FILES, ASKED)
def test_declarations_come_back(declaration: Declaration, asked: dict[str, Any]) -> None:
    comes_back(Declaration, declaration, asked)
    comes_back(CallDeclaration, declaration.call, asked)
    assert (
        Declaration.from_dict(declaration.model_dump()) == declaration == Declaration.from_json(declaration.to_json())
    )


@settings(QUICK, max_examples=6)
@given(FILES, st.sampled_from([{}, {"mesh": {"cp": 2}}, {"sequence_axis_name": "sp"}, {"causal": True}]), ASKED)
def test_attention_comes_back(declaration: Declaration, said: dict[str, Any], asked: dict[str, Any]) -> None:
    attention = Attention(declaration, **said)
    comes_back(Attention, attention, asked)
    assert pickle.loads(pickle.dumps(attention)) == attention
    again = TypeAdapter(Attention).validate_json(TypeAdapter(Attention).dump_json(attention))
    assert hash(again) == hash(attention)
    assert all(again.states(field) for field in {*declaration.metadata, *said} - {"sequence_axis_name"})


def test_unset_stays_unset_and_none_stays_none() -> None:
    """The blocks that a plan takes: None is the kernel's 128, unset is chosen, and no way of writing turns one into the other."""
    x = jax.ShapeDtypeStruct((1, 512, 2, 16), np.float32)

    def blocks(config: OperationConfig) -> tuple[int, int]:
        metadata = OperationMetadata(operation_configs={"splash": config}, tuning="off")
        found: Any = OperationRegistry.create("splash", metadata).plan(x, x, x, causal=False).config
        return found.block_q, found.block_kv

    config = SplashConfig(interpret=True, block_q=None)
    assert blocks(config) == (128, 512)
    for asked in WAYS:
        assert blocks(SplashConfig.model_validate_json(config.model_dump_json(**asked))) == (128, 512)
        assert blocks(SplashConfig.model_validate(config.model_dump(**asked))) == (128, 512)


def test_what_is_named_is_left_out() -> None:
    config = SplashConfig(block_q=None, block_kv=256)
    assert config.model_dump(exclude={"block_q"}) == {"operation": "splash", "schema_version": 1, "block_kv": 256}
    assert config.model_dump(include={"block_q"}) == {"block_q": None}
    held: Any = holder(SplashConfig)(alone=config, many=[config], named={})
    assert held.model_dump(include={"alone": {"block_kv"}}) == {"alone": {"block_kv": 256}}
    assert held.model_dump(exclude={"many": {0: {"block_kv"}}})["many"] == [config.model_dump(exclude={"block_kv"})]


def test_a_field_of_any_type_is_written_as_what_it_holds() -> None:
    class Loose(BaseModel):
        held: Any

    mask, metadata, config = SlidingWindow(3, None), OperationMetadata(causal=False), SplashConfig(block_q=None)
    for value in (mask, metadata, config, Declaration(operation="sdpa"), Attention({"operation": "sdpa"})):
        data = json.loads(Loose(held=value).model_dump_json())["held"]
        assert TypeAdapter(type(value)).validate_python(data) == value


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_json_schema(kind: Any, mode: Any) -> None:
    """One that editors can read: every reference leads somewhere, and fields are named, also under a default."""
    start: dict[Any, Any] = {
        Mask: SlidingWindow(3, None),
        OperationMetadata: OperationMetadata(causal=False),
        Attention: Attention({"operation": "sdpa"}),
        Declaration: Declaration(operation="sdpa"),
        CallDeclaration: CallDeclaration(kv_heads=None),
    }
    default = start.get(kind, SplashConfig(block_q=None))
    model = create_model("Schemed", alone=(kind, ...), many=(list[kind], ...), defaulted=(kind, default))
    schema = model.model_json_schema(mode=mode)
    text = json.dumps(schema, allow_nan=False)
    for reference in {part.split('"')[0] for part in text.split('"#/$defs/')[1:]}:
        assert reference in schema["$defs"]
    assert TypeAdapter(kind).validate_python(schema["properties"]["defaulted"]["default"]) == default
    inside = {
        Mask: "sliding_window", OperationMetadata: "runtime_softmax_dtype", Attention: "enabled", Declaration: "enabled",
        CallDeclaration: "kv_scales",
    }  # fmt: skip
    assert inside.get(kind, "block_kv_dkv_sums") in text
    assert "$schema" in text or kind not in (Declaration, Attention)
    json.dumps(TypeAdapter(kind).json_schema(mode=mode), allow_nan=False)


def test_the_schema_of_any_config_is_that_of_all() -> None:
    text = json.dumps(TypeAdapter(OperationConfig).json_schema())
    assert all(f'"const": "{name}"' in text for name in NAMES)


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (Mask, {"kind": "causl"}, "Did you mean 'causal'"),
        (Mask, Lengths(np.array([3])), "holds arrays"),
        (Mask, 3, "wanted"),
        (Causal, Prefix(3), "wanted a Causal"),
        (OperationMetadata, {"causl": True}, "Did you mean 'causal'"),
        (OperationMetadata, {"operation_configs": {"splsh": {}}}, "Did you mean 'splash'"),
        (OperationMetadata, 3, "wanted an object"),
        (SplashConfig, {"block_q": 3}, "nearest: 128"),
        (SplashConfig, RingConfig(), "'splash'"),
        (OperationConfig, {"block_q": 128}, "no 'operation'"),
        (OperationConfig, {"operation": "splsh"}, "Did you mean 'splash'"),
        (OperationConfig, {"operation": "vanilla", "block_q": 0}, "greater than 0"),
        (OperationConfig, SplashConfig.model_construct(block_q=3), "nearest: 128"),
        (Declaration, {"operation": "splash", "cal": {}}, "cal"),
        (Attention, "file.json", "wanted an Attention"),
        (Attention, {"operation": "splsh"}, "Did you mean 'splash'"),
    ],
)
def test_what_makes_no_sense_is_a_validation_error(kind: Any, value: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        holder(kind)(alone=value, many=[], named={})
    with pytest.raises(ValidationError, match=says):
        TypeAdapter(kind).validate_python(value)


# -- what pydantic changes without looking ---------------------------------------------------------------------------


def unlooked(config: OperationConfig, fields: dict[str, Any]) -> tuple[OperationConfig, ...]:
    return config.model_copy(update=fields), type(config).model_construct(**fields)


@pytest.mark.parametrize("name", NAMES)
def test_changed_configs_are_checked_where_an_operation_is_declared(name: str) -> None:
    kind = OperationRegistry.get(name).config
    for field in (*kind.model_fields, "block_qq"):
        for config in unlooked(kind(), {field: object()}):
            for take in (
                lambda c: OperationMetadata(operation_configs={name: c}),
                lambda c: OperationMetadata().replace(operation_configs={name: c}),
                lambda c: OperationMetadata(base_config={"operation_configs": {name: c}}),
                kind.coerce,
            ):
                with pytest.raises(ConfigError, match=field):
                    take(config)
            with pytest.raises(ValidationError, match=field):
                holder(kind)(alone=config, many=[], named={})


def test_changed_configs_that_make_sense_are_taken() -> None:
    for config in unlooked(SplashConfig(), {"block_q": 256}):
        taken = OperationMetadata(operation_configs={"splash": config}).operation_configs["splash"]
        assert taken == SplashConfig(block_q=256)
        assert taken.is_set("block_q")
        assert not taken.is_set("block_kv")


def test_fields_that_do_not_go_together_are_caught() -> None:
    for config in unlooked(SplashConfig(block_kv=256), {"block_kv_compute": 1024, "block_kv": 256}):
        with pytest.raises(ConfigError, match="not a multiple of block_kv_compute"):
            OperationMetadata(operation_configs={"splash": config})
    with pytest.raises(ConfigError, match="'splash'"):
        OperationMetadata(operation_configs={"splash": RingConfig(block_q=256)})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"operation": 3}, "operation=3"),
        ({"enabled": "maybe"}, "enabled"),
        ({"cal": {}}, "unknown field 'cal'.*Did you mean 'call'"),
        ({"metadata": {"softmax_scale": float("nan")}}, "finite"),
        ({"call": {"q_len": -5}}, "q_len=-5"),
        ({"call": CallDeclaration(**SIZES).model_copy(update={"q_len": -5})}, "q_len=-5"),
        ({"call": CallDeclaration(**SIZES).model_copy(update={"mask": {"kind": "causl"}})}, "Did you mean 'causal'"),
        ({"call": CallDeclaration(**SIZES).model_copy(update={"q_length": 5})}, "unknown field 'call.q_length'"),
        ({"call": CallDeclaration.model_construct(**SIZES, dtype="int3")}, "dtype='int3'"),
    ],
)
def test_changed_declarations_are_checked_where_they_are_used(change: dict[str, Any], says: str) -> None:
    changed = Declaration(operation="vanilla", call=CallDeclaration(**SIZES)).model_copy(update=change)
    uses = (
        Attention,
        lambda d: d.operation_metadata(),
        lambda d: d.shapes(),
        lambda d: d.draw(0),
        lambda d: d.call_arguments({}),
    )
    for use in uses:
        with pytest.raises(ConfigError, match=says):
            use(changed)


def test_a_changed_declaration_that_makes_sense_is_used() -> None:
    changed = Declaration(operation="vanilla", call=CallDeclaration(**SIZES)).model_copy(
        update={"call": {**SIZES, "mask": "causal", "kv_lengths": None}}
    )
    assert changed.shapes()["query"].shape == (1, 16, 2, 8)
    assert changed.call_arguments(changed.shapes())["mask"] == Causal()
    assert Attention(changed).declaration.call.mask == Causal()


@pytest.mark.parametrize("change", [{"causl": False}, {"dropout_prob": 2}, {"fallback": "maybe"}, {"mesh": {"tp": -1}}])
def test_replaced_metadata_is_checked(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        OperationMetadata().replace(**change)


def test_every_field_has_what_was_never_given() -> None:
    assert ToyConfig(block=3).every_field() == {"operation": "toy", "schema_version": 1, "block": 3, "label": "plain"}
    assert VanillaConfig(path="plain").model_dump() == {"operation": "vanilla", "schema_version": 1, "path": "plain"}
    assert set(SplashConfig().every_field()) == set(SplashConfig.model_fields)


def test_a_plug_ins_config_may_have_aliases_and_fields_written_in_their_own_way() -> None:
    class Aliased(OperationConfig):
        operation: Literal["aliased"] = "aliased"
        block: Annotated[int | None, Field(alias="blockSize")] = None
        factor: Annotated[float, PlainSerializer(str)] = 1.0

    for config in (Aliased(blockSize=3), Aliased(block=None, factor=2.0), Aliased()):
        for asked in WAYS:
            comes_back(Aliased, config, asked)
        assert Aliased.coerce(config) == config == Aliased.coerce(config.to_dict())
    assert Aliased(blockSize=3).model_dump(by_alias=True)["blockSize"] == 3
    assert Aliased(blockSize=3).every_field() == {
        "operation": "aliased", "schema_version": 1, "block": 3, "factor": "1.0",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="block"):
        Aliased.coerce(Aliased().model_copy(update={"block": "big"}))


def test_the_base_is_no_config() -> None:
    with pytest.raises(ConfigError, match=r"is not an operation's config; wanted that of one of .*splash"):
        OperationConfig(operation="splash")


def test_unset_and_null_are_different_calls() -> None:
    """Attention checks dtypes that are declared, and no others."""
    assert CallDeclaration() != CallDeclaration(dtype="float32")
    assert Attention({"operation": "sdpa"}) != Attention({"operation": "sdpa", "call": {"dtype": "float32"}})
    assert Declaration(operation="sdpa") == Declaration(operation="sdpa", schema_version=1)
