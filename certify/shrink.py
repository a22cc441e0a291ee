"""The smallest case that still fails: features are taken away one by one, then rows, lengths, heads and dims, then digits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import TypeVar

from .case import Case
from .features import FACTORS, default_levels, valid

__all__ = ["shrunk", "smaller"]

# What is taken away first: what says least of the function.
_ORDER = ("dtype", "transform", "values", "dims", "layout", "heads", "lse", "gradient", "sizes", "scale", "soft_cap", "sinks",
          "alibi", "score", "bias", "lengths", "segments", "mask", "causal", "window")  # fmt: skip


C = TypeVar("C", bound=Hashable)


def shrunk(case: C, fails: Callable[[C], bool], smaller: Callable[[C], Iterator[C]], most: int) -> C:
    """smaller: simpler cases of one, the boldest first. most: how many cases are tried."""
    tried = 0
    seen: set[C] = {case}
    moved = True
    while moved and tried < most:
        moved = False
        for simpler in smaller(case):
            if simpler in seen:
                continue
            seen.add(simpler)
            tried += 1
            if fails(simpler):
                case, moved = simpler, True
                break
            if tried >= most:
                break
    return case


def smaller(case: Case, keep: frozenset[str]) -> Iterator[Case]:
    """Simpler cases, the boldest first. keep: factors that stay, as a convention needs them."""
    default = default_levels()
    assert set(_ORDER) == set(FACTORS)
    for factor in _ORDER:
        if case.has(factor) and factor not in keep:
            plain = case.without(factor)
            if valid(plain.levels) and plain.q_len <= plain.kv_len:
                yield plain
    for factor, level in (("mask", "dense"), ("bias", "yes"), ("segments", "yes"), ("lengths", "yes")):
        if case.levels[factor] not in (level, default[factor]):
            yield replace(case, levels=case.levels | {factor: level})
    if case.q_len == case.kv_len > 3 and not case.has("dims"):  # a leap, before the steps
        yield replace(case, batch=1, heads=case.heads // case.kv_heads, kv_heads=1, q_len=3, kv_len=3, dim=1, value_dim=1,
                      integers=True, seed=0)  # fmt: skip
    if case.batch > 1:
        yield replace(case, batch=1)
    group = case.heads // case.kv_heads
    if case.kv_heads > 1:
        yield replace(case, heads=group, kv_heads=1)
    if group > 2 and case.levels["heads"] == "groups_of_3":
        yield replace(case, heads=2 * case.kv_heads, levels=case.levels | {"heads": "gqa"})
    for n in (2, 3, 4, 5):
        if n < case.kv_len and case.q_len == case.kv_len:
            yield replace(case, q_len=n, kv_len=n)
    if case.q_len != case.kv_len:
        for q, kv in ((1, 2), (2, 3), (1, 3), (2, 4), (3, 5)):
            if kv < case.kv_len and q <= case.q_len:
                offset = {"end": kv - q, "offset": max((kv - q) // 2, 1)}.get(case.levels["causal"], 0)
                yield replace(case, q_len=q, kv_len=kv, offset=offset)
    for dim in (1, 2, 4):
        if dim < case.dim and case.dim == case.value_dim:
            yield replace(case, dim=dim, value_dim=dim)
    if case.dim != case.value_dim and case.dim > 1:
        yield replace(case, dim=1, value_dim=2)
    if case.left is not None and case.left > 1:
        yield replace(case, left=1)
    if case.left:
        yield replace(case, left=0)
    if not case.integers:
        yield replace(case, integers=True)
    if case.seed > 0:
        yield replace(case, seed=0)
