"""Model configs with scores: what they declare and refuse, without transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attnops import T5, ModelDeclaration, RelativeBias
from attnops.errors import ConfigError

MPT: dict[str, Any] = {"model_type": "mpt", "d_model": 48, "n_layers": 2, "n_heads": 6}
FALCON = {"model_type": "falcon", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "alibi": True}
T5_SMALL = {"d_model": 48, "d_kv": 8, "num_layers": 2, "num_heads": 6}
LLAMA4 = {
    "model_type": "llama4_text", "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
SWIN = {
    "model_type": "swin", "image_size": 32, "patch_size": 4, "embed_dim": 48, "depths": [2], "num_heads": [6],
    "window_size": 4,
}  # fmt: skip
SAM = {
    "model_type": "sam_vision_model", "image_size": 20, "patch_size": 4, "hidden_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 6, "window_size": 3, "global_attn_indexes": [1],
}  # fmt: skip
BEIT = {
    "model_type": "beit", "image_size": 12, "patch_size": 4, "hidden_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 6, "use_relative_position_bias": True,
}  # fmt: skip


def _slopes(config: dict[str, Any]) -> np.ndarray:
    return np.asarray(ModelDeclaration.from_config(config).layer(0).declaration.call.score.slopes)


def test_slopes_of_mpt() -> None:
    """Of 8, the next power of two: the 2nd, 4th, 6th and 8th first, then the 1st and 3rd."""
    for most in (8, 5):
        wanted = [2.0 ** (-most * n / 8) for n in (2, 4, 6, 8, 1, 3)]
        np.testing.assert_allclose(_slopes(MPT | {"attn_config": {"alibi_bias_max": most}}), wanted, rtol=1e-6)
    of_four = [2.0 ** (-2 * n) for n in (1, 2, 3, 4)]
    np.testing.assert_allclose(_slopes(MPT | {"n_heads": 4}), of_four, rtol=1e-6)


def test_slopes_of_falcon_are_inside_its_scale() -> None:
    """The paper's, with 8 bits of mantissa, divided by the root of 8 dims."""
    paper = np.asarray([2.0 ** (-2 * n) for n in (1, 2, 3, 4)] + [0.5, 0.125])
    np.testing.assert_allclose(_slopes(FALCON), paper / np.sqrt(8), rtol=1e-6)
    twelve = [2.0**-n for n in range(1, 9)] + [2.0 ** (-(2 * n + 1) / 2) for n in range(4)]
    exact = _slopes(FALCON | {"hidden_size": 96, "num_attention_heads": 12}) * np.sqrt(8) / twelve
    np.testing.assert_allclose(exact, 1, rtol=2**-8)
    assert np.abs(exact - 1).max() > 1e-4


def test_key_heads_of_falcon() -> None:
    for said, kv_heads in (
        ({}, 1), ({"multi_query": False}, 6), ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"new_decoder_architecture": True}, 6),
    ):  # fmt: skip
        call = ModelDeclaration.from_config(FALCON | said).layer(0).declaration.call
        assert call.kv_heads == kv_heads, said


def test_parts_of_t5() -> None:
    for kind in ("t5", "mt5", "umt5", "longt5"):
        config = {"model_type": kind, **T5_SMALL, "num_decoder_layers": 3}
        read = {part: ModelDeclaration.from_config(config, part=part) for part in ("encoder", "decoder", "cross")}
        scores = {part: model.layer(0).declaration.call.score for part, model in read.items()}
        assert scores["encoder"] == RelativeBias(buckets=T5(32, 128, bidirectional=True))
        assert scores["decoder"] == RelativeBias(buckets=T5(32, 128, bidirectional=False))
        assert scores["cross"] is None
        assert {part: len(model.layers) for part, model in read.items()} == {"encoder": 2, "decoder": 3, "cross": 3}
        assert {m.layer(0).declaration.metadata["softmax_scale"] for m in read.values()} == {1.0}
        assert {m.layer(0).declaration.call.head_dim for m in read.values()} == {8}


def test_falcon_without_alibi_drops_no_weights() -> None:
    config = FALCON | {"alibi": False, "attention_dropout": 0.1}
    model = ModelDeclaration.from_config(config)
    assert "dropout_prob" not in model.layer(0).declaration.metadata
    assert [note.code for note in model.notes if getattr(note, "code", "") == "model.noted"] == ["model.noted"]
    dropped = ModelDeclaration.from_config(FALCON | {"attention_dropout": 0.1}).layer(0).declaration
    assert dropped.metadata["dropout_prob"] == 0.1


def test_llama4_without_tuning_has_no_score() -> None:
    plain = ModelDeclaration.from_config(LLAMA4 | {"attn_temperature_tuning": False})
    assert [layer.declaration.call.score for layer in plain.layers] == [None] * 4
    tuned = ModelDeclaration.from_config(LLAMA4)
    assert [layer.declaration.call.score is not None for layer in tuned.layers] == [False, False, False, True]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "mpt-without-alibi": ({"attn_config": {"alibi": False}}, MPT, "alibi=False"),
    "mpt-prefix": ({"attn_config": {"prefix_lm": True}}, MPT, "prefix_lm=True"),
    "mpt-attn_type": (
        {"attn_config": {"attn_type": "multiquery_attention"}},
        MPT,
        "attn_type='multiquery_attention'",
    ),
    "mpt-attn_config": ({"attn_config": 3}, MPT, "attn_config=3"),
    "longt5-global": (
        {"encoder_attention_type": "transient-global"},
        T5_SMALL | {"model_type": "longt5"},
        "'transient-global'",
    ),
    "swin-window": ({"window_size": 16}, SWIN, "window_size=16"),
    "swin-patches": ({"image_size": 31}, SWIN, "image_size=.31, 31. is not a multiple"),
    "swin-heads": ({"num_heads": [5]}, SWIN, "not a multiple of its 5 heads"),
    "swin-depths": ({"depths": [2, 2]}, SWIN, "one number per stage"),
    "sam-layers": ({"global_attn_indexes": [7]}, SAM, "global_attn_indexes"),
    "beit-grid": ({"image_size": [12, 16]}, BEIT, "3x4 patches"),
    "t5-buckets": (
        {"relative_attention_num_buckets": "8"},
        T5_SMALL | {"model_type": "t5"},
        "relative_attention_num_buckets='8'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_score_can_say_is_refused(name: str) -> None:
    change, config, says = REFUSED[name]
    part = "encoder" if "t5" in str(config["model_type"]) else None
    with pytest.raises(ConfigError, match=says):
        ModelDeclaration.from_config(config | change, part=part)


def test_lengths_of_images_are_the_configs() -> None:
    model = ModelDeclaration.from_config(SAM, batch=3)
    window, whole = (layer.declaration.call for layer in model.layers)
    assert (window.batch, window.q_len, whole.batch, whole.q_len, model.positions) == (12, 9, 3, 25, 25)
    for given in ({"q_len": 24}, {"q_len": 9}, {"layout": "thd"}):
        with pytest.raises(ConfigError, match="patches of an image"):
            ModelDeclaration.from_config(SAM, **given)
