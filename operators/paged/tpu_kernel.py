"""The TPU kernels behind `paged`: the reasons against them for a step, their sizes, and the call itself."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ...errors import ConfigError
from ...masks.page_mask import ANY_PAGE_MASK, page_mask
from ...page_layouts import LAYOUTS
from ...planning import OperationConfig, Reason
from ...planning.notes import note
from ...planning.paged.page_reads import selected_bytes
from ...planning.paged.paged_problem import PagedProblem
from ...planning.text import bytes_text
from ..kernels.pages.tpu import (
    Geometry,
    Options,
    PageArrays,
    advice,
    by_pieces,
    chosen_sizes,
    max_vmem,
    paged_attention_tpu,
    reasons_against,
    scalar_words,
    vmem_room,
)
from ..paged_cache.layer_arrays import LayerPages
from ..paged_cache.paged_call import Attended, PagedCall
from .step_reasons import SPANNED, written_first

__all__ = ["on_tpu", "tpu_call", "tpu_notes", "tpu_reasons", "tpu_sizes"]

_COPIES = "page_rows"  # the only advice that is a reason: XLA would copy the whole cache before each call


def tpu_reasons(problem: PagedProblem) -> tuple[Reason, ...]:
    """Every reason against the kernels."""
    if LAYOUTS[problem.layout].kernel is None:
        text = f"the TPU kernel takes pages of layout {_taken()}, but the cache declares {problem.layout!r}"
        hint = "Declare one of these where the cache is allocated, or fallback='allow' for plain XLA."
        return (Reason("paged.page_layout", "cache.layout", text, hint),)
    geometry, options = _geometry(problem), _options(problem, problem.config)
    room = _room(problem, problem.config)
    sized = chosen_sizes(geometry, options, room)
    kernel_reasons = reasons_against(geometry, sized) + [
        advised for advised in advice(geometry) if advised[0] == _COPIES
    ]
    reasons = [
        Reason(f"paged.{code}", _FIELDS.get(code, code), message, _sentence(hint))
        for code, message, hint in kernel_reasons
    ]
    vmem_bytes = max_vmem(geometry, sized)
    if vmem_bytes > room:
        text = (
            f"blocks of {sized.pages_per_block} pages and {sized.queries_per_block} queries take {bytes_text(vmem_bytes)} of "
            f"VMEM, but a kernel may take {bytes_text(room)}"
        )
        hint = "Declare smaller blocks, or a larger vmem_limit_bytes where the device has it."
        reasons.append(Reason("paged.vmem", "vmem_limit_bytes", text, hint))
    return tuple(reasons)


def tpu_call(problem: PagedProblem, config: OperationConfig) -> tuple[Geometry, Options]:
    """One device's call of the kernels, with every size filled in."""
    geometry = _geometry(problem)
    return geometry, chosen_sizes(geometry, _options(problem, config), _room(problem, config))


def tpu_sizes(problem: PagedProblem) -> OperationConfig:
    """The config with every size filled in."""
    _, sized = tpu_call(problem, problem.config)
    sizes = {"pages_per_block": sized.pages_per_block, "queries_per_block": sized.queries_per_block}
    return problem.config.with_fields(sizes)


def tpu_notes(problem: PagedProblem) -> tuple[str, ...]:
    """What the kernels accept but run slowly or with wasted memory."""
    notes = tuple(
        note("paged.advice", message=message, hint=hint)
        for code, message, hint in advice(_geometry(problem))
        if code != _COPIES
    )
    if "selected" in problem.features:
        geometry, options = tpu_call(problem, problem.config)
        pieces, _ = by_pieces(geometry, options)
        words = sum(sum(parts.values()) for parts in scalar_words(geometry, options).values())
        size = selected_bytes(problem) * pieces.page
        notes += (note("paged.selected_pieces", tokens=pieces.page, size=size, scalars=4 * words),)
    return notes


