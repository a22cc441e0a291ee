"""`attnops run`: it runs what is declared, checks it, and writes it whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops.cli import compared as cli_compared
from attnops.cli import run as cli_run
from attnops.cli.inputs import read_arrays, write_arrays
from attnops.verify import reference_attention

MESH = ("--mesh", "fsdp=2,tp=2,sp=2")
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "segments": {"segment_ids": 3, "batch": 2},
    "lengths": {"kv_lengths": True, "batch": 2, "causal": False},
    "sinks": {"softmax_aux": [4, 2]},
    "soft_cap": {"logits_soft_cap": 5.0},
    "gqa": {"kv_heads": 2, "sliding_window": [4, None]},
    "thd": {"layout": "thd", "segment_ids": 3},
    "cache": {"q_len": 1, "kv_len": 24, "kv_lengths": [24, 5], "batch": 2, "return_lse": True},
    "dropout": {"dropout_prob": 0.3, "deterministic": False, "layout": "bhtd"},
    "bias_and_mask": {"bias": [1, 4, 16, 16], "dense_mask": [2, 1, 16, 16], "batch": 2, "return_weights": True},
    "value_dim": {"value_dim": 4, "mask": {"kind": "chunked", "size": 8}},
    "int8": {"kv_dtype": "int8", "kv_heads": 2, "dtype": "bfloat16"},
    "int8_packed": {"kv_dtype": "int8", "kv_scales": "token", "layout": "thd", "segment_ids": 2},
    "fp8": {"kv_dtype": "float8_e4m3fn", "kv_scales": "head", "layout": "bhtd", "batch": 2},
    "fp8_as_it_stands": {"kv_dtype": "float8_e5m2", "kv_scales": None},
    "offset": {"kv_len": 24, "query_offset": 8, "dtype": "bfloat16"},
    "score": {
        "batch": 2,
        "kv_heads": 2,
        "operands": {"temperature": [4, 16], "log_gate": True},
        "score": ["alibi", "forgetting", {"kind": "relative_bias", "buckets": {"kind": "t5"}}, "temperature"],
    },
    "score_of_a_cache": {
        "q_len": 1,
        "kv_len": 24,
        "kv_lengths": [24, 5],
        "batch": 2,
        "score": ["position_temperature", "alibi"],
    },
}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        # On one device or over a mesh, by turns.
        pytest.param(name, mesh, id=f"{name}-{kind}", marks=[] if number % 2 == turn else [pytest.mark.slow])
        for number, name in enumerate(CALLS)
        for turn, (kind, mesh) in enumerate((("one", ()), ("mesh", MESH)))
    ],
)
def test_check(attnops: Callable[..., Any], config: Callable[..., Path], name: str, mesh: tuple[str, ...]) -> None:
    result = attnops("run", config(**CALLS[name]), *mesh, "--check", "--repeats", 1)
    assert (result.status, result.err) == (0, "")
    assert "pass  output against float64 reference" in result.out
    assert ("pass  lse" in result.out) == ("return_lse" in CALLS[name])
    assert ("pass  weights" in result.out) == ("return_weights" in CALLS[name])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("plain", "is_causal"),
        ("lengths", "key_value_seq_lengths"),
        ("segments", "mask as an array 2x1x16x16"),
        ("sinks", "not expressible"),
        ("soft_cap", "it lacks soft cap"),
        ("dropout", "it lacks dropout"),
        ("cache", "it lacks the log-sum-exp"),
        ("value_dim", "it lacks a value head dim"),
        ("int8", "it lacks int8 or fp8 keys and values"),
    ],
)
def test_the_comparison_is_of_the_same_work(
    attnops: Callable[..., Any], config: Callable[..., Path], name: str, says: str
) -> None:
    out = attnops("run", config(**CALLS[name]), "--repeats", 1).said
    assert says in out
    if "differs by at most" in out:
        assert float(out.split("differs by at most ")[1].split()[0].rstrip(";,")) < 1e-5


def test_a_comparison_that_needs_more_than_is_free_is_skipped(
    attnops: Callable[..., Any], config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_compared, "_free_bytes", lambda device, count: 1000)
    result = attnops("run", config(), "--repeats", 1)
    assert (result.status, result.err) == (0, "")
    assert "every value finite" in result.said
    assert "skipped: jax.nn.dot_product_attention, is_causal, needs" in result.said
    assert "and 1000 B are free" in result.said
    data = json.loads(attnops("run", config(), "--repeats", 1, "--json").out)["compare"]
    assert data["expressible"] is True
    assert "are free" in data["reason"]


def test_a_comparison_that_the_device_refuses_is_skipped(
    attnops: Callable[..., Any], config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 25769803776 bytes.")

    monkeypatch.setattr(cli_compared, "compile_call", full)
    result = attnops("run", config(), "--repeats", 1)
    assert (result.status, result.err) == (0, "")
    assert "doesn't fit into the device's memory" in result.said


def test_without_the_comparison(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    result = attnops("run", config(), "--no-compare", "--repeats", 1)
    assert (result.status, result.err) == (0, "")
    assert "compare" not in result.out
    data = json.loads(attnops("run", config(), "--no-compare", "--repeats", 1, "--json").out)
    assert data["compare"] == {"expressible": True, "reason": "not asked for"}


def test_the_tpu_kernel_interpreted(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    metadata = {"operation_configs": {"splash": {"interpret": True}}}
    call = {"segment_ids": 2, "kv_heads": 2, "logits_soft_cap": 9.0, "softmax_aux": [4], "head_dim": 32}
    result = attnops("run", config("splash", metadata, **call), "--check", "--repeats", 1, "--explain")
    assert result.status == 0
    assert "splash.forward_tpu" in result.out
    assert "of the work is on padding" in result.out


def test_json(attnops: Callable[..., Any], config: Callable[..., Path], examples: Path) -> None:
    files = (examples / "minilm_layer.json", "--inputs", examples / "minilm_layer.npz")
    result = attnops("run", *files, "--check", "--repeats", 2, "--json")
    assert (result.status, result.err) == (0, "")
    data = json.loads(result.out)
    assert data["plan"]["implementation"] == "splash.forward_native"
    assert data["output"] == {"shape": [6, 25, 12, 32], "dtype": "float32", "finite": True}
    assert data["time"]["repeats"] == 2
    assert data["time"]["seconds"] > 0
    assert [check["passed"] for check in data["checks"]] == [True, True]
    assert data["compare"]["expressible"] is True
    assert any("mask of minilm_layer.npz is not used" in note for note in data["notes"])
    lacking = json.loads(attnops("run", config(logits_soft_cap=3.0), "--repeats", 1, "--json").out)
    assert lacking["compare"] == {"expressible": False, "reason": "it lacks soft cap on the logits"}
    for other in ("--quiet", "--explain"):
        refused = attnops("run", config(), "--json", other)
        assert (refused.status, refused.out) == (2, "")
        assert f"{other} has no effect with --json" in refused.err


def test_fallback_is_one_short_warning(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    metadata = {"operation_configs": {"splash": {"interpret": True}}}
    result = attnops("run", config("splash", metadata, return_weights=True, q_len=17), "--repeats", 1)
    assert result.status == 0
    assert result.err.startswith("attnops: warning: splash.forward_native runs instead")
    assert len(result.err.splitlines()) == 1
    refused = attnops("run", config("splash", metadata | {"fallback": "error"}, return_weights=True, q_len=17))
    assert (refused.status, "attention weights" in refused.err) == (1, True)


def test_minilm_against_the_model(attnops: Callable[..., Any], examples: Path) -> None:
    files = (examples / "minilm_layer.json", "--inputs", examples / "minilm_layer.npz")
    result = attnops("run", *files, "--check", "--repeats", 1)
    assert result.status == 0
    assert "pass  output against expected of minilm_layer.npz" in result.out
    assert "54 rows of padding queries left out" in result.said
    assert "--check compares with it" in attnops("run", *files, "--repeats", 1).out


def _inputs(path: Path, **more: np.ndarray) -> Path:
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal((2, 16, 4, 8), np.float32) for name in ("query", "key", "value")}
    write_arrays(path, arrays | more)
    return path


def test_what_was_not_compared_does_not_pass(
    attnops: Callable[..., Any], config: Callable[..., Path], tmp_path: Path
) -> None:
    """Every row is a padding query; the expected values are of another call altogether."""
    none = np.zeros((2,), np.int32)
    inputs = _inputs(tmp_path / "x.npz", kv_lengths=none, expected=np.full((2, 16, 4, 8), 7.0, np.float32))
    path = config(batch=2, kv_lengths=True)
    result = attnops("run", path, "--inputs", inputs, "--check", "--repeats", 1)
    assert result.status == 1
    assert "nothing was compared" in result.err
    data = json.loads(attnops("run", path, "--inputs", inputs, "--check", "--repeats", 1, "--json").out)
    assert [one["passed"] for one in data["checks"]] == [True, False]


@pytest.mark.parametrize("factor", [1.0, 0.9])
def test_a_row_counts_by_its_own_size(
    attnops: Callable[..., Any], config: Callable[..., Path], tmp_path: Path, factor: float
) -> None:
    """The last of 256 rows is a sixteenth of the first; a tenth of it is half a hundredth of that."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 256, 2, 8)).astype(jnp.bfloat16).astype(np.float32) for _ in range(3))
    expected = reference_attention(q, k, v, scale=8**-0.5, mask=np.tri(256, dtype=bool)).output.astype(np.float32)
    expected[:, -1] *= factor
    write_arrays(tmp_path / "in.npz", {"query": q, "key": k, "value": v, "expected": expected})
    call = {"q_len": 256, "q_heads": 2, "dtype": "bfloat16"}
    result = attnops("run", config(**call), "--inputs", tmp_path / "in.npz", "--check", "--repeats", 1)
    assert result.status == (0 if factor == 1 else 1)
    assert ("FAIL  output against expected" in result.out) == (factor != 1)
    assert "pass  output against float64 reference" in result.out


