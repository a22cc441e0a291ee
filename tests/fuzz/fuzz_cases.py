"""One case each of declarations, metadata, masks, model configs and calls: a mutated input, and what must hold of it."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fuzz_known import CALL_FIELDS, METADATA_FIELDS, unknown_in_declaration, unknown_in_metadata
from fuzz_mutate import WORDS, as_json, mutated, odd_string, odd_value

import attnops
from attnops import (
    AttnOpsError,
    Declaration,
    FallbackWarning,
    KVCache,
    ModelDeclaration,
    OperationMetadata,
    OperationRegistry,
)
from attnops.cli.declared import declared
from attnops.errors import ConfigWarning
from attnops.masks import mask_from_dict
from attnops.operators.paged import PagedOperation

__all__ = ["API_CASES", "DECLARATIONS", "MODELS", "SECONDS", "outcome", "planned", "within"]

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 10
_LONGEST_MESSAGE = 6000
_FOLDERS = (ROOT / "examples", ROOT / "tests" / "data" / "models")
_FILES = {path: json.loads(path.read_text()) for folder in _FOLDERS for path in sorted(folder.rglob("*.json"))}
_RICH: list[dict[str, Any]] = [
    {
        "operation": "splash",
        "metadata": {
            "schema_version": 1, "runtime_dtype": "bfloat16", "runtime_softmax_dtype": "float32", "backend": "tpu",
            "platform": None, "mesh": {"fsdp": 2, "tp": 2, "sp": 2}, "partition_axis": {"batch_axis": ["fsdp", "dp"]},
            "softmax_scale": 0.1, "dropout_prob": 0.1, "causal": False, "fallback": "allow", "kv_heads": "error",
            "strict": False, "tuning": "off", "sequence_parallel": "ring", "ring_order": "zigzag",
            "scan_ring_attention": True, "blocksize_q": 128, "blocksize_k": 128,
            "operation_configs": {"splash": {"operation": "splash", "block_q": 256}, "vanilla": {"path": "plain"}},
        },
        "call": {
            "batch": 2, "q_len": 256, "kv_len": 256, "q_heads": 8, "kv_heads": 4, "head_dim": 64, "value_dim": 64,
            "dtype": "bfloat16", "layout": "bhtd", "mode": "train", "mask": {"kind": "and", "masks": [
                "causal", {"kind": "or", "masks": [{"kind": "sliding_window", "left": 16, "right": 0, "offset": None},
                {"kind": "prefix", "length": 8}]}, {"kind": "not", "mask": {"kind": "chunked", "size": 64, "offset": 3}}]},
            "causal": True, "sliding_window": [32, 0], "logits_soft_cap": 30.0, "softmax_aux": [8], "bias": [1, 8, 1, 256],
        },
    },
    {
        "operation": "vanilla", "enabled": True, "$schema": "x",
        "metadata": {"mesh": {"axis_names": ["sp"], "axis_sizes": [4], "axis_types": ["auto"], "platform": "cpu",
                              "device_kind": None, "num_cores": None, "abstract": True}, "sequence_axis_name": "sp"},
        "call": {"batch": 2, "q_len": 1, "kv_len": 64, "q_heads": 4, "kv_heads": 2, "head_dim": 16, "kv_dtype": "int8",
                 "kv_scales": "token", "mode": "autoregressive", "kv_lengths": [3, 64], "return_lse": True,
                 "softmax_scale": 1.0, "deterministic": True,
                 "score": ["alibi", {"kind": "relative_bias", "buckets": {"kind": "t5", "buckets": 8, "max_distance": 20}},
                           {"kind": "relative_bias_2d", "grid": [8, 8]}, {"kind": "soft_cap", "cap": 3.0}],
                 "operands": {"table": [8, 4], "table_2": True}},
    },
    {
        "operation": "sdpa", "metadata": {},
        "call": {"batch": 2, "q_len": 32, "q_heads": 2, "head_dim": 8, "segment_ids": 3, "dense_mask": [1, 1, 32, 32],
                 "dropout_prob": 0.5, "deterministic": False, "query_offset": 0, "return_weights": True},
    },
    {
        "operation": "ring", "metadata": {"mesh": {"sp": 4}, "backend": "tpu"},
        "call": {"q_len": 512, "q_heads": 4, "head_dim": 128, "layout": "thd", "segment_ids": 2},
    },
    {
        "operation": "paged", "metadata": {"mesh": {"dp": 2, "tp": 2}},
        "cache": {"layers": [{"layers": [0, 2], "window_tokens": 24}, {"layers": [1], "window_tokens": None}], "kv_heads": 2,
                  "head_dim": 64, "quantised": {"dtype": "int8"}, "bytes_per_device": 2**22, "max_sequences": 4,
                  "max_length": 128, "max_tokens": 32, "pages_axis": "dp"},
        "step": {"q_heads": 4, "layer": 2, "q_lens": [8, 1], "kv_lens": [100, 7], "sliding_window": [23, 0]},
    },
]  # fmt: skip
_SIZES = {"q_len": 32, "q_heads": 4, "head_dim": 8}  # of files that leave them to the program


def _has_a_state(data: dict[str, Any]) -> bool:
    """Whether it declares a recurrence, which has its own sizes."""
    return bool(OperationRegistry.get(data["operation"]).family == "recurrence")


DECLARATIONS = [
    data if "step" in data or _has_a_state(data) else data | {"call": _SIZES | data.get("call", {})}
    for data in (*_FILES.values(), *_RICH)
    if "operation" in data
]
_CACHE = KVCache(layers=1, kv_heads=2, head_dim=64, pages=16, max_sequences=4, max_length=64)
MODELS = [data for data in _FILES.values() if "model_type" in data]
_MODEL_KEYS = tuple(sorted({key for model in MODELS for key in model}))
_DECLARED_KEYS = (
    *METADATA_FIELDS,
    *CALL_FIELDS,
    "operation",
    "metadata",
    "call",
    "kind",
    "masks",
    "mask",
    "left",
    "size",
)


class _Hostile:
    """An object that can't be shown, tested or hashed."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __bool__(self) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Hold what is done to a limit of CPU time, of this thread alone: others may compile, or clean up, for somebody else."""
    start = time.thread_time()
    yield
    took = time.thread_time() - start
    assert took <= seconds, f"{took:.1f} s of CPU time, more than {seconds}"


