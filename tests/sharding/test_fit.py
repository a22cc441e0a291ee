"""fit: what of each spec is kept on real shapes and a mesh, what is dropped and why, and what each device holds."""

from __future__ import annotations

import jax
import pytest
from eformer.escale import PartitionAxis
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from attnops.errors import InputError, ShardingError
from attnops.sharding import AttnShardingRules, MeshAxis, TensorShape, fit, kv_repeat, resolve_rules

RULES = resolve_rules(PartitionAxis(), "train", aux_ndim=1)
MESH = {"dp": 1, "fsdp": 2, "tp": 4, "sp": 2}


def one(tensor, spec):
    """Rules in which one tensor has a spec and the others are unsplit."""
    return AttnShardingRules(*[P()] * 10)._replace(**{tensor: spec})


def fit_one(spec, shape, mesh, tensor="query", **options):
    return fit(one(tensor, spec), {tensor: shape}, mesh, **options)[tensor]


def test_what_fits_is_kept_with_local_shape_and_bytes():
    fitted = fit(RULES, {"query": TensorShape((4, 6, 8, 5), 2), "key": (4, 6, 4, 5)}, MESH)
    query = fitted["query"]
    assert query.spec == P("fsdp", "sp", "tp", None)
    assert query.shape == (4, 6, 8, 5)
    assert query.local_shape == (2, 3, 2, 5)
    assert query.local_bytes == 2 * 3 * 2 * 5 * 2
    assert fitted["key"].local_shape == (2, 3, 1, 5)
    assert fitted["key"].local_bytes == 2 * 3 * 1 * 5 * 4  # float32 where nothing is said
    assert query.axes(0) == ("fsdp",)
    assert query.axes(3) == ()
    assert fitted.kv_repeat == 1
    assert fitted.get("bias") is None
    with pytest.raises(KeyError):
        fitted["bias"]


def test_an_axis_that_the_mesh_does_not_have():
    fitted = fit_one(P(None, "seq", "tp"), (2, 8, 4, 8), {"tp": 2, "fsdp": 1})
    assert fitted.spec == P(None, None, "tp", None)
    (drop,) = fitted.dropped
    assert (drop.tensor, drop.dim, drop.index, drop.axis) == ("query", "q_len", 1, "seq")
    assert "no axis 'seq'" in drop.reason
    assert "tp, fsdp" in drop.reason
    assert not drop.harmless


@pytest.mark.parametrize("axis", ["dp", "fsdp", "tp", "sp", "ep"])
def test_a_standard_axis_that_the_mesh_does_not_have_is_told_and_harmless(axis):
    fitted = fit_one(P(None, axis), (2, 8, 4, 8), {"other": 2})
    (drop,) = fitted.dropped
    assert f"no axis {axis!r}" in drop.reason
    assert drop.harmless


def test_an_axis_that_does_not_divide():
    fitted = fit_one(P(None, None, "tp"), (2, 8, 6, 8), {"tp": 4})
    assert fitted.spec == P(None, None, None, None)
    assert fitted.local_shape == (2, 8, 6, 8)
    (drop,) = fitted.dropped
    assert (drop.dim, drop.axis, drop.harmless) == ("heads", "tp", False)
    assert "6 is not divisible by tp=4" in drop.reason
    assert "multiple of 4" in drop.hint


def test_part_of_a_dimension_can_be_kept():
    fitted = fit_one(P(("a", "b")), (4, 1, 1, 1), {"a": 2, "b": 4})
    assert fitted.spec == P("a", None, None, None)
    assert fitted.local_shape == (2, 1, 1, 1)
    (drop,) = fitted.dropped
    assert drop.axis == "b"
    assert "4 (each shard 2) is not divisible by b=4" in drop.reason
    assert "multiple of 8" in drop.hint


def test_an_axis_used_twice():
    fitted = fit_one(P("a", "a", ("b", "a")), (2, 2, 4, 4), {"a": 2, "b": 2})
    assert fitted.spec == P("a", None, "b", None)
    assert [(d.dim, d.axis) for d in fitted.dropped] == [("q_len", "a"), ("heads", "a")]
    assert all("already splits" in d.reason and not d.harmless for d in fitted.dropped)


