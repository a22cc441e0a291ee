"""The kinds of indexers, over arrays and over pages: which keys are selected for each query."""

from __future__ import annotations

from ..source import Subject
from . import seen, sequences
from .case import CallCase
from .kind import DTYPES, TRANSFORMS, CallParts, Factors, Kind, sized
from .lines import called, cast
from .pages import SIDES

__all__ = ["INDEXER", "PAGED_INDEXER"]

_SCALE = 0.5
_OTHERS: Factors = {
    "scale": {"yes": "scale given"},
    "top_k": {"one": "one key selected", "all": "as many as there are"},
    "ties": {"yes": "equal scores: the lower position"},
    "index_heads": {"one": "one index head"},
    "values": {"large": "large scores"},
    "dtype": DTYPES,
    "transform": {name: title for name, title in TRANSFORMS.items() if name != "remat"},
}
_SIZES = {"index_heads": 3, "dim": 8, "top_k": 3}
# ties: of a dim whose scale is a power of two, so that rounding makes no equal scores differ.
_CHANGES = {
    "top_k.one": {"top_k": 1},
    "top_k.all": {"top_k": 9},
    "index_heads.one": {"index_heads": 1},
    "ties": {"dim": 4},
}
_STEPS = tuple({"dim": n} for n in (1, 2, 4))
_INFINITE = "isn't one of as many visible keys as there have to be, ascending, then -1"
_REFERENCE = ("from attnops.verify.selection_error import index_reference, selection_error",)


def _drawn(case: CallCase, shape: tuple[int, ...]) -> str:
    """Few whole numbers, of which many scores are equal, or normal ones."""
    return f"rng.integers(-1, 2, {shape})" if case.has("ties") else f"rng.standard_normal({shape})"


def _judged(case: CallCase) -> tuple[str, ...]:
    """Lines from `got` (positions and counts) and `want` (scores, sizes of rows, which keys are visible) to how far the greatest
    score that was left out is above the least that was selected; of equal scores the positions are compared, too."""
    lines = [
        "positions, counts = (y.astype(int) for y in got)",
        "score, size, seen = want",
        "flat = lambda y: y.reshape(-1, *y.shape[score.ndim - 1 :])",
        "short = selection_error(flat(positions), counts.reshape(-1), flat(score), size.reshape(-1), flat(seen))[1]",
        "got, want, sizes = [np.array([short])], [np.zeros(1)], [np.ones(1)]",
    ]
    if case.has("ties"):
        lines += [
            f"best = np.full((*seen.shape[:-1], {case.sizes['top_k']}), -1)",
            "for at in np.ndindex(seen.shape[:-1]):",
            "    keys = np.flatnonzero(seen[at])",
            f"    chosen = np.sort(keys[np.lexsort((keys, -score[at][keys]))][: {case.sizes['top_k']}])",
            "    best[at][: len(chosen)] = chosen",
            "got, want, sizes = [*got, positions], [*want, best], [*sizes, np.ones(1)]",
        ]
    return tuple(lines)


def _results(case: CallCase) -> tuple[str, ...]:
    return ("selection", "positions") if case.has("ties") else ("selection",)


def _over_arrays(case: CallCase, subject: Subject) -> CallParts:
    batch, q_len, kv_len, heads, dim = (case.sizes[n] for n in ("batch", "q_len", "kv_len", "index_heads", "dim"))
    dtype, quantised = case.level("dtype"), case.has("quantised")
    inputs = [f"rng = np.random.default_rng({case.seed})", "x = {}"]
    queries = sized(case, "large", _drawn(case, (batch, q_len, heads, dim)))
    inputs += cast({"q": queries, "w": _drawn(case, (batch, q_len, heads))}, dtype)
    drawn = f"rng.integers(-127, 128, {(batch, kv_len, dim)})" if quantised else _drawn(case, (batch, kv_len, dim))
    inputs += cast({"k": drawn}, "int8" if quantised else dtype)
    if quantised:
        inputs.append(f"key_scale = np.float32(rng.uniform(0.01, 0.03, {(batch, kv_len)}))")
    inputs += seen.small_arrays(case)
    left, right = seen.sides(case)
    values = {
        "left": left,
        "right": right,
        "offset": "offsets" if case.level("offset") == "rows" else seen.offset_of(case),
    }
    run = [
        'q, k, w = ({**x, **some}[n] for n in ("q", "k", "w"))',
        *called(case, subject.convention, **values, scale=_SCALE),
        "return r.positions, r.counts",
    ]
    scale = _SCALE if case.has("scale") else dim**-0.5
    expected = [
        "a = arrays(some)",
        f'k = a["k"]{" * key_scale[..., None]" if quantised else ""}',
        f'found = [index_reference(q, y, w, {scale}) for q, y, w in zip(a["q"], k, a["w"])]',
        *seen.seen_lines(case),
        "return np.stack([y for y, _ in found]), np.stack([y for _, y in found]), see",
    ]
    return CallParts(_REFERENCE, tuple(inputs), tuple(run), tuple(expected), _results(case), (), _judged(case))


