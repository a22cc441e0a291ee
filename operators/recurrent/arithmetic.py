"""What recurrent implementations compute: gates, then the recurrence, with states passed along a split sequence."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .config import DeltaRuleConfig, LinearConfig
from .gated import by_heads, gated, skipped, wide
from .kernel.convolution import Convolution, activated, causal_conv, conv_over_rows, last_tokens
from .kernel.gates import ROLES, Gates, Ungated, step_of
from .kernel.over_rows import over_rows
from .kernel.selective_scan import selective_scan
from .local import Affine, RecurrentCall, passed_on
from .over_slots import over_slots, over_slots_by_kernels

__all__ = ["Results", "convolution", "delta_rule", "linear", "mamba1", "mamba2"]

Results = dict[str, jax.Array]


def _recurrence(
    call: RecurrentCall, given: Ungated, gates: Gates, scale: float, names: tuple[str, str, str] = ROLES
) -> Results:
    """Outputs, and the state in float32, or the slots of a step and the windows of its convolutions. names: what the operation
    calls query, key and value."""
    if call.rows is not None:
        given = given._replace(convolved=tuple(_convolution(call, name) for name in names))
        outputs, slots = (over_slots if call.token is None else over_slots_by_kernels)(call, given, gates, scale)
        found = [name for name, one in zip(names, given.convolved, strict=True) if one is not None]
        windows = {f"{name}_conv_window": x for name, x in zip(found, slots[1:], strict=True)}
        return _outputs(call, outputs, slots[0]) | windows
    outputs, state = _whole(call, given, gates, scale)
    return _outputs(call, skipped(given, outputs), state)


def _convolution(call: RecurrentCall, name: str) -> Convolution | None:
    if (weight := call.arrays.get(f"{name}_conv_weight")) is None:
        return None
    return Convolution(weight, call.arrays.get(f"{name}_conv_bias"), call.arrays[f"{name}_conv_window"])


def _whole(call: RecurrentCall, given: Ungated, gates: Gates, scale: float) -> tuple[jax.Array, jax.Array]:
    """(outputs [batch, tokens, heads, value_dim], state in float32) of a whole call."""
    batch, _, heads, value_dim = given.value.shape
    dim, initial = given.key.shape[3], call.arrays.get("initial_state")
    query, key, value, decay, beta = gated(given, gates, call.valid)
    size = call.config.chunk_size
    arrays = [by_heads(x) for x in (query, key, value, decay)]
    by_head = None if beta is None else by_heads(beta)
    after = None
    if call.over:
        start = jnp.zeros((batch, heads, dim, value_dim), jnp.float32) if initial is None else wide(initial)
        initial, after = _passed(call, arrays, by_head, start, size)
    run = functools.partial(call.chunked, scale=scale, chunk_size=size)
    outputs, state = run(arrays[0], arrays[1], arrays[2], arrays[3], by_head, initial, call.document)
    return jnp.moveaxis(outputs, 1, 2), state if after is None else after


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
        kept = jnp.exp(jnp.sum(wide(decay), 2))[..., None]
        if call.document is not None:
            kept = jnp.where((call.document[:, -1] == 0)[:, None, None, None], kept, 0)
        return passed_on(call, Affine(kept, constant), initial, jnp.multiply)
    wider = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, dim)))
    unit = jnp.broadcast_to(jnp.eye(dim, dtype=jnp.float32), (*initial.shape[:2], dim, dim))
    _, both = run(
        query, key, wider, decay, beta, jnp.pad(unit, ((0, 0), (0, 0), (0, 0), (value_dim, 0))), call.document
    )
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
        given = given._replace(rate=-jnp.exp(wide(call.arrays["A_log"])), bias=call.arrays.get("dt_bias"))
    strongest = config.beta_max if config.beta_form == "sigmoid" else None
    gates = Gates(_eps(call), softplus=raw, beta_max=strongest)
    return _recurrence(call, given, gates, _scale(call, key.shape[3]))


def linear(call: RecurrentCall) -> Results:
    """Linear attention with decay."""
    query, key, value = call.arrays["query"], call.arrays["key"], call.arrays["value"]
    given = Ungated(query, key, value, _decay(call, value.shape))
    return _recurrence(call, given, Gates(_eps(call)), _scale(call, key.shape[3]))


def _eps(call: RecurrentCall) -> float | None:
    """Under the root of the norms of queries and keys; None if they aren't divided by them."""
    config: LinearConfig = call.config
    return config.normalise_eps if call.problem.option.get("normalise_qk") else None