def test_an_axis_of_size_one_is_harmless():
    fitted = fit_one(P(("one", "a")), (2, 2, 4, 4), {"a": 2, "one": 1}, strict=True)
    assert fitted.spec == P("a", None, None, None)
    (drop,) = fitted.dropped
    assert "size 1" in drop.reason
    assert drop.harmless


def test_a_dimension_of_one_stands_for_broadcasting():
    fitted = fit_one(P("a", None, None, None), (1, 1, 4, 4), {"a": 2}, "bias", strict=True)
    assert fitted.spec == P(None, None, None, None)
    assert fitted.dropped[0].harmless


def test_manual_axes_are_left_out():
    axes = (MeshAxis("a", 2, "manual"), MeshAxis("b", 2))
    fitted = fit_one(P("a", "b"), (3, 4, 4, 4), axes, strict=True)
    assert fitted.spec == P(None, "b", None, None)
    assert "Manual" in fitted.dropped[0].reason


def test_no_mesh_means_nothing_is_split():
    fitted = fit(RULES, {"query": (3, 5, 7, 2)}, None, strict=True)["query"]
    assert fitted.spec == P(None, None, None, None)
    assert fitted.local_shape == (3, 5, 7, 2)


def test_a_short_spec_leaves_the_rest_unsplit():
    assert fit_one(P("a"), (2, 2, 4, 4), {"a": 2}).spec == P("a", None, None, None)


def test_the_same_on_any_kind_of_mesh():
    sizes = {"fsdp": 2, "tp": 2, "sp": 2}
    shapes = {"query": (4, 6, 8, 5), "key": (4, 6, 3, 5), "softmax_aux": (8,), "kv_segment_ids": (4, 6)}
    want = fit(RULES, shapes, sizes)
    names, numbers = tuple(sizes), tuple(sizes.values())
    real = jax.make_mesh(numbers, names, axis_types=(AxisType.Auto,) * 3)
    assert fit(RULES, shapes, real) == want
    assert fit(RULES, shapes, AbstractMesh(numbers, names)) == want
    assert fit(RULES, shapes, tuple(MeshAxis(n, s) for n, s in sizes.items())) == want


def test_a_pod_needs_no_devices():
    fitted = fit(RULES, {"query": (4096, 131072, 128, 128)}, AbstractMesh((64, 64, 8), ("fsdp", "tp", "sp")))["query"]
    assert fitted.local_shape == (64, 16384, 2, 128)
    assert fitted.local_bytes == 64 * 16384 * 2 * 128 * 4


def test_strict_names_tensor_mode_layout_dimension_axis_and_mend():
    rules = resolve_rules(PartitionAxis(), "prefill", "bhtd")
    shapes = {"query": (3, 8, 6, 4), "q_segment_ids": (3, 7)}
    with pytest.raises(ShardingError) as error:
        fit(rules, shapes, {"fsdp": 2, "tp": 4, "sp": 4}, mode="prefill", layout="bhtd", strict=True)
    text = str(error.value)
    assert "mode=prefill" in text
    assert "layout=bhtd" in text
    assert "fsdp=2,tp=4,sp=4" in text
    lines = text.splitlines()[1:]
    # batch 3 over fsdp (and dp, which the mesh lacks and needn't have), lengths 6 and 7 over sp; every problem in one error
    named = [
        ("query", "batch", "fsdp"),
        ("query", "q_len", "sp"),
        ("q_segment_ids", "batch", "fsdp"),
        ("q_segment_ids", "q_len", "sp"),
    ]
    assert len(lines) == len(named)
    for line, (tensor, dim, axis) in zip(lines, named, strict=True):
        assert line.strip().startswith(f"{tensor}, dimension {dim}, axis {axis!r}: ")
    assert "Make it a multiple of 4" in lines[1]
    assert isinstance(error.value, ValueError)


def test_strict_is_content_with_what_fits():
    axis = PartitionAxis(batch_axis="fsdp")
    fit(resolve_rules(axis, "train"), {"query": (2, 4, 4, 8)}, {"fsdp": 2, "tp": 4, "sp": 2}, strict=True)


