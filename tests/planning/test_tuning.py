"""What a plan takes of the tuned choices, and says of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from attnops import Causal, ConfigError, KVCache, OperationMetadata, OperationRegistry, Plan
from attnops.compat import abstract_device
from attnops.operators.choices.shipped import table_key
from attnops.operators.paged_cache import RaggedBatch
from attnops.operators.splash.candidates import SHIPPED
from attnops.planning import tune_cache
from attnops.planning.decide import _decide
from attnops.planning.paged.step_tuning import step_key
from attnops.planning.tune_cache import Measured
from attnops.planning.tuning import tune_key
from attnops.sharding import virtual_mesh
from attnops.verify import reference_attention


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(tune_cache.ENVIRONMENT, str(tmp_path))
    return tmp_path


def _plan(operation: str = "splash", *, length: int = 512, call: dict[str, Any] | None = None, **metadata: Any) -> Plan:
    x = jax.ShapeDtypeStruct((2, length, 4, 128), jnp.bfloat16)
    given = {"backend": "tpu", "fallback": "error"} | metadata
    return OperationRegistry.create(operation, OperationMetadata(**given)).plan(x, x, x, **(call or {}))


def _key(decided: Plan) -> dict[str, Any]:
    assert decided.method is not None
    return tune_key(decided.method, decided.problem, decided.placement)


def _keep(decided: Plan, **fields: Any) -> None:
    tune_cache.keep(_key(decided), [Measured("forward", fields, "static", 1.0)], finished="static")


def test_a_miss_takes_the_heuristic_and_says_so() -> None:
    decided = _plan()
    assert decided.tuning is not None
    assert decided.tuning.source == "heuristic"
    assert "no tuned choice is stored for this call on tpu" in decided.explain(verbose=True)
    assert "no tuned choice" not in decided.explain()
    assert decided.to_dict()["tuning"]["source"] == "heuristic"


def test_a_hit_is_taken_and_says_where_it_is_kept(folder: Path) -> None:
    assert _plan().config.block_q == 512
    _keep(_plan(), block_q=256)
    decided = _plan()
    assert decided.config.block_q == 256
    assert "block_q=256 (tuned)" in decided.explain()
    assert f"cache: static clock, an estimate, stored in {folder}" in decided.explain()
    assert decided.problem.config.model_fields_set == set()  # the declaration is as it was


def test_what_another_process_keeps_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _plan()
    with monkeypatch.context() as patch:
        patch.setattr(
            tune_cache, "_counter", itertools.repeat(tune_cache.cache_generation())
        )  # as if it wasn't done here
        _keep(before, block_q=256)
    assert _plan().config.block_q == 256
    assert _plan() is _plan()
    assert _plan() != before


def test_the_chosen_sizes_are_what_runs() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 256, 2, 16))
    configs = {"splash": {"interpret": True}}
    attend = OperationRegistry.create("splash", OperationMetadata(operation_configs=configs, fallback="error"))
    assert attend(x, x, x).plan.config.block_q == 256
    _keep(attend.plan(x, x, x), block_q=128, block_kv=128)
    found = attend(x, x, x)  # a warm operation takes it too
    assert found.plan.config.block_q == 128
    rows = np.arange(256)
    reference = [np.asarray(x, np.float64)] * 3
    want = reference_attention(*reference, scale=0.25, mask=rows[:, None] >= rows).output
    np.testing.assert_allclose(found.attention_outputs, want, atol=1e-5)
    text = jax.jit(lambda q: attend(q, q, q).attention_outputs).trace(x).jaxpr.pretty_print()
    assert "128,16" in text.replace(" ", "")


@pytest.mark.parametrize(
    "changes",
    [
        {"length": 640},
        {"call": {"logits_soft_cap": 5.0}},
        {"call": {"mask": Causal(1)}},
        {"call": {"mode": "prefill"}},
        {"call": {"query_offset": 3}},
        {"call": {"layout": "bhtd"}},
        {"runtime_dtype": "float32"},
        {"operation_configs": {"splash": {"use_base2_exp": False}}},
        {"mesh": {"fsdp": 2}},
        {"causal": False},
    ],
    ids=str,
)
def test_another_call_has_another_choice(changes: dict[str, Any]) -> None:
    before, after = _key(_plan()), _key(_plan(**changes))
    assert before != after


def test_the_dtype_of_keys_and_whether_they_are_scaled_have_choices_of_their_own() -> None:
    attend = OperationRegistry.create("splash", OperationMetadata(backend="tpu", fallback="error"))
    q, scale = jax.ShapeDtypeStruct((2, 512, 4, 128), jnp.bfloat16), jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32)
    found = []
    for dtype, call in (("int8", {"key_scale": scale}), ("float8_e4m3fn", {"key_scale": scale}), ("float8_e4m3fn", {})):
        key = jax.ShapeDtypeStruct(q.shape, jnp.dtype(dtype))
        decided = attend.plan(q, key, q, **call)
        found.append((_key(decided), table_key(decided.problem, decided.placement)))
    keys, rows = [key for key, _ in found], [row for _, row in found]
    assert all(a != b for a, b in itertools.combinations([_key(_plan()), *keys], 2))
    assert rows[0] != rows[1]
    assert "key int8" in rows[0]


def test_what_no_choice_depends_on_is_not_in_the_key() -> None:
    assert _key(_plan()) == _key(_plan(call={"softmax_scale": 0.3})) == _key(_plan(call={"causal": True}))


def test_tuning_error_refuses_a_miss() -> None:
    with pytest.raises(ConfigError, match=r"no tuned choice is stored.*tuning='error' is declared; `attnops tune`"):
        _plan(tuning="error")
    _keep(_plan(), block_q=256)
    assert _plan(tuning="error").config.block_q == 256


def test_tuning_off_looks_for_nothing() -> None:
    _keep(_plan(), block_q=256)
    decided = _plan(tuning="off")
    assert decided.config.block_q == 512
    assert decided.tuning is not None
    assert decided.tuning.why == "tuning='off'"


def test_tuning_tune_searches_on_a_miss_and_keeps_it() -> None:
    configs = {"vanilla": {"path": "blockwise"}}
    given: dict[str, Any] = {
        "backend": "cpu",
        "operation_configs": configs,
        "tuning": "tune",
        "runtime_dtype": "float32",
    }
    decided = _plan("vanilla", length=96, call={"mode": "prefill"}, **given)
    assert decided.tuning is not None
    assert decided.tuning.source == "cache"
    assert "measured on the device, searched for this plan" in decided.tuning.why
    assert set(decided.tuning.fields) == {"block_q", "block_kv"}
    measured = tune_cache.load(_key(decided)).measured
    best = min(measured, key=lambda one: one.seconds)
    assert len(measured) >= 4
    assert dict(decided.tuning.fields) == best.fields
    assert {name: getattr(decided.config, name) for name in best.fields} == best.fields
    again = _plan("vanilla", length=96, call={"mode": "prefill"}, **given | {"tuning": "error"})
    assert again.config == decided.config


def test_a_broken_file_is_told_in_the_plan() -> None:
    path = tune_cache.load(_key(_plan())).path
    path.parent.mkdir(parents=True)
    path.write_text("{")
    decided = _plan()
    assert decided.tuning is not None
    assert decided.tuning.source == "heuristic"
    assert f"{path} can't be read" in decided.tuning.why


def test_a_choice_of_fields_that_are_not_searched_is_a_miss_and_told() -> None:
    _keep(_plan(), block_q=256, no_such_field=1)
    decided = _plan()
    assert (decided.tuning.source, decided.config.block_q) == ("heuristic", 512)
    assert "has fields that aren't searched here" in decided.tuning.why


@pytest.mark.parametrize(
    "fields",
    [{"block_q": -5}, {"block_q": "x"}, {"block_kv": 512, "block_kv_compute": 384}, {"block_q": None, "block_kv": 2.5}],
    ids=str,
)
def test_a_stored_choice_that_the_config_refuses_is_a_miss_with_a_note(fields: dict[str, Any]) -> None:
    _keep(_plan(), **fields)
    decided = _plan()
    path = str(tune_cache.load(_key(decided)).path)
    assert decided.tuning is not None
    assert (decided.kind, decided.tuning.source, decided.config.block_q) == ("platform", "heuristic", 512)
    assert [path in note for note in decided.notes].count(True) == 1
    assert path in decided.explain()
    with pytest.raises(ConfigError, match=r"refused here.*tuning='error'"):
        _plan(tuning="error")


def test_a_refused_choice_of_a_step_is_a_miss_with_a_note() -> None:
    device = abstract_device("TPU v5 lite", 1, "tpu")
    mesh = AbstractMesh((1,), ("tp",), axis_types=(AxisType.Auto,), abstract_device=device)
    cache = KVCache(
        layers=1, kv_heads=2, head_dim=128, page_size=16, pages=64, max_sequences=4, max_length=256, layout="heads"
    )
    batch = RaggedBatch.make(cache.plan(), cu_q_lens=[0, 8], kv_lens=[8], page_table=[[0]], tokens=8)
    x, kv = (jax.ShapeDtypeStruct((8, heads, 128), jnp.bfloat16) for heads in (4, 2))
    attend = OperationRegistry.create("paged", OperationMetadata(mesh=mesh, fallback="error"))
    key = step_key("forward_tpu", attend.plan(x, kv, kv, cache=cache, batch=batch).problem)
    tune_cache.keep(key, [Measured("step", {"pages_per_block": -1}, "device", 1.0)], finished="device")
    decided = attend.plan(x, kv, kv, cache=cache, batch=batch)
    assert decided.kind == "platform"
    assert decided.tuning.source == "heuristic"
    assert decided.config.pages_per_block >= 1
    assert [str(tune_cache.load(key).path) in note for note in decided.notes].count(True) == 1


def test_a_broken_file_is_noted_beside_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = _plan()
    table = {"compiler": "libtpu 1.2.3", "choices": {table_key(decided.problem, decided.placement): {"block_q": 256}}}
    monkeypatch.setattr("attnops.operators.choices.shipped._table", lambda path: table)
    path = tune_cache.load(_key(decided)).path
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_text("[" * 200_000)
    _decide.cache_clear()
    found = _plan()
    assert (found.tuning.source, found.config.block_q) == ("table", 256)
    assert [str(path) in note for note in found.notes].count(True) == 1


def test_a_search_does_not_choose_what_was_refused() -> None:
    given: dict[str, Any] = {
        "backend": "cpu",
        "operation_configs": {"vanilla": {"path": "blockwise"}},
        "runtime_dtype": "float32",
    }
    call = {"mode": "prefill"}
    key = _key(_plan("vanilla", length=96, call=call, **given))
    tune_cache.keep(key, [Measured("forward", {"block_q": -5, "block_kv": 32}, "device", 0.0)], finished="device")
    decided = _plan("vanilla", length=96, call=call, **given, tuning="tune")
    assert decided.tuning.source == "cache"
    assert decided.config.block_q > 0


def test_nothing_is_said_where_there_is_nothing_to_choose() -> None:
    assert _plan("vanilla", length=64, backend="cpu").tuning is None  # logits whole
    assert _plan("sdpa", backend="cpu").tuning is None
    assert _plan(backend="cpu").tuning is None  # forward_native doesn't read splash's config
    assert _plan(operation_configs={"splash": {"kernel": "jax"}}).tuning is None
    sizes = {"block_q": 64, "block_kv": 64, "path": "blockwise"}
    assert _plan("vanilla", backend="cpu", operation_configs={"vanilla": sizes}).tuning is None


def test_queries_that_are_split_over_devices_are_not_tuned() -> None:
    decided = _plan(mesh=virtual_mesh({"sp": 2}), backend=None, operation_configs={"splash": {"interpret": True}})
    assert decided.placement.q_axes == ("sp",)
    assert decided.tuning is None


def test_the_table_is_read_where_nothing_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = _plan()
    row = {"block_q": 256, "block_kv": 256, "block_q_dkv": 128}
    table = {"compiler": "libtpu 1.2.3", "choices": {table_key(decided.problem, decided.placement): row}}
    monkeypatch.setattr("attnops.operators.choices.shipped._table", lambda path: table)
    _decide.cache_clear()
    found = _plan()
    assert found.tuning is not None
    assert (found.tuning.source, dict(found.tuning.fields)) == ("table", row)
    assert "libtpu 1.2.3" in found.tuning.why
    assert _plan(call={"return_lse": True}).tuning == found.tuning
    for other in (
        {"operation_configs": {"splash": {"block_kv": 128}}},
        {"call": {"logits_soft_cap": 2.0}},
        {"call": {"kv_lengths": jax.ShapeDtypeStruct((2,), jnp.int32)}},
    ):
        assert _plan(**other).tuning.source == "heuristic"
    assert dict(_plan(call={"mode": "prefill"}).tuning.fields) == {"block_q": 256, "block_kv": 256}
    _keep(_plan(), block_q=128)
    assert _plan().tuning.source == "cache"
    assert SHIPPED.look_up(decided.problem, decided.placement)[1] == row
