"""What recurrent implementations compute: gates, then the recurrence, with states passed along a split sequence."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .config import DeltaRuleConfig, LinearConfig
from .kernel.convolution import causal_conv, conv_over_rows, last_tokens
from .kernel.over_rows import over_rows
from .kernel.selective_scan import selective_scan
from .local import Affine, RecurrentCall, passed_on

__all__ = ["Results", "convolution", "delta_rule", "linear", "mamba1", "mamba2"]

Results = dict[str, jax.Array]


def _float(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _normalised(x: jax.Array, eps: float) -> jax.Array:
    wide = _float(x)
    return (wide * lax.rsqrt(jnp.sum(wide * wide, -1, keepdims=True) + np.float32(eps))).astype(x.dtype)


def _by_heads(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, 2, 1)


def _recurrence(
    call: RecurrentCall,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decay: jax.Array,
    beta: jax.Array | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """(outputs [batch, tokens, heads, value_dim], state in float32). decay [batch, tokens, heads, dim or 1]: the log decay."""
    batch, _, heads, value_dim = value.shape
    dim = key.shape[3]
    size = call.config.chunk_size
    initial = call.arrays.get("initial_state")
    if call.rows is not None:
        return _over_slots(call, (query, key, value, decay, *(() if beta is None else (beta,))), scale)
    arrays = [_by_heads(x) for x in (query, key, value, decay)]
    by_head = None if beta is None else _by_heads(beta)
    after = None
    if call.over:
        start = jnp.zeros((batch, heads, dim, value_dim), jnp.float32) if initial is None else _float(initial)
        initial, after = _passed(call, arrays, by_head, start, size)
    run = functools.partial(call.chunked, scale=scale, chunk_size=size)
    outputs, state = run(arrays[0], arrays[1], arrays[2], arrays[3], by_head, initial, call.document)
    return jnp.moveaxis(outputs, 1, 2), state if after is None else after


def _over_slots(call: RecurrentCall, arrays: tuple[jax.Array, ...], scale: float) -> tuple[jax.Array, jax.Array]:
    """(outputs, slots) of a step: each row continues its own state. arrays: query, key, value, decay and, for the delta rule,
    beta."""

    def run(arrays: tuple[jax.Array, ...], state: jax.Array) -> tuple[jax.Array, jax.Array]:
        query, key, value, decay, *beta = map(_by_heads, arrays)
        outputs, after = call.chunked(
            query, key, value, decay, *(beta or (None,)), state, None, scale=scale, chunk_size=call.config.chunk_size
        )
        return jnp.moveaxis(outputs, 1, 2), after

    assert call.rows is not None
    slots = call.arrays["initial_state"]
    outputs, slots = over_rows(
        run,
        tuple(x[0] for x in arrays),
        slots,
        call.rows,
        call.config.chunk_size,
        token=None if call.token is None else functools.partial(call.token, scale=scale),
        one_by_one=call.one_by_one,
    )
    return outputs[None], slots


def _passed(
    call: RecurrentCall, arrays: list[jax.Array], beta: jax.Array | None, initial: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """The state before this device's tokens and that after all. What the tokens do to a state is read off two starts: zero, and
    for the delta rule each unit vector beside it, whose values are 0."""
    query, key, value, decay = arrays
    value_dim, dim = value.shape[3], key.shape[3]
    run = functools.partial(call.chunked, scale=1.0, chunk_size=size)
    if beta is None:
        _, constant = run(query, key, value, decay, None, None, call.document)
        kept = jnp.exp(jnp.sum(_float(decay), 2))[..., None]
        if call.document is not None:
            kept = jnp.where((call.document[:, -1] == 0)[:, None, None, None], kept, 0)
        return passed_on(call, Affine(kept, constant), initial, jnp.multiply)
    wide = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, dim)))
    unit = jnp.broadcast_to(jnp.eye(dim, dtype=jnp.float32), (*initial.shape[:2], dim, dim))
    _, both = run(query, key, wide, decay, beta, jnp.pad(unit, ((0, 0), (0, 0), (0, 0), (value_dim, 0))), call.document)
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    return passed_on(call, Affine(both[..., value_dim:], both[..., :value_dim]), initial, product)


def _outputs(call: RecurrentCall, outputs: jax.Array, state: jax.Array) -> Results:
    if call.valid is not None:
        valid = call.valid.reshape(*call.valid.shape, *[1] * (outputs.ndim - 2))
        outputs = jnp.where(valid, outputs, 0)
    return {"attention_outputs": outputs.astype(call.problem.input_dtype), "state": state}


def _scale(call: RecurrentCall, dim: int) -> float:
    return float(call.problem.option.get("scale") or dim**-0.5)


def _log_decay(call: RecurrentCall, shape: tuple[int, ...]) -> jax.Array:
    """[batch, tokens, heads, dim or 1]; 0 where a token doesn't count, and without a decay."""
    given = call.arrays.get("decay")
    if given is None:
        decay = jnp.zeros(shape[:3], jnp.float32)
    else:
        decay = jnp.broadcast_to(_float(given)[None, None], shape[:3]) if given.ndim == 1 else _float(given)
    if getattr(call.config, "gate", "log_decay") == "raw":
        rate, bias = call.arrays["A_log"], call.arrays.get("dt_bias")
        shifted = decay if bias is None else decay + _float(bias)[None, None]
        decay = -jnp.exp(_float(rate)).reshape(1, 1, -1, *[1] * (decay.ndim - 3)) * jax.nn.softplus(shifted)
    decay = decay[..., None] if decay.ndim == 3 else decay
    return decay if call.valid is None else jnp.where(call.valid[..., None, None], decay, 0)


