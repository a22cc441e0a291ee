"""Numbers that are known only at run time: each refusal names another way, which gives the reference's values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import (
    Attention,
    AttnOpsError,
    Causal,
    Chunked,
    Lengths,
    Positions,
    Prefix,
    SegmentIds,
    SlidingWindow,
    dot_product_attention,
)
from attnops.errors import InputTypeError, MaskError
from attnops.masks import window_tokens
from attnops.verify import reference_attention

Q, K, V = (jax.random.normal(jax.random.key(n), (2, 20, 4, 8)) for n in range(3))
AT = jnp.broadcast_to(jnp.arange(20), (2, 20))
AHEAD = np.arange(20) - np.arange(20)[:, None]  # key minus query
attend = Attention("vanilla", path="plain")


def _refused(call: Any) -> AttnOpsError:
    with pytest.raises(AttnOpsError) as caught:
        jax.jit(call)(3)
    return caught.value


@pytest.mark.parametrize(
    ("call", "error", "way"),
    [
        (lambda n: attend(Q, K, V, sliding_window=(n, 0)), InputTypeError, "Positions(query - left, kv"),
        (lambda n: attend(Q, K, V, sliding_window=n), InputTypeError, "Positions(query - left, kv"),
        (lambda n: dot_product_attention(Q, K, V, local_window_size=(n, 0)), InputTypeError, "Positions(query - left"),
        (lambda n: SlidingWindow(left=n), MaskError, "Positions(query - left, kv"),
        (lambda n: SlidingWindow(left=3, right=n), MaskError, "Positions(query + right, kv)"),
        (lambda n: Positions(AT, AT, left=n), MaskError, "Positions(query - left, kv"),
        (lambda n: Positions(AT, AT, right=n), MaskError, "Positions(query + right, kv)"),
        (lambda n: window_tokens(n), MaskError, "Positions(query - (n - 1), kv"),
        (lambda n: Causal(offset=n), MaskError, "query_offset"),
        (lambda n: Chunked(n), MaskError, "SegmentIds(query // size"),
        (lambda n: Prefix(n), MaskError, "use Lengths, int [batch]"),
        (lambda n: attend(Q, K, V, softmax_scale=n * jnp.ones(4)), InputTypeError, "multiply the query"),
        (lambda n: dot_product_attention(Q, K, V, scale=n * 1.0), InputTypeError, "multiply the query"),
        (lambda n: attend(Q, K, V, logits_soft_cap=n * 1.0), InputTypeError, "can't be traced"),
        (lambda n: attend(Q, K, V, dropout_prob=n * 0.1), InputTypeError, "static argument"),
    ],
)
def test_a_refusal_names_another_way(call: Any, error: type[AttnOpsError], way: str) -> None:
    found = _refused(call)
    assert isinstance(found, error)
    assert way in str(found)


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (lambda n: Causal() & Positions(AT - n, AT, left=0, right=None), (AHEAD <= 0) & (AHEAD >= -3)),
        (lambda n: Positions(AT - n, AT, left=0, right=None) & Positions(AT + n, AT), abs(AHEAD) <= 3),
        (lambda n: Positions(AT - (n - 1), AT, left=0, right=None) & Causal(), (AHEAD <= 0) & (AHEAD > -3)),
        (lambda n: SegmentIds(AT // n, AT // n), np.arange(20) // 3 == np.arange(20)[:, None] // 3),
        (lambda n: Lengths(jnp.full(2, n)), np.arange(20) < 3),
    ],
)
def test_the_other_way_has_the_references_values(mask: Any, visible: np.ndarray) -> None:
    got = jax.jit(lambda n: attend(Q, K, V, mask=mask(n)).attention_outputs)(3)
    visible = np.broadcast_to(visible, (1, 1, 20, 20))
    np.testing.assert_allclose(got, reference_attention(Q, K, V, scale=8**-0.5, mask=visible).output, atol=2e-6)


def test_a_scale_of_each_head() -> None:
    """The query is multiplied instead, by [heads, 1] in layout bthd."""
    scales = jnp.array([0.1, 0.5, 1.0, 2.0])
    got = jax.jit(lambda s: attend(Q * s[None, None, :, None], K, V, softmax_scale=1.0).attention_outputs)(scales)
    for head, scale in enumerate((0.1, 0.5, 1.0, 2.0)):
        one = [x[:, :, head : head + 1] for x in (Q, K, V)]
        want = reference_attention(*one, scale=scale, mask=AHEAD[None, None] <= 0).output
        np.testing.assert_allclose(got[:, :, head : head + 1], want, atol=2e-6)
