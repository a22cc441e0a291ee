"""Metadata as JSON: exact round trips of random declarations, and strict reading."""

from __future__ import annotations

import json
import types

import jax
import jax.numpy as jnp
import pytest
from eformer.escale import PartitionAxis
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType

from attnops.compat import abstract_device
from attnops.errors import ConfigError, UnknownNameError
from attnops.operators.splash import SplashConfig
from attnops.registry import OperationMetadata
from attnops.sharding import virtual_mesh

NAME = st.sampled_from(["dp", "fsdp", "tp", "sp", "ep", "cp", "x"])
AXES = st.one_of(
    st.none(), NAME, st.lists(NAME, unique=True, max_size=3), st.lists(NAME, unique=True, max_size=3).map(tuple)
)
AXIS = st.fixed_dictionaries(
    {},
    optional={
        "batch_axis": AXES,
        "query_sequence_axis": AXES,
        "head_axis": AXES,
        "kv_head_axis": AXES,
        "attention_dim_axis": AXES,
        "decode_batch_axis": AXES,
        "decode_query_sequence_axis": AXES,
        "bias_head_sequence_axis": AXES,
        "sequence_parallel_axis": NAME,
    },
).map(lambda fields: PartitionAxis(**fields))


def _sensible(config):
    """Whether the fields fit together: an explicit block_kv=None is the kernel's own 128."""
    return not ("block_kv" in config and config["block_kv"] is None and (config.get("block_kv_compute") or 0) > 128)


BLOCK = st.one_of(st.none(), st.sampled_from([128, 256, 512, 1024]))
SPLASH = st.fixed_dictionaries(
    {},
    optional={
        "block_q": st.one_of(st.none(), st.sampled_from([128, 256])),
        "block_kv": st.one_of(st.none(), st.just(1024)),
        "block_kv_compute": BLOCK,
        "block_q_dkv": BLOCK,
        "use_fused_bwd_kernel": st.booleans(),
        "q_layout": st.sampled_from(["head_dim_minor", "seq_minor"]),
        "residual_checkpoint_name": st.one_of(st.none(), st.text(st.characters(categories="LMNPS"), max_size=4)),
        "interpret": st.booleans(),
    },
).filter(_sensible)


@st.composite
def meshes(draw):
    sizes = draw(st.sampled_from([(8,), (2, 4), (1, 2), (2, 2, 2), (64, 4)]))
    names = draw(st.lists(NAME, unique=True, min_size=len(sizes), max_size=len(sizes)))
    kinds = draw(st.lists(st.sampled_from(list(AxisType)), min_size=len(sizes), max_size=len(sizes)))
    platform = draw(st.sampled_from([None, "tpu", "gpu", "cuda", "cpu"]))
    kind = draw(st.sampled_from(["real", "dict", "abstract"]))
    if kind == "dict":
        return dict(zip(names, sizes, strict=True))
    if kind == "real" and sizes != (64, 4):
        count = 1
        for size in sizes:
            count *= size
        return jax.make_mesh(sizes, tuple(names), axis_types=tuple(kinds), devices=jax.devices()[:count])
    device = platform and abstract_device(
        kind=f"{platform} v1", cores=draw(st.sampled_from([None, 2])), platform=platform
    )
    return AbstractMesh(sizes, tuple(names), axis_types=tuple(kinds), abstract_device=device)


PLATFORM = st.sampled_from([None, "tpu", "gpu", "cuda", "rocm", "cpu"])
SIZE = st.one_of(st.none(), st.integers(1, 10**6))
METADATA = st.fixed_dictionaries(
    {},
    optional={
        "runtime_dtype": st.sampled_from([None, jnp.float32, "bfloat16", jnp.float16, "float64"]),
        "runtime_softmax_dtype": st.sampled_from([None, jnp.float32, "bfloat16", "float64"]),
        "platform": PLATFORM,
        "backend": PLATFORM,
        "partition_axis": AXIS,
        "operation_configs": st.fixed_dictionaries({}, optional={"splash": SPLASH, "vanilla": st.just({})}),
        "mesh": st.one_of(st.none(), meshes()),
        "softmax_scale": st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False), st.integers(-5, 5)),
        "dropout_prob": st.floats(0, 1, exclude_max=True),
        "causal": st.booleans(),
        "scan_ring_attention": st.sampled_from([None, True, False]),
        "blocksize_q": SIZE,
        "blocksize_k": SIZE,
        "blocksize_b": SIZE,
        "fallback": st.sampled_from(["warn", "error", "allow"]),
        "tuning": st.sampled_from(["heuristic", "tune", "error", "off"]),
        "kv_heads": st.sampled_from(["replicate", "error"]),
        "strict": st.booleans(),
    },
)


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


