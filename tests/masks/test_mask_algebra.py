"""The normal form, questions about the tree, and plain Python behaviour: equality, hash, pickle, copy."""

from __future__ import annotations

import copy
import pickle

import brute_masks as brute
import jax
import numpy as np
import pytest
from hypothesis import given, settings

from attnops.errors import MaskError
from attnops.masks import (
    And,
    Causal,
    Chunked,
    Dense,
    Full,
    Lengths,
    Mask,
    MaskFunction,
    Not,
    Or,
    Positions,
    Prefix,
    SegmentIds,
    SlidingWindow,
    mask_from_dict,
    mask_function_names,
    register_mask_function,
)

ids = SegmentIds(np.zeros((2, 5), int), np.zeros((2, 7), int))
lengths = Lengths(np.array([3, 4]))


def test_normal_form():
    a, b, c = Causal(), Prefix(3), Chunked(4)
    assert a & b & c == And((a, And((b, c)))) == And((a, b, c))
    assert (a | b) | c == Or((a, b, c))
    assert a & Full() == a == And((a,)) == Or((a,))
    assert And(()) == Full() == a | Full()
    assert Or(()) == ~Full()
    assert ~~a == a
    assert And((a, Or((b, c)))).masks == (a, b | c)
    assert Full().conjuncts() == ()
    assert (a & b).conjuncts() == (a, b)
    assert (a | b).conjuncts() == (a | b,)


@given(brute.trees(brute.LEAVES | brute.FUNCTIONS))
@settings(deadline=None, max_examples=100)
def test_values(spec):
    mask, again = brute.build(spec), brute.build(spec)
    assert mask == again
    assert hash(mask) == hash(again)
    for other in (pickle.loads(pickle.dumps(mask)), copy.copy(mask), copy.deepcopy(mask)):
        assert other == mask
        assert type(other) is type(mask)
    assert mask.is_static
    assert mask.split() == (mask, ())
    assert mask.merge(()) == mask
    assert And(mask.conjuncts()) == mask
    assert str(mask) == mask.describe()


def test_describe():
    mask = Causal(offset=0) & SlidingWindow(left=1023) & ids
    assert str(mask) == "causal(offset=0) & window(left=1023, right=0) & segment_ids"
    mask = ~(Causal() | Prefix(4)) & Chunked(8, 1) & MaskFunction("test_thirds")
    assert str(mask) == ("~(causal | prefix(length=4)) & chunked(size=8, offset=1) & mask_function(name='test_thirds')")
    assert str(Dense(np.ones((2, 1, 1, 7), bool)) | lengths) == "dense_mask[batch, 1, 1, kv] | kv_lengths"
    assert str(Positions(ids.query, ids.kv, left=3)) == "positions(left=3, right=0)"


def test_features():
    mask = Full() & Causal() & (Prefix(3) | ~SlidingWindow(2)) & Chunked(3) & MaskFunction("test_thirds")
    assert mask.features() == {"causal", "prefix", "sliding_window", "chunked", "mask_function"}
    assert Full().features() == frozenset()
    assert (mask & ids & lengths).features() == mask.features() | {"segment_ids", "kv_lengths"}
    assert (Causal() | ids).features() == {"causal", "dynamic_or"}
    assert (~ids & lengths).features() == {"dynamic_or", "kv_lengths"}
    dense = Dense(np.ones((1, 1, 5, 7), bool)) & Positions(ids.query, ids.kv)
    assert dense.features() == dense.split()[0].features() == {"dense_mask", "positions"}


def test_split_static():
    mixed = Causal() | lengths
    static, dynamic = (Causal() & ids & mixed & Prefix(3)).split_static()
    assert static == Causal() & Prefix(3)
    assert dynamic == (ids, mixed)
    assert ids.split_static() == (Full(), (ids,))
    assert Causal().split_static() == (Causal(), ())


def test_no_truth_value():
    with pytest.raises(MaskError, match=r"use & \| ~ for `and`"):
        bool(Causal())


