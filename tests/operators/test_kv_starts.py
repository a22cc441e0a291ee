"""kv_starts: the first key of each row that is seen, in caches that are padded on the left; all operations, and decode's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Declaration, InputError, OperationMetadata, OperationRegistry
from attnops.errors import InputTypeError
from attnops.sharding import virtual_mesh
from attnops.verify import reference_attention

STARTS, LENGTHS = np.array([3, 0, 40], np.int32), np.array([20, 64, 40], np.int32)  # the last row sees nothing


def draw(q_len: int) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(1)
    return tuple(random.standard_normal((3, n, h, 16), np.float32) for n, h in ((q_len, 4), (64, 2), (64, 2)))


def expected(query: np.ndarray, key: np.ndarray, value: np.ndarray, window: int | None = None) -> Any:
    q_len = query.shape[1]
    place, rows = np.arange(64), (LENGTHS - q_len)[:, None] + np.arange(q_len)
    seen = (place >= STARTS[:, None, None]) & (place <= rows[..., None])
    if window is not None:
        seen &= place >= rows[..., None] - window
    group = lambda x: x.astype(np.float64)  # noqa: E731
    return reference_attention(group(query), group(key), group(value), mask=seen[:, None], scale=0.25)


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "decodeattn": ("autoregressive_decodeattn", {}),
    "decode": ("vanilla", {"path": "decode", "block_kv": 16}),
    "decode_rows": ("vanilla", {"path": "decode_rows", "block_kv": 16}),
    "decodeattn_decode": ("autoregressive_decodeattn", {"path": "decode", "block_kv": 16}),
    "blockwise": ("vanilla", {"path": "blockwise", "block_q": 2, "block_kv": 16}),
    "sdpa": ("sdpa", {}),
    "splash": ("splash", {"interpret": True, "block_q": 128, "block_kv": 128}),
}


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_keys_before_the_start_are_not_seen(way: str, q_len: int) -> None:
    name, config = WAYS[way]
    attend = OperationRegistry.create(name, OperationMetadata(operation_configs={name: config} if config else {}))
    q, k, v = draw(q_len)
    k[0, :3], v[0, :3] = 1e3, 1e3  # what pads a cache
    call = {"kv_starts": STARTS, "kv_lengths": LENGTHS, "mode": "autoregressive", "sliding_window": (9, 0)}
    got = jax.jit(lambda q, k, v, starts: attend(q, k, v, **call | {"kv_starts": starts}))(q, k, v, STARTS)
    np.testing.assert_allclose(got.attention_outputs, expected(q, k, v, 9).output, atol=3e-5)
    assert (np.asarray(got.attention_outputs)[2, : q_len - 1] == 0).all()


def test_on_a_mesh_that_splits_rows_and_keys() -> None:
    mesh = virtual_mesh({"dp": 3, "sp": 2})
    metadata = OperationMetadata(mesh=mesh)
    attend = OperationRegistry.create("autoregressive_decodeattn", metadata)
    q, k, v = draw(1)
    got = attend(q, k, v, kv_starts=jnp.asarray(STARTS), kv_lengths=jnp.asarray(LENGTHS))
    np.testing.assert_allclose(got.attention_outputs, expected(q, k, v).output, atol=3e-5)
    assert got.plan.problem.mode.strip("_") == "autoregressive"


def test_it_is_vanilla_with_the_configs_of_both() -> None:
    metadata = OperationMetadata(operation_configs={"vanilla": {"path": "blockwise"}})
    plan = OperationRegistry.create("autoregressive_decodeattn", metadata).plan(*draw(1), kv_lengths=LENGTHS)
    assert plan.route is not None
    assert (plan.implementation, plan.route.name) == ("autoregressive_decodeattn.forward_native", "blockwise")
    assert OperationMetadata().get_operation_config("autoregressive_decodeattn") is None


@pytest.mark.parametrize(
    ("starts", "error", "said"),
    [
        (np.array([0, 0, 65]), InputError, "kv_starts holds 65; wanted 0 to 64"),
        (np.array([0, -1, 0]), InputError, "kv_starts holds -1"),
        (np.array([0, 0]), InputError, r"kv_starts has shape (2,); wanted (3,)"),
        (np.array([0.0, 0, 0]), InputTypeError, "kv_starts"),
    ],
)
def test_starts_that_make_no_sense(starts: np.ndarray, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        OperationRegistry.create("vanilla")(*draw(1), kv_starts=starts, kv_lengths=LENGTHS)
    assert said in str(caught.value)


def test_in_a_file() -> None:
    call = {
        "batch": 3,
        "q_len": 1,
        "kv_len": 64,
        "q_heads": 4,
        "head_dim": 16,
        "kv_starts": [3, 0, 40],
        "kv_lengths": True,
    }
    declared = Declaration.from_dict({"operation": "vanilla", "call": call})
    assert Declaration.from_json(declared.to_json()) == declared
    arrays = declared.draw(0)
    np.testing.assert_array_equal(arrays["kv_starts"], [3, 0, 40])
    drawn = Declaration.from_dict({"operation": "vanilla", "call": call | {"kv_starts": True}}).draw(0)
    assert (drawn["kv_starts"] < drawn["kv_lengths"]).all()
    with pytest.raises(InputTypeError, match="kv_starts, int"):
        OperationRegistry.create("vanilla")(*draw(1), sequence_start=STARTS)
