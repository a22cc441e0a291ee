"""What must hold of paged attention whatever the numbers are: chunks, orders of pages, shared pages, what is read."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import paged_batches as batches
import pytest
from paged_batches import PagedCase

from attnops.operators.kernels.pages import paged_step
from attnops.operators.kernels.pages.paged import paged_attention

PLAIN = PagedCase("mixed")


def test_any_order_of_pages_gives_the_same() -> None:
    case = PagedCase("mixed", window=(9, 0), quantised="int8", scale="token_head")
    arrays = batches.make(case)
    program = jax.jit(lambda arrays: paged_attention(**arrays, **case.call, **case.static))
    want = program(arrays)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(arrays["key_pages"]))
        places = np.append(np.argsort(order), len(order)).astype(np.int32)  # padding stays padding
        moved = {n: arrays[n][order] for n in ("key_pages", "value_pages", "key_scale", "value_scale")}
        got = program(arrays | moved | {"page_table": places[arrays["page_table"]]})
        assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_batched_is_one_at_a_time(kind: str) -> None:
    case = PagedCase(kind, window=(9, 0))
    arrays = batches.make(case)
    program = jax.jit(lambda arrays: paged_attention(**arrays, **case.call, **case.static))
    want = np.asarray(program(arrays)[0])
    for s in range(int(arrays["num_seqs"][0])):
        first, last = arrays["cu_q_lens"][s : s + 2]
        alone = arrays | {n: np.roll(arrays[n], -s, axis=0) for n in ("kv_lens", "page_table")}
        alone["cu_q_lens"] = np.full_like(arrays["cu_q_lens"], 2**30)
        alone["cu_q_lens"][:2] = 0, last - first
        alone["query"] = np.roll(arrays["query"], -first, axis=0)
        got = np.asarray(program(alone | {"num_seqs": np.ones(1, np.int32)})[0])
        np.testing.assert_allclose(got[: last - first], want[first:last], rtol=0, atol=2e-6)
        assert (got[last - first :] == 0).all()


def test_any_chunking_is_one_prefill() -> None:
    """Each chunk beside a decoding row; keys of later chunks aren't written yet when a chunk is attended to."""
    case, length = PagedCase("mixed", window=(19, 0)), 47
    whole = batches.make(case, ((1, 9), (length, length)))
    want = batches.expect(case, whole).output[1 : 1 + length]
    program = jax.jit(lambda arrays: paged_attention(**arrays, **case.call, **case.static)[0])
    table = whole["page_table"][1]
    for seed in range(6):
        rng = np.random.default_rng(seed)
        cuts = [0, *sorted(rng.choice(np.arange(1, length), rng.integers(1, 6), replace=False)), length]
        got = np.zeros_like(want)
        for start, end in itertools.pairwise(cuts):
            arrays = {n: x.copy() for n, x in whole.items()}
            for j in range(start, length):
                if j >= end:
                    for name in ("key_pages", "value_pages"):
                        arrays[name][table[j // case.page], j % case.page] = np.nan
            arrays["query"][1 : 1 + end - start] = whole["query"][1 + start : 1 + end]
            arrays["cu_q_lens"][:3] = 0, 1, 1 + end - start
            arrays["kv_lens"][1] = end
            got[start:end] = program(arrays)[1 : 1 + end - start]
        np.testing.assert_allclose(got, want, rtol=0, atol=5e-6)


def test_a_window_over_chunks_with_a_shared_prefix() -> None:
    case = PagedCase("mixed", (9, 3), window=(19, 0), dtype="float32")
    arrays = batches.make(case, ((1, 47), (19, 47), (5, 30), (1, 24)))
    arrays["page_table"][1:, :3] = arrays["page_table"][0, :3]  # 24 tokens of all four
    batches.agree(case, batches.run(case, arrays), batches.expect(case, arrays))


@pytest.mark.parametrize("bad", [10**6, -1])
def test_ids_that_are_no_pages_are_no_keys(bad: int) -> None:
    """Not clamped into another's page: as if the keys there were masked."""
    arrays = batches.make(PLAIN, ((1, 24), (6, 40)))
    fewer = {n: x.copy() for n, x in arrays.items()}
    arrays["page_table"][0, 2], arrays["page_table"][1, 0] = bad, bad
    output, lse = batches.run(PLAIN, arrays)
    # Without a window positions don't count, so a page that isn't seen may as well be cut off.
    fewer["kv_lens"][:2] = 16, 32
    fewer["page_table"][1, :-1] = fewer["page_table"][1, 1:]
    batches.agree(PLAIN, (output, lse), batches.expect(PLAIN, fewer))


class _Reads:
    """The page ids that a program's gathers ask for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ids: list[np.ndarray] = []
        by_head, joint = paged_step.fetch, paged_step.fetch_joint_heads

        def watched(layout: str, pages: Any, ids: Any, *more: Any) -> Any:
            self.watch(ids)
            return by_head(layout, pages, ids, *more)

        def watched_joint(pages: Any, ids: Any, *more: Any) -> Any:
            self.watch(ids)
            return joint(pages, ids, *more)

        monkeypatch.setattr(paged_step, "fetch", watched)
        monkeypatch.setattr(paged_step, "fetch_joint_heads", watched_joint)

    def watch(self, ids: Any) -> None:
        jax.debug.callback(lambda ids: self.ids.append(np.asarray(ids)), ids)

    def of(self, case: PagedCase, arrays: dict[str, np.ndarray]) -> list[int]:
        """Which pages were read, each once."""
        self.ids.clear()
        batches.run(case, arrays)
        jax.effects_barrier()
        return sorted(set(np.concatenate([x.reshape(-1) for x in self.ids]).tolist())) if self.ids else []


def _live(case: PagedCase, arrays: dict[str, np.ndarray]) -> list[int]:
    """The pages that hold a key which some row sees."""
    pages: set[int] = set()
    left = 10**9 if case.window is None or case.window[0] is None else case.window[0]
    for s in range(int(arrays["num_seqs"][0])):
        q_len, length = int(np.diff(arrays["cu_q_lens"])[s]), int(arrays["kv_lens"][s])
        if q_len:
            first = max(0, length - q_len - left) // case.page
            pages |= set(arrays["page_table"][s, first : -(-length // case.page)].tolist())
    return sorted(pages)


@pytest.mark.parametrize(
    ("kind", "window"),
    [
        pytest.param(
            kind, window, marks=[] if (window is None) == (kind in ("decode", "prefill")) else [pytest.mark.slow]
        )
        for kind in ("decode", "speculate", "prefill", "mixed")
        for window in (None, (9, 0))
    ],
)
def test_only_live_pages_are_read(kind: str, window: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = PagedCase(kind, window=window)
    arrays = batches.make(case)
    assert _Reads(monkeypatch).of(case, arrays) == _live(case, arrays)


def test_a_window_reads_its_pages_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    window, page, context = 32, 8, 1000
    case = PagedCase("decode", window=(window - 1, 0), page=page, sizes=(2, 1, 4))
    arrays = batches.make(case, ((1, context), (1, context - 3)), width=126)
    reads = _Reads(monkeypatch)
    pages = reads.of(case, arrays)
    assert len(pages) <= 2 * (-(-window // page) + 2)
    # Each step fetches two pages of keys and two of values: no more steps than the live pages take.
    steps = len(reads.ids) // 2
    assert steps <= 2 * -(-(-(-window // page) + 1) // 2)


def test_the_program_does_not_grow_with_the_batch() -> None:
    case = PagedCase("mixed", window=(9, 0), sinks=True)

    def lines(sequences: int, width: int) -> int:
        arrays = batches.make(case, ((1, 9), (5, 17)), width=3, spare=sequences - 2)
        arrays["page_table"] = np.zeros((sequences, width), np.int32)
        text = jax.jit(lambda arrays: paged_attention(**arrays, **case.call, **case.static)).lower(arrays).as_text()
        return len(text.splitlines())

    assert lines(40, 256) == lines(300, 2048)


def test_values_that_are_infinite_stay_in_their_sequence() -> None:
    """Pairs of several sequences are summed in one step."""
    case = PagedCase("decode", sizes=(1, 4, 4))
    arrays = batches.make(case, ((1, 8), (1, 8), (1, 8), (1, 8)))
    want = batches.expect(case, arrays)
    arrays["value_pages"][arrays["page_table"][1, 0]] = np.inf
    output, lse = batches.run(case, arrays)
    assert np.isposinf(output[1]).all()
    output[1] = want.output[1]
    batches.agree(case, (output, lse), want)
