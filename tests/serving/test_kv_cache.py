"""KVCache: exact in JSON, every mistake named, and a plan whose bytes are those of the arrays that are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType

from attnops import ConfigError, InputError, OperationMetadata, OperationRegistry, RefusedError
from attnops.cli.app import main
from attnops.operators import paged_cache
from attnops.planning.cache.kv_cache import KVCache
from attnops.registry.declaration import Declaration
from attnops.registry.declaration_schema import declaration_json_schema
from attnops.sharding import virtual_mesh

SMALL: dict[str, Any] = {
    "layers": 2, "kv_heads": 4, "head_dim": 8, "page_size": 4, "pages": 16, "max_sequences": 4, "max_length": 16,
}  # fmt: skip
SIZE = st.integers(1, 64)
AXES = st.sampled_from([None, "dp", ["dp", "fsdp"]])
CACHES = st.fixed_dictionaries(
    dict.fromkeys(("layers", "kv_heads", "head_dim", "max_sequences", "max_length"), SIZE),
    optional={
        "value_dim": SIZE | st.none(),
        "dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
        "quantised": st.none()
        | st.fixed_dictionaries(
            {"dtype": st.sampled_from(["int8", "float8_e4m3fn", "float8_e5m2"])},
            optional={"scale": st.sampled_from(["tensor", "head", "token_head"])},
        ),
        "page_size": SIZE,
        "max_tokens": SIZE | st.none(),
        "layout": st.just("split"),
        "pages_axis": AXES,
        "kv_head_axis": st.sampled_from([None, "tp", ["tp", "ep"]]),
        "page_sequence_axis": st.sampled_from([None, "sp"]),
        "scrub_on_free": st.booleans(),
    },
)
HOW_MANY = st.fixed_dictionaries({"pages": SIZE}) | st.fixed_dictionaries({"bytes_per_device": st.integers(1, 2**40)})


def small(**changes: Any) -> KVCache:
    return KVCache.from_dict(SMALL | changes)


def described(**sizes: int) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@given(
    CACHES,
    st.sampled_from(["split", "heads", "joined", "interleaved", "packed"]),
    HOW_MANY,
    st.fixed_dictionaries({}, optional={"dp": st.integers(1, 4), "tp": st.integers(1, 8), "sp": st.integers(1, 3)}),
    st.sampled_from(["TPU v5 lite", "NVIDIA H100 80GB HBM3", "cpu"]),
)
def test_the_arithmetic_of_any_cache_ends_in_a_plan(
    fields: dict[str, Any], layout: str, how_many: dict[str, int], sizes: dict[str, int], kind: str
) -> None:
    try:
        cache = KVCache.from_dict(fields | how_many | {"layout": layout})
    except ConfigError:
        return
    plan = cache.plan(described(**sizes) if sizes else None, device_kind=kind)
    told = json.loads(json.dumps(plan.to_dict()))
    assert told["bytes_per_device"] > 0
    assert plan.explain()


@pytest.mark.parametrize("size", [{"pages": 64}, {"bytes_per_device": 2**20}, {"bytes_per_device": 1}], ids=str)
def test_heads_that_fill_no_word_are_refused_however_the_size_is_given(size: dict[str, int]) -> None:
    fields = {**SMALL, "kv_heads": 1, "layout": "packed", "quantised": {"dtype": "int8", "scale": "head"}}
    del fields["pages"]
    plan = KVCache.from_dict(fields | size).plan()
    assert "page_packing" in [reason.code for reason in plan.refused]


@given(CACHES, HOW_MANY)
def test_round_trip_is_exact(fields: dict[str, Any], how_many: dict[str, int]) -> None:
    """Unset and null stay apart, in a cache and in a file with one."""
    made = KVCache.from_dict(fields | how_many)
    again = KVCache.from_json(made.to_json())
    assert again == made
    assert hash(again) == hash(made)
    assert again.model_fields_set == set(fields) | set(how_many)
    assert again.to_json() == made.to_json()
    file = Declaration.from_dict({"operation": "vanilla", "cache": fields | how_many})
    assert Declaration.from_json(file.to_json()) == file
    assert file.cache == made
    assert (
        json.loads(json.dumps(made.plan(device_kind="cpu").to_dict()))["tokens"] == made.plan(device_kind="cpu").tokens
    )


def test_unset_is_not_null() -> None:
    assert small(quantised=None) != small()
    assert small(quantised=None).to_dict() == SMALL | {"quantised": None}
    assert Declaration.from_dict({"operation": "vanilla", "cache": None}).to_dict() == {
        "schema_version": 1, "operation": "vanilla", "cache": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_hads": 3}, ["'kv_hads'", "Did you mean 'kv_heads'"]),
        ({"layers": 0}, ["layers=0", "greater than or equal to 1"]),
        ({"layers": True}, ["layers=True", "integer"]),
        ({"head_dim": "8"}, ["head_dim='8'", "integer"]),
        ({"pages": None}, ["neither of pages and bytes_per_device", "wanted one"]),
        ({"bytes_per_device": 4096}, ["both of pages and bytes_per_device"]),
        ({"dtype": "int8"}, ["dtype='int8'", "float32"]),
        ({"quantised": {"dtype": "int4"}}, ["quantised.dtype='int4'", "float8_e4m3fn"]),
        ({"quantised": {"dtype": "int8", "scales": "head"}}, ["'quantised.scales'"]),
        ({"quantised": {"dtype": "int8", "scale": "token"}}, ["quantised.scale='token'", "token_head"]),
        ({"layout": "pakced"}, ["layout='pakced'", "split"]),
        ({"layout": "packed", "value_dim": 6}, ["value_dim=6 and head_dim=8", "'split', 'heads' or 'joined'"]),
        ({"pages_axis": "tp"}, ["pages_axis", "kv_head_axis", "'tp'"]),
        ({"pages_axis": []}, ["wanted a mesh axis"]),
        ({"pages_axis": ["dp", "dp"]}, ["wanted a mesh axis"]),
    ],
)
def test_a_mistake_is_named(changes: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        KVCache.from_dict(SMALL | changes, "file.json")
    assert all(part in str(error.value) for part in ["file.json", *says]), error.value
    with pytest.raises(ConfigError):
        KVCache(**(SMALL | changes))
    with pytest.raises(ConfigError):
        Declaration.from_dict({"operation": "vanilla", "cache": SMALL | changes})


def test_what_is_missing_and_what_is_no_object() -> None:
    with pytest.raises(ConfigError, match=r"layers is missing.*max_length is missing"):
        KVCache.from_dict({"pages": 3})
    with pytest.raises(ConfigError, match="a list; wanted an object"):
        KVCache.from_json("[]")
    with pytest.raises(ConfigError, match="layers=0"):
        small().model_copy(update={"layers": 0}).plan()
    with pytest.raises(ConfigError, match="kv_heads='both'"):
        small().plan(kv_heads="both")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "size", "held"), [("kv_heads", 2, 4), ("head_dim", 16, 8), ("value_dim", 6, 8)], ids=str
)
def test_a_call_beside_a_cache_has_its_sizes(name: str, size: int, held: int) -> None:
    call = {"q_len": 8, "q_heads": 4, "head_dim": 8}
    file = {"operation": "vanilla", "cache": SMALL}
    Declaration.from_dict(file | {"call": call | {name: held}})
    with pytest.raises(ConfigError, match=f"call.{name}={size}, but the cache's is {held}; wanted the same"):
        Declaration.from_dict(file | {"call": call | {name: size}})


def test_schema() -> None:
    fields = declaration_json_schema()["$defs"]["KVCache"]
    assert set(fields["properties"]) == set(KVCache.model_fields)
    assert not fields["additionalProperties"]
    assert set(fields["required"]) == {
        "layers",
        "max_sequences",
        "max_length",
    }  # kv_heads and head_dim if layers have pages


SCALES = {
    "token_head": {},
    "head": {"key_scale": 0.1, "value_scale": 0.2},
    "tensor": {"key_scale": 0.1, "value_scale": 1},
}


@pytest.mark.parametrize("mesh", [{}, {"dp": 2}, {"dp": 2, "tp": 4}, {"tp": 8}, {"dp": 2, "tp": 2, "sp": 2}])
@pytest.mark.parametrize("scale", [None, "tensor", "head", "token_head"])
@pytest.mark.parametrize("pages", [{}, {"pages": None, "bytes_per_device": 50_000}])
def test_bytes_are_those_of_the_arrays(mesh: dict[str, int], scale: str | None, pages: dict[str, Any]) -> None:
    quantised = None if scale is None else {"dtype": "int8", "scale": scale}
    cache = small(pages_axis="dp", value_dim=6, dtype="float32", quantised=quantised, **pages)
    devices = virtual_mesh(mesh) if mesh else None
    plan = cache.plan(devices).require()
    state = paged_cache.init(cache, devices, **SCALES.get(scale or "token_head", {}))
    rows = [
        paged_cache.RaggedBatch.make(plan, cu_q_lens=[0], kv_lens=[], page_table=[], num_seqs=0)
        for _ in range(plan.shards)
    ]
    batch = rows[0] if plan.shards == 1 else paged_cache.RaggedBatch.stack(rows)
    if devices is not None:
        placed = jax.device_put(batch, paged_cache.shardings(cache, devices).batch)
        assert state.layers[0].key.sharding == paged_cache.shardings(cache, devices).state.layers[0].key
    else:
        placed = jax.device_put(batch)
    arrays = jax.tree.leaves((state, placed))
    assert plan.kv_repeat == (2 if mesh.get("tp") == 8 else 1)
    assert state.pages == plan.pages
    for device in devices.devices.flat if devices is not None else jax.devices()[:1]:
        held = sum(s.data.nbytes for array in arrays for s in array.addressable_shards if s.device == device)
        assert held == plan.bytes_per_device
    if pages:
        one_more = plan.bytes_of(
            "key_pages", "value_pages", *(["key_scale", "value_scale"] if scale == "token_head" else [])
        )
        assert plan.bytes_per_device <= 50_000 < plan.bytes_per_device + one_more // plan.local_pages


def test_explain_says_it_all() -> None:
    plan = small(pages_axis="dp", max_sequences=8).plan(described(dp=2, tp=8), device_kind="TPU v5 lite")
    text = plan.explain()
    for part in (
        "pages     16, 8 on each of 2 shards: 64 tokens, 4 sequences of 16 tokens",
        "last pages leave at most 24 tokens empty: 8 sequences x 3",
        "4 kv heads are split 8 ways: each is stored 2 times, in 8 heads",
        "page table 4 x 4: 64 B of 1.0 MiB scalar memory",
        "head_dim 8 is padded to 128 lanes on a TPU: 94%",
        "P(dp, -, tp, -)",
    ):
        assert part in text, text
    repeated, padded_dim = plan.notes
    assert (repeated.code, padded_dim.code) == ("cache.repeated_heads", "cache.padded_dim")
    assert repeated.values == {"kv_heads": 4, "ways": 8, "times": 2, "stored": 8}
    assert padded_dim.values == {"name": "head_dim", "size": 8, "lanes": 128, "share": 0.9375}
    assert (plan.tokens, plan.most_lost, plan.page_table_bytes, plan.stored_heads) == (64, 24, 64, 8)
    assert plan["key_pages"].device_bytes == 8 * 4 * 1 * 128 * 2
    assert str(plan) == text
    assert hash(plan) == hash(
        small(pages_axis="dp", max_sequences=8).plan(described(dp=2, tp=8), device_kind="TPU v5 lite")
    )


@pytest.mark.parametrize(
    ("changes", "mesh", "options", "codes"),
    [
        ({}, {"tp": 8}, {"kv_heads": "error"}, ["kv_heads"]),
        ({"pages_axis": "dp", "pages": 17}, {"dp": 2}, {}, ["unfit"]),
        ({"pages_axis": "cores"}, {"dp": 2}, {}, ["unfit"]),
        ({"pages_axis": "dp", "max_sequences": 3}, {"dp": 2}, {}, ["max_sequences"]),
        ({"pages_axis": "dp", "max_tokens": 9}, {"dp": 2}, {}, ["max_tokens"]),
        ({"max_length": 65}, {}, {}, ["pages"]),
        ({"pages": None, "bytes_per_device": 8}, {}, {}, ["pages"]),
        (
            {"max_sequences": 256, "max_length": 2048 * 4, "pages": 4096},
            {},
            {"device_kind": "TPU7x"},
            ["page_table_smem"],
        ),
        (
            {"max_sequences": 256, "max_length": 2048 * 4, "pages": 4096},
            {},
            {"device_kind": "tpu"},
            ["page_table_smem"],
        ),
        ({"pages": 2**27}, {}, {"device_kind": "TPU v5 lite"}, ["device_memory"]),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], mesh: dict[str, int], options: dict[str, Any], codes: list[str]
) -> None:
    plan = small(**changes).plan(described(**mesh) if mesh else None, **options)
    assert [reason.code for reason in plan.refused] == codes
    with pytest.raises(RefusedError, match=rf"\[{codes[0]}\]"):
        plan.require()
    assert f"[{codes[0]}]" in plan.explain()


@pytest.mark.parametrize(
    ("changes", "mesh"),
    [({}, {}), ({"pages_axis": "dp"}, {"dp": 2, "tp": 2}), ({"value_dim": 6, "dtype": "float32"}, {"tp": 8})],
)
def test_max_tokens_is_counted_and_held(changes: dict[str, Any], mesh: dict[str, int]) -> None:
    """The bytes are those of keys and values where the plan of a step has them; one token more is refused."""
    cache, over = small(max_tokens=12, **changes), described(**mesh) if mesh else None
    plan = cache.plan(over, device_kind="cpu").require()
    paged = OperationRegistry.create("paged", OperationMetadata(mesh=over, platform="cpu"))

    def shapes(tokens: int) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct((tokens, heads, dim), cache.dtype)
            for heads, dim in ((8, 8), (4, 8), (4, cache.value_size))
        ]

    step = paged.plan(*shapes(12), cache=cache)
    assert plan.token_bytes == sum(fitted.local_bytes for fitted in step.tensors if fitted.tensor in ("key", "value"))
    assert "at most 12 tokens" in plan.explain()
    with pytest.raises(InputError, match="14 tokens in a step, but the cache declares max_tokens=12"):
        paged.plan(*shapes(14), cache=cache)
    make = lambda tokens: paged_cache.RaggedBatch.make(  # noqa: E731
        plan, cu_q_lens=[0], kv_lens=[], page_table=[], tokens=tokens
    )
    make(12 // plan.shards)
    with pytest.raises(InputError, match="tokens=13; wanted no more than the cache's max_tokens=12"):
        make(13)
    assert small(**changes).plan(over, device_kind="cpu").token_bytes is None


def test_what_is_refused_is_never_made() -> None:
    with pytest.raises(RefusedError, match="needs 25"):
        paged_cache.init(small(max_length=100))
    with pytest.raises(RefusedError, match="kv_heads"):
        paged_cache.shardings(small(), virtual_mesh({"tp": 8}), kv_heads="error")


def test_where_it_is_not_refused() -> None:
    table = {"max_sequences": 256, "max_length": 2048 * 4, "pages": 8192, "pages_axis": "dp"}
    assert not small(**table).plan(device_kind="cpu").refused
    assert not small(**table).plan(described(dp=4), device_kind="TPU7x").refused
    assert [r.code for r in small(**table).plan(described(dp=2), device_kind="TPU7x").refused] == ["page_table_smem"]


# -- the command -----------------------------------------------------------------------------------------------------


def _file(tmp_path: Path, **changes: Any) -> str:
    data = {"operation": "vanilla", "call": {"q_len": 8, "q_heads": 4, "head_dim": 8}, "cache": SMALL} | changes
    path = tmp_path / "file.json"
    path.write_text(json.dumps({name: value for name, value in data.items() if value is not None}))
    return str(path)


def test_plan_prints_the_cache_after_the_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", _file(tmp_path), "--mesh", "tp=2"]) == 0
    out = capsys.readouterr().out
    assert out.index("vanilla.forward_native") < out.index("cache: 2 layers, 4 kv heads of 8")
    assert "2 x bfloat16[16,4,4,8]" in out
    assert main(["plan", _file(tmp_path), "--mesh", "tp=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["operation"] == "vanilla"
    assert found["cache"]["bytes_per_device"] == small().plan(described(tp=2)).bytes_per_device
    assert main(["plan", _file(tmp_path, call=None), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"cache", "enabled"}


def test_a_refused_cache_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "plan",
                _file(tmp_path, cache=SMALL | {"max_length": 100}, metadata={"kv_heads": "error"}),
                "--mesh",
                "tp=8",
            ]
        )
        == 1
    )
    out, err = capsys.readouterr()
    assert "REFUSED: this cache" in out
    assert "[pages]" in err
    assert "[kv_heads]" in err
    cache = SMALL | {"max_sequences": 256, "max_length": 8192, "pages": 4096}
    assert main(["plan", _file(tmp_path, cache=cache, call=None), "--target", "tpu"]) == 1
    assert "[page_table_smem]" in capsys.readouterr().err


def test_other_commands_say_that_they_pass_it_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", _file(tmp_path), "--repeats", "1"]) == 0
    assert "this is the call alone" in " ".join(capsys.readouterr().out.split())
