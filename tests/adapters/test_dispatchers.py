"""What wrapping a dispatcher takes: logical axes, (out, max, sum), block sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import BlockSizes, QKVLayout

from attnops import Attention, ConfigError, InputError, SplashConfig
from attnops.adapters.dispatch import max_and_sum, partition_axis_from_rules, splash_config_from
from attnops.errors import InputTypeError
from attnops.verify import reference_attention

RULES = (
    ("batch", ("data", "fsdp")),
    ("length", "sequence"),
    ("heads", "tensor"),
    ("kv", None),
    ("batch", ("data", "fsdp")),
)
NAMES = {"batch_axis": "batch", "query_sequence_axis": "length", "head_axis": "heads", "attention_dim_axis": "kv"}


def test_rules_become_the_specs_of_a_call() -> None:
    for rules in (RULES, dict(RULES), [list(rule) for rule in RULES]):
        axis = partition_axis_from_rules(rules, NAMES)
        mesh = jax.make_mesh((2, 2, 2), ("data", "sequence", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
        attention = Attention("vanilla", partition_axis=axis, mesh=mesh)
        x, step = (jax.ShapeDtypeStruct((4, n, 4, 8), np.float32) for n in (8, 1))
        named = attention.plan(x, x, x).named_shardings()
        assert tuple(named["query"].spec) == ("data", "sequence", "tensor", None)
        assert tuple(named["key"].spec) == ("data", None, None, None)  # nobody named what splits keys
        assert tuple(attention.plan(step, x, x).named_shardings()["query"].spec) == ("data", None, "tensor", None)


def test_rules_of_other_names_may_be_many() -> None:
    axis = partition_axis_from_rules([*RULES, ("vocab", ["tensor", "data"]), ("vocab", "data"), ("none", [])], NAMES)
    assert axis == partition_axis_from_rules(RULES, NAMES)


def test_fields_of_decoding() -> None:
    names = NAMES | {"decode_head_axis": "length", "decode_batch_axis": None, "kv_head_axis": "heads"}
    axis = partition_axis_from_rules(RULES, names)
    found = (axis.head_axis, axis.decode_head_axis, axis.decode_batch_axis, axis.decode_kv_head_axis)
    assert found == (("tensor",), ("sequence",), None, ("tensor",))


@pytest.mark.parametrize(
    ("rules", "names", "match"),
    [
        (RULES, {"head_axes": "heads"}, "'head_axes' isn't a PartitionAxis field.*Did you mean 'head_axis'"),
        (RULES, {"head_axis": "head"}, "head_axis='head', but no rule has that name.*Did you mean 'heads'"),
        ((("heads", "a"), ("heads", "b")), {"head_axis": "heads"}, "head_axis='heads' has 2 rules"),
        ((("heads", 3),), {}, r"rule \('heads', 3\); wanted \(logical name"),
        (("heads",), {}, "rule 'heads'; wanted"),
    ],
)
def test_rules_that_are_refused(rules: Any, names: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        partition_axis_from_rules(rules, names)


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_parts_joined_are_the_whole(layout: str) -> None:
    """Joined as dispatchers do it; the second part of the keys is hidden from some rows, both from one."""
    query, key, value = (np.random.default_rng(n).standard_normal((2, 6, 4, 8)).astype(np.float32) for n in range(3))
    mask = np.tril(np.ones((6, 6), bool))
    mask[2] = False
    swap = (lambda x: x) if layout == "bthd" else (lambda x: x.swapaxes(1, 2))
    attend = Attention("vanilla", causal=False, return_lse=True, layout=layout)

    def joined(query: Any) -> Any:
        parts = []
        for keys in (slice(0, 3), slice(3, 6)):
            out, _, lse = attend(swap(query), swap(key[:, keys]), swap(value[:, keys]), mask=mask[None, None, :, keys])
            parts.append((out, *max_and_sum(lse, layout)))
        greatest = jnp.maximum(parts[0][1], parts[1][1])
        total = sum(jnp.exp(most - greatest) * one for _, most, one in parts)
        return sum(jnp.exp(most - greatest) * out for out, most, _ in parts) / total

    wanted = reference_attention(query, key, value, scale=8**-0.5, mask=mask).output
    np.testing.assert_allclose(swap(joined(query)), wanted, atol=3e-6)
    whole = Attention("vanilla", causal=False, layout=layout)
    got = jax.grad(lambda x: (joined(x) ** 2).sum())(query)
    same = jax.grad(
        lambda x: (whole(swap(x), swap(key), swap(value), mask=mask[None, None]).attention_outputs ** 2).sum()
    )(query)
    np.testing.assert_allclose(got, same, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_row_without_keys_is_finite(dtype: Any) -> None:
    most, one = max_and_sum(jnp.full((1, 2, 3), -jnp.inf, dtype))
    assert (most.shape, most.dtype, one.shape) == ((1, 3, 2, 1), dtype, (1, 3, 2, 1))
    assert bool(jnp.isfinite(most).all())


def test_what_is_no_lse() -> None:
    for bad in (None, jnp.zeros((2, 3)), jnp.zeros((1, 2, 3), jnp.int32)):
        with pytest.raises(InputTypeError, match=r"lse is .*; wanted floats \[batch, heads, q\]"):
            max_and_sum(bad)
    with pytest.raises(InputError, match="layout='thd'; wanted 'bthd' or 'bhtd'"):
        max_and_sum(jnp.zeros((1, 2, 3)), "thd")


def test_block_sizes_of_others() -> None:
    wanted = SplashConfig(
        block_q=256, block_kv=512, block_kv_compute=128, block_q_dkv=256, block_kv_dkv=512, block_kv_dkv_compute=256,
        block_q_dq=None, block_kv_dq=None, use_fused_bwd_kernel=True, q_layout="head_dim_minor", k_layout="seq_minor",
        v_layout="head_dim_minor",
    )  # fmt: skip
    jaxs = BlockSizes(
        block_q=256, block_kv=512, block_kv_compute=128, block_q_dkv=256, block_kv_dkv=512, block_kv_dkv_compute=256,
        use_fused_bwd_kernel=True, k_layout=QKVLayout.SEQ_MINOR,
    )  # fmt: skip
    held = {name: getattr(jaxs, name) for name in jaxs.__dataclass_fields__}
    config = SimpleNamespace(**{f"sa_{name}": value for name, value in held.items()}, head_dim=128, steps=3)
    for blocks, prefix in ((jaxs, ""), (held, ""), (config, "sa_"), (vars(config), "sa_")):
        assert splash_config_from(blocks, prefix=prefix) == wanted
    named = vars(config) | {"sa_k_layout": "SEQ_MINOR", "sa_q_layout": "HEAD_DIM_MINOR", "sa_megacore": False}
    assert splash_config_from(named, prefix="sa_", ignore=["megacore"]) == wanted
    assert splash_config_from(jaxs, kernel="jax").kernel == "jax"
    assert splash_config_from(wanted, interpret=True) == wanted.with_fields({"interpret": True})


@pytest.mark.parametrize(
    ("blocks", "call", "match"),
    [
        ({"block_k": 128}, {}, "unknown field 'block_k'.*block_kv"),
        (SimpleNamespace(block_q=128, steps=3), {}, "unknown field 'steps'"),
        ({"block_q": 128}, {"prefix": "sa_"}, "no name begins with 'sa_'; got block_q"),
        ({"sa_block_z": 128}, {"prefix": "sa_"}, "unknown field 'block_z'"),
        ({"block_q": 100}, {}, "block_q=100 is not a multiple of 128"),
        ({"block_q": 128}, {"ignore": ["megacore"]}, "ignore='megacore', which isn't among block_q; remove it"),
        ({"block_q": 128}, {"ignore": ["block_q"]}, "ignore='block_q', which is a field of SplashConfig"),
        ({"block_q": 128}, {"block_q": 256}, "block_q: specified in the block sizes and as fields"),
    ],
)
def test_block_sizes_that_are_refused(blocks: Any, call: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        splash_config_from(blocks, **call)
