"""Layers that keep states in a cache: declared, planned, made, moved; numbers are worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import ConfigError, InputError, KVCache, OperationMetadata, OperationRegistry, RefusedError
from attnops.cli.app import main
from attnops.operators import paged_cache
from attnops.operators.paged_cache import LayerPages, LayerStates, StateBatch
from attnops.planning.notes import has_note
from attnops.planning.recurrent.operands import OPERATIONS
from attnops.registry.declaration import Declaration
from attnops.sharding import virtual_mesh

STATE = {"operation": "gated_delta_rule", "sizes": {"heads": 4, "head_dim": 8, "value_dim": 16}}
WINDOW = {"operation": "causal_conv1d", "sizes": {"channels": 64, "width": 4}}
STATES: dict[str, Any] = {"layers": [0, 1, 3], "kind": "state", "states": [STATE, WINDOW]}
FIELDS: dict[str, Any] = {
    "layers": [STATES, {"layers": [2]}], "kv_heads": 4, "head_dim": 8, "dtype": "float32", "pages": 16, "page_size": 4,
    "max_sequences": 4, "max_length": 32,
}  # fmt: skip
PURE = {"layers": [STATES], "dtype": "float32", "page_size": 4, "max_sequences": 4, "max_length": 32}
PURE["layers"] = [STATES | {"layers": 3}]


def hybrid(**changes: Any) -> KVCache:
    """Layers 0, 1 and 3 have states, layer 2 pages. Changes of the group of states have their own names."""
    own = {name: changes.pop(name) for name in ("drafts", "snapshots", "slots", "states") if name in changes}
    return KVCache.from_dict(FIELDS | {"layers": [STATES | own, {"layers": [2]}]} | changes)


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


# -- declared ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [{}, {"drafts": 3, "snapshots": 2}, {"slots": 40, "drafts": 0}, {"snapshots": None}])
def test_round_trip_is_exact(own: dict[str, Any]) -> None:
    for fields in (hybrid(**own).to_dict(), PURE | {"layers": [STATES | {"layers": 3} | own]}):
        cache = KVCache.from_dict(fields)
        assert cache.to_dict() == fields
        again = KVCache.from_json(cache.to_json())
        assert again == cache
        assert hash(again) == hash(cache)
        assert cache.checked() == cache
        file = Declaration.from_dict({"operation": "paged", "cache": fields})
        assert Declaration.from_json(file.to_json()) == file
        json.dumps(cache.plan().to_dict())


def test_every_recurrent_operation_can_be_declared() -> None:
    named = {name: OperationRegistry.get(name) for name in OperationRegistry.names()}
    whole = {name: one.operands for name, one in named.items() if "initial_state" in one.operands}
    assert whole == OPERATIONS


def test_arrays_are_those_of_the_operation() -> None:
    sizes = {
        "mamba1": ({"channels": 6, "state_dim": 5}, (6, 5), 0),
        "mamba2": ({"heads": 2, "head_dim": 3, "value_dim": 4}, (2, 3, 4), 0),
        "causal_conv1d": ({"channels": 6, "width": 4}, (3, 6), 1),
        None: ({"rank": 3, "heads": 7}, (3, 7), 1),
    }
    for operation, (given, shape, at) in sizes.items():
        one = {"operation": operation, "sizes": given}
        kept = hybrid(states=[one]).groups[0].states
        assert kept is not None
        assert (kept[0].shape, kept[0].heads_at) == (shape, at)
        assert kept[0].label == ("convolution" if operation == "causal_conv1d" else "state")
        assert kept[0].dtype_in("bfloat16") == ("bfloat16" if operation == "causal_conv1d" else "float32")


def test_which_layers_keep_what() -> None:
    cache = KVCache.from_dict(
        FIELDS
        | {
            "layers": [{"layers": [1, 2]}, STATES | {"layers": [0, 2]}],
            "stateless_layers": [3],
            "reads_layer": [[2, 1]],
        }
    )
    assert (cache.layer_count, cache.stored_layers, cache.state_layers) == (4, (1,), (0, 2))
    assert cache.entries == ((0, 1), (1, 0), (2, 1))
    assert [cache.place_of(1), cache.place_of(2), cache.state_place_of(0), cache.state_place_of(2)] == [1, 1, 0, 2]
    for ask, layer, said in (
        (cache.group_of, 0, "no pages: it keeps a state"),
        (cache.state_group_of, 1, "no state: it keeps pages"),
        (cache.group_of, 3, "it keeps nothing"),
        (cache.state_group_of, 4, "wanted 0 to 3"),
    ):
        with pytest.raises(InputError, match=said):
            ask(layer)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layers": [STATES, {"layers": [1, 2]}], "pages": 0}, "pages=0"),
        ({"layers": [STATES | {"window_tokens": 3}, {"layers": [2]}]}, r"layers\[0\]: window_tokens in a group of kind 'state'"),
        ({"layers": [STATES | {"kv_heads": 3}, {"layers": [2]}]}, r"layers\[0\]: kv_heads in a group of kind 'state'"),
        ({"layers": [STATES, {"layers": [2], "drafts": 3}]}, r"layers\[1\]: drafts in a group of kind None; wanted kind 'state'"),
        ({"layers": [without(STATES, "states"), {"layers": [2]}]}, r"layers\[0\]: states is missing"),
        ({"layers": [STATES | {"states": []}, {"layers": [2]}]}, "at least one array"),
        ({"layers": [STATES | {"states": [STATE, STATE]}, {"layers": [2]}]}, "two arrays named 'state'"),
        ({"layers": [STATES | {"states": [STATE | {"operation": "gated_delta"}]}, {"layers": [2]}]},
         "Did you mean 'gated_delta_rule'"),
        ({"layers": [STATES | {"states": [STATE | {"sizes": {"heads": 3}}]}, {"layers": [2]}]},
         "sizes has heads; wanted heads, head_dim, value_dim for 'gated_delta_rule'"),
        ({"layers": [STATES | {"states": [STATE | {"sizes": {"heads": 0}}]}, {"layers": [2]}]}, "sizes has 'heads': 0"),
        ({"layers": [STATES | {"states": [STATE | {"size": 3}]}, {"layers": [2]}]}, r"states\[0\]: unknown field 'size'"),
        ({"layers": [STATES | {"states": [WINDOW | {"sizes": {"channels": 3, "width": 1}}]}, {"layers": [2]}]}, "width 1"),
        ({"layers": [STATES | {"states": [{"sizes": {"heads": 2, "channels": 3}}]}, {"layers": [2]}]}, "wanted one of them"),
        ({"layers": [STATES | {"drafts": -1}, {"layers": [2]}]}, "drafts=-1"),
        ({"layers": [STATES | {"snapshots": 0}, {"layers": [2]}]}, "snapshots=0"),
        ({"layers": [STATES, {"layers": [4]}]}, "layer 2 of 0 to 4 is in no group; layers that keep nothing are stateless"),
        ({"layers": [STATES, STATES, {"layers": [2]}]}, "layer 0 is in two groups of kind 'state'"),
        ({"stateless_layers": [2]}, "stateless_layers: layer 2 is in a group"),
        ({"stateless_layers": [4, 4]}, r"stateless_layers=\[4, 4\]; wanted a list of distinct"),
        ({"layers": 3, "stateless_layers": [4]}, "stateless_layers beside a number of layers"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        KVCache.from_dict(FIELDS | fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"pages": 3}, "pages=3, but no layer has pages"),
        ({"kv_heads": 3}, "kv_heads=3, but no layer has pages"),
        ({"quantised": {"dtype": "int8", "scale": "head"}}, "quantised=.*, but no layer has pages"),
        ({"value_dim": 3}, "value_dim=3, but no layer has pages"),
        ({"max_tokens": 8}, "max_tokens=8, but no layer has pages"),
        ({"layout": "joined"}, "layout='joined', but no layer has pages"),
        ({"kind": "latent"}, "kind='latent', but no layer has pages"),
        ({"layers": 3}, "kv_heads is missing; head_dim is missing"),
    ],
)
def test_a_cache_of_states_alone_has_no_fields_of_pages(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        KVCache.from_dict(PURE | fields)


# -- planned -----------------------------------------------------------------------------------------------------------

STATE_BYTES = 4 * 4 * 8 * 16  # of one layer and slot
WINDOW_BYTES = 4 * 3 * 64
PAGE_BYTES = 2 * 4 * 4 * 4 * 8  # keys and values of 4 tokens, 4 heads of 8, in float32


@pytest.mark.parametrize(
    ("own", "slots", "snapshots"),
    [
        ({}, 4, 0),
        ({"drafts": 2}, 12, 0),
        ({"snapshots": 2}, 4 + 4 * 4, 16),  # every 8 of 32 tokens
        ({"snapshots": 3, "drafts": 1}, 8 + 4 * 2, 8),  # 12 and 24 tokens
        ({"slots": 9, "drafts": 1}, 9, 1),
    ],
)
def test_slots_and_bytes(own: dict[str, Any], slots: int, snapshots: int) -> None:
    plan = hybrid(**own).plan().require()
    part, pages = plan.groups
    each = 3 * (STATE_BYTES + WINDOW_BYTES)
    assert (part.slots, part.snapshot_slots, part.slot_bytes) == (slots, snapshots, each)
    assert part.bytes_of("state") == slots * 3 * STATE_BYTES
    assert part.sequence_bytes == plan.sequence_bytes == (1 + own.get("drafts", 0)) * each
    assert pages.pages == 16
    assert plan.bytes_per_token == PAGE_BYTES / 4
    # 16 pages are 64 tokens: two sequences of 32; slots for at least 4
    assert (plan.sequences, plan.tokens) == (2, 64)
    written = plan.to_dict()
    assert written["bytes_per_sequence"] == plan.sequence_bytes
    assert written["bytes_of_states"] == slots * each
    assert written["groups"][0]["slots"] == slots
    assert hybrid(slots=3).plan().sequences == 2  # by pages
    assert hybrid(slots=1).plan().sequences == 1
    assert has_note(hybrid(slots=3).plan().notes, "cache.few_slots")


@pytest.mark.parametrize(
    ("one", "slots", "held"),
    [  # bytes of one layer's array as an argument of a program compiled for a TPU v5e
        ({"sizes": {"heads": 32, "a": 64, "b": 64}}, 20, 20971520),
        ({"sizes": {"heads": 32, "a": 128, "b": 64}}, 20, 20971520),  # the dim of 128 lies along the lanes
        ({"sizes": {"heads": 32, "a": 64, "b": 64}}, 128, 67108864),  # slots do
        ({"operation": "mamba1", "sizes": {"channels": 4096, "state_dim": 16}}, 20, 5242880),
        ({"operation": "mamba1", "sizes": {"channels": 5000, "state_dim": 16}}, 20, 6553600),
        ({"sizes": {"rows": 3, "channels": 384}}, 20, 110592),
        ({"sizes": {"rows": 3, "channels": 8192}, "dtype": "bfloat16"}, 12, 786432),
    ],
)  # fmt: skip
def test_bytes_on_a_tpu_are_those_of_its_tiles(one: dict[str, Any], slots: int, held: int) -> None:
    group = {"layers": 1, "kind": "state", "states": [one | {"name": "state"}], "slots": slots}
    plan = KVCache.from_dict(PURE | {"layers": [group], "max_sequences": 1}).plan(device_kind="TPU v5 lite")
    (group_plan,) = plan.groups
    array = group_plan["state"]
    assert array.device_bytes == held
    assert has_note(plan.notes, "cache.padded_state") == (held > array.fitted.local_bytes)


def test_from_which_length_on_pages_are_larger() -> None:
    fixed = 3 * (STATE_BYTES + WINDOW_BYTES)  # 8448 bytes; a page has 1024
    assert (fixed, PAGE_BYTES) == (8448, 1024)
    plan = hybrid(max_length=64).plan()
    assert plan.larger_from == 8 * 4 + 1  # the ninth page makes 9216
    assert plan.page_bytes(33) == 9 * PAGE_BYTES
    assert hybrid(max_length=32).plan().larger_from is None
    assert KVCache.from_dict(PURE).plan().larger_from is None
    assert "from 33 tokens on pages are the larger part" in plan.explain()


def test_pages_get_the_bytes_that_states_leave() -> None:
    cache = KVCache.from_dict(without(hybrid(drafts=1).to_dict(), "pages") | {"bytes_per_device": 100_000})
    plan = cache.plan().require()
    states = 8 * 3 * (STATE_BYTES + WINDOW_BYTES)
    batches = plan.bytes_of("page_table", "cu_q_lens", "kv_lens", "num_seqs", "read_slots", "write_slots")
    assert plan.groups[1].pages == (100_000 - states - batches) // PAGE_BYTES
    assert plan.bytes_per_device <= 100_000 < plan.bytes_per_device + PAGE_BYTES
    small = KVCache.from_dict(cache.to_dict() | {"bytes_per_device": states})
    assert [reason.code for reason in small.plan().refused] == ["pages"]
    alone = KVCache.from_dict(PURE | {"bytes_per_device": 33_000})
    assert [reason.code for reason in alone.plan().refused] == ["bytes_per_device"]
    assert not KVCache.from_dict(PURE | {"bytes_per_device": 34_000}).plan().refused  # 4 slots of 8448, and a batch


@pytest.mark.parametrize(
    ("changes", "axes", "codes"),
    [
        ({"slots": 1, "drafts": 1}, {}, {"slots"}),
        ({"slots": 5, "pages_axis": "dp"}, {"dp": 2}, {"unfit"}),
        ({"max_sequences": 3, "pages_axis": "dp", "slots": 4}, {"dp": 2}, {"max_sequences"}),
        (
            {"states": [{"operation": "mamba2", "sizes": {"heads": 3, "head_dim": 2, "value_dim": 2}}]},
            {"tp": 2},
            {"unfit"},
        ),
    ],
)
def test_a_cache_is_refused_by_code(changes: dict[str, Any], axes: dict[str, int], codes: set[str]) -> None:
    plan = hybrid(**changes).plan(virtual_mesh(axes) if axes else None)
    assert {reason.code for reason in plan.refused} == codes
    with pytest.raises(RefusedError):
        paged_cache.init(hybrid(**changes), virtual_mesh(axes) if axes else None)


# -- made --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [{}, {"tp": 4}, {"dp": 2}, {"dp": 2, "tp": 4}, {"dp": 4, "tp": 2}, {"sp": 2, "tp": 2}])
@pytest.mark.parametrize("kind", ["hybrid", "pure"])
def test_arrays_are_as_planned(axes: dict[str, int], kind: str) -> None:
    more = {"pages_axis": "dp", "page_sequence_axis": "sp"}
    cache = hybrid(drafts=1, pages=32, **more) if kind == "hybrid" else KVCache.from_dict(PURE | more)
    mesh = virtual_mesh(axes) if axes else None
    plan, state = cache.plan(mesh).require(), paged_cache.init(cache, mesh)
    slots = 8 if kind == "hybrid" else 4
    assert [type(layer) for layer in state.layers] == [
        LayerStates, LayerStates, *([LayerPages] if kind == "hybrid" else []), LayerStates,
    ]  # fmt: skip
    held = state.states(0)
    assert {name: (x.shape, x.dtype.name) for name, x in held.arrays.items()} == {
        "state": ((slots, 4, 8, 16), "float32"),
        "convolution": ((slots, 3, 64), "float32"),
    }
    if mesh is not None:
        dp = "dp" if "dp" in axes else None
        tp = "tp" if "tp" in axes else None
        assert held["state"].sharding.spec == jax.P(dp, tp, None, None)
        assert held["convolution"].sharding.spec == jax.P(dp, None, tp)
        places = paged_cache.shardings(cache, mesh)
        assert jax.tree.structure(places.state) == jax.tree.structure(state)
        rows = [np.zeros(x.fitted.shape, np.int32) for x in plan.state_groups[0].arrays[2:]]
        batches = places.batch[0] if kind == "hybrid" else places.batch
        placed = jax.device_put(StateBatch(*rows), batches)
        assert placed.write_slots.sharding.spec[0] == dp
        moved = jax.device_put(state, places.state)
        assert jax.tree.map(lambda x: x.sharding, moved) == jax.tree.map(lambda x: x.sharding, state)
        assert has_note(plan.notes, "cache.repeated_states") == ("sp" in axes)
    for device in mesh.devices.flat if mesh is not None else jax.devices()[:1]:
        leaves = jax.tree.leaves(state)
        bytes_ = sum(shard.data.nbytes for x in leaves for shard in x.addressable_shards if shard.device == device)
        batches = plan.bytes_of("page_table", "cu_q_lens", "kv_lens", "num_seqs", "read_slots", "write_slots")
        assert bytes_ == plan.bytes_per_device - batches
    other = state.with_states(1, state.states(1).replace(state=jnp.ones_like(state.states(1)["state"])))
    assert float(other.states(1)["state"].min()) == 1
    assert float(other.states(0)["state"].max()) == 0
    with pytest.raises(InputError, match="no array 'stat'"):
        held.replace(stat=held["state"])
    with pytest.raises(InputError, match="wanted float32"):
        held.replace(state=held["state"][:1])


def marked(cache: KVCache, mesh: Any = None) -> Any:
    """A state whose slots and pages hold their number plus 1, in every layer."""

    def one(x: Any) -> Any:
        return jnp.zeros_like(x) + jnp.arange(1, x.shape[0] + 1, dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1))

    return jax.tree.map(one, paged_cache.init(cache, mesh))


def numbers(state: Any, layer: int = 0, name: str = "state") -> list[int]:
    """The number that each slot holds, the same all over the slot."""
    array = np.asarray(state.states(layer)[name])
    flat = array.reshape(len(array), -1)
    assert (flat == flat[:, :1]).all()
    return flat[:, 0].astype(int).tolist()


@pytest.mark.parametrize("axes", [{}, {"dp": 2, "tp": 2}, {"dp": 2, "sp": 2}])
def test_slots_are_copied_and_zeroed(axes: dict[str, int]) -> None:
    cache = hybrid(pages_axis="dp" if axes else None, page_sequence_axis="sp" if axes else None, slots=8)
    mesh = virtual_mesh(axes) if axes else None
    state = marked(cache, mesh)
    pages = np.asarray(state.layers[2].key)
    pairs = [[0, 2], [1, 0]] if not axes else [[[0, 2], [1, 0]], [[3, 1], [4, 4]]]
    copied = paged_cache.copy(state, pairs, group=0)
    wanted = [2, 2, 1, 4, 5, 6, 7, 8] if not axes else [2, 2, 1, 4, 5, 8, 7, 8]
    for layer in (0, 1, 3):
        for name in ("state", "convolution"):
            assert numbers(copied, layer, name) == wanted
    zeroed = paged_cache.scrub(copied, [1, 7] if not axes else [[1, 4], [3, 4]], group=0)
    assert numbers(zeroed) == ([2, 0, 1, 4, 5, 6, 7, 0] if not axes else [2, 0, 1, 4, 5, 8, 7, 0])
    assert (np.asarray(zeroed.layers[2].key) == pages).all()
    last = 7 if not axes else 3
    for bad, said in (
        ([[0, last + 2]], rf"pairs\[.*1\] is {last + 2}; wanted 0 to {last}"),
        ([[0, 1], [2, 1]], "slot 1 is written twice"),
        ([[-1, 1]], r"is -1; wanted"),
    ):
        with pytest.raises(InputError, match=said):
            paged_cache.copy(state, [bad, bad] if axes else bad, group=0)


def batch(cu: Any, kv: Any, read: Any, write: Any) -> StateBatch:
    """A batch whose slots aren't checked."""
    starts, lens, read, write = (np.asarray(x, np.int32) for x in (cu, kv, read, write))
    return StateBatch(starts, lens, np.asarray(np.full(lens.shape[:-1], lens.shape[-1]), np.int32), read, write)


