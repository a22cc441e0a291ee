"""The kind of multi-head latent attention, from latents and the weights that make keys and values of them."""

from __future__ import annotations

from ..source import Subject
from . import seen
from .case import CallCase
from .kind import DTYPES, LARGE_LOGITS, TRANSFORMS, VALUES, CallParts, Kind, sized
from .lines import called, cast
from .selected import softmax_lines

__all__ = ["LATENT"]

_SCALE, _CAP = 0.5, 2.0
_QUERY_DIM = 10  # of a query's own latent
_WEIGHTS = ("w_uk", "w_uv", "w_uq")
_QUERIES = ("query_latent", "q_nope", "q_rope")


def _parts(case: CallCase, subject: Subject) -> CallParts:
    size, convention = case.sizes, subject.convention
    batch, q_len, kv_len, heads = (size[name] for name in ("batch", "q_len", "kv_len", "heads"))
    nope, rope, value, latent = (size[name] for name in ("nope_dim", "rope_dim", "value_dim", "latent_dim"))
    made = case.has("queries")  # of latents
    shapes: dict[str, tuple[int, ...]] = {
        "latent": (batch, kv_len, latent), "rope_key": (batch, kv_len, rope), "w_uk": (latent, heads, nope),
        "w_uv": (latent, heads, value),
    }  # fmt: skip
    if made:
        shapes |= {"query_latent": (batch, q_len, _QUERY_DIM), "w_uq": (_QUERY_DIM, heads, nope + rope)}
    else:
        shapes |= {"q_nope": (batch, q_len, heads, nope), "q_rope": (batch, q_len, heads, rope)}
    inputs = [f"rng = np.random.default_rng({case.seed})", "x = {}"]
    for name, shape in shapes.items():
        smaller = f" / {shape[0]} ** 0.5" if name in _WEIGHTS else ""
        drawn = f"rng.standard_normal({shape}){smaller}"
        drawn = sized(case, "large", drawn) if name in _QUERIES else drawn
        inputs += cast({name: sized(case, "denormal", drawn) if name == "w_uv" else drawn}, case.level("dtype"))
    if made:
        inputs += [
            f"angle = rng.uniform(0, 3, {(batch, q_len, rope // 2)})",
            f"q_cos, q_sin = (jnp.asarray(y, jnp.{case.level('dtype')}) for y in (np.cos(angle), np.sin(angle)))",
        ]
    inputs += seen.small_arrays(case)
    if case.has("sinks"):
        inputs.append(f"sinks = jnp.asarray(rng.standard_normal({heads}), jnp.float32)")
    left, right = seen.sides(case)
    layout = case.level("layout")
    values = {
        "left": left, "right": right, "offset": "offsets" if case.level("offset") == "rows" else seen.offset_of(case),
        "causal": not case.has("causal"), "layout": layout, "query_dim": _QUERY_DIM, "scale": _SCALE, "cap": _CAP,
        "first": "None, None" if made else "q_nope, q_rope", "pairs": case.level("queries"),
    }  # fmt: skip
    names = tuple(shapes)
    moved = {"bhtd": [f"{n} = {n}.swapaxes(1, 2)" for n in ("q_nope", "q_rope") if not made]}.get(layout, [])
    output = f"r{convention.output}" + (".swapaxes(1, 2)" if layout == "bhtd" else "")
    lse = [f"r{convention.lse_at}"] if case.has("lse") else []
    run = [
        f"{', '.join(names)} = ({{**x, **some}}[n] for n in {names})",
        *moved,
        *called(case, convention, **values),
        f"return {', '.join([output, *lse])},",
    ]
    scale = _SCALE if case.has("scale") else f"{nope + rope} ** -0.5"
    logits = (
        f'(np.einsum("bihd,bjhd->bhij", q_nope, key) + np.einsum("bihd,bjd->bhij", q_rope, a["rope_key"])) * {scale}'
    )
    expected = ["a = arrays(some)"]
    if made:
        first, second = (
            ("[..., 0::2]", "[..., 1::2]")
            if case.level("queries") == "interleaved"
            else (f"[..., :{rope // 2}]", f"[..., {rope // 2}:]")
        )
        expected += [
            'q = np.einsum("bic,chd->bihd", a["query_latent"], a["w_uq"])',
            f"q_nope, turned = q[..., :{nope}], q[..., {nope}:]",
            "cos, sin = (np.asarray(y, np.float64)[:, :, None] for y in (q_cos, q_sin))",
            f"first, second, q_rope = turned{first}, turned{second}, np.zeros(turned.shape)",
            f"q_rope{first}, q_rope{second} = first * cos - second * sin, first * sin + second * cos",
        ]
    else:
        expected.append('q_nope, q_rope = a["q_nope"], a["q_rope"]')
    expected += [
        *seen.seen_lines(case),
        "see = see[:, None]",
        'key, value = (np.einsum("bjc,chd->bjhd", a["latent"], a[n]) for n in ("w_uk", "w_uv"))',
        f"w = {f'{_CAP} * np.tanh({logits} / {_CAP})' if case.has('soft_cap') else logits}",
        *softmax_lines(case, "value"),
        f"return [out{', lse' if case.has('lse') else ''}]",
    ]
    results = ("output", *(("lse",) if case.has("lse") else ()))
    return CallParts((), tuple(inputs), tuple(run), tuple(expected), results, names)


LATENT = Kind(
    "causal, one length",
    {
        "form": {"expanded": "keys and values made for each head", "absorbed": "weights absorbed into the query"},
        "queries": {"halves": "queries made of latents, halves rotated", "interleaved": "queries made of latents, pairs rotated"},
        **seen.FACTORS,
        "scale": {"yes": "scale given"},
        "soft_cap": {"yes": "soft cap of logits"},
        "sinks": {"yes": "sinks"},
        "heads": {"one": "one head", "three": "three heads"},
        "dims": {"value": "value dim of its own", "odd": "odd dims"},
        "values": VALUES,
        "dtype": DTYPES,
        "layout": {"bhtd": "layout [batch, heads, length, dim]"},
        "gradient": {"yes": "gradient"},
        "lse": {"yes": "log-sum-exp"},
        "transform": TRANSFORMS,
    },
    seen.SIZES | {"heads": 2, "nope_dim": 8, "rope_dim": 4, "value_dim": 8, "latent_dim": 16},
    _parts,
    changes=seen.CHANGES
    | {
        "heads.one": {"heads": 1}, "heads.three": {"heads": 3}, "dims.value": {"value_dim": 12},
        "dims.odd": {"nope_dim": 5, "value_dim": 7, "latent_dim": 9},
    },
    brings={
        "window.both": {"causal": "no"}, "window.open": {"causal": "no"}, "transform.remat": {"gradient": "yes"},
    },
    rounds=LARGE_LOGITS,
    apart=(("offset", "lens"), ("lse", "gradient"), ("values", "dtype")),
    steps=(
        *seen.STEPS, {"heads": 1}, *({"nope_dim": n, "value_dim": n, "latent_dim": n} for n in (1, 2)), {"rope_dim": 2},
    ),
    asked=(
        "form", "queries", "causal", "window", "segments", "lengths", "offset", "scale", "soft_cap", "sinks", "lse", "layout",
    ),
)  # fmt: skip