@settings(max_examples=150)
@given(METADATA)
def test_exact_round_trip(fields):
    metadata = OperationMetadata(**fields)
    text = metadata.to_json()
    json.loads(text, parse_constant=refuse_constant)
    again = OperationMetadata.from_json(text)
    assert again == metadata
    assert hash(again) == hash(metadata)
    assert again.to_json() == text
    assert OperationMetadata.from_dict(metadata.to_dict()) == metadata

    # Equality is the class's own, so look at the parts as well.
    assert again.runtime_dtype == metadata.runtime_dtype
    assert again.runtime_softmax_dtype == metadata.runtime_softmax_dtype
    assert again.partition_axis == metadata.partition_axis
    assert again.mesh == metadata.mesh
    assert type(again.mesh) is type(metadata.mesh)
    assert again.policy == metadata.policy
    assert again.softmax_scale == metadata.softmax_scale
    for mode in ("train", "decode"):
        assert again.get_shardings(mode, softmax_aux=2) == metadata.get_shardings(mode, softmax_aux=2)
    for name, given_fields in fields.get("operation_configs", {}).items():
        config = again.operation_configs[name]
        assert type(config) is type(metadata.operation_configs[name])
        for field in set(type(config).model_fields) - {"operation", "schema_version"}:
            assert config.is_set(field) == (field in given_fields)
        for field, value in given_fields.items():
            assert getattr(config, field) == value


def test_what_a_file_looks_like():
    metadata = OperationMetadata(
        runtime_dtype=jnp.bfloat16,
        mesh=virtual_mesh({"fsdp": 2, "tp": 4}),
        operation_configs={"splash": SplashConfig(block_q=None, block_kv=256)},
        partition_axis=PartitionAxis(batch_axis=("fsdp", "dp"), head_axis=None),
    )
    data = json.loads(metadata.to_json())
    assert data["schema_version"] == 1
    assert data["runtime_dtype"] == "bfloat16"
    assert data["runtime_softmax_dtype"] == "float32"
    assert data["mesh"]["axis_names"] == ["fsdp", "tp"]
    assert data["mesh"]["axis_sizes"] == [2, 4]
    assert data["operation_configs"] == {
        "splash": {"operation": "splash", "schema_version": 1, "block_q": None, "block_kv": 256}
    }
    assert data["partition_axis"]["batch_axis"] == ["fsdp", "dp"]
    assert data["partition_axis"]["head_axis"] is None
    assert metadata.to_json(indent=None).count("\n") == 0


def test_a_file_written_by_hand():
    text = """{"runtime_dtype": "bfloat16", "mesh": {"fsdp": 2, "tp": 4},
               "operation_configs": {"splash": {"block_q": 128}}, "partition_axis": {"batch_axis": ["fsdp"]}}"""
    metadata = OperationMetadata.from_json(text)
    assert metadata == OperationMetadata(
        runtime_dtype=jnp.bfloat16,
        mesh=virtual_mesh({"fsdp": 2, "tp": 4}),
        operation_configs={"splash": SplashConfig(block_q=128)},
        partition_axis=PartitionAxis(batch_axis=("fsdp",)),
    )
    assert OperationMetadata.from_json("{}") == OperationMetadata()


def test_base_config_is_not_written_but_all_that_was_taken_from_it_is():
    config = types.SimpleNamespace(attn_dtype=jnp.float16, mesh=virtual_mesh({"tp": 2}), anything=object())
    metadata = OperationMetadata.from_config(config)
    again = OperationMetadata.from_json(metadata.to_json())
    assert again == metadata
    assert again.runtime_dtype == jnp.float16
    assert again.mesh == config.mesh
    assert again.base_config is None


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('{"softmax_scal": 1.0}', ConfigError, "Did you mean 'softmax_scale'"),
        ('{"base_config": {}}', ConfigError, "unknown field 'base_config'"),
        ('{"softmax_scale": NaN}', ConfigError, "wanted a finite number"),
        ('{"softmax_scale": Infinity}', ConfigError, "wanted a finite number"),
        ('{"dropout_prob": true}', ConfigError, "wanted a number"),
        ('{"causal": 1}', ConfigError, "wanted True or False"),
        ('{"causal": true, "causal": false}', ConfigError, "'causal' appears twice"),
        ('{"operation_configs": {"splash": {"block_q": 8, "block_q": 16}}}', ConfigError, "'block_q' appears twice"),
        ('{"strict": 1}', ConfigError, "strict=1"),
        ('{"platform": "tpuu"}', ConfigError, "Did you mean 'tpu'"),
        ('{"runtime_dtype": "bfloat17"}', ConfigError, "is not a dtype"),
        ('{"operation_configs": {"splas": {}}}', UnknownNameError, "Did you mean 'splash'"),
        ('{"operation_configs": {"splash": {"block_qq": 8}}}', ConfigError, "Did you mean 'block_q'"),
        ('{"operation_configs": {"splash": {"operation": "vanilla"}}}', ConfigError, "operation"),
        ('{"mesh": {"axis_names": ["a", "a"], "axis_sizes": [2, 2]}}', ConfigError, "wanted distinct"),
        ('{"partition_axis": {"head_axes": "tp"}}', ConfigError, "Did you mean 'head_axis'"),
        ('{"schema_version": 2}', ConfigError, "schema_version=2; this attnops reads 1"),
        ('{"causal": tru}', ConfigError, "line 1, column 12"),
        ('{"causal": true,\n "strict": }', ConfigError, "line 2, column 12"),
        ("[]", ConfigError, "got a list; wanted an object"),
        ('"text"', ConfigError, "got a str; wanted an object"),
    ],
)
def test_a_broken_file_is_refused(text, error, message):
    with pytest.raises(error, match=message):
        OperationMetadata.from_json(text)
