"""`attnops plan --model` of models whose layers have states: the table, JSON, one layer and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnops import Declaration, KVCache

NEMOTRON = {
    "model_type": "nemotron_h", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 4, "chunk_size": 16, "dtype": "bfloat16",
    "hybrid_override_pattern": "M-*M", "max_position_embeddings": 64,
}  # fmt: skip
STATE, CONVOLUTION, TOKEN = 6 * 4 * 8 * 4, 3 * (6 * 8 + 2 * 2 * 4) * 2, 2 * 2 * 16 * 2
FALCON = {
    "model_type": "falcon_h1", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write(fields: dict[str, Any]) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields))
        return path

    return write


def test_table(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    result = attnops("plan", "--model", config(NEMOTRON), "--target", "cpu")
    assert (result.status, result.err) == (0, "")
    rows = [line.split() for line in result.out.splitlines()]
    assert ["layers", "kind", "state", "conv", "cache"] in rows
    fixed = f"{(STATE + CONVOLUTION) / 1024:.1f}"
    assert ["0,", "3", "(2)", "mamba2", "6x4x8", "3x64", fixed, "KiB"] in rows
    assert ["1", "(1)", "mlp", "-", "-", "-"] in rows
    assert ["2", "(1)", "global", "-", "-", f"{TOKEN}", "B", "a", "token"] in rows
    assert "runs splash.forward_native" in result.said
    assert "mamba2: mamba2.forward_native" in result.said
    for name, tokens in (("32k", 2**15), ("1M", 2**20)):
        kept, whole = 2 * (STATE + CONVOLUTION) + tokens * TOKEN, 3 * tokens * TOKEN
        assert (
            f"{kept / 2**20:.1f} MiB of a sequence of {name} tokens; with full attention {whole / 2**20:.1f} MiB"
            in result.said
        )


def test_json(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    arguments = ("plan", "--model", config(NEMOTRON), "--target", "v5p", "--mesh", "tp=2", "--q-len", 64, "--json")
    data = json.loads(attnops(*arguments).out)
    mamba, mlp, attention = data["layers"]
    assert mamba["declaration"] is mamba["plan"] is None
    assert [mamba[part]["plan"]["operation"] for part in ("recurrence", "convolution")] == ["mamba2", "causal_conv1d"]
    assert mamba["recurrence"]["plan"]["tensors"]["x"]["device_shape"] == [1, 64, 3, 8]
    assert Declaration.from_dict(mamba["recurrence"]["declaration"]).shapes()["x"].shape == (1, 64, 6, 8)
    assert [mlp[part] for part in ("declaration", "plan", "recurrence", "convolution")] == [None] * 4
    assert (attention["plan"]["operation"], attention["recurrence"]) == ("splash", None)
    assert (
        mamba["cache"]["32768"]
        == mamba["cache"]["1048576"]
        == {
            "state": {"shape": [6, 4, 8], "dtype": "float32"},
            "convolution": {"shape": [3, 64], "dtype": "bfloat16"},
        }
    )
    assert attention["cache"]["32768"]["key"] == {"shape": [32768, 2, 16], "dtype": "bfloat16"}
    assert data["cache_bytes"]["32768"] == {
        "model": 2 * (STATE + CONVOLUTION) + 2**15 * TOKEN,
        "full_attention": 3 * 2**15 * TOKEN,
    }
    sizes = {"kv_heads": 2, "head_dim": 16, "pages": 64, "max_sequences": 2, "max_length": 256}
    cache = KVCache.from_dict(data["cache_fields"] | sizes)
    assert (cache.state_layers, cache.stateless_layers, cache.stored_layers) == ((0, 3), (1,), (2,))
    assert cache.plan(device_kind="cpu").sequence_bytes == 2 * (STATE + CONVOLUTION)


def test_one_layer_and_files(attnops: Callable[..., Any], config: Callable[..., Path], tmp_path: Path) -> None:
    path = config(FALCON)
    written = attnops("plan", "--model", path, "--q-len", 16, "--target", "cpu", "--write", tmp_path / "written")
    assert written.status == 0
    names = sorted(one.name for one in (tmp_path / "written").iterdir())
    parts = ["global_and_mamba2.json", "global_and_mamba2_causal_conv1d.json", "global_and_mamba2_mamba2.json"]
    assert names == parts
    said = attnops("plan", "--model", path, "--q-len", 16, "--target", "cpu", "--layer", 1).said
    for name, operation in zip(names, ("splash", "causal_conv1d", "mamba2"), strict=True):
        plan = attnops("plan", tmp_path / "written" / name)
        assert plan.status == 0
        assert f"runs {operation}.forward_native" in plan.said
        assert f"runs {operation}.forward_native" in said
    nothing = attnops("plan", "--model", config(NEMOTRON), "--q-len", 16, "--layer", 1)
    assert nothing.status == 0
    assert "neither attention nor a state" in nothing.said


def test_a_model_without_attention(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    mamba = {
        "model_type": "mamba2",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "dtype": "float32",
    }
    result = attnops("plan", "--model", config(mamba), "--target", "cpu", "--q-len", 8)
    assert result.status == 0
    assert result.out.startswith("mamba2: 2 layers; mamba2 on cpu")
    assert "with full attention" not in result.said
    longest = attnops("plan", "--model", config(mamba), "--target", "cpu")
    assert "131072 tokens; --q-len and --kv-len override it" in longest.said


def test_what_is_refused_is_told_with_its_layers(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    result = attnops(
        "plan", "--model", config(NEMOTRON), "--mesh", "tp=4", "--target", "cpu", "--strict", "--q-len", 64
    )
    assert result.status == 1
    assert "6 is not divisible by tp=4" in " ".join(result.err.split())