def test_a_wrong_output_fails(attnops: Callable[..., Any], config: Callable[..., Path], tmp_path: Path) -> None:
    inputs = _inputs(tmp_path / "in.npz", expected=np.ones((2, 16, 4, 8), np.float32))
    result = attnops("run", config(), "--inputs", inputs, "--check", "--repeats", 1)
    assert result.status == 1
    assert "FAIL  output against expected" in result.out
    assert result.err.startswith("attnops: check failed: output against expected of in.npz")
    assert "Traceback" not in result.err


def test_what_is_not_finite_is_said(attnops: Callable[..., Any], config: Callable[..., Path], tmp_path: Path) -> None:
    value = np.ones((2, 16, 4, 8), np.float32)
    value[0, 3, 1, 2] = np.inf
    result = attnops("run", config(), "--inputs", _inputs(tmp_path / "in.npz", value=value), "--repeats", 1)
    assert result.status == 1
    assert "not finite; so are values of value" in result.err


def test_output_files(attnops: Callable[..., Any], config: Callable[..., Path], tmp_path: Path) -> None:
    for suffix, dtype in ((".npz", "float32"), (".safetensors", "bfloat16")):
        target = tmp_path / f"out{suffix}"
        path = config(dtype="bfloat16", return_lse=True, return_weights=True)
        result = attnops("run", path, "--output", target, "--repeats", 1, *MESH)
        assert (result.status, result.err) == (0, "")
        stored = read_arrays(target)
        assert set(stored) == {"output", "lse", "weights"}
        assert stored["output"].shape == (1, 16, 4, 8)
        assert stored["output"].dtype.name == dtype
        assert ("written as float32" in result.out) == (suffix == ".npz")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "out.npz", "out.safetensors"]
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "out.npz").stat().st_mode & 0o777 == 0o666 & ~mask


