"""Mutations of JSON values: keys deleted, renamed, added; values swapped, wrapped, or put in the place of others."""

from __future__ import annotations

import copy
import json
import string
from random import Random
from typing import Any

__all__ = ["DEPTH", "WORDS", "as_json", "deep", "mutated", "odd_string", "odd_value", "places"]

DEPTH = 3000  # deeper than Python's stack; json.loads alone refuses it

# Words that mean something somewhere, so that some mutations get past the first check.
WORDS = (
    "splash", "vanilla", "sdpa", "ring", "ulysses", "ulysses_ring", "gather", "merge", "auto", "tpu", "cpu", "cuda", "gpu",
    "float32", "bfloat16", "float16", "float64", "int8", "float8_e4m3fn", "float8_e5m2", "bthd", "bhtd", "thd", "train",
    "prefill", "autoregressive", "insert", "causal", "full", "sliding_window", "chunked", "prefix", "and", "or", "not",
    "mask_function", "segment_ids", "warn", "error", "allow", "replicate", "tune", "off", "zigzag", "contiguous", "fsdp",
    "tp", "sp", "dp", "jax", "tokamax", "attnops", "seq_minor", "head", "token", "token_head", "tensor", "full_attention",
    "sliding_attention", "chunked_attention", "linear_attention", "llama", "gemma2", "gpt2", "deepseek_v3", "whisper",
    "default", "yarn", "manual", "explicit",
)  # fmt: skip
_NUMBERS = (
    0, 1, -1, 2, 3, 7, 8, 64, 127, 128, 129, 4096, 2**31 - 1, 2**31, -(2**31), 2**63, -(2**63) - 1, 10**30, 10**400, 0.0, -0.0,
    0.5, 1.0, 1.5, -3.25, 1e-320, 1e308, -1e308,
)  # fmt: skip
_NOT_JSON = (float("nan"), float("inf"), float("-inf"))


def odd_string(random: Random) -> str:
    """Empty, long, blank, unicode, control characters, a lone surrogate, a number in words."""
    return random.choice(
        (
            "", " ", "a", "0", "1", "-1", "1e400", "NaN", "null", "true", "None", "x" * 5000, "é", "日本語", "\u202e", "\ud800",
            "\x00", "\n", "a\nb", "{}", "[bold]", "%s", "{0}", "'", '"', "\\", "../x", "-", "--", "=", ",", "a=b", "tp=2", "£1",
            "".join(random.choices(string.printable, k=random.randint(1, 12))), random.choice(WORDS), random.choice(WORDS),
        )
    )  # fmt: skip


def odd_value(random: Random, depth: int = 0) -> Any:
    """Any JSON value, NaN and the infinities among them."""
    kind = random.randrange(12 if depth < 2 else 9)
    if kind < 3:
        return random.choice(_NUMBERS)
    if kind < 6:
        return odd_string(random)
    if kind == 6:
        return random.choice((None, True, False))
    if kind == 7:
        return random.choice(_NOT_JSON) if random.random() < 0.3 else random.randint(-5, 300)
    if kind == 8:
        return random.choice(([], {}, [[]], [None], [{}], {"": None}))
    if kind < 11:
        return [odd_value(random, depth + 1) for _ in range(random.randint(1, 4))]
    return {odd_string(random): odd_value(random, depth + 1) for _ in range(random.randint(1, 3))}


def deep(random: Random) -> Any:
    """A value nested deeper than Python's stack allows: of lists, or of masks."""
    value: Any = random.choice(WORDS)
    depth = random.choice((70, 400, DEPTH))
    key = random.choice(("", "mask", "masks", "text_config"))
    for _ in range(depth):
        value = {"kind": "not", key: value} if key == "mask" else {key: value} if key == "text_config" else [value]
    return value


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values below the top."""
    found: list[tuple[Any, ...]] = []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found.append((*path, key))
        if len(path) < 8:
            found += places(value, (*path, key))
    return found


def mutated(random: Random, tree: Any, keys: tuple[str, ...] = ()) -> Any:
    """A copy with one to three changes; `keys` are names that mean something in such a tree."""
    tree = copy.deepcopy(tree)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        tree = _change(random, tree, keys)
    if random.random() < 0.01 and isinstance(tree, dict) and tree:  # last: nothing walks into it
        *way, key = random.choice(places(tree))
        parent = tree
        for step in way:
            parent = parent[step]
        parent[key] = deep(random)
    return tree


def as_json(value: Any) -> str:
    """JSON text, also of what is nested deeper than json.dumps can follow."""
    try:
        return json.dumps(value)
    except RecursionError:
        return "[" * DEPTH + "]" * DEPTH


def _change(random: Random, tree: Any, keys: tuple[str, ...]) -> Any:
    if not isinstance(tree, dict | list) or not tree or random.random() < 0.01:
        return odd_value(random)
    path = random.choice(places(tree))
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    key, kind = path[-1], random.randrange(15)
    if kind < 3:
        parent[key] = odd_value(random)
    elif kind == 3 or kind > 12:
        parent[key] = _likely(random, parent[key])
    elif kind in (4, 12):
        del parent[key]
    elif kind == 5 and isinstance(parent, dict):
        parent[_other_name(random, key, keys)] = parent.pop(key)
    elif kind == 6:
        holder = parent if isinstance(parent, dict) else tree
        if isinstance(holder, dict):
            holder[_other_name(random, str(key), keys)] = odd_value(random)
    elif kind == 7:
        parent[key] = (
            [parent[key]] if random.random() < 0.5 else {random.choice((*WORDS, *map(str, keys))): parent[key]}
        )
    elif kind == 8:
        other = random.choice(places(tree))
        value = tree
        for step in other:
            value = value[step]
        parent[key] = copy.deepcopy(value)
    elif kind == 9 and isinstance(parent[key], list | dict):
        parent[key] = [parent[key], parent[key]] if random.random() < 0.3 else type(parent[key])()
    elif kind == 10 and isinstance(parent[key], int | float) and abs(parent[key]) < 2**63:
        parent[key] = random.choice(
            (-parent[key], parent[key] * 1000, str(parent[key]), parent[key] + 0.5, [parent[key]])
        )
    elif keys and isinstance(parent, dict):
        parent[random.choice(keys)] = random.choice((odd_value(random), random.choice(WORDS), random.randint(0, 9)))
    return tree


def _likely(random: Random, value: Any) -> Any:
    """Another value of the same type, that may well make sense."""
    if isinstance(value, bool) or value is None:
        return random.choice((True, False, None))
    if isinstance(value, int):
        return random.choice((0, 1, 2, 3, 4, 8, 16, 64, 127, 128, 256, 512, 1024, value + 1, value * 2))
    if isinstance(value, float):
        return random.choice((0.0, 0.1, 0.5, 1.0, 2, value * 2))
    if isinstance(value, str):
        return random.choice(WORDS)
    if isinstance(value, list) and value:
        return random.choice((value[:-1], value * 2, value[::-1], [*value, value[0]]))
    return value


def _other_name(random: Random, name: Any, keys: tuple[str, ...]) -> str:
    """A slip of the finger, another known name, or anything."""
    text = str(name)
    return random.choice(
        (
            text[:-1],
            text + "s",
            text.upper(),
            text.replace("_", ""),
            " " + text,
            text[::-1],
            odd_string(random),
            random.choice(keys or ("x",)),
        )
    )
