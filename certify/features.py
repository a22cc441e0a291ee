"""What a certificate asks: each feature is a level of a factor. A case has one level of every factor, the first by default."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "DEAD",
    "FACTORS",
    "FEATURES",
    "Feature",
    "Levels",
    "default_levels",
    "feature",
    "features_of",
    "implied",
    "valid",
]

Levels = dict[str, str]  # factor -> level


class Feature(NamedTuple):
    """A level of a factor that isn't the default, with its row's words in a certificate."""

    factor: str
    level: str
    title: str

    @property
    def name(self) -> str:
        """`window.left`, or the factor alone where it has one level."""
        return self.factor if self.level == "yes" else f"{self.factor}.{self.level}"


_TABLE: dict[str, dict[str, str]] = {
    "causal": {
        "yes": "causal, one length",
        "start": "causal, fewer queries than keys, aligned at the start",
        "end": "causal, fewer queries than keys, aligned at the end",
        "offset": "causal, the queries' position given",
    },
    "window": {
        "left": "window that looks back",
        "both": "window on both sides",
        "open": "window with a limit on one side",
    },
    "segments": {"yes": "segment ids", "negative": "segment ids of -1"},
    "lengths": {"yes": "key lengths by row", "zero": "a key length of 0"},
    "mask": {"padding": "mask of keys", "dense": "mask by head", "dead": "mask with a row that sees no key"},
    "bias": {
        "yes": "bias",
        "broadcast": "bias that broadcasts",
        "infinite": "bias of -inf",
        "dead": "bias of -inf in a whole row",
    },
    "alibi": {"yes": "ALiBi slopes"},
    "score": {
        "temperature": "temperature by head",
        "relative": "bias by distance, from a table",
        "forgetting": "forget gates",
    },
    "scale": {"yes": "scale given"},
    "soft_cap": {"yes": "soft cap of logits"},
    "sinks": {"yes": "sinks"},
    "heads": {"gqa": "grouped heads, 2 by 2", "groups_of_3": "grouped heads, 3 by 3", "mqa": "one key head"},
    "dims": {"value": "value dim of its own", "odd": "odd head dim"},
    "sizes": {"odd": "odd lengths", "cross": "fewer queries than keys", "one": "one query"},
    "values": {"large": "large logits", "denormal": "denormal values"},
    "dtype": {"bfloat16": "bfloat16", "float16": "float16"},
    "layout": {"bhtd": "layout [batch, heads, length, dim]", "thd": "packed layout [length, heads, dim]"},
    "gradient": {"yes": "gradient"},
    "lse": {"yes": "log-sum-exp"},
    "transform": {
        "eager": "outside jit",
        "vmap": "vmap",
        "scan": "scan",
        "remat": "remat",
        "shard_map": "shard_map",
        "x64": "x64 enabled",
        "debug_nans": "debug_nans",
    },
}
_DEFAULTS = {"dtype": "float32", "layout": "bthd", "transform": "jit", "values": "normal", "sizes": "even"}
FEATURES: tuple[Feature, ...] = tuple(
    Feature(factor, level, title) for factor, levels in _TABLE.items() for level, title in levels.items()
)
FACTORS: dict[str, tuple[str, ...]] = {
    factor: (_DEFAULTS.get(factor, "no"), *levels) for factor, levels in _TABLE.items()
}
DEAD = ("mask.dead", "bias.dead", "lengths.zero")  # features in which a row sees no key
_BY_NAME = {one.name: one for one in FEATURES}


def default_levels() -> Levels:
    """Plain attention: every factor at its default."""
    return {factor: levels[0] for factor, levels in FACTORS.items()}


def feature(name: str) -> Feature | None:
    """The feature of a name, None if there is none."""
    return _BY_NAME.get(name)


def features_of(levels: Levels) -> tuple[Feature, ...]:
    """The features of a case, in the table's order."""
    return tuple(one for one in FEATURES if levels[one.factor] == one.level)


def implied(levels: Levels) -> frozenset[str]:
    """Factors whose levels another one brings with it, so that they aren't what a case is about."""
    brought = {"sizes"} if levels["causal"] in ("start", "end", "offset") else set()
    brought |= {"causal"} if levels["score"] == "forgetting" else set()
    brought |= {"gradient"} if levels["transform"] == "remat" else set()
    return frozenset(brought | ({"segments"} if levels["layout"] == "thd" else set()))


def valid(levels: Levels) -> bool:
    """Whether the levels can stand in one case; what is left out has no meaning, or a meaning that nobody declares."""
    aligned = levels["causal"] in ("start", "end", "offset")
    placed = any(levels[factor] != "no" for factor in ("causal", "window", "alibi"))
    placed = placed or levels["score"] in ("relative", "forgetting")
    shorter = levels["sizes"] in ("cross", "one")
    if aligned != (shorter and placed):  # positions of fewer queries than keys have to be said
        return False
    if levels["layout"] == "thd" and (levels["segments"] == "no" or levels["lengths"] != "no" or shorter):
        return False
    if levels["segments"] != "no" and shorter:
        return False
    if levels["score"] != "no" and levels["alibi"] != "no":  # whose order is another thing to declare
        return False
    if levels["score"] == "forgetting" and levels["causal"] == "no":
        return False
    if levels["lse"] == "yes" and (levels["gradient"] == "yes" or levels["transform"] not in ("jit", "eager", "x64")):
        return False
    if levels["transform"] == "remat" and levels["gradient"] == "no":
        return False
    if levels["values"] == "denormal" and levels["dtype"] != "float32":
        return False
    # A row that sees no key is judged alone: what a library says of it holds for one cause at a time.
    dead = [levels["mask"] == "dead", levels["bias"] == "dead", levels["lengths"] == "zero"]
    return sum(dead) <= 1
