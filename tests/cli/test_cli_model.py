"""`attnops plan --model`: a table of a model's layers, one layer in full, and declarations written out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnops import Declaration

MODELS = Path(__file__).resolve().parents[1] / "data" / "models"
GEMMA = MODELS / "gemma-3-4b-it.json"
TEXT = ("--model", GEMMA, "--part", "text")  # with the masks of text alone


def test_table(attnops: Callable[..., Any]) -> None:
    result = attnops("plan", *TEXT, "--mesh", "fsdp=8,tp=4", "--target", "tpu", "--batch", 8, "--q-len", 2048)
    assert (result.status, result.err) == (0, "")
    assert result.out.splitlines()[2:5] == [
        "layers                     kind",
        "all but 5, 11 ... 29 (29)  local 1024",
        "5, 11 ... 29 (5)           global",
    ]
    assert "8 heads (4 kv), dim 256" in result.said
    assert "runs splash.forward_tpu (the platform's own implementation)" in result.said
    # q 1x2048x2x256 and kv 1x2048x1x256 twice, in bfloat16, on each of 32 devices: 2 + 1 + 1 MiB
    assert "device 4.0 MiB of operands on each of 32" in result.said
    assert "the default of gemma3_text" in " ".join(result.out.split())


@pytest.mark.parametrize(
    ("model", "line"), [("gemma-2-27b-it", "cap     50"), ("gpt-oss-20b", "sinks   1 per head"), ("llama-3.1-8b", None)]
)
def test_caps_and_sinks_are_told(attnops: Callable[..., Any], model: str, line: str | None) -> None:
    lines = attnops("plan", "--q-len", 64, "--target", "v5p", "--model", MODELS / f"{model}.json").out.splitlines()
    assert [one for one in lines if one.startswith(("cap ", "sinks "))] == ([line] if line else [])


def test_what_differs_has_a_column(attnops: Callable[..., Any]) -> None:
    arguments = ("plan", "--q-len", 2048, "--operation", "vanilla", "--target", "cpu", "--model")
    lines = attnops(*arguments, MODELS / "modernbert-base.json").out.splitlines()
    head = next(line for line in lines if line.startswith("layers"))
    assert head.split() == ["layers", "kind", "blocks"]
    for kind in ("global", "local"):
        (row,) = [line for line in lines if line[head.index("kind") :].startswith(kind)]
        assert row[head.index("blocks") :].startswith("blockwise ")
    assert not any(line.startswith("blocks") for line in lines)


def test_drops_repeats_and_notes_stand_below_the_table(attnops: Callable[..., Any]) -> None:
    arguments = ("plan", *TEXT, "--q-len", 64, "--batch", 6, "--mesh", "fsdp=4,tp=8,oops=2")
    result = attnops(*arguments, "--target", "tpu")
    assert result.status == 0
    said = " ".join(result.out.split())
    for once in (
        "dropped axis 'fsdp' of batch in query3d, query, key, value, output: 6 is not divisible by fsdp=4. Make it",
        "mesh axis 'fsdp' (4) splits nothing: with 'oops' (2), 8 devices do the same work",
        "mesh axis 'oops' (2) splits nothing: with 'fsdp' (4), 8 devices do the same work",
        "inside key, value: each kv head repeated 2 times so that 8 devices get whole heads",
    ):
        assert said.count(once) == 1, once
    assert "mode derived from the lengths" not in said  # asks for nothing
    assert "so it splits nothing" not in said  # of axes that nobody gave this mesh
    for layer in json.loads(attnops(*arguments, "--target", "tpu", "--json").out)["layers"]:
        assert layer["plan"]["repeated_work"]["devices"] == 8
        assert layer["plan"]["kv_repeat"] == 2
    strict = attnops("plan", *TEXT, "--q-len", 64, "--mesh", "fssdp=2", "--strict")
    assert strict.status == 1
    assert "Did you mean 'fsdp'?" in strict.err


def test_what_is_said_of_one_kind_of_layers_names_it(attnops: Callable[..., Any]) -> None:
    result = attnops("plan", *TEXT, "--operation", "ring", "--q-len", 8192, "--mesh", "sp=8", "--target", "tpu")
    said = " ".join(result.out.split())
    assert result.status == 0
    # A query sees the 1023 keys before it: those of its own part of 1024, and of the one before.
    assert "local 1024: key, value: travel around sp in 1 of 7 steps" in said
    assert "global: key, value: travel around sp in 7 of 7 steps" in said


def test_json(attnops: Callable[..., Any]) -> None:
    result = attnops("plan", *TEXT, "--q-len", 256, "--target", "tpu", "--json")
    data = json.loads(result.out)
    assert data["family"] == "gemma3_text"
    assert [layer["kind"] for layer in data["layers"]] == ["local 1024", "global"]
    assert data["layers"][1]["layers"] == [5, 11, 17, 23, 29]
    for layer in data["layers"]:
        assert layer["plan"]["implementation"] == "splash.forward_tpu"
        assert Declaration.from_dict(layer["declaration"]).call.q_heads == 8
    assert any("one image" in note for note in data["notes"])


def test_indexers_are_told(attnops: Callable[..., Any]) -> None:
    arguments = ("plan", "--q-len", 4096, "--target", "tpu", "--model")
    result = attnops(*arguments, MODELS / "glm-5.2.json")
    assert (result.status, result.err) == (0, "")
    assert "indexer 32 heads of 128: 2048 keys" in result.said
    for kind in ("indexed 2048", "indexed 2048 shared"):
        assert kind in result.said
    assert "an upper bound, without the indexer's own work" in result.said
    assert "57 layers, those that are shared, have no indexer" in result.said
    lines = attnops(*arguments, MODELS / "minimax-m3.json").out.splitlines()
    assert [line.split() for line in lines if line.startswith(("layers", "0-2", "3-59"))] == [
        ["layers", "kind", "indexer"],
        ["0-2", "(3)", "global", "-"],
        ["3-59", "(57)", "indexed", "16", "blocks", "of", "128", "4", "heads", "of", "128:", "16x128", "keys"],
    ]
    data = json.loads(attnops(*arguments, MODELS / "minimax-m3.json", "--json").out)
    sizes = {"heads": 4, "head_dim": 128, "block_size": 128, "top_blocks": 16, "local_blocks": 1}
    assert [layer["indexer"] for layer in data["layers"]] == [{}, sizes]


def test_heads_by_layer_have_columns(attnops: Callable[..., Any]) -> None:
    arguments = ("plan", "--q-len", 4096, "--target", "tpu", "--json", "--model")
    data = json.loads(attnops(*arguments, MODELS / "mimo-v2-flash.json").out)
    calls = [layer["declaration"]["call"] for layer in data["layers"]]
    assert [(call["kv_heads"], call.get("softmax_aux")) for call in calls] == [(4, None), (8, [64])]
    assert [layer["indexer"] for layer in data["layers"]] == [{}, {}]
    said = attnops(*arguments[:5], "--model", MODELS / "gemma-4-e2b.json").said
    assert "kind local 512 shared kv; dim 256; keys of layer 13" in said
    assert "layers 15 to 34 have no keys and values of their own and attend to those of 13, 14" in said


def test_one_layer_in_full(attnops: Callable[..., Any]) -> None:
    result = attnops("plan", *TEXT, "--q-len", 256, "--layer", 5, "--operation", "vanilla")
    assert result.status == 0
    assert "gemma3_text, global: layers 5, 11 ... 29 (5)" in result.out
    assert "vanilla.forward_native" in result.out
    assert "causal(offset=0)" in result.out
    assert "window(" not in result.out
    assert attnops("plan", *TEXT, "--layer", 34).err == (
        "attnops: layer 34: this gemma3_text model has layers 0 to 33.\n"
    )


def test_written_files_serve_the_other_commands(attnops: Callable[..., Any], tmp_path: Path) -> None:
    small = {"model_type": "gemma2", "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    small |= {"hidden_size": 32, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 20}
    model, folder = tmp_path / "config.json", tmp_path / "out"
    model.write_text(json.dumps(small))
    result = attnops("plan", "--model", model, "--q-len", 16, "--write", folder, "--operation", "vanilla")
    assert result.status == 0
    assert {path.name for path in folder.iterdir()} == {"local_5.json", "global.json"}
    assert str(folder / "global.json") in result.out.replace("\n", "").replace(" ", "") or "written" in result.out
    for path in folder.iterdir():
        assert attnops("plan", path).status == 0
        ran = attnops("run", path, "--check", "--repeats", 1)  # against the float64 reference
        assert (ran.status, ran.err) == (0, "")
        assert "pass" in ran.out


def test_lengths_that_are_not_given(attnops: Callable[..., Any], tmp_path: Path) -> None:
    def problem(*arguments: object, model: Path = MODELS / "llama-3.1-8b.json") -> dict[str, Any]:
        data = json.loads(attnops("plan", "--model", model, "--json", *arguments).out)
        tensors = data["layers"][0]["plan"]["tensors"]
        shapes = {name: tensors[name]["shape"] for name in ("query", "key")}
        return {"q_len": shapes["query"][1], "kv_len": shapes["key"][1], "notes": " ".join(data["notes"])}

    whole = problem("--target", "tpu")
    assert (whole["q_len"], whole["kv_len"]) == (131072, 131072)
    assert "max_position_embeddings=131072" in whole["notes"]
    decode = problem("--mode", "decode", "--kv-len", 512)
    assert (decode["q_len"], decode["kv_len"], decode["notes"]) == (1, 512, "")
    whisper = tmp_path / "whisper.json"
    sizes = {"d_model": 384, "decoder_layers": 4, "decoder_attention_heads": 6, "max_source_positions": 1200}
    whisper.write_text(json.dumps({"model_type": "whisper", "max_target_positions": 448} | sizes))
    cross = problem("--part", "cross", model=whisper)
    assert (cross["q_len"], cross["kv_len"]) == (448, 1200)  # the tokens of the text, and the frames of the sound
    cross = problem("--part", "cross", "--mode", "decode", model=whisper)
    assert (cross["q_len"], cross["kv_len"]) == (1, 1200)
    long = attnops("plan", "--model", MODELS / "llama-4-scout.json", "--target", "tpu")  # promises ten million
    assert "131072 tokens, of max_position_embeddings=10485760" in " ".join(long.out.split())


def test_refused_layers_end_with_status_1(attnops: Callable[..., Any]) -> None:
    odd = ("plan", "--model", MODELS / "gpt-oss-20b.json", "--q-len", 64, "--operation", "sdpa", "--target", "cpu")
    result = attnops(*odd)
    assert result.status == 1
    assert result.err.startswith("attnops: local 128: sdpa")
    assert "global: sdpa" in result.err
    assert "runs nothing (REFUSED: no implementation may run this)" in result.said
    strict = attnops("plan", "--model", GEMMA, "--q-len", 64, "--mesh", "tp=3", "--strict")
    assert strict.status == 1
    assert "strict sharding" in strict.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "nothing to plan; give a declaration file, or --model"),
        (("examples/minilm_layer.json", "--model", GEMMA), "CONFIG examples/minilm_layer.json and --model"),
        (("--model", GEMMA, "--inputs", "x.npz"), "--inputs x.npz and --model"),
        (("examples/minilm_layer.json", "--q-len", 5), "--q-len without --model"),
        (("--model", "nothing.json"), "nothing.json: No such file or directory; wanted the config.json of a model"),
        (("--model", MODELS), "config.json: No such file"),
        (("--model", GEMMA, "--kv-len", 5), "--kv-len 5 without --q-len"),
        (("--model", GEMMA, "--operation", "splsh"), "Did you mean 'splash'"),
        (("--model", GEMMA, "--family", "gemma3"), "family 'gemma3' is not one that attnops can read"),
        (("--model", GEMMA, "--ignore", "alibi"), "ignore names 'alibi'"),
        (("--model", GEMMA, "--dtype", "int8"), "call.dtype='int8'"),
        (("--model", GEMMA, "--mode", "guess"), "mode='guess' is not a mode"),
        (("--model", GEMMA, "--target", "tpus"), "target 'tpus'"),
        (("--model", "examples/minilm_layer.json"), "no model_type"),
        ((GEMMA,), "this is a model's config (model_type 'gemma3'); wanted a declaration"),
        (("--model", GEMMA, "--part", "cross"), "part='cross'; gemma3_text has one attention"),
    ],
)
def test_bad_input(
    attnops: Callable[..., Any],
    arguments: tuple[object, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    examples: Path,
) -> None:
    monkeypatch.chdir(examples.parent)
    result = attnops("plan", *arguments)
    assert result.status == 2
    assert result.out == ""
    assert says in result.err
    assert result.err.count("\n") == 1
