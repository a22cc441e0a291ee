"""`attnops verify`: the real compiler's word on targets that aren't here, and lowering alone without it."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.errors import ConfigError
from attnops.planning.traffic import min_traffic
from attnops.verify.compiled import failure, kernels, program_text
from attnops.verify.generations import abstract_target, device_of

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="pip install 'attnops[tpu]'")
SIZES = {"batch": 4, "q_len": 1024, "q_heads": 8, "kv_heads": 4, "head_dim": 128, "dtype": "bfloat16", "causal": True}
MIB = 1 << 20


@needs_libtpu
@pytest.mark.slow
def test_a_call_on_two_generations(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    path = config("splash", **SIZES)
    result = attnops("verify", path, "--target", "v5e:2x2", "--target", "v6e:2x2")
    assert (result.status, result.err) == (0, "")
    for part in ("v5e:2x2", "v6e:2x2", "TPU v6 lite", "splash.forward_tpu", "attnops_splash_backward", "at the peak"):
        assert part in result.out
    (report, _) = json.loads(attnops("verify", path, "--target", "v5e:2x2", "--target", "v6e:2x2", "--json").out)
    assert (report["target"], report["passed"], report["warnings"]) == ("v5e:2x2", True, [])
    assert report["device"]["kind"] == "TPU v5 lite"
    forward, both = report["passes"]
    assert [p["name"] for p in (forward, both)] == ["forward", "forward and backward"]
    assert [k["name"] for k in forward["kernels"]] == ["attnops_splash_forward"]
    assert [k["name"] for k in both["kernels"]] == ["attnops_splash_forward", "attnops_splash_backward"]
    assert all(0 < k["vmem_used"] < 16 * MIB for k in both["kernels"])
    # One batch row a device: q and the output 2 MiB each, k and v 1 MiB each. Sub-tiles of 256 leave 10 of 16.
    assert forward["argument_bytes"] == 4 * MIB
    assert 2 * MIB <= forward["output_bytes"] < 2.1 * MIB
    assert forward["flops"] == pytest.approx(2 * 8 * 10 * 256 * 256 * (128 + 128), rel=0.02)
    assert both["flops"] > 3 * forward["flops"]
    assert forward["roofline_seconds"] == pytest.approx(
        max(forward["flops"] / 197e12, forward["bytes_moved"] / 820e9), rel=0.01
    )


class _Unreadable:
    def as_text(self) -> str:
        raise jax.errors.JaxRuntimeError("INTERNAL: async-update instruction should have 1 operands but sees 2")


@needs_libtpu
def test_a_program_whose_text_can_not_be_read_compiles_all_the_same(
    attnops: Callable[..., Any], config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnops.verify.passes.program_text", lambda compiled: program_text(_Unreadable()))
    arguments = (config("splash", **SIZES), "--target", "v5e:2x2", "--mode", "prefill")
    result = attnops("verify", *arguments)
    assert result.status == 0
    assert "VMEM use and communication are not known" in result.out
    assert "passes" not in result.out
    (report,) = json.loads(attnops("verify", *arguments, "--json").out)
    assert (report["passed"], report["outcome"]) == (False, "compiled")
    assert report["unchecked"]
    assert report["passes"][0]["kernels"] is None
    assert report["passes"][0]["temp_bytes"] > 0


@pytest.mark.slow
@needs_libtpu
def test_too_much_vmem_is_told_with_what_would_do(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    blocks = dict.fromkeys(("block_q", "block_q_compute", "block_kv", "block_kv_compute"), 2048)
    blocks = blocks | {"vmem_limit_bytes": None}
    metadata = {"operation_configs": {"splash": blocks}}
    sizes = SIZES | {"q_len": 4096}
    result = attnops("verify", config("splash", metadata, **sizes), "--target", "v5e:2x2", "--mode", "prefill")
    assert result.status == 1
    assert "attnops_splash_forward needs" in result.err
    assert "of VMEM and may take 16.0 MiB" in result.err
    said = " ".join(result.out.split())
    # 2048 queries of a head, 128 wide, twice, in bfloat16; logits of 2048 x 2048, which take more than anything else
    assert "counted: 1.0 MiB for query (block_q)" in said
    assert said.index("for logits and weights (block_q_compute x block_kv_compute)") < said.index("1.0 MiB for query")
    # What the plan notes is the sum of the parts.
    parts = sum(float(size) for size in re.findall(r"counted: ([\d.]+) MiB for", said))
    assert float(re.findall(r"counted to take ([\d.]+) MiB", said)[0]) == pytest.approx(parts, abs=0.3)
    # 22 MiB with libtpu 0.0.52, in whole MiB; the device has 128.
    (limit,) = re.findall(r"compiles with vmem_limit_bytes=(\d+) ", said)
    assert int(limit) % MIB == 0
    assert 16 * MIB < int(limit) <= 24 * MIB
    # v4 has no more to give: smaller blocks
    result = attnops("verify", config("splash", metadata, **sizes), "--target", "v4:2x2x1", "--mode", "prefill")
    assert result.status == 1
    assert "compiles with block_q=1024" in " ".join(result.out.split())


@needs_libtpu
def test_a_limit_that_will_be_clamped_is_a_warning(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    metadata = {"operation_configs": {"splash": {"vmem_limit_bytes": 100 * MIB}}}
    arguments = (config("splash", metadata, **SIZES), "--mode", "prefill", "--json")
    (clamped,) = json.loads(attnops("verify", *arguments, "--target", "v5p:2x2x1").out)
    assert "is more than TPU v5 has" in clamped["warnings"][0]
    (fits,) = json.loads(attnops("verify", *arguments, "--target", "v5e:2x2").out)
    assert fits["warnings"] == []
    assert fits["passes"][0]["kernels"][0]["vmem_limit"] == 100 * MIB


@needs_libtpu
def test_too_much_hbm(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    sizes = SIZES | {"batch": 256, "q_len": 131072}
    result = attnops(
        "verify", config("splash", **sizes), "--target", "v5e:2x2", "--mesh", "fsdp=4", "--mode", "prefill"
    )
    assert result.status == 1
    assert "a device needs" in result.err
    assert "of HBM and has 15.8 GiB" in result.err


def test_without_libtpu_nothing_passes(
    attnops: Callable[..., Any], config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnops.verify.targets.has_libtpu", lambda: False)
    arguments = ("verify", config("splash", **SIZES), "--target", "v4:2x2x1")
    result = attnops(*arguments)
    assert result.status == 1
    assert "pip install 'attnops[tpu]'" in result.said
    assert "pip install 'attnops[tpu]'" in result.err
    assert "--lowered" in result.err
    assert "NOT COMPILED" in result.out
    assert "lowers in" in result.out
    assert "passes" not in result.out
    (report,) = json.loads(attnops(*arguments, "--json").out)
    assert (report["passed"], report["outcome"]) == (False, "not compiled")
    assert [one["compiled"] for one in report["passes"]] == [False, False]
    assert attnops(*arguments, "--mesh", "fsdp=3").status == 2


def test_a_call_without_a_mesh_is_compiled_for_this_machine(
    attnops: Callable[..., Any], config: Callable[..., Path]
) -> None:
    (report,) = json.loads(attnops("verify", config(), "--json").out)
    assert (report["passed"], report["outcome"]) == (True, "passed")
    assert [one["compiled"] for one in report["passes"]] == [True, True]
    assert all(one["peak_bytes"] > 0 for one in report["passes"])


def test_lowering_alone_is_asked_for(
    attnops: Callable[..., Any], config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the compiler and without it; a call that can't be lowered fails."""
    path = config("splash", **SIZES)
    for target, compiler in (("v4:2x2x1", False), ("here", True)):
        monkeypatch.setattr("attnops.verify.targets.has_libtpu", lambda compiler=compiler: compiler)
        arguments = ("verify", path, "--target", target, "--lowered", "--mode", "prefill")
        result = attnops(*arguments)
        assert (result.status, result.err) == (0, "")
        assert "lowers in" in result.out
        assert "passes" not in result.out
        (report,) = json.loads(attnops(*arguments, "--json").out)
        assert (report["passed"], report["outcome"]) == (False, "lowered")

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no such layout")

    monkeypatch.setattr("attnops.verify.targets.has_libtpu", lambda: False)
    monkeypatch.setattr("attnops.operators.splash.splash_kernels._run_attnops", refuse)
    other = config("splash", **SIZES | {"q_len": 1280})  # not traced before
    (report,) = json.loads(attnops("verify", other, "--target", "v4:2x2x1", "--lowered", "--json").out)
    assert report["outcome"] == "failed"


