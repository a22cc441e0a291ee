"""What the conformance suite asks: one case per feature, with its arguments for the call and for the reference.

Masks are written out here a second time, as NumPy arrays, so that the suite doesn't trust the package's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from attnops import (
    T5,
    ALiBi,
    Blocks,
    Causal,
    Chunked,
    Dense,
    Forgetting,
    Full,
    Mask,
    MaskFunction,
    Positions,
    Prefix,
    RelativeBias,
    ScoreFunction,
    SegmentIds,
    SlidingWindow,
    Temperature,
    register_mask_function,
    register_score_function,
)
from attnops.masks import ChosenBlocks

DIM, VALUE_DIM = 16, 24


@dataclass(frozen=True)
class Sizes:
    """How large the cases are. 150 is a multiple of nothing and takes two blocks of 128."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    length: int = 150

    def at(self, place: int) -> int:
        """A place in a sequence of 150, scaled to this length."""
        return place * self.length // 150


@register_mask_function("conformance_skip")
def _skip(position, key):
    return (key <= position) | (key - position > 11)


@register_score_function("conformance.gated")
def _gated(x, batch, head, q, kv, gain):
    batch, head, ahead = (n.astype(x.dtype) for n in (batch, head, kv - q))
    return x * (1 + 0.2 * jnp.tanh(gain)) + 0.01 * head * ahead + 0.1 * batch


@dataclass
class Case:
    """One call and what the reference is told instead."""

    name: str
    features: frozenset[str]
    call: dict[str, Any]
    mask: np.ndarray | None = None  # broadcasts to [batch, heads, q, kv]
    reference: dict[str, Any] = field(default_factory=dict)
    differentiate: tuple[str, ...] = ()  # array arguments beside q, k, v that get a gradient
    # None is filled in from the sizes
    q_len: int | None = None
    kv_len: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    batch: int | None = None
    value_dim: int = DIM
    # 'key', 'value' -> int8 or fp8; and 'key_scale', 'value_scale' in bthd. `build` puts these into the call.
    quantised: dict[str, str] = field(default_factory=dict)
    scales: dict[str, np.ndarray] = field(default_factory=dict)

    def dtype_of(self, tensor: str, dtype: str) -> Any:
        """The dtype in which a tensor is handed over, in a call of this dtype."""
        return jnp.dtype(self.quantised.get(tensor, dtype))


Builder = Callable[[np.random.Generator, Sizes], Case]
_BUILDERS: dict[str, Builder] = {}


def _case(builder: Builder) -> Builder:
    _BUILDERS[builder.__name__] = builder
    return builder


def names() -> list[str]:
    return list(_BUILDERS)