def outcome(work: Callable[[], None]) -> str:
    """'accepted' or 'refused'; anything but an error of the family, or a message that nobody can read, goes through."""
    with warnings.catch_warnings(), within(SECONDS):
        warnings.simplefilter("ignore", FallbackWarning)
        warnings.simplefilter("ignore", ConfigWarning)
        try:
            work()
        except AttnOpsError as error:
            message = str(error)
        else:
            return "accepted"
    assert message.strip(), "an error without a message"
    assert len(message) < _LONGEST_MESSAGE, f"a message of {len(message)} characters: {message[:200]}"
    return "refused"


def planned(declaration: Declaration) -> Any:
    """The plan of the declared call, or step over pages."""
    if declaration.in_pages:
        return declared(declaration, None, None).plan(declaration.operation_metadata())
    return attnops.Attention(declaration).operation.plan(**declaration.call_arguments(declaration.shapes()))


def declaration_case(random: Random) -> tuple[Any, Callable[[], None]]:
    """A declaration: read, held against the known keys, written and read again, planned."""
    data = mutated(random, random.choice(DECLARATIONS), _DECLARED_KEYS)
    as_text = random.random() < 0.3
    text = _text(random, data) if as_text else ""

    def work() -> None:
        declaration = Declaration.from_json(text) if as_text else Declaration.from_dict(data)
        plan = planned(declaration)
        unknown = unknown_in_declaration(json.loads(text) if as_text else data)
        assert not unknown, f"accepted, with {unknown}"
        assert Declaration.from_json(declaration.to_json()) == declaration, "another one after a round trip"
        json.dumps(plan.to_dict(), allow_nan=False)
        assert plan.explain()

    return text if as_text else data, work