def _steps(call: RecurrentCall) -> Gates:
    """The gates of Mamba."""
    config = call.config
    least, most = getattr(config, "dt_min", None), getattr(config, "dt_max", None)
    return Gates(softplus=config.dt_softplus, least=least, most=most, steps=True)


def mamba2(call: RecurrentCall) -> Results:
    """Mamba-2: linear attention whose keys are B, queries C, values dt x, with the log decay dt A."""
    arrays = call.arrays
    given = Ungated(
        arrays["C"], arrays["B"], arrays["x"], arrays["dt"], None, wide(arrays["A"]), arrays.get("dt_bias"),
        arrays.get("D"),
    )  # fmt: skip
    return _recurrence(call, given, _steps(call), 1.0, ("C", "B", "x"))


def mamba1(call: RecurrentCall) -> Results:
    """Mamba-1: a decay for each channel and each number of its state."""
    x, rate, bias = call.arrays["x"], wide(call.arrays["A"]), call.arrays.get("dt_bias")
    dt = step_of(_steps(call), call.arrays["dt"], None if bias is None else bias[None, None])
    dt = dt if call.valid is None else jnp.where(call.valid[..., None], dt, 0)
    initial, size = call.arrays.get("initial_state"), call.config.chunk_size
    b, c, after = call.arrays["B"], call.arrays["C"], None

    def with_inputs(outputs: jax.Array) -> jax.Array:
        factor = call.arrays.get("D")
        return outputs if factor is None else outputs + wide(factor)[None, None] * wide(x)

    if call.rows is not None:
        assert initial is not None

        def scan(arrays: tuple[jax.Array, ...], state: jax.Array) -> tuple[jax.Array, jax.Array]:
            x, dt, b, c = arrays
            return selective_scan(x, dt, rate, b, c, state, None, chunk_size=size)

        arrays = (x[0], dt[0], b[0], c[0])
        outputs, slots = over_rows(scan, arrays, initial, call.rows, size, one_by_one=call.one_by_one())
        return _outputs(call, with_inputs(outputs[None]), slots)
    run = functools.partial(selective_scan, x, dt, rate, b, c, document=call.document, chunk_size=size)
    if call.over:
        _, constant = run(initial_state=None)
        kept = jnp.exp(jnp.sum(dt, 1)[..., None] * rate[None])
        if call.document is not None:
            kept = jnp.where((call.document[:, -1] == 0)[:, None, None], kept, 0)
        start = jnp.zeros_like(constant) if initial is None else wide(initial)
        initial, after = passed_on(call, Affine(kept, constant), start, jnp.multiply)
    outputs, state = run(initial_state=initial)
    return _outputs(call, with_inputs(outputs), state if after is None else after)


def convolution(call: RecurrentCall) -> Results:
    """A causal convolution; of a split sequence, each device has its left neighbour's last tokens."""
    x, weight, activation = call.arrays["x"], call.arrays["weight"], call.problem.option.get("activation")
    if call.rows is not None:
        one, slots = conv_over_rows(x[0], weight, call.arrays.get("bias"), call.arrays["initial_state"], call.rows)
        return _outputs(call, activated(one[None], activation), slots)
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
    outputs = activated(causal_conv(both, weight, call.arrays.get("bias"), seen), activation)
    state = last_tokens(both, kept, seen, last, ends, low)
    state = lax.psum(state, call.over) if call.over else state
    return _outputs(call, outputs, state)
