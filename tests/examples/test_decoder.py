"""The decoder: what comes from the cache is what the whole forward pass gives, and it learns more than letter counts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")
from flax import nnx

from attnops import Attention

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "decoder"


@pytest.fixture
def decoder(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("decoder")


# A prompt of 7 tokens on two devices of sp: repeated work, of which the call warns.
@pytest.mark.filterwarnings("ignore::attnops.ShardingWarning")
def test_the_cache_gives_what_the_whole_forward_pass_gives(decoder: ModuleType) -> None:
    attend = Attention(FOLDER / "attention.json")
    sizes = decoder.Sizes(50, layers=2)
    model = decoder.placed(decoder.Decoder(sizes, attend, nnx.Rngs(0)), attend.operation.metadata.mesh)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 48)), jnp.int32)
    whole, _ = decoder.forward(model, "train", tokens)
    assert float(jnp.abs(whole).max()) > 0.1
    for prompt in (1, 7, 32):
        np.testing.assert_allclose(decoder.decoded_logits(model, tokens, prompt), whole, atol=2e-5)
    assert {plan.problem.mode for plan in attend.plans} == {"__train__", "__prefill__", "__autoregressive__"}
    assert all(plan.problem.devices == 8 for plan in attend.plans)


def test_a_later_token_changes_nothing_before_it(decoder: ModuleType) -> None:
    attend = Attention(FOLDER / "attention.json")
    model = decoder.Decoder(decoder.Sizes(50, layers=2), attend, nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 50, (2, 48)).astype(np.int32)
    changed = tokens.copy()
    changed[:, 30:] = 7
    first, second = (decoder.forward(model, "train", jnp.asarray(x))[0] for x in (tokens, changed))
    np.testing.assert_allclose(first[:, :30], second[:, :30], atol=1e-6)
    assert float(jnp.abs(first[:, 30:] - second[:, 30:]).max()) > 1e-2


def test_parameters_are_laid_out_over_the_mesh(decoder: ModuleType) -> None:
    attend = Attention(FOLDER / "attention.json")
    model = decoder.placed(decoder.Decoder(decoder.Sizes(50), attend, nnx.Rngs(0)), attend.operation.metadata.mesh)
    kernel = model.blocks[0].attention.query.kernel[...]
    assert kernel.sharding.shard_shape(kernel.shape) == (64, 64)  # 128 x 128 over fsdp and tp


@pytest.mark.slow
@pytest.mark.default_promotion("optax multiplies floats and integers")
def test_training_falls_below_what_counting_letters_gives(decoder: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "BATCH", 8)
    attend = Attention(FOLDER / "attention.json")
    text = decoder.corpus()[:60000]
    alphabet = decoder.Alphabet(text)
    tokens = alphabet.encode(text)
    model = decoder.placed(
        decoder.Decoder(decoder.Sizes(len(alphabet.symbols), layers=1), attend, nnx.Rngs(0)),
        attend.operation.metadata.mesh,
    )
    losses = decoder.train(model, tokens[:50000], tokens[50000:], 60, attend.operation.metadata.mesh)
    assert losses["held out"][-1][1] < 0.9 * decoder.unigram_entropy(tokens[50000:])
    assert jax.tree.leaves(nnx.state(model))[0].sharding.device_set == set(jax.devices())


def test_the_entropy_of_letters(decoder: ModuleType) -> None:
    assert decoder.unigram_entropy(np.array([0, 1, 2, 3] * 5)) == pytest.approx(np.log(4))
    assert decoder.unigram_entropy(np.array([5] * 9)) == 0


@pytest.mark.slow
@pytest.mark.default_promotion("optax multiplies floats and integers")
def test_the_whole_example(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "loss.png"
    command = [sys.executable, str(FOLDER / "main.py"), "--picture", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
