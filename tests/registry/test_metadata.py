"""OperationMetadata: what it takes, from where, what it refuses, and that it stays what it is."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import pickle
import subprocess
import sys
import types
from enum import Enum

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eformer.common_types import NOT_GIVEN
from eformer.escale import PartitionAxis, PartitionManager
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from pydantic import TypeAdapter

from attnops import Attention
from attnops.errors import ConfigError, UnknownNameError
from attnops.operators.splash import SplashConfig
from attnops.operators.vanilla import VanillaConfig
from attnops.planning import Policy
from attnops.planning.policy import CHOICES
from attnops.registry import UNSET, OperationMetadata
from attnops.sharding import virtual_mesh

CP = PartitionAxis(sequence_parallel_axis="cp", tensor_parallel_axis="model")


def base(**attributes):
    """A model config with the attributes that such configs have."""
    everything = {
        "attn_dtype": jnp.bfloat16,
        "attn_softmax_dtype": jnp.float64,
        "sequence_axis_name": "sp",
        "platform": "tpu",
        "backend": "tpu",
        "partition_axis": PartitionAxis(head_axis="model"),
        "operation_configs": {"splash": {"block_q": 256}},
        "mesh": virtual_mesh({"model": 4}),
        "hidden_size": 4096,
    }
    return types.SimpleNamespace(**(everything | attributes))


# -- attributes and defaults --------------------------------------------------------------------------------------


def test_defaults():
    metadata = OperationMetadata()
    assert metadata.runtime_dtype is None
    assert metadata.runtime_softmax_dtype == jnp.float32
    assert metadata.sequence_axis_name == "sp"
    assert metadata.platform is None
    assert metadata.backend is None
    assert metadata.partition_axis == PartitionAxis()
    assert metadata.base_config is None
    assert metadata.operation_configs == {}
    assert metadata.mesh is None
    assert metadata.softmax_scale is None
    assert metadata.dropout_prob == 0.0
    assert metadata.causal is True
    assert metadata.scan_ring_attention is None
    assert (metadata.blocksize_q, metadata.blocksize_k, metadata.blocksize_b) == (None, None, None)
    assert metadata.policy == Policy("warn", "replicate", False)


def test_every_attribute_holds_what_was_given():
    mesh = virtual_mesh({"fsdp": 2, "model": 4})
    metadata = OperationMetadata(
        runtime_dtype="bfloat16",
        runtime_softmax_dtype=np.float32,
        platform="CPU",
        backend="tpu",
        partition_axis=CP,
        operation_configs={"splash": {"block_kv": 256}, "vanilla": VanillaConfig()},
        mesh=mesh,
        softmax_scale=np.float32(0.5),
        dropout_prob=0.25,
        causal=np.False_,
        scan_ring_attention=True,
        blocksize_q=64,
        blocksize_k=np.int64(128),
        blocksize_b=1,
        fallback="error",
        kv_heads="error",
        strict=True,
    )
    assert metadata.runtime_dtype == jnp.bfloat16
    assert metadata.sequence_axis_name == "cp"
    assert (metadata.platform, metadata.backend) == ("cpu", "tpu")
    assert metadata.partition_axis == CP
    assert metadata.operation_configs == {"splash": SplashConfig(block_kv=256), "vanilla": VanillaConfig()}
    assert metadata.mesh is mesh
    assert metadata.softmax_scale == 0.5
    assert type(metadata.softmax_scale) is float
    assert metadata.dropout_prob == 0.25
    assert metadata.causal is False
    assert metadata.scan_ring_attention is True
    assert (metadata.blocksize_q, metadata.blocksize_k, metadata.blocksize_b) == (64, 128, 1)
    assert type(metadata.blocksize_k) is int
    assert metadata.policy == Policy("error", "error", True, scan_ring_attention=True)


def test_the_constructor_calls_of_the_class_that_this_descends_from():
    assert OperationMetadata(jnp.float16).runtime_dtype == jnp.float16
    config = base()
    metadata = OperationMetadata(runtime_dtype=jnp.float32, runtime_softmax_dtype=jnp.float32, base_config=config)
    assert metadata.runtime_dtype == jnp.float32
    assert metadata.mesh is config.mesh
    full = OperationMetadata(
        runtime_dtype=config.attn_dtype,
        runtime_softmax_dtype=config.attn_softmax_dtype,
        sequence_axis_name=config.sequence_axis_name,
        platform=config.platform,
        backend=config.backend,
        partition_axis=config.partition_axis,
        base_config=config,
        operation_configs=getattr(config, "operation_configs", None),
    )
    assert full == OperationMetadata.from_config(config)
    in_order = OperationMetadata(
        jnp.bfloat16, jnp.float32, "sp", "tpu", "tpu", PartitionAxis(), UNSET, None, {"splash": SplashConfig()}
    )
    assert in_order.get_operation_config("splash") == SplashConfig()


# -- base_config -----------------------------------------------------------------------------------------------------


def test_from_config_takes_every_attribute():
    config = base()
    metadata = OperationMetadata.from_config(config)
    assert metadata.runtime_dtype == jnp.bfloat16
    assert metadata.runtime_softmax_dtype == jnp.float64
    assert (metadata.platform, metadata.backend) == ("tpu", "tpu")
    assert metadata.partition_axis == config.partition_axis
    assert metadata.get_operation_config("splash") == SplashConfig(block_q=256)
    assert metadata.mesh is config.mesh
    assert metadata.base_config is config


@pytest.mark.parametrize("shape", ["namespace", "dict", "dataclass", "class"])
def test_from_config_takes_any_object(shape):
    config = base()
    if shape == "dict":
        config = vars(config)
    elif shape == "dataclass":
        fields = vars(config)
        config = dataclasses.make_dataclass("Config", list(fields))(**fields)
    elif shape == "class":
        config = type("Config", (), vars(config))
    assert OperationMetadata.from_config(config) == OperationMetadata.from_config(base())


def test_from_config_of_an_object_that_has_nothing():
    assert OperationMetadata.from_config(object()) == OperationMetadata()
    nothing = base(**dict.fromkeys(vars(base()), NOT_GIVEN))
    assert OperationMetadata.from_config(nothing) == OperationMetadata()


def test_given_values_beat_the_base_config():
    given = {
        "runtime_dtype": jnp.float32,
        "runtime_softmax_dtype": jnp.float32,
        "platform": None,
        "backend": "cpu",
        "operation_configs": {},
        "mesh": None,
    }
    metadata = OperationMetadata(base_config=base(), **given)
    assert metadata == OperationMetadata(**given, partition_axis=base().partition_axis)
    assert metadata.platform is None  # None was given, which isn't unset
    assert metadata.mesh is None
    assert OperationMetadata.from_config(base(), runtime_dtype=None).runtime_dtype is None


def test_given_axes_beat_those_of_the_base_config_either_way():
    config = base(sequence_axis_name="sp", partition_axis=PartitionAxis(head_axis="model"))
    by_axis = OperationMetadata(partition_axis=CP, base_config=config)
    assert by_axis.sequence_axis_name == "cp"
    assert by_axis.get_shardings("train").query == P(("fsdp", "dp"), "cp", "model", None)
    by_name = OperationMetadata(sequence_axis_name="cp", base_config=config)
    assert by_name.sequence_axis_name == "cp"
    assert by_name.get_shardings("train").query == P(("fsdp", "dp"), "cp", "model", None)
    by_manager = OperationMetadata(partition_manager=PartitionManager(CP), base_config=config)
    assert by_manager.partition_axis == CP


def test_set_attrs_carefully_never_touches_what_is_set():
    metadata = OperationMetadata(base_config=base(), runtime_dtype=jnp.float32)
    metadata.set_attrs_carefully("runtime_dtype", jnp.float16, "attn_dtype")
    assert metadata.runtime_dtype == jnp.float32
    with pytest.raises(AttributeError, match="Did you mean 'runtime_dtype'"):
        metadata.set_attrs_carefully("runtime_dtyp", None)


# -- axes ------------------------------------------------------------------------------------------------------------


def test_partition_manager_is_another_way_to_give_the_axes():
    metadata = OperationMetadata(partition_manager=PartitionManager(CP))
    assert metadata.partition_axis == CP
    assert isinstance(metadata.partition_manager, PartitionManager)
    assert metadata.partition_manager.paxis == CP
    assert metadata == OperationMetadata(partition_axis=CP, partition_manager=PartitionManager(CP))
    with pytest.raises(ConfigError, match="disagree"):
        OperationMetadata(partition_axis=PartitionAxis(), partition_manager=PartitionManager(CP))


def test_the_sequence_axis_name_is_the_axes_own():
    assert OperationMetadata(sequence_axis_name="cp").get_shardings("train").query[1] == "cp"
    assert OperationMetadata(partition_axis=CP, sequence_axis_name="cp").sequence_axis_name == "cp"
    with pytest.raises(ConfigError, match=r"'sp'.*'cp'.*make them agree"):
        OperationMetadata(partition_axis=CP, sequence_axis_name="sp")
    with pytest.raises(ConfigError, match="wanted the name of a mesh axis"):
        OperationMetadata(sequence_axis_name=3)


def test_partition_axis_as_a_dict():
    metadata = OperationMetadata(partition_axis={"batch_axis": ["a", "b"], "head_axis": None})
    assert metadata.partition_axis == PartitionAxis(batch_axis=("a", "b"), head_axis=None)
    with pytest.raises(ConfigError, match="Did you mean 'batch_axis'"):
        OperationMetadata(partition_axis={"batch_axes": "dp"})
    with pytest.raises(ConfigError, match="wanted a PartitionAxis or a dict"):
        OperationMetadata(partition_axis="tp")
    with pytest.raises(ConfigError, match=r"partition_axis.head_axis=3"):
        OperationMetadata(partition_axis=PartitionAxis(head_axis=3))


def test_lists_and_tuples_of_axes_are_the_same_declaration():
    as_list = OperationMetadata(partition_axis=PartitionAxis(batch_axis=["a", "b"]))
    as_tuple = OperationMetadata(partition_axis=PartitionAxis(batch_axis=("a", "b")))
    assert as_list == as_tuple
    assert hash(as_list) == hash(as_tuple)


# -- replace ---------------------------------------------------------------------------------------------------------


def test_replace_changes_one_thing_and_keeps_the_rest():
    metadata = OperationMetadata(runtime_dtype=jnp.bfloat16, dropout_prob=0.1, mesh={"tp": 4}, strict=True)
    changed = metadata.replace(dropout_prob=0.2)
    assert changed.dropout_prob == 0.2
    assert metadata.dropout_prob == 0.1
    assert changed != metadata
    assert changed.replace(dropout_prob=0.1) == metadata
    assert metadata.replace() == metadata
    assert metadata.replace(fallback="error").policy == Policy("error", "replicate", True)


def test_replacing_the_axes_changes_the_shardings():
    metadata = OperationMetadata()
    for changed in (
        metadata.replace(partition_axis=CP),
        metadata.replace(partition_manager=PartitionManager(CP)),
        metadata.replace(partition_axis={"sequence_parallel_axis": "cp", "tensor_parallel_axis": "model"}),
    ):
        assert changed.get_shardings("train").query == P(("fsdp", "dp"), "cp", "model", None)
        assert changed.sequence_axis_name == "cp"
        assert changed.partition_manager.paxis == CP
    renamed = metadata.replace(sequence_axis_name="ring")
    assert renamed.get_shardings("train").query == P(("fsdp", "dp"), "ring", "tp", None)
    assert renamed.get_shardings("train").kv_segment_ids == P(("fsdp", "dp"), "ring")
    assert metadata.get_shardings("train").query == P(("fsdp", "dp"), "sp", "tp", None)


@pytest.mark.parametrize("field", ["sequence_parallel_axis", "query_sequence_axis", "head_axis"])
def test_an_axis_that_splits_nothing_stays_when_another_field_changes(field):
    metadata = OperationMetadata(partition_axis={field: None})
    for changed in (
        metadata.replace(runtime_dtype="bfloat16"),
        metadata.replace(operation_configs={"splash": {"block_q": 128}}),
        Attention("splash", partition_axis={field: None}, runtime_dtype="bfloat16").operation.metadata,
        Attention(
            {"operation": "splash", "metadata": {"partition_axis": {field: None}}}, causal=False
        ).operation.metadata,
        OperationMetadata.from_json(metadata.to_json()).replace(strict=True),
    ):
        assert changed.partition_axis == PartitionAxis(**{field: None})
    assert metadata.sequence_axis_name == (None if field == "sequence_parallel_axis" else "sp")


def test_a_sequence_axis_can_be_named_where_there_was_none():
    none = OperationMetadata(partition_axis={"sequence_parallel_axis": None, "head_axis": "model"})
    named = none.replace(sequence_axis_name="cp")
    assert named.partition_axis == PartitionAxis(sequence_parallel_axis="cp", head_axis="model")
    again = OperationMetadata(base_config=none, sequence_axis_name="cp")
    assert again.partition_axis == named.partition_axis


def test_replace_after_a_base_config():
    config = base()
    metadata = OperationMetadata.from_config(config).replace(partition_axis=CP)
    assert metadata.get_shardings("train").query == P(("fsdp", "dp"), "cp", "model", None)
    assert metadata.runtime_dtype == jnp.bfloat16
    assert metadata.mesh is config.mesh
    assert metadata.base_config is config
    assert metadata.replace(mesh=None).mesh is None
    with pytest.raises(ConfigError, match="from_config"):
        metadata.replace(base_config=base())


def test_replace_refuses_an_unknown_argument():
    with pytest.raises(ConfigError, match="Did you mean 'dropout_prob'"):
        OperationMetadata().replace(dropout_probs=0.1)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, True, "0.5", 10**400, [0.5]], ids=lambda v: str(v)[:8])
@pytest.mark.parametrize("field", ["softmax_scale", "dropout_prob"])
def test_numbers_are_finite_numbers(field, bad):
    with pytest.raises(ConfigError, match=rf"{field}=.*wanted a (finite )?number"):
        OperationMetadata(**{field: bad})


@pytest.mark.parametrize("bad", [1.0, -0.1, 2])
def test_dropout_is_a_probability(bad):
    with pytest.raises(ConfigError, match=r"wanted a probability in \[0, 1\)"):
        OperationMetadata(dropout_prob=bad)


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, "64"])
@pytest.mark.parametrize("field", ["blocksize_q", "blocksize_k", "blocksize_b"])
def test_block_sizes_are_positive_integers(field, bad):
    with pytest.raises(ConfigError, match=f"{field}=.*wanted a positive integer"):
        OperationMetadata(**{field: bad})


@pytest.mark.parametrize("bad", [1, 0, "yes", None])
def test_causal_is_a_boolean(bad):
    with pytest.raises(ConfigError, match="wanted True or False"):
        OperationMetadata(causal=bad)
    if bad is not None:
        with pytest.raises(ConfigError, match="wanted True or False"):
            OperationMetadata(scan_ring_attention=bad)


@pytest.mark.parametrize("field", ["platform", "backend"])
@pytest.mark.parametrize(("bad", "close"), [("tpuu", "'tpu'"), ("cudda", "'cuda'"), ("metal", ""), (True, ""), (3, "")])
def test_misspelt_platforms(field, bad, close):
    with pytest.raises(ConfigError, match="wanted one of tpu, cuda, rocm, gpu, cpu") as error:
        OperationMetadata(**{field: bad})
    assert field in str(error.value)
    assert close in str(error.value)


def test_platforms_may_be_enums():
    platforms = Enum("Platforms", {"TPU": "tpu", "CUDA": "cuda"})
    assert OperationMetadata(platform=platforms.TPU, backend=platforms.CUDA).platform == "tpu"


@pytest.mark.parametrize("bad", ["float23", "int32", jnp.int8, bool, object(), "", {}])
@pytest.mark.parametrize("field", ["runtime_dtype", "runtime_softmax_dtype"])
def test_dtypes_are_floats(field, bad):
    with pytest.raises(ConfigError, match=field):
        OperationMetadata(**{field: bad})


def test_misspelt_operation_names():
    with pytest.raises(UnknownNameError, match="Did you mean 'splash'"):
        OperationMetadata(operation_configs={"splas": {}})
    with pytest.raises(UnknownNameError, match="Did you mean 'splash'"):
        OperationMetadata().get_operation_config("splas")
    with pytest.raises(ConfigError, match="wanted a mapping"):
        OperationMetadata(operation_configs=[SplashConfig()])
    with pytest.raises(ConfigError, match="config of 'vanilla', wanted SplashConfig"):
        OperationMetadata(operation_configs={"splash": VanillaConfig()})
    with pytest.raises(ConfigError, match="Did you mean 'block_q'"):
        OperationMetadata(operation_configs={"splash": {"block_qq": 128}})


def test_get_operation_config():
    metadata = OperationMetadata(operation_configs={"splash": {"block_q": 128}})
    assert metadata.get_operation_config("splash") == SplashConfig(block_q=128)
    assert metadata.get_operation_config("vanilla") is None


@pytest.mark.parametrize(
    "policy",
    [
        {"fallback": "never"},
        {"tuning": "on"},
        {"kv_heads": "repeat"},
        {"strict": "yes"},
        {"strict": 1},
        {"strict": 0.0},
    ],
)
def test_policies(policy):
    with pytest.raises(ConfigError, match=rf"{next(iter(policy))}=.*wanted one of"):
        OperationMetadata(**policy)


@pytest.mark.parametrize("name", CHOICES)
def test_a_policy_s_field_is_written_once(name):
    """What Policy declares, metadata takes, holds, writes and speaks of."""
    for value in CHOICES[name]:
        metadata = OperationMetadata(**{name: value})
        assert getattr(metadata, name) == getattr(metadata.policy, name) == metadata.to_dict()[name] == value
        assert metadata.policy == Policy(**{name: value})
    assert name in OperationMetadata.__doc__
    schema = TypeAdapter(OperationMetadata).json_schema()["properties"][name]
    assert schema["enum"] == [*CHOICES[name]]
    assert schema["description"]
    with pytest.raises(ConfigError, match=f"{name}=3; wanted .*{CHOICES[name][-1]!r}"):
        OperationMetadata(**{name: 3})


def test_numpy_s_booleans_are_booleans():
    metadata = OperationMetadata(strict=np.True_, scan_ring_attention=np.False_)
    assert (metadata.strict, metadata.scan_ring_attention) == (True, False)
    assert metadata.policy == Policy(strict=True, scan_ring_attention=False)
    assert OperationMetadata.from_json(metadata.to_json()) == metadata


@pytest.mark.parametrize("bad", ["tp=4", 8, [("tp", 4)], {"tp": 0}, {"tp": True}, {}])
def test_meshes(bad):
    with pytest.raises(ConfigError, match="mesh"):
        OperationMetadata(mesh=bad)


def test_an_unknown_argument_is_a_type_error():
    with pytest.raises(TypeError, match="sofmax_scale"):
        OperationMetadata(sofmax_scale=0.5)


# -- identity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(OperationMetadata)] + ["mesh", "anything"])
def test_nothing_can_be_assigned(name):
    metadata = OperationMetadata(operation_configs={"splash": {}})
    with pytest.raises(AttributeError):
        setattr(metadata, name, None)
    with pytest.raises(AttributeError):
        delattr(metadata, name)


def test_operation_configs_do_not_change():
    given = {"splash": SplashConfig(block_q=128)}
    metadata = OperationMetadata(operation_configs=given)
    given["splash"] = SplashConfig()
    assert metadata.get_operation_config("splash") == SplashConfig(block_q=128)
    with pytest.raises(TypeError, match="replace"):
        metadata.operation_configs["splash"] = SplashConfig()
    for change in (dict.clear, dict.popitem):
        with pytest.raises(TypeError, match="replace"):
            getattr(metadata.operation_configs, change.__name__)()


ONES = {
    "runtime_dtype": jnp.bfloat16,
    "runtime_softmax_dtype": jnp.float64,
    "sequence_axis_name": "cp",
    "platform": "tpu",
    "backend": "tpu",
    "partition_axis": CP,
    "operation_configs": {"splash": SplashConfig()},
    "mesh": {"tp": 2},
    "softmax_scale": 1.0,
    "dropout_prob": 0.5,
    "causal": False,
    "scan_ring_attention": False,
    "blocksize_q": 128,
    "blocksize_k": 128,
    "blocksize_b": 1,
    "fallback": "error",
    "kv_heads": "error",
    "strict": True,
    "tuning": "error",
}


@pytest.mark.parametrize("field", ONES)
def test_every_field_counts_for_equality(field):
    changed, again = (OperationMetadata(**{field: ONES[field]}) for _ in range(2))
    assert changed == again
    assert hash(changed) == hash(again)
    assert changed != OperationMetadata()
    assert {changed: 1}[again] == 1
    assert OperationMetadata() not in {changed: 1}


def test_unset_and_none_in_an_operation_config_are_different_declarations():
    unset = OperationMetadata(operation_configs={"splash": {}})
    none = OperationMetadata(operation_configs={"splash": {"block_q": None}})
    assert unset != none
    assert unset != OperationMetadata()


def test_the_order_of_operation_configs_does_not_count():
    one = OperationMetadata(operation_configs={"splash": {}, "vanilla": {}})
    other = OperationMetadata(operation_configs={"vanilla": {}, "splash": {}})
    assert one == other
    assert hash(one) == hash(other)


def test_static_argument_of_jit():
    traced = []

    def scaled(metadata, x):
        traced.append(metadata)
        return x * metadata.softmax_scale

    run = jax.jit(scaled, static_argnums=0)
    kwargs = {"mesh": {"tp": 2}, "operation_configs": {"splash": {"block_q": 128}}}
    for _ in range(3):
        assert run(OperationMetadata(softmax_scale=2.0, **kwargs), 3.0) == 6.0
    assert len(traced) == 1
    assert run(OperationMetadata(softmax_scale=4.0, **kwargs), 3.0) == 12.0
    assert len(traced) == 2


def full_metadata():
    return OperationMetadata(
        runtime_dtype=jnp.bfloat16,
        partition_axis=CP,
        operation_configs={"splash": {"block_q": None, "block_kv": 256}},
        mesh=virtual_mesh({"fsdp": 2, "model": 4}),
        softmax_scale=0.1,
        fallback="error",
    )


@pytest.mark.parametrize(
    "mesh", [None, virtual_mesh({"tp": 4}), AbstractMesh((64,), ("tp",))], ids=["none", "real", "abstract"]
)
def test_copies_are_equal(mesh):
    metadata = full_metadata().replace(mesh=mesh)
    hash(metadata)
    for again in (copy.copy(metadata), copy.deepcopy(metadata), pickle.loads(pickle.dumps(metadata))):
        assert again == metadata
        assert hash(again) == hash(metadata)
        assert again.mesh == metadata.mesh
        assert again.get_shardings("train") == metadata.get_shardings("train")
    assert copy.deepcopy({"metadata": metadata})["metadata"] == metadata


@pytest.mark.slow
def test_a_pickle_from_another_process_is_found_in_a_dict():
    """Hashes of strings differ between processes, so a hash that travels along would lose the key."""
    code = (
        "import pickle, sys; from attnops import OperationMetadata;"
        "m = OperationMetadata(softmax_scale=0.5, sequence_axis_name='cp'); hash(m);"
        "sys.stdout.buffer.write(pickle.dumps(m))"
    )
    env = os.environ | {"PYTHONHASHSEED": "12345"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, check=True)
    metadata = OperationMetadata(softmax_scale=0.5, sequence_axis_name="cp")
    assert {metadata: "found"}[pickle.loads(done.stdout)] == "found"


def test_repr_names_every_field():
    text = repr(OperationMetadata(softmax_scale=0.125))
    assert "softmax_scale=0.125" in text
    for field in ONES:
        assert f"{field}=" in text
