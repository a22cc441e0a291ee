"""Trees of drafts in a step over pages: each token attends as the last of the sequence that its path is; and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from served_rows import FIELDS, WAYS, Place, ServedRows

from attnops import InputError, KVCache, OperationMetadata, OperationRegistry
from attnops.errors import AttnOpsError
from attnops.operators.paged_cache import RaggedBatch, init

# (queries, keys) of each row: a tree, a prompt without one, another tree, a single token.
ROWS = ((6, 11), (9, 13), (3, 7), (1, 10))
TREE = np.zeros((4, 6, 6), bool)
for _row, _parents in ((0, (-1, 0, 0, 1, 1, 2)), (2, (-1, -1, 0)), (3, (-1,))):
    for _draft, _parent in enumerate(_parents):
        TREE[_row, _draft] = TREE[_row, _parent] if _parent >= 0 else False
        TREE[_row, _draft, _draft] = True
TABLES = ([0, 3, 6], [9, 4, 1, 8], [2, 5], [10, 7, 12])
OF_DEVICES = ([0, 3, 6], [8, 1, 4, 9], [2, 5], [10, 7, 12])  # ids that lie on the device of their page number


STEPS = [way for way in WAYS if way != "sp_window"]
QUICK = ("plain", "dp_tp", "latent_sp_dp", "kernel", "score", "selected")


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way in QUICK else [pytest.mark.slow]) for way in STEPS])
def test_a_step_of_trees(way: str) -> None:
    rows = ServedRows(way, ROWS, OF_DEVICES if "page_sequence_axis" in WAYS[way][0] else TABLES)

    def keys_of(place: Place) -> tuple[np.ndarray, np.ndarray, int]:
        q, n = ROWS[place.row]
        number = place.position - (n - q)
        own = np.flatnonzero(TREE[place.row, number]) if TREE[place.row].any() else np.arange(number + 1)
        slots = np.append(np.arange(n - q), n - q + own)  # of a sequence whose last token this is
        return slots, rows.by_position(np.arange(len(slots)), len(slots) - 1), len(slots) - 1

    rows.compare(rows.step(draft_tree=TREE), keys_of)


CACHE = KVCache(**FIELDS)
BATCH = RaggedBatch.make(CACHE.plan(), cu_q_lens=[0, 1, 4], kv_lens=[6, 9], page_table=[[5, 2], [3, 4, 1]])


def _step(tree: Any, batch: Any = BATCH, **call: Any) -> Any:
    q, k, v = (jnp.ones((4, heads, 16)) for heads in (4, 2, 2))
    return OperationRegistry.create("paged")(q, k, v, state=init(CACHE), layer=0, batch=batch, draft_tree=tree, **call)


def _tree(*rows: str) -> np.ndarray:
    """Of the batch's second row; the others have none."""
    made = np.zeros((4, len(rows), len(rows)), bool)
    made[1] = [[mark == "x" for mark in row] for row in rows]
    return made


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        (np.ones((4, 3, 3), np.int32), "int32"),
        (np.zeros((4, 3, 2), bool), r"\(4, 3, 2\)"),
        (np.zeros((3, 3, 3), bool), "3 matrices; wanted 4"),
        (_tree("x..", "x..", "..x"), r"draft_tree\[1\]: draft 1 doesn't see itself"),
        (_tree("xx.", ".x.", "..x"), "draft 0 sees draft 1, which comes after it"),
        (_tree("x..", "xx.", ".xx"), "draft 2 doesn't see draft 0, unlike its parent 1"),
        (_tree("x..", ".x.", "xxx"), "draft 2 sees draft 0, unlike its parent 1"),
        (_tree("x.", ".x"), "a tree of 2 drafts, but the row has 3 tokens"),
    ],
)
def test_trees_that_are_refused(tree: Any, named: str) -> None:
    with pytest.raises(AttnOpsError, match=named):
        _step(tree)


def test_what_lies_beyond_a_rows_tokens_is_not_checked_and_a_traced_tree_is_with_debug() -> None:
    tree = _tree("x...", "xx..", "x.x.", "xxxx")
    tree[2:] = True  # rows that aren't in use
    assert _step(tree).attention_outputs.shape == (4, 4, 16)
    wrong = jnp.asarray(_tree("x..", "x..", "..x"))
    with pytest.raises(Exception, match="draft 1 doesn't see itself"):
        jax.block_until_ready(jax.jit(lambda tree: _step(tree, debug=True).attention_outputs)(wrong))


def test_what_a_plan_says_and_where_it_is_refused() -> None:
    with pytest.raises(InputError, match="insert"):
        _step(np.zeros((4, 2, 2), bool), mode="insert")
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)  # noqa: E731
    tokens = [shape(8, heads, 16) for heads in (4, 2, 2)]
    tree = jax.ShapeDtypeStruct((4, 6, 6), jnp.bool_)
    fields = FIELDS | {"pages_axis": "dp", "layout": "joined"}
    mesh = jax.sharding.AbstractMesh((2, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    paged = OperationRegistry.create("paged", OperationMetadata(mesh=mesh, backend="tpu"))
    plan = paged.plan(*tokens, cache=KVCache(**fields), draft_tree=tree)
    assert plan.implementation == "paged.forward_tpu"
    assert "draft_tree" in plan.problem.features
    (spec,) = (x for x in plan.tensors if x.tensor == "draft_tree")
    assert (tuple(spec.spec), spec.local_shape) == (("dp", None, None), (2, 6, 6))
    many = jax.ShapeDtypeStruct((4, 4096, 4096), jnp.bool_)
    paged = OperationRegistry.create("paged", OperationMetadata(backend="tpu", fallback="allow"))
    plan = paged.plan(*tokens, cache=KVCache(**FIELDS | {"layout": "joined"}), draft_tree=many)
    assert [reason.code for rejected in plan.rejected for reason in rejected.reasons] == ["paged.draft_tree"]
