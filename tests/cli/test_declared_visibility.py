"""Files of steps whose tokens are trees of drafts, spans, prefixes or have positions of their own: planned, run, checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnops import ConfigError, OperationMetadata, OperationRegistry
from attnops.cli.app import main
from attnops.operators.paged.declared_step import declared_step
from attnops.registry.declaration import Declaration

CACHE: dict[str, Any] = {
    "layers": 1, "kv_heads": 2, "head_dim": 8, "dtype": "float32", "page_size": 4, "pages": 64, "max_sequences": 4,
    "max_length": 40,
}  # fmt: skip
STEP: dict[str, Any] = {"q_heads": 4, "q_lens": [5, 3, 1], "kv_lens": [20, 3, 11]}
TEMPERATURE = {"kind": "position_temperature", "scale": 0.5, "floor": 4}
DECLARED: dict[str, dict[str, Any]] = {
    "draft_tree": {"draft_tree": 3},
    "all_drafts": {"draft_tree": 6, "softmax_aux": True, "logits_soft_cap": 5.0},
    "spans": {"spans": 2, "sliding_window": [3, 0]},
    "prefix_lengths": {"prefix_lengths": [0, 2, 9]},
    "both": {"prefix_lengths": 2, "spans": 3},
    "q_positions": {"q_positions": True, "score": TEMPERATURE},
}


def _file(step: dict[str, Any], cache: dict[str, Any] | None = None, operation: str = "paged") -> dict[str, Any]:
    return {"operation": operation, "cache": CACHE | (cache or {}), "step": STEP | step}


def _arrays(declared: dict[str, Any], mesh: Any = None) -> Any:
    file = Declaration.from_dict(declared)
    assert file.cache is not None
    step = declared_step(file, file.cache.plan(mesh).require(), "before")
    return step, step.draw(3)


@pytest.mark.parametrize("mesh", ["", "dp=2", "dp=2,sp=2"])
@pytest.mark.parametrize("name", DECLARED)
def test_runs_are_checked(name: str, mesh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    axes = {"pages_axis": "dp"} if "dp" in mesh else {}
    axes |= {"page_sequence_axis": "sp"} if "sp" in mesh else {}
    path = tmp_path / "step.json"
    path.write_text(json.dumps(_file(DECLARED[name], axes)))
    status = main(["run", str(path), "--check", "--json", *(["--mesh", mesh] if mesh else [])])
    shown = capsys.readouterr()
    assert status == 0, shown.err
    ran = json.loads(shown.out)
    assert [check["what"] for check in ran["checks"]] == ["output", "lse"]
    assert all(check["passed"] for check in ran["checks"])


def test_what_is_drawn() -> None:
    """Rows of 5, 3 and 1 tokens, the first at positions 15, 0 and 10."""
    _, drawn = _arrays(_file({"draft_tree": 3}))
    tree = drawn["draft_tree"]
    assert tree.shape == (4, 3, 3)
    assert not tree[[0, 3]].any()  # more tokens than drafts, and no sequence
    assert np.diagonal(tree[1]).all()
    assert not np.triu(tree[1], 1).any()
    assert tree[2, 0, 0]
    _, drawn = _arrays(_file({"spans": 2}))
    wanted = [[15, 17], [15, 17], [17, 19], [17, 19], [19, 20], [0, 2], [0, 2], [2, 3], [10, 11]]
    assert drawn["spans"].tolist() == wanted
    _, drawn = _arrays(_file({"q_positions": True, "score": TEMPERATURE}))
    further = drawn["q_positions"] - [15, 16, 17, 18, 19, 0, 1, 2, 10]
    assert ((further >= 0) & (further < 4)).all()
    _, drawn = _arrays(_file({"prefix_lengths": 2}))
    assert drawn["prefix_lengths"].tolist() == [2, 2, 2, 0]


def test_plans_have_the_arrays() -> None:
    file = Declaration.from_dict(_file(DECLARED["both"]))
    step, _ = _arrays(_file(DECLARED["both"]))
    operation: Any = OperationRegistry.create("paged", OperationMetadata())
    plan = operation.plan(**step.arrays, cache=file.cache, layer=0, batch=step.batch, **step.options)
    assert {"spans", "prefix_lengths"} <= plan.problem.features
    assert Declaration.from_json(file.to_json()) == file


@pytest.mark.parametrize(
    ("declared", "names"),
    [
        (_file({"prefix_lengths": [1, 2]}), "prefix_lengths of 2"),
        (_file({"spans": 0}), "spans"),
        (_file({"draft_tree": 2.5}), "draft_tree"),
        (
            _file({"draft_tree": 2}, {"kind": "latent", "value_dim": 8, "kv_heads": 1}, "paged_indexer"),
            "step.draft_tree",
        ),
    ],
)
def test_wrong_files_are_refused(declared: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        _arrays(declared)
