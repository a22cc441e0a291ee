"""Files whose mask has a place for segment ids, of operations that take none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnops import Causal
from attnops.masks import SEGMENT_IDS


@pytest.mark.parametrize(
    ("file", "told"),
    [
        (
            {
                "operation": "paged",
                "cache": {"layers": 1, "kv_heads": 2, "head_dim": 64, "dtype": "float32", "page_size": 16, "pages": 8,
                          "max_sequences": 2, "max_length": 64},
                "step": {"q_heads": 4},
            },
            "pass spans=",
        ),
        (
            {
                "operation": "indexer",
                "metadata": {"operation_configs": {"indexer": {"top_k": 4}}},
                "call": {"q_len": 16, "q_heads": 4, "head_dim": 16},
            },
            "Causal and SlidingWindow",
        ),
    ],
    ids=["step", "indexer"],
)  # fmt: skip
def test_what_takes_no_segment_ids_refuses_their_place(
    attnops: Callable[..., Any], tmp_path: Path, file: dict[str, Any], told: str
) -> None:
    request = "step" if "step" in file else "call"
    data = file | {request: file[request] | {"mask": (Causal() | SEGMENT_IDS).to_dict()}}
    (tmp_path / "file.json").write_text(json.dumps(data))
    result = attnops("plan", tmp_path / "file.json")
    assert result.status == 2
    assert told in " ".join(result.err.split())