def build(name: str, layout: str, sizes: Sizes = Sizes()) -> Case:
    """Make a case; a packed (thd) one has batch 1 and segment ids on top of what it asks."""
    if layout == "thd":
        sizes = replace(sizes, batch=1)
    case = _BUILDERS[name](np.random.default_rng(7), sizes)
    case.name, case.batch = name, sizes.batch
    case.q_len, case.kv_len = case.q_len or sizes.length, case.kv_len or sizes.length
    case.heads = case.heads or sizes.heads
    case.kv_heads = case.kv_heads or case.heads
    case.call |= {name: in_layout(scale, layout) for name, scale in case.scales.items()}
    if layout == "thd" and "q_segment_ids" not in case.call:
        q, kv = (np.arange(n) // sizes.at(60) for n in (case.q_len, case.kv_len))
        case.call |= {"q_segment_ids": q.astype(np.int32), "kv_segment_ids": kv.astype(np.int32)}
        case.features |= {"segment_ids"}
        same = q[:, None] == kv[None, :]
        case.mask = same[None, None] if case.mask is None else case.mask & same
    elif layout == "thd":
        case.call |= {name: case.call[name][0] for name in ("q_segment_ids", "kv_segment_ids")}
    return case


def last_rows(case: Case, rows: int) -> Case:
    """The case's last queries alone, against all of its keys."""
    first = case.kv_len - rows

    def cut(x: Any, axis: int) -> Any:
        return x if x.shape[axis] == 1 else np.take(x, np.arange(first, first + rows), axis)

    call = dict(case.call)
    if call.get("mask") == ~Causal(4):  # an offset of its own counts from the row's index, and moves with the cut
        call["mask"] = ~Causal(4 + first)
    if isinstance(mask := call.get("mask"), Mask):
        mask = mask.map_leaves(lambda atom: _last_rows_of_blocks(atom, first, rows))
        structure, leaves = mask.split()
        arrays = [cut(np.asarray(x.array), x.dims.index("q")) if "q" in x.dims else x.array for x in leaves]
        call["mask"] = structure.merge(tuple(arrays))
    elif mask is not None:
        call["mask"] = cut(mask, -2)
    for name, axis in (("bias", -2), ("q_segment_ids", -1)):
        if name in call:
            call[name] = cut(call[name], axis)
    if "q_segment_ids" in call and "kv_segment_ids" not in call:
        call["kv_segment_ids"] = case.call["q_segment_ids"]
    offset = call.get("query_offset", 0)
    reference = {name: cut(x, -2) if name == "bias" else x for name, x in case.reference.items()}
    if "score" in reference:
        reference["query_offset"] = offset + first
    mask = None if case.mask is None else cut(case.mask, -2)
    return replace(case, call=call | {"query_offset": offset + first}, reference=reference, mask=mask, q_len=rows)


def _last_rows_of_blocks(atom: Mask, first: int, rows: int) -> Mask:
    """A layout, or a choice, with a row for each query that is left: blocks of queries are counted from the call's first."""
    blocks = (first + np.arange(rows)) // getattr(atom, "block_q", 1)
    if isinstance(atom, ChosenBlocks):
        return Blocks(np.take(np.asarray(atom.choice), blocks, axis=2), 1, atom.block_kv)
    return Blocks(atom.layout[:, blocks], 1, atom.block_kv) if isinstance(atom, Blocks) else atom


def in_layout(x: Any, layout: str) -> Any:
    """An array [batch, time, heads, dim] in a layout."""
    return x if layout == "bthd" else x.swapaxes(1, 2) if layout == "bhtd" else x[0]


def _grid(q: int, kv: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(q)[:, None], np.arange(kv)[None, :]


def _spread(s: Sizes, low: int, high: int) -> np.ndarray:
    """One number a batch row, from low to high (places in a sequence of 150); the last alone for a batch of 1."""
    return np.array([s.at(n) for n in np.linspace(high, low, s.batch).astype(int)], np.int32)


def _structured(mask: Mask, visible: np.ndarray, *features: str) -> Case:
    return Case("", frozenset(features), {"mask": mask}, visible)


@_case
def full(rng: np.random.Generator, s: Sizes) -> Case:
    return Case("", frozenset(), {"causal": False})


@_case
def causal(rng: np.random.Generator, s: Sizes) -> Case:
    i, j = _grid(s.length, s.length)
    return Case("", frozenset({"causal"}), {}, j <= i)


@_case
def causal_bottom_right(rng: np.random.Generator, s: Sizes) -> Case:
    i, j = _grid(s.at(40), s.length)
    return Case(
        "", frozenset({"causal"}), {"query_offset": s.length - s.at(40)}, j <= i + s.length - s.at(40), q_len=s.at(40)
    )


@_case
def window(rng: np.random.Generator, s: Sizes) -> Case:
    i, j = _grid(s.length, s.length)
    return Case(
        "", frozenset({"sliding_window"}), {"causal": False, "sliding_window": (20, 3)}, (j >= i - 20) & (j <= i + 3)
    )


@_case
def causal_window(rng: np.random.Generator, s: Sizes) -> Case:
    i, j = _grid(s.length, s.length)
    mask = Causal() & SlidingWindow(left=20)
    return _structured(mask, (j >= i - 20) & (j <= i), "causal", "sliding_window")


@_case
def chunked(rng: np.random.Generator, s: Sizes) -> Case:
    i, j = _grid(s.length, s.length)
    return _structured(Causal() & Chunked(48), (i // 48 == j // 48) & (j <= i), "causal", "chunked")


@_case
def chunked_power_of_two(rng: np.random.Generator, s: Sizes) -> Case:
    i, j = _grid(s.length, s.length)
    return _structured(Chunked(32), i // 32 == j // 32, "chunked")


@_case
def prefix(rng: np.random.Generator, s: Sizes) -> Case:
    i, j = _grid(s.length, s.length)
    return _structured(Causal() | Prefix(s.at(37)), (j <= i) | (j < s.at(37)), "causal", "prefix")


@_case
def negated(rng: np.random.Generator, s: Sizes) -> Case:
    i, j = _grid(s.length, s.length)
    return _structured(~Causal(), j > i, "causal")  # the last row sees nothing


@_case
def mask_function(rng: np.random.Generator, s: Sizes) -> Case:
    i, j = _grid(s.length, s.length)
    return _structured(MaskFunction("conformance_skip"), (j <= i) | (j - i > 11), "mask_function")


@_case
def segment_ids(rng: np.random.Generator, s: Sizes) -> Case:
    ids = np.sort(rng.integers(0, 4, (s.batch, s.length)), axis=1).astype(np.int32)
    i, j = _grid(s.length, s.length)
    visible = (ids[:, :, None] == ids[:, None, :]) & (j <= i)
    return Case(
        "", frozenset({"causal", "segment_ids"}), {"q_segment_ids": ids, "kv_segment_ids": ids}, visible[:, None]
    )


@_case
def segment_ids_unsorted(rng: np.random.Generator, s: Sizes) -> Case:
    q, kv = (rng.integers(0, 5, (s.batch, s.length)).astype(np.int32) for _ in range(2))
    q[:, 3] = 9  # a query whose segment has no key
    visible = q[:, :, None] == kv[:, None, :]
    call = {"causal": False, "q_segment_ids": q, "kv_segment_ids": kv}
    return Case("", frozenset({"segment_ids"}), call, visible[:, None])


@_case
def kv_lengths(rng: np.random.Generator, s: Sizes) -> Case:
    lengths = _spread(s, 0, 130)  # a row without any key
    _, j = _grid(s.length, s.length)
    visible = (j[None] < lengths[:, None, None])[:, None]
    return Case("", frozenset({"kv_lengths"}), {"causal": False, "kv_lengths": lengths}, visible)


@_case
def cache(rng: np.random.Generator, s: Sizes) -> Case:
    lengths = _spread(s, 77, 130)
    i, j = _grid(5, s.length)
    visible = (j[None] <= i[None] + (lengths - 5)[:, None, None]) & (j[None] < lengths[:, None, None])
    call = {"kv_lengths": lengths, "mode": "insert"}
    return Case("", frozenset({"causal", "kv_lengths", "dynamic_query_offset"}), call, visible[:, None], q_len=5)


@_case
def one_query(rng: np.random.Generator, s: Sizes) -> Case:
    lengths = _spread(s, 3, 130)
    _, j = _grid(1, s.length)
    visible = (j[None] < lengths[:, None, None])[:, None]
    return Case("", frozenset({"kv_lengths"}), {"causal": False, "kv_lengths": lengths}, visible, q_len=1)


@_case
def positions(rng: np.random.Generator, s: Sizes) -> Case:
    q, kv = (rng.permutation(s.length)[None].repeat(s.batch, 0).astype(np.int32) for _ in range(2))
    visible = (kv[:, None, :] <= q[:, :, None]) & (kv[:, None, :] >= q[:, :, None] - 30)
    return Case("", frozenset({"positions"}), {"mask": Positions(q, kv, left=30)}, visible[:, None])


@_case
def dense_mask(rng: np.random.Generator, s: Sizes) -> Case:
    mask = rng.random((s.batch, s.heads, s.length, s.length)) < 0.4
    mask[:, :, 5] = False
    return Case("", frozenset({"dense_mask"}), {"mask": mask, "causal": False}, mask)


@_case
def dense_mask_and_causal(rng: np.random.Generator, s: Sizes) -> Case:
    mask = rng.random((s.batch, 1, 1, s.length)) < 0.6
    i, j = _grid(s.length, s.length)
    return Case("", frozenset({"dense_mask", "causal"}), {"mask": mask}, mask & (j <= i))


@_case
def dynamic_or(rng: np.random.Generator, s: Sizes) -> Case:
    ids = np.sort(rng.integers(0, 4, (s.batch, s.length)), axis=1).astype(np.int32)
    i, j = _grid(s.length, s.length)
    visible = (ids[:, :, None] == ids[:, None, :]) | (j <= i)
    mask = Causal() | SegmentIds(ids, ids)
    return Case("", frozenset({"causal", "dynamic_or"}), {"mask": mask}, visible[:, None])


@_case
def dynamic_query_offset(rng: np.random.Generator, s: Sizes) -> Case:
    offset = _spread(s, 4, 31)
    i, j = _grid(s.length, s.length)
    visible = (j[None] <= i[None] + offset[:, None, None])[:, None]
    return Case("", frozenset({"causal", "dynamic_query_offset"}), {"query_offset": offset}, visible)


@_case
def bias(rng: np.random.Generator, s: Sizes) -> Case:
    added = rng.standard_normal((s.batch, s.heads, s.length, s.length)).astype(np.float32)
    i, j = _grid(s.length, s.length)
    return Case("", frozenset({"bias", "causal"}), {"bias": added}, j <= i, {"bias": added}, ("bias",))


@_case
def bias_broadcast(rng: np.random.Generator, s: Sizes) -> Case:
    added = rng.standard_normal((1, s.heads, 1, s.length)).astype(np.float32)
    return Case("", frozenset({"bias"}), {"bias": added, "causal": False}, None, {"bias": added}, ("bias",))


@_case
def bias_of_minus_infinity(rng: np.random.Generator, s: Sizes) -> Case:
    added = np.zeros((1, 1, s.length, s.length), np.float32)
    added[..., s.at(70) :] = -np.inf
    added[:, :, 3] = -np.inf  # a row that sees nothing
    return Case("", frozenset({"bias"}), {"bias": added, "causal": False}, None, {"bias": added})


@_case
def bias_hides_all_that_is_causal(rng: np.random.Generator, s: Sizes) -> Case:
    """The keys that a row's mask leaves have a bias of -inf, later keys don't."""
    i, j = _grid(s.length, s.length)
    added = np.where((j <= i) & (i % 5 == 2), -np.inf, rng.standard_normal((s.length, s.length))).astype(np.float32)[
        None, None
    ]
    return Case("", frozenset({"bias", "causal"}), {"bias": added}, j <= i, {"bias": added})


@_case
def soft_cap(rng: np.random.Generator, s: Sizes) -> Case:
    i, j = _grid(s.length, s.length)
    call = {"logits_soft_cap": 1.5, "softmax_scale": 0.7}
    return Case("", frozenset({"logits_soft_cap", "causal"}), call, j <= i, {"soft_cap": 1.5, "scale": 0.7})


@_case
def alibi(rng: np.random.Generator, s: Sizes) -> Case:
    slopes = np.linspace(0.05, 0.4, s.heads).astype(np.float32)
    i, j = _grid(s.length, s.length)
    added = -slopes[None, :, None, None] * abs(i - j)
    return Case(
        "", frozenset({"score", "causal"}), {"score": ALiBi(tuple(map(float, slopes)))}, j <= i, {"bias": added}
    )


def _scored(score: Any, captures: dict[str, np.ndarray], visible: Any, *features: str, **call: Any) -> Case:
    """A case whose score has its arrays from the call, all of them differentiated."""
    reference = {"score": score, "captures": captures}
    names = frozenset({"score", *features})
    return Case("", names, {"score": score, **captures, **call}, visible, reference, tuple(captures))


@_case
def relative_bias(rng: np.random.Generator, s: Sizes) -> Case:
    """A table by distance and learnt slopes, with grouped heads."""
    table = rng.standard_normal((16, s.heads)).astype(np.float32)
    slopes = np.linspace(0.02, 0.2, s.heads).astype(np.float32)
    i, j = _grid(s.length, s.length)
    score = RelativeBias(buckets=T5(16, 64)) >> ALiBi()
    case = _scored(score, {"table": table, "slopes": slopes}, j <= i, "causal", "gqa")
    case.kv_heads = s.kv_heads
    return case


@_case
def forgetting(rng: np.random.Generator, s: Sizes) -> Case:
    """Forget gates, and a temperature for each head, in a window."""
    gates = {
        "log_gate": -np.abs(rng.standard_normal((s.batch, s.heads, s.length))).astype(np.float32) / 8,
        "temperature": rng.uniform(0.5, 1.5, s.heads).astype(np.float32),
    }
    i, j = _grid(s.length, s.length)
    visible = (j <= i) & (j >= i - s.at(60))
    return _scored(
        Forgetting() >> Temperature(), gates, visible, "causal", "sliding_window", sliding_window=(s.at(60), 0)
    )


@_case
def score_function(rng: np.random.Generator, s: Sizes) -> Case:
    """A registered function of everything that there is, after a cap, with the lse."""
    gain = rng.standard_normal((s.batch, s.heads, s.length)).astype(np.float32)
    score = ScoreFunction("conformance.gated", {"gain": ("batch", "heads", "kv_len")})
    case = _scored(score, {"gain": gain}, None, "logits_soft_cap", "return_lse", logits_soft_cap=3.0, causal=False)
    case.call["return_lse"] = True
    case.reference["soft_cap"] = 3.0
    return case


@_case
def sinks(rng: np.random.Generator, s: Sizes) -> Case:
    values = rng.standard_normal(s.heads).astype(np.float32)
    i, j = _grid(s.length, s.length)
    call = {"softmax_aux": values, "mask": ~Causal(4)}  # the last rows see nothing but the sinks
    return Case("", frozenset({"sinks", "causal"}), call, j > i + 4, {"sinks": values}, ("softmax_aux",))


@_case
def sinks_several(rng: np.random.Generator, s: Sizes) -> Case:
    values = rng.standard_normal((s.heads, 3)).astype(np.float32)
    return Case(
        "", frozenset({"sinks"}), {"softmax_aux": values, "causal": False}, None, {"sinks": values}, ("softmax_aux",)
    )


@_case
def sinks_of_minus_infinity(rng: np.random.Generator, s: Sizes) -> Case:
    """Sinks that are none, in all heads; the last rows see nothing at all."""
    values = np.full(s.heads, -np.inf, np.float32)
    i, j = _grid(s.length, s.length)
    call = {"softmax_aux": values, "mask": ~Causal(4)}
    return Case("", frozenset({"sinks", "causal"}), call, j > i + 4, {"sinks": values}, ("softmax_aux",))


@_case
def sinks_some_of_minus_infinity(rng: np.random.Generator, s: Sizes) -> Case:
    """Of several sinks a head all are none, or some, or no one; and the lse is asked for."""
    values = rng.standard_normal((s.heads, 3)).astype(np.float32)
    values[::2] = -np.inf
    values[1, :2] = -np.inf
    i, j = _grid(s.length, s.length)
    call = {"softmax_aux": values, "mask": ~Causal(4), "return_lse": True}
    features = frozenset({"sinks", "causal", "return_lse"})
    return Case("", features, call, j > i + 4, {"sinks": values}, ("softmax_aux",))


@_case
def sinks_per_kv_head(rng: np.random.Generator, s: Sizes) -> Case:
    values = rng.standard_normal((s.kv_heads, 2)).astype(np.float32)
    call = {"softmax_aux": values, "causal": False}
    features = frozenset({"sinks", "gqa"})
    return Case("", features, call, None, {"sinks": values}, ("softmax_aux",), kv_heads=s.kv_heads)


@_case
def gqa(rng: np.random.Generator, s: Sizes) -> Case:
    i, j = _grid(s.length, s.length)
    return Case("", frozenset({"gqa", "causal"}), {}, j <= i, kv_heads=s.kv_heads)


@_case
def mqa(rng: np.random.Generator, s: Sizes) -> Case:
    return Case("", frozenset({"gqa"}), {"causal": False}, kv_heads=1)


@_case
def value_dim(rng: np.random.Generator, s: Sizes) -> Case:
    i, j = _grid(s.length, s.length)
    return Case("", frozenset({"value_dim", "causal"}), {}, j <= i, value_dim=VALUE_DIM)


@_case
def cross(rng: np.random.Generator, s: Sizes) -> Case:
    return Case("", frozenset({"gqa"}), {"causal": False, "mask": Full()}, q_len=s.at(75), kv_heads=s.kv_heads)


@_case
def lse(rng: np.random.Generator, s: Sizes) -> Case:
    i, j = _grid(s.length, s.length)
    return Case("", frozenset({"return_lse", "causal"}), {"return_lse": True, "mask": ~Causal()}, j > i)


@_case
def weights(rng: np.random.Generator, s: Sizes) -> Case:
    i, j = _grid(s.length, s.length)
    return Case("", frozenset({"return_weights", "causal"}), {"return_weights": True}, j <= i)


def _scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """For int8 values of about 40."""
    return (rng.uniform(0.5, 1.5, shape) / 40).astype(np.float32)


@_case
def int8_kv(rng: np.random.Generator, s: Sizes) -> Case:
    """A scale for every token and head."""
    i, j = _grid(s.length, s.length)
    case = Case("", frozenset({"quantized_kv", "gqa", "causal"}), {}, j <= i, kv_heads=s.kv_heads)
    case.quantised = {"key": "int8", "value": "int8"}
    case.scales = {name: _scales(rng, s.batch, s.length, s.kv_heads, 1) for name in ("key_scale", "value_scale")}
    case.differentiate = ("key_scale", "value_scale")
    return case


@_case
def fp8_kv(rng: np.random.Generator, s: Sizes) -> Case:
    """A scale for every head; key and value of different dtypes and dims."""
    i, j = _grid(s.length, s.length)
    call = {"logits_soft_cap": 1.5, "return_lse": True}
    features = frozenset({"quantized_kv", "causal", "value_dim", "logits_soft_cap", "return_lse"})
    case = Case("", features, call, j <= i, {"soft_cap": 1.5}, value_dim=VALUE_DIM)
    case.quantised = {"key": "float8_e4m3fn", "value": "float8_e5m2"}
    case.scales = {name: 40 * _scales(rng, 1, 1, s.heads, 1) for name in ("key_scale", "value_scale")}
    case.differentiate = ("key_scale", "value_scale")
    return case


@_case
def int8_value(rng: np.random.Generator, s: Sizes) -> Case:
    """The value alone, with one scale for all."""
    case = Case("", frozenset({"quantized_kv"}), {"causal": False})
    case.quantised, case.scales = {"value": "int8"}, {"value_scale": _scales(rng, 1, 1, 1, 1)}
    case.differentiate = ("value_scale",)
    return case


@_case
def fp8_key(rng: np.random.Generator, s: Sizes) -> Case:
    """The key alone, as it stands."""
    i, j = _grid(s.length, s.length)
    case = Case("", frozenset({"quantized_kv", "gqa", "causal"}), {}, j <= i, kv_heads=s.kv_heads)
    case.quantised = {"key": "float8_e4m3fn"}
    return case


@_case
def everything(rng: np.random.Generator, s: Sizes) -> Case:
    """Every feature that can be asked together."""
    ids = np.sort(rng.integers(0, 3, (s.batch, s.length)), axis=1).astype(np.int32)
    dense = rng.random((s.batch, s.heads, s.length, s.length)) < 0.9
    added = rng.standard_normal((1, s.heads, s.length, s.length)).astype(np.float32)
    values = rng.standard_normal((s.heads, 2)).astype(np.float32)
    lengths = _spread(s, 120, 143)
    i, j = _grid(s.length, s.length)
    structure = (j <= i + 2) & (j >= i - 50) & (j[None] < lengths[:, None, None])
    visible = (structure & (ids[:, :, None] == ids[:, None, :]))[:, None] & dense
    call = {
        "mask": Causal(2) & SlidingWindow(left=50, right=None),
        "bias": added,
        "q_segment_ids": ids,
        "kv_segment_ids": ids,
        "kv_lengths": lengths,
        "softmax_aux": values,
        "logits_soft_cap": 3.0,
        "softmax_scale": 0.5,
        "return_lse": True,
        "return_weights": True,
    }
    call["mask"] = call["mask"] & Dense(dense)
    features = {
        "causal", "sliding_window", "dense_mask", "segment_ids", "kv_lengths", "bias", "sinks", "logits_soft_cap", "gqa",
        "value_dim", "return_lse", "return_weights",
    }  # fmt: skip
    return Case(
        "",
        frozenset(features),
        call,
        visible,
        {"bias": added, "sinks": values, "soft_cap": 3.0, "scale": 0.5},
        ("bias", "softmax_aux"),
        kv_heads=s.kv_heads,
        value_dim=VALUE_DIM,
    )


def _layout(rng: np.random.Generator, *heads: int, q: int, kv: int, s: Sizes) -> np.ndarray:
    """Some blocks of a size that divides nothing, for all heads or for each."""
    return rng.random((*heads, -(-s.length // q), -(-s.length // kv))) < 0.4


@_case
def blocks(rng: np.random.Generator, s: Sizes) -> Case:
    """Some blocks of queries see nothing."""
    layout = _layout(rng, q=20, kv=12, s=s)
    layout[1] = False
    i, j = _grid(s.length, s.length)
    return _structured(Causal() & Blocks(layout, 20, 12), (j <= i) & layout[i // 20, j // 12], "causal", "blocks")


@_case
def blocks_of_heads(rng: np.random.Generator, s: Sizes) -> Case:
    """A layout for each query head, beside a prefix; 64 is also a block of the kernels."""
    layout = _layout(rng, s.heads, q=64, kv=64, s=s)
    i, j = _grid(s.length, s.length)
    seen = (j <= i) & (layout[:, i // 64, j // 64] | (j < s.at(9)))
    case = _structured(Causal() & (Blocks(layout, 64, 64) | Prefix(s.at(9))), seen, "causal", "prefix", "blocks", "gqa")
    case.kv_heads = s.kv_heads
    return case


@_case
def chosen_blocks(rng: np.random.Generator, s: Sizes) -> Case:
    """A choice for each batch row and kv head: some of it is of no block, some twice there."""
    q_blocks, kv_blocks = -(-s.length // 16), -(-s.length // 32)
    chosen = rng.integers(-1, kv_blocks + 1, (s.batch, s.kv_heads, q_blocks, 3)).astype(np.int32)
    layout = (chosen[..., None, :] == np.arange(kv_blocks)[:, None]).any(-1).repeat(s.heads // s.kv_heads, 1)
    i, j = _grid(s.length, s.length)
    seen = (j <= i) & layout[:, :, i // 16, j // 32]
    case = _structured(Causal() & Blocks(chosen, 16, 32), seen, "causal", "chosen_blocks", "gqa")
    case.kv_heads = s.kv_heads
    return case


@_case
def chosen_blocks_or(rng: np.random.Generator, s: Sizes) -> Case:
    """Bools for all batch rows, under a `|`."""
    layout = rng.random((1, s.heads, -(-s.length // 30), -(-s.length // 7))) < 0.3
    i, j = _grid(s.length, s.length)
    seen = layout[:, :, i // 30, j // 7] | (j > i)
    return _structured(~Causal() | Blocks(jnp.asarray(layout), 30, 7), seen, "causal", "dynamic_or")
