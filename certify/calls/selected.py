"""The kind of attention to keys that were selected for each query."""

from __future__ import annotations

from ..source import Subject
from . import seen
from .case import CallCase
from .kind import DTYPES, LARGE_LOGITS, TRANSFORMS, VALUES, CallParts, Kind, sized
from .lines import called, cast

__all__ = ["SELECTED", "softmax_lines"]

_SCALE, _CAP = 0.5, 2.0


def softmax_lines(case: CallCase, value: str) -> list[str]:
    """Lines from logits `w` [batch, heads, q, kv] and bool `see`, which broadcasts, to `out` and `lse`. value: [batch, kv,
    heads, dim]."""
    sinks = "np.asarray(sinks, float)[:, None, None]" if case.has("sinks") else "-np.inf"
    return [
        "w = np.where(see, w, -np.inf)",
        f"top = np.maximum(np.maximum(w.max(-1, keepdims=True), {sinks}), -1e300)",
        f"total = np.exp(w - top).sum(-1, keepdims=True) + np.exp({sinks} - top)",
        f'out = np.einsum("bhij,bjhd->bihd", np.exp(w - top) / np.maximum(total, 1e-300), {value})',
        "lse = np.where(total > 0, np.log(np.maximum(total, 1e-300)) + top, -np.inf)[..., 0]",
    ]


def _parts(case: CallCase, subject: Subject) -> CallParts:
    size, convention = case.sizes, subject.convention
    batch, q_len, kv_len, kv, dim = (size[name] for name in ("batch", "q_len", "kv_len", "kv_heads", "dim"))
    heads = kv * size["group"]
    shapes = {
        "q": (batch, q_len, heads, dim),
        "k": (batch, kv_len, kv, dim),
        "v": (batch, kv_len, kv, size["value_dim"]),
    }
    inputs = [f"rng = np.random.default_rng({case.seed})", "x = {}"]
    drawn = {name: f"rng.standard_normal({shape})" for name, shape in shapes.items()}
    drawn |= {"q": sized(case, "large", drawn["q"]), "v": sized(case, "denormal", drawn["v"])}
    inputs += cast(drawn, case.level("dtype"))
    count = min(size["selected"], kv_len)
    inputs += [
        f"selected = np.argsort(rng.random({(batch, q_len, kv_len)}))[..., :{count}].astype(np.int32)  # in any order",
        *(["selected[:, ::2, 1:] = -1  # unused"] if case.level("unused") == "yes" and count > 1 else []),
        *([f"selected[0, {q_len // 2}] = -1"] if case.level("unused") == "all" else []),
        *seen.small_arrays(case),
    ]
    if case.has("sinks"):
        inputs.append(f"sinks = jnp.asarray(rng.standard_normal({heads}), jnp.float32)")
    left, right = seen.sides(case)
    offset = "offsets" if case.level("offset") == "rows" else seen.offset_of(case)
    layout = case.level("layout")
    values = {"left": left, "right": right, "offset": offset, "causal": not case.has("causal"), "layout": layout}
    swapped = ".swapaxes(1, 2)" if layout == "bhtd" else ""
    lse = [f"r{convention.lse_at}"] if case.has("lse") else []
    run = [
        f'q, k, v = ({{**x, **some}}[n]{swapped} for n in ("q", "k", "v"))',
        *called(case, convention, **values, scale=_SCALE, cap=_CAP),
        f"return {', '.join([f'r{convention.output}{swapped}', *lse])},",
    ]
    scale = _SCALE if case.has("scale") else f"{dim} ** -0.5"
    group = size["group"]
    logits = f'np.einsum("bihd,bjhd->bhij", a["q"], np.repeat(a["k"], {group}, 2)) * {scale}'
    logits = f"{_CAP} * np.tanh({logits} / {_CAP})" if case.has("soft_cap") else logits
    expected = [
        "a = arrays(some)",
        *seen.seen_lines(case),
        "see = (see & (selected[..., None] == j).any(2))[:, None]",
        f"w = {logits}",
        *softmax_lines(case, f'np.repeat(a["v"], {group}, 2)'),
        f"return [out{', lse' if case.has('lse') else ''}]",
    ]
    results = ("output", *(("lse",) if case.has("lse") else ()))
    return CallParts((), tuple(inputs), tuple(run), tuple(expected), results, ("q", "k", "v"))


SELECTED = Kind(
    "causal, one length",
    {
        **seen.FACTORS,
        "unused": {"yes": "fewer keys for some queries", "all": "a query for which nothing is selected"},
        "scale": {"yes": "scale given"},
        "soft_cap": {"yes": "soft cap of logits"},
        "sinks": {"yes": "sinks"},
        "heads": {"gqa": "grouped heads, 2 by 2", "groups_of_3": "grouped heads, 3 by 3", "mqa": "one key head"},
        "dims": {"value": "value dim of its own", "odd": "odd head dim"},
        "values": VALUES,
        "dtype": DTYPES,
        "layout": {"bhtd": "layout [batch, heads, length, dim]"},
        "gradient": {"yes": "gradient"},
        "lse": {"yes": "log-sum-exp"},
        "transform": TRANSFORMS,
    },
    seen.SIZES | {"kv_heads": 2, "group": 1, "dim": 8, "value_dim": 8, "selected": 4},
    _parts,
    changes=seen.CHANGES
    | {
        "heads.gqa": {"group": 2}, "heads.groups_of_3": {"group": 3}, "heads.mqa": {"group": 4, "kv_heads": 1},
        "dims.value": {"value_dim": 12}, "dims.odd": {"dim": 5, "value_dim": 5},
    },
    brings={
        "window.both": {"causal": "no"}, "window.open": {"causal": "no"}, "transform.remat": {"gradient": "yes"},
    },
    rounds=LARGE_LOGITS,
    apart=(("offset", "lens"), ("lse", "gradient"), ("values", "dtype")),
    steps=(*seen.STEPS, {"kv_heads": 1}, {"selected": 1}, {"selected": 2}, *({"dim": n, "value_dim": n} for n in (1, 2, 4))),
    asked=("causal", "window", "segments", "lengths", "offset", "scale", "soft_cap", "sinks", "lse"),
)  # fmt: skip
