"""Run one implementation of attention at a time for benchmarks/native.py, over stdin: one JSON object per line each way.

Each environment has its own process, so that an implementation may need other versions than attnops does, and so that the
threads of one library don't disturb another's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, ClassVar

import numpy as np

os.environ.setdefault("JAX_PLATFORMS", "cpu")
SEGMENTS = 8
WINDOW = 1024
PACKAGES = ("jax", "flax", "ejkernel", "tokamax", "torch")


def tensors(cell: dict[str, Any]) -> list[np.ndarray]:
    """query, key, value, cotangent of the output: normal, float32, [batch, time, heads, dim]."""
    rng = np.random.default_rng(0)
    batch = cell.get("batch", 1)
    query = (batch, cell["q_len"], cell["heads"], cell["dim"])
    key = (batch, cell["kv_len"], cell["kv_heads"], cell["dim"])
    return [rng.standard_normal(shape, np.float32) for shape in (query, key, key, query)]


def lengths(cell: dict[str, Any]) -> np.ndarray | None:
    """How much of each cache is filled, where that differs: int32 [batch], from a quarter to the whole."""
    if cell["mask"] != "ragged cache":
        return None
    return np.random.default_rng(1).integers(cell["kv_len"] // 4, cell["kv_len"] + 1, cell["batch"]).astype(np.int32)


def segment_ids(cell: dict[str, Any]) -> np.ndarray:
    """Eight packed sequences of equal length: int32 [1, time]."""
    return (np.arange(cell["q_len"]) * SEGMENTS // cell["q_len"]).astype(np.int32)[None]


def visible(cell: dict[str, Any], xp: Any) -> Any:
    """The cell's mask as a boolean array [q, kv], for implementations that take one."""
    rows, cols = xp.arange(cell["q_len"])[:, None], xp.arange(cell["kv_len"])[None, :]
    seen = cols <= rows
    if cell["mask"] == "window":
        return seen & (cols > rows - WINDOW)
    size = cell["q_len"] // SEGMENTS
    return seen & (rows // size == cols // size) if cell["mask"] == "packed" else seen


# -- JAX ---------------------------------------------------------------------------------------------------------------


def attnops(cell: dict[str, Any]) -> Callable[..., Any]:
    import jax.numpy as jnp

    from attnops import Causal, Full, OperationMetadata, OperationRegistry, SlidingWindow

    dtype = cell["dtype"]
    attend = OperationRegistry.create("vanilla", OperationMetadata(runtime_dtype=dtype))
    masks = {"window": Causal() & SlidingWindow(left=WINDOW - 1), "causal": Causal(), "packed": Causal()}
    mask = masks.get(cell["mask"], Full())
    ids = jnp.asarray(segment_ids(cell)) if cell["mask"] == "packed" else None

    def of_a_cache(q: Any, k: Any, v: Any, filled: Any) -> Any:
        return attend(q, k, v, mask=mask, kv_lengths=filled).attention_outputs

    if cell["mask"] == "ragged cache":
        return of_a_cache
    return lambda q, k, v: attend(q, k, v, mask=mask, q_segment_ids=ids, kv_segment_ids=ids).attention_outputs


def jax_nn(cell: dict[str, Any]) -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp

    kind = cell["mask"]
    window = (WINDOW - 1, 0) if kind == "window" else None

    def attend(q: Any, k: Any, v: Any, filled: Any = None) -> Any:
        mask = visible(cell, jnp)[None, None] if kind == "packed" else None
        causal = kind in ("causal", "window")
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            is_causal=causal,
            local_window_size=window,
            key_value_seq_lengths=filled,
            implementation="xla",
        )

    return attend


def einsum(cell: dict[str, Any]) -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp

    def attend(q: Any, k: Any, v: Any) -> Any:
        group = q.shape[2] // k.shape[2]
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        if cell["mask"] not in ("full", "decode"):
            logits = jnp.where(visible(cell, jnp), logits, -1e30)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits, axis=-1).astype(v.dtype), v)

    return attend


def flax_nnx(cell: dict[str, Any]) -> Callable[..., Any]:
    import jax.numpy as jnp
    from flax import nnx

    def attend(q: Any, k: Any, v: Any) -> Any:
        group = q.shape[2] // k.shape[2]
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        mask = None if cell["mask"] in ("full", "decode") else visible(cell, jnp)[None, None]
        return nnx.dot_product_attention(q, k, v, mask=mask)

    return attend


def ejkernel(cell: dict[str, Any]) -> Callable[..., Any]:
    import jax.numpy as jnp
    from ejkernel.kernels._xla.flash_attention import flash_attention

    kind = cell["mask"]
    ids = jnp.asarray(segment_ids(cell)) if kind == "packed" else None
    window = (WINDOW - 1, 0) if kind == "window" else None
    causal = kind in ("causal", "window", "packed")
    return lambda q, k, v: flash_attention(
        q, k, v, causal=causal, sliding_window=window, q_segment_ids=ids, kv_segment_ids=ids
    )


