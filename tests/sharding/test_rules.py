"""The ten PartitionSpecs of every mode and layout, resolved from any eformer PartitionAxis."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from eformer import common_types as semantic
from eformer.escale import PartitionAxis
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import attnops
from attnops.errors import InputError
from attnops.registry import OperationMetadata
from attnops.sharding import LAYOUTS, MODES, AttnShardingRules, canonical_layout, canonical_mode, resolve_rules

FIELDS = (
    "query3d", "query", "key", "value", "bias", "mask", "output", "q_segment_ids", "kv_segment_ids", "softmax_aux",
)  # fmt: skip

# Every rule has a mesh axis of its own, so a wrong one can't hide. Capitals are used while generating.
AXIS = PartitionAxis(
    batch_axis=("b1", "b2"),
    query_sequence_axis="q",
    key_sequence_axis="k",
    head_axis="h",
    kv_head_axis="g",
    attention_dim_axis="d",
    attention_kv_dim_axis="e",
    bias_head_sequence_axis="bias_h",
    bias_key_sequence_axis="bias_k",
    decode_batch_axis=("B1", "B2"),
    decode_query_sequence_axis="Q",
    decode_key_sequence_axis="K",
    decode_head_axis="H",
    decode_kv_head_axis="G",
    decode_attention_dim_axis="D",
    decode_attention_kv_dim_axis="E",
)
B = ("b1", "b2")
BD = ("B1", "B2")

BIAS = {"train": P(B, "bias_h", "q", "bias_k"), "decode": P(BD, "bias_h", "Q", "bias_k")}
MASK = {"train": P(B, None, "q", "bias_k"), "decode": P(BD, None, "Q", "bias_k")}
QUERY3D = {"train": P(B, "h", "d"), "decode": P(BD, "H", "D")}
# (layout, generating) -> query, key, key with qkv_mni_sharding, q segment ids, kv segment ids
TABLE = {
    ("bthd", "train"): (P(B, "q", "h", "d"), P(B, "k", "g", "e"), P(B, "k", "h", "d"), P(B, "q"), P(B, "k")),
    ("bhtd", "train"): (P(B, "h", "q", "d"), P(B, "g", "k", "e"), P(B, "h", "k", "d"), P(B, "q"), P(B, "k")),
    ("thd", "train"): (P("q", "h", "d"), P("k", "g", "e"), P("k", "h", "d"), P("q"), P("k")),
    ("bthd", "decode"): (P(BD, "Q", "H", "D"), P(BD, "K", "G", "E"), P(BD, "K", "H", "D"), P(BD, "Q"), P(BD, "K")),
    ("bhtd", "decode"): (P(BD, "H", "Q", "D"), P(BD, "G", "K", "E"), P(BD, "H", "K", "D"), P(BD, "Q"), P(BD, "K")),
    ("thd", "decode"): (P("Q", "H", "D"), P("K", "G", "E"), P("K", "H", "D"), P("Q"), P("K")),
}
MODE_NAMES = {
    "__train__": "train",
    "train": "train",
    "__prefill__": "train",
    "prefill": "train",
    "__autoregressive__": "decode",
    "autoregressive": "decode",
    "decode": "decode",
    "__insert__": "decode",
    "insert": "decode",
}


@pytest.fixture
def _clean_eformer():
    yield
    PartitionAxis.clear_registered_axes()


def test_the_ten_fields_in_order():
    assert AttnShardingRules._fields == FIELDS
    assert issubclass(AttnShardingRules, tuple)


@pytest.mark.parametrize(
    ("mode", "layout", "mni"), list(itertools.product(MODE_NAMES, ("bthd", "bhtd", "thd"), (False, True)))
)
def test_every_mode_and_layout(mode, layout, mni):
    when = MODE_NAMES[mode]
    query, key, key_by_query, q_ids, kv_ids = TABLE[layout, when]
    key = key_by_query if mni else key
    got = OperationMetadata(partition_axis=AXIS).get_shardings(mode, layout, mni)
    want = (QUERY3D[when], query, key, key, BIAS[when], MASK[when], query, q_ids, kv_ids, None)
    assert tuple(got) == want


@pytest.mark.parametrize("mode", ["train", "decode"])
def test_sinks_split_their_heads_and_never_the_sinks(mode):
    metadata = OperationMetadata(partition_axis=AXIS)
    head = {"train": "h", "decode": "H"}[mode]
    assert metadata.get_shardings(mode).softmax_aux is None
    assert metadata.get_shardings(mode, softmax_aux=np.zeros(4)).softmax_aux == P(head)
    two = metadata.get_shardings(mode, softmax_aux=np.zeros((4, 2))).softmax_aux
    assert two == P(head, None)
    assert metadata.get_shardings(mode, softmax_aux=2).softmax_aux == two
    with pytest.raises(InputError, match="softmax_aux has 3 dimensions"):
        metadata.get_shardings(mode, softmax_aux=np.zeros((4, 2, 1)))


def test_the_defaults_of_eformer():
    rules = OperationMetadata().get_shardings("train")
    batch = ("fsdp", "dp")
    assert rules.query3d == P(batch, "tp", None)
    assert rules.query == rules.key == rules.value == rules.output == P(batch, "sp", "tp", None)
    assert rules.bias == rules.mask == P(batch, None, "sp", None)
    assert rules.q_segment_ids == rules.kv_segment_ids == P(batch, "sp")


def test_decode_axis_of_none_means_unsplit_unlike_upstream():
    """eformer 0.0.101 takes decode_*_axis=None as not given and falls back to the training axis; () works around it."""
    axes = [semantic.BATCH, semantic.QUERY_LENGTH, semantic.HEAD, semantic.HEAD_DIM]
    default = PartitionAxis()
    assert default.decode_query_sequence_axis is None
    upstream = default.resolve_spec(axes, semantic.MODE_DECODE)
    ours = resolve_rules(default, "autoregressive").query
    assert upstream == P(("fsdp", "dp"), "sp", "tp", None)  # a query of one token split over sp
    assert ours == P(("fsdp", "dp"), None, "tp", None)

    no_batch = PartitionAxis(decode_batch_axis=None, decode_head_axis=None)
    assert no_batch.resolve_spec(axes, semantic.MODE_INSERT) == P(("fsdp", "dp"), "sp", "tp", None)
    assert resolve_rules(no_batch, "insert").query == P(None, None, None, None)
    assert resolve_rules(no_batch, "insert").query3d == P(None, None, None)
    # while training nothing changes
    assert resolve_rules(no_batch, "train").query == no_batch.resolve_spec(axes, semantic.MODE_TRAIN)

    spelt_out = PartitionAxis(decode_query_sequence_axis=())
    assert not spelt_out.resolve_spec(axes, semantic.MODE_DECODE)[1]
    assert resolve_rules(spelt_out, "decode").query[1] is None


def test_custom_mesh_axis_names():
    axis = PartitionAxis(
        data_parallel_axis="replica", fully_sharded_data_parallel_axis="zero", tensor_parallel_axis="model",
        sequence_parallel_axis="context",
    )  # fmt: skip
    assert resolve_rules(axis, "train").query == P(("zero", "replica"), "context", "model", None)
    assert resolve_rules(axis, "decode").key == P(("zero", "replica"), "context", "model", None)


@pytest.mark.parametrize("empty", [None, (), []])
def test_nothing_is_split_over_nothing(empty):
    axis = PartitionAxis(batch_axis=empty, head_axis=empty, kv_head_axis=empty, query_sequence_axis=empty)
    assert resolve_rules(axis, "train").query == P(None, None, None, None)


@pytest.mark.usefixtures("_clean_eformer")
@pytest.mark.parametrize(
    ("rule", "generation", "train", "decode"),
    [
        ("cluster", semantic.NOT_GIVEN, "cluster", "cluster"),
        ("cluster", "node", "cluster", "node"),
        ("kv_head_axis", semantic.NOT_GIVEN, "g", "G"),
        (("x", "y"), None, ("x", "y"), None),
        (("batch_axis", "x"), semantic.NOT_GIVEN, ("b1", "b2", "x"), ("b1", "b2", "x")),
        (None, semantic.NOT_GIVEN, None, None),
        (None, "node", None, "node"),
    ],
)
def test_axes_registered_with_eformer_are_honoured(rule, generation, train, decode):
    PartitionAxis.register(semantic.HEAD, rule, generation_axis_rule=generation, override=True)
    for mode, want, batch, rest in (("prefill", train, B, ("q", "d")), ("insert", decode, BD, ("Q", "D"))):
        rules = resolve_rules(AXIS, mode, aux_ndim=1)
        assert rules.query == P(batch, rest[0], want, rest[1])
        assert rules.query3d == P(batch, want, rest[1])
        assert rules.softmax_aux == P(want)
        assert rules.key[2] == ("g" if mode == "prefill" else "G")  # the other axes are left alone
        assert resolve_rules(AXIS, mode, qkv_mni_sharding=True).key[2] == want


@pytest.mark.usefixtures("_clean_eformer")
def test_a_registration_is_seen_by_metadata_that_exists_already():
    metadata = OperationMetadata(partition_axis=AXIS)
    before = metadata.get_shardings("train").query
    PartitionAxis.register(semantic.QUERY_LENGTH, "ring", override=True)
    assert metadata.get_shardings("train").query == P(B, "ring", "h", "d")
    PartitionAxis.unregister(semantic.QUERY_LENGTH)
    assert metadata.get_shardings("train").query == before


AXES = st.one_of(
    st.none(),
    st.sampled_from(["a", "b", "c", "x.y"]),
    st.lists(st.sampled_from(["a", "b", "c"]), unique=True, max_size=3).map(tuple),
)
RULES = [f.name for f in dataclasses.fields(PartitionAxis) if not f.name.endswith("_parallel_axis")]


def _canonical(spec):
    """A spec as a tuple of tuples: jax takes 'a' and ('a',), None and () for the same."""
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(RULES, AXES)), st.sampled_from(MODES), st.sampled_from(LAYOUTS))
def test_agrees_with_eformer_wherever_its_rule_is_not_none(rules, mode, layout):
    axis = PartitionAxis(**rules)
    letters = {"b": semantic.BATCH, "t": semantic.QUERY_LENGTH, "h": semantic.HEAD, "d": semantic.HEAD_DIM}
    kv = {"b": semantic.BATCH, "t": semantic.KV_LENGTH, "h": semantic.KV_HEAD, "d": semantic.KV_HEAD_DIM}
    attribute = {
        semantic.BATCH: "decode_batch_axis",
        semantic.QUERY_LENGTH: "decode_query_sequence_axis",
        semantic.KV_LENGTH: "decode_key_sequence_axis",
        semantic.HEAD: "decode_head_axis",
        semantic.KV_HEAD: "decode_kv_head_axis",
        semantic.HEAD_DIM: "decode_attention_dim_axis",
        semantic.KV_HEAD_DIM: "decode_attention_kv_dim_axis",
    }
    got = resolve_rules(axis, mode, layout)
    assert resolve_rules(attnops.PartitionAxis(**rules), mode, layout) == got
    for tensor, meaning in (("query", letters), ("output", letters), ("key", kv), ("value", kv)):
        axes = [meaning[letter] for letter in layout]
        upstream = _canonical(axis.resolve_spec(axes, mode))
        generating = mode in ("__autoregressive__", "__insert__")
        want = tuple(
            () if generating and getattr(axis, attribute[a]) is None else up
            for a, up in zip(axes, upstream, strict=True)
        )
        assert _canonical(getattr(got, tensor)) == want


def test_short_names_are_the_same_mode():
    for mode in ("__train__", "__prefill__", "__autoregressive__", "__insert__"):
        assert canonical_mode(mode) == canonical_mode(mode.strip("_")) == mode
    assert canonical_mode("decode") == "__autoregressive__"
    assert [canonical_layout(layout) for layout in ("bthd", "bhtd", "thd")] == ["bthd", "bhtd", "thd"]


@pytest.mark.parametrize(
    ("mode", "close"),
    [
        ("trian", "'train'"),
        ("__autoregresive__", "'__autoregressive__'"),
        ("pre_fill", "'prefill'"),
        ("Insert", "'insert'"),
    ],
)
def test_an_unknown_mode_names_the_nearest(mode, close):
    with pytest.raises(InputError, match="not a mode") as error:
        OperationMetadata().get_shardings(mode)
    assert f"Did you mean {close}?" in str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("mode", [None, 3, [], "typo-of-nothing"])
def test_what_is_no_mode_at_all_is_refused(mode):
    with pytest.raises(InputError, match=r"wanted one of .*train"):
        OperationMetadata().get_shardings(mode)


@pytest.mark.parametrize(("layout", "close"), [("bht", "'bhtd'"), ("bthdd", "'bthd'"), ("BTHD", ""), (None, "")])
def test_an_unknown_layout_is_refused(layout, close):
    with pytest.raises(InputError, match="wanted one of bthd, bhtd, thd") as error:
        OperationMetadata().get_shardings("train", layout)
    assert close in str(error.value)
