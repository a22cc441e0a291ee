"""Hints for unknown keywords: names from other libraries, and their names here.

Sources: jax.nn.dot_product_attention; torch.nn.functional.scaled_dot_product_attention and MultiheadAttention;
flax.linen.MultiHeadDotProductAttention; flash_attn_func; transformers' attention functions; tokamax.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

from ..errors import InputTypeError, nearest, shown

__all__ = ["NAMES_ELSEWHERE", "other_name", "refuse_unknown"]

_SCALE = "softmax_scale, which multiplies q.k; the default is 1/sqrt(head_dim)"
_CAP = "logits_soft_cap: cap * tanh(logits / cap), and None, not 0, for none"
_SINKS = "softmax_aux, [heads] or [heads, sinks]"
_DROPOUT = "dropout_prob; weights are dropped only with deterministic=False and dropout_rng=jax.random.key(...)"
_TRAINING = "deterministic, with the opposite meaning: deterministic=False drops weights, using dropout_rng"
_LENGTHS = "kv_lengths, int [batch]: the number of valid keys in each row"
_STARTS = "kv_starts, int [batch]: earlier keys are not seen"
_PACKED = "layout='thd' with q_segment_ids and kv_segment_ids, one id per token"
_WEIGHTS = "return_weights=True, and attention_weights of the output"
_LSE = "return_lse=True, and lse of the output"
_WINDOW = (
    "sliding_window: inclusive distances (left, right), with None, not -1, for no bound; mask=window_tokens(n) is the last n "
    "keys, including the query's own"
)
_MASK = "mask, a Mask or a boolean array of rank 4, True where a query may attend; what is added to the logits is bias"
_PADDING = (
    "mask, a boolean array of rank 4, True for valid keys: pass [batch, kv] as mask[:, None, None, :]; or kv_lengths"
)
_BIAS = "bias, which is added to the logits"
_SEGMENTS = "q_segment_ids and kv_segment_ids; one of them is enough if q and kv have the same length"
_RNG = "dropout_rng, a key of jax.random"
_OFFSET = "query_offset, the position of the first query among the keys"
_BLOCKS = "a field of operation_configs of OperationMetadata, such as {'splash': {'block_q': 512}}"
_CLASS = "The operation is chosen by its class, OperationRegistry.get('splash'); what runs it follows from the platform"

NAMES_ELSEWHERE = {
    "is_causal": "causal; the default is OperationMetadata's, which is True unless declared otherwise. If q and kv differ in "
    "length, query_offset says how they are aligned",
    "scale": _SCALE, "sm_scale": _SCALE, "scaling": _SCALE, "softmax_scaling": _SCALE,
    "local_window_size": "sliding_window, with the same meaning: inclusive distances (left, right), or one for both sides",
    "window_size": _WINDOW, "window": _WINDOW, "local_window": _WINDOW,
    "attn_mask": _MASK, "attention_mask": f"{_MASK}. Pass a mask of 0 and 1, [batch, kv], as mask[:, None, None, :] != 0",
    "padding_mask": _PADDING, "key_padding_mask": f"{_PADDING}. torch's is True for padding",
    "attn_bias": _BIAS, "attention_bias": _BIAS,
    "alibi_slopes": "score=ALiBi(slopes)", "score_mod": "score=ScoreFunction(name), a registered function",
    "dropout_p": _DROPOUT, "dropout_rate": _DROPOUT, "dropout": _DROPOUT,
    "dropout_key": _RNG, "dropout_seed": _RNG, "rng": _RNG, "rngs": _RNG,
    "train": _TRAINING, "training": _TRAINING, "is_training": _TRAINING,
    "enable_gqa": "Leave it out: kv heads are always shared if their number divides that of the query heads",
    "query_seq_lengths": "Queries beyond a row's length attend like all others: ignore their output, or mask them with "
    "q_segment_ids",
    "key_value_seq_lengths": _LENGTHS, "kv_seq_lengths": _LENGTHS, "seq_lengths": _LENGTHS, "cache_seqlens": _LENGTHS,
    "lengths": _LENGTHS, "sequence_end": _LENGTHS,
    "sequence_start": _STARTS, "starts": _STARTS, "leftpad_k": _STARTS, "cache_leftpad": _STARTS,
    "cu_seqlens": _PACKED, "cu_seqlens_q": _PACKED, "cu_seqlens_k": _PACKED,
    "segment_ids": _SEGMENTS, "decoder_segment_ids": _SEGMENTS,
    "softcap": _CAP, "soft_cap": _CAP, "logit_cap": _CAP, "logits_softcap": _CAP, "logit_softcap": _CAP,
    "attn_logits_soft_cap": _CAP, "attn_logit_softcapping": _CAP,
    "sinks": _SINKS, "sink": _SINKS, "s_aux": _SINKS, "attention_sinks": _SINKS, "learnable_sink": _SINKS,
    "need_weights": _WEIGHTS, "output_attentions": _WEIGHTS, "return_attn_probs": _WEIGHTS,
    "return_attention_weights": _WEIGHTS,
    "return_residual": _LSE, "return_residuals": _LSE, "return_softmax_lse": _LSE, "save_residuals": _LSE,
    "k_scale": "key_scale, which multiplies the stored key", "k_descale": "key_scale, which multiplies the stored key",
    "v_scale": "value_scale, which multiplies the stored value", "v_descale": "value_scale, which multiplies the stored value",
    "q_offset": _OFFSET, "cache_position": _OFFSET,
    "positions": "mask=Positions(query, kv, left=..., right=...)",
    "position_ids": "Apply rotary embeddings before the call; if positions decide which key is visible, use mask=Positions(...)",
    "implementation": _CLASS,
    "precision": "The precision of products is that of jax.default_matmul_precision",
    "dtype": "runtime_dtype of OperationMetadata", "softmax_dtype": "runtime_softmax_dtype of OperationMetadata",
    "broadcast_dropout": "Leave it out: every weight is dropped independently",
    "block_q": _BLOCKS, "block_kv": _BLOCKS, "block_sizes": _BLOCKS,
}  # fmt: skip
"""Other libraries' names of a call's arguments. A text that starts with a capital letter is a whole sentence; the others follow
"Here it is"."""
# The sizes of a declared call.
_SIZES = {
    "batch_size": "batch", "seq_len": "q_len", "seq_length": "q_len", "sequence_length": "q_len", "query_length": "q_len",
    "query_len": "q_len", "q_length": "q_len", "key_length": "kv_len", "kv_length": "kv_len", "key_len": "kv_len",
    "heads": "q_heads", "num_heads": "q_heads", "query_heads": "q_heads", "num_q_heads": "q_heads", "num_query_heads": "q_heads",
    "num_attention_heads": "q_heads", "num_kv_heads": "kv_heads", "num_key_value_heads": "kv_heads", "key_heads": "kv_heads",
    "dim": "head_dim", "head_size": "head_dim", "d_head": "head_dim", "v_head_dim": "value_dim",
}  # fmt: skip
_OF_METADATA = (
    "mesh",
    "partition_axis",
    "sequence_parallel",
    "runtime_dtype",
    "strict",
    "fallback",
    "platform",
    "backend",
)
_METADATA = {
    "dtype": "runtime_dtype", "attn_dtype": "runtime_dtype; attn_dtype is an attribute of base_config",
    "softmax_dtype": "runtime_softmax_dtype",
    "attn_softmax_dtype": "runtime_softmax_dtype; attn_softmax_dtype is an attribute of base_config",
    "is_causal": "causal, for calls without a Mask object; a call's own overrides it",
    "dropout": "dropout_prob", "dropout_p": "dropout_prob", "dropout_rate": "dropout_prob", "attention_dropout": "dropout_prob",
    "implementation": _CLASS,
    "block_q": "blocksize_q, or a field of operation_configs, such as {'splash': {'block_q': 512}}",
    "block_kv": "blocksize_k, or a field of operation_configs, such as {'splash': {'block_kv': 512}}",
    "sequence_axis": "sequence_axis_name", "paxis": "partition_axis",
}  # fmt: skip


def other_name(name: object, known: Collection[str], kind: str) -> str:
    """A hint for an unknown keyword of a 'call' or of 'metadata': its name here, or the nearest known name."""
    if not isinstance(name, str) or kind not in ("call", "metadata"):
        return nearest(name, known)
    if kind == "call" and _SIZES.get(name) in known:
        return f" Did you mean {_SIZES[name]!r}?"
    if kind == "call" and name in _OF_METADATA and "q_len" in known:
        return f" {name} is a field of metadata."
    hint = (_METADATA | {"scale": _SCALE, "sm_scale": _SCALE} if kind == "metadata" else NAMES_ELSEWHERE).get(name)
    if hint is None and kind == "metadata" and name in NAMES_ELSEWHERE:
        return f"{_sentence(NAMES_ELSEWHERE[name])} It belongs to the call."
    return nearest(name, known) if hint is None else _sentence(hint)


def refuse_unknown(
    unknown: Collection[str], known: Collection[str], kind: str, elsewhere: Collection[str] = ()
) -> NoReturn:
    """Raise for keywords that a 'call' or 'metadata' doesn't have. `elsewhere` are the keywords of the other of the two.

    Errors: InputTypeError, a TypeError, as Python raises for an unexpected keyword.
    """
    owner, other = ("OperationMetadata", "the call") if kind == "metadata" else ("a call", "OperationMetadata")
    lines = []
    for name in unknown:
        hint = f" It is an argument of {other}." if name in elsewhere else other_name(name, known, kind)
        lines.append(f"{shown(name)} is not an argument of {owner}." + (hint or f" Wanted {', '.join(known)}."))
    raise InputTypeError(" ".join(lines))


def _sentence(text: str) -> str:
    return f" {text}." if text[:1].isupper() else f" Here it is {text}."
