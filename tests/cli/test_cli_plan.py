"""`attnops plan`, `list` and `schema`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from attnops import OperationRegistry
from attnops.cli.app import app
from attnops.verify.topology import TOPOLOGIES, described_mesh

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


def test_help_and_no_arguments(attnops: Callable[..., Any]) -> None:
    for arguments in ((), ("--help",), ("-h",)):
        result = attnops(*arguments)
        assert result.status == 0
        assert "schema" in result.out
        assert "plan" in result.out


def test_through_typers_own_runner(config: Callable[..., Path]) -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["list", "--json"]).exit_code == 0
    result = runner.invoke(app, ["plan", str(config()), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["implementation"] == "vanilla.forward_native"


def test_list(attnops: Callable[..., Any]) -> None:
    data = json.loads(attnops("list", "--json").out)["operations"]
    assert data["splash"]["platforms"]["tpu"] == "forward_tpu"
    assert data["splash"]["platforms"]["cpu"] == "forward_native"
    assert data["sdpa"]["platforms"]["rocm"] == "forward_native"
    assert data["sdpa"]["platforms"]["cuda"] == "forward_cuda"
    assert "sinks" in data["splash"]["implementations"]["forward_tpu"]["consumes"]
    text = attnops("list").out
    for word in ("forward_tpu", "splash.forward_tpu", "bfloat16", "segment_ids"):
        assert word in text


def test_a_broken_plug_in_is_shown_and_breaks_nothing(
    attnops: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names, get = OperationRegistry.names(), OperationRegistry.get

    def broken(name: str) -> Any:
        if name != "zz_broken":
            return get(name)
        from attnops import ConfigError

        raise ConfigError("operation 'zz_broken' (nowhere:Op) can't be imported: ImportError: no nowhere")

    monkeypatch.setattr(OperationRegistry, "names", lambda: (*names, "zz_broken"))
    monkeypatch.setattr(OperationRegistry, "get", broken)
    result = attnops("list")
    assert result.status == 0
    assert "no nowhere" in result.said
    assert "vanilla.forward_native" in result.out
    assert "error" in json.loads(attnops("list", "--json").out)["operations"]["zz_broken"]
    assert json.loads(attnops("schema").out)["$defs"]["config.splash"]


def test_schema(attnops: Callable[..., Any]) -> None:
    assert "call" in json.loads(attnops("schema").out)["properties"]
    assert "block_kv" in json.loads(attnops("schema", "splash").out)["properties"]
    assert attnops("schema", "splsh").err.startswith("attnops: operation 'splsh' is not registered")


def test_plan_for_a_tpu_that_is_not_here(attnops: Callable[..., Any], examples: Path) -> None:
    arguments = ("plan", examples / "llama3_8b_layer.json", "--mesh", "fsdp=2,tp=2,sp=2", "--target", "tpu")
    result = attnops(*arguments)
    assert (result.status, result.err) == (0, "")
    for part in ("splash.forward_tpu", "block_q=256 (declared)", "defaults of the config", "--target"):
        assert part in result.out
    whole = attnops(*arguments, "--verbose")
    assert whole.status == 0
    for part in (
        "use_fused_bwd_kernel=True (default)",
        "query3d",
        "kv_segment_ids",
        "softmax_aux",
        "axis 'dp' of batch",
    ):
        assert part in whole.out
        assert part not in result.out
    data = json.loads(attnops(*arguments, "--json").out)
    assert data["platform"] == "tpu"
    assert data["tensors"]["query"]["device_shape"] == [1, 256, 16, 128]


@needs_libtpu
def test_plan_for_a_described_topology(attnops: Callable[..., Any], examples: Path) -> None:
    path = examples / "llama3_8b_layer.json"
    data = json.loads(attnops("plan", path, "--target", "v5e:2x2", "--mesh", "fsdp=2,tp=2", "--json").out)
    assert data["implementation"] == "splash.forward_tpu"
    assert data["device_kind"] == "TPU v5 lite"
    assert attnops("plan", path, "--target", "v5e:2x2").status == 0
    for arguments, says in (
        (("--target", "v9:2x2"), "generations: v4, v5e"),
        (("--target", "v5e:2x2", "--mesh", "fsdp=3"), "fsdp=3 has 3 devices and v5e:2x2 has 4"),
    ):
        result = attnops("plan", path, *arguments)
        assert result.status == 2
        assert says in result.err


@needs_libtpu
def test_every_name_that_is_said_to_work_works() -> None:
    for name in TOPOLOGIES:
        mesh = described_mesh(name)
        assert mesh.axis_names == ("fsdp",)
        assert mesh.devices.flat[0].platform == "tpu"


@needs_libtpu
def test_a_topology_without_libtpu(
    attnops: Callable[..., Any], config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own table says of which kind a topology's devices are, and how many."""
    path = config(batch=4, q_heads=4)
    with_it = json.loads(attnops("plan", path, "--target", "v5e:2x2", "--json").out)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    without = json.loads(attnops("plan", path, "--target", "v5e:2x2", "--json").out)
    assert without["device_kind"] == "TPU v5 lite"
    assert without["tensors"]["query"]["device_shape"] == [1, 16, 4, 8]
    assert without == with_it
    result = attnops("plan", path, "--target", "v9:2x2")
    assert result.status == 2
    assert "generations: v4, v5e, v5p, v6e, tpu7x" in result.err