def _over_pages(case: CallCase, subject: Subject) -> CallParts:
    heads, dim = case.sizes["index_heads"], case.sizes["dim"]
    of_step, lengths = sequences.sequences(case)
    extra = sequences.paged_sizes(case)
    tokens, longest = extra["tokens"], max(lengths)
    dtype = case.level("dtype")
    inputs = [f"rng = np.random.default_rng({case.seed})", "x = {}", *sequences.paged_lines(case)]
    queries = sized(case, "large", _drawn(case, (tokens, heads, dim)))
    inputs += cast(
        {"q": queries, "k": _drawn(case, (sum(lengths), dim)), "w": _drawn(case, (tokens, heads))},
        dtype,
    )  # fmt: skip
    if case.sizes["spare"]:
        inputs += [f'x["{n}"] = x["{n}"].at[{sum(of_step)}:].set({case.junk})' for n in ("q", "w")]
    left, right = SIDES.get(case.level("window"), (None, None))
    written = case.level("update") != "none"
    values = extra | {"left": left, "right": right, "scale": _SCALE, "k_new": "k[new]" if written else None}
    run = [
        'q, k, w = ({**x, **some}[n] for n in ("q", "k", "w"))',
        *called(case, subject.convention, **values),
        "return r.positions, r.counts",
    ]
    scale = _SCALE if case.has("scale") else dim**-0.5
    terms = ["(j < n)"] + ([] if case.has("causal") else ["(j <= i)"])
    terms += ([] if left is None else [f"(j >= i - {left})"]) + ([] if right is None else [f"(j <= i + {right})"])
    expected = [
        "a = arrays(some)",
        f"score, size, seen = np.zeros(({tokens}, {longest})), np.zeros({tokens}), np.zeros(({tokens}, {longest}), bool)",
        "for s, (n, m) in enumerate(zip(kv_lens, q_lens)):",
        "    rows, keys = slice(cu_q_lens[s], cu_q_lens[s + 1]), slice(ends[s], ends[s + 1])",
        f"    i, j = np.arange(n - m, n)[:, None], np.arange({longest})",
        f'    score[rows, :n], size[rows] = index_reference(a["q"][rows], a["k"][keys], a["w"][rows], {scale})',
        f"    seen[rows] = {' & '.join(terms)}",
        "return score, size, seen",
    ]
    return CallParts(_REFERENCE, tuple(inputs), tuple(run), tuple(expected), _results(case), (), _judged(case))


INDEXER = Kind(
    "causal, one length",
    {**seen.FACTORS, "quantised": {"int8": "int8 keys with a scale"}, **_OTHERS},
    seen.SIZES | _SIZES,
    _over_arrays,
    changes=seen.CHANGES | _CHANGES,
    brings={"window.both": {"causal": "no"}, "window.open": {"causal": "no"}},
    apart=(("offset", "lens"), ("ties", "dtype"), ("ties", "quantised")),
    steps=(*seen.STEPS, *_STEPS),
    asked=("causal", "window", "segments", "lengths", "offset", "quantised", "scale"),
    infinite=_INFINITE,
)
PAGED_INDEXER = Kind(
    "a causal step, rows of several lengths",
    {
        "rows": sequences.ROWS,
        "unused": sequences.UNUSED,
        "page": {"yes": "pages of one token"},
        "update": {"none": "keys written before the step"},
        "causal": seen.FACTORS["causal"],
        "window": seen.FACTORS["window"],
        **_OTHERS,
    },
    sequences.SIZES | _SIZES,
    _over_pages,
    changes=sequences.CHANGES | _CHANGES,
    brings={"window.both": {"causal": "no"}, "window.open": {"causal": "no"}},
    apart=(("ties", "dtype"),),
    steps=(*sequences.STEPS, *_STEPS),
    asked=("update", "causal", "window", "scale"),
    infinite=_INFINITE,
)
