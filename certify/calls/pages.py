"""The kind of steps of attention over pages: a ragged batch of chunks and single tokens, keys and values in a paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..source import Subject
from .case import CallCase
from .kind import DTYPES, LARGE_LOGITS, TRANSFORMS, VALUES, CallParts, Kind, sized
from .lines import called, cast
from .sequences import CHANGES, ROWS, SIZES, STEPS, UNUSED, paged_lines, paged_sizes, sequences

__all__ = ["PAGES", "SIDES"]

SIDES = {"left": (2, 0), "both": (2, 1), "open": (1, None)}  # of a window
_SCALE, _CAP, _CHUNK, _SELECTED = 0.5, 2.0, 3, 3


def _parts(case: CallCase, subject: Subject) -> CallParts:
    size, extra = case.sizes, paged_sizes(case)
    kv, heads, dim = size["kv_heads"], size["kv_heads"] * size["group"], size["dim"]
    tokens, total = extra["tokens"], sum(sequences(case)[1])
    left, right = SIDES.get(case.level("window"), (None, None))
    latent, quantised = case.has("latent"), case.has("quantised")
    drawn = "np.clip(np.round(40 * rng.standard_normal({})), -127, 127)" if quantised else "rng.standard_normal({})"
    stored = {"k": drawn.format((total, kv, dim))}
    if not latent:
        stored["v"] = sized(case, "denormal", drawn.format((total, kv, size["value_dim"])))
    inputs = [f"rng = np.random.default_rng({case.seed})", "x = {}", *paged_lines(case)]
    inputs += cast({"q": sized(case, "large", f"rng.standard_normal({(tokens, heads, dim)})")}, case.level("dtype"))
    inputs += cast(stored, "int8" if quantised else case.level("dtype"))
    if size["spare"]:
        inputs.append(f'x["q"] = x["q"].at[{tokens - size["spare"]}:].set({case.junk})')
    inputs += _more(case, heads, kv, total)
    written = case.level("update") != "none"
    values: dict[str, Any] = extra | {
        "heads": heads, "left": left, "right": right, "causal": not case.has("causal"), "scale": _SCALE, "cap": _CAP,
        "chunk": _CHUNK, "k_new": "k[new]" if written else None, "v_new": "v[new]" if written and not latent else None,
        "v_old": None if latent else "v[old]", "insert": ", softmax_scale=1.0" if latent else "",
        "scales_new": ", **scales(new)" if written and quantised else "",
    }  # fmt: skip
    names = ("q", "k") if latent else ("q", "k", "v")
    taken = f"{', '.join(names)} = ({{**x, **some}}[n] for n in {names})"
    output = subject.convention.output
    results = [f"r{output}", *([f"r{subject.convention.lse_at}"] if case.has("lse") else [])]
    run = [taken, *called(case, subject.convention, **values), f"return {', '.join(results)},"]
    return CallParts(
        (), tuple(inputs), tuple(run), tuple(_expected(case, left, right, values)),
        ("outputs", *(("lse",) if case.has("lse") else ())),
    )  # fmt: skip


def _more(case: CallCase, heads: int, kv: int, total: int) -> list[str]:
    """The arrays that features have, and `scales`: of quantised keys and values at some places."""
    of_step, lengths = sequences(case)
    tokens = paged_sizes(case)["tokens"]
    padding = f"+ [[0, 0]] * {case.sizes['spare']}" if case.sizes["spare"] else ""
    lines = []
    if case.has("quantised"):
        lines += [
            f"k_scale, v_scale = (np.float32(rng.uniform(0.01, 0.03, {(total, kv)})) for _ in range(2))",
            "scales = lambda at: dict(key_scale=k_scale[at], value_scale=v_scale[at])",
        ]
    else:
        lines.append("scales = lambda at: {}")
    if case.has("sinks"):
        lines.append(f"sinks = jnp.asarray(rng.standard_normal({heads}), jnp.float32)")
    if case.level("score") == "alibi":
        lines.append(f"slopes = jnp.asarray({[2.0 ** -(1 + n) for n in range(heads)]}, jnp.float32)")
    if case.level("score") == "temperature":
        lines.append(f"temperature = jnp.asarray(rng.uniform(0.5, 1.5, {heads}), jnp.float32)")
    if case.level("score") == "relative":
        lines.append(f"bias_table = jnp.asarray(rng.standard_normal({(6, heads)}), jnp.float32)")
    first = "n - m + np.arange(m)"
    if case.has("spans"):  # of two tokens, from the step's first on
        lines += [
            f"place = np.concatenate([{first} for n, m in zip(kv_lens, q_lens)])[:, None]",
            "begin = np.concatenate([n - m + np.arange(m) // 2 * 2 for n, m in zip(kv_lens, q_lens)])[:, None]",
            "last = np.repeat(kv_lens, q_lens)[:, None]",
            f"spans = np.array(np.concatenate([begin, np.minimum(begin + 2, last)], 1).tolist() {padding}, np.int32)",
        ]
    if case.has("prefix"):
        given = [min(3, n) for n in lengths] + [2**30] * case.sizes["spare_rows"]
        lines.append(f"prefix = np.array({given}, np.int32)")
    if case.has("drafts"):
        most = max(of_step)
        parents = [max(0, (n - 1) // 2) for n in range(most)]
        tree = [[0] * most for _ in range(most)]
        for n in range(most):
            if n:
                tree[n] = list(tree[parents[n]])
            tree[n][n] = 1
        rows = paged_sizes(case)["table_rows"]
        lines += [
            f"path = np.array({tree}, bool)  # a draft, and the drafts that it follows",
            f"own = [np.arange({most}) < m for m in [*q_lens] + [0] * {rows - len(of_step)}]",
            "tree = np.stack([path & there & there[:, None] for there in own])",
        ]
    if case.has("selected"):
        lines += [
            f"selected = np.full(({tokens}, {_SELECTED}), -1, np.int32)",
            "for t, n in enumerate(np.concatenate([n - m + np.arange(m) for n, m in zip(kv_lens, q_lens)])):",
            f"    selected[t, : min({_SELECTED}, n + 1)] = rng.choice(n + 1, min({_SELECTED}, n + 1), replace=False)",
        ]
    if case.has("positions"):
        lines.append(f"positions = np.arange({tokens}, dtype=np.int32) * 700")
    return lines


def _expected(case: CallCase, left: int | None, right: int | None, values: Mapping[str, Any]) -> list[str]:
    size = case.sizes
    heads, group = size["kv_heads"] * size["group"], size["group"]
    tokens = values["tokens"]
    scales = [
        'k, v = a["k"] * k_scale[..., None], a["v"] * v_scale[..., None]'
        if case.has("quantised")
        else f'k, v = a["k"], a["k"][..., :{size["value_dim"]}]'
        if case.has("latent")
        else 'k, v = a["k"], a["v"]'
    ]
    see = []
    if not case.has("causal"):
        see.append("(j <= i)")
    if left is not None:
        see.append(f"(j >= i - {left})")
    if right is not None:
        see.append(f"(j <= i + {right})")
    if case.has("chunks"):
        see.append(f"(j // {_CHUNK} == i // {_CHUNK})")
    lines = [
        "a = arrays(some)",
        *scales,
        f"out, lse = np.zeros(({tokens}, {heads}, {size['value_dim']})), np.full(({tokens}, {heads}), -np.inf)",
        "for s, (n, m) in enumerate(zip(kv_lens, q_lens)):",
        "    rows, keys = slice(cu_q_lens[s], cu_q_lens[s + 1]), slice(ends[s], ends[s + 1])",
        f"    K, V = (np.repeat(y[keys], {group}, 1) for y in (k, v))",
        "    i, j = np.arange(n - m, n)[:, None], np.arange(n)",
        f"    see = {' & '.join(see) if see else 'np.ones((m, n), bool)'}",
    ]
    if case.has("spans"):
        lines.append("    see = see | (j >= spans[rows, :1]) & (j < spans[rows, 1:])")
    if case.has("prefix"):
        lines.append("    see = see | (i < prefix[s]) & (j < prefix[s])")
    if case.has("drafts"):
        lines.append("    see = np.concatenate([np.ones((m, n - m), bool), tree[s][:m, :m]], 1)")
    if case.has("selected"):
        lines.append("    see = see & (selected[rows, :, None] == j).any(1)")
    scale = _SCALE if case.has("scale") else f"{size['dim']} ** -0.5"
    logits = f'np.einsum("ihd,jhd->hij", a["q"][rows], K) * {scale}'
    if case.has("soft_cap"):
        logits = f"{_CAP} * np.tanh({logits} / {_CAP})"
    at = "positions[rows][:, None]" if case.has("positions") else "i"
    logits += {
        "alibi": " - np.asarray(slopes)[:, None, None] * abs(i - j)",
        "temperature": " * np.asarray(temperature)[:, None, None]",
        "relative": " + np.moveaxis(np.asarray(bias_table)[np.clip(j - i, -3, 2) + 3], -1, 0)",
        "position": f" * (1 + 0.1 * np.log1p(np.floor((1 + {at}) / 4)))",
    }.get(case.level("score"), "")
    sinks = "np.asarray(sinks, float)[:, None, None]" if case.has("sinks") else "-np.inf"
    return [
        *lines,
        f"    w = np.where(see, {logits}, -np.inf)",
        f"    top = np.maximum(np.maximum(w.max(-1, keepdims=True), {sinks}), -1e300)",
        f"    total = np.exp(w - top).sum(-1, keepdims=True) + np.exp({sinks} - top)",
        '    out[rows] = np.einsum("hij,jhd->ihd", np.exp(w - top) / np.maximum(total, 1e-300), V)',
        "    lse[rows] = np.where(total > 0, np.log(np.maximum(total, 1e-300)) + top, -np.inf)[..., 0].T",
        f"return [out{', lse' if case.has('lse') else ''}]",
    ]


PAGES = Kind(
    "a causal step, rows of several lengths",
    {
        "rows": ROWS,
        "unused": UNUSED,
        "page": {"yes": "pages of one token"},
        "update": {"fused": "keys written with the attention", "none": "keys written before the step"},
        "causal": {"no": "not causal"},
        "window": {"left": "window that looks back", "both": "window on both sides", "open": "window with a limit on one side"},
        "chunks": {"yes": "chunks of positions"},
        "spans": {"yes": "spans that see one another"},
        "prefix": {"yes": "prefix lengths"},
        "drafts": {"yes": "a tree of drafts"},
        "selected": {"yes": "selected keys"},
        "score": {
            "alibi": "ALiBi slopes", "temperature": "temperature by head", "relative": "bias by distance, from a table",
            "position": "temperature by position",
        },
        "positions": {"yes": "positions given"},
        "scale": {"yes": "scale given"},
        "soft_cap": {"yes": "soft cap of logits"},
        "sinks": {"yes": "sinks"},
        "heads": {"gqa": "grouped heads, 2 by 2", "groups_of_3": "grouped heads, 3 by 3", "mqa": "one key head"},
        "dims": {"value": "value dim of its own", "odd": "odd head dim"},
        "latent": {"yes": "values are the first numbers of their keys"},
        "quantised": {"int8": "int8 pages, a scale for each token and head"},
        "layout_of_pages": {name: f"pages of layout {name}" for name in ("heads", "joined", "interleaved", "packed")},
        "values": VALUES,
        "dtype": DTYPES,
        "lse": {"yes": "log-sum-exp"},
        "transform": {name: title for name, title in TRANSFORMS.items() if name != "remat"},
    },
    SIZES | {"kv_heads": 2, "group": 1, "dim": 8, "value_dim": 8},
    _parts,
    changes=CHANGES
    | {
        "heads.gqa": {"group": 2}, "heads.groups_of_3": {"group": 3}, "heads.mqa": {"group": 4, "kv_heads": 1},
        "dims.value": {"value_dim": 16}, "dims.odd": {"dim": 5, "value_dim": 5},
        "latent": {"kv_heads": 1, "group": 2, "dim": 12, "value_dim": 8},
    },
    brings={
        "window.both": {"causal": "no"}, "window.open": {"causal": "no"}, "positions": {"score": "position"},
        "latent": {"scale": "yes"},  # which the latents don't show
    },
    apart=(
        *(("drafts", name) for name in ("causal", "window", "chunks", "spans", "prefix", "selected", "score", "positions")),
        *(("latent", name) for name in ("heads", "dims", "quantised", "layout_of_pages")), ("layout_of_pages", "dims"),
        ("quantised", "layout_of_pages"), ("update", "quantised"),
        ("values", "dtype"), ("values.denormal", "latent"), ("values.denormal", "quantised"),
    ),
    rounds=LARGE_LOGITS,
    steps=(*STEPS, {"kv_heads": 1}, *({"dim": n, "value_dim": n} for n in (1, 2, 4))),
    asked=(
        "update", "causal", "window", "chunks", "spans", "prefix", "drafts", "selected", "score", "positions", "scale",
        "soft_cap", "sinks", "latent", "quantised", "layout_of_pages", "lse",
    ),
)  # fmt: skip
