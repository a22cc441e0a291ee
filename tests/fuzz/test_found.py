"""What the fuzzer found, each by itself."""

from __future__ import annotations

import contextlib
import io
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzz_cases import MODELS
from fuzz_commands import run_command

import attnops
from attnops import Attention, ConfigError, Declaration, InputError, ModelDeclaration, OperationMetadata
from attnops.cli.app import main
from attnops.errors import InputTypeError, MaskError
from attnops.masks import And
from attnops.verify.topology import described_mesh

LLAMA = next(model for model in MODELS if model["model_type"] == "llama")
CALL = {"q_len": 8, "q_heads": 2, "head_dim": 4}
QUERY = jax.ShapeDtypeStruct((2, 16, 4, 8), jnp.float32)


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu")
@pytest.mark.parametrize(
    "topology", ["v5e:0x0", "v5e:2x0", "v5p:0x2x2", "", " ", "v5e:65536x65536", "v5e:" + "9" * 5000]
)
def test_topologies_that_libtpu_must_not_see(topology: str) -> None:
    """A size of 0 ended the process by SIGFPE; an empty name was a topology of libtpu's choice."""
    with pytest.raises(ConfigError, match="wanted a generation and sizes from 1 on") as caught:
        described_mesh(topology)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("kind", [["llama"], {"a": 1}, 5, 1.5, True])
def test_a_model_type_that_is_no_name(kind: Any) -> None:
    for config in (LLAMA | {"model_type": kind}, {"model_type": kind, "text_config": LLAMA}):
        with pytest.raises(ConfigError, match="model_type"):
            ModelDeclaration.from_config(config)
    with pytest.raises(ConfigError, match="family"):
        ModelDeclaration.from_config(LLAMA, family=kind)


def test_more_layers_than_a_model_has() -> None:
    """2**31 - 1 of them took all memory."""
    with pytest.raises(ConfigError, match="num_hidden_layers=2147483647; wanted a whole number from 1 to 10000"):
        ModelDeclaration.from_config(LLAMA | {"num_hidden_layers": 2**31 - 1})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"q_len": 8, "kv_len": "9"}, "kv_len='9'"),
        ({"q_len": True}, "q_len=True"),
        ({"batch": 0}, "batch=0"),
        ({"metadata": "causal"}, "metadata='causal'; wanted a dict"),
        ({"ignore": 3.0}, "ignore=3.0; wanted the names of keys"),
        ({"ignore": [["a"]]}, "wanted the names of keys"),
        ({"part": ["encoder"]}, "part="),
    ],
)
def test_arguments_beside_a_model(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelDeclaration.from_config(LLAMA, **arguments)
    assert says in str(caught.value)


def test_a_text_config_is_no_path() -> None:
    with pytest.raises(ConfigError, match=r"text_config='/etc/passwd'; wanted an object"):
        ModelDeclaration.from_config({"model_type": "llava", "text_config": "/etc/passwd"})


def test_keys_beside_a_text_config_are_told() -> None:
    """They were passed over in silence, attention's own among them."""
    model = {
        "model_type": "llava",
        "text_config": LLAMA,
        "vision_config": {},
        "image_token_index": 5,
        "dtype": "bfloat16",
    }
    beside = {"attn_logit_softcapping": 30.0, "zz": 1, "sliding_window": None}
    notes = ModelDeclaration.from_config(model | beside, q_len=8).notes
    assert "not read, as they are outside text_config: attn_logit_softcapping, zz" in notes
    assert not any("outside" in note for note in ModelDeclaration.from_config(model, q_len=8).notes)


def test_keys_that_are_no_strings() -> None:
    """str() of one made another of it."""
    for metadata in ({1: 2}, {"mesh": {1: 2, "1": 4}}, {"partition_axis": {None: "x"}}):
        with pytest.raises(ConfigError, match=r"wanted strings, as in JSON|valid string"):
            Declaration.from_dict({"operation": "vanilla", "metadata": metadata})
    with pytest.raises(ConfigError, match="wanted strings"):
        ModelDeclaration.from_config(LLAMA | {1: 2})
    with pytest.raises(ConfigError, match="unknown field 1"):
        OperationMetadata(partition_axis={1: "x"})  # type: ignore[dict-item]


def test_nesting_without_end() -> None:
    deep: Any = "x"
    for _ in range(3000):
        deep = {"a": deep}
    for data in (
        {"operation": "vanilla", "metadata": deep},
        {"operation": "vanilla", "call": {"mask": deep}},
        {"operation": deep},
    ):
        with pytest.raises((ConfigError, MaskError)) as caught:
            Attention(data)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "\ud800", "."])
