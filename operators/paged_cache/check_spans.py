"""check_spans: whether spans and prefixes are stored when their tokens attend, and fit what the cache keeps."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from ...errors import InputError
from ...masks.int_arrays import known_values
from .batch import RaggedBatch

__all__ = ["check_positions", "check_spans"]


def check_spans(
    batch: RaggedBatch, spans: Any, prefix: Any, tree: Any, window_tokens: int | None, *, debug: bool
) -> None:
    """Refuse spans [tokens, 2] and prefix_lengths [rows] with keys that aren't stored after this step, or that a window's pages
    don't keep. Traced ones are checked while the step runs, with `debug`. Errors: InputError with the token or the row."""
    rows = int(np.prod(batch.kv_lens.shape))
    if prefix is not None and len(prefix) != rows:
        raise InputError(f"prefix_lengths has {len(prefix)} numbers; wanted {rows}, one for each row of the batch.")
    numbers = (batch.cu_q_lens, batch.kv_lens, batch.num_seqs)
    for array, check in ((spans, _check_spans), (prefix, _check_prefix)):
        if array is None:
            continue
        known = [known_values(x) for x in (array, *numbers)]
        of_tree = None if tree is None else known_values(tree)
        run = partial(check, window_tokens)
        if all(x is not None for x in known) and (tree is None or of_tree is not None):
            run(of_tree, *known)
        elif debug:
            jax.debug.callback(run, tree, array, *numbers)


def check_positions(batch: RaggedBatch, positions: Any, *, debug: bool) -> None:
    """Refuse positions [tokens] below 0. Traced ones are checked while the step runs, with `debug`. Errors: InputError."""
    arrays = (positions, batch.cu_q_lens, batch.kv_lens, batch.num_seqs)
    known = [known_values(x) for x in arrays]
    if all(x is not None for x in known):
        _check_positions(*known)
    elif debug:
        jax.debug.callback(_check_positions, *arrays)


def _check_positions(positions: Any, *numbers: Any) -> None:
    positions = np.asarray(positions)
    for row, token, _, count, _ in _rows(positions, *numbers, tokens=True):
        if (wrong := positions[token : token + count] < 0).any():
            at = token + int(wrong.argmax())
            raise InputError(f"q_positions[{at}] is {positions[at]}, of row {row}; wanted 0 or more.")


def _rows(array: Any, starts: Any, lengths: Any, counts: Any, *, tokens: bool) -> Any:
    """(number among all rows, first token, its position, tokens of the step, keys) of each row in use."""
    starts, lengths, counts = (np.asarray(x) for x in (starts, lengths, np.atleast_1d(counts)))
    starts, lengths = starts.reshape(len(counts), -1), lengths.reshape(len(counts), -1)
    of_shard = len(array) // len(counts) if tokens else 0
    for shard, count in enumerate(counts):
        for row in range(int(count)):
            first, last = (int(x) for x in starts[shard, row : row + 2])
            if last > first:
                length = int(lengths[shard, row])
                number = shard * lengths.shape[1] + row
                yield number, first + shard * of_shard, length - (last - first), last - first, length


def _check_spans(window: int | None, tree: Any, spans: Any, *numbers: Any) -> None:
    spans = np.asarray(spans).astype(np.int64)
    for row, token, position, count, length in _rows(spans, *numbers, tokens=True):
        begin, end = spans[token : token + count].T
        places = np.arange(position, position + count)
        used = begin != end
        kept = _first_kept(window, position)
        for wrong, why in (
            (used & ~((begin <= places) & (places < end)), "doesn't contain the token's own position {place}"),
            (used & (begin < 0), "begins before the sequence"),
            (
                used & (end > length),
                "ends after the {length} tokens that are stored after this step: pass all of it in one step",
            ),
            (used & (begin < kept), "begins before {kept}, of which the layer's pages keep nothing"),
            (_unlike_neighbours(begin, end, places, used), "differs from that of a neighbour inside it"),
        ):
            if wrong.any():
                at = int(wrong.argmax())
                text = why.format(place=int(places[at]), length=length, kept=kept)
                raise InputError(
                    f"spans[{token + at}] is ({begin[at]}, {end[at]}), of row {row}: it {text}; wanted the first position of the "
                    "token's span and one past the last, or two equal numbers for none."
                )
        if tree is not None and used.any() and np.asarray(tree)[row].any():
            at = token + int(used.argmax())
            raise InputError(
                f"spans[{at}] is a span in row {row}, whose tokens are a tree of drafts; wanted one of both."
            )


def _unlike_neighbours(begin: Any, end: Any, places: Any, used: Any) -> np.ndarray:
    """Whether a token next to each, inside its span, has another span."""
    same = (begin[1:] == begin[:-1]) & (end[1:] == end[:-1])
    wrong = np.zeros(len(places), bool)
    wrong[:-1] |= used[:-1] & (places[1:] < end[:-1]) & ~same
    wrong[1:] |= used[1:] & (places[:-1] >= begin[1:]) & ~same
    return wrong


def _check_prefix(window: int | None, tree: Any, prefix: Any, *numbers: Any) -> None:
    prefix = np.asarray(prefix)
    for row, _, position, _, length in _rows(prefix, *numbers, tokens=False):
        tokens = int(prefix[row])
        where = f"prefix_lengths[{row}] is {tokens}"
        if tokens < 0:
            raise InputError(f"{where}; wanted 0 for none, or more.")
        if position >= tokens:
            continue
        if tokens > length:
            raise InputError(
                f"{where}, but the row has {length} tokens after this step, of which some are in the prefix; wanted all of a "
                "prefix in one step."
            )
        if _first_kept(window, position):
            raise InputError(f"{where}, but the layer's pages keep only a window of {window} tokens before {position}.")
        if tree is not None and np.asarray(tree)[row].any():
            raise InputError(f"{where}, and the row's tokens in it are a tree of drafts; wanted one of both.")


def _first_kept(window: int | None, position: int) -> int:
    """The first position whose key a layer's pages are certain to have for a query at `position`."""
    return 0 if window is None else max(0, position - window + 1)