def delta_rule(call: RecurrentCall) -> Results:
    """The gated delta rule, with a log decay for a head or for each key channel."""
    config: DeltaRuleConfig = call.config
    query, key, value = call.arrays["query"], call.arrays["key"], call.arrays["value"]
    if call.problem.option.get("normalise_qk"):
        query, key = (_normalised(x, config.normalise_eps) for x in (query, key))
    beta = call.arrays.get("beta")
    strength = jnp.ones(value.shape[:3], jnp.float32) if beta is None else _float(beta)
    if config.beta_form == "sigmoid":
        strength = np.float32(config.beta_max) * jax.nn.sigmoid(strength)
    if call.valid is not None:
        strength = jnp.where(call.valid[..., None], strength, 0)
    decay = _log_decay(call, value.shape)
    outputs, state = _recurrence(call, query, key, value, decay, strength, _scale(call, key.shape[3]))
    return _outputs(call, outputs, state)


def linear(call: RecurrentCall) -> Results:
    """Linear attention with decay."""
    config: LinearConfig = call.config
    query, key = call.arrays["query"], call.arrays["key"]
    if call.problem.option.get("normalise_qk"):
        query, key = (_normalised(x, config.normalise_eps) for x in (query, key))
    value = call.arrays["value"]
    decay = _log_decay(call, value.shape)
    outputs, state = _recurrence(call, query, key, value, decay, None, _scale(call, key.shape[3]))
    return _outputs(call, outputs, state)


def _time_steps(call: RecurrentCall) -> jax.Array:
    dt = _float(call.arrays["dt"])
    if (bias := call.arrays.get("dt_bias")) is not None:
        dt = dt + _float(bias)[None, None]
    if call.config.dt_softplus:
        dt = jax.nn.softplus(dt)
    least, most = getattr(call.config, "dt_min", None), getattr(call.config, "dt_max", None)
    if least is not None or most is not None:
        dt = jnp.clip(dt, *(None if x is None else np.float32(x) for x in (least, most)))
    return dt if call.valid is None else jnp.where(call.valid[..., None], dt, 0)


def _skipped(call: RecurrentCall, outputs: jax.Array, per_head: bool) -> jax.Array:
    """The outputs with D times the inputs."""
    if (factor := call.arrays.get("D")) is None:
        return outputs
    shape = (1, 1, -1, 1) if per_head else (1, 1, -1)
    return outputs + _float(factor).reshape(shape) * _float(call.arrays["x"])