def metadata_case(random: Random) -> tuple[Any, Callable[[], None]]:
    """Metadata from a dict, or from keywords with values of any type."""
    base = random.choice([data.get("metadata", {}) for data in _RICH])
    by_dict = random.random() < 0.5
    data = mutated(random, {**base}, METADATA_FIELDS) if base and by_dict else {}
    if not isinstance(data, dict) or random.random() < 0.5:
        data = {name: base[name] for name in random.sample(sorted(base), k=min(2, len(base)))}
        data |= {random.choice(METADATA_FIELDS): _odd_object(random)}
    if not by_dict:
        data.pop("schema_version", None)
        if random.random() < 0.2:
            data["base_config"] = _odd_object(random)

    mode = random.choice(("train", "prefill", odd_string(random)))

    def work() -> None:
        metadata = OperationMetadata.from_dict(data) if by_dict else _called(OperationMetadata, data)
        known = {name: value for name, value in data.items() if by_dict or name != "base_config"}
        assert not unknown_in_metadata(known), f"accepted, with {unknown_in_metadata(known)}"
        assert hash(metadata) == hash(metadata.replace())
        assert OperationMetadata.from_json(metadata.to_json()) == metadata, "another one after a round trip"
        metadata.get_shardings(mode)

    return data, work


def config_case(random: Random) -> tuple[Any, Callable[[], None]]:
    """An operation's config: read, written, and planned with for a TPU and here."""
    name = random.choice(("splash", "splash", "vanilla", "sdpa", "ring", "ulysses", "paged"))
    fields = OperationRegistry.get(name).config.model_fields
    given: dict[str, Any] = {}
    for field in random.sample(sorted(fields), k=min(len(fields), random.choice((1, 2, 3)))):
        blocks = (128, 256, 384, 512, 1024, 2048, 4096)
        given[field] = random.choice(
            (random.choice(blocks), random.choice(blocks), True, False, None, _odd_object(random))
        )
        if field in ("kernel", "path", "operation") or field.endswith("_layout"):
            given[field] = random.choice(
                ("jax", "tokamax", "attnops", "seq_minor", "plain", "blockwise", name, given[field])
            )
    if random.random() < 0.2:
        given[random.choice((odd_string(random), "block_size", "blocks_q"))] = 128
    backend = random.choice(("tpu", "cpu", "cuda"))
    lengths = random.choice((1, 7, 128, 1000, 4096)), random.choice((128, 1000, 4096))
    query = jax.ShapeDtypeStruct((1, lengths[0], 4, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, lengths[1], 2, 64), jnp.bfloat16)

    def work() -> None:
        metadata = OperationMetadata(operation_configs={name: given}, backend=backend, tuning="off")
        assert set(given) <= set(fields), f"accepted, with {sorted(set(given) - set(fields))}"
        assert OperationMetadata.from_json(metadata.to_json()) == metadata, "another one after a round trip"
        operation: Any = OperationRegistry.create(name, metadata)
        if isinstance(operation, PagedOperation):
            shapes = (jax.ShapeDtypeStruct((8, h, 64), jnp.bfloat16) for h in (4, 2, 2))
            plan = operation.plan(*shapes, cache=_CACHE)
        else:
            plan = operation.plan(query, key, key, query_offset=0)
        json.dumps(plan.to_dict(), allow_nan=False)
        assert plan.explain()

    return (name, given, backend, lengths), work


def mask_case(random: Random) -> tuple[Any, Callable[[], None]]:
    """A mask from JSON values, or built with values of any type."""
    layout = {"kind": "blocks", "layout": [["101", "011"], ["110", "111"]], "block_q": 3, "block_kv": 2}
    base = random.choice(
        [_RICH[0]["call"]["mask"], {"kind": "mask_function", "name": "fuzz.none", "offset": 1}, layout]
    )
    keys = (
        "kind",
        "masks",
        "mask",
        "left",
        "right",
        "offset",
        "size",
        "length",
        "name",
        "layout",
        "block_q",
        "block_kv",
    )
    data = mutated(random, base, keys)
    kind = random.choice(("Causal", "SlidingWindow", "Chunked", "Prefix", "MaskFunction", "And", "Not", "Dense", "Lengths",
                          "SegmentIds", "Positions", "Blocks", "window_tokens"))  # fmt: skip
    given = [_odd_object(random) for _ in range({"SegmentIds": 2, "Positions": 2, "Blocks": 3}.get(kind, 1))]
    built = random.random() < 0.5

    def work() -> None:
        from attnops import masks

        mask = getattr(masks, kind)(*given) if built else mask_from_dict(data)
        if mask.is_static:
            assert mask_from_dict(mask.to_dict()) == mask, "another one after a round trip"
            if not any(atom.kind == "mask_function" for atom in mask.leaves()):
                assert mask.materialise(slice(0, 4), slice(0, 6)).shape[-2:] == (4, 6)
        else:
            mask.split()
        assert mask.describe()

    return (kind, given) if built else data, work


