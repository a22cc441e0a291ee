"""What recurrent implementations compute: gates, then the recurrence, with states passed along a split sequence."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .config import DeltaRuleConfig, LinearConfig
from .kernel.convolution import causal_conv, conv_over_rows, last_tokens
from .kernel.gates import Gates, Ungated, normalised, step_of, strength_of
from .kernel.over_rows import Run, last_tokens_alone, over_rows
from .kernel.rows_on_kernels import chunks_of_rows, last_tokens_of_rows
from .kernel.selective_scan import selective_scan
from .local import Affine, RecurrentCall, passed_on

__all__ = ["Results", "convolution", "delta_rule", "linear", "mamba1", "mamba2"]

Results = dict[str, jax.Array]


def _float(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _by_heads(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, 2, 1)


def _recurrence(call: RecurrentCall, given: Ungated, gates: Gates, scale: float) -> tuple[jax.Array, jax.Array]:
    """(outputs [batch, tokens, heads, value_dim], state in float32, or the slots of a step)."""
    batch, _, heads, value_dim = given.value.shape
    dim, initial = given.key.shape[3], call.arrays.get("initial_state")
    if call.rows is not None:
        return (_over_slots if call.token is None else _by_kernels)(call, given, gates, scale)
    query, key, value, decay, beta = _gated(call, given, gates)
    size = call.config.chunk_size
    arrays = [_by_heads(x) for x in (query, key, value, decay)]
    by_head = None if beta is None else _by_heads(beta)
    after = None
    if call.over:
        start = jnp.zeros((batch, heads, dim, value_dim), jnp.float32) if initial is None else _float(initial)
        initial, after = _passed(call, arrays, by_head, start, size)
    run = functools.partial(call.chunked, scale=scale, chunk_size=size)
    outputs, state = run(arrays[0], arrays[1], arrays[2], arrays[3], by_head, initial, call.document)
    return jnp.moveaxis(outputs, 1, 2), state if after is None else after


def _gated(
    call: RecurrentCall, given: Ungated, gates: Gates
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """(query, key, value, log decay [batch, tokens, heads, dim or 1], beta), where tokens that don't count change nothing."""
    query, key, value, beta = given.query, given.key, given.value, given.beta
    if gates.normalise_eps is not None:
        query, key = (normalised(x, gates.normalise_eps).astype(x.dtype) for x in (query, key))
    step = step_of(gates, given.decay, None if given.bias is None else given.bias[None, None])
    decay = step if given.rate is None else given.rate.reshape(1, 1, -1, *[1] * (step.ndim - 3)) * step
    decay = decay[..., None] if decay.ndim == 3 else decay
    strength = None if beta is None else strength_of(gates, beta)
    if call.valid is not None:
        decay = jnp.where(call.valid[..., None, None], decay, 0)
        step = jnp.where(call.valid[..., None], step, 0) if gates.steps else step
        strength = None if strength is None else jnp.where(call.valid[..., None], strength, 0)
    if gates.steps:  # of Mamba, whose factors are in float32
        query, key, value = _float(query), _float(key), step[..., None] * _float(value)
    return query, key, value, decay, strength


def _over_slots(call: RecurrentCall, given: Ungated, gates: Gates, scale: float) -> tuple[jax.Array, jax.Array]:
    """(outputs, slots) of a step: each row continues its own state."""
    assert call.rows is not None
    run, arrays = _chunks(call, given, gates, scale)
    by_one = call.one_by_one(given.key.shape[2])
    slots, size = call.arrays["initial_state"], call.config.chunk_size
    outputs, slots = over_rows(run, arrays, slots, call.rows, size, one_by_one=by_one)
    return outputs[None], slots


def _by_kernels(call: RecurrentCall, given: Ungated, gates: Gates, scale: float) -> tuple[jax.Array, jax.Array]:
    """The same by kernels. That of the last tokens has the gates too."""
    rows, slots, outputs = call.rows, call.arrays["initial_state"], None
    assert rows is not None
    assert call.token is not None
    if rows.longest is None or rows.longest > last_tokens_alone(rows.longest, rows.write.shape[1]):
        run, arrays = _chunks(call, given, gates, scale)
        outputs, slots, rows = chunks_of_rows(run, arrays, slots, rows, call.config.chunk_size)
    token = functools.partial(call.token, rate=given.rate, bias=given.bias, gates=gates, scale=scale)
    raw = (given.query, given.key, given.value, given.decay, *(() if given.beta is None else (given.beta,)))
    outputs, slots = last_tokens_of_rows(token, tuple(x[0] for x in raw), slots, rows, outputs)
    return outputs[None], slots


