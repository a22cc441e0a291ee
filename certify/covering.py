"""Fewer cases than a product has: those in which every pair, or every three, of its values still meet."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from typing import TypeVar

import numpy as np

__all__ = ["covering"]

Row = TypeVar("Row", bound=tuple[Hashable, ...])


def covering(rows: Iterable[Row], strength: int, first: Iterable[Row] = ()) -> list[Row]:
    """Some of `rows`, in their order: any `strength` values that stand together in a row do so in one of these too.

    rows: of one length. first: rows that are taken anyway.
    Greedy: the row that brings most of what is missing, the earliest of these.
    """
    rows = list(rows)
    columns = [dict.fromkeys(column) for column in zip(*rows, strict=True)]
    coded = np.empty((len(rows), len(columns)), np.int64)
    for i, values in enumerate(columns):
        code = {value: n for n, value in enumerate(values)}
        coded[:, i] = [code[row[i]] for row in rows]
    met, known = [], 0  # for each `strength` columns, which of their combinations each row has
    for chosen in itertools.combinations(range(len(columns)), strength):
        flat = np.ravel_multi_index([coded[:, i] for i in chosen], [len(columns[i]) for i in chosen])
        _, inverse = np.unique(flat, return_inverse=True)
        met.append(inverse + known)
        known += inverse.max() + 1
    of_row = np.stack(met, axis=1)
    missing, taken = np.ones(known, bool), np.zeros(len(rows), bool)
    places = {row: n for n, row in enumerate(rows)}
    for row in first:
        taken[places[row]] = True
        missing[of_row[places[row]]] = False
    while missing.any():
        best = int(missing[of_row].sum(axis=1).argmax())
        taken[best] = True
        missing[of_row[best]] = False
    return [row for row, take in zip(rows, taken, strict=True) if take]
