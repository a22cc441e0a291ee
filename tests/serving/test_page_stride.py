"""The kernels on every n-th page of each sequence: the parts, joined in float64, are the whole against the reference."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import paged_batches as batches
import paged_kernel_runs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batches import PagedCase

from attnops import InputError
from attnops.errors import InputTypeError
from attnops.operators.kernels.pages.paged import paged_attention
from attnops.operators.kernels.pages.tpu.work_items import OwnPages

CASES = (
    PagedCase("mixed", sinks=True),
    PagedCase("decode", window=(9, 0), cap=5.0),
    PagedCase("speculate", dtype="bfloat16", window=(6, 1), causal=False),
    PagedCase("prefill", window=(11, None), quantised="int8", scale="token_head"),
    PagedCase("mixed", heads=(4, 4), causal=False, sizes=None),
    PagedCase("decode", sizes=(1, 5, 4), quantised="float8_e4m3fn", scale="head", sinks=True),
)
QUICK = CASES[:3]


# In the TPU kernels, which are interpreted.
KERNEL: tuple[tuple[str, PagedCase], ...] = (
    ("latent", PagedCase("mixed", (16, 1), (40, 32), latent=True, window=(9, 0), cap=3.0, sinks=True)),
    ("heads", PagedCase("speculate", (9, 3), tree=8, sinks=True)),
    ("split", PagedCase("mixed", chunk=10, quantised="int8", scale="token_head")),
    ("joined", PagedCase("prefill", spans=True, prefix=9, window=(3, 0))),
    ("packed", PagedCase("mixed", (16, 2), window=(4, 3), causal=False, dtype="bfloat16")),
    ("latent", PagedCase("decode", (5, 1), (40, 32), latent=True, quantised="int8", scale="token_head", rope="bfloat16")),
    ("interleaved", PagedCase("mixed", (8, 4), (128, 128), tree=35, window=(3, 0))),
    ("split", PagedCase("decode", (16, 2), dtype="bfloat16", window=(9, 0))),
    ("heads", PagedCase("mixed", page=3, chunk=7, causal=False)),
    ("latent", PagedCase("speculate", (32, 1), (576, 512), latent=True, spans=True, chunk=18)),
)  # fmt: skip


def joined(
    case: PagedCase, arrays: dict[str, np.ndarray], n: int, of_part: Any = batches.run
) -> tuple[np.ndarray, np.ndarray]:
    """Each shard with its own columns of the table, padded to one width; sinks count with the last."""
    outputs, lses = [], []
    width = -(-arrays["page_table"].shape[1] // n)
    for shard in range(n):
        own = arrays["page_table"][:, shard::n]
        own = np.pad(own, ((0, 0), (0, width - own.shape[1])), constant_values=len(arrays["key_pages"]))
        part = arrays | {"page_table": own, "page_shard": np.asarray(shard, np.int32)}
        if "sinks" in part and shard < n - 1:
            part["sinks"] = np.full_like(part["sinks"], -np.inf)
        output, lse = of_part(case, part, page_stride=n)
        assert (output[np.isneginf(lse)] == 0).all()
        outputs.append(output)
        lses.append(lse)
    lse = np.logaddexp.reduce(lses)
    with np.errstate(invalid="ignore"):
        shares = np.where(np.isneginf(lses), 0, np.exp(lses - lse))
    return (np.stack(outputs) * shares[..., None]).sum(0), lse


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case", [pytest.param(x, id=x.name, marks=[] if x in QUICK else [pytest.mark.slow]) for x in CASES]
)
def test_the_parts_are_the_whole(case: PagedCase, n: int) -> None:
    arrays = batches.make(case)
    batches.agree(case, joined(case, arrays, n), batches.expect(case, arrays))


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("layout", "case"),
    [
        pytest.param(layout, case, id=f"{layout}-{case.name}", marks=[pytest.mark.slow] * (i > 3))
        for i, (layout, case) in enumerate(KERNEL)
    ],
)
def test_the_parts_are_the_whole_in_the_tpu_kernels(layout: str, case: PagedCase, n: int) -> None:
    arrays = batches.make(case)
    run = lambda *args, **more: paged_kernel_runs.run(*args, layout, **more)  # noqa: E731
    batches.agree(case, joined(case, arrays, n, run), batches.expect(case, arrays))


@pytest.mark.parametrize("wrong", ["begin", "before"])
def test_a_wrong_place_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages counted as if there were no others in between, and a page that isn't read."""
    right = OwnPages.before
    changed = {
        "begin": lambda self, at: at * np.int32(self.geometry.page),
        "before": lambda self, number: jnp.maximum(right(self, number) - 1, 0),
    }
    monkeypatch.setattr(OwnPages, wrong, changed[wrong])
    case = PagedCase("mixed", (16, 1), (40, 32), latent=True)
    arrays = batches.make(case)
    run = lambda *args, **more: paged_kernel_runs.run(*args, "latent", pages_per_block=1, **more)  # noqa: E731
    with pytest.raises(AssertionError):
        batches.agree(case, joined(case, arrays, 2, run), batches.expect(case, arrays))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 39)), min_size=1, max_size=5),
    st.sampled_from([None, (0, 0), (7, 0), (8, 3), (None, 2)]),
    st.booleans(),
    st.sampled_from([2, 3, 5]),
)
def test_any_batch(lens: list[tuple[int, int]], window: Any, causal: bool, n: int) -> None:
    case = PagedCase("mixed", window=window, causal=causal)
    arrays = batches.make(case, tuple((q, q + more) for q, more in lens), width=6)
    batches.agree(case, joined(case, arrays, n), batches.expect(case, arrays))


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"page_stride": 0}, InputError, "page_stride=0; wanted a whole number from 1 on"),
        ({"page_shard": 1}, InputError, "page_shard=1; wanted 0 to 0, below the page_stride"),
        ({"page_stride": 2, "page_shard": 2}, InputError, "page_shard=2; wanted 0 to 1"),
        ({"page_stride": 2, "page_shard": np.float32(1)}, InputTypeError, "page_shard is float32"),
    ],
)
def test_what_has_no_meaning_is_refused(given: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        paged_attention(**batches.make(CASES[1]), softmax_scale=1.0, **given)
