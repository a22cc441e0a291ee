"""The vision transformer: a plain nnx model whose attention is what a JSON file says."""

from __future__ import annotations

import json
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

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "vit"


@pytest.fixture
def vit(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("vit")


def _logits(vit: ModuleType, attend: object) -> jax.Array:
    images = jax.random.normal(jax.random.key(0), (2, vit.SIDE, vit.SIDE))
    return nnx.jit(lambda model, x: model(x))(vit.VisionTransformer(attend, nnx.Rngs(0)), images)


def test_the_declared_attention_is_flaxs_own_in_numbers(vit: ModuleType) -> None:
    declared = vit.attention_fn(FOLDER / "attention.json")
    np.testing.assert_allclose(_logits(vit, declared), _logits(vit, nnx.dot_product_attention), atol=1e-5)
    (plan,) = declared.attention.plans
    assert (plan.problem.q_len, plan.problem.mask.describe()) == (197, "full")


def test_editing_the_file_alone_changes_what_runs(vit: ModuleType, tmp_path: Path) -> None:
    file = json.loads((FOLDER / "attention.json").read_text())
    edited = tmp_path / "attention.json"
    plain = _logits(vit, vit.attention_fn(FOLDER / "attention.json"))
    edited.write_text(
        json.dumps(file | {"operation": "vanilla", "metadata": {"operation_configs": {"vanilla": {"path": "plain"}}}})
    )
    other = vit.attention_fn(edited)
    np.testing.assert_allclose(_logits(vit, other), plain, atol=1e-5)
    assert other.attention.plans[0].implementation == "vanilla.forward_native"
    assert other.attention.plans[0].route.name == "plain"
    edited.write_text(json.dumps(file | {"call": file["call"] | {"sliding_window": [8, 8]}}))
    windowed = vit.attention_fn(edited)
    assert float(jnp.abs(_logits(vit, windowed) - plain).max()) > 1e-3
    assert "window" in windowed.attention.plans[0].problem.mask.describe()


def test_disabled_is_flaxs_own(vit: ModuleType) -> None:
    file = json.loads((FOLDER / "attention.json").read_text())
    assert vit.attention_fn(file | {"enabled": False}) is nnx.dot_product_attention


@pytest.mark.slow
@pytest.mark.default_promotion("optax multiplies floats and integers")
def test_some_steps_lower_the_loss(vit: ModuleType) -> None:
    pytest.importorskip("sklearn")
    model = vit.VisionTransformer(vit.attention_fn(FOLDER / "attention.json"), nnx.Rngs(0))
    losses, predictions = vit.train(model, 16)
    assert losses[-1][1] < losses[0][1]
    assert predictions.shape == vit.data()[3].shape


@pytest.mark.slow
@pytest.mark.default_promotion("optax multiplies floats and integers")
def test_the_whole_example_is_right_on_nineteen_of_twenty(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    picture = tmp_path / "digits.png"
    command = [sys.executable, str(FOLDER / "main.py"), "--picture", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