def test_the_same_seed_gives_the_same_output(
    attnops: Callable[..., Any], config: Callable[..., Path], tmp_path: Path
) -> None:
    written = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        target = tmp_path / f"{name}.npz"
        assert attnops("run", config(), "--seed", seed, "--output", target, "--quiet", "--repeats", 1).out == ""
        written.append(read_arrays(target)["output"])
    assert np.array_equal(written[0], written[1])
    assert not np.array_equal(written[0], written[2])


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.npz"
    write_arrays(target, {"output": np.zeros(3, np.float32)})
    before = target.read_bytes()

    def full(*args: Any, **arrays: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(ValueError, match="No space left on device"):
        write_arrays(target, {"output": np.ones(3, np.float32)})
    assert target.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out.npz"]


def test_integers_of_any_width_and_order(
    attnops: Callable[..., Any], config: Callable[..., Path], tmp_path: Path
) -> None:
    """Lengths less than the queries, of a type that wraps below 0; the check holds them against the reference."""
    rng, path = np.random.default_rng(0), tmp_path / "in.npz"
    arrays = {n: rng.standard_normal((2, t, 4, 8)).astype(">f4") for n, t in (("query", 4), ("key", 16), ("value", 16))}
    for dtype in ("u1", ">i8", "u8"):
        np.savez(path, **arrays, kv_lengths=np.array([3, 16], dtype))  # type: ignore[arg-type]
        sizes = {"q_len": 4, "kv_len": 16, "mode": "insert"}
        result = attnops("run", config(**sizes), "--inputs", path, "--check", "--repeats", 1)
        assert (result.status, result.err) == (0, "")
        assert "pass  output against float64 reference" in result.out


def test_bfloat16_goes_through_safetensors(
    attnops: Callable[..., Any], config: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "in.safetensors"
    arrays = {n: np.ones((2, 16, 4, 8), jnp.bfloat16) for n in ("query", "key", "value")}
    write_arrays(path, arrays | {"kv_lengths": np.array([3, 16], np.int64)})
    assert read_arrays(path)["query"].dtype == jnp.bfloat16
    result = attnops("run", config(), "--inputs", path, "--check", "--repeats", 1)
    assert result.status == 0
    assert "bfloat16" in result.out
    result = attnops("run", config(dtype="float32"), "--inputs", path, "--check", "--repeats", 1)
    assert "query of in.safetensors cast from bfloat16 to float32 (call.dtype)" in result.out


@pytest.mark.parametrize("operation", ["vanilla", "splash"])
def test_quantised_keys_and_values_of_a_file(
    attnops: Callable[..., Any], config: Callable[..., Path], tmp_path: Path, operation: str
) -> None:
    """int8 in .npz, fp8 in .safetensors; the check's reference is of the dequantised ones."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((2, 16, 4, 8), np.float32)
    metadata = {"operation_configs": {"splash": {"interpret": True}}}
    for name, dtype, scales in (
        ("in.npz", jnp.int8, {"key_scale": np.full((2, 16, 4, 1), 0.02), "value_scale": np.full((1, 1, 4, 1), 0.03)}),
        ("in.safetensors", jnp.float8_e4m3fn, {"key_scale": np.full((1, 1, 1, 1), 2.0, np.float32)}),
    ):
        given = {n: rng.integers(-90, 90, query.shape).astype(dtype) for n in ("key", "value")}
        if dtype != jnp.int8:
            given = {n: (query + n.startswith("k")).astype(dtype) for n in given}
        write_arrays(tmp_path / name, {"query": query, **given, **scales})
        assert read_arrays(tmp_path / name)["key"].dtype == dtype
        result = attnops(
            "run", config(operation, metadata), "--inputs", tmp_path / name, "--check", "--repeats", 1, "--explain"
        )
        assert (result.status, result.err) == (0, "")
        assert "pass  output against float64 reference" in result.out
        assert f"key {jnp.dtype(dtype).name}, value {jnp.dtype(dtype).name}" in " ".join(result.out.split())
        assert "as key" in result.out
        assert ("value_scale: its values are used unscaled" in result.out) == (dtype != jnp.int8)


def test_interrupted(attnops: Callable[..., Any], config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(options: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_run, "run", interrupt)
    result = attnops("run", config())
    assert (result.status, result.err) == (130, "attnops: interrupted.\n")


def test_placed_before_it_is_timed(config: Callable[..., Path]) -> None:
    """The inputs lie on all eight devices as the plan says, not on the first one."""
    from attnops import OperationRegistry
    from attnops.cli.run_call import on_devices
    from attnops.cli.target import run_metadata
    from attnops.registry.declaration import Declaration

    made = Declaration.load(config(batch=2, kv_heads=1))
    operation = OperationRegistry.create("vanilla", run_metadata(made, mesh=MESH[1]))
    arrays = made.draw(0)
    mesh = operation.metadata.mesh
    assert isinstance(mesh, jax.sharding.Mesh)
    placed = on_devices(arrays, operation.plan(**made.call_arguments(arrays)), mesh)
    assert placed["query"].sharding.shard_shape((2, 16, 4, 8)) == (1, 8, 2, 8)
    assert placed["key"].sharding.device_set == set(jax.devices())


@pytest.mark.parametrize("command", ["plan", "verify", "run", "tune"])
def test_specs_that_do_not_fit_are_refused_alike(
    attnops: Callable[..., Any], config: Callable[..., Path], command: str
) -> None:
    """Strict sharding says no in every command with the status of a refusal."""
    path = config(metadata={"strict": True}, batch=3)
    result = attnops(command, path, "--mesh", "fsdp=2")
    assert (result.status, result.err[:24]) == (1, "attnops: strict sharding")
