"""Notes of plans: codes and values as data, English from one table."""

from __future__ import annotations

import ast
import pickle
import string
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from attnops import Causal, OperationMetadata, OperationRegistry
from attnops.planning.notes import NOTES, Note, has_note, is_info, note

ROOT = Path(__file__).resolve().parents[2]


def _calls() -> dict[str, list[tuple[str, set[str]]]]:
    """Code -> (file, names of its values), for each call of note(), or of describe's add(), with a literal code."""
    found: dict[str, list[tuple[str, set[str]]]] = {}
    for room in ("planning", "operators", "adapters", "models"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
                    continue
                code = node.args[0]
                if node.func.id in ("note", "add") and isinstance(code, ast.Constant) and code.value in NOTES:
                    names = {word.arg or "**" for word in node.keywords} - {"severity"}
                    found.setdefault(str(code.value), []).append((path.name, names))
    return found


CALLS = _calls()


@pytest.mark.parametrize("code", NOTES)
def test_each_note_is_made_somewhere_with_the_values_that_its_text_names(code: str) -> None:
    named = {name for _, name, _, _ in string.Formatter().parse(NOTES[code].text) if name}
    assert CALLS.get(code), f"nobody makes {code}"
    for where, given in CALLS[code]:
        assert given == named or ("**" in given and given - {"**"} <= named), where


def test_a_note_is_its_english_and_its_data() -> None:
    made = note("paged.merged", axes=("pages", "sp"), size=3 << 20, sent=1024)
    assert made.endswith("over pages+sp: all-reduces of 3.0 MiB, 1.0 KiB sent per device and layer")
    assert (made.code, made.field, made.severity) == ("paged.merged", "cache.page_sequence_axis", "note")
    assert made.values["sent"] == 1024
    again = pickle.loads(pickle.dumps(made))
    assert isinstance(again, Note)
    assert (again, again.code, again.values) == (made, made.code, made.values)
    info = note("mask.array_causal", severity="info", shape=[1, 1, 1, 8])
    assert is_info(info)
    assert is_info(pickle.loads(pickle.dumps(info)))
    assert not is_info(note("mask.array_causal", shape=[1, 1, 8, 8]))
    assert not is_info("a plain string of somebody's own operation")
    with pytest.raises(KeyError):
        note("no.such")


def test_a_plans_notes_by_code() -> None:
    x = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.float32)
    metadata = OperationMetadata(runtime_dtype="bfloat16", sequence_parallel="ring", tuning="off")
    plan = OperationRegistry.create("splash", metadata).plan(x, x, x, mask=Causal(), query_offset=0)
    codes = {one.code: one for one in plan.notes if isinstance(one, Note)}
    assert len(codes) == len(plan.notes)
    assert set(codes) == {"dtype.cast", "mode.derived", "platform.no_kernel", "sequence.unsplit"}
    assert codes["dtype.cast"].values == {"names": ["query", "key", "value"], "given": "float32", "runtime": "bfloat16"}
    assert [one for one in plan.notes if is_info(one)] == [codes["dtype.cast"], codes["mode.derived"]]
    assert has_note(plan.notes, "sequence.unsplit")
    assert not has_note(plan.notes, "blocks.none")
