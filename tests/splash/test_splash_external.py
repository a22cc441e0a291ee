"""splash with tokamax's kernel: where it isn't installed, what a plan notes, its tables, and the TPU compiler."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from attnops import Causal, Chunked, Full, Mask, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.compat import abstract_device
from attnops.operators.splash.kernel import tokamax_splash
from attnops.operators.splash.kernel.tokamax_splash import _tables
from attnops.planning.notes import has_note

NEEDS_TOKAMAX = pytest.mark.skipif(find_spec("tokamax") is None, reason="pip install 'attnops[tokamax]'")
NEEDS_LIBTPU = pytest.mark.skipif(find_spec("libtpu") is None, reason="pip install 'attnops[tpu]'")
V5E = AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device("TPU v5 lite", 1, "tpu"))


def _attend(mesh: Any = V5E, **config: Any) -> Any:
    metadata = OperationMetadata(mesh=mesh, operation_configs={"splash": {"kernel": "tokamax", **config}})
    return OperationRegistry.create("splash", metadata)


@pytest.mark.parametrize("how", ["absent", "without the kernel"])
def test_without_tokamax_the_plan_says_what_to_install(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if how == "absent":
        monkeypatch.setitem(sys.modules, "tokamax", None)
    else:  # such a version is on the index, empty
        (tmp_path / "tokamax").mkdir()
        (tmp_path / "tokamax" / "__init__.py").touch()
        monkeypatch.delitem(sys.modules, "tokamax", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))
    x = jnp.ones((1, 131 if how == "absent" else 137, 2, 16))  # plans are kept: problems that no other test has
    metadata = OperationMetadata(
        operation_configs={"splash": {"kernel": "tokamax", "interpret": True}}, fallback="allow"
    )
    attend = OperationRegistry.create("splash", metadata)
    plan = attend.plan(x, x, x)
    (reason,) = [r for rejected in plan.rejected for r in rejected.reasons]
    assert reason.code == "splash.tokamax.installed"
    assert "pip install 'attnops[tokamax]'" in str(reason)
    assert plan.implementation == "splash.forward_native"
    np.testing.assert_allclose(attend(x, x, x).attention_outputs, 1.0, rtol=4e-6)


@NEEDS_TOKAMAX
def test_what_a_plan_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = jax.ShapeDtypeStruct((2, 4096, 8, 128), jnp.bfloat16)
    notes = _attend().plan(x, x, x).notes
    # 8 kv blocks of 512: float32 [8, 2, 8, 4096, 128]
    assert any("8 partial gradients of the query, 256.0 MiB per device" in note for note in notes)
    assert not any("was tried" in note or "fuse_reciprocal" in note for note in notes)
    assert not has_note(_attend().plan(x, x, x, mode="prefill").notes, "splash.tokamax_partial")
    notes = _attend(fuse_reciprocal=False, use_experimental_scheduler=True).plan(x, x, x).notes
    assert any("fuse_reciprocal=False counts where tokamax's kernel is differentiated" in note for note in notes)
    assert any("use_experimental_scheduler=True reaches the forward pass" in note for note in notes)
    monkeypatch.setattr(tokamax_splash, "TRIED", ("0.0.1",))
    x = jax.ShapeDtypeStruct((2, 1031, 8, 128), jnp.bfloat16)  # plans are kept: a problem that no other test has
    assert any("was tried in 0.0.1" in note for note in _attend().plan(x, x, x).notes)


MASKS: dict[str, Mask] = {
    "causal": Causal(0),
    "ahead": Causal(-90),  # the first rows see nothing
    "window": Causal(0) & SlidingWindow(30, 0, offset=0),
    "chunked": Chunked(70, offset=0),
}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", MASKS)
def test_tables_name_every_live_tile_once(name: str, shards: int) -> None:
    q_len, kv_len, block_q, block_kv = 150, 290, 32, 48
    q_padded, kv_padded = 160, 336
    visible = np.zeros((shards, q_padded, kv_padded), bool)
    seen = MASKS[name].materialise(slice(0, shards * q_len), slice(0, kv_len))
    visible[:, :q_len, :kv_len] = np.broadcast_to(seen[0, 0], (shards * q_len, kv_len)).reshape(shards, q_len, kv_len)
    tiles = visible.reshape(shards, q_padded // block_q, block_q, kv_padded // block_kv, block_kv)
    kinds = tiles.any((2, 4)).astype(int) + tiles.all((2, 4))
    sizes = MASKS[name], q_len, kv_len, q_padded, kv_padded, shards, block_q, block_kv
    forward, backward = _tables(*sizes, False), _tables(*sizes, True)
    assert forward is not None
    assert backward is not None
    assert forward.density == backward.density == pytest.approx((kinds > 0).mean())
    assert (backward.rows, backward.cols) == (None, None)
    np.testing.assert_array_equal(backward.kinds, kinds.swapaxes(1, 2).reshape(shards, -1))
    for shard in range(shards):
        count = forward.steps[shard]
        listed = [x[shard, :count] for x in (forward.rows, forward.cols, forward.kinds)]
        got = {(int(r), int(c)): int(k) for r, c, k in zip(*listed, strict=True)}
        assert len(got) == count
        want = {(int(r), int(c)): int(kinds[shard, r, c]) for r, c in zip(*np.nonzero(kinds[shard]), strict=True)}
        for row in set(range(kinds.shape[1])) - {r for r, _ in want}:  # its output has to be written
            want[row, 0] = 1
        assert got == want
        assert listed[0].tolist() == sorted(listed[0].tolist())
        assert (forward.rows[shard, count:] == -1).all()


def test_tables_of_128k_tokens_come_from_a_closed_form() -> None:
    """No [q, kv] array: tokamax's own masks are evaluated block by block."""
    length = 1 << 17
    sizes = Causal(0), length, length, length, length, 1, 1024, 1024
    forward, backward = _tables(*sizes, False), _tables(*sizes, True)
    assert forward is not None
    assert backward is not None
    assert forward.steps.tolist() == [128 * 129 // 2]
    assert backward.kinds.shape == (1, 128 * 128)
    assert forward.rows.dtype == forward.kinds.dtype == np.int8
    assert _tables(Full(), *sizes[1:], True) is None
    assert _tables(Full(), *sizes[1:], False).kinds.tolist() == [[2] * 128 * 128]
    assert _tables(Full(), *sizes[1:-2], 512, 512, False) is None


IDS = jax.ShapeDtypeStruct((2, 600), jnp.int32)
COMPILED: dict[str, dict[str, Any]] = {
    "plain": {"config": {}},
    "switches": {
        "config": {
            "use_base2_exp": False, "fuse_reciprocal": False, "use_experimental_scheduler": True, "block_q": 64,
            "block_q_dkv": 128, "block_kv": 256, "block_kv_compute": 128,
        },
    },
    "layouts": {"config": dict.fromkeys(("q_layout", "k_layout", "v_layout"), "seq_minor")},
    "chunked": {"config": {}, "mask": Causal() & Chunked(100)},
    "full": {"config": {}, "mask": Full()},
    "float32": {"config": {}, "dtype": "float32", "logits_soft_cap": 30.0},
    "traced": {
        "config": {}, "q_segment_ids": IDS, "kv_lengths": jax.ShapeDtypeStruct((2,), jnp.int32),
        "softmax_aux": jax.ShapeDtypeStruct((8,), jnp.float32),
    },
}  # fmt: skip


@NEEDS_TOKAMAX
@NEEDS_LIBTPU
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("target", ["v5e:2x2", pytest.param("v6e:2x2", marks=pytest.mark.slow)])
def test_compiles(target: str, name: str) -> None:
    from attnops.verify.topology import described_mesh

    mesh = described_mesh(target, {"fsdp": 2, "tp": 2})
    call = {"mask": Causal(), "dtype": "bfloat16"} | COMPILED[name]
    attend, dtype = _attend(mesh, **call.pop("config")), call.pop("dtype")
    arrays = {n: x for n, x in call.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {n: x for n, x in call.items() if n not in arrays}
    x = jax.ShapeDtypeStruct((2, 600, 8, 128), dtype)
    key = jax.ShapeDtypeStruct((2, 600, 4, 128), dtype)
    plan = attend.plan(x, key, key, **call)
    assert plan.implementation == "splash.forward_tpu"
    spec = plan.placement.fitted["query"].spec

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, traced: Any) -> jax.Array:
        return attend(q, k, v, **traced, **static).attention_outputs.astype(jnp.float32).sum()

    laid_out = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)) for a in (x, key, key)]
    whole = {
        n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, jax.P())) for n, a in arrays.items()
    }
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*laid_out, whole).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 2