def test_what_has_to_be_sent_and_is_not_known_does_not_pass(
    attnops: Callable[..., Any], config: Callable[..., Path]
) -> None:
    """Two kv heads over four devices: XLA chooses how the gradients of their copies are summed."""
    path = config("vanilla", q_len=64, q_heads=4, kv_heads=2, head_dim=16, batch=1, dtype="float32")
    arguments = ("verify", path, "--mesh", "tp=4")
    result = attnops(*arguments)
    assert result.status == 0
    assert "passes" not in result.out
    (report,) = json.loads(attnops(*arguments, "--json").out)
    assert (report["passed"], report["outcome"]) == (False, "compiled")
    assert any("copied" in what for what in report["unchecked"])


SLEEPS = """
import time
from attnops.cli import compile_process

def verified(options, target):
    for number, report in enumerate(real(options, target)):
        if number == 2:
            time.sleep(300)
        yield report

real = compile_process.verified
compile_process.verified = verified
compile_process.main()
"""


@pytest.mark.slow
def test_a_pass_that_takes_too_long_is_not_compiled(
    attnops: Callable[..., Any], config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two passes, in a process that ends with it."""
    monkeypatch.setattr("attnops.cli.compile_process.COMMAND", (sys.executable, "-c", SLEEPS))
    arguments = ("verify", config(), "--timeout", "15")
    start = time.monotonic()
    result = attnops(*arguments, "--json")
    assert time.monotonic() - start < 60
    assert result.status == 1
    (report,) = json.loads(result.out)
    assert (report["passed"], report["outcome"]) == (False, "not compiled")
    assert [one["compiled"] for one in report["passes"]] == [True, False]
    assert "--timeout" in report["passes"][1]["uncompiled"]


@pytest.mark.slow
def test_in_time_the_process_gives_the_same_report(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    arguments = ("verify", config(), "--mesh", "tp=2", "--mode", "prefill", "--json")
    (alone,), (within,) = (json.loads(attnops(*arguments, *more).out) for more in ((), ("--timeout", "300")))
    for report in (alone, within):
        for one in report["passes"]:
            del one["seconds"]
    assert alone == within
    assert alone["outcome"] == "passed"
    refused = attnops("verify", config(), "--mesh", "tp=5000", "--timeout", "300")
    assert refused.status == 2
    assert "at most 256 virtual ones" in refused.err


def test_a_process_that_ends_is_told(
    attnops: Callable[..., Any], config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnops.cli.compile_process.COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    result = attnops("verify", config(), "--timeout", "300")
    assert result.status == 2
    assert "status 3" in result.err


def test_drops_repeats_and_notes_are_told(
    attnops: Callable[..., Any], config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnops.verify.targets.has_libtpu", lambda: False)
    call = SIZES | {"batch": 3, "q_len": 128, "q_heads": 2, "kv_heads": 1, "head_dim": 16}
    arguments = ("verify", config("vanilla", {"blocksize_b": 2}, **call), "--target", "v5e:2x4")
    arguments += ("--mode", "prefill", "--mesh", "fsdp=2,tp=2,fssdp=2", "--lowered")
    result = attnops(*arguments)
    assert (result.status, result.err) == (0, "")
    said = " ".join(result.out.split())
    for once in (
        "dropped axis 'fsdp' of batch in query3d, query, key, value, output: 3 is not divisible by fsdp=2. Make it",
        "mesh axis 'fssdp' (2) splits nothing: with 'fsdp' (2), 4 devices do the same work",
        "each kv head repeated 2 times",
        "blocksize_b=2 is not read by vanilla",
    ):
        assert said.count(once) == 1, once
    (report,) = json.loads(attnops(*arguments, "--json").out)
    assert report["plan"]["repeated_work"]["devices"] == 4
    strict = config("vanilla", {"strict": True}, **call | {"batch": 2})
    result = attnops("verify", strict, "--target", "v5e:2x2", "--mesh", "fssdp=2,tp=2")
    assert result.status == 1
    assert "Did you mean 'fsdp'?" in result.err


def test_refusals_and_bad_targets(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    path = config("splash", {"fallback": "error"}, **SIZES | {"return_weights": True})
    result = attnops("verify", path, "--target", "v5e:2x2")
    assert result.status == 1
    assert "attention weights" in result.err
    for target, says in (
        ("v9:2x2", "generations: v4, v5e"),
        ("v5e", "such as v5e:2x2"),
        ("v6:2x2", "Did you mean 'v6e'"),
    ):
        result = attnops("verify", path, "--target", target)
        assert (result.status, says in result.err) == (2, True), result.err


@needs_libtpu
def test_a_mask_with_an_array_in_it(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    mask = {"kind": "sliding_window", "left": 100}
    path = config("splash", **SIZES | {"mask": mask, "dense_mask": [4, 1, 1024, 1024]})
    result = attnops("verify", path, "--target", "v5e:2x2", "--mode", "prefill")
    assert (result.status, result.err) == (0, "")
    assert "attnops_splash_forward" in result.out


def test_whatever_the_compiler_raises_is_a_report(
    attnops: Callable[..., Any], config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no such layout\nand more")

    monkeypatch.setattr("attnops.operators.splash.splash_kernels._run_attnops", refuse)
    result = attnops("verify", config("splash", **SIZES), "--target", "v5e:2x2", "--target", "v6e:2x2")
    assert result.status == 1
    assert result.err.count("NotImplementedError: no such layout") == 4
    assert result.err.count("\n") == 1


def test_generations() -> None:
    assert abstract_target("v5p:4x4x4") == ("TPU v5", 64)
    assert abstract_target("tpu7x:2x2x1") == ("TPU7x", 8)
    assert device_of("TPU v5").flops_per_second == 459e12  # two cores
    with pytest.raises(ConfigError):
        abstract_target("v5e:2")


def test_what_the_compiler_says_in_our_words() -> None:
    vmem = "E1001: allocating on stack for %my_kernel.3 = f32[] ... Scoped allocation with size 24.52M and limit 16.00M exceeded"
    assert failure(RuntimeError(vmem))[:2] == (
        "my_kernel needs 24.5 MiB of VMEM and may take 16.0 MiB: 8.5 MiB too much", "vmem",
    )  # fmt: skip
    hbm = "E1000: the total memory required for HLO temporaries (112.25G) exceeds available HBM (15.75G)."
    assert failure(RuntimeError(hbm)).message.startswith("a device needs 112.2 GiB of HBM and has 15.8 GiB")
    assert failure(RuntimeError("what nobody has seen\nbefore")).message == "RuntimeError: what nobody has seen"


def test_kernels_are_found_over_newlines() -> None:
    text = (
        '%a = f32[] add(x)\n%mine.7 = bf16[2] custom-call(%q), custom_call_target="tpu_custom_call", metadata={"one\ntwo"}, '
        'backend_config={"scoped_memory_configs":[{"memory_space":"1","size":"64"}], "used_scoped_memory_configs":'
        '[{"memory_space":"1","size":"12"}]}\n%other = f32[] custom-call(%q), custom_call_target="Sharding"'
    )
    assert kernels(text) == (("mine", 12, 64),)


@pytest.mark.slow
@needs_libtpu
def test_native_operations_are_verified_too(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    (report,) = json.loads(attnops("verify", config("vanilla", **SIZES), "--target", "v5e:2x2", "--json").out)
    assert [p["kernels"] for p in report["passes"]] == [[], []]
    assert report["passed"]
    assert jax.default_backend() == "cpu"


def test_the_command_on_virtual_devices(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    path = config("splash", {"sequence_parallel": "ulysses"}, q_len=256, q_heads=8, kv_heads=8, head_dim=16, batch=2)
    result = attnops("verify", path, "--mesh", "fsdp=2,sp=4", "--mode", "prefill")
    assert (result.status, result.err) == (0, "")
    for part in ("8 cpu devices", "passes", "over sp: ", "needed by all-to-all", "sends exactly what is needed"):
        assert part in result.out
    (report,) = json.loads(attnops("verify", path, "--mesh", "fsdp=2,sp=4", "--json").out)
    assert report["device"] is None
    assert [p["differences"] for p in report["passes"]] == [[], []]
    assert [(c["kind"], c["axes"]) for c in report["passes"][0]["collectives"]] == [("all-to-all", ["sp"])]
    # q, k, v and the output of 1 x 64 x 8 x 16 float32, three quarters of each
    assert sum(need["sent_bytes"] for need in report["passes"][0]["needs"]) == 4 * 64 * 8 * 16 * 4 * 3 / 4


def test_the_command_fails_where_they_differ(
    attnops: Callable[..., Any], config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of another strategy than the one that is declared."""
    ring = OperationRegistry.create("splash", OperationMetadata(mesh={"sp": 8}, sequence_parallel="ring", tuning="off"))
    x = jax.ShapeDtypeStruct((1, 256, 8, 16), jnp.float32)
    needs = min_traffic(ring.plan(x, x, x), False)
    monkeypatch.setattr("attnops.verify.call.min_traffic", lambda plan, backward: needs)
    path = config("splash", q_len=256, q_heads=8, kv_heads=8, head_dim=16, batch=1, causal=True)
    result = attnops("verify", path, "--mesh", "sp=8", "--mode", "prefill")
    assert result.status == 1
    assert "DIFFERS in all-gather" in result.out
    assert "forward: all-gather: 229376 bytes sent per device, 0 needed" in result.err


def test_on_a_cpu_the_caveats_are_told(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    """A ring's blocks are loops: XLA would count one turn. 2 products of 512 x 512 x 64 for 4 heads, half of them masked."""
    metadata = {"runtime_dtype": "bfloat16", "sequence_parallel": "ring", "mesh": {"sp": 2}}
    call = {"q_len": 2048, "q_heads": 4, "head_dim": 64, "mode": "prefill", "causal": False, "batch": 1}
    result = attnops("verify", config("vanilla", metadata, **call), "--json")
    assert result.status == 0
    (report,) = json.loads(result.out)
    (forward,) = report["passes"]
    whole = 2 * 2 * 2048 * 2048 * 64 * 4
    assert forward["looped"] is True
    assert (forward["flops"], forward["bytes_moved"]) == (whole / 2, 0.0)
    assert report["warnings"] == ["XLA:CPU sends bfloat16 as float32: other devices send half of these bytes"]
    said = attnops("verify", config("vanilla", metadata, **call)).said
    assert f"{whole / 2 / 1e9:.4g} GFLOP by attnops' count; bytes moved unknown" in said


@pytest.mark.parametrize("command", ["verify", "tune", "report"])
def test_a_declared_mesh_that_the_target_can_not_have_is_refused(
    attnops: Callable[..., Any], config: Callable[..., Path], tmp_path: Path, command: str
) -> None:
    path = config("vanilla", {"mesh": {"tp": 4}}, q_len=64)
    more = ("--output", tmp_path / "report.html") if command == "report" else ()
    result = attnops(command, path, "--target", "v5e:1x1", *more)
    assert result.status == 2
    assert "the declared mesh tp=4 has 4 devices and v5e:1x1 has 1" in result.err
    assert "--mesh" in result.err


def test_every_target_is_read_before_the_first_is_compiled(
    attnops: Callable[..., Any], config: Callable[..., Path]
) -> None:
    result = attnops("verify", config(), "--target", "here", "--target", "v9:2x2")
    assert (result.status, result.out) == (2, "")
    for target in ("tpu", "cpu:8"):
        result = attnops("verify", config(), "--target", target)
        assert result.status == 2
        assert "names no devices to compile for" in result.err
