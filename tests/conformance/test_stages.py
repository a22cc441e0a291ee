"""The native path with long keys: those of one group of kv heads lie ready at a time, where short ones do together."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from attnops.operators.kernels import blockwise

from . import cases, harness

# As many of each as there are ways in and out of a stage: layouts, half precision, heads in groups, gradients of their own.
STAGED = [
    ("gqa", "bthd", "float32"),
    ("mqa", "bhtd", "float32"),
    ("segment_ids", "bhtd", "bfloat16"),
    ("causal_window", "bthd", "bfloat16"),
    ("kv_lengths", "bthd", "float32"),
    ("sinks_per_kv_head", "bthd", "float32"),
    ("value_dim", "bhtd", "float32"),
    ("bias_broadcast", "bthd", "float32"),
    ("cross", "thd", "float16"),
    ("int8_kv", "bhtd", "float32"),
]


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is traced is kept by the call, of which the limit is no part."""
    jax.clear_caches()
    monkeypatch.setattr(blockwise, "_STAGED_TOGETHER", 0)
    yield
    jax.clear_caches()


@pytest.mark.parametrize(("name", "layout", "dtype"), STAGED)
def test_groups_one_by_one(name: str, layout: str, dtype: str) -> None:
    case, implementation = cases.build(name, layout), harness.RUNNABLE["vanilla.forward_native blockwise"]
    tensors = harness.draw(case, dtype)
    got = harness.run(implementation.make(dtype), case, tensors, dtype, layout)
    published = implementation.capability.tolerance[dtype]
    harness.agree(got, harness.expect(case, tensors), published.forward, published.backward)
