"""Which cases a certificate runs: each feature alone, without and with a gradient, and then a covering set of pairs."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from .case import Case, made
from .convention import Convention
from .covering import covering
from .features import FACTORS, FEATURES, Feature, Levels, default_levels, features_of, valid

__all__ = ["alone", "fits", "inexpressible", "paired"]

_DRAWN = 2000  # rows of levels that pairs are chosen from


def inexpressible(one: Feature, convention: Convention) -> str | None:
    """Why a convention can't say a feature; None if it can."""
    c, factor, level = convention, one.factor, one.level
    why = c.cannot.get(one.name) or c.cannot.get(factor)
    if why is not None:
        return why
    lacks = {
        "causal": c.causal is None and "no argument for it", "window": c.window is None and "no argument for it",
        "segments": c.segments is None and "no argument for it", "lengths": c.kv_lengths is None and "no argument for it",
        "mask": c.mask is None and "no argument for it", "bias": c.bias is None and "no argument for it",
        "alibi": c.alibi is None and "no argument for it",
        "score": getattr(c, level, "") is None and "no argument for it", "scale": c.scale is None and "no argument for it",
        "soft_cap": c.soft_cap is None and "no argument for it", "sinks": c.sinks is None and "no argument for it",
        "lse": c.lse is None and "not returned", "gradient": not c.gradient and "not differentiable",
        "heads": c.shared_heads is None and "as many key heads as query heads are wanted",
        "dims": level == "value" and not c.value_dim and "values of the keys' head dim are wanted",
        "layout": level not in c.layouts and "another layout is wanted",
        "transform": c.framework == "torch" and level != "eager" and "not a function of JAX arrays",
    }.get(factor)  # fmt: skip
    if lacks:
        return lacks
    if factor == "causal" and level != "yes" and level not in c.aligned:
        return "the argument places the queries elsewhere" if c.aligned else "not documented where the queries stand"
    if factor == "window" and level not in c.window_sides:
        return "the argument has other sides"
    if factor == "mask" and {"dead": "dense"}.get(level, level) not in c.masks:
        return "masks of another shape are wanted"
    if factor == "bias" and level != "dead" and level not in c.biases:
        return "a bias of another shape is wanted"
    return None


def _levels(convention: Convention, changes: Levels) -> Levels:
    """Levels with what a convention needs beside them."""
    levels = default_levels() | changes
    if "bthd" not in convention.layouts and "layout" not in changes:
        levels["layout"] = next(iter(convention.layouts))
    if convention.framework == "torch":
        levels["transform"] = "eager"
    if levels["window"] != "no" and convention.window_needs_causal and levels["causal"] == "no":
        levels["causal"] = "yes"
    if levels["layout"] == "thd" and levels["segments"] == "no":
        levels["segments"] = "yes"
    if levels["score"] == "forgetting" and levels["causal"] == "no":
        levels["causal"] = "yes"
    if levels["transform"] == "remat":
        levels["gradient"] = "yes"
    if levels["causal"] in ("start", "end", "offset") and levels["sizes"] not in ("cross", "one"):
        levels["sizes"] = "cross"
    return levels


def fits(levels: Levels, convention: Convention) -> bool:
    """Whether the levels can stand in one case of this convention."""
    default = default_levels()
    return valid(levels) and not any(
        levels[one] != default[one] and levels[other] != default[other] for one, other in convention.apart
    )


def _made(convention: Convention, levels: Levels, seed: int) -> Case:
    return made(levels, seed, convention.length_step, convention.dim_step)


def alone(
    convention: Convention, features: Collection[Feature], seed: int, *, quick: bool
) -> Iterator[tuple[Feature | None, Case]]:
    """Plain attention (None), and each feature beside nothing else, or as little as it needs; again with its gradient.

    quick: with a gradient, or without, in turn.
    """
    differentiable = inexpressible(next(one for one in FEATURES if one.factor == "gradient"), convention) is None
    yield None, _made(convention, _levels(convention, {}), seed)
    for number, one in enumerate(FEATURES):
        if one not in features:
            continue
        levels = _levels(convention, {one.factor: one.level})
        with_gradient = levels | {"gradient": "yes"}
        both = levels["gradient"] == "no" and differentiable and valid(with_gradient)
        if not (quick and both and number % 2):
            yield one, _made(convention, levels, seed + number)
        if both and not (quick and number % 2 == 0):
            yield one, _made(convention, with_gradient, seed + number)


def paired(convention: Convention, features: Collection[Feature], seed: int, most: int) -> list[Case]:
    """At most so many cases in which pairs of these features meet, those that bring most new pairs first."""
    rng = np.random.default_rng([seed, 29])
    kept = {(one.factor, one.level) for one in features}
    base = _levels(convention, {})
    choices = {
        factor: [base[factor], *(level for level in levels if (factor, level) in kept and level != base[factor])]
        for factor, levels in FACTORS.items()
    }
    rows: dict[tuple[str, ...], None] = {}
    for _ in range(_DRAWN):
        drawn = {
            factor: str(levels[int(rng.integers(len(levels)))]) if rng.random() < 0.45 else levels[0]
            for factor, levels in choices.items()
        }
        levels = _levels(
            convention, {factor: level for factor, level in drawn.items() if level != default_levels()[factor]}
        )
        if (
            levels != base
            and fits(levels, convention)
            and all((one.factor, one.level) in kept or base[one.factor] == one.level for one in features_of(levels))
        ):
            rows[tuple(levels.values())] = None
    if len(rows) < 2:
        return []
    chosen = covering(list(rows), 2)
    if most < len(chosen):  # those with most features meet most pairs
        chosen = sorted(chosen, key=lambda row: -sum(a != b[0] for a, b in zip(row, FACTORS.values(), strict=True)))[
            :most
        ]
    return [_made(convention, dict(zip(FACTORS, row, strict=True)), seed + 100 + n) for n, row in enumerate(chosen)]
