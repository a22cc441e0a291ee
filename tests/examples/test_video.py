"""The video model: its padding counts for nothing, its text for something."""

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

from attnops.verify import reference_attention

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "video"


@pytest.fixture
def video(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("video")


def test_patches_are_put_back_where_they_were(video: ModuleType) -> None:
    clips = jax.random.normal(jax.random.key(0), (2, video.FRAMES, video.SIDE, video.SIDE))
    model = sys.modules["video_model"]
    patches = model.to_patches(clips)
    assert patches.shape == (2, 432, 4)
    np.testing.assert_array_equal(model.from_patches(patches), clips)
    np.testing.assert_array_equal(patches[:, 0], clips[:, 0, :2, :2].reshape(2, 4))


def test_letters_beyond_a_texts_length_count_for_nothing(video: ModuleType) -> None:
    model, _, of_text = video.build()
    run = nnx.jit(lambda model, *call: model(*call))
    clips = jax.random.normal(jax.random.key(0), (2, video.FRAMES, video.SIDE, video.SIDE))
    text, lengths = video.written(["a one moving up", "a seven moving right"])
    other = np.where(np.arange(text.shape[1]) < lengths[:, None], text, 90)
    assert (text != other).any()
    out, same, changed = (
        np.asarray(run(model, clips, jnp.array([0.3, 0.9]), jnp.asarray(x), jnp.asarray(lengths)))
        for x in (text, other, text[::-1].copy())
    )
    np.testing.assert_array_equal(out, same)
    assert np.abs(out - changed).max() > 1e-4
    (plan,) = of_text.plans
    assert (plan.problem.q_len, plan.problem.kv_len) == (432, 32)


def test_both_attentions_are_the_references(video: ModuleType) -> None:
    _, of_video, of_text = video.build()
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 432, 2, 32)).astype(np.float32) for _ in range(3))
    np.testing.assert_allclose(
        of_video(q, k, v).attention_outputs,
        reference_attention(q, k, v, scale=32**-0.5, mask=None).output,
        atol=1e-5,
    )
    lengths = np.array([3, 20], np.int32)
    k, v = k[:, :32], v[:, :32]
    seen = (np.arange(32) < lengths[:, None])[:, None, None, :]
    np.testing.assert_allclose(
        of_text(q, k, v, kv_lengths=lengths).attention_outputs,
        reference_attention(q, k, v, scale=32**-0.5, mask=seen).output,
        atol=1e-5,
    )


def test_noise_and_velocity_lie_on_a_straight_line(video: ModuleType) -> None:
    clips, _, _ = video.videos(np.ones((3, 8, 8), np.float32) * 16, np.array([1, 2, 3]), 4, 0)
    assert clips.min() == -1
    assert clips.max() == 1
    noisy, level, velocity = video.noised(jnp.asarray(clips), jax.random.key(1))
    np.testing.assert_allclose(noisy - level[:, None, None, None] * velocity, clips, atol=1e-5)


@pytest.mark.slow
@pytest.mark.default_promotion("optax multiplies floats and integers")
def test_training_lowers_the_loss(video: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(video, "BATCH", 4)
    model, _, _ = video.build()
    before, of_pixels = video.errors(model, 0.5)
    losses = video.train(model, 12)
    after, again = video.errors(model, 0.5)
    assert losses[-1][1] < losses[0][1]
    assert after < before
    assert of_pixels == again < np.var(video.held_out(0.5)[0])


@pytest.mark.slow
@pytest.mark.default_promotion("optax multiplies floats and integers")
def test_the_whole_example(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    picture = tmp_path / "made.png"
    command = [sys.executable, str(FOLDER / "main.py"), "--picture", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
