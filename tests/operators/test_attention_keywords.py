"""Attention by an operation's name and keywords."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from attnops import Attention, Causal, ConfigError, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.errors import InputTypeError, UnknownNameError
from attnops.masks import Dense
from attnops.verify import reference_attention

_draw = np.random.default_rng(0)
QUERY, KEY, VALUE = (_draw.standard_normal((2, 6, 4, 8)).astype(np.float32) for _ in range(3))
TRIANGLE = np.tril(np.ones((6, 6), bool))
NEAR = np.tril(np.triu(np.ones((6, 6), bool), -2), 1)
MESH = {"fsdp": 2, "tp": 2}


def _wanted(**call: Any) -> np.ndarray:
    return reference_attention(QUERY, KEY, VALUE, **({"scale": 8**-0.5} | call)).output


@pytest.mark.parametrize(
    ("keywords", "wanted"),
    [
        ({}, {"mask": TRIANGLE}),
        ({"causal": False}, {}),
        ({"mask": SlidingWindow(2, 1)}, {"mask": NEAR}),
        ({"mask": Causal() & SlidingWindow(2, 1)}, {"mask": NEAR & TRIANGLE}),
        # The call's causal, which holds beside a Mask object too, and not the metadata's.
        ({"mask": SlidingWindow(2, 1), "causal": True}, {"mask": NEAR & TRIANGLE}),
        ({"causal": False, "sliding_window": (2, 1), "softmax_scale": 0.5}, {"mask": NEAR, "scale": 0.5}),
        ({"causal": False, "logits_soft_cap": 2.0, "mesh": MESH, "block_q": 2}, {"soft_cap": 2.0}),
        ({"metadata": OperationMetadata(causal=False, softmax_scale=0.3), "path": "plain"}, {"scale": 0.3}),
    ],
)
def test_keywords_reach_the_call(keywords: dict[str, Any], wanted: dict[str, Any]) -> None:
    output, weights, lse = Attention("vanilla", **keywords)(QUERY, KEY, VALUE)
    np.testing.assert_allclose(output, _wanted(**wanted), atol=3e-6)
    assert weights is lse is None


def test_the_output_unpacks() -> None:
    output, weights, lse = Attention("vanilla", return_weights=True, return_lse=True)(QUERY, KEY, VALUE)
    wanted = reference_attention(QUERY, KEY, VALUE, scale=8**-0.5, mask=TRIANGLE)
    for got, want in zip((output, weights, lse), wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=3e-6)


def test_fields_of_the_config_and_of_the_metadata_are_in_the_plan() -> None:
    attention = Attention("splash", mask=Causal() & SlidingWindow(127), mesh={"tp": 2}, block_q=256, platform="cpu")
    x = jax.ShapeDtypeStruct((1, 512, 4, 64), np.float32)
    plan = attention.plan(x, x, x)
    assert (plan.config.block_q, plan.problem.devices) == (256, 2)
    assert plan.problem.mask == (Causal(0) & SlidingWindow(127, 0, offset=0))
    assert "doesn't read the config's block_q" in attention.explain(x, x, x)  # on a CPU


def test_equal_keywords_make_equal_attentions() -> None:
    def make(**more: Any) -> Attention:
        return Attention("splash", **({"mask": Causal() & SlidingWindow(127), "mesh": MESH, "block_q": 512} | more))

    first, others = make(), [make(block_q=256), make(mask=Causal()), make(mesh=None), make(causal=True)]
    assert first == make()
    assert hash(first) == hash(make())
    assert len({first, make(), *others}) == 5
    assert pickle.loads(pickle.dumps(first)) == first
    assert first == Attention(first.declared())
    traced = []
    run = jax.jit(lambda a, x: traced.append(1) or a(x, x, x).attention_outputs, static_argnums=0)
    for _ in range(2):
        run(Attention("vanilla", causal=False), QUERY)
    assert len(traced) == 1


def test_1_is_no_flag_even_after_True() -> None:
    Attention("vanilla", causal=True)
    with pytest.raises(ConfigError, match=r"causal=1"):
        Attention("vanilla", causal=1)
    Attention("vanilla", sliding_window=(1, 0))
    with pytest.raises(ConfigError, match=r"sliding_window=\(True, 0\)"):
        Attention("vanilla", sliding_window=(True, 0))


def test_a_base_config_is_read_each_time() -> None:
    class Config:
        attn_dtype = "bfloat16"

    config = Config()
    for dtype in ("bfloat16", "float16"):
        config.attn_dtype = dtype
        assert Attention("vanilla", base_config=config).operation.metadata.runtime_dtype == dtype


def test_a_name_and_a_file_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("vanilla", "mine"):
        Path(name).write_text(json.dumps({"operation": "sdpa"}))
    assert Attention("vanilla").operation.name == "vanilla"
    assert Attention("./vanilla").operation.name == Attention(Path("vanilla")).operation.name == "sdpa"
    assert Attention("mine").operation.name == "sdpa"


@pytest.mark.parametrize("name", ["vanilla", "splash", "sdpa", "ring", "ulysses", "autoregressive_decodeattn"])
def test_no_keyword_has_two_meanings(name: str) -> None:
    """The fields of a config and the arguments of calls and metadata share no name."""
    from attnops.operators.api.attention_keywords import _CALL
    from attnops.registry.metadata import METADATA_ARGUMENTS

    fields = set(OperationRegistry.get(name).config.model_fields) - {"operation", "schema_version"}
    assert not fields & {*_CALL, *METADATA_ARGUMENTS, "metadata"}
    assert set(_CALL) & set(METADATA_ARGUMENTS) == {"causal", "softmax_scale", "dropout_prob"}


@pytest.mark.parametrize(
    ("declared", "keywords", "error", "match"),
    [
        ("splsh", {}, UnknownNameError, "'splsh' is not registered.*Did you mean 'splash'"),
        ("x" * 5000, {}, ConfigError, "File name too long"),
        ("paged", {"dropout_prob": 0.5, "bias": 1}, InputTypeError, r"'bias' is not an argument of Attention\('paged'"),
        (
            "splash",
            {"blck_q": 2},
            InputTypeError,
            r"'blck_q' is not an argument of Attention\('splash', ...\).*'block_q'",
        ),
        ("splash", {"is_causal": True}, InputTypeError, "'is_causal' is not an argument.*Here it is causal"),
        ("sdpa", {"block_q": 2}, InputTypeError, "'block_q' is not an argument.*operation_configs"),
        ("splash", {"block_q": 3.5}, ConfigError, "block_q=3.5"),
        ("splash", {"block_q": 8, "operation_configs": {"splash": {}}}, ConfigError, "given with operation_configs"),
        ("vanilla", {"sliding_window": -1}, ConfigError, r"Attention\('vanilla', ...\): call.sliding_window=-1"),
        ("vanilla", {"mask": np.ones((6, 6), bool)}, ConfigError, "mask is .*wanted an object"),
        ("vanilla", {"mask": Dense(np.ones((1, 1, 6, 6), bool))}, ConfigError, "holds arrays.*pass it in the call"),
        ("vanilla", {"kv_lengths": [3]}, InputTypeError, "'kv_lengths' is not an argument of Attention"),
        ("vanilla", {"metadata": {}}, InputTypeError, "metadata is a dict; wanted an OperationMetadata"),
        ("vanilla", {"metadata": OperationMetadata(), "strict": True}, ConfigError, "strict: given with metadata="),
        (
            {"operation": "vanilla"},
            {"block_q": 8},
            InputTypeError,
            "'block_q': given with a declaration, which specifies",
        ),
        ({"operation": "vanilla"}, {"mask": Causal()}, InputTypeError, "'mask': given with a declaration"),
    ],
)
def test_what_is_refused(declared: Any, keywords: dict[str, Any], error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        Attention(declared, **keywords)


def test_a_call_that_disagrees() -> None:
    attention = Attention("vanilla", causal=False, softmax_scale=0.5)
    with pytest.raises(
        ConfigError, match=r"causal: the declaration says False, the call says True; leave one of them out"
    ):
        attention(QUERY, KEY, VALUE, causal=True)
    np.testing.assert_allclose(
        attention(QUERY, KEY, VALUE, softmax_scale=0.5).attention_outputs, _wanted(scale=0.5), atol=3e-6
    )
