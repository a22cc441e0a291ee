"""`attnops plan --model --write`: the written file alone gives the plan that was printed, whatever options were given."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from attnops import Declaration
from attnops.cli.app import app

MODEL = {
    "model_type": "gemma2", "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32,
    "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 20, "alibi": True,
}  # fmt: skip
BART = {"model_type": "bart", "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "d_model": 16, "max_position_embeddings": 64}  # fmt: skip
# Of no declaration: where it is read from, how it is told, where it is written.
NOT_DECLARED = {"config", "inputs", "model", "write", "verbose", "as_json", "help"}
# A value for each option, and what has to be given with it.
VALUES: dict[str, tuple[str, ...]] = {
    "mesh": ("--mesh", "fsdp=2,dp=1,tp=2,sp=1"),
    "mode": ("--mode", "prefill"),
    "target": ("--target", "tpu"),
    "strict": ("--strict",),
    "fallback": ("--fallback", "allow"),
    "operation": ("--operation", "vanilla"),
    "family": ("--family", "gemma2"),
    "assume": ("--assume", "llama"),
    "part": ("--part", "cross", "--kv-len", "32"),
    "ignore": ("--ignore", "alibi"),
    "dtype": ("--dtype", "float16"),
    "batch": ("--batch", "4"),
    "q_len": ("--q-len", "24"),
    "kv_len": ("--kv-len", "64"),
    "layer": ("--layer", "1"),
}
TARGETS = ("mesh", "mode", "target", "strict", "fallback")
has_libtpu = importlib.util.find_spec("libtpu") is not None


def options() -> list[str]:
    command: Any = typer.main.get_command(app)
    return [parameter.name for parameter in command.commands["plan"].params]


def test_every_option_is_tried() -> None:
    assert set(options()) - {"help"} == set(VALUES) | (NOT_DECLARED - {"help"})


def written(attnops: Callable[..., Any], tmp_path: Path, names: tuple[str, ...]) -> None:
    model, folder = tmp_path / "model.json", tmp_path / "out"
    data = dict(BART if "part" in names else MODEL)
    if "ignore" not in names:
        data.pop("alibi", None)
    model.write_text(json.dumps(data))
    given = [word for name in names for word in VALUES[name]]
    given += [] if "q_len" in names else ["--q-len", "16"]
    given += [] if "batch" in names else ["--batch", "2"]
    printed = attnops("plan", "--model", model, "--write", folder, "--json", *given)
    assert (printed.status, printed.err) == (0, "")
    found = json.loads(printed.out)
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert {path.stem for path in folder.iterdir()} == set(layers)
    for path in folder.iterdir():
        again = attnops("plan", path, "--json")
        assert (again.status, again.err) == (0, "")
        plan = json.loads(again.out)
        assert plan.pop("enabled") is True
        assert plan == layers[path.stem]["plan"]
        assert Declaration.load(path).to_dict() == layers[path.stem]["declaration"]
        assert f"{path.name}" in " ".join(found["notes"])


@pytest.mark.parametrize("name", [name for name in options() if name not in NOT_DECLARED])
def test_one_option(attnops: Callable[..., Any], tmp_path: Path, name: str) -> None:
    written(attnops, tmp_path, (name,))


@pytest.mark.parametrize("target", ["v5e", "h100"])
@pytest.mark.parametrize("names", [(), ("mesh",)], ids="+".join)
def test_a_device_by_its_name(
    attnops: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, names: tuple[str, ...]
) -> None:
    monkeypatch.setitem(VALUES, "target", ("--target", target))
    written(attnops, tmp_path, (*names, "target"))
    data = json.loads((tmp_path / "out" / "global.json").read_text())["metadata"]["mesh"]
    assert data["device_kind"] == {"v5e": "TPU v5 lite", "h100": "NVIDIA H100 80GB HBM3"}[target]


@pytest.mark.parametrize("names", [*itertools.combinations(TARGETS, 2), TARGETS], ids="+".join)
def test_options_together(attnops: Callable[..., Any], tmp_path: Path, names: tuple[str, ...]) -> None:
    written(attnops, tmp_path, names)


@pytest.mark.skipif(not has_libtpu, reason="libtpu is not installed")
def test_a_topology_with_a_mesh(attnops: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VALUES, "target", ("--target", "v5e:2x2"))
    (tmp_path / "all").mkdir()
    written(attnops, tmp_path / "all", ("target",))
    written(attnops, tmp_path, ("target", "mesh", "fallback", "layer"))
    data = json.loads((tmp_path / "out" / "global.json").read_text())["metadata"]["mesh"]
    assert (data["axis_sizes"], data["platform"], data["device_kind"]) == ([2, 1, 2, 1], "tpu", "TPU v5 lite")


def test_what_the_files_say(attnops: Callable[..., Any], tmp_path: Path) -> None:
    """Sizes alone where no platform was asked for, so that the file runs wherever there are as many devices."""
    model = tmp_path / "model.json"
    model.write_text(json.dumps({name: value for name, value in MODEL.items() if name != "alibi"}))
    base = (
        "plan",
        "--model",
        model,
        "--q-len",
        16,
        "--batch",
        2,
        "--mesh",
        "fsdp=2,dp=1,tp=2,sp=1",
        "--operation",
        "vanilla",
    )
    assert attnops(*base, "--write", tmp_path / "here", "--strict").status == 0
    metadata = Declaration.load(tmp_path / "here" / "global.json").metadata
    assert metadata["mesh"] == {"fsdp": 2, "dp": 1, "tp": 2, "sp": 1}
    assert metadata["strict"] is True
    assert attnops("run", tmp_path / "here" / "global.json", "--quiet", "--repeats", 1).status == 0
    assert attnops(*base, "--write", tmp_path / "there", "--target", "tpu").status == 0
    metadata = Declaration.load(tmp_path / "there" / "global.json").metadata
    assert (metadata["backend"], metadata["mesh"]["platform"]) == ("tpu", "tpu")
    assert "metadata.mesh" in attnops("run", tmp_path / "there" / "global.json").err


def test_options_on_a_declared_mesh(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    """--target changes where a declared mesh is, not the types of its axes; a mesh is planned without devices."""
    mesh = {"axis_names": ["fsdp", "tp"], "axis_sizes": [1, 2], "axis_types": ["explicit", "explicit"]}
    path = config(metadata={"mesh": mesh})
    for arguments, platform in (((), "cpu"), (("--target", "rocm"), "rocm")):
        data = json.loads(attnops("plan", path, "--json", *arguments).out)
        assert data["platform"] == platform
        assert [axis["kind"] for axis in data["mesh"]] == ["explicit", "explicit"]
    few, many = ({"fsdp": 2}, {"fsdp": 64})
    sources = set()
    for sizes in (few, many):
        data = json.loads(attnops("plan", config(metadata={"mesh": sizes}, batch=64), "--json").out)
        sources.add(data["platform_source"])
    assert sources == {"jax's default backend"}
