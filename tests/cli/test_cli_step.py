"""`attnops plan` and `attnops run` of a file whose operation attends to pages: what is printed, checked and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnops import Attention, ConfigError, KVCache, OperationRegistry
from attnops.cli.check import Worst
from attnops.errors import InputError, InputTypeError
from attnops.operators.paged.declared_step import declared_step
from attnops.operators.paged_cache import RaggedBatch, init
from attnops.verify.closeness import lse_size

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
    screen = attnops("plan", path)
    assert screen.status == 0, screen.err
    assert screen.out.count("\n") <= 24
    assert "--verbose adds" in screen.out
    result = attnops("plan", path, "--verbose")
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
    on_tpu = json.loads(attnops("plan", path, "--json", "--target", "tpu", "--mesh", "tp=2").out)
    assert on_tpu["platform"] == "tpu"
    assert on_tpu["tensors"]["query"]["device_shape"] == [7, 3, 16]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"metadata": {"mesh": {"dp": 2, "tp": 2}}, "cache": {"pages_axis": "dp", "layout": "packed"}},
        {"cache": {"layout": "heads", "quantised": {"dtype": "int8", "scale": "head"}}, "step": {"softmax_aux": True}},
        {"cache": {"layout": "joined", "value_dim": 24}, "step": {"logits_soft_cap": 5.0}},
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
        {"step": {"mask": {"kind": "and", "masks": [{"kind": "causal"}, {"kind": "chunked", "size": 12}]}}},
    ],
    ids=("plain", "mesh", "heads", "joined", "sequences_split", "v2", "decode", "none", "chunked"),
)
def test_a_step_is_run_and_checked(attnops: Callable[..., Any], tmp_path: Path, changes: dict[str, Any]) -> None:
    out = tmp_path / "out.npz"
    result = attnops("run", written(tmp_path, **changes), "--check", "--output", str(out), "--repeats", "1")
    assert result.status == 0, result.out + result.err
    assert "pass  output against float64 reference over the pages" in result.out
    assert "pass  lse against float64 reference over the pages" in result.out
    assert "one of the cache's 3 layers" in result.out
    output = np.load(out)["output"]
    assert output.shape[1:] == (6, changes.get("cache", {}).get("value_dim", 16))
    assert np.isfinite(output).all()


GROUPS = {
    "layers": [{"layers": [0, 2], "window_tokens": 7, "pages": 12}, {"layers": [1], "pages": 32}], "pages": None, "max_tokens": 8,
}  # fmt: skip


def in_groups(folder: Path, **step: Any) -> str:
    """The file with a cache of two groups."""
    cache = {name: x for name, x in (FILE["cache"] | GROUPS).items() if x is not None}
    path = written(folder, step=step)
    Path(path).write_text(json.dumps(json.loads(Path(path).read_text()) | {"cache": cache}))
    return path


def test_a_step_of_a_group_is_planned_run_and_compiled(attnops: Callable[..., Any], tmp_path: Path) -> None:
    """12 pages of the window's group hold what 16 pages of the whole sequences would."""
    path = in_groups(tmp_path, layer=2)
    result = attnops("plan", path, "--verbose")
    assert result.status == 0, result.err
    for part in (
        "of group 0 of 2: a window of 7 tokens",
        "7 queries of 3 sequences: 9 pages, ",
        "cache: 3 layers in 2 groups",
        "2 layers (0, 2), a window of 7 tokens: 12 pages, at most 5 per sequence",
        "1 layer (1), all tokens: 32 pages",
        "value_pages[1]",
    ):
        assert part in " ".join(result.out.split()), result.out
    data = json.loads(attnops("plan", path, "--json").out)
    assert (data["group"], data["reads"]["held"], len(data["cache"]["groups"])) == (0, 9, 2)
    for command in (("run", "--check", "--repeats", "1"), ("verify",)):
        result = attnops(command[0], path, *command[1:])
        assert result.status == 0, result.out + result.err
    of_others = attnops("plan", in_groups(tmp_path, layer=1, sliding_window=None), "--json")
    data = json.loads(of_others.out)
    assert (data["group"], data["reads"]["held"], data["reads"]["live"]) == (1, 16, 16)
    assert "layer 2: a step uses one" in attnops("run", in_groups(tmp_path, layer=2), "--check").out