def test_a_mesh_larger_than_this_machine(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    path = config(q_len=64, q_heads=64, batch=64)
    data = json.loads(attnops("plan", path, "--mesh", "fsdp=64,tp=64,sp=8", "--json").out)
    assert data["tensors"]["query"]["device_shape"] == [1, 8, 1, 8]
    assert data["platform"] == "cpu"


def test_refusals_exit_with_1(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    tpu = ("--mesh", "tp=8", "--target", "tpu")
    path = config("splash", return_weights=True)
    assert attnops("plan", path, *tpu).status == 0
    result = attnops("plan", path, *tpu, "--fallback", "error")
    assert result.status == 1
    assert "REFUSED" in result.out
    assert "attention weights" in result.err
    result = attnops("plan", path, *tpu, "--fallback", "error", "--json")
    assert (result.status, json.loads(result.out)["kind"]) == (1, "refused")
    result = attnops("plan", config(), "--mesh", "tp=8", "--strict")
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("attnops: strict sharding")
    result = attnops("plan", config(metadata={"kv_heads": "error"}, kv_heads=2), "--mesh", "tp=4")
    assert result.status == 1
    assert "kv_heads='replicate'" in result.err
    result = attnops("plan", config("sdpa", logits_soft_cap=3.0))
    assert (result.status, "soft cap" in result.err) == (1, True)


def test_an_axis_that_splits_nothing(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    misspelt = ("plan", config(batch=4), "--mesh", "fssdp=2,tp=2")
    said = "mesh axis 'fssdp' (2) splits nothing: 2 devices do the same work"
    result = attnops(*misspelt)
    assert result.status == 0
    assert said in " ".join(result.out.split())
    (axis,) = json.loads(attnops(*misspelt, "--json").out)["repeated_work"]["axes"]
    assert (axis["axis"], axis["size"], axis["splits"]) == ("fssdp", 2, [])
    result = attnops(*misspelt, "--strict")
    assert (result.status, result.out) == (1, "")
    assert said in result.err
    assert "Did you mean 'fsdp'?" in result.err
    result = attnops("plan", config(batch=1), "--mesh", "fsdp=4", "--strict")
    assert result.status == 1
    assert "4 devices do the same work; batch of query: 1 is not divisible by fsdp=4" in result.err
    assert attnops("plan", config(batch=4), "--mesh", "fsdp=2,tp=2", "--strict").status == 0


def test_repeated_kv_heads_and_padding_are_told(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    path = config("splash", kv_heads=2, q_len=130)
    out = attnops("plan", path, "--mesh", "tp=4,dp=1,fsdp=1,sp=1", "--target", "tpu").out
    assert "each kv head repeated 2 times" in out
    assert "of the work is on padding" in out


def test_shapes_of_an_inputs_file(attnops: Callable[..., Any], examples: Path) -> None:
    files = (examples / "minilm_layer.json", "--inputs", examples / "minilm_layer.npz")
    result = attnops("plan", *files, "--target", "tpu", "--mesh", "fsdp=2")
    assert result.status == 0
    assert "splash.forward_tpu" in result.out
    assert "kv_lengths" in result.out
    assert "sentences of minilm_layer.npz is not used" in result.out
    assert "mask of minilm_layer.npz is not used: call.dense_mask is null" in result.out
    assert attnops("plan", files[0]).err.startswith("attnops: call.q_len missing")


def test_the_configs_own_mesh(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    path = config(metadata={"mesh": {"fsdp": 1, "tp": 2}})
    data = json.loads(attnops("plan", path, "--target", "cuda", "--json").out)
    assert (data["platform"], [axis["size"] for axis in data["mesh"]]) == ("cuda", [1, 2])
    assert np.prod(data["tensors"]["query"]["device_shape"]) == 16 * 2 * 8


def test_mode_of_the_option_wins(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    data = json.loads(attnops("plan", config(mode="train"), "--mode", "prefill", "--json").out)
    assert data["mode"] == "__prefill__"


@pytest.mark.parametrize(
    ("name", "platform", "kind"),
    [("v5e", "tpu", "TPU v5 lite"), ("v4", "tpu", "TPU v4"), ("h100", "cuda", "NVIDIA H100 80GB HBM3")],
)
def test_a_platform_by_the_name_of_a_device(
    attnops: Callable[..., Any], config: Callable[..., Path], name: str, platform: str, kind: str
) -> None:
    data = json.loads(attnops("plan", config("splash"), "--target", name, "--json").out)
    assert (data["platform"], data["device_kind"]) == (platform, kind)
    data = json.loads(attnops("plan", config("splash"), "--target", name, "--mesh", "tp=4", "--json").out)
    assert (data["device_kind"], data["tensors"]["query"]["device_shape"]) == (kind, [1, 16, 1, 8])


@pytest.mark.parametrize(
    ("target", "says"),
    [("gpus", "Did you mean 'gpu'?"), ("v6", "Did you mean 'v6e'?"), ("v5e-8", "Did you mean 'v5e:2x4'?")],
)
def test_a_target_that_is_none(
    attnops: Callable[..., Any], config: Callable[..., Path], target: str, says: str
) -> None:
    result = attnops("plan", config(), "--target", target)
    assert (result.status, result.out) == (2, "")
    assert says in result.err


def test_a_number_of_cpus(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    data = json.loads(attnops("plan", config(batch=8), "--target", "cpu:4", "--json").out)
    assert (data["platform"], [axis["size"] for axis in data["mesh"]]) == ("cpu", [4])
    assert data["tensors"]["query"]["device_shape"] == [2, 16, 4, 8]
    data = json.loads(attnops("plan", config(batch=8), "--target", "cpu:4", "--mesh", "fsdp=2,tp=2", "--json").out)
    assert data["tensors"]["query"]["device_shape"] == [4, 16, 2, 8]
    result = attnops("plan", config(batch=8), "--target", "cpu:4", "--mesh", "fsdp=8")
    assert result.status == 2
    assert "fsdp=8 has 8 devices and cpu:4 has 4" in result.err


def test_a_target_hides_nothing_of_the_declared_mesh(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    for target in ("tpu", "v5e", "cpu:4", "v5e:2x2"):
        result = attnops("plan", config(metadata={"mesh": {"tp": 0}}), "--target", target)
        assert result.status == 2
        assert "the size of axis 'tp' is 0" in result.err
    result = attnops("plan", config(metadata={"mesh": {"tp": 2}}), "--target", "v5e:2x2")
    assert result.status == 2
    assert "the declared mesh tp=2 has 2 devices and v5e:2x2 has 4" in result.err


@pytest.mark.parametrize("option", ["--platform", "--topology"])
def test_former_options_name_the_one_that_there_is(
    attnops: Callable[..., Any], config: Callable[..., Path], option: str
) -> None:
    result = attnops("plan", config(), option, "tpu")
    assert (result.status, result.out) == (2, "")
    assert "Use --target" in result.err


def test_standard_input(
    attnops: Callable[..., Any], config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = config("splash").read_text()
    told = attnops("plan", config("splash"), "--json").out
    for command, more in (("plan", ("--json",)), ("run", ("--repeats", 1)), ("verify", ("--mode", "prefill"))):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        result = attnops(command, "-", *more)
        assert (result.status, result.err) == (0, "")
        assert command != "plan" or result.out == told
    monkeypatch.setattr("sys.stdin", io.StringIO("{"))
    result = attnops("plan", "-")
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("attnops: standard input: not JSON at line 1")


def test_versions(attnops: Callable[..., Any]) -> None:
    result = attnops("--version")
    assert result.status == 0
    assert result.out == f"{result.said}\n"
    assert f"attnops {importlib.metadata.version('attnops')} (jax {jax.__version__}, " in result.out


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("columns", [80, 60, 200])
def test_no_word_is_broken_and_no_line_is_longer(
    attnops: Callable[..., Any], examples: Path, monkeypatch: pytest.MonkeyPatch, columns: int, verbose: bool
) -> None:
    """The words of a wide terminal are those of a narrow one, and lines of short words fit."""
    arguments = ("plan", examples / "llama3_8b_layer.json", "--mesh", "fsdp=2,tp=2,sp=3", "--target", "tpu")
    arguments += ("--verbose",) if verbose else ()
    monkeypatch.setenv("COLUMNS", "1000")
    words = {word.strip(";,") for word in attnops(*arguments).out.split()}
    monkeypatch.setenv("COLUMNS", str(columns))
    out = attnops(*arguments).out
    assert {word.strip(";,") for word in out.split()} - words <= {
        "declared",
        "fitted",
        "shape",
        "device",
        "per",
        "bytes",
    }
    assert all(len(line.rstrip()) <= columns for line in out.splitlines())
    if columns == 80 and not verbose:
        assert out.count("\n") <= 24


def test_the_list_names_implementations_as_the_support_table_does(attnops: Callable[..., Any]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "support.md").read_text()
    heads = [line for line in page.splitlines() if line.startswith("| Feature |")]
    cells = [cell.strip(" `").replace("`<br>`.", ".forward_") for head in heads for cell in head.split("|")[2:-1]]
    named = set(cells)
    assert len(cells) == len(named)
    operations = json.loads(attnops("list", "--json").out)["operations"]
    own = {
        f"{name}.{method}"
        for name, operation in operations.items()
        for method, able in operation["implementations"].items()
        if able["tolerance"] and able["borrowed_from"] is None and operation["family"] != "recurrence"
    }
    assert own == named