@pytest.mark.parametrize(
    "combine",
    [
        lambda array: Causal() & array,
        lambda array: array & Causal(),
        lambda array: array | Causal(),
        lambda array: And((Causal(), array)),
        lambda array: Not(array),
    ],
)
def test_arrays_need_wrapping(combine):
    with pytest.raises(MaskError, match=r"Dense\(array\)"):
        combine(np.ones((3, 3), bool))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Causal(True), "write the number"),
        (lambda: Causal(1.0), r"offset=1\.0 is a float; wanted an int, .*: write 1$"),
        (lambda: Causal("1"), "wanted an int, or None for the call's position"),
        (lambda: Causal(2**31), "use None for the call's position"),
        (lambda: SlidingWindow(None, None), r"use Full\(\)"),
        (lambda: SlidingWindow(-1), "use None for no bound"),
        (lambda: SlidingWindow(left=2**31 - 1), "use None for no bound"),
        (lambda: Chunked(0), "at least 1"),
        (lambda: Prefix(-1), "at least 0"),
        (lambda: And(Causal()), "write a & b"),
        (lambda: MaskFunction("not a name"), "my_mask"),
        (lambda: Causal().materialise(slice(0, None), slice(0, 3)), r"slice\(start, stop\)"),
        (lambda: Causal().materialise(slice(3, 1), slice(0, 3)), "start <= stop"),
        (
            lambda: Causal().materialise(slice(0, 1), slice(0, 1), query_offset=np.zeros((1, 1), int)),
            "Positions",
        ),
        (lambda: Causal().live_blocks(0, 1, q_len=1, kv_len=1), "block_q=0; wanted an int of at least 1"),
        (lambda: Causal().bind(0.5), r"query_offset=0\.5 is a float; wanted an int: give the number itself"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(MaskError, match=message):
        make()


def test_mask_function_registry():
    with pytest.raises(MaskError, match=r"@register_mask_function\('test_new_one'\)"):
        MaskFunction("test_new_one")
    with pytest.raises(MaskError, match="Did you mean 'test_thirds'"):
        mask_from_dict({"kind": "mask_function", "name": "test_third"})
    with pytest.raises(MaskError, match="override=True"):
        register_mask_function("test_thirds")(lambda x, j: x == j)
    register_mask_function("test_new_one", override=True)(lambda x, j: x == j)
    assert "test_new_one" in mask_function_names()
    mask = MaskFunction("test_new_one")
    assert mask.materialise(slice(0, 2), slice(0, 2))[0, 0].tolist() == [[True, False], [False, True]]
    register_mask_function("test_new_one", override=True)(lambda x, j: x * 1.0)
    with pytest.raises(MaskError, match="comparison"):
        MaskFunction("test_new_one").materialise(slice(0, 2), slice(0, 2))
    register_mask_function("test_new_one", override=True)(lambda x, j: np.zeros(7, bool))
    with pytest.raises(MaskError, match=r"wanted one that broadcasts to .*: compare element by element"):
        MaskFunction("test_new_one").live_blocks(4, 4, q_len=4, kv_len=4)


def test_a_mask_keeps_its_function():
    where = slice(0, 4), slice(0, 4)
    register_mask_function("test_kept", override=True)(lambda x, j: j <= x)
    old, same = MaskFunction("test_kept"), MaskFunction("test_kept")
    kept, before = {Causal() & old: "a plan", old.bind(2): "another"}, (hash(old), hash(Causal() & old))
    register_mask_function("test_kept", override=True)(lambda x, j: j >= x)
    new = MaskFunction("test_kept")
    assert (hash(old), hash(Causal() & old)) == before == (hash(new), hash(Causal() & new))
    assert old == same != new
    assert (kept.get(Causal() & same), kept.get(Causal() & new)) == ("a plan", None)
    assert (kept.get(same.bind(2)), kept.get(new.bind(2))) == ("another", None)
    tree = jax.tree.map(lambda x: x, {"mask": old})["mask"]
    for mask in (
        old,
        old.bind(0),
        old.bind(1).with_offset(0),
        copy.copy(old),
        copy.deepcopy(old),
        tree,
        Full() & ~~old,
    ):
        np.testing.assert_array_equal(mask.materialise(*where), Causal().materialise(*where))
    for mask in (pickle.loads(pickle.dumps(old)), mask_from_dict(old.to_dict())):  # by name
        assert mask == new


def test_bounds_hold():
    mask = Causal() & ~(Prefix(2) | ids)
    lower, upper = mask.bounds()
    assert lower == Causal() & ~Full()
    assert upper == Causal() & ~(Prefix(2) | ~Full())
    assert isinstance(upper, Mask)
