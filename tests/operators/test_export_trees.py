"""jax.export writes every pytree of the package, by a name that stays, and reads it back as it was."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import attnops
from attnops import (
    ALiBi,
    Attention,
    AttentionOutput,
    Blocks,
    Causal,
    Chunked,
    Clip,
    Dense,
    Distance,
    Forgetting,
    Full,
    KVCache,
    LayerGroup,
    Lengths,
    MaskFunction,
    OperationRegistry,
    Positions,
    Prefix,
    RelativeBias,
    RelativeBias2D,
    ScoreFunction,
    SegmentIds,
    SlidingWindow,
    SoftCap,
    Temperature,
    masks,
    register_mask_function,
    register_score_function,
)
from attnops.operators import LocalOutput, paged_cache
from attnops.operators.paged.step_output import StepOutput
from attnops.operators.paged_cache import (
    CacheState,
    LayerPages,
    LayerStates,
    PagedOutput,
    RaggedBatch,
    SavedSequence,
    StateBatch,
    init,
)
from attnops.operators.recurrent import RecurrentOutput
from attnops.operators.selection import IndexOutput, IndexStepOutput
from attnops.scores import PositionTemperature

pytest.importorskip("flatbuffers", reason="pip install 'attnops[test]'")

register_mask_function("test_export.near", override=True)(lambda x, j: abs(x - j) < 3)
register_score_function("test_export.decay", override=True)(lambda distance: -0.5 * distance.astype(jnp.float32))
register_score_function("test_export.gain", override=True)(lambda x, batch, head, q, kv, gain: x * gain)
IDS, LENS = np.array([[0, 1, 1], [2, 2, 0]], np.int32), np.array([1, 3], np.int32)
LAYOUT = np.array([[True, False], [True, True]])
CACHE = KVCache(
    layers=1, kv_heads=2, head_dim=64, dtype="float32", page_size=4, pages=8, max_sequences=2, max_length=16
)
GROUPED = KVCache(
    layers=[LayerGroup(layers=1, pages=8), LayerGroup(layers=1, pages=4, window_tokens=4)], kv_heads=2, head_dim=64,
    dtype="bfloat16", page_size=4, max_sequences=2, max_length=16,
)  # fmt: skip
BATCH = RaggedBatch.make(CACHE.plan(), cu_q_lens=[0, 5], kv_lens=[5], page_table=[[2, 7]])
X = np.arange(6, dtype=np.float32).reshape(2, 3)
STATES = KVCache(
    layers=[{"layers": 1, "kind": "state", "states": [{"sizes": {"n": 3}}]}], max_sequences=2, max_length=8
)
PAGES = init(CACHE).layers[0]
EXAMPLES: list[Any] = [
    Full(),
    LayerStates({"state": np.zeros((2, 3), np.float32)}),
    CacheState((LayerStates({"state": np.zeros((2, 3), np.float32)}),), STATES),
    Causal(),
    Causal(3),
    SlidingWindow(None, 2, offset=-1),
    Chunked(4, 1),
    Prefix(2),
    MaskFunction("test_export.near", 2),
    Blocks(LAYOUT, 8, 4),
    Blocks(np.stack([LAYOUT, ~LAYOUT]), 8, 4),
    SegmentIds(IDS, IDS),
    Lengths(LENS),
    Positions(IDS, IDS, 4, None),
    Dense(np.ones((2, 1, 3, 3), bool)),
    Blocks(np.zeros((1, 2, 3, 1), np.int32), 8, 4),  # ChosenBlocks
    (Causal() & SegmentIds(IDS, IDS)) | ~Lengths(LENS),  # And, Or, Not
    (Positions(IDS, IDS, 4, None) & Dense(np.ones((2, 1, 3, 3), bool))).split()[0],  # Slots
    Blocks(np.zeros((1, 2, 3, 1), np.int32), 8, 4).split()[0],
    ALiBi(np.ones(2, np.float32)) >> SoftCap(2.0),  # Chain
    ALiBi(np.ones(2, np.float32)),
    SoftCap(2.0),
    RelativeBias(np.ones((9, 2), np.float32), Clip(8)),
    RelativeBias2D(grid=(2, 3), table=np.ones((15, 2), np.float32)),
    Forgetting(np.ones((1, 2, 3), np.float32)),
    Temperature(np.ones(2, np.float32)),
    PositionTemperature(),
    Distance("test_export.decay"),
    ScoreFunction("test_export.gain", {"gain": (np.ones(2, np.float32), ("heads",))}),
    AttentionOutput(X),
    AttentionOutput(X, None, X[:, 0]),
    LocalOutput(X, X),
    init(CACHE),
    init(GROUPED),
    BATCH,
    RaggedBatch(*(getattr(BATCH, name) for name in ("cu_q_lens", "kv_lens", "page_table", "num_seqs")), group=1),
    StateBatch.make(4, cu_q_lens=[0, 5], kv_lens=[5], read_slots=[4], write_slots=[[2, 0]]),
    SavedSequence((PAGES,), np.int32(3)),
    PagedOutput(X, X, init(CACHE)),
    StepOutput(X, None, init(CACHE)),
    IndexOutput(X, X),
    RecurrentOutput(X, X),
    IndexStepOutput(X, None, init(CACHE)),
]


def _nodes(tree: Any) -> set[type]:
    """The classes of the package that are nodes of an example."""
    found: set[type] = set()

    def visit(node: Any) -> bool:
        if type(node).__module__.startswith("attnops"):
            found.add(type(node))
        return False

    jax.tree.flatten(tree, is_leaf=visit)
    return found


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda x: type(x).__name__)
def test_written_and_read(example: Any) -> None:
    made = export.export(jax.jit(lambda tree: tree))(example)
    data = made.serialize()
    assert {name for cls in _nodes(example) if (name := f"attnops.{cls.__name__}").encode() not in data} == set()
    again = export.deserialize(data)
    assert again.in_tree == made.in_tree
    assert again.out_tree == jax.tree.structure(example)
    got = again.call(example)
    assert jax.tree.structure(got) == jax.tree.structure(example)
    for one, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(example), strict=True):
        np.testing.assert_array_equal(one, wanted)


def test_every_tree_has_an_example() -> None:
    """So that a new one isn't forgotten."""
    registered = set()
    for room in ("masks", "sharding", "planning", "models", "registry", "operators", "serving", "scores"):
        package = importlib.import_module(f"attnops.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for cls in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(cls) and cls.__module__.startswith("attnops") and _is_tree(cls):
                    registered.add(cls)
    assert {CacheState, Causal, AttentionOutput} <= registered
    named = {
        getattr(package, name)
        for package in (attnops, attnops.operators, paged_cache, masks)
        for name in package.__all__
        if inspect.isclass(getattr(package, name)) and issubclass(getattr(package, name), tuple)
    }
    without_arrays = {"AttnShardingRules", "CacheShardings", "Leaf", "ModelShardings", "Reason"}
    wanted = registered | {cls for cls in named if cls.__name__ not in without_arrays}
    assert wanted - set().union(*map(_nodes, EXAMPLES)) == set()
    assert {LayerPages, LocalOutput, PagedOutput} <= named


def _is_tree(cls: type) -> bool:
    """Whether a class that isn't a named tuple is registered with jax."""
    if issubclass(cls, tuple) or inspect.isabstract(cls):
        return False
    try:
        return jax.tree_util.default_registry.flatten_one_level(object.__new__(cls)) is not None
    except (AttributeError, TypeError) as error:  # registered, but the object has no fields
        return "safe" not in str(error)  # object.__new__ refuses classes made in C


def test_names_stay() -> None:
    """Files hold them. A name may be added, but none changed."""
    names = {cls.__name__ for example in EXAMPLES for cls in _nodes(example)}
    assert names == {
        "And", "ALiBi", "Chain", "Distance", "Forgetting", "PositionTemperature", "RelativeBias", "RelativeBias2D",
        "ScoreFunction", "SoftCap", "Temperature",
        "AttentionOutput", "Blocks", "CacheState", "Causal", "ChosenBlocks", "Chunked", "Dense", "Full", "LayerPages",
        "IndexOutput", "IndexStepOutput", "Lengths", "LocalOutput", "MaskFunction", "Not", "Or", "PagedOutput", "Positions",
        "LayerStates", "Prefix", "RaggedBatch", "RecurrentOutput", "SavedSequence", "SegmentIds", "SlidingWindow", "Slot",
        "StateBatch", "StepOutput",
    }  # fmt: skip


READ = """
import pathlib, sys
import numpy as np
from jax import export
from attnops import KVCache
from attnops.operators.paged_cache import RaggedBatch, init
import attnops.operators.paged

cache = KVCache(layers=1, kv_heads=2, head_dim=64, dtype="float32", page_size=4, pages=8, max_sequences=2, max_length=16)
batch = RaggedBatch.make(cache.plan(), cu_q_lens=[0, 5], kv_lens=[5], page_table=[[2, 7]])
folder = pathlib.Path(sys.argv[1])
step = export.deserialize((folder / "step.bin").read_bytes())
out = step.call(init(cache), batch, *(np.load(folder / f"{name}.npy") for name in "qkv"))
np.save(folder / "output.npy", out.attention_outputs)
assert out.state.cache == cache
"""


def test_a_step_is_read_by_another_process(tmp_path: Path) -> None:
    paged = OperationRegistry.create("paged")

    def step(state: CacheState, batch: RaggedBatch, q: jax.Array, k: jax.Array, v: jax.Array) -> StepOutput:
        return paged(q, k, v, state=state, layer=0, batch=batch)

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((5, heads, 64)).astype(np.float32) for heads in (4, 2, 2))
    for name, x in zip("qkv", (q, k, v), strict=True):
        np.save(tmp_path / f"{name}.npy", x)
    (tmp_path / "step.bin").write_bytes(export.export(jax.jit(step))(init(CACHE), BATCH, q, k, v).serialize())
    subprocess.run([sys.executable, "-c", READ, str(tmp_path)], check=True)
    alone = Attention("vanilla", causal=True)(*(jnp.asarray(x)[None] for x in (q, k, v))).attention_outputs[0]
    np.testing.assert_allclose(np.load(tmp_path / "output.npy"), alone, atol=2e-5)
