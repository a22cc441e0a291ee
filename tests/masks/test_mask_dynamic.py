"""Dynamic leaves against brute force, and their arrays: split, merge, slices, pytrees, tracers."""

from __future__ import annotations

import brute_masks as brute
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops.errors import InputTypeError, MaskError
from attnops.masks import (
    Causal,
    Dense,
    Full,
    Lengths,
    MaskFunction,
    Positions,
    Prefix,
    SegmentIds,
    SlidingWindow,
    register_mask_function,
)
from attnops.masks.bounds import Blocks, Extent

B, H, Q, K = 2, 3, 9, 11
rng = np.random.default_rng(0)
SEG_Q, SEG_K = rng.integers(0, 3, (B, Q)), rng.integers(0, 3, (B, K))
POS_Q, POS_K = rng.integers(0, 9, (B, Q)), rng.integers(0, 9, (B, K))
LENGTHS = np.array([4, 11])
DENSE = rng.random((B, H, Q, K)) < 0.5

LEAVES = {
    "segments": (SegmentIds(SEG_Q, SEG_K), lambda b, h, i, j: SEG_Q[b, i] == SEG_K[b, j]),
    "lengths": (Lengths(LENGTHS), lambda b, h, i, j: j < LENGTHS[b]),
    "positions": (Positions(POS_Q, POS_K), lambda b, h, i, j: POS_K[b, j] <= POS_Q[b, i]),
    "positions_both": (
        Positions(POS_Q, POS_K, left=2, right=1),
        lambda b, h, i, j: POS_Q[b, i] - 2 <= POS_K[b, j] <= POS_Q[b, i] + 1,
    ),
    "positions_left": (
        Positions(POS_Q, POS_K, left=0, right=None),
        lambda b, h, i, j: POS_K[b, j] >= POS_Q[b, i],
    ),
    "dense": (Dense(DENSE), lambda b, h, i, j: DENSE[b, h, i, j]),
    "padding": (Dense(DENSE[:, :1, :1]), lambda b, h, i, j: DENSE[b, 0, 0, j]),
    "dense_or": (
        Causal() & ~Lengths(LENGTHS) | Dense(DENSE[:1, :, :, :1]),
        lambda b, h, i, j: (j <= i and j >= LENGTHS[b]) or DENSE[0, h, i, 0],
    ),
}


def rectangle(sees, q_slice=slice(0, Q), kv_slice=slice(0, K)):
    rows, cols = range(q_slice.start, q_slice.stop), range(kv_slice.start, kv_slice.stop)
    seen = [[[[bool(sees(b, h, i, j)) for j in cols] for i in rows] for h in range(H)] for b in range(B)]
    return np.array(seen).reshape(B, H, len(rows), len(cols))


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("where", [(slice(0, Q), slice(0, K)), (slice(2, 7), slice(3, 4)), (slice(8, 9), slice(0, 11))])
def test_meaning(name, where):
    mask, sees = LEAVES[name]
    wanted = rectangle(sees, *where)
    seen = mask.materialise(*where)
    assert type(seen) is np.ndarray
    assert seen.dtype == bool
    assert seen.ndim == 4
    np.testing.assert_array_equal(np.broadcast_to(seen, wanted.shape), wanted)
    structure, leaves = mask.split()
    traced = jax.jit(lambda arrays: structure.merge(arrays).materialise(*where))
    with jax.numpy_dtype_promotion("strict"):
        seen = traced([leaf.array for leaf in leaves])
    np.testing.assert_array_equal(np.broadcast_to(seen, wanted.shape), wanted)


@pytest.mark.parametrize("name", LEAVES)
def test_planning_is_safe_and_needs_no_arrays(name):
    mask, sees = LEAVES[name]
    mask = mask & SlidingWindow(3, 5)
    structure, _ = mask.split()
    seen = rectangle(lambda b, h, i, j: sees(b, h, i, j) and i - 3 <= j <= i + 5)
    static = brute.dense(("window", 3, 5, None), range(Q), range(K))
    for found in (mask, structure):
        blocks = found.live_blocks(2, 3, q_len=Q, kv_len=K)
        for b in range(B):
            for h in range(H):
                exact = np.array(brute.blocks(seen[b, h], 2, 3))
                assert (exact[blocks == 0] == 0).all()
                assert (exact[blocks == 2] == 2).all()
        assert (blocks > 0).tolist() == (np.array(brute.blocks(static, 2, 3)) > 0).tolist()
        assert found.row_intervals(np.arange(Q), K) is None
        assert found.may_have_dead_rows(Q, K)
        assert found.needs_offset
        assert not found.is_static
        assert found.describe() == mask.describe()
        assert found.features() == mask.features()
    static_part, dynamic = structure.split_static()
    assert static_part == SlidingWindow(3, 5)
    assert len(dynamic) == 1


