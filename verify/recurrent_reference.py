"""The definition of recurrences in attnops, in float64 NumPy, a token at a time. Everything else is tested against it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = [
    "Recurrence",
    "reference_convolution",
    "reference_decays",
    "reference_linear",
    "reference_linear_gradients",
    "reference_mamba1",
]


class Recurrence(NamedTuple):
    """outputs [batch, tokens, heads, value_dim] and the state after the last token [batch, heads, head_dim, value_dim]."""

    outputs: np.ndarray
    state: np.ndarray


def reference_decays(name: str, heads: int) -> np.ndarray:
    """The log decay of each head that a family has of its own: of 'retention' and 'lightning'; 0 for any other name."""
    places = np.arange(heads)
    own = {"retention": np.log(1 - 2.0 ** (-5 - places)), "lightning": -(2.0 ** (-8 * (places + 1) / heads))}
    return own.get(name, np.zeros(heads))


def _starts(segment_ids: np.ndarray | None, batch: int, tokens: int) -> np.ndarray:
    """[batch, tokens]: whether a token is the first of another document than the token before."""
    starts = np.zeros((batch, tokens), bool)
    if segment_ids is not None:
        starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return starts


class _Linear:
    """The arrays of a call in float64, those of a key head repeated for each of its heads, and which tokens count."""

    def __init__(self, query, key, value, log_decay, beta, segment_ids, lengths) -> None:  # type: ignore[no-untyped-def]
        query, key, self.value, self.log_decay = (np.asarray(x, np.float64) for x in (query, key, value, log_decay))
        self.batch, self.tokens, self.heads, self.value_dim = self.value.shape
        self.group, self.dim = self.heads // key.shape[2], key.shape[3]
        self.query, self.key = (np.repeat(x, self.group, 2) for x in (query, key))
        self.beta = None if beta is None else np.asarray(beta, np.float64)
        self.starts = _starts(segment_ids, self.batch, self.tokens)
        ends = np.full(self.batch, self.tokens) if lengths is None else np.asarray(lengths)
        self.counts = np.arange(self.tokens)[None] < ends[:, None]

    def decayed(self, state: np.ndarray, t: int) -> np.ndarray:
        """A state before token t, decayed by it: [batch, heads, dim, value_dim]."""
        kept = np.where(self.starts[:, t][:, None, None, None], 0, state)
        return np.exp(self.log_decay[:, t])[..., None] * kept

    def token(self, state: np.ndarray, t: int) -> tuple[np.ndarray, np.ndarray]:
        """(the state after token t, what it adds for its key)."""
        decayed, key, update = self.decayed(state, t), self.key[:, t], self.value[:, t]
        if self.beta is not None:
            update = self.beta[:, t][..., None] * (update - np.einsum("bhk,bhkv->bhv", key, decayed))
        after = decayed + key[..., None] * update[..., None, :]
        return np.where(self.counts[:, t][:, None, None, None], after, state), update


def _first(initial_state: np.ndarray | None, call: _Linear) -> np.ndarray:
    shape = (call.batch, call.heads, call.dim, call.value_dim)
    return np.zeros(shape) if initial_state is None else np.array(initial_state, np.float64)


def reference_linear(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray | None = None,
    initial_state: np.ndarray | None = None,
    segment_ids: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    *,
    scale: float,
) -> Recurrence:
    """Linear attention. query, key [batch, tokens, key_heads, dim]; value [batch, tokens, heads, value_dim]; log_decay [batch,
    tokens, heads, dim or 1]; beta [batch, tokens, heads] for the delta rule."""
    call = _Linear(query, key, value, log_decay, beta, segment_ids, lengths)
    state, outputs = _first(initial_state, call), np.zeros(call.value.shape)
    for t in range(call.tokens):
        state, _ = call.token(state, t)
        read = scale * np.einsum("bhk,bhkv->bhv", call.query[:, t], state)
        outputs[:, t] = np.where(call.counts[:, t][:, None, None], read, 0)
    return Recurrence(outputs, state)


def reference_linear_gradients(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray | None = None,
    initial_state: np.ndarray | None = None,
    segment_ids: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    *,
    scale: float,
    d_outputs: np.ndarray,
    d_state: np.ndarray,
) -> dict[str, np.ndarray]:
    """The gradients of sum(outputs * d_outputs) + sum(state * d_state) by name: query, key, value, decay, beta,
    initial_state."""
    call = _Linear(query, key, value, log_decay, beta, segment_ids, lengths)
    states, updates = [_first(initial_state, call)], []
    for t in range(call.tokens):
        after, update = call.token(states[-1], t)
        states.append(after)
        updates.append(update)
    found = {name: np.zeros(x.shape) for name, x in (("query", call.query), ("key", call.key), ("value", call.value))}
    found |= {"decay": np.zeros(call.log_decay.shape), "beta": np.zeros(call.value.shape[:3])}
    carried = np.array(d_state, np.float64)
    for t in reversed(range(call.tokens)):
        counts = call.counts[:, t][:, None, None]
        d_output, key, decayed = np.where(counts, d_outputs[:, t], 0), call.key[:, t], call.decayed(states[t], t)
        d_after = carried + scale * call.query[:, t][..., None] * d_output[..., None, :]
        found["query"][:, t] = scale * np.einsum("bhkv,bhv->bhk", states[t + 1], d_output)
        d_update = np.einsum("bhkv,bhk->bhv", d_after, key)
        d_key = np.einsum("bhkv,bhv->bhk", d_after, updates[t])
        d_decayed = d_after
        if call.beta is not None:
            seen = call.value[:, t] - np.einsum("bhk,bhkv->bhv", key, decayed)
            found["beta"][:, t] = np.where(counts[..., 0], (seen * d_update).sum(-1), 0)
            d_update = call.beta[:, t][..., None] * d_update
            d_key = d_key - np.einsum("bhkv,bhv->bhk", decayed, d_update)
            d_decayed = d_after - key[..., None] * d_update[..., None, :]
        found["key"][:, t], found["value"][:, t] = np.where(counts, d_key, 0), np.where(counts, d_update, 0)
        d_kept = (d_decayed * decayed).sum(-1)
        d_kept = d_kept if call.log_decay.shape[3] > 1 else d_kept.sum(-1, keepdims=True)
        found["decay"][:, t] = np.where(counts, d_kept, 0)
        before = np.exp(call.log_decay[:, t])[..., None] * d_decayed * ~call.starts[:, t][:, None, None, None]
        carried = np.where(counts[..., None], before, carried)
    for name in ("query", "key"):
        grouped = found[name].reshape(call.batch, call.tokens, -1, call.group, call.dim)
        found[name] = grouped.sum(3)
    return found | {"initial_state": carried}


def reference_mamba1(
    x: np.ndarray,
    dt: np.ndarray,
    rate: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    initial_state: np.ndarray | None = None,
    segment_ids: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
) -> Recurrence:
    """Mamba-1 without D: outputs [batch, tokens, channels], state [batch, channels, state]."""
    x, dt, rate, b, c = (np.asarray(a, np.float64) for a in (x, dt, rate, b, c))
    batch, tokens, channels = x.shape
    state = np.zeros((batch, channels, rate.shape[1])) if initial_state is None else np.array(initial_state, np.float64)
    outputs, starts = np.zeros(x.shape), _starts(segment_ids, batch, tokens)
    for row in range(batch):
        for t in range(tokens if lengths is None else int(lengths[row])):
            before = state[row] * (not starts[row, t])
            state[row] = np.exp(dt[row, t][:, None] * rate) * before + np.outer(dt[row, t] * x[row, t], b[row, t])
            outputs[row, t] = state[row] @ c[row, t]
    return Recurrence(outputs, state)


def reference_convolution(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    initial_state: np.ndarray | None = None,
    segment_ids: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
) -> Recurrence:
    """A causal convolution: outputs [batch, tokens, channels], and the last width - 1 tokens of the last document."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    (batch, tokens, channels), kept = x.shape, weight.shape[0] - 1
    outputs, state = np.zeros(x.shape), np.zeros((batch, kept, channels))
    starts = _starts(segment_ids, batch, tokens)
    for row in range(batch):
        window = np.zeros((kept, channels)) if initial_state is None else np.array(initial_state[row], np.float64)
        for t in range(tokens if lengths is None else int(lengths[row])):
            if starts[row, t]:
                window = np.zeros((kept, channels))
            seen = np.concatenate([window, x[row, t][None]])
            outputs[row, t] = (weight * seen).sum(0) + (0 if bias is None else bias)
            window = seen[1:]
        state[row] = window
    return Recurrence(outputs, state)
