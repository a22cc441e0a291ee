"""Every field of every operation's config is found in what is lowered, or refused; the list is made from the classes.

splash's fields have a page of their own (test_splash_config.py), for each of its kernels. Here are all the others, and what
holds for every config: a dict and an object lower to the same program, and None is not unset.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from attnops import ConfigError, OperationMetadata, OperationRegistry, SplashConfig
from attnops.compat import abstract_device

PAGED = tuple(name for name in OperationRegistry.names() if OperationRegistry.get(name).keys_in == "pages")
ELSEWHERE = {"splash": "test_splash_config.py", "flash_attn2": "test_flash.py"} | dict.fromkeys(
    PAGED, "test_paged_operation.py"
)
ELSEWHERE |= dict.fromkeys(("indexer", "dsa_indexer", "glm_moe_dsa_indexer"), "test_indexer.py")
RECURRENT = tuple(name for name in OperationRegistry.names() if OperationRegistry.get(name).family == "recurrence")
ELSEWHERE |= dict.fromkeys(RECURRENT, "test_recurrent_config.py")
ELSEWHERE |= {"paged_indexer": "test_paged_indexer.py", "selected": "test_selected_operation.py"}
AS_SPLASH = ("ring", "ulysses")  # its methods and fields under other names
COMMON = {"operation", "schema_version"}
# (what else is declared, a value whose program differs from that of the field left out)
CHANGES: dict[tuple[str, str], tuple[dict[str, Any], Any]] = {
    ("vanilla", "path"): ({}, "blockwise"),
    ("vanilla", "block_q"): ({"path": "blockwise"}, 32),
    ("vanilla", "block_kv"): ({"path": "blockwise"}, 32),
}
CHANGES |= {
    (name, field): change
    for name in ("autoregressive_decodeattn", "blocksparse")
    for (of, field), change in tuple(CHANGES.items())
    if of == "vanilla"
}
FIELDS = [
    (name, field)
    for name in OperationRegistry.names()
    if OperationRegistry.get(name).__module__.startswith("attnops.") and name not in (*ELSEWHERE, *AS_SPLASH)
    for field in OperationRegistry.get(name).config.model_fields
    if field not in COMMON
]


def _lowered(name: str, config: Any) -> str:
    attend = OperationRegistry.create(name, OperationMetadata(operation_configs={name: config}, tuning="off"))
    x = jax.ShapeDtypeStruct((1, 128, 2, 16), jnp.float32)
    return jax.jit(jax.grad(lambda q: attend(q, q, q).attention_outputs.sum())).lower(x).as_text()


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_a_field_changes_what_is_lowered(name: str, field: str) -> None:
    beside, value = CHANGES[name, field]  # a new field without a line there fails
    assert _lowered(name, beside | {field: value}) != _lowered(name, beside)


def test_every_operation_that_has_fields_is_looked_at() -> None:
    ours = {n for n in OperationRegistry.names() if OperationRegistry.get(n).__module__.startswith("attnops.")}
    without = {n for n in ours if not set(OperationRegistry.get(n).config.model_fields) - COMMON}
    assert {name for name, _ in FIELDS} | set(ELSEWHERE) | set(AS_SPLASH) | without == ours
    assert without == {"sdpa"}


@pytest.mark.parametrize("field", [f for f in SplashConfig.model_fields if f not in COMMON])
@pytest.mark.parametrize("name", AS_SPLASH)
def test_what_is_splash_by_another_name_takes_its_fields_to_the_same_methods(name: str, field: str) -> None:
    operation, splash = OperationRegistry.get(name), OperationRegistry.get("splash")
    assert operation.config.model_fields.keys() == splash.config.model_fields.keys()
    for method in splash.declared_methods():
        assert getattr(operation, method) is getattr(splash, method)
    value = {"kernel": "jax", "residual_checkpoint_name": "kept", "vmem_limit_bytes": 1 << 24, "heads_per_tile": 2}.get(
        field
    )
    if value is None:
        value = "seq_minor" if field.endswith("layout") else 256 if field.startswith("block_") else True
    mesh = AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device("TPU v5 lite", 1, "tpu"))
    x = jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.bfloat16)

    def resolved(of: str) -> dict[str, Any]:
        metadata = OperationMetadata(mesh=mesh, operation_configs={of: {field: value}}, tuning="off")
        found = OperationRegistry.create(of, metadata).plan(x, x, x).config.every_field()
        return {name: item for name, item in found.items() if name != "operation"}

    assert resolved(name) == resolved("splash")
    assert resolved(name)[field] == value
    # What is declared for the kernel's operation counts, alone and beside fields of its own.
    metadata = OperationMetadata(mesh=mesh, operation_configs={"splash": {field: value}, name: {}}, tuning="off")
    found = OperationRegistry.create(name, metadata).plan(x, x, x)
    assert {n: v for n, v in found.config.every_field().items() if n != "operation"} == resolved("splash")
    assert not any("is not read" in note for note in found.notes)


@pytest.mark.parametrize("name", AS_SPLASH)
def test_configs_of_a_strategy_and_of_its_kernel_are_one_or_refused(name: str) -> None:
    x = jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.float32)

    def plan(own: dict[str, Any], kernels: dict[str, Any]) -> Any:
        metadata = OperationMetadata(
            operation_configs={name: own, "splash": {"interpret": True, **kernels}}, tuning="off"
        )
        return OperationRegistry.create(name, metadata).plan(x, x, x)

    config = plan({"block_q": 128, "block_kv": 256}, {"block_kv": 256, "block_kv_compute": 128}).config
    assert (config.operation, config.block_q, config.block_kv, config.block_kv_compute) == (name, 128, 256, 128)
    with pytest.raises(ConfigError, match=f"'{name}' has block_q=128 and 'splash', whose kernel it runs, block_q=256"):
        plan({"block_q": 128}, {"block_q": 256})
    with pytest.raises(ConfigError, match=r"together: .*block_kv=128 is not a multiple of block_kv_compute=256"):
        plan({"block_kv": 128}, {"block_kv_compute": 256})


@pytest.mark.parametrize(
    ("operation", "configs", "notes"),
    [
        ("splash", {"vanilla": {"path": "plain"}}, ["operation_configs['vanilla'] (path) is not read by splash"]),
        ("vanilla", {"ring": {"block_q": 128}}, ["operation_configs['ring'] (block_q) is not read by vanilla"]),
        ("ring", {"ulysses": {"block_q": 128}}, ["operation_configs['ulysses'] (block_q) is not read by ring"]),
        ("ring", {"splash": {"block_q": 128}}, ["forward_native doesn't read the config's block_q"]),
        ("vanilla", {"sdpa": {}, "splash": {}}, []),  # nothing is declared there
    ],
)
def test_a_config_that_nobody_reads_is_named(operation: str, configs: dict[str, Any], notes: list[str]) -> None:
    x = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)
    plan = OperationRegistry.create(operation, OperationMetadata(operation_configs=configs, tuning="off")).plan(x, x, x)
    assert [note for note in plan.notes if "read" in note] == notes


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("vanilla", {"path": "blockwise", "block_kv": 32}),
        ("splash", {"interpret": True, "block_q": 128, "block_kv": None, "fuse_reciprocal": False}),
    ],
)
def test_a_dict_an_object_and_a_config_are_the_same(name: str, fields: dict[str, Any]) -> None:
    config = OperationRegistry.get(name).config
    ways = (fields, SimpleNamespace(**fields), config(**fields))
    assert len({_lowered(name, way) for way in ways}) == 1
    assert len({OperationMetadata(operation_configs={name: way}).to_json() for way in ways}) == 1


def test_none_asks_for_the_kernels_default_and_unset_lets_attnops_choose() -> None:
    def block(config: dict[str, Any]) -> int:
        metadata = OperationMetadata(operation_configs={"splash": {"interpret": True, **config}}, tuning="off")
        x = jax.ShapeDtypeStruct((1, 512, 2, 16), jnp.float32)
        return OperationRegistry.create("splash", metadata).plan(x, x, x, causal=False).config.block_kv

    assert (block({}), block({"block_kv": None})) == (512, 128)
    assert _lowered("splash", {"interpret": True}) == _lowered("splash", SimpleNamespace(interpret=True))
    nulled = {"interpret": True, "vmem_limit_bytes": None, "block_kv": None}
    assert OperationMetadata(operation_configs={"splash": nulled}) != OperationMetadata(
        operation_configs={"splash": {"interpret": True}}
    )