def _chunks(call: RecurrentCall, given: Ungated, gates: Gates, scale: float) -> tuple[Run, tuple[jax.Array, ...]]:
    """What goes through a chunk of a row, and the arrays by token that it takes: query, key, value, decay and, for the delta
    rule, beta."""
    *every, strength = _gated(call, given, gates)

    def run(arrays: tuple[jax.Array, ...], state: jax.Array) -> tuple[jax.Array, jax.Array]:
        query, key, value, decay, *beta = map(_by_heads, arrays)
        outputs, after = call.chunked(
            query, key, value, decay, *(beta or (None,)), state, None, scale=scale, chunk_size=call.config.chunk_size
        )
        return jnp.moveaxis(outputs, 1, 2), after

    return run, tuple(x[0] for x in (*every, *(() if strength is None else (strength,))))


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


def _decay(call: RecurrentCall, shape: tuple[int, ...]) -> jax.Array:
    """[batch, tokens, heads], and dim after it where it differs by channel: as given, or 0 without a decay."""
    given = call.arrays.get("decay")
    if given is None:
        return jnp.zeros(shape[:3], jnp.float32)
    return jnp.broadcast_to(given[None, None], shape[:3]) if given.ndim == 1 else given


def delta_rule(call: RecurrentCall) -> Results:
    """The gated delta rule, with a log decay for a head or for each key channel."""
    config: DeltaRuleConfig = call.config
    query, key, value = call.arrays["query"], call.arrays["key"], call.arrays["value"]
    beta = call.arrays.get("beta")
    beta = jnp.ones(value.shape[:3], jnp.float32) if beta is None else beta
    given = Ungated(query, key, value, _decay(call, value.shape), beta)
    if raw := config.gate == "raw":
        given = given._replace(rate=-jnp.exp(_float(call.arrays["A_log"])), bias=call.arrays.get("dt_bias"))
    strongest = config.beta_max if config.beta_form == "sigmoid" else None
    gates = Gates(_eps(call), softplus=raw, beta_max=strongest)
    outputs, state = _recurrence(call, given, gates, _scale(call, key.shape[3]))
    return _outputs(call, outputs, state)


def linear(call: RecurrentCall) -> Results:
    """Linear attention with decay."""
    query, key, value = call.arrays["query"], call.arrays["key"], call.arrays["value"]
    given = Ungated(query, key, value, _decay(call, value.shape))
    outputs, state = _recurrence(call, given, Gates(_eps(call)), _scale(call, key.shape[3]))
    return _outputs(call, outputs, state)


def _eps(call: RecurrentCall) -> float | None:
    """Under the root of the norms of queries and keys; None if they aren't divided by them."""
    config: LinearConfig = call.config
    return config.normalise_eps if call.problem.option.get("normalise_qk") else None


def _steps(call: RecurrentCall) -> Gates:
    """The gates of Mamba."""
    config = call.config
    least, most = getattr(config, "dt_min", None), getattr(config, "dt_max", None)
    return Gates(softplus=config.dt_softplus, least=least, most=most, steps=True)


def _skipped(call: RecurrentCall, outputs: jax.Array, per_head: bool) -> jax.Array:
    """The outputs with D times the inputs."""
    if (factor := call.arrays.get("D")) is None:
        return outputs
    shape = (1, 1, -1, 1) if per_head else (1, 1, -1)
    return outputs + _float(factor).reshape(shape) * _float(call.arrays["x"])


def mamba2(call: RecurrentCall) -> Results:
    """Mamba-2: linear attention whose keys are B, queries C, values dt x, with the log decay dt A."""
    arrays = call.arrays
    given = Ungated(
        arrays["C"], arrays["B"], arrays["x"], arrays["dt"], None, _float(arrays["A"]), arrays.get("dt_bias")
    )
    outputs, state = _recurrence(call, given, _steps(call), 1.0)
    return _outputs(call, _skipped(call, outputs, per_head=True), state)


def mamba1(call: RecurrentCall) -> Results:
    """Mamba-1: a decay for each channel and each number of its state."""
    x, rate, bias = call.arrays["x"], _float(call.arrays["A"]), call.arrays.get("dt_bias")
    dt = step_of(_steps(call), call.arrays["dt"], None if bias is None else bias[None, None])
    dt = dt if call.valid is None else jnp.where(call.valid[..., None], dt, 0)
    initial, size = call.arrays.get("initial_state"), call.config.chunk_size
    b, c, after = call.arrays["B"], call.arrays["C"], None
    if call.rows is not None:
        assert initial is not None

        def scan(arrays: tuple[jax.Array, ...], state: jax.Array) -> tuple[jax.Array, jax.Array]:
            x, dt, b, c = arrays
            return selective_scan(x, dt, rate, b, c, state, None, chunk_size=size)

        arrays = (x[0], dt[0], b[0], c[0])
        outputs, slots = over_rows(scan, arrays, initial, call.rows, size, one_by_one=call.one_by_one())
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