@pytest.mark.parametrize(
    ("step", "status", "said"),
    [
        ({"layer": 3}, 2, "step.layer=3; wanted 0 to 2"),
        ({"layer": 0, "sliding_window": None}, 1, "[paged.window_prefix]"),
        ({"layer": 2, "sliding_window": [7, 0]}, 1, "[paged.window_prefix]"),
        ({"layer": 1, "kv_lens": 60, "q_lens": 1, "sequences": 3}, 2, "need 45 pages of 4, but it has 32"),
        ({"layer": 0, "kv_lens": 60, "q_lens": 1, "sequences": 3}, 0, ""),
    ],
    ids=str,
)
def test_what_is_refused_of_a_group(
    attnops: Callable[..., Any], tmp_path: Path, step: dict[str, Any], status: int, said: str
) -> None:
    for command in ("plan", "run"):
        result = attnops(command, in_groups(tmp_path, **step))
        assert (result.status, said in result.err) == (status, True), result.out + result.err


def test_a_wrong_lse_fails_the_check() -> None:
    """The output may be right and the lse not: of a row that sees nothing it is -inf."""
    want = np.array([[1.0, -np.inf], [3.0, 100.0]])
    for wrong in ([[1.0, 0.0], [3.0, 100.0]], [[-np.inf, -np.inf], [3.0, 100.0]], [[1.0, -np.inf], [3.1, 100.0]],
                  [[np.nan, -np.inf], [3.0, 100.0]]):  # fmt: skip
        assert not _lse_passes(np.array(wrong), want)
    assert _lse_passes(want, want)
    assert _lse_passes(np.full((2, 2), -np.inf), np.full((2, 2), -np.inf))


def _lse_passes(got: np.ndarray, want: np.ndarray) -> bool:
    worst = Worst("float32")
    worst.add(got, want, lse_size(want))
    return worst.compared("lse", "the reference", 4e-6).passed


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"step": None}, 2, "has steps, but the file declares none"),
        ({"cache": None}, 2, "declare `cache` in the file"),
        ({"operation": "splash"}, 2, "the file declares a step, but operation 'splash' runs calls"),
        ({"call": {"q_len": 4}}, 2, "declare `step` instead of `call`"),
        ({"step": {"kv_lens": [17, 9]}}, 2, "q_lens of 3, kv_lens of 2"),
        ({"step": {"kv_lens": [17, 4, 30]}}, 2, "sequence 1 has 5 queries and 4 keys"),
        ({"step": {"kv_lens": [17, 9, 65]}}, 2, "at most 64 keys"),
        ({"step": {"sequences": 9, "q_lens": 1, "kv_lens": 2}}, 2, "9 sequences; wanted at most 8"),
        ({"step": {"kv_lens": 64}}, 2, "need 48 pages of 4, but it has 32"),
        ({"step": {"tokens": 3}}, 2, "step.tokens=3; wanted at least 7"),
        ({"step": {"q_heds": 3}}, 2, "q_heds"),
        ({"step": {"mask": {"kind": "prefix", "length": 4}}}, 1, "paged.mask"),
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
        assert "--inputs" in result.err


def test_a_step_is_compiled_here_and_for_tpus(attnops: Callable[..., Any], tmp_path: Path) -> None:
    result = attnops("verify", written(tmp_path), "--json")
    assert result.status == 0, result.err
    (report,) = json.loads(result.out)
    assert report["passed"]
    assert report["compiled"]
    assert report["page_bytes"] == 9 * 2 * 4 * 2 * 16 * 4
    # Counted: keys in a window of 7, before and at each query's own.
    seen = 7 + sum(min(position, 6) + 1 for position in range(4, 9)) + 7
    assert report["flops"] == 2 * seen * 6 * (16 + 16)
    pages = 2 * 32 * 4 * 2 * 16 * 4
    assert pages < report["argument_bytes"] <= report["peak_bytes"]
    text = attnops("verify", written(tmp_path, metadata={"mesh": {"dp": 2, "tp": 2}}, cache={"pages_axis": "dp"})).out
    assert "no collectives: nothing is sent between devices" in text


