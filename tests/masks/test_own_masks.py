"""A mask kind of one's own is one class: every implementation takes it, with gradients, on meshes, in files and exports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Attention, Causal, OperationMetadata, OperationRegistry
from attnops.cli.app import main
from attnops.errors import MaskError
from attnops.masks import Mask, OffsetMask, mask_from_dict, register_mask
from attnops.masks.bounds import BlockBounds
from attnops.masks.serial import LEAVES
from attnops.verify import reference_attention, reference_gradients


@dataclass(frozen=True)
class Comb(OffsetMask):
    """Key j is visible when x - j is a multiple of `step` and within `reach` before x."""

    kind: ClassVar[str] = "comb"
    step: int
    reach: int
    offset: int | None = None

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        distance = self.position(rows, positions) - cols
        return (distance % self.step == 0) & (distance >= 0) & (distance <= self.reach)

    def block_bounds(self, blocks: Any) -> BlockBounds:
        x, keys = self.block_positions(blocks), blocks.cols
        some = (x.hi - keys.lo >= 0) & (x.lo - keys.hi <= self.reach)
        return BlockBounds(some, jnp.zeros_like(some))


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    register_mask(Comb)
    yield
    del LEAVES[Comb.kind]


RNG = np.random.default_rng(0)
LENGTH = 256
Q, K, V = (RNG.standard_normal((2, LENGTH, heads, 32)).astype(np.float32) for heads in (4, 2, 2))
DISTANCE = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None, :]
SEEN = ((DISTANCE % 3 == 0) & (DISTANCE >= 0) & (DISTANCE <= 90))[None, None]


def test_it_is_what_it_says() -> None:
    mask = Comb(3, 90).materialise(slice(0, LENGTH), slice(0, LENGTH))
    np.testing.assert_array_equal(mask, SEEN)
    assert jax.tree.leaves(Comb(3, 90)) == []
    assert (Causal() & Comb(3, 90)).describe() == "causal & comb(step=3, reach=90)"


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("vanilla", {}),
        ("vanilla", {"block_q": 64, "block_kv": 64}),
        ("splash", {"block_q": 128, "block_kv": 128, "interpret": True}),
        ("flash_attn2", {"block_q": 64, "block_kv": 64, "interpret": True}),
        ("sdpa", {}),
    ],
)
@pytest.mark.parametrize("mesh", [None, {"fsdp": 2, "tp": 2}])
def test_every_implementation_takes_it(name: str, config: dict[str, Any], mesh: dict[str, int] | None) -> None:
    metadata = OperationMetadata(mesh=mesh, operation_configs={name: config}, tuning="off", fallback="error")
    attend = OperationRegistry.create(name, metadata)

    def loss(q: Any, k: Any, v: Any) -> Any:
        out = attend(q, k, v, mask=Comb(3, 90)).attention_outputs
        return out.sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(Q, K, V)
    want = reference_attention(Q, K, V, scale=32**-0.5, mask=SEEN).output
    back = reference_gradients(Q, K, V, np.ones_like(want), scale=32**-0.5, mask=SEEN)
    np.testing.assert_allclose(out, want, atol=5e-6)
    for got, wanted in zip(gradients, (back["query"], back["key"], back["value"]), strict=True):
        np.testing.assert_allclose(got, wanted, atol=5e-5)


@pytest.mark.parametrize("strategy", ["gather", "ring", "ulysses"])
def test_split_sequences(strategy: str) -> None:
    attend = OperationRegistry.create("vanilla", OperationMetadata(mesh={"sp": 2, "tp": 1}, sequence_parallel=strategy))
    out = attend(Q, K, V, mask=Comb(3, 90)).attention_outputs
    np.testing.assert_allclose(out, reference_attention(Q, K, V, scale=32**-0.5, mask=SEEN).output, atol=5e-6)


def test_a_file_declares_it() -> None:
    declared = {"operation": "vanilla", "call": {"mask": {"kind": "comb", "step": 3, "reach": 90}}}
    attend = Attention(declared)
    assert attend.declaration.call.mask == Comb(3, 90)
    assert Attention(attend.declared().to_dict()) == attend
    assert mask_from_dict((Causal() & Comb(3, 90)).to_dict()) == Causal() & Comb(3, 90)
    with pytest.raises(MaskError, match="unknown key 'stride'"):
        mask_from_dict({"kind": "comb", "step": 3, "reach": 90, "stride": 2})
    with pytest.raises(MaskError, match="Did you mean 'comb'"):
        mask_from_dict({"kind": "cmb", "step": 3})


def test_the_commands_plan_run_and_verify_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "call.json"
    call = {"q_len": 64, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "mask": {"kind": "comb", "step": 3, "reach": 20}}
    path.write_text(json.dumps({"operation": "vanilla", "call": call}))
    assert main(["plan", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mask"] == "comb(step=3, reach=20, offset=0)"
    assert main(["run", str(path), "--check", "--repeats", "1", "--json"]) == 0
    assert [check["passed"] for check in json.loads(capsys.readouterr().out)["checks"]] == [True]
    assert main(["verify", str(path), "--target", "here"]) == 0


def test_what_is_no_kind() -> None:
    with pytest.raises(MaskError, match="exists already"):
        register_mask(Comb)

    class Plain(Mask):
        kind: ClassVar[str] = "plain"

    with pytest.raises(MaskError, match="frozen dataclass"):
        register_mask(Plain)

    class Unnamed(Mask):
        kind: ClassVar[str] = "no name"

    with pytest.raises(MaskError, match="wanted a name"):
        register_mask(Unnamed)
