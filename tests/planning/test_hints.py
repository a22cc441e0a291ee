"""The words that newcomers bring from elsewhere: each error names what it is called here."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import attnops
from attnops import Attention, AttnOpsError, Causal, ConfigError, Declaration, InputError, OperationMetadata
from attnops.verify.targets import target_of


def told(kind: type[Exception], run: Any) -> str:
    with pytest.raises(kind) as error:
        run()
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("flash", "flash_attn2"),
        ("flash_attention", "flash_attn2"),
        ("flash_attn", "flash_attn2"),
        ("ring_attention", "ring"),
        ("dot_product_attention", "vanilla"),
        ("paged_attention", "paged"),
    ],
)
def test_operations(name: str, here: str) -> None:
    assert here in attnops.OperationRegistry.names()
    assert told(AttnOpsError, lambda: Attention(name)).endswith(f"Did you mean {here!r}?")


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("v5e", "Did you mean 'v5e:2x2'?"),
        ("v5e-8", "Did you mean 'v5e:2x4'?"),
        ("v6e:16", "Did you mean 'v6e:4x4'?"),
        ("v5e-12", "A name that works is 'v5e:2x2'."),
        ("v5p-8", "A name that works is 'v5p:2x2x1'."),
        ("h100x8", "Did you mean 'h100:8'?"),
        ("a100-2", "Did you mean 'a100:2'?"),
        ("v6", "Did you mean 'v6e'?"),
    ],
)
def test_targets(name: str, here: str) -> None:
    text = told(AttnOpsError, lambda: target_of(name))
    assert text.endswith(here)
    if "'" in here and here != "Did you mean 'v6e'?":
        target_of(here.split("'")[1])


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("query_length", "Did you mean 'q_len'?"),
        ("seq_len", "Did you mean 'q_len'?"),
        ("num_heads", "Did you mean 'q_heads'?"),
        ("num_key_value_heads", "Did you mean 'kv_heads'?"),
        ("mesh", "mesh is a field of metadata."),
    ],
)
def test_fields_of_a_call(name: str, here: str) -> None:
    text = told(AttnOpsError, lambda: Declaration.from_dict({"operation": "vanilla", "call": {name: 8}}))
    assert text.endswith(here)


def test_keywords_of_attention() -> None:
    assert "Did you mean 'strict'?" in told(TypeError, lambda: Attention("splash", strict_sharding=True))
    text = told(TypeError, lambda: Attention("splash", zzzz=1))
    for whose, name in (
        ("of the call", "sliding_window"),
        ("of the metadata", "mesh"),
        ("operation's config", "block_q"),
    ):
        group = next(part for part in text.split("; ") if whose in part)
        assert name in group


def test_masks() -> None:
    assert "pass an object: Causal(...)" in told(AttnOpsError, lambda: Attention("splash", mask=Causal))
    array = np.ones((1, 1, 8, 8), bool)
    assert "pass it to the call, as mask=array" in told(AttnOpsError, lambda: Attention("splash", mask=array))
    x = jnp.ones((1, 8, 2, 4))
    Attention("vanilla")(x, x, x, mask=array, causal=True)


@pytest.mark.parametrize("short", ["bf16", "fp16", "f32"])
def test_dtypes(short: str) -> None:
    text = told(AttnOpsError, lambda: OperationMetadata(runtime_dtype=short))
    OperationMetadata(runtime_dtype=text.rsplit("'", 2)[1])


def test_the_other_layout() -> None:
    query, key = jnp.ones((2, 8, 1, 4)), jnp.ones((2, 4, 9, 4))
    attend = Attention("vanilla")
    text = told(InputError, lambda: attend(query, key, key))
    assert text.endswith("Did you mean layout='bhtd'? This call's is 'bthd'.")
    assert attend(query, key, key, layout="bhtd").attention_outputs.shape == (2, 8, 1, 4)
    odd = jnp.ones((2, 9, 6, 4)), jnp.ones((2, 9, 4, 4))
    assert "layout=" not in told(InputError, lambda: attend(odd[0], odd[1], odd[1]))


def test_a_short_repr() -> None:
    attend = Attention("splash", mask=Causal(), partition_axis={"data_parallel_axis": "data", "head_axis": None})
    assert '"partition_axis": {"data_parallel_axis": "data", "head_axis": null}' in repr(attend)
    again = Attention(Declaration.from_json(repr(attend).removeprefix("Attention(").removesuffix(")")))
    assert again.declared() == attend.declared()


def test_dir_has_public_names_only() -> None:
    assert {name for name in dir(attnops) if not name.startswith("__")} >= set(attnops.__all__)
    assert not {"Any", "TYPE_CHECKING", "importlib", "annotations"} & set(dir(attnops))


@pytest.mark.parametrize("mesh", [{"shape": {"fsdp": 2}}, {"fsdp": "2"}, {"fsdp": 0}, {"fsdp": True}, {"fsdp": [2]}])
def test_a_mesh_of_other_words_is_shown_how_sizes_are_given(mesh: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"the size of axis '(shape|fsdp)' is .*; wanted a positive integer, as in \{"
    ):
        OperationMetadata(mesh=mesh)
    with pytest.raises(ConfigError, match=r"or the size of each axis, as in"):
        OperationMetadata(mesh="fsdp=2,tp=4")