def test_planning_under_or():
    mask = Causal() | SegmentIds(SEG_Q, SEG_K)
    assert mask.live_blocks(3, 3, q_len=9, kv_len=9).tolist() == [[1, 1, 1], [2, 1, 1], [2, 2, 1]]
    assert not mask.may_have_dead_rows(Q, K)
    assert (mask & Lengths(LENGTHS)).may_have_dead_rows(Q, K)


def test_split_and_merge():
    more = SegmentIds(SEG_Q + 1, SEG_K)
    mask = Causal() & SegmentIds(SEG_Q, SEG_K) & ~more & Lengths(LENGTHS) & Positions(POS_Q, POS_K, 3, 1)
    mask = mask & Dense(DENSE[:1])
    structure, leaves = mask.split()
    assert [(leaf.name, leaf.dims) for leaf in leaves] == [
        ("q_segment_ids", ("batch", "q")),
        ("kv_segment_ids", ("batch", "kv")),
        ("q_segment_ids_2", ("batch", "q")),
        ("kv_segment_ids_2", ("batch", "kv")),
        ("kv_lengths", ("batch",)),
        ("q_positions", ("batch", "q")),
        ("kv_positions", ("batch", "kv")),
        ("mask", ("batch", "heads", "q", "kv")),
    ]
    again = structure.merge([leaf.array for leaf in leaves])
    assert again.split()[0] == structure
    assert all(a.array is b.array for a, b in zip(again.split()[1], leaves, strict=True))
    assert hash(again.split()[0]) == hash(structure)
    assert structure != (mask & Dense(DENSE)).split()[0]
    assert Positions(POS_Q, POS_K, 3).split()[0] != Positions(POS_Q, POS_K, 4).split()[0]
    assert Dense(DENSE[:1]).split()[0] != Dense(DENSE).split()[0]
    slots, holes = structure.split()
    assert slots == structure
    assert [(leaf.name, leaf.array) for leaf in holes] == [(leaf.name, None) for leaf in leaves]
    with pytest.raises(MaskError, match="wanted 8, as returned by split"):
        structure.merge([])
    with pytest.raises(MaskError, match=r"merge\(arrays\) first"):
        structure.materialise(slice(0, Q), slice(0, K))
    with pytest.raises(MaskError, match="bias"):
        structure.merge([*(leaf.array for leaf in leaves[:-1]), DENSE.astype(float)])


def test_bind_keeps_arrays():
    mask = Causal() & SegmentIds(SEG_Q, SEG_K)
    bound = mask.bind(2)
    assert bound.conjuncts()[0] == Causal(2)
    assert bound.split()[0] == mask.split()[0].bind(2)


def test_pytrees():
    mask = Causal() & (SegmentIds(SEG_Q, SEG_K) | ~Positions(POS_Q, POS_K, left=2)) & Dense(DENSE)
    leaves, tree = jax.tree.flatten(mask)
    assert len(leaves) == 5
    again = jax.tree.unflatten(tree, leaves)
    assert again.split()[0] == mask.split()[0]
    where = slice(0, Q), slice(0, K)
    np.testing.assert_array_equal(again.materialise(*where), mask.materialise(*where))
    for odd in (None, object(), "spec", 3.0):
        assert jax.tree.unflatten(tree, [odd] * 5) is not None
    assert len(jax.tree.leaves_with_path(mask)) == 5
    assert jax.tree.structure(Causal()) == jax.tree.structure(Causal()) != jax.tree.structure(Causal(1))
    assert jax.tree.map(lambda x: x, Causal() & Prefix(3)) == Causal() & Prefix(3)

    @jax.jit
    def through(mask, x):
        return jnp.where(mask.materialise(*where), x, 0.0).sum()

    x = jnp.ones((B, H, Q, K))
    wanted = mask.materialise(*where)
    assert float(through(mask, x)) == wanted.sum()
    grad = jax.grad(through, argnums=1)(mask, x)
    np.testing.assert_array_equal(grad, wanted)
    batched = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), mask)
    seen = jax.vmap(lambda m: m.materialise(*where))(batched)
    np.testing.assert_array_equal(seen[1], wanted)
    as_static = jax.jit(lambda x, m: jnp.where(m.materialise(slice(0, 2), slice(0, 2)), x, 0), static_argnums=1)
    assert as_static(jnp.ones((1, 1, 2, 2), jnp.int32), Causal() & Prefix(3)).sum() == 3