@pytest.mark.parametrize(
    ("kv_heads", "shards", "factor"), [(1, 4, 4), (2, 4, 2), (4, 4, 1), (8, 4, 1), (3, 4, 4), (6, 4, 2), (5, 1, 1)]
)
@pytest.mark.parametrize("layout", ["bthd", "bhtd", "thd"])
def test_kv_heads_are_repeated_just_often_enough(kv_heads, shards, factor, layout):
    # by search: the least factor that lets every device have whole heads
    assert factor == next(f for f in range(1, 99) if kv_heads * f % shards == 0)
    assert kv_repeat(kv_heads, shards) == factor
    sizes = {"b": 2, "t": 6, "d": 8}
    query = tuple((sizes | {"h": kv_heads * 4})[letter] for letter in layout)
    key = tuple((sizes | {"h": kv_heads})[letter] for letter in layout)
    rules = resolve_rules(PartitionAxis(), "train", layout)
    fitted = fit(rules, {"query": query, "key": key, "value": key}, {"tp": shards, "fsdp": 2}, layout=layout)
    assert fitted.kv_repeat == factor
    at = layout.index("h")
    assert fitted["key"].shape[at] == kv_heads * factor
    assert fitted["key"].local_shape[at] == fitted["value"].local_shape[at] == kv_heads * factor // shards
    assert fitted["query"].local_shape[at] == kv_heads * 4 // shards


def test_kv_heads_error_says_what_to_do():
    rules = resolve_rules(PartitionAxis(), "train")
    shapes = {"query": (2, 4, 8, 8), "key": (2, 4, 2, 8)}
    with pytest.raises(ShardingError, match=r"2 kv heads .* split 4 ways over 'tp'") as error:
        fit(rules, shapes, {"tp": 4}, kv_heads="error")
    assert "kv_heads='replicate'" in str(error.value)
    assert "each head repeated 2 times" in str(error.value)
    assert fit(rules, shapes, {"tp": 2}, kv_heads="error").kv_repeat == 1
    with pytest.raises(ShardingError, match="wanted 'replicate' or 'error'"):
        fit(rules, shapes, {"tp": 4}, kv_heads="repeat")


def test_query_heads_that_cannot_be_split_need_no_repeat():
    fitted = fit(resolve_rules(PartitionAxis(), "train"), {"query": (2, 4, 6, 8), "key": (2, 4, 2, 8)}, {"tp": 4})
    assert fitted.kv_repeat == 1
    assert fitted["key"].shape == (2, 4, 2, 8)


def test_sinks_of_two_dimensions():
    rules = resolve_rules(PartitionAxis(), "train", aux_ndim=2)
    fitted = fit(rules, {"softmax_aux": (8, 4)}, {"tp": 4})["softmax_aux"]
    assert fitted.spec == P("tp", None)
    assert fitted.local_shape == (2, 4)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"querry": (2, 4, 4, 8)}, "Did you mean 'query'"),
        ({"query": (2, 4, 8)}, r"requires dimensions \(batch, q_len, heads, head_dim\)"),
        ({"key": (2, 4, 8)}, r"requires dimensions \(batch, kv_len, kv_heads, kv_head_dim\)"),
        ({"softmax_aux": (4,)}, "no spec for it"),
    ],
)
def test_shapes_that_have_no_place_in_the_rules(shapes, message):
    with pytest.raises(ShardingError, match=message):
        fit(RULES._replace(softmax_aux=None), shapes, MESH)


def test_a_spec_longer_than_its_tensor():
    with pytest.raises(ShardingError, match="for 3 dimensions"):
        fit(one("q_segment_ids", P(None, None, "tp")), {"q_segment_ids": (2, 4)}, {"tp": 2})


@pytest.mark.parametrize("size", [0, -1, True, "2", 2.0])
def test_sizes_of_a_mesh_are_positive_integers(size):
    with pytest.raises(ShardingError, match="mesh axis 'tp' has size"):
        fit(RULES, {"query": (2, 4, 4, 8)}, {"tp": size})


@pytest.mark.parametrize("wrong", [{"mode": "trian"}, {"layout": "bhdt"}])
def test_mode_and_layout_are_checked(wrong):
    with pytest.raises(InputError, match="Did you mean"):
        fit(RULES, {"query": (2, 4, 4, 8)}, {"tp": 2}, **wrong)
