"""Files that declare an indexer, over arrays and over pages, and steps with selected keys: in every command, and wrong ones."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnops.cli.app import main
from attnops.verify.selection_error import index_reference, selection_error

CALL: dict[str, Any] = {"batch": 2, "q_len": 8, "kv_len": 12, "q_heads": 3, "head_dim": 4, "query_offset": 4}
CACHE: dict[str, Any] = {
    "layers": 2, "dtype": "float32", "page_size": 4, "pages": 24, "max_sequences": 4, "max_length": 24
}  # fmt: skip
INDEX_CACHE = CACHE | {"kind": "latent", "head_dim": 4, "value_dim": 4}
STEP: dict[str, Any] = {"q_heads": 3, "q_lens": [1, 3], "kv_lens": [17, 9]}


def _index(call: dict[str, Any] | None = None, name: str = "indexer", top_k: int = 4, **fields: Any) -> dict[str, Any]:
    metadata = {"operation_configs": {name: {"top_k": top_k}}}
    return {"operation": name, "metadata": metadata, "call": CALL | (call or {})} | fields


def _step(step: dict[str, Any] | None = None, cache: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    metadata = {"operation_configs": {"paged_indexer": {"top_k": 4}}}
    made = {"operation": "paged_indexer", "metadata": metadata, "cache": INDEX_CACHE | (cache or {})}
    return made | {"step": STEP | (step or {})} | fields


def _selected(count: int = 3, cache: dict[str, Any] | None = None, **step: Any) -> dict[str, Any]:
    own = CACHE | {"kv_heads": 2, "head_dim": 8}
    declared = STEP | {"q_heads": 4, "selected": count} | step
    return {"operation": "paged", "cache": own | (cache or {}), "step": declared}


def _file(folder: Path, declared: dict[str, Any]) -> str:
    path = folder / "file.json"
    path.write_text(json.dumps(declared))
    return str(path)


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    status = main([*arguments, "--json"])
    shown = capsys.readouterr()
    assert status == 0, shown.err
    return json.loads(shown.out)


RUNS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "dsa_indexer": (_index(name="dsa_indexer"), ()),
    "int8": (_index({"kv_dtype": "int8", "kv_lengths": [12, 5], "causal": False}), ()),
    "segments": (_index({"kv_len": 8, "query_offset": 0, "segment_ids": 2, "sliding_window": [3, 0]}), ("--mesh", "fsdp=2")),
    "paged": (_step({"sliding_window": [6, 0]}, {"quantised": {"dtype": "int8", "scale": "token_head"}}), ()),
    "paged_mesh": (_step(cache={"page_sequence_axis": "sp", "pages_axis": "dp"}), ("--mesh", "dp=2,sp=2")),
    "selected": (_selected(softmax_aux=True), ()),
    "selected_mesh": (_selected(cache={"pages_axis": "dp"}), ("--mesh", "dp=2,tp=2")),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_held_against_the_reference(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    declared, options = RUNS[name]
    ran = _json(capsys, "run", _file(tmp_path, declared), "--check", "--repeats", "1", *options)
    assert ran["checks"]
    assert all(check["passed"] for check in ran["checks"])
    if "selected" not in name:
        assert [check["what"] for check in ran["checks"]] == ["selected scores"]
        assert ran["positions"]["shape"][-1] == 4


def test_what_is_selected_and_how_it_lies_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = _json(capsys, "plan", _file(tmp_path, _index()), "--mesh", "fsdp=2,sp=2", "--target", "tpu")
    assert plan["tensors"]["index_query"]["device_shape"] == [1, 4, 3, 4]
    assert plan["sizes"]["top_k"] == 4
    plan = _json(capsys, "plan", _file(tmp_path, _step(cache={"pages_axis": "dp"})), "--mesh", "dp=2")
    assert plan["top_k"] == 4
    assert plan["tensors"]["index_weights"]["device_shape"] == [3, 3]
    plan = _json(capsys, "plan", _file(tmp_path, _selected(count=5)))
    assert plan["tensors"]["selected"]["shape"] == [4, 5]
    assert "selected" in plan["features"]
    for declared in (_index(), _step(), _selected()):
        assert main(["plan", _file(tmp_path, declared), "--verbose"]) == 0
        assert declared["operation"] in capsys.readouterr().out


def test_a_compiled_selection_sends_what_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = _json(capsys, "verify", _file(tmp_path, _index()), "--mesh", "sp=2")
    (one,) = report["passes"]
    # Half of the other device's index keys [2, 12, 4] in float32.
    assert [(x["kind"], x["sent_bytes"]) for x in one["collectives"]] == [("all-gather", 2 * 6 * 4 * 4)]
    assert one["differences"] == []
    pairs = sum(min(row + 4, 11) + 1 for row in range(8))
    assert one["flops"] == 2 * pairs * 2 * 3 * (4 + 1) / 2  # batch, heads, a product and a weight; two devices
    declared = _step(cache={"page_sequence_axis": "sp"})
    (report,) = _json(capsys, "verify", _file(tmp_path, declared), "--mesh", "sp=2")
    # Half of the tokens' keys as a position and a score, and half of the positions.
    assert {x["kind"]: x["sent_bytes"] for x in report["collectives"]} == {
        "all-to-all": 2 * 4 * 8,
        "all-gather": 2 * 4 * 4,
    }
    assert report["differences"] == []
    (report,) = _json(capsys, "verify", _file(tmp_path, _selected(count=3)))
    assert report["page_bytes"] == 4 * 3 * 2 * 2 * 8 * 4  # tokens, keys of each, key and value, heads, dim, bytes
    assert report["flops"] == 2 * 4 * 3 * 4 * (8 + 8)


@pytest.mark.parametrize("declared", [_index(), _step()], ids=["indexer", "paged_indexer"])
def test_a_report_is_written(declared: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["report", _file(tmp_path, declared), "--output", str(page)]) == 0
    assert f"{declared['operation']}.forward_native" in page.read_text()


@pytest.mark.slow
def test_reports_and_searches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    for declared in (_index(), _step()):
        assert main(["report", _file(tmp_path, declared), "--run", "--output", str(page)]) == 0
        assert "selected scores" in page.read_text()
    options = "--cache", str(tmp_path / "tuned"), "--most", "2", "--how", "device"
    capsys.readouterr()
    (tuned,) = _json(capsys, "tune", _file(tmp_path, _step({"q_lens": 1})), *options)
    assert len(tuned["passes"]["step"]) == 2
    assert set(tuned["choice"]) <= {"pages_per_block", "queries_per_block"}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="pip install 'attnops[tpu]'")
@pytest.mark.parametrize("target", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_sparse_decode_of_deepseek_compiles_for_tpus(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 sequences of up to 128k: all scores of the chunk take 256 MiB, and those of each index head 64 times as many."""
    lengths = {"q_lens": [*[1] * 15, 512], "kv_lens": [*[32768] * 15, 131072], "q_heads": 64}
    quantised = {"dtype": "float8_e4m3fn", "scale": "token_head"}
    cache = {"dtype": "bfloat16", "quantised": quantised, "head_dim": 128, "value_dim": 128, "page_size": 64}
    cache |= {"pages": 10240, "max_sequences": 16, "max_length": 131072, "page_sequence_axis": "sp"}
    declared = _step(lengths, cache) | {"metadata": {"operation_configs": {"paged_indexer": {"top_k": 2048}}}}
    mesh = "sp=8" if target.startswith(("v4", "tpu7x")) else "sp=4"  # two cores a chip
    report = _json(capsys, "verify", _file(tmp_path, declared), "--target", target, "--mesh", mesh)[0]
    assert report["failure"] is None
    assert report["differences"] == []
    assert report["temp_bytes"] < 96 << 20


