"""`attnops plan` and `attnops run` of a file whose operation attends to pages: what is printed, checked and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FILE: dict[str, Any] = {
    "operation": "paged",
    "cache": {
        "layers": 3, "kv_heads": 2, "head_dim": 16, "dtype": "float32", "page_size": 4, "pages": 32, "max_sequences": 8,
        "max_length": 64,
    },
    "step": {"q_heads": 6, "q_lens": [1, 5, 1], "kv_lens": [17, 9, 30], "sliding_window": [6, 0]},
}  # fmt: skip


def written(folder: Path, **changes: Any) -> str:
    path = folder / "step.json"
    merged = {
        **FILE,
        **{n: x if n not in FILE or not isinstance(x, dict) else {**FILE[n], **x} for n, x in changes.items()},
    }
    path.write_text(json.dumps({n: x for n, x in merged.items() if x is not None}))
    return str(path)


def test_a_step_is_planned(attnops: Callable[..., Any], tmp_path: Path) -> None:
    path = written(tmp_path)
    result = attnops("plan", path)
    assert result.status == 0, result.err
    for part in (
        "paged.forward_native",
        "7 queries of 3 sequences: 9 pages of 16 that hold keys",
        "key_pages",
        "page_table",
    ):
        assert part in result.out, result.out
    data = json.loads(attnops("plan", path, "--json").out)
    assert (data["reads"]["live"], data["reads"]["held"], data["mode"], data["enabled"]) == (9, 16, "mixed", True)
    on_tpu = json.loads(attnops("plan", path, "--json", "--platform", "tpu", "--mesh", "tp=2").out)
    assert on_tpu["platform"] == "tpu"
    assert on_tpu["tensors"]["query"]["device_shape"] == [7, 3, 16]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"metadata": {"mesh": {"dp": 2, "tp": 2}}, "cache": {"pages_axis": "dp", "layout": "packed"}},
        {"cache": {"layout": "heads", "quantised": {"dtype": "int8", "scale": "head"}}, "step": {"softmax_aux": True}},
        {
            "metadata": {"mesh": {"dp": 2, "sp": 2}},
            "cache": {"pages_axis": "dp", "page_sequence_axis": "sp", "pages": 64},
            "step": {"softmax_aux": True},
        },
        {
            "operation": "ragged_page_attention_v2",
            "cache": {"layout": "interleaved", "quantised": {"dtype": "float8_e4m3fn"}},
        },
        {"step": {"mode": "autoregressive", "q_lens": 1, "kv_lens": 12, "sequences": 8, "logits_soft_cap": 5.0}},
        {"step": {"update": "none", "dtype": "bfloat16"}},
    ],
    ids=("plain", "mesh", "heads", "sequences_split", "v2", "decode", "none"),
)
def test_a_step_is_run_and_checked(attnops: Callable[..., Any], tmp_path: Path, changes: dict[str, Any]) -> None:
    out = tmp_path / "out.npz"
    result = attnops("run", written(tmp_path, **changes), "--check", "--output", str(out), "--repeats", "1")
    assert result.status == 0, result.out + result.err
    assert "pass  output against float64 reference over the pages" in result.out
    assert "one of the cache's 3 layers" in result.out
    output = np.load(out)["output"]
    assert output.shape[1:] == (6, 16)
    assert np.isfinite(output).all()


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"step": None}, 2, "has steps, and the file declares none"),
        ({"cache": None}, 2, "declare `cache` in the file"),
        ({"operation": "splash"}, 2, "the file declares a step, and operation 'splash' has calls"),
        ({"call": {"q_len": 4}}, 2, "declare `step` in the place of `call`"),
        ({"step": {"kv_lens": [17, 9]}}, 2, "q_lens of 3, kv_lens of 2"),
        ({"step": {"kv_lens": [17, 4, 30]}}, 2, "sequence 1 has 5 queries and 4 keys"),
        ({"step": {"kv_lens": [17, 9, 65]}}, 2, "at most 64 keys"),
        ({"step": {"sequences": 9, "q_lens": 1, "kv_lens": 2}}, 2, "9 sequences; wanted at most 8"),
        ({"step": {"kv_lens": 64}}, 2, "need 48 pages of 4, and it has 32"),
        ({"step": {"tokens": 3}}, 2, "step.tokens=3; wanted at least 7"),
        ({"step": {"q_heds": 3}}, 2, "q_heds"),
        ({"step": {"mask": {"kind": "chunked", "size": 4}}}, 1, "paged.mask"),
        ({"cache": {"pages": 4}}, 1, "[pages]"),
        ({"operation": "ragged_page_attention_v3"}, 1, "stands for pages of layout 'packed'"),
    ],
)
def test_what_is_refused(
    attnops: Callable[..., Any], tmp_path: Path, changes: dict[str, Any], status: int, said: str
) -> None:
    result = attnops("run", written(tmp_path, **changes))
    assert (result.status, said in result.err) == (status, True), result.err


def test_a_step_takes_no_inputs(attnops: Callable[..., Any], tmp_path: Path) -> None:
    for command in ("plan", "run"):
        result = attnops(command, written(tmp_path), "--inputs", str(tmp_path / "x.npz"))
        assert result.status == 2
        assert "a step over pages reads no file" in result.err
