"""Dropout: the share that is dropped, the scale of what is kept, and the gradient through the very same mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Full, InputError, OperationMetadata, OperationRegistry
from attnops.verify import reference_attention, reference_gradients
from attnops.verify.closeness import row_error, row_sizes, term_sizes

B, T, H, D, P = 2, 96, 2, 8, 0.3


@pytest.fixture
def tensors() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((B, T, H, D)).astype(np.float32) for _ in range(4)]


def _attend():
    return OperationRegistry.create("vanilla", OperationMetadata(dropout_prob=P))


def _dropped(q: np.ndarray, k: np.ndarray, key: jax.Array) -> np.ndarray:
    """The dropped weights themselves: attention over the identity. [batch, heads, q, kv]."""
    eye = jnp.broadcast_to(jnp.eye(T)[None, :, None], (B, T, H, T))
    out = _attend()(q, k, eye, mask=Full(), dropout_rng=key, deterministic=False)
    return np.asarray(out.attention_outputs).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("key", [jax.random.key(1), jax.random.PRNGKey(1)], ids=["typed", "raw"])
def test_weights_are_zero_or_scaled(tensors: list[np.ndarray], key: jax.Array) -> None:
    q, k, _, _ = tensors
    got = _dropped(q, k, key)
    weights = reference_attention(q, k, k, scale=D**-0.5).weights
    kept = got != 0
    np.testing.assert_allclose(got[kept], (weights / (1 - P))[kept], rtol=1e-4)
    # 36864 draws: six standard deviations are 0.014
    assert abs(kept.mean() - (1 - P)) < 0.015
    assert len(np.unique(kept.reshape(-1, T), axis=0)) == B * H * T  # no two rows share their draws


def test_gradient_goes_through_the_same_draws(tensors: list[np.ndarray]) -> None:
    q, k, v, d_output = tensors
    key = jax.random.key(5)
    keep = _dropped(q, k, key) != 0

    @jax.jit
    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = _attend()(q, k, v, mask=Full(), dropout_rng=key, deterministic=False)
        return (out.attention_outputs * d_output).sum()

    got = jax.grad(loss, (0, 1, 2))(*map(jnp.asarray, (q, k, v)))
    given = {"scale": D**-0.5, "keep": keep, "keep_probability": 1 - P}
    want, terms = (of(q, k, v, d_output, **given) for of in (reference_gradients, term_sizes))
    for gradient, name in zip(got, ("query", "key", "value"), strict=True):
        assert row_error(gradient, want[name], row_sizes(want[name], terms[name])) < 1e-5


def test_other_key_other_draws(tensors: list[np.ndarray]) -> None:
    q, k, _, _ = tensors
    one, two = (_dropped(q, k, jax.random.key(n)) != 0 for n in (1, 2))
    assert 0.3 < (one != two).mean() < 0.5  # 2 * 0.3 * 0.7 = 0.42


def test_deterministic_is_told_not_dropped(tensors: list[np.ndarray]) -> None:
    q, k, v, _ = tensors
    plan = _attend().plan(q, k, v)
    assert any("dropout_prob=0.3 is off: deterministic=True" in note for note in plan.notes)
    assert "dropout" not in plan.problem.features


def test_missing_key(tensors: list[np.ndarray]) -> None:
    q, k, v, _ = tensors
    with pytest.raises(InputError, match=r"requires dropout_rng=jax.random.key"):
        _attend()(q, k, v, deterministic=False)


@pytest.mark.parametrize("probability", [-0.1, 1.0, float("nan")])
def test_impossible_probability(tensors: list[np.ndarray], probability: float) -> None:
    q, k, v, _ = tensors
    with pytest.raises(InputError, match="probability in"):
        _attend()(q, k, v, dropout_prob=probability, dropout_rng=jax.random.key(0), deterministic=False)