def on_tpu(call: PagedCall) -> Attended:
    """Attend with the TPU kernels; see kernels/pages/tpu."""
    if call.score is not None or call.q_positions is not None:
        raise ConfigError("a score or positions over pages: the TPU kernel has none of it; wanted plain XLA.")
    if LAYOUTS[call.layout].kernel is None:
        raise ConfigError(f"pages of layout {call.layout!r}; wanted one of {_taken()}.")
    output, lse, after = paged_attention_tpu(
        call.query,
        **call.kernel_arguments(),
        layout=LAYOUTS[call.layout].kernel,  # type: ignore[arg-type]
        pages_per_block=call.sizes.pages_per_block,
        queries_per_block=call.sizes.queries_per_block,
        vmem_limit_bytes=call.sizes.vmem_limit_bytes,
        interpret=call.sizes.interpret,
        rows=None if call.rows is None else PageArrays(*call.rows),
        selected=call.selected,
        page_stride=call.sequence_shards,
        page_shard=call.shard_index,
    )
    return Attended(output, lse, None if after is None else LayerPages(*after))


_FIELDS = {
    "dtype": "runtime_dtype",
    "page_table_smem": "max_length",
    "selected_smem": "selected",
    "page_rows": "cache.layout",
    "rope_dtype": "cache.rope_dtype",
}


def _sentence(hint: str) -> str:
    return f"{hint[:1].upper()}{hint[1:].rstrip('.')}."


def _taken() -> str:
    return ", ".join(name for name, layout in LAYOUTS.items() if layout.kernel is not None)


def _geometry(problem: PagedProblem) -> Geometry:
    cache, plan = problem.cache.cache, problem.cache
    heads, kv_heads = problem.local_heads
    rows = cache.pages_shape(1, kv_heads, problem.head_dim)[-1], cache.pages_shape(1, kv_heads, problem.value_dim)[-1]
    scale = None if cache.quantised is None else {"tensor": 0, "head": 1, "token_head": 3}[cache.quantised.scale]
    stored = np.dtype(jax.numpy.dtype(cache.stored_dtype))
    rope: dict[str, Any] = {}
    if cache.rope_size:
        rows = (cache.pages_shape(1, kv_heads, cache.key_size)[-1],) * 2
        rope["rope_row"] = cache.pages_shape(1, kv_heads, cache.rope_size)[-1]
        rope["rope_dtype"] = np.dtype(jax.numpy.dtype(cache.rope_dtype))
    return Geometry(
        layout=LAYOUTS[cache.layout].kernel,  # type: ignore[arg-type]
        tokens=problem.local_tokens,
        heads=heads,
        kv_heads=kv_heads,
        dim=problem.head_dim,
        value_dim=problem.value_dim,
        key_row=rows[0],
        value_row=rows[1],
        pages=plan.local_pages // plan.sequence_shards,
        page=cache.page_size,
        sequences=plan.local_sequences,
        width=plan.table_width // plan.sequence_shards,
        dtype=np.dtype(jax.numpy.dtype(problem.runtime_dtype)),
        key_dtype=stored,
        value_dtype=stored,
        key_scale=scale,
        value_scale=scale,
        selected=0 if (selected := problem.operand("selected")) is None else selected.shape[1],
        **rope,
    )


def _options(problem: PagedProblem, config: OperationConfig) -> Options:
    causal, left, right, chunk = page_mask(problem.mask) or ANY_PAGE_MASK
    tree, spans = problem.operand("draft_tree"), bool(problem.features & SPANNED)
    return Options(
        scale=problem.softmax_scale,
        causal=causal,
        left=left,
        right=right,
        chunk=chunk,
        soft_cap=problem.logits_soft_cap,
        sinks="sinks" in problem.features,
        max_q_len=problem.max_q_len,
        pages_per_block=getattr(config, "pages_per_block", None) or 0,
        queries_per_block=getattr(config, "queries_per_block", None) or 0,
        buffers=0,
        vmem_limit_bytes=getattr(config, "vmem_limit_bytes", None),
        interpret=False,
        writes=problem.update == "fused" and not written_first(problem),
        drafts=0 if tree is None else tree.shape[1],
        spans=spans,
        stride=problem.sequence_shards,
    )


def _room(problem: PagedProblem, config: OperationConfig) -> int:
    """Bytes of VMEM that a kernel may take; if it is interpreted, those of the smallest TPU."""
    return vmem_room(problem.device_kind, getattr(config, "vmem_limit_bytes", None))
