"""Keywords that nothing takes: what they are called here; and arrays that lie on different devices."""

import inspect
from typing import Unpack, get_type_hints

import jax
import numpy as np
import pytest

from attnops import Attention, AttnOpsError, ConfigError, Declaration, InputError, OperationMetadata, OperationRegistry
from attnops.authoring import Operation
from attnops.call_arguments import CALL_ARGUMENTS, CALL_OPTIONS, CallArguments
from attnops.errors import InputTypeError, a_type, first_line, shown
from attnops.operators.call.options import Options
from attnops.planning import other_names
from attnops.registry.call_declaration import CallDeclaration
from attnops.registry.metadata import METADATA_ARGUMENTS
from attnops.sharding import ATTENTION

QUERY = np.ones((1, 8, 2, 4), np.float32)
ATTEND = OperationRegistry.get("vanilla")()
DECLARED = Attention({"operation": "vanilla"})
WAYS = {
    "call": ATTEND, "plan": ATTEND.plan, "explain": ATTEND.explain, "declared": DECLARED, "declared plan": DECLARED.plan,
    "declared explain": DECLARED.explain,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("casual", "'casual' is not an argument of a call. Did you mean 'causal'?"),
        ("is_causal", "Here it is causal; the default is OperationMetadata's, which is True"),
        ("scale", "Here it is softmax_scale"),
        ("local_window_size", "Here it is sliding_window, with the same meaning"),
        ("window_size", "None, not -1, for no bound"),
        ("attn_mask", "True where a query may attend; what is added to the logits is bias"),
        ("key_value_seq_lengths", "Here it is kv_lengths"),
        ("query_seq_lengths", "ignore their output"),
        ("segment_ids", "Here it is q_segment_ids and kv_segment_ids"),
        ("dropout_p", "Here it is dropout_prob; weights are dropped only with deterministic=False"),
        ("enable_gqa", "Leave it out"),
        ("softcap", "None, not 0, for none"),
        ("s_aux", "Here it is softmax_aux"),
        ("tuning", "It is an argument of OperationMetadata."),
        ("zzz", "'zzz' is not an argument of a call. Wanted query, key, value, mask"),
    ],
)
def test_a_call(way, name, says):
    with pytest.raises(InputTypeError) as caught:
        WAYS[way](QUERY, QUERY, QUERY, **{name: True})
    assert says in str(caught.value)
    assert isinstance(caught.value, TypeError)
    assert str(caught.value).startswith(f"'{name}' is not an argument of a call.")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("casual", "Did you mean 'causal'?"),
        ("is_causal", "Here it is causal, for calls without a Mask object"),
        ("attn_dtype", "Here it is runtime_dtype"),
        ("dropout_rate", "Here it is dropout_prob."),
        ("scale", "Here it is softmax_scale"),
        (
            "softcap",
            "Here it is logits_soft_cap: cap * tanh(logits / cap), and None, not 0, for none. It belongs to the call.",
        ),
        ("sliding_window", "It is an argument of the call."),
        ("zzz", "Wanted runtime_dtype, runtime_softmax_dtype"),
    ],
)
def test_metadata(name, says):
    with pytest.raises(InputTypeError) as caught:
        OperationMetadata(**{name: 1})
    assert says in str(caught.value)
    if name not in ("sliding_window", "zzz"):
        with pytest.raises(ConfigError) as caught:
            OperationMetadata.from_dict({name: 1})
        assert says in str(caught.value)


def test_a_file():
    call = {"q_len": 8, "q_heads": 2, "head_dim": 4}
    with pytest.raises(ConfigError, match=r"Here it is causal; the default"):
        Declaration.from_dict({"operation": "vanilla", "call": call | {"is_causal": True}})
    with pytest.raises(ConfigError, match="Did you mean 'causal'"):
        Declaration.from_dict({"operation": "vanilla", "call": call | {"casual": True}})


def test_the_names_are_those_of_the_signatures():
    """help() and the messages list what an editor completes, which is CallArguments."""
    taken = ("query", "key", "value", *get_type_hints(CallArguments))
    assert taken == CALL_ARGUMENTS
    for owner, names in (
        (Operation, ("__call__", "plan", "explain")),
        (Attention, ("__call__", "plan", "explain", "options")),
    ):
        for name in names:
            method = getattr(owner, name)
            assert tuple(inspect.signature(method).parameters)[1:] == taken
            assert get_type_hints(method)["call"] == Unpack[CallArguments]
    assert not set(other_names.NAMES_ELSEWHERE) & set(CALL_ARGUMENTS)
    assert tuple(inspect.signature(OperationMetadata).parameters) == METADATA_ARGUMENTS
    assert not set(other_names._METADATA) & set(METADATA_ARGUMENTS)


