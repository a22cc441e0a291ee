"""The decoder that chooses blocks: what it chooses, that nothing later is looked at, and that tiles change no gradient."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")


@pytest.fixture
def blocksparse(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("blocksparse")


def test_the_best_blocks_before_a_row_are_chosen(blocksparse: ModuleType) -> None:
    choose = __import__("choose_blocks").choose
    random = np.random.default_rng(0)
    query, key = (random.standard_normal((2, 48, heads, 8)).astype(np.float32) for heads in (4, 2))
    chosen = np.asarray(choose(jnp.asarray(query), jnp.asarray(key), 8, 2))
    assert chosen.shape == (2, 2, 6, 3)
    for batch, head, row in np.ndindex(2, 2, 6):
        first = query[batch, 8 * row, 2 * head : 2 * head + 2].mean(0)
        scores = [float(first @ key[batch, 8 * j : 8 * j + 8, head].mean(0)) for j in range(row)]
        best = sorted(range(row), key=lambda j, s=scores: -s[j])[:2]
        assert chosen[batch, head, row].tolist() == [row, *best, *[-1] * (2 - len(best))]


def test_a_later_token_changes_nothing_before_it(blocksparse: ModuleType) -> None:
    model = blocksparse.build(50, chosen=True)
    tokens = np.random.default_rng(0).integers(0, 50, (1, 128)).astype(np.int32)
    changed = tokens.copy()
    changed[:, 70:] = 7
    first, second = (jax.jit(lambda m, x: m(x)[0], static_argnums=0)(model, x) for x in (tokens, changed))
    np.testing.assert_allclose(first[:, :70], second[:, :70], atol=1e-5)
    assert float(jnp.abs(first[:, 70:] - second[:, 70:]).max()) > 1e-2


@pytest.mark.slow
@pytest.mark.default_promotion("optax multiplies floats and integers")
def test_it_learns_as_the_dense_one_does(blocksparse: ModuleType) -> None:
    text = blocksparse.corpus()
    alphabet = blocksparse.Alphabet(text)
    tokens = alphabet.encode(text)
    held_out = jnp.asarray(next(blocksparse.batches(tokens, 4, blocksparse.LENGTH, 1)))
    model = blocksparse.build(len(alphabet.symbols), chosen=True)
    assert blocksparse.train(model, tokens, held_out, 40) < 0.85 * blocksparse.unigram_entropy(tokens)
    assert blocksparse.disagreement(tokens, len(alphabet.symbols)) < 1e-4
