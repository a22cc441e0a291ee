"""The kernel on every n-th page of each sequence: the parts, joined in float64, are the whole against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import paged_batches as batches
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batches import PagedCase

from attnops import InputError
from attnops.errors import InputTypeError
from attnops.operators.kernels.pages.paged import paged_attention

CASES = (
    PagedCase("mixed", sinks=True),
    PagedCase("decode", window=(9, 0), cap=5.0),
    PagedCase("speculate", dtype="bfloat16", window=(6, 1), causal=False),
    PagedCase("prefill", window=(11, None), quantised="int8", scale="token_head"),
    PagedCase("mixed", heads=(4, 4), causal=False, sizes=None),
    PagedCase("decode", sizes=(1, 5, 4), quantised="float8_e4m3fn", scale="head", sinks=True),
)
QUICK = CASES[:3]


def joined(case: PagedCase, arrays: dict[str, np.ndarray], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Each shard with its own columns of the table, padded to one width; sinks count with the last."""
    outputs, lses = [], []
    width = -(-arrays["page_table"].shape[1] // n)
    for shard in range(n):
        own = arrays["page_table"][:, shard::n]
        own = np.pad(own, ((0, 0), (0, width - own.shape[1])), constant_values=len(arrays["key_pages"]))
        part = arrays | {"page_table": own, "page_shard": np.asarray(shard, np.int32)}
        if "sinks" in part and shard < n - 1:
            part["sinks"] = np.full_like(part["sinks"], -np.inf)
        output, lse = batches.run(case, part, page_stride=n)
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