def test_arrays_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = lambda *shape: np.random.default_rng(0).standard_normal(shape).astype(np.float32)  # noqa: E731
    arrays = {
        "index_query": draw(2, 8, 3, 4),
        "index_key": draw(2, 12, 4),
        "index_weights": draw(2, 8, 3),
        "more": draw(1),
    }
    stored, written = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(stored, kv_lengths=np.array([12, 3]), **arrays)
    file = _file(tmp_path, _index())
    ran = _json(capsys, "run", file, "--inputs", str(stored), "--check", "--repeats", "1", "--output", str(written))
    assert any("more of in.npz is not used" in note for note in ran["notes"])
    assert np.load(written)["counts"][1].max() == 3
    np.savez(stored, **{name: x for name, x in arrays.items() if name != "index_key"})
    assert main(["plan", file, "--inputs", str(stored)]) == 2
    assert "holds no index_key" in capsys.readouterr().err
    np.savez(stored, **arrays | {"index_key": draw(2, 10, 4)})
    assert main(["plan", file, "--inputs", str(stored)]) == 2
    assert "call.kv_len=12" in capsys.readouterr().err


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no top_k": ("plan", _index() | {"metadata": {}}, "top_k is missing"),
    "bias": ("plan", _index({"bias": [1, 1, 1, 1]}), "call.bias"),
    "kv_heads": ("plan", _index({"kv_heads": 1}), "call.kv_heads"),
    "lengths": ("plan", _index({"kv_lengths": [3]}), "kv_lengths"),
    "scales": ("plan", _index({"kv_dtype": "int8", "kv_scales": "head"}), "kv_scales"),
    "sizes": ("plan", _index() | {"call": {"q_heads": 3}}, "call.q_len"),
    "step of a call": ("plan", _index(step={"q_heads": 3}), "declares a step"),
    "call of a step": ("plan", _step(call={"q_len": 3}), "declare `step`"),
    "sinks": ("plan", _step({"softmax_aux": True}), "step.softmax_aux"),
    "selected": ("plan", _step({"selected": 3}), "step.selected"),
    "keys and values": ("plan", _step(cache={"kind": "kv", "kv_heads": 2}), "kind 'latent'"),
    "no cache": ("plan", {name: x for name, x in _step().items() if name != "cache"}, "declare `cache`"),
    "none selected": ("plan", _selected(count=0), "step.selected=0"),
    "insert": ("plan", _selected(mode="insert"), "insert"),
    "advise": ("advise", _index(), "advise is for attention"),
    "tune": ("tune", _index(), "no sizes to search"),
    "latent": ("plan", _index(latent={"heads": 3, "nope_dim": 4, "rope_dim": 4, "value_dim": 4, "latent_dim": 8}) | {
        "call": {"q_len": 4}}, "selects keys"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, declared, told = WRONG[name]
    more = ("--target", "v5e:2x2") if command == "advise" else ()
    assert main([command, _file(tmp_path, declared), *more]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_the_check_of_a_selection_finds_what_is_wrong() -> None:
    """Rounding errors change places of equal scores only; everything else is found."""
    scores = np.array([[3.0, 1.0, 2.0, 1.0 + 1e-9, -5.0]])
    sizes, seen = np.array([4.0]), np.array([[True, True, True, True, False]])

    def error(*positions: int) -> float:
        chosen = np.array([positions])
        return selection_error(chosen, (chosen >= 0).sum(1), scores, sizes, seen)[1]

    assert error(0, 2, 3) == 0
    assert 0 < error(0, 1, 2) < 1e-9  # the other one of two that are nearly equal
    assert error(1, 2, 3) > 0.01  # without the greatest: 2 instead of 3
    for wrong in ((0, 2, -1), (2, 0, 3), (0, 0, 2), (0, 2, 4), (0, 2, 9)):
        assert error(*wrong) == np.inf
    found, bound = index_reference(np.ones((1, 2, 3)), np.array([[1.0, 1, 1], [-1, 0, 0]]), np.array([[2.0, -1]]), 0.5)
    np.testing.assert_allclose(found, [[1.5, 0]])
    np.testing.assert_allclose(bound, [3 * 0.5 * 3])