def test_structs_can_be_planned_with():
    mask = Lengths(jax.ShapeDtypeStruct((B,), jnp.int32)) & Dense(jax.ShapeDtypeStruct((B, 1, Q, K), bool))
    assert mask.split()[0] == mask.split()[0]
    assert mask.live_blocks(4, 4, q_len=8, kv_len=8).tolist() == [[1, 1], [1, 1]]
    with pytest.raises(MaskError, match=r"jax\.eval_shape"):
        mask.materialise(slice(0, Q), slice(0, K))
    shape = jax.eval_shape(lambda m: m.materialise(slice(0, Q), slice(0, K)), mask)
    assert shape.shape == (B, 1, Q, K)


def test_functions_in_jnp_plan_under_jit():
    register_mask_function("test_jnp", override=True)(lambda x, j: jnp.abs(x - j) <= 2)
    mask = MaskFunction("test_jnp")

    @jax.jit
    def plan_and_run(x):
        assert mask.live_blocks(2, 2, q_len=6, kv_len=6).tolist() == [[2, 1, 0], [1, 2, 1], [0, 1, 2]]
        return x + mask.materialise(slice(0, 6), slice(0, 6))[0, 0].astype(np.int32)

    seen = np.asarray(plan_and_run(jnp.zeros((6, 6), jnp.int32)), bool)
    np.testing.assert_array_equal(seen, SlidingWindow(2, 2).materialise(slice(0, 6), slice(0, 6))[0, 0])


def test_leaves_have_no_hash_and_no_json():
    with pytest.raises(InputTypeError, match=r"split\(\)\[0\]"):
        hash(Causal() & Lengths(LENGTHS))
    assert Lengths(LENGTHS) != Lengths(LENGTHS)
    for mask in (Causal() & Lengths(LENGTHS), Dense(DENSE), Lengths(LENGTHS).split()[0]):
        with pytest.raises(MaskError, match=r"(kv_lengths|dense_mask).* pass it in the call"):
            mask.to_dict()


def test_traced_numbers_are_refused_with_the_mend():
    with pytest.raises(MaskError, match="use Lengths"):
        jax.jit(lambda n: Prefix(n).materialise(slice(0, 2), slice(0, 2)))(3)


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8"])
def test_narrow_integers_under_strict_promotion(dtype):
    mask = SegmentIds(jnp.asarray(SEG_Q, dtype), jnp.asarray(SEG_K)) & Lengths(jnp.asarray(LENGTHS, dtype))
    mask = mask & Positions(jnp.asarray(POS_Q), jnp.asarray(POS_K, dtype), left=3)
    wide = SegmentIds(SEG_Q, SEG_K) & Lengths(LENGTHS) & Positions(POS_Q, POS_K, left=3)
    where = slice(0, Q), slice(0, K)
    with jax.numpy_dtype_promotion("strict"):
        seen = mask.materialise(*where)
    np.testing.assert_array_equal(seen, wide.materialise(*where))
    host = Positions(POS_Q.astype(dtype), POS_K.astype(dtype), left=3, right=1).materialise(*where)
    np.testing.assert_array_equal(host, Positions(POS_Q, POS_K, left=3, right=1).materialise(*where))


def test_traced_offsets_work():
    seen = jax.jit(lambda n: Causal().materialise(slice(0, 2), slice(0, 4), query_offset=n))(1)
    assert seen[0, 0].tolist() == [[True, True, False, False], [True, True, True, False]]


