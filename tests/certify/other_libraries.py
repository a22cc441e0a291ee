"""Functions with the signatures of other libraries, and for each one that is wrong in one thing."""

import functools

import jax.numpy as jnp
import numpy as np
from planted import attend


def jax_nn(q, k, v, bias=None, mask=None, *, scale=None, is_causal=False, local_window_size=None,
           key_value_seq_lengths=None, logits_soft_cap=None, wrong=""):  # fmt: skip
    """As jax.nn's and tokamax's."""
    window = local_window_size
    if window is not None and wrong == "window":
        window = (window[0] - 1, window[1])
    cap = None if wrong == "cap" else logits_soft_cap
    return attend(
        q,
        k,
        v,
        causal=is_causal,
        window=window,
        lengths=key_value_seq_lengths,
        mask=mask,
        bias=bias,
        scale=scale,
        cap=cap,
    )


tokamax = jax_nn
jax_nn_wrong = functools.partial(jax_nn, wrong="window")
tokamax_wrong = functools.partial(jax_nn, wrong="cap")


def flax(query, key, value, bias=None, mask=None, wrong=False):
    """As flax.linen's. wrong: the mask is added."""
    added = bias if not wrong or mask is None else mask.astype(jnp.float32)
    return attend(query, key, value, mask=None if wrong else mask, bias=added)


flax_wrong = functools.partial(flax, wrong=True)


def flash_attn(
    q, k, v, causal=False, window_size=(-1, -1), softmax_scale=None, softcap=0.0, alibi_slopes=None, wrong=False
):
    """As flash_attn_func's. wrong: the queries stand at the start."""
    left, right = (None if side < 0 else side for side in window_size)
    return attend(
        q, k, v, causal=causal, window=(left, right), scale=softmax_scale, cap=softcap or None, slopes=alibi_slopes,
        offset=0 if wrong else k.shape[1] - q.shape[1],
    )  # fmt: skip


flash_attn_wrong = functools.partial(flash_attn, wrong=True)


def splash(mask, *, head_shards, q_seq_shards, attn_logits_soft_cap=None, wrong=False):
    """As make_splash_mha's: a kernel of [heads, length, dim], whose queries are scaled. wrong: segments are ignored."""
    assert head_shards == q_seq_shards == 1
    visible = jnp.asarray(np.stack([one[:, :] for one in mask.masks]))[None]

    def kernel(q, k, v, segments=None):
        seen = visible
        if segments is not None and not wrong:
            seen = seen & (segments.q[:, None] == segments.kv[None])[None, None]
        q, k, v = (jnp.swapaxes(x, 0, 1)[None] for x in (q, k, v))
        return jnp.swapaxes(attend(q, k, v, mask=seen, scale=1.0, cap=attn_logits_soft_cap)[0], 0, 1)

    return kernel


splash_wrong = functools.partial(splash, wrong=True)


def torch_attention(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False, wrong=False):
    """As torch's. wrong: a mask of booleans is added."""
    import torch

    mask = attn_mask.float() if wrong and attn_mask is not None else attn_mask
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


torch_attention_wrong = functools.partial(torch_attention, wrong=True)