def mamba2(call: RecurrentCall) -> Results:
    """Mamba-2: linear attention whose keys are B, queries C, values dt x, with the log decay dt A."""
    dt, x = _time_steps(call), call.arrays["x"]
    decay = dt * _float(call.arrays["A"])[None, None]
    value = dt[..., None] * _float(x)
    b, c = call.arrays["B"], call.arrays["C"]
    outputs, state = _recurrence(call, _float(c), _float(b), value, decay[..., None], None, 1.0)
    return _outputs(call, _skipped(call, outputs, per_head=True), state)


def mamba1(call: RecurrentCall) -> Results:
    """Mamba-1: a decay for each channel and each number of its state."""
    dt, x, rate = _time_steps(call), call.arrays["x"], _float(call.arrays["A"])
    initial, size = call.arrays.get("initial_state"), call.config.chunk_size
    b, c, after = call.arrays["B"], call.arrays["C"], None
    if call.rows is not None:
        assert initial is not None

        def scan(arrays: tuple[jax.Array, ...], state: jax.Array) -> tuple[jax.Array, jax.Array]:
            x, dt, b, c = arrays
            return selective_scan(x, dt, rate, b, c, state, None, chunk_size=size)

        arrays = (x[0], dt[0], b[0], c[0])
        outputs, slots = over_rows(scan, arrays, initial, call.rows, size, one_by_one=call.one_by_one)
        return _outputs(call, _skipped(call, outputs[None], per_head=False), slots)
    run = functools.partial(selective_scan, x, dt, rate, b, c, document=call.document, chunk_size=size)
    if call.over:
        _, constant = run(initial_state=None)
        kept = jnp.exp(jnp.sum(dt, 1)[..., None] * rate[None])
        if call.document is not None:
            kept = jnp.where((call.document[:, -1] == 0)[:, None, None], kept, 0)
        start = jnp.zeros_like(constant) if initial is None else _float(initial)
        initial, after = passed_on(call, Affine(kept, constant), start, jnp.multiply)
    outputs, state = run(initial_state=initial)
    return _outputs(call, _skipped(call, outputs, per_head=False), state if after is None else after)


def _activated(call: RecurrentCall, outputs: jax.Array) -> jax.Array:
    return jax.nn.silu(outputs) if call.problem.option.get("activation") == "silu" else outputs


def convolution(call: RecurrentCall) -> Results:
    """A causal convolution; of a split sequence, each device has its left neighbour's last tokens."""
    x, weight = call.arrays["x"], call.arrays["weight"]
    if call.rows is not None:
        one, slots = conv_over_rows(x[0], weight, call.arrays.get("bias"), call.arrays["initial_state"], call.rows)
        return _outputs(call, _activated(call, one[None]), slots)
    kept, (batch, tokens, channels) = weight.shape[0] - 1, x.shape
    given = call.arrays.get("initial_state")
    history = jnp.zeros((batch, kept, channels), x.dtype) if given is None else given.astype(x.dtype)
    documents = call.arrays.get("document")
    before = None if documents is None else jnp.zeros((batch, kept), documents.dtype)
    ends = jnp.full((batch,), tokens, jnp.int32)
    if "ends" in call.arrays:
        ends = call.arrays["ends"]
    low, last = jnp.zeros((), jnp.int32), call.arrays.get("last_document")
    if call.over:
        here, count = lax.axis_index(call.over), lax.axis_size(call.over)
        right = [(n, n + 1) for n in range(count - 1)]
        neighbour = lax.ppermute(x[:, tokens - kept :], call.over, right)
        history = jnp.where(here == 0, history, neighbour)
        if before is not None:
            assert documents is not None
            before = jnp.where(here == 0, before, lax.ppermute(documents[:, tokens - kept :], call.over, right))
        low = jnp.where(here == 0, np.int32(0), np.int32(kept))
        ends = ends - here.astype(jnp.int32) * np.int32(tokens)
    both = jnp.concatenate([history, x], 1)
    seen = None if documents is None or before is None else jnp.concatenate([before, documents], 1)
    outputs = _activated(call, causal_conv(both, weight, call.arrays.get("bias"), seen))
    state = last_tokens(both, kept, seen, last, ends, low)
    state = lax.psum(state, call.over) if call.over else state
    return _outputs(call, outputs, state)