def test_names_that_no_file_has(path: str) -> None:
    for load in (Declaration.load, Attention, ModelDeclaration.from_config):
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("layout", [np.ones(4, np.uint32), 5, ["bthd"], "btdh"])
def test_a_layout_that_is_none(layout: Any) -> None:
    attention = Attention({"operation": "vanilla", "call": {"kv_heads": 4}})
    with pytest.raises((InputError, InputTypeError), match="layout"):
        attention.plan(QUERY, QUERY, QUERY, layout=layout)


def test_what_is_no_array() -> None:
    attention, plain = (
        Attention({"operation": "vanilla", "call": {"dtype": "float32"}}),
        attnops.OperationRegistry.get("vanilla")(),
    )
    with pytest.raises(InputError, match="key is key<fry>; the file declares"):
        attention.plan(QUERY, jax.random.split(jax.random.key(0), (2, 16, 4, 8)), QUERY)
    mesh = jax.sharding.AbstractMesh((2,), ("tp",))  # has a shape: a dict
    with pytest.raises(InputTypeError, match="dropout_rng is an AbstractMesh"):
        plain(QUERY, QUERY, QUERY, dropout_rng=mesh)
    with pytest.raises(InputTypeError, match="bias is a dict"):
        plain.plan(QUERY, QUERY, QUERY, bias={1: 2, None: 3})
    for masks in (5, None, jax.random.key(0), "causal", {"a": 1}):
        with pytest.raises(MaskError, match="wanted a tuple of masks"):
            And(masks)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["device_kind", "num_cores", "abstract"])
def test_a_mesh_with_values_of_another_type(key: str) -> None:
    with pytest.raises(ConfigError, match=f"mesh: {key}=\\['x'\\]"):
        OperationMetadata(mesh={"axis_names": ["tp"], "axis_sizes": [2], "platform": "cpu", key: ["x"]})


@pytest.mark.parametrize("number", [10**400, -(10**5000), float("nan")], ids=["400", "5000", "nan"])
def test_numbers_that_no_float_holds(number: Any) -> None:
    for build in (
        lambda: OperationMetadata(softmax_scale=number),
        lambda: Attention({"operation": "vanilla"}).plan(QUERY, QUERY, QUERY, softmax_scale=number),
        lambda: OperationMetadata(platform=number),
        lambda: attnops.Causal(number),
    ):
        with pytest.raises(attnops.AttnOpsError) as caught:
            build()
        assert len(str(caught.value)) < 300


def test_names_that_a_terminal_can_not_show(tmp_path: Path) -> None:
    """A lone surrogate in a name, and the plus-minus of a window where the terminal speaks ASCII."""
    path = tmp_path / "a.json"
    metadata = {"mesh": {"\ud800": 1}, "partition_axis": {"batch_axis": "\ud800"}}
    path.write_text(json.dumps({"operation": "vanilla", "metadata": metadata, "call": CALL}))
    ended = run_command(["plan", str(path)])
    assert (ended.status, ended.out) == (2, "")
    assert "\\ud800" in ended.err
    model = tmp_path / "model.json"
    model.write_text(json.dumps(next(model for model in MODELS if model["model_type"] == "modernbert")))
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(stream):
        assert main(["plan", "--model", str(model), "--q-len", "64"]) == 0
    stream.flush()
    assert b"local \\xb164" in stream.buffer.getvalue()