def test_a_state_is_saved_and_restored() -> None:
    cache = KVCache.from_dict(PURE | {"layers": [STATES | {"layers": 3, "slots": 6}]})
    state = marked(cache)
    # rows: one with tokens in the step, one without, one that has none at all
    rows = batch([0, 2, 2, 2], [5, 3, 0], [1, 4, 6], [[2], [6], [6]])
    for row, (number, length) in enumerate(((3, 5), (5, 3), (0, 0))):
        saved = paged_cache.extract(state, rows, row)
        assert int(saved.length) == length
        for layer in saved.layers:
            for array in layer.arrays.values():
                assert array.shape[0] == 1
                assert (np.asarray(array) == number).all()
    saved = jax.device_get(paged_cache.extract(state, rows, 0))
    later = batch([0, 1], [6], [0], [[3]])  # one more token after the restored five
    back = paged_cache.restore(state, saved, later, 0)
    assert numbers(back, 2, "convolution") == [3, 2, 3, 4, 5, 6]
    traced = jax.jit(lambda state, rows: paged_cache.restore(state, saved, rows, 0))
    assert numbers(traced(state, later)) == [3, 2, 3, 4, 5, 6]
    # Rows that start from zeros and rows not in use may name any slot.
    others = batch([0, 1, 2, 2], [6, 1, 9], [0, 0, 0], [[3], [4], [0]])
    others = replace(others, num_seqs=np.asarray(2, np.int32))
    assert numbers(paged_cache.restore(state, saved, others, 0), 2, "convolution") == [3, 2, 3, 4, 5, 6]
    for wrong, said in (
        (batch([0, 1], [5], [0], [[3]]), "4 tokens before this step, but 5 were saved"),
        (batch([0, 1], [6], [6], [[3]]), "reads slot 6; wanted 0 to 5"),
        (batch([0, 1, 2], [6, 3], [0, 1], [[3], [0]]), "slot 0 is row 1's too"),
    ):
        with pytest.raises(InputError, match=said):
            paged_cache.restore(state, saved, wrong, 0)
    with pytest.raises(InputError, match=r"in slot 7; wanted 0 to 5"):
        paged_cache.extract(state, batch([0, 0], [3], [7], [[6]]), 0)
    with pytest.raises(InputError, match="sequence=3; wanted 0 to 2"):
        paged_cache.extract(state, rows, 3)


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"dp": 2}])
def test_pages_and_states_are_saved_together(axes: dict[str, int]) -> None:
    cache = hybrid(pages_axis="dp", slots=8)
    mesh = virtual_mesh(axes)
    plan, state = cache.plan(mesh), marked(cache, mesh)
    one = paged_cache.RaggedBatch.make(plan.groups[1], cu_q_lens=[0, 0], kv_lens=[6], page_table=[[1, 3]])
    rows = [paged_cache.RaggedBatch.stack([one, one]), batch([[0, 0], [0, 0]], [[6], [6]], [[2], [1]], [[[4]], [[4]]])]
    rows = [rows[1], rows[0]]
    saved = paged_cache.extract(state, rows, (1, 0))
    assert [type(layer) for layer in saved.layers] == [type(layer) for layer in state.layers]
    assert float(saved.layers[0]["state"].max()) == float(saved.layers[3]["convolution"].min()) == 4 + 1 + 1
    assert np.asarray(saved.layers[2].key)[:, 0, 0, 0].tolist() == [8 + 1 + 1, 8 + 3 + 1]
    back = paged_cache.restore(state, jax.device_get(saved), rows, (0, 0))
    assert numbers(back) == [1, 2, 6, 4, 5, 6, 7, 8]
    assert np.asarray(back.layers[2].key)[:4, 0, 0, 0].tolist() == [1, 10, 3, 12]
    with pytest.raises(InputError, match="a StateBatch for one of states"):
        paged_cache.extract(state, rows[::-1], (0, 0))
    other = hybrid(pages_axis="dp", slots=8, states=[STATE])
    with pytest.raises(InputError, match="layer 0: saved convolution, state, but the cache has state"):
        paged_cache.restore(marked(other, mesh), saved, rows, (0, 0))