def tokamax(cell: dict[str, Any]) -> Callable[..., Any]:
    import jax.numpy as jnp
    import tokamax as library

    kind = cell["mask"]

    def attend(q: Any, k: Any, v: Any) -> Any:
        mask = visible(cell, jnp)[None, None] if kind == "packed" else None
        window = (WINDOW - 1, 0) if kind == "window" else None
        causal = kind in ("causal", "window")
        return library.dot_product_attention(
            q, k, v, mask=mask, is_causal=causal, local_window_size=window, implementation="xla_chunked"
        )

    return attend


class Jax:
    """Compile a cell's program, time it, and read its temporary memory."""

    rivals: ClassVar = {
        "attnops": attnops, "jax.nn": jax_nn, "einsum": einsum, "flax nnx": flax_nnx, "ejkernel": ejkernel, "tokamax": tokamax,
    }  # fmt: skip

    def setup(self, rival: str, cell: dict[str, Any]) -> dict[str, Any]:
        import jax
        import jax.numpy as jnp

        attend = self.rivals[rival](cell)
        q, k, v, d_out = (jnp.asarray(x, cell["dtype"]) for x in tensors(cell))

        def both(q: Any, k: Any, v: Any) -> Any:
            output, pull = jax.vjp(attend, q, k, v)
            return output, pull(d_out)

        function = both if cell["backward"] else attend
        filled = lengths(cell)
        inputs = (q, k, v) if filled is None else (q, k, v, jnp.asarray(filled))
        program = jax.jit(function).lower(*inputs).compile()
        self.run = lambda: jax.tree.leaves(jax.block_until_ready(program(*inputs)))
        return {"temp": program.memory_analysis().temp_size_in_bytes}

    def sample(self, outputs: list[Any]) -> list[float]:
        return [float(np.asarray(x, np.float32)[0, -1, -1, 0]) for x in outputs]

    def gemm(self, dtype: str, size: int) -> Callable[[], Any]:
        import jax
        import jax.numpy as jnp

        x = jnp.ones((size, size), dtype)
        product = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
        return lambda: product(x, x).block_until_ready()


class Torch:
    """The same for torch.nn.functional.scaled_dot_product_attention, on tensors in its own layout or in JAX's."""

    def setup(self, rival: str, cell: dict[str, Any]) -> dict[str, Any]:
        import torch

        def placed(x: Any) -> Any:
            by_head = torch.from_numpy(x).to(getattr(torch, cell["dtype"])).transpose(1, 2)
            return by_head if rival == "torch BTHD" else by_head.contiguous()

        q, k, v, d_out = map(placed, tensors(cell))
        kind = cell["mask"]
        mask = None
        if (filled := lengths(cell)) is not None:
            mask = torch.from_numpy(np.arange(cell["kv_len"]) < filled[:, None])[:, None, None]
        if kind in ("window", "packed"):
            mask = torch.from_numpy(np.ascontiguousarray(visible(cell, np)))
        attend = torch.nn.functional.scaled_dot_product_attention
        options = {"attn_mask": mask, "is_causal": kind == "causal", "enable_gqa": cell["heads"] != cell["kv_heads"]}

        def forward() -> Any:
            with torch.no_grad():
                return [attend(q, k, v, **options)]

        def both() -> Any:
            for x in (q, k, v):
                x.requires_grad_().grad = None
            output = attend(q, k, v, **options)
            output.backward(d_out)
            return [output.detach(), q.grad, k.grad, v.grad]

        self.run = both if cell["backward"] else forward
        return {"temp": None}

    def sample(self, outputs: list[Any]) -> list[float]:
        return [float(x.transpose(1, 2)[0, -1, -1, 0]) for x in outputs]


def _timed(run: Callable[[], Any]) -> float:
    """Seconds of a call. Before a short one an extra call runs that doesn't count: the others' threads have left the caches cold
    and may still be spinning."""
    time.sleep(0.01)
    for _ in range(2):
        start = time.perf_counter()
        run()
        took = time.perf_counter() - start
        if took > 0.2:
            break
    return took


def main() -> None:
    """Answer requests until stdin ends. An error is an answer too."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # keeps libraries' prints out of the answers
    workers: dict[str, Any] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        name = asked.get("rival", "")
        try:
            if asked["do"] == "setup":
                workers[name] = Torch() if name.startswith("torch") else Jax()
                answer = workers[name].setup(name, asked["cell"])
            elif asked["do"] == "first":
                start = time.perf_counter()
                outputs = workers[name].run()
                answer = {"seconds": time.perf_counter() - start, "sample": workers[name].sample(outputs)}
            elif asked["do"] == "time":
                answer = {"seconds": _timed(workers[name].run)}
            elif asked["do"] == "gemm":
                run = Jax().gemm(asked["dtype"], asked["size"])
                run()
                start = time.perf_counter()
                for _ in range(5):
                    run()
                answer = {"seconds": (time.perf_counter() - start) / 5}
            elif asked["do"] == "versions":
                answer = {name: metadata.version(name) for name in PACKAGES if name in sys.modules}
            else:
                workers.clear()
                answer = {}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
