"""What a call returns to a type checker. tools/check_types.py runs mypy and pyright on this file; nothing runs it."""

from typing import assert_type

import jax
import jax.numpy as jnp

from attnops import Attention, Causal, Plan, dot_product_attention
from attnops.adapters.flax_nnx import attention_fn

attend = Attention("splash", mask=Causal(), block_q=256, runtime_dtype="bfloat16")
x = jnp.ones((1, 8, 2, 16))

plain = attend(x, x, x)
assert_type(plain.attention_outputs, jax.Array)
assert_type(plain.plan, Plan)
assert_type(plain.lse, jax.Array | None)

with_lse = attend(x, x, x, return_lse=True)
assert_type(with_lse.lse, jax.Array)
assert_type(with_lse.attention_weights, jax.Array | None)
assert_type(attend(x, x, x, return_weights=True).attention_weights, jax.Array)

both = attend(x, x, x, return_weights=True, return_lse=True)
assert_type(both.attention_weights, jax.Array)
assert_type(both.lse, jax.Array)

assert_type(attention_fn("attention.json").attention, Attention)
assert_type(attend.plan(x, x, x), Plan)
assert_type(Attention("attention.json", mesh=None).enabled, bool)

assert_type(dot_product_attention(x, x, x), jax.Array)
assert_type(dot_product_attention(x, x, x, return_residual=True), tuple[jax.Array, jax.Array])