def test_every_argument_has_a_place():
    """Each is kept as an array, an option, or (query_offset) either; a file's option has the default of a call's."""
    arrays, options = (
        set(ATTENTION.names),
        set(Options._fields) - {"mask_is_array", "value_columns"},
    )  # how mask and value were given
    assert arrays | options == set(CALL_ARGUMENTS)
    assert arrays & options == {"query_offset"}
    assert options - {"mask", "score"} == set(CALL_OPTIONS)
    for name in CALL_OPTIONS:
        assert CallDeclaration.model_fields[name].default == Options._field_defaults[name], name


def test_unknown_beside_known():
    with pytest.raises(InputTypeError) as caught:
        ATTEND(QUERY, QUERY, QUERY, causal=True, softcap=3.0, sinks=None)
    assert "'causal'" not in str(caught.value)
    assert "logits_soft_cap" in str(caught.value)
    assert "softmax_aux" in str(caught.value)


def test_different_devices():
    here, there = (jax.device_put(QUERY, device) for device in jax.devices()[:2])
    with pytest.raises(
        InputError, match=r"query, value on .*; key on .*jax\.device_put\(key, query\.sharding\)"
    ) as caught:
        ATTEND(here, there, here)
    assert len(str(caught.value)) < 400
    with pytest.raises(InputError, match=r"committed to different devices: query, key, value on .*; mask on"):
        ATTEND(here, here, here, mask=jax.device_put(np.tril(np.ones((1, 1, 8, 8), bool)), jax.devices()[1]))
    assert ATTEND(here, QUERY, QUERY).attention_outputs.devices() == {jax.devices()[0]}
    declared = OperationRegistry.get("vanilla")(OperationMetadata(mesh={"tp": 2}))
    assert len(declared(here, there, here).attention_outputs.devices()) == 2  # a mesh brings them together


@pytest.mark.parametrize("field", ["runtime_dtype", "runtime_softmax_dtype"])
@pytest.mark.parametrize(
    "value",
    [
        {"path": "plain"},
        {"names": ["a"]},
        ["float32"],
        "float31",
        "(",
        5,
        "x" * 5000,
        QUERY,
        jax.random.key(0),
        "i4",
        "V8",
    ],
)
def test_dtypes(field, value):
    with pytest.raises(ConfigError, match=f"^{field}=") as caught:
        OperationMetadata(**{field: value})
    assert len(str(caught.value)) < 250


def test_dtypes_of_another_byte_order():
    assert OperationMetadata(runtime_dtype=np.dtype(">f4")) == OperationMetadata(runtime_dtype="float32")


def test_values_are_shown_short():
    """Whatever somebody gave: in one line of 80 characters, and no error of its own."""

    class Broken:
        def __repr__(self):
            raise ValueError("no")

    endless = []
    endless.append(endless)
    deep = []
    for _ in range(5000):
        deep = [deep]
    strings = ("x" * 10**6, b"x" * 10**6, "a\nb")
    collections = (list(range(10**5)), {str(i): i for i in range(10**5)}, endless, deep, {1, 2}, frozenset("ab"))
    others = (10**10000, -(10**10000), Broken(), np.ones((50, 50)), jax.numpy.ones(3), object())
    for value in (*strings, *collections, *others):
        text = shown(value)
        assert len(text) <= 80
        assert "\n" not in text
    assert [shown(v) for v in (3, "a", None, [1, "b"], {"a": 1.5}, (1,), True)] == [
        "3", "'a'", "None", "[1, 'b']", "{'a': 1.5}", "(1,)", "True",
    ]  # fmt: skip
    assert shown(-(10**400)) == "-(an int of about 401 digits)"
    assert [a_type(v) for v in (1, "a", None, [], np.uint8(1), {})] == [
        "an int",
        "a str",
        "None",
        "a list",
        "a uint8",
        "a dict",
    ]
    assert first_line(ValueError("one.\ntwo")) == "one"
    assert first_line(RecursionError()) == "RecursionError"


def test_messages_are_short():
    long = "x" * 5000
    mesh = {"axis_names": [long], "axis_sizes": [0]}
    for more in (
        {"operation": long},
        {long: 1},
        {"call": {"mode": long}},
        {"call": {long: 1}},
        {"metadata": {"mesh": mesh}},
    ):
        data = {"operation": "vanilla"} | more
        with pytest.raises(AttnOpsError) as caught:
            Attention(data)
        assert len(str(caught.value)) < 1200
