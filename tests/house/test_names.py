"""Names that can't be printed on one line, or written as UTF-8, are refused where they enter."""

from __future__ import annotations

import json
import xml.dom.minidom
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from attnops import (
    AttnOpsError,
    ConfigError,
    Declaration,
    KVCache,
    ModelDeclaration,
    OperationMetadata,
    OperationRegistry,
    ShardingError,
)
from attnops.compat import abstract_device
from attnops.drawing import DevicePicture
from attnops.operators.splash import SplashConfig

UNPRINTABLE = (
    "a\x1b]0;owned\x07",
    "tp\nruns      splash.forward_tpu",
    "a\x01b",
    "a\x7f",
    "a\u2028b",
    "a\u202eb",
    "\ud800",
    "a\udfffb",
)
FINE = ("données", "模型", "a b", "it's", "🙂")
CACHE = {"layers": 1, "kv_heads": 2, "head_dim": 64, "pages": 8, "max_sequences": 2, "max_length": 32}
X = jax.ShapeDtypeStruct((2, 16, 4, 8), "float32")


def _declared(metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        "operation": "vanilla",
        "metadata": metadata,
        "call": {"batch": 2, "q_len": 16, "q_heads": 4, "head_dim": 8},
    }


def _planned(mesh: AbstractMesh) -> None:
    OperationRegistry.create("vanilla", OperationMetadata(mesh=mesh)).plan(X, X, X)


def _abstract(axis: str, kind: str) -> AbstractMesh:
    device = abstract_device(kind, 1, "cpu")
    return AbstractMesh((2,), (axis,), axis_types=(AxisType.Auto,), abstract_device=device)


CONSTRUCTORS: dict[str, Callable[[str], Any]] = {
    "metadata.mesh": lambda name: OperationMetadata(mesh={name: 2}),
    "metadata.mesh, whole": lambda name: OperationMetadata(mesh={"axis_names": [name], "axis_sizes": [2]}),
    "metadata.mesh.device_kind": lambda name: OperationMetadata(
        mesh={"axis_names": ["tp"], "axis_sizes": [2], "platform": "tpu", "device_kind": name}
    ),
    "metadata.partition_axis": lambda name: OperationMetadata(partition_axis={"head_axis": name}),
    "metadata.partition_axis, several": lambda name: OperationMetadata(partition_axis={"batch_axis": ["fsdp", name]}),
    "metadata.sequence_axis_name": lambda name: OperationMetadata(sequence_axis_name=name),
    "metadata.operation_configs": lambda name: OperationMetadata(
        operation_configs={"splash": {"residual_checkpoint_name": name}}
    ),
    "config": lambda name: SplashConfig(residual_checkpoint_name=name),
    "cache.kv_head_axis": lambda name: KVCache(**CACHE, kv_head_axis=name),
    "cache.pages_axis": lambda name: KVCache(**CACHE, pages_axis=("fsdp", name)),
    "cache.plan's mesh": lambda name: KVCache(**CACHE).plan(_abstract(name, "cpu")),
    "cache.plan's device_kind": lambda name: KVCache(**CACHE).plan(device_kind=name),
    "a mesh's axis": lambda name: _planned(_abstract(name, "cpu")),
    "a device's kind": lambda name: _planned(_abstract("fsdp", name)),
}


@pytest.mark.parametrize("name", UNPRINTABLE, ids=ascii)
@pytest.mark.parametrize("make", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_constructors_refuse_what_can_not_be_printed(make: Callable[[str], Any], name: str) -> None:
    with pytest.raises(AttnOpsError) as caught:
        make(name)
    assert isinstance(caught.value, ConfigError | ShardingError)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", FINE)
@pytest.mark.parametrize("make", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_constructors_take_any_printable_name(make: Callable[[str], Any], name: str) -> None:
    make(name)


READERS: dict[str, Callable[[str, Path], Any]] = {
    "declaration": lambda name, _: Declaration.from_json(json.dumps(_declared({"mesh": {name: 2}}))),
    "declaration, from a dict": lambda name, _: Declaration.from_dict(_declared({"mesh": {name: 2}})),
    "declaration, a value": lambda name, _: Declaration.from_dict(
        _declared({"partition_axis": {"batch_axis": [name]}})
    ),
    "declaration, $schema": lambda name, _: Declaration.from_dict({"$schema": name, **_declared({})}),
    "metadata": lambda name, _: OperationMetadata.from_json(json.dumps({"mesh": {name: 2}})),
    "cache": lambda name, _: KVCache.from_json(json.dumps({**CACHE, "kv_head_axis": name})),
    "model": lambda name, path: ModelDeclaration.from_config(_written(path, {"model_type": "llama", name: 1})),
    "model, a value": lambda name, path: ModelDeclaration.from_config(
        _written(path, {"model_type": "llama", "_name_or_path": [[name]]})
    ),
    "model, a dict": lambda name, _: ModelDeclaration.from_config({"model_type": "llama", name: 1}),
}


def _written(path: Path, data: dict[str, Any]) -> Path:
    path.write_text(json.dumps(data), encoding="ascii")
    return path


@pytest.mark.parametrize("name", ["\ud800", "tp\udc00"], ids=ascii)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_readers_refuse_half_of_a_surrogate_pair(read: Callable[[str, Path], Any], name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\\ud[0-9a-f]{3}"):
        read(name, tmp_path / "config.json")


def test_a_whole_pair_is_read_and_written_again() -> None:
    text = '{"operation": "vanilla", "metadata": {"mesh": {"\\ud83d\\ude42": 2}}, "call": {}}'
    read = Declaration.from_json(text)
    assert read.metadata == {"mesh": {"\U0001f642": 2}}
    assert Declaration.from_json(read.to_json()) == read


def test_pictures_are_well_formed_whatever_their_text() -> None:
    text = "a\x00b\x1b<&\ud800\ufffe"
    picture = DevicePicture(text, (("fsdp", 1),), (0,), (), (), (text,))
    drawn = xml.dom.minidom.parseString(picture.svg()).getElementsByTagName("text")
    assert "a\ufffdb\ufffd<&\ufffd\ufffd" in [node.firstChild.data for node in drawn]
