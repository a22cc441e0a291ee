"""Calls without promotion of ranks (jax_numpy_rank_promotion="raise") and dtypes ("strict"): tests/conftest.py sets both."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Attention, RefusedError
from attnops.operators.kernels.default_promotion import default_promotion

KEYS = jax.random.split(jax.random.key(0), 3)
Q, K, V = (jax.random.normal(key, (2, 9, heads, 8)) for key, heads in zip(KEYS, (4, 2, 2), strict=True))
CALLS = {
    "causal": {},
    "window": {"sliding_window": (2, 0)},
    "lengths": {"kv_lengths": np.array([3, 4])},
    "small lengths": {"kv_lengths": np.array([3, 4], np.int8)},
    "starts": {"kv_starts": np.array([0, 1])},
    "segments": {"q_segment_ids": np.zeros((2, 9), np.uint8)},
    "offset": {"query_offset": jnp.array([1, 2])},
    "one offset": {"query_offset": jnp.array(1)},
    "array": {"mask": jnp.ones((2, 1, 1, 9), bool)},
    "sinks": {"softmax_aux": jnp.zeros(4)},
    "several sinks": {"softmax_aux": jnp.zeros((2, 3), jnp.bfloat16)},
    "bias": {"bias": jnp.zeros((1, 4, 9, 9), jnp.bfloat16)},
    "dropout": {"dropout_prob": 0.1, "dropout_rng": jax.random.key(0), "deterministic": False},
}
IMPLEMENTATIONS = {
    "plain": ("vanilla", {"path": "plain"}),
    "blockwise": ("vanilla", {"path": "blockwise"}),
    "decode": ("vanilla", {"path": "decode"}),
    "splash": ("splash", {"interpret": True}),
    "flash_attn2": ("flash_attn2", {"interpret": True}),
    "sdpa": ("sdpa", {}),
}


def test_all_tests_run_so() -> None:
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.zeros((2, 3)) + jnp.zeros(3)
    with pytest.raises(jax.dtypes.TypePromotionError):
        jnp.zeros(3) + jnp.zeros(3, jnp.int32)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tracing_promotes_nothing(implementation: str, call: str) -> None:
    """Both passes can be traced; that the numbers are right under these rules, all other tests say."""
    operation, config = IMPLEMENTATIONS[implementation]
    attend = Attention(operation, causal=True, fallback="allow", **config)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v, **CALLS[call]).attention_outputs.astype(jnp.float32).sum()

    for dtype in (jnp.float32, jnp.bfloat16):
        arrays = [x.astype(dtype) for x in (Q, K, V)]
        try:
            gradients = jax.eval_shape(jax.grad(loss, (0, 1, 2)), *arrays)
        except RefusedError:
            assert operation == "sdpa"
            return
        assert [x.dtype for x in gradients] == [dtype] * 3


def test_other_libraries_run_by_their_own_rules() -> None:
    with default_promotion():
        assert (jnp.zeros((2, 3)) + jnp.zeros(3, jnp.int32)).dtype == jnp.float32
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.zeros((2, 3)) + jnp.zeros(3)
