"""Spans of tokens and prefixes that see one another, in steps over pages; and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from served_rows import FIELDS, WAYS, Place, ServedRows

from attnops import Causal, InputError, KVCache, OperationMetadata, OperationRegistry, Prefix
from attnops.errors import AttnOpsError, RefusedError
from attnops.operators.paged_cache import RaggedBatch, init

QUICK = ("window_tp", "dp_tp", "latent_sp_dp", "kernel", "selected")
# (queries, keys, prefix, spans) of each row. The last row's only token ends a span that is stored.
ROWS = ((6, 11, 0, ((2, 4), (6, 9))), (9, 13, 7, ((9, 11),)), (3, 3, 2, ()), (1, 10, 0, ((5, 10),)))
TABLES = ([0, 3, 6], [8, 1, 4, 9], [2], [10, 7, 12])


STEPS = [way for way in WAYS if way != "sp"]


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way in QUICK else [pytest.mark.slow]) for way in STEPS])
def test_a_step_of_spans_and_prefixes(way: str) -> None:
    rows = ServedRows(way, [row[:2] for row in ROWS], TABLES)
    spans = np.full((rows.total, 2), 7, np.int32)  # two equal numbers are no span
    for place in rows.places:
        for span in ROWS[place.row][3]:
            if span[0] <= place.position < span[1]:
                spans[place.token] = span

    def keys_of(place: Place) -> tuple[np.ndarray, np.ndarray, int]:
        _, n, length, _ = ROWS[place.row]
        keys = np.arange(n)
        seen = rows.by_position(keys, place.position)
        seen |= (spans[place.token, 0] <= keys) & (keys < spans[place.token, 1])
        seen |= (place.position < length) & (keys < length)
        return keys, seen, place.position

    rows.compare(rows.step(spans=spans, prefix_lengths=np.array([row[2] for row in ROWS], np.int32)), keys_of)


CACHE = KVCache(**FIELDS)
BATCH = RaggedBatch.make(CACHE.plan(), cu_q_lens=[0, 1, 4], kv_lens=[6, 9], page_table=[[5, 2], [3, 4, 1]])
GROUP = KVCache(**FIELDS | {"layers": [{"layers": 1, "window_tokens": 4}], "max_tokens": 4})


def _step(batch: Any = BATCH, cache: KVCache = CACHE, **call: Any) -> Any:
    q, k, v = (jnp.ones((4, heads, 16)) for heads in (4, 2, 2))
    return OperationRegistry.create("paged")(q, k, v, state=init(cache), layer=0, batch=batch, **call)


def _spans(*own: tuple[int, int]) -> np.ndarray:
    """Of the tokens of the second row, at positions 6, 7 and 8."""
    return np.array([(0, 0), *own], np.int32)


NONE = (0, 0)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ({"spans": np.zeros((4, 2), np.float32)}, "float32"),
        ({"spans": np.zeros((3, 2), np.int32)}, r"\(3, 2\)"),
        ({"spans": _spans((3, 6), NONE, NONE)}, r"spans\[1\] is \(3, 6\), of row 1: it doesn't contain .* position 6"),
        ({"spans": _spans((-1, 7), NONE, NONE)}, "begins before the sequence"),
        ({"spans": _spans(NONE, NONE, (8, 10))}, r"spans\[3\] is \(8, 10\), of row 1: it ends after the 9 tokens"),
        ({"spans": _spans((6, 8), NONE, NONE)}, r"spans\[1\] is \(6, 8\), of row 1: it differs from that of a neighbour"),
        ({"spans": _spans(NONE, (6, 8), NONE)}, r"spans\[2\] .* differs from that of a neighbour"),
        ({"prefix_lengths": np.zeros(4, np.float32)}, "float32"),
        ({"prefix_lengths": np.zeros((4, 1), np.int32)}, r"\(4, 1\)"),
        ({"prefix_lengths": np.zeros(3, np.int32)}, "3 numbers; wanted 4"),
        ({"prefix_lengths": np.array([0, 10, 0, 0], np.int32)}, r"prefix_lengths\[1\] is 10, but the row has 9 tokens"),
        ({"prefix_lengths": np.array([0, -1, 0, 0], np.int32)}, r"prefix_lengths\[1\] is -1"),
    ],
)  # fmt: skip
def test_spans_that_are_refused(call: dict[str, Any], named: str) -> None:
    with pytest.raises(AttnOpsError, match=named):
        _step(**call)


def test_a_windows_pages_and_drafts_have_no_spans_that_they_do_not_hold() -> None:
    batch = RaggedBatch.make(GROUP.plan(), cu_q_lens=[0, 1, 4], kv_lens=[6, 9], page_table=[[5, 2], [3, 4, 1]])
    kept = {"cache": GROUP, "batch": batch, "sliding_window": (3, 0)}
    assert _step(**kept, spans=_spans((3, 7), NONE, NONE)).attention_outputs.shape == (4, 4, 16)
    with pytest.raises(InputError, match=r"spans\[1\] .* begins before 3, of which the layer's pages keep nothing"):
        _step(**kept, spans=_spans((2, 7), NONE, NONE))
    with pytest.raises(InputError, match="keep only a window of 4 tokens"):
        _step(**kept, prefix_lengths=np.array([0, 7, 0, 0], np.int32))
    tree = np.zeros((4, 3, 3), bool)
    tree[1] = np.tri(3, dtype=bool)
    with pytest.raises(InputError, match="whose tokens are a tree of drafts"):
        _step(spans=_spans((3, 7), NONE, NONE), draft_tree=tree)


def test_traced_ones_are_checked_with_debug() -> None:
    wrong = jnp.asarray(_spans(NONE, NONE, (8, 10)))
    with pytest.raises(Exception, match="ends after the 9 tokens"):
        jax.block_until_ready(jax.jit(lambda spans: _step(spans=spans, debug=True).attention_outputs)(wrong))


def test_what_a_plan_says_and_refuses() -> None:
    with pytest.raises(InputError, match="insert"):
        _step(spans=np.zeros((4, 2), np.int32), mode="insert")
    with pytest.raises(RefusedError, match="prefix_lengths"):
        _step(mask=Causal() | Prefix(3))
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)  # noqa: E731
    integers = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)  # noqa: E731
    mesh = jax.sharding.AbstractMesh((2, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    paged = OperationRegistry.create("paged", OperationMetadata(mesh=mesh, backend="tpu"))
    cache = KVCache(**FIELDS | {"pages_axis": "dp", "layout": "joined"})
    plan = paged.plan(
        *(shape(8, heads, 16) for heads in (4, 2, 2)), cache=cache, update="fused", spans=integers(8, 2),
        prefix_lengths=integers(4),
    )  # fmt: skip
    assert plan.implementation == "paged.forward_tpu"
    specs = {x.tensor: (tuple(x.spec), x.local_shape) for x in plan.tensors}
    assert specs["spans"] == (("dp", None), (4, 2))
    assert specs["prefix_lengths"] == (("dp",), (2,))
    assert [note.code for note in plan.notes if note.field == "update"] == ["paged.fused_spans"]
    batch = RaggedBatch.make(CACHE.plan(), cu_q_lens=[0, 1, 4], kv_lens=[6, 9], page_table=[[5, 2], [3, 4, 1]])
    tokens = [shape(4, heads, 16) for heads in (4, 2, 2)]
    alone = OperationRegistry.create("paged")
    assert alone.plan(*tokens, cache=CACHE, batch=batch, spans=integers(4, 2)).reads is None  # they depend on the spans
    assert alone.plan(*tokens, cache=CACHE, batch=batch).reads is not None