# -- used by others ----------------------------------------------------------------------------------------------------


def test_a_step_over_pages_beside_states() -> None:
    """Layer 2 attends over its pages; the states beside them stay, and other layers have no pages."""
    cache = hybrid()
    plan, state = cache.plan(), marked(cache)
    rows = paged_cache.RaggedBatch.make(plan.groups[1], cu_q_lens=[0, 2], kv_lens=[2], page_table=[[3]], tokens=2)
    x = [jnp.full((2, heads, 8), float(n), jnp.float32) for n, heads in enumerate((8, 4, 4))]
    paged = OperationRegistry.create("paged", OperationMetadata(runtime_dtype="float32"))
    output = paged(*x, state=state, layer=2, batch=rows)
    np.testing.assert_allclose(output.attention_outputs, 2)  # all values are 2
    assert np.asarray(output.state.layers[2].key)[3, :2].min() == 1
    for layer in (0, 1, 3):
        assert numbers(output.state, layer) == numbers(state, layer)
    with pytest.raises(InputError, match="layer 1 of the cache has no pages: it keeps a state"):
        paged(*x, state=state, layer=1, batch=rows)


def test_a_file_with_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cache.json"
    path.write_text(json.dumps({"operation": "paged", "cache": hybrid(drafts=1).to_dict()}))
    assert main(["plan", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "state 4x8x16 float32, convolution 3x64 float32: 8 slots, 2 per sequence (1 draft)" in said
    assert "write_slots[0] P(-, -) int32[4,2]" in said
    assert main(["plan", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["cache"]
    assert found["groups"][0]["states"]["convolution"] == {"shape": [3, 64], "dtype": "float32"}
    path.write_text(
        json.dumps({"operation": "paged", "cache": hybrid().to_dict(), "step": {"layer": 0, "q_lens": 1, "q_heads": 4}})
    )
    assert main(["plan", str(path)]) != 0
    assert "layer 0 of the cache has no pages" in " ".join(capsys.readouterr().err.split())