@pytest.mark.skipif(find_spec("libtpu") is None, reason="pip install 'attnops[tpu]'")
def test_a_step_is_compiled_for_a_tpu(attnops: Callable[..., Any], tmp_path: Path) -> None:
    result = attnops(
        "verify", written(tmp_path, metadata={"fallback": "allow"}), "--target", "v5e:2x2", "--mesh", "tp=2,dp=2"
    )
    assert result.status == 0, result.out + result.err
    assert "page table: 512 B of 1.0 MiB of scalar memory" in result.out
    assert "bound by HBM" in result.out


def test_a_step_passes_only_if_it_was_compiled(
    attnops: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnops.verify.targets.has_libtpu", lambda: False)
    arguments = ("verify", written(tmp_path, metadata={"fallback": "allow"}), "--target", "v5e:1x1")
    result = attnops(*arguments)
    assert result.status == 1
    assert "NOT COMPILED" in result.out
    (report,) = json.loads(attnops(*arguments, "--json").out)
    assert (report["passed"], report["outcome"], report["compiled"]) == (False, "not compiled", False)
    result = attnops(*arguments, "--lowered")
    assert result.status == 0
    assert "passes" not in result.out


def test_whatever_the_compiler_raises_for_a_step_is_a_report(
    attnops: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no such layout\nand more")

    monkeypatch.setattr("attnops.verify.passes.Planned.lowered", refuse)
    result = attnops("verify", written(tmp_path))
    assert result.status == 1
    assert "step: NotImplementedError: no such layout" in result.err
    assert "doesn't compile: NotImplementedError: no such layout" in result.out
    (report,) = json.loads(attnops("verify", written(tmp_path), "--json").out)
    assert (report["outcome"], report["failure"]["memory"]) == ("failed", None)


@pytest.mark.slow
def test_in_time_the_process_gives_the_same_report_of_a_step(attnops: Callable[..., Any], tmp_path: Path) -> None:
    path = written(tmp_path)
    (alone,), (within,) = (
        json.loads(attnops("verify", path, "--json", *more).out) for more in ((), ("--timeout", "300"))
    )
    for report in (alone, within):
        for name in ("seconds", "temp_bytes", "peak_bytes"):  # tests compile with other flags than the process
            assert report.pop(name) > 0
    assert alone == within


def test_sizes_of_a_step_are_searched_and_kept(
    attnops: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kept = written(tmp_path, step={"max_q_len": 5, "mode": "autoregressive"}), tmp_path / "kept"
    monkeypatch.setenv("ATTNOPS_TUNE_CACHE", str(kept))
    result = attnops("tune", path, "--json", "--most", "3")
    assert result.status == 0, result.err
    (report,) = json.loads(result.out)
    tried = report["passes"]["step"]
    assert [one["fields"] for one in tried] == [{}, {"pages_per_block": 16}]
    assert all(one["seconds"] > 0 for one in tried)
    best = min(tried, key=lambda one: one["seconds"])
    assert report["choice"] == best["fields"]
    plan = json.loads(attnops("plan", path, "--json").out)
    assert plan["tuning"]["source"] == "cache"
    assert plan["config"]["pages_per_block"] == best["fields"].get("pages_per_block")
    assert json.loads(attnops("tune", path, "--json", "--most", "3").out)[0]["reused"] == 2
    refused = attnops("tune", path, "--target", "v5e:2x2", "--how", "device")
    assert refused.status == 2
    assert "--how device measures times on this machine" in refused.err


@pytest.mark.skipif(find_spec("libtpu") is None, reason="pip install 'attnops[tpu]'")
@pytest.mark.slow
def test_sizes_of_a_step_are_searched_for_a_tpu(
    attnops: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNOPS_TUNE_CACHE", str(tmp_path / "kept"))
    path = written(tmp_path, cache={"layout": "joined"}, step={"max_q_len": 5, "mode": "autoregressive"})
    shown = attnops("tune", path, "--target", "v5e:2x2", "--mesh", "tp=2,dp=2", "--most", "1")
    assert shown.status == 0, shown.out + shown.err
    assert "by static clock" in shown.out
    assert "heuristic" in shown.out
    refused = attnops("tune", written(tmp_path), "--target", "v5e:2x2", "--mesh", "tp=2,dp=2")
    assert refused.status == 2
    assert "the static clock knows only the kernels for TPUs" in refused.err


def test_a_file_with_a_step_is_an_attention_that_a_model_calls() -> None:
    """Its step's options apply, its cache is the one that a state must be of, and a call without a state is refused."""
    attend = Attention(FILE)
    step, cache = attend.declaration.step, attend.declaration.cache
    assert step is not None
    assert cache is not None
    drawn = declared_step(attend.declaration, cache.plan(), "before")
    arrays = drawn.draw(0)
    tokens = arrays["query"], arrays["key"], arrays["value"]
    call: dict[str, Any] = {"state": init(cache), "layer": 0, "batch": drawn.batch}
    options = {name: value for name, value in step.options().items() if value is not None}
    out = attend(*tokens, softmax_aux=arrays["softmax_aux"], **call)
    want = attend.operation(*tokens, softmax_aux=arrays["softmax_aux"], **call, **options)
    np.testing.assert_array_equal(out.attention_outputs, want.attention_outputs)
    assert attend.plans == (out.plan,)
    assert attend.plan(*tokens, layer=0).problem.mask == out.plan.problem.mask
    assert Attention(json.loads(attend.declared().to_json())) == attend
    with pytest.raises(InputTypeError, match="no state, layer, batch"):
        attend(*tokens)
    other = KVCache.from_dict(cache.to_dict() | {"max_sequences": cache.max_sequences + 1})
    with pytest.raises(ConfigError, match="isn't the one that the file declares"):
        attend(*tokens, **call | {"state": init(other)})
    with pytest.raises(ConfigError, match="softmax_scale: the declaration says"):
        Attention("paged", softmax_scale=0.5)(*tokens, softmax_scale=0.25, **call)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"call": {"q_heads": 6}}, ConfigError, "declare `step` instead of `call`"),
        ({"step": FILE["step"] | {"q_heads": 4}}, InputError, r"has 6 heads; the file declares step.q_heads=4"),
        ({"step": FILE["step"] | {"dtype": "bfloat16"}}, InputError, "the file declares step.dtype='bfloat16'"),
    ],
)
def test_what_a_file_declares_of_a_step_holds(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    cache = KVCache.from_dict(FILE["cache"])
    drawn = declared_step(Attention(FILE).declaration, cache.plan(), "before")
    arrays = drawn.draw(0)
    with pytest.raises(error, match=match):
        Attention(FILE | changes)(
            arrays["query"], arrays["key"], arrays["value"], state=init(cache), layer=0, batch=drawn.batch
        )


def test_an_attention_over_pages_by_keywords() -> None:
    cache = KVCache(
        layers=1, kv_heads=2, head_dim=16, dtype="float32", page_size=4, pages=16, max_sequences=4, max_length=32
    )
    batch = RaggedBatch.make(cache.plan(), cu_q_lens=[0, 6, 7], kv_lens=[6, 9], page_table=[[5, 2], [3, 4, 1]])
    random = np.random.default_rng(0)
    tokens = [random.standard_normal((8, heads, 16)).astype(np.float32) for heads in (4, 2, 2)]
    attend = Attention("paged", sliding_window=(3, 0), pages_per_block=2, fallback="allow")
    out = attend(*tokens, state=init(cache), layer=0, batch=batch)
    want = OperationRegistry.create("paged")(*tokens, state=init(cache), layer=0, batch=batch, sliding_window=(3, 0))
    np.testing.assert_allclose(out.attention_outputs, want.attention_outputs, atol=1e-6)
    assert out.plan.config.pages_per_block == 2
    assert "sliding_window" in out.plan.problem.features