EDGES = [-(2**31), -(2**31) + 1, -(2**30), -3, 0, 2, 5, 2**30, 2**31 - 2, 2**31 - 1]


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize(
    ("left", "right"), [(None, 0), (3, 0), (0, None), (None, 2), (2**30, 2**30), (0, 2**30)], ids=str
)
def test_no_position_wraps_round(left, right, array):
    """Against Python's integers; and blocks of 3 x 4 are dead or full only where their cells are."""
    query, key = np.array(EDGES)[:, None], np.array(EDGES)
    want = np.ones((10, 10), bool)
    want &= True if left is None else key >= query - left
    want &= True if right is None else key <= query + right
    mask = Positions(*(array(np.array([EDGES], np.int32)) for _ in range(2)), left=left, right=right)
    np.testing.assert_array_equal(np.asarray(mask.materialise(slice(0, 10), slice(0, 10)))[0, 0], want)
    starts = np.arange(0, 10, 3)[:, None], np.arange(0, 10, 4)[None, :]
    rows, cols = (Extent(at, np.minimum(at + n, 10) - 1) for at, n in zip(starts, (3, 4), strict=True))
    some, every = (np.asarray(x)[0, 0] for x in mask.block_bounds(Blocks(rows, rows, cols, 3, 4)))
    for (i, j), seen in np.ndenumerate(some):
        cells = want[3 * i : 3 * i + 3, 4 * j : 4 * j + 4]
        assert seen or not cells.any()
        assert cells.all() or not every[i, j]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dense(np.ones((1, 1, 3, 3))), "bias"),
        (
            lambda: Dense(np.ones((2, 3), bool)),
            r"mask\[:, None, None, :\] for a \[batch, kv\].*mask\[None, None\]",
        ),
        (lambda: Dense([[True]]), r"np\.asarray\(mask\)"),
        (lambda: SegmentIds(np.zeros(3, int), np.zeros((1, 3), int)), r"q_segment_ids\[None\]"),
        (lambda: SegmentIds(np.zeros((1, 3), int), np.zeros((2, 3), int)), "broadcast_to"),
        (lambda: SegmentIds(np.zeros((1, 3)), np.zeros((1, 3), int)), r"astype\('int32'\)"),
        (lambda: Lengths(np.zeros((1, 1), int)), r"integer array \[batch\]"),
        (lambda: Lengths([3]), r"np\.asarray\(kv_lengths\)"),
        (lambda: Lengths(np.full(1, 2**31)), "kv_lengths holds 2147483648; wanted integers that fit in int32"),
        (
            lambda: SegmentIds(np.full((1, 3), -(2**31) - 1), np.zeros((1, 3), int)),
            "q_segment_ids holds -2147483649; .* renumber",
        ),
        (lambda: Lengths(jax.ShapeDtypeStruct((1,), np.uint32)), r"uint32 and unknown values; .* kv_lengths\.astype"),
        (lambda: Lengths(jax.ShapeDtypeStruct((1,), np.int64)), r"int64 and unknown values; .* kv_lengths\.astype"),
        (lambda: Lengths(np.zeros(1, "m8[s]")), r"timedelta64\[s\]; wanted an integer array"),
        (lambda: Causal().materialise(slice(0, 2), slice(0, 2), query_offset=np.array([2**40])), "holds 1099511627776"),
        (
            lambda: Causal().materialise(slice(0, 2), slice(0, 2), query_offset=np.array([-(2**31)])),
            r"-2147483648; .* at least",
        ),
        (lambda: Positions(POS_Q, POS_K, None, None), r"Full\(\)"),
        (lambda: Positions(POS_Q, POS_K, -1), "use None for no bound"),
        (
            lambda: SegmentIds(SEG_Q, SEG_K).materialise(slice(0, Q + 1), slice(0, K)),
            "pass an array that covers it",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(MaskError, match=message):
        make()


def test_full_needs_no_arrays():
    assert Full().materialise(slice(2, 4), slice(0, 3)).shape == (1, 1, 2, 3)


def test_starts_are_called_by_the_name_of_their_argument():
    mask = Causal() & Lengths(np.array([2])) & ~Lengths(np.array([1]))
    structure, leaves = mask.split()
    assert [leaf.name for leaf in leaves] == ["kv_lengths", "kv_starts"]
    assert structure.describe() == "causal & kv_lengths & kv_starts"
    assert (~(Causal() & Lengths(np.array([1])))).split()[1][0].name == "kv_lengths"