def model_case(random: Random) -> tuple[Any, Callable[[], None]]:
    """A model's config: read to declarations, each of them planned; a key that isn't read stands in a note."""
    data = mutated(random, random.choice(MODELS), _MODEL_KEYS)
    options: dict[str, Any] = {"q_len": 256, "dtype": "bfloat16"}
    if random.random() < 0.3:
        name = random.choice(("operation", "batch", "q_len", "kv_len", "mode", "dtype", "layout", "metadata", "family",
                              "part", "ignore"))  # fmt: skip
        options[name] = random.choice((odd_value(random), random.choice(WORDS)))
    only_metadata = random.random() < 0.2
    added = odd_string(random)
    if isinstance(data, dict) and random.random() < 0.2:
        data[f"zz_{added}"] = 3

    def work() -> None:
        if only_metadata:
            OperationMetadata.from_config(data).to_json()
            return
        model = ModelDeclaration.from_config(data, **options)
        if f"zz_{added}" in data:
            assert any("zz_" in note for note in model.notes), "a key that nobody reads, without a note"
        assert model.cache_bytes(512) >= 0
        for own in [own for layer in model.distinct[:2] for own in layer.declarations.values()]:
            declaration = Declaration.from_json(own.to_json())
            assert declaration == own
            operation = OperationRegistry.get(declaration.operation)(declaration.operation_metadata())
            operation.plan(**declaration.call_arguments(declaration.shapes())).explain()

    return (data, options), work


def call_case(random: Random) -> tuple[Any, Callable[[], None]]:
    """A call with arguments of any type: its plan."""
    operation = OperationRegistry.get(random.choice(("splash", "vanilla", "sdpa", "ring")))
    query, key = jax.ShapeDtypeStruct((2, 16, 4, 8), jnp.float32), jax.ShapeDtypeStruct((2, 16, 2, 8), jnp.float32)
    given: dict[str, Any] = {"query": query, "key": key, "value": key}
    names = (
        "query", "key", "value", "mask", "bias", "causal", "sliding_window", "q_segment_ids", "kv_segment_ids",
        "kv_lengths", "query_offset", "softmax_scale", "logits_soft_cap", "softmax_aux", "key_scale", "value_scale",
        "dropout_prob", "dropout_rng", "deterministic", "return_weights", "return_lse", "mode", "layout",
    )  # fmt: skip
    for name in random.sample(names, k=random.choice((1, 1, 2, 3))):
        given[name] = _odd_object(random) if random.random() < 0.6 else _likely(random, name)
    unknown = [random.choice((odd_string(random), "is_causal", "casual", "scale"))] if random.random() < 0.1 else []
    given |= dict.fromkeys((name for name in unknown if name not in names), 1)

    way = random.choice(("plan", "call", "declared"))
    declared = {"operation": operation.name, "call": {"causal": True, "kv_heads": 2, "softmax_scale": 0.5}}

    def work() -> None:
        if way == "call":  # without values nothing runs
            operation(OperationMetadata())(**given)
        plan = (attnops.Attention(declared) if way == "declared" else operation(OperationMetadata())).plan(**given)
        assert set(given) <= set(names), f"accepted, with {sorted(set(given) - set(names))}"
        assert plan.explain()

    return given, work


