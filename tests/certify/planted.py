"""A function of attention that is right, and others that are wrong in one thing each. planted.toml says how they are called."""

import functools
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

NEVER = -1e30


def attend(
    q, k, v, *, causal=False, offset=0, window=None, segments=None, lengths=None, mask=None, bias=None, scale=None, cap=None,
    sinks=None, slopes=None, temperature=None, table=None, gates=None, lse=False, wrong="",
):  # fmt: skip
    """Everything in float32; a row that sees no key is 0. wrong: the one thing that is not as it should be."""
    dtype, kv_len = q.dtype, k.shape[1]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    if wrong == "head order":
        k, v = (jnp.tile(x, (1, 1, group, 1)) for x in (k, v))
    else:
        k, v = (jnp.repeat(x, group, 2) for x in (k, v))
    scale = q.shape[3] ** -0.5 if scale is None or wrong == "scale ignored" else scale
    x = jnp.einsum("bihd,bjhd->bhij", q, k) * (1.0 if wrong == "no scale" else scale)
    if cap is not None and wrong != "cap ignored":
        x = cap * jnp.tanh(x / cap)
    i, j = jnp.arange(q.shape[1], dtype=jnp.int32)[:, None] + offset, jnp.arange(kv_len, dtype=jnp.int32)[None]
    if slopes is not None:
        x = x - slopes[None, :, None, None] * abs(i - j)[None, None].astype(jnp.float32)
    if temperature is not None:
        x = x * temperature[None, :, None, None]
    if table is not None:
        by_distance = table[jnp.clip(j - i, -3, 2) + 3]
        x = x + jnp.moveaxis(by_distance, -1, 0)[None]
    if gates is not None:
        sums = jnp.cumsum(gates, -1)
        x = x + sums[:, :, i[:, 0]][..., None] - sums[:, :, None]
    if bias is not None:
        x = x + bias.astype(jnp.float32)
    see = jnp.ones((1, 1, *x.shape[2:]), bool)
    if causal:
        at = i - offset if wrong == "causal at the start" else i
        see = see & (j <= at)[None, None]
    if window is not None:
        left, right = window
        if left is not None:
            see = see & (j >= i - left - int(wrong == "window"))[None, None]
        if right is not None:
            see = see & (j <= i + right)[None, None]
    if segments is not None and wrong != "segments ignored":
        see = see & (segments[:, None, :, None] == segments[:, None, None, :])
    if lengths is not None:
        see = see & (j[None, None] < lengths[:, None, None, None])
    if mask is not None:
        if wrong == "mask added":
            x = x + mask.astype(jnp.float32)
        else:
            see = see & mask
    x = jnp.where(see, x, -jnp.inf if wrong == "dead rows" else NEVER)
    top = x.max(-1, keepdims=True)
    if sinks is not None:
        top = jnp.maximum(top, sinks.astype(jnp.float32)[None, :, None, None])
    top = jax.lax.stop_gradient(top)
    if wrong != "dead rows":
        top = jnp.maximum(top, NEVER / 2)
    e = jnp.where(see | (wrong == "dead rows"), jnp.exp(x - top), 0.0)
    total = e.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(jnp.float32)[None, :, None, None] - top)
    weights = e / (total if wrong == "dead rows" else jnp.where(total > 0, total, 1.0))
    out = jnp.einsum("bhij,bjhd->bihd", weights, v).astype(dtype)
    if lse:
        return out, jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1.0)) + top, -jnp.inf)[..., 0]
    return out


def _wrong(what):
    return functools.partial(attend, wrong=what)


window_off_by_one = _wrong("window")
mask_added = _wrong("mask added")
segments_ignored = _wrong("segments ignored")
head_order = _wrong("head order")
dead_rows = _wrong("dead rows")
no_scale = _wrong("no scale")
scale_ignored = _wrong("scale ignored")
causal_at_the_start = _wrong("causal at the start")
cap_ignored = _wrong("cap ignored")


@jax.custom_vjp
def half_gradient(x):
    return x


half_gradient.defvjp(lambda x: (x, None), lambda _, d: (d / 2,))


def wrong_gradient(q, k, v, **more):
    """The gradient of the key is half of what it should be."""
    return attend(q, half_gradient(k), v, **more)


def aborts_with_bias(q, k, v, **more):
    """Ends the process."""
    if "bias" in more:
        os.abort()
    return attend(q, k, v, **more)


def hangs_with_sinks(q, k, v, **more):
    """Never comes back."""
    if "sinks" in more:
        time.sleep(1000)
    return attend(q, k, v, **more)


def exits_with_scale(q, k, v, **more):
    """Leaves Python."""
    if "scale" in more:
        sys.exit(3)
    return attend(q, k, v, **more)


def takes_seconds_with_scale(q, k, v, **more):
    """Is slow."""
    time.sleep(2.5 if "scale" in more else 0)
    return attend(q, k, v, **more)


def hangs_in_a_child_with_scale(q, k, v, **more):
    """Waits for another process, whose number it leaves in a file."""
    if "scale" in more:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        with open(os.environ["PLANTED_PID"], "a") as file:
            print(child.pid, file=file)
        child.wait()
    return attend(q, k, v, **more)


def reads_and_prints(q, k, v, **more):
    """Talks on the streams of its process."""
    print("{}", sys.stdin.read())
    return attend(q, k, v, **more)


def refuses_everything(q, k, v, **more):
    """Never runs."""
    raise NotImplementedError("dims of 128 are wanted")


number = 3


def refuses_windows(q, k, v, *, window=None, **more):
    """Says that it can't."""
    if window is not None:
        raise NotImplementedError(f"no window, got {window}")
    return attend(q, k, v, **more)


def refuses_windows_with_bias(q, k, v, *, window=None, bias=None, **more):
    """Says that it can't do both."""
    if window is not None and bias is not None:
        raise NotImplementedError("a window or a bias")
    return attend(q, k, v, window=window, bias=bias, **more)


def wrong_together(q, k, v, *, cap=None, causal=False, **more):
    """Leaves the cap out where it is causal."""
    return attend(q, k, v, cap=None if causal else cap, causal=causal, **more)
