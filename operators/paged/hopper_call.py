"""The call of the Hopper kernel behind `paged`, on one device's arrays."""

from __future__ import annotations

from ...errors import ConfigError
from ...page_layouts import LAYOUTS
from ..kernels.pages.hopper.page_tiles import StepShape, hopper_step, own_columns
from ..kernels.pages.page_layout import page_shape
from ..paged_cache.layer_arrays import LayerPages
from ..paged_cache.paged_call import Attended, PagedCall

__all__ = ["on_hopper"]


def on_hopper(call: PagedCall) -> Attended:
    """Attend with the Hopper kernel; see kernels/pages/hopper."""
    # Imports Mosaic GPU, so only where the kernel runs.
    from ..kernels.pages.hopper.attend import PageRows, paged_attention_hopper

    tokens, heads, dim = call.query.shape
    form, pages, sizes = LAYOUTS[call.layout], call.pages, call.sizes
    shape = page_shape(call.layout, pages.key, pages.value, dim, call.value_dim)
    dims, quantised = (dim, call.value_dim), pages.key.dtype.itemsize == 1
    stored = pages.key.shape[-1], (pages.key if pages.value is None else pages.value).shape[-1]
    own = () if call.rows is None else tuple(numbers for _, numbers in own_columns(form, dim, stored))
    given = StepShape(tokens, heads, shape.kv_heads, dims, shape.page, form.values_in_keys, quantised, own)
    step = hopper_step(given, 1, sizes.pages_per_block, sizes.queries_per_block, sizes.kv_splits)
    arguments = call.kernel_arguments()
    beyond = {"selected": call.selected}
    beyond["rope_pages"] = arguments.pop("rope_pages")
    if names := [name for name, x in beyond.items() if x is not None]:
        raise ConfigError(f"{' and '.join(names)} over pages: the Hopper kernel has none of it; wanted plain XLA.")
    output, lse, after = paged_attention_hopper(
        call.query,
        **arguments,
        layout=call.layout,
        page_stride=call.sequence_shards,
        page_shard=call.shard_index,
        score=call.score,
        captures=call.captures,
        head_start=call.head_start,
        q_positions=call.q_positions,
        rows=None if call.rows is None else PageRows(call.rows.key, call.rows.value),
        step=step,
        interpret=sizes.interpret,
    )
    return Attended(output, lse, None if after is None else LayerPages(*after))
