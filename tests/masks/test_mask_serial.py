"""Masks as JSON and as pydantic fields: exact round trips, strict reading, and a schema that agrees."""

from __future__ import annotations

import copy
import functools
import json
import operator
import pickle

import brute_masks as brute
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from pydantic import BaseModel, TypeAdapter, ValidationError

from attnops.errors import MaskError
from attnops.masks import (
    And,
    Causal,
    Full,
    Lengths,
    Mask,
    Not,
    Prefix,
    SlidingWindow,
    mask_from_dict,
    mask_json_schema,
)


class Config(BaseModel, frozen=True, extra="forbid"):
    mask: Mask | None = None


@given(brute.trees(brute.LEAVES | brute.FUNCTIONS))
@settings(deadline=None, max_examples=100)
def test_round_trip(spec):
    mask = brute.build(spec)
    data = json.loads(json.dumps(mask.to_dict(), allow_nan=False))
    assert data == mask.to_dict()
    assert mask_from_dict(data) == mask
    config = Config(mask=mask)
    assert config.model_dump() == {"mask": data}
    assert Config.model_validate_json(config.model_dump_json()) == Config(mask=data) == config
    assert hash(Config(mask=data)) == hash(config)


def test_fields_are_explicit_and_defaults_may_be_left_out():
    assert Causal().to_dict() == {"kind": "causal", "offset": None}
    assert SlidingWindow(3).to_dict() == {"kind": "sliding_window", "left": 3, "right": 0, "offset": None}
    assert mask_from_dict({"kind": "sliding_window", "left": 3}) == SlidingWindow(3)
    assert mask_from_dict("causal") == Causal()
    assert mask_from_dict("full") == Full()
    assert mask_from_dict({"kind": "and", "masks": ["causal", {"kind": "prefix", "length": 2}]}) == And(
        (Causal(), Prefix(2))
    )


REFUSED = [
    ({"kind": "causl"}, "Did you mean 'causal'"),
    ({"kind": "causal", "ofset": 1}, "Did you mean 'offset'"),
    ({"kind": "causal", "offset": True}, "write the number"),
    ({"kind": "causal", "offset": 1.0}, "wanted an int"),
    ({"kind": "causal", "offset": float("nan")}, "wanted an int"),
    ({"kind": "causal", "offset": "1"}, "wanted an int"),
    ({"kind": "chunked"}, 'add "size"'),
    ({"kind": "chunked", "size": 0}, "at least 1"),
    ({"kind": "chunked", "size": None}, "wanted an int"),
    ({"kind": "prefix", "length": -3}, "at least 0"),
    ({"kind": "sliding_window", "left": 2**40}, "use None for no bound"),
    ({"kind": "sliding_window", "left": None, "right": None}, r"use Full\(\)"),
    ({"kind": "mask_function", "name": "a b"}, "identifier"),
    ({"kind": "not"}, 'add "mask"'),
    ({"kind": "not", "mask": "causl"}, r"mask\.mask is 'causl'.*Did you mean 'causal'"),
    (
        {"kind": "and", "masks": ["causal", {"kind": "chunked", "size": -1}]},
        r"mask\.masks\[1\]: Chunked size=-1",
    ),
    ({"kind": "and", "masks": "causal"}, r"put it in \[ \]"),
    ({"kind": "kv_lengths"}, "pass it in the call"),
    ({"kind": 3}, "wanted one of full, causal"),
    ({"kind": ["causal"]}, "wanted one of full, causal"),
    ({3: 4}, 'add "kind"'),
    ({"kind": "full", 3: 4}, "unknown key 3"),
    (
        {"kind": "sliding_window", "window": 8},
        "unknown key 'window'.*left, the keys before the query's own: window - 1",
    ),
    ({"kind": "sliding_window", "after": 8}, "unknown key 'after'.*Here it is right"),
    ({"kind": "chunked", "chunk_size": 8}, "unknown key 'chunk_size'.*Here it is size"),
    ({"kind": "prefix", "prefix_length": 8}, "unknown key 'prefix_length'.*Here it is length"),
    ({"kind": "causal", "window": 8}, "unknown key 'window'; causal has kind, offset"),
    (None, "wanted an object"),
    ([], "wanted an object"),
    (True, "wanted an object"),
]


@pytest.mark.parametrize(("data", "message"), REFUSED)
def test_refusals(data, message):
    with pytest.raises(MaskError, match=message):
        mask_from_dict(data)
    if data is not None:
        with pytest.raises(ValidationError, match=message):
            Config(mask=data)


def nested(depth):
    data = "causal"
    for i in range(depth - 1):
        data = {"kind": "or" if i % 2 else "and", "masks": [data, {"kind": "prefix", "length": i}]}
    return data


def test_depth_is_bounded():
    mask = mask_from_dict(nested(64))
    assert mask_from_dict(mask.to_dict()) == mask
    for depth in (65, 5000):
        with pytest.raises(MaskError, match="into one list"):
            mask_from_dict(nested(depth))


def built(levels, leaf):
    for i in range(levels - 1):
        leaf = leaf | Prefix(i) if i % 2 else leaf & Prefix(i)
    return leaf


def test_a_mask_is_never_built_deeper_than_it_can_be_read():
    mask = built(64, Causal())
    assert mask_from_dict(mask.to_dict()) == mask
    assert pickle.loads(pickle.dumps(mask)) == mask
    assert copy.deepcopy(mask) == mask
    for build in (lambda: built(65, Causal()), lambda: mask | Prefix(99), lambda: ~mask, lambda: built(5000, Causal())):
        with pytest.raises(MaskError, match="deeper than 64 levels"):
            build()
    assert len(functools.reduce(operator.or_, (Prefix(n) for n in range(300))).masks) == 300


def test_levels_are_counted_through_a_pytree():
    again = jax.tree.map(lambda x: x, built(64, Lengths(np.array([3]))))
    with pytest.raises(MaskError, match="deeper than 64 levels"):
        _ = again | Prefix(99)


def test_fields_take_static_masks_only():
    assert Config(mask=~Causal()).mask == Not(Causal())
    assert Config().mask is None
    assert Config().model_dump() == {"mask": None}
    with pytest.raises(ValidationError, match="kv_lengths holds arrays"):
        Config(mask=Lengths(np.array([3])))


def test_schema():
    from attnops.masks.schema import MaskDict

    schema = mask_json_schema()
    assert json.loads(json.dumps(schema)) == schema
    names = {name.removesuffix("Dict") for name in schema["$defs"]}
    assert {
        "And",
        "Or",
        "Not",
        "Causal",
        "SlidingWindow",
        "Chunked",
        "Prefix",
        "Full",
        "MaskFunction",
    } <= names
    assert all(part["additionalProperties"] is False for part in schema["$defs"].values() if "properties" in part)
    for mode in ("validation", "serialization"):
        assert Config.model_json_schema(mode=mode)["$defs"] == schema["$defs"]
    # The schema says of good and bad data what the reader says, as far as a schema can.
    adapter = TypeAdapter(MaskDict)
    for data in ("full", {"kind": "not", "mask": nested(5)}, (Causal(3) & ~Prefix(2)).to_dict()):
        adapter.validate_json(json.dumps(data), strict=True)
    beyond = {"use Full", "identifier"}
    for data, message in REFUSED:
        if any(word in message for word in beyond) or (isinstance(data, dict) and 3 in data):
            continue
        text = json.dumps(data)
        if "NaN" not in text:
            with pytest.raises(ValidationError):
                adapter.validate_json(text, strict=True)
    schema["$defs"].clear()
    assert mask_json_schema()["$defs"], "callers get their own copy"
