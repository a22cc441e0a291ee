"""Bad input: one message on stderr that starts with `attnops: `, status 2, no traceback, no file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

GOOD = '{"operation": "vanilla", "call": {"q_len": 8, "q_heads": 2, "head_dim": 4}}'


def _refused(result: Any, *says: str) -> None:
    assert result.status == 2, result
    assert result.out == ""
    assert result.err.startswith("attnops: ")
    assert "Traceback" not in result.err
    for part in says:
        assert part in result.err


def _call(more: bytes, metadata: bytes = b"") -> bytes:
    call = b'{"q_len": 8, "q_heads": 2, "head_dim": 4, ' + more + b"}"
    return b'{"operation": "vanilla", "metadata": {' + metadata + b'}, "call": ' + call + b"}"


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"operation": "vanilla", "call": {"q_lenn": 8}}', "Did you mean 'q_len'"),
        (b'{"operation": "vanilla", "call": {"q_len": "8"}}', "call.q_len='8'"),
        (b'{"operation": "vanilla", "call": {"softmax_scale": NaN}}', "NaN"),
        (b'{"operation": "vanilla", "call": {"q_len": 8', "line 1, column"),
        (b'{"operation": "vanila"}', "Did you mean 'vanilla'"),
        (b'{"operation": "vanilla", "metadata": {"causl": true}}', "Did you mean 'causal'"),
        (b'{"operation": "vanilla", "metadata": {"mesh": {"tp": 0}}}', "axis 'tp' is 0; wanted a positive integer"),
        (b'{"operation": "vanilla", "metadata": {"mesh": {"axis_names": ["tp"]}}}', "axis_sizes"),
        (b'{"operation": "vanilla", "metadata": {"mesh": 4}}', "mesh=4"),
        (b'{"operation": "vanilla", "metadata": {"operation_configs": {"splash": {"block_q": 7}}}}', "block_q=7"),
        (b'{"operation": "vanilla", "call": {"q_len": 4, "q_heads": 3, "kv_heads": 2, "head_dim": 4}}', "multiple"),
        (_call(b'"kv_lengths": [9]'), "call.kv_lengths holds 9; wanted 0 to 8"),
        (_call(b'"kv_lengths": [-1]'), "call.kv_lengths=[-1]; wanted a list of lengths"),
        (_call(b'"query_offset": 1073741825'), "call.query_offset=1073741825"),
        (_call(b'"sliding_window": [1073741825, 0]'), "call.sliding_window=[1073741825, 0]"),
        (_call(b'"mask": {"kind": "mask_function", "name": "nobody"}'), "no mask function is named 'nobody'"),
        (
            _call(b'"causal": true', b'"runtime_softmax_dtype": "float64"'),
            "runtime_softmax_dtype='float64', but jax_enable_x64 is off",
        ),
        (b"\xff\xfe{", "not UTF-8"),
        (b"", "not JSON"),
    ],
)
def test_config(attnops: Callable[..., Any], tmp_path: Path, command: str, content: bytes, says: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    _refused(attnops(command, path, "--mesh", "tp=1") if "mesh" not in str(content) else attnops(command, path), says)


@pytest.mark.parametrize("command", ["plan", "run"])
def test_files_that_are_not_there(attnops: Callable[..., Any], tmp_path: Path, command: str) -> None:
    config = tmp_path / "good.json"
    config.write_text(GOOD)
    _refused(attnops(command, tmp_path / "none.json"), "none.json", "No such file")
    _refused(attnops(command, tmp_path), str(tmp_path), "directory")
    _refused(attnops(command, config, "--inputs", tmp_path / "none.npz"), "no such file")
    _refused(attnops(command, config, "--inputs", tmp_path), ".npz or .safetensors")
    folder = tmp_path / "folder.npz"
    folder.mkdir()
    _refused(attnops(command, config, "--inputs", folder), "is a directory")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--mesh", "tp"), "AXIS=SIZE"),
        (("--mesh", "tp=2,tp=2"), "twice"),
        (("--mode", "trian"), "Did you mean 'train'"),
        (("--inputs",), "requires an argument"),
        (("--nope",), "--nope"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "run"])
def test_options(attnops: Callable[..., Any], tmp_path: Path, command: str, arguments: tuple[str], says: str) -> None:
    config = tmp_path / "good.json"
    config.write_text(GOOD)
    _refused(attnops(command, config, *arguments), says)


def test_options_of_one_command(attnops: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "good.json"
    config.write_text(GOOD)
    for arguments, says in (
        (("run", config, "--mesh", "tp=16"), "needs 16 devices, but there are 8"),
        (("run", config, "--mesh", "tp=5000"), "at most 256 virtual ones"),
        (("run", config, "--repeats", "0"), "--repeats"),
        (("run", config, "--seed", str(2**64)), "--seed"),
        (("run", config, "--output", tmp_path / "none" / "x.npz"), "doesn't exist"),
        (("run", config, "--output", tmp_path / "x.csv"), ".npz or .safetensors"),
        (("plan", config, "--target", "tpuu"), "Did you mean 'tpu'"),
        (("plan", config, "--fallback", "maybe"), "fallback='maybe'"),
        (("plam", config), "Did you mean 'plan'"),
    ):
        _refused(attnops(*arguments), says)
    assert [path.name for path in tmp_path.iterdir()] == ["good.json"]


def test_a_config_for_another_platform(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    _refused(attnops("run", config(metadata={"backend": "tpu"})), "this machine's devices are cpu")
    mesh = {"axis_names": ["tp"], "axis_sizes": [2], "platform": "tpu"}
    _refused(attnops("run", config(metadata={"mesh": mesh})), "can't be made of this machine's devices")


def _arrays(**changes: np.ndarray | None) -> dict[str, np.ndarray]:
    base = {name: np.ones((2, 8, 2, 4), np.float32) for name in ("query", "key", "value")}
    return {name: x for name, x in (base | changes).items() if x is not None}


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        (_arrays(key=None), "holds no key"),
        (_arrays(key=np.ones((2, 8, 2, 5), np.float32)), "call.head_dim=4"),
        (_arrays(query=np.ones((2, 9, 2, 4), np.float32)), "call.q_len=8"),
        (_arrays(value=np.ones((2, 7, 2, 4), np.float32)), "key and value differ in length"),
        (_arrays(query=np.ones((8, 2, 4), np.float32)), "requires [batch, time, heads, dim]"),
        (_arrays(query=np.ones((2, 8, 2, 4), np.int32)), "query has dtype int32"),
        (_arrays(mask=np.ones((2, 8), bool)), "mask has shape (2, 8)"),
        (_arrays(mask=np.ones((2, 1, 8, 8), np.float32)), "mask has dtype float32"),
        (_arrays(mask=np.ones((3, 1, 8, 8), bool)), "broadcast"),
        (_arrays(kv_lengths=np.ones((3,), np.int32)), "kv_lengths"),
        (
            _arrays(kv_lengths=np.array([2**40, 1])),
            "kv_lengths holds 1099511627776; wanted integers that fit in int32",
        ),
        (_arrays(kv_lengths=np.array([-1, 1])), "kv_lengths holds -1; wanted 0 to 8"),
        (_arrays(kv_lengths=np.array([9, 1], np.uint8)), "kv_lengths holds 9; wanted 0 to 8"),
        (_arrays(query_offset=np.array([2**30 + 1, 1])), "query_offset holds 1073741825; wanted at most 2**30"),
        (_arrays(q_segment_ids=np.full((2, 8), 2**32, np.uint64)), "q_segment_ids holds 4294967296"),
        (_arrays(q_segment_ids=np.ones((2, 8), bool)), "q_segment_ids has dtype bool; wanted integers"),
        (_arrays(bias=np.ones((1, 2, 8, 9), np.float32)), "bias has shape"),
        (_arrays(softmax_aux=np.ones((5,), np.float32)), "softmax_aux has shape"),
        (_arrays(key=np.ones((2, 8, 2, 4), np.int8)), "key is int8, but key_scale is missing"),
        (_arrays(key_scale=np.ones((1, 1, 1, 1), np.float32)), "key is float32, which isn't quantised"),
        (_arrays(query=np.ones((2, 8, 2, 4), np.int8)), "query has dtype int8"),
        (_arrays(key=np.ones((2, 8, 2, 4), np.uint8)), "key has dtype uint8"),
        (_arrays(value=np.ones((2, 8, 2, 4), jnp.float8_e5m2)), ".npz has no bfloat16 and no fp8"),
        (_arrays(key=np.ones((2, 8, 2, 4), jnp.float8_e4m3fn)), ".npz has no bfloat16 and no fp8"),
        (_arrays(q_segment_ids=np.ones((2, 9), np.int32)), "q_segment_ids has shape"),
        (_arrays(query=np.ones((2, 8, 2, 4), object)), "pickle"),
    ],
)
def test_inputs(attnops: Callable[..., Any], tmp_path: Path, arrays: dict[str, np.ndarray], says: str) -> None:
    config, inputs = tmp_path / "good.json", tmp_path / "in.npz"
    config.write_text(GOOD)
    np.savez(inputs, **arrays)  # type: ignore[arg-type]
    output = tmp_path / "out.npz"
    _refused(attnops("run", config, "--inputs", inputs, "--output", output), says)
    _refused(attnops("plan", config, "--inputs", inputs), says)
    assert not output.exists()


def test_declared_and_given_must_agree(
    attnops: Callable[..., Any], config: Callable[..., Path], tmp_path: Path
) -> None:
    inputs = tmp_path / "in.npz"
    extra = {"kv_lengths": np.array([3, 8], np.int32), "query_offset": np.array([0, 0], np.int32)}
    np.savez(inputs, **_arrays(), **extra)  # type: ignore[arg-type]
    sizes = {"q_len": 8, "q_heads": 2, "head_dim": 4}
    for call, says in (
        ({"kv_lengths": [3, 7]}, "call.kv_lengths=[3, 7]"),
        ({"segment_ids": 2}, "holds no q_segment_ids"),
        ({"bias": [1, 1, 8, 8]}, "holds no bias"),
        ({"dense_mask": [1, 1, 8, 8]}, "holds no mask"),
        ({"query_offset": 1}, "keep one"),
        ({"batch": 3}, "call.batch=3"),
        ({"kv_dtype": "int8"}, "key is float32, but call.kv_dtype=int8 is declared"),
    ):
        _refused(attnops("plan", config(**sizes, **call), "--inputs", inputs), says)
    whole = np.ones((2, 8, 2, 4), np.int8)
    scale = {"key_scale": np.ones((1, 1, 2, 1), np.float32)}
    np.savez(inputs, **_arrays(key=whole, value=whole), **scale)  # type: ignore[arg-type]
    for call, says in (
        ({"kv_dtype": None}, "key is int8, but call.kv_dtype=None is declared"),
        ({"kv_dtype": "float8_e5m2"}, "key is int8, but call.kv_dtype=float8_e5m2 is declared"),
        ({"kv_dtype": "int8"}, "value is int8, but value_scale is missing"),
        ({"kv_dtype": "int8", "kv_scales": "head"}, "holds no value_scale, but call.kv_scales=head"),
        ({"kv_dtype": "int8", "kv_scales": "token"}, "key_scale has shape (1, 1, 2, 1), but call.kv_scales=token"),
        ({"kv_scales": None}, "key is int8, but key_scale is missing"),
    ):
        _refused(attnops("plan", config(**sizes, **call), "--inputs", inputs), says)


def test_unreadable_files(attnops: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "good.json"
    config.write_text(GOOD)
    whole, single = tmp_path / "whole.npz", tmp_path / "single.npz"
    np.savez(whole, **_arrays())  # type: ignore[arg-type]
    with single.open("wb") as file:
        np.save(file, np.ones(3))
    half = tmp_path / "half.npz"
    half.write_bytes(whole.read_bytes()[:300])
    swapped = tmp_path / "swapped.npz"
    broken = bytearray(whole.read_bytes())
    broken[200:260] = bytes(60)
    swapped.write_bytes(bytes(broken))
    text, tensors = tmp_path / "text.npz", tmp_path / "bad.safetensors"
    text.write_text("not an archive")
    tensors.write_bytes(b"\x00" * 40)
    short = tmp_path / "short.safetensors"
    short.write_bytes(b"ab")
    for path in (single, half, swapped, text, tensors, short):
        _refused(attnops("run", config, "--inputs", path), path.name)


def _process(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "attnops", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_a_real_process(tmp_path: Path) -> None:
    """Eight devices appear where the mesh needs them; results on stdout, errors on stderr."""
    config = tmp_path / "good.json"
    config.write_text(GOOD)
    good = _process("run", config, "--mesh", "tp=2,sp=4", "--check", "--repeats", "1")
    assert (good.returncode, good.stderr) == (0, "")
    assert "pass  output against float64 reference" in good.stdout
    bad = _process("run", tmp_path / "none.json")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("attnops: ")
    assert len(bad.stderr.splitlines()) == 1


def test_a_reader_that_goes_away() -> None:
    command = f"{sys.executable} -m attnops schema | head -c 10"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, timeout=120)
    assert result.stderr == ""


def test_a_comma_too_many_and_a_misspelt_field_name_the_file(attnops: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "odd.json"
    file.write_text('{"operation": "vanilla",\n "call": {"q_len": 8, "q_heads": 2, "head_dim": 4,}}')
    result = attnops("plan", file)
    assert result.status == 2
    assert f"{file}: not JSON at line 2" in result.err
    assert "no comma after the last item" in result.err
    file.write_text(json.dumps({"operation": "vanilla", "metadata": {"causl": True}}))
    result = attnops("plan", file)
    assert result.status == 2
    assert f"{file}: metadata: unknown field 'causl'" in result.err
