"""Pictures of scores: the numbers at the middle of each tile, and what a picture says when it can't be made."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from score_cases import BATCH, HEADS, Case, cases, numbers

from attnops import ALiBi, Attention, Forgetting, RelativeBias, SoftCap, Temperature
from attnops.errors import ScoreError

CASES = cases(64)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("soft_cap", "temperature", "positions")])
def test_a_picture_has_what_is_added_at_the_middle_of_each_tile(name: str) -> None:
    case: Case = CASES[name]
    picture = case.score.draw(64, 64, head=2, heads=HEADS, batch=1 if name in ("sam", "forgetting") else 0)
    rows, keys = np.arange(64)[None, None, :, None], np.arange(64)[None, None, None, :]
    arrays = [np.asarray(x) for x in case.score.arrays() if x is not None]
    logits = np.zeros((BATCH, HEADS, 64, 64), np.float32)
    with_score = np.asarray(case.formula(logits, arrays, rows, keys))
    batch = 1 if name in ("sam", "forgetting") else 0
    wanted = (with_score - logits)[batch, 2][1::2, 1::2]
    np.testing.assert_allclose(picture.values, wanted, rtol=1e-5, atol=1e-5)


def test_what_multiplies_is_drawn_for_a_logit_of_one() -> None:
    temperature = numbers(HEADS, 64)
    picture = Temperature(temperature).draw(head=1)
    np.testing.assert_allclose(picture.values[:, 0], temperature[1][1::2] - 1, rtol=1e-6)
    assert "logit of 1" in picture.text()


def test_text_and_svg(tmp_path: Any) -> None:
    picture = (ALiBi() >> SoftCap(9.0)).draw(300, 100)
    assert picture.values.shape == (19, 25)
    lines = picture.text().split("\n")
    assert max(map(len, lines)) <= 80
    assert all(character.isascii() for character in picture.text())
    root = ET.fromstring(picture.svg())
    rectangles = [x for x in root.iter() if x.tag.endswith("rect") and x.get("class") in ("ao-less", "ao-more")]
    assert len(rectangles) == picture.values.size + 7
    assert picture.save(tmp_path / "score.txt").read_text() == picture.text() + "\n"


@pytest.mark.parametrize(
    ("draw", "part"),
    [
        (lambda: RelativeBias().draw(), "table"),
        (lambda: Forgetting().draw(), "log_gate"),
        (lambda: ALiBi().draw(head=9), "head=9"),
        (lambda: ALiBi(np.ones(4, np.float32)).draw(heads=8), "heads=8"),
        (lambda: ALiBi().draw(q_len=-1), "q_len=-1"),
    ],
)
def test_what_cannot_be_drawn(draw: Callable[[], Any], part: str) -> None:
    with pytest.raises(ScoreError) as error:
        draw()
    assert part in str(error.value)


def test_a_declaration_shows_its_score() -> None:
    shown = Attention("vanilla", score=ALiBi())._repr_html_()
    assert "Score alibi" in shown
