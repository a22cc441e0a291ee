"""What a user does with attnops, where importing eformer fails; with --unblocked, where it isn't loaded.

python tests/house/without_eformer.py [--unblocked] [PART ...], without pytest: `make packages` runs it too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class _Absent(MetaPathFinder):
    def find_spec(self, name: str, *args: Any) -> None:
        if name.partition(".")[0] == "eformer":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

BLOCKED = "--unblocked" not in sys.argv
if BLOCKED:
    sys.meta_path.insert(0, _Absent())
ABSENT = BLOCKED or importlib.util.find_spec("eformer") is None

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import attnops  # noqa: E402

LAYER = {
    "operation": "vanilla",
    "metadata": {"partition_axis": {"head_axis": "model"}, "mesh": {"fsdp": 2, "model": 2, "sp": 2}},
    "call": {"batch": 2, "q_len": 16, "q_heads": 4, "head_dim": 8},
}
X = jax.random.normal(jax.random.key(0), (2, 16, 4, 8))


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def wanted(x: Any) -> np.ndarray:
    """Causal attention of x with itself in float64. Shapes: [batch, length, heads, dim]."""
    x = np.asarray(x, np.float64)
    logits = np.einsum("bthd,bshd->bhts", x, x) / np.sqrt(x.shape[-1])
    return np.einsum("bhts,bshd->bthd", _softmax(np.where(np.tri(x.shape[1], dtype=bool), logits, -np.inf)), x)


def _refused(why: str, give: Callable[[], Any]) -> None:
    said = ""
    try:
        give()
    except attnops.ConfigError as error:
        said = str(error)
    assert why in said, said


def metadata() -> None:
    """Declared, written, read again, changed and pickled."""
    plain = attnops.OperationMetadata(partition_axis=attnops.PartitionAxis(head_axis="model"))
    assert plain.get_shardings("train").query == P(("fsdp", "dp"), "sp", "model", None)
    assert plain.get_shardings("decode").query == P(("fsdp", "dp"), None, "model", None)
    for same in (
        attnops.OperationMetadata.from_json(plain.to_json()),
        attnops.OperationMetadata(partition_axis={"head_axis": "model"}),
        attnops.OperationMetadata(base_config={"partition_axis": attnops.PartitionAxis(head_axis="model")}),
        attnops.OperationMetadata().replace(partition_axis=plain.partition_axis),
        pickle.loads(pickle.dumps(plain)),
    ):
        assert same == plain
        assert hash(same) == hash(plain)
    assert plain.replace(sequence_axis_name="cp").get_shardings("train").query[1] == "cp"
    assert "model" in json.dumps(plain.to_dict())


def manager() -> None:
    """What can only be eformer's says so."""
    if ABSENT:
        _refused("eformer isn't installed", lambda: attnops.OperationMetadata().partition_manager)
    _refused("wanted an eformer PartitionManager", lambda: attnops.OperationMetadata(partition_manager=object()))


def calls() -> None:
    """A call on one device and over eight, a plan, and the function in place of jax.nn's."""
    for declared in ({"operation": "splash"}, {"operation": "vanilla"}):
        np.testing.assert_allclose(attnops.Attention(declared)(X, X, X).attention_outputs, wanted(X), atol=2e-5)
    np.testing.assert_allclose(attnops.dot_product_attention(X, X, X, is_causal=True), wanted(X), atol=2e-5)
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "model", "sp"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    for strategy in ("auto", "ring"):
        attend = attnops.Attention("splash", mesh=mesh, partition_axis={"head_axis": "model", "kv_head_axis": "model"},
                                   sequence_parallel=strategy)  # fmt: skip
        out = attend(X, X, X).attention_outputs
        np.testing.assert_allclose(out, wanted(X), atol=2e-5)
        assert out.sharding.shard_shape(out.shape) == (1, 8, 2, 8)
    assert attend.plan(X, X, X).runs


def paged() -> None:
    """A prompt over the pages of a cache."""
    from attnops.operators.paged_cache import RaggedBatch, init

    cache = attnops.KVCache(
        layers=1, kv_heads=4, head_dim=8, dtype="float32", pages=8, page_size=4, max_sequences=1, max_length=16
    )
    batch = RaggedBatch.make(cache.plan(), cu_q_lens=[0, 16], kv_lens=[16], page_table=[[0, 1, 2, 3]], tokens=16)
    step = attnops.OperationRegistry.create("paged", attnops.OperationMetadata())
    out = step(X[0], X[0], X[0], state=init(cache), layer=0, batch=batch).attention_outputs
    np.testing.assert_allclose(out, wanted(X)[0], atol=2e-5)


def commands() -> None:
    """The `attnops` command."""
    from attnops.cli.app import main

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "layer.json"
        file.write_text(json.dumps(LAYER))
        for arguments in (["list"], ["plan", str(file)], ["run", str(file), "--check"]):
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                status = main(arguments)
            assert status == 0, (arguments, said.getvalue())
            assert "vanilla" in said.getvalue()


def adapters() -> None:
    """Those for which nothing has to be installed, and equinox's if it is."""
    from attnops.adapters.dispatch import partition_axis_from_rules

    axes = partition_axis_from_rules([("heads", "model"), ("batch", ("data", "fsdp"))], {"head_axis": "heads"})
    assert attnops.OperationMetadata(partition_axis=axes).get_shardings("train").query == P(None, None, "model", None)
    if importlib.util.find_spec("equinox"):
        import equinox as eqx

        from attnops.adapters.equinox import attention_of

        theirs = eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(1))
        x, mask = X[0, :, 0], np.tri(16, dtype=bool)
        got = attention_of(theirs, {"operation": "vanilla"})(x, x, x, mask)
        np.testing.assert_allclose(got, theirs(x, x, x, mask), atol=1e-5)


PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part for part in (metadata, manager, calls, paged, commands, adapters)
}

if __name__ == "__main__":
    parts = [name for name in sys.argv[1:] if name != "--unblocked"] or [*PARTS]
    for name in parts:
        PARTS[name]()
    assert not [name for name in sys.modules if name.partition(".")[0] == "eformer"]
    print(f"attnops {attnops.__version__}, eformer {'absent' if ABSENT else 'not loaded'}: {', '.join(parts)}")