def _likely(random: Random, name: str) -> Any:
    """A value that the argument of this name may well have."""
    many = {
        "query": "2,16,4,8 float32; 2,1,4,8 bfloat16; 2,4,16,8 float32; 16,4,8 float32",
        "key": "2,16,2,8 int8; 2,16,4,8 float32",
        "value": "2,16,2,8 int8; 2,16,2,16 float32",
        "bias": "2,4,16,16 float32; 1,1,1,16 bfloat16; 4,16,16 float32",
        "q_segment_ids": "2,16 int32; 16 int32",
        "kv_segment_ids": "2,16 int32; 2,15 int32",
        "kv_lengths": "2 int32; 2 float32; 3 int32",
        "query_offset": "2 int32; 1,1 int32",
        "softmax_aux": "4 float32; 2,3 float32; 5 float32",
        "mask": "1,1,16,16 bool; 2,16 bool",
        "key_scale": "2,16,2,1 float32",
        "value_scale": "1,1,1,1 float32",
        "dropout_rng": "2 uint32",
    }
    few: dict[str, tuple[Any, ...]] = {
        "sliding_window": (3, (3, None), (0, 0), None, (None, None), -1),
        "softmax_scale": (1, 0.5, 0, -1.0),
        "logits_soft_cap": (30, 1.5, 0),
        "dropout_prob": (0.0, 0.5, 1),
        "mode": ("train", "prefill", "insert"),
        "layout": ("bthd", "bhtd", "thd"),
    }
    if name not in many:
        return random.choice(few.get(name, (True, False)))
    shape, dtype = random.choice(many[name].split("; ")).split(" ")
    return jax.ShapeDtypeStruct(tuple(map(int, shape.split(","))), jnp.dtype(dtype))


def _called(function: Callable[..., Any], keywords: dict[Any, Any]) -> Any:
    return function(**{str(name): value for name, value in keywords.items()})


def _text(random: Random, data: Any) -> str:
    """JSON text, sometimes with a slip in the text itself."""
    text = as_json(data)
    at = random.randrange(len(text) + 1)
    kind = random.randrange(6)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + random.choice('{}[]",:0e.\x00\ud800') + text[at:]
    if kind == 2 and '"operation"' in text:
        return text.replace('"operation"', '"operation": "vanilla", "operation"', 1)
    return text


def _odd_object(random: Random) -> Any:
    """A value of any type, arrays and objects of Python among them."""
    kind = random.randrange(16)
    if kind < 6:
        return odd_value(random)
    if kind == 6:
        shape = random.choice(
            ((), (2,), (16,), (2, 16), (4,), (1, 1, 16, 16), (2, 4, 16, 16), (3, 3), (0,), (2, 16, 2, 1))
        )
        dtype = random.choice((np.int32, np.float32, np.bool_, np.uint8, np.int64, np.uint32, np.float64, np.complex64))
        return random.choice((np.ones, jax.ShapeDtypeStruct))(shape, dtype)
    if kind == 7:
        return random.choice(
            (np.float32(2), np.int64(3), np.bool_(True), np.array(None), np.array("x"), np.array([1, "a"]))
        )
    if kind == 8:
        return random.choice(
            (b"bytes", bytearray(5), {1, 2}, frozenset(), range(3), 1j, object(), len, int, type, Ellipsis)
        )
    if kind == 9:
        return random.choice(
            (jnp.float32, "float32", np.dtype("f4"), np.dtype(">f4"), np.dtype("V8"), np.datetime64("now"))
        )
    if kind == 10:
        return random.choice((attnops.Causal(), attnops.Full(), attnops.SlidingWindow(left=3), attnops.Causal))
    if kind == 11:
        return random.choice((jax.random.key(0), jax.random.PRNGKey(0), jax.random.split(jax.random.key(0), 3)))
    if kind == 12:
        return {1: 2, None: 3} if random.random() < 0.5 else {("a",): 1}
    if kind == 13:
        return random.choice(
            (lambda *_: 1, _Hostile(), jax.sharding.AbstractMesh((2,), ("tp",)), attnops.OperationMetadata())
        )
    return random.choice((odd_string(random), random.choice(WORDS), random.randint(-3, 20)))


API_CASES: dict[str, Callable[[Random], tuple[Any, Callable[[], None]]]] = {
    "declaration": declaration_case,
    "metadata": metadata_case,
    "config": config_case,
    "mask": mask_case,
    "model": model_case,
    "call": call_case,
}
