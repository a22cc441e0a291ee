"""The kernels' VMEM and scalar memory, counted before they are compiled."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .....devices import SCALAR_BYTES, vmem_of
from .chunks import chunk_scratch
from .decode import by_product
from .geometry import LANES, Geometry, Options, sublanes
from .pages import page_scratch
from .row_numbers import Lanes
from .selected import by_pieces, row_words
from .softmax import Columns, lane_chunks
from .work_items import FIELDS, max_chunk_items
from .writes import row_block, write_scratch

__all__ = ["MAX_SCALAR_BYTES", "ROOM", "scalar_words", "several_rows", "vmem_parts", "vmem_room"]

# The compiler's own share of scalar memory was measured as less than 16 KiB.
MAX_SCALAR_BYTES = SCALAR_BYTES - (16 << 10)
# In everything compiled so far, the compiler took at most this many times what is counted here.
ROOM = 1.1
# The paths through a block of queries and pages, with and without a mask, of which each has its logits. They share most of the
# memory: the compiler takes 0.5 to 1.2 times one path's (benchmarks/results/paged_static.json).
_PATHS = 4 / 3


def several_rows(geometry: Geometry, options: Options) -> bool:
    """Whether a sequence may have several rows in a batch, or a row a span: they are the second kernel's, unless tokens name
    their keys, when each is a row of its own."""
    if geometry.selected:
        return False
    return options.spans or (geometry.tokens > 1 and options.max_q_len != 1)


def vmem_parts(geometry: Geometry, options: Options, *, at_most: bool = False) -> dict[str, dict[str, int]]:
    """Each kernel of a call -> bytes of VMEM by what they hold. at_most: as if code paths shared nothing, to choose sizes by."""
    if geometry.selected:
        return {"attnops_paged_selected": _decode_parts(*by_pieces(geometry, options))}
    parts = {"attnops_paged_decode": _decode_parts(geometry, options)}
    if several_rows(geometry, options):
        parts["attnops_paged_chunks"] = _chunk_parts(geometry, options, 2 if at_most else _PATHS)
    return parts


def scalar_words(geometry: Geometry, options: Options) -> dict[str, dict[str, int]]:
    """Each kernel of a call -> words of scalar memory by what they hold."""
    if geometry.selected:
        walked, _ = by_pieces(geometry, options)
        rows = 4 * row_words(walked)
        return {"attnops_paged_selected": {"units": geometry.tokens * FIELDS, "keys of two tokens, twice": rows}}
    table = {"page table": geometry.sequences * geometry.width}
    words = {"attnops_paged_decode": table | {"units": geometry.sequences * FIELDS}}
    if several_rows(geometry, options):
        items, _ = max_chunk_items(geometry, options)
        words["attnops_paged_chunks"] = table | {"units": items * FIELDS}
    return words


def vmem_room(device_kind: str, vmem_limit_bytes: int | None) -> int:
    """VMEM that a kernel may take on a kind of device: the requested amount if the device has it, else the default."""
    vmem = vmem_of(device_kind)
    return vmem.default if vmem_limit_bytes is None else min(vmem_limit_bytes, vmem.maximum)


def _decode_parts(geometry: Geometry, options: Options) -> dict[str, int]:
    keys = options.pages_per_block * geometry.page * (geometry.kv_heads if by_product(geometry) else 1)
    query, output = (
        2 * _bytes((geometry.heads, dim), geometry.dtype) for dim in (geometry.query_dim, geometry.summed_dim)
    )
    sums = _bytes((geometry.heads, geometry.summed_dim), np.float32)
    return (
        _page_parts(geometry, options)
        | {
            "query, output and lse, twice": query
            + output
            + 2 * _bytes((lane_chunks(geometry.heads), LANES), np.float32),
            "numbers of heads": _columns(geometry, options),
            "logits and weights (pages_per_block)": _logits(geometry, geometry.heads, keys),
            "keys and values on their way to a product": _converted(geometry, options, by_product(geometry)),
        }
        | ({"own rows and what is written of pages": _written(geometry)} if options.writes else {})
        | ({"sums of a block, made twice": 2 * sums} if geometry.selected and geometry.page > 1 else {})
    )


def _written(geometry: Geometry) -> int:
    rows = (_bytes(row_block(geometry, name), dtype) for name, (_, dtype) in geometry.streams().items())
    buffer_sizes = (_bytes(x.shape, x.dtype) for x in _buffers(write_scratch(geometry)).values())
    return 2 * sum(rows) + sum(buffer_sizes)


def _chunk_parts(geometry: Geometry, options: Options, paths: float) -> dict[str, int]:
    rows, keys = geometry.group * options.queries_per_block, options.pages_per_block * geometry.page
    buffer_sizes = {name: _bytes(x.shape, x.dtype) for name, x in _buffers(chunk_scratch(geometry, options)).items()}
    return _page_parts(geometry, options) | {
        "query, twice, and output (queries_per_block)": buffer_sizes["query_buffer"] + buffer_sizes["output_buffer"],
        "sums (queries_per_block)": buffer_sizes["peak"] + buffer_sizes["total"] + buffer_sizes["weighted"],
        "lse, twice": 2 * _bytes((geometry.kv_heads, lane_chunks(rows), LANES), np.float32),
        "numbers of heads": _columns(geometry, options),
        "numbers of rows, twice (queries_per_block)": _numbers(options),
        "logits, weights and mask (queries_per_block x pages_per_block)": int(paths * _logits(geometry, rows, keys)),
        "keys and values on their way to a product": _converted(geometry, options, False)
        + _gathered(geometry, options),
    }


def _numbers(options: Options) -> int:
    return 2 * _bytes((options.queries_per_block, LANES), np.int32) if Lanes.of(options) is not None else 0


def _gathered(geometry: Geometry, options: Options) -> int:
    """All heads' keys and values of a block, taken out of the tiles that hold all heads of a token: widened, once for each of the
    two paths through a block. The compiler took 0.6 to 2.3 times their memory for those read in words, up to 4.9 times for
    others that alternate."""
    if not geometry.tokens_first:
        return 0
    rows = options.pages_per_block * geometry.page
    widths = geometry.key_row, geometry.value_row
    names = ("key",) if geometry.one_array else ("key", "value")
    times = 5 / 2 if all(geometry.read_in_words(name) for name in names) else 4 + geometry.alternating
    return int(times * geometry.kv_heads * sum(_bytes((rows, n), geometry.compute_dtype) for n in widths))


def _page_parts(geometry: Geometry, options: Options) -> dict[str, int]:
    return {
        f"{name.removesuffix('_buffer')} pages (buffers x pages_per_block)": _bytes(x.shape, x.dtype)
        for name, x in _buffers(page_scratch(geometry, options)).items()
    }


def _buffers(scratch: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in scratch.items() if len(getattr(x, "shape", ())) > 2}


def _columns(geometry: Geometry, options: Options) -> int:
    return 2 * Columns.of(geometry, options).many * _bytes((geometry.heads, LANES), np.float32)


def _logits(geometry: Geometry, rows: int, keys: int) -> int:
    """In float32, plus the weights as a factor; a float32 product splits both factors in three."""
    return _bytes((rows, keys), np.float32) * 3 // (2 if geometry.compute_dtype.itemsize == 2 else 1)


def _converted(geometry: Geometry, options: Options, flat: bool) -> int:
    """Keys or values of a block (all heads'), if they can't be multiplied in place."""
    rows = options.pages_per_block * geometry.page * (geometry.kv_heads if flat else 1)
    wide = max(_bytes((rows, dim), geometry.compute_dtype) for dim in (geometry.query_dim, geometry.summed_dim))
    as_they_lie = geometry.key_dtype == geometry.value_dtype == geometry.compute_dtype
    if as_they_lie and geometry.compute_dtype.itemsize == 2:
        return wide if flat and geometry.alternating else 0  # keys are taken out of the words that hold values too
    return 3 * wide


def _bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of an array in VMEM: whole tiles of its last two dimensions; few rows round up to a power of two."""
    *lead, rows, lanes = shape
    dtype = np.dtype(dtype)
    tile = sublanes(dtype)
    packed = 4 // dtype.itemsize
    few = max(packed, 1 << (rows - 1).bit_length())
    rows = few if rows < tile else math.ceil(rows / tile) * tile
    return math.prod(lead) * rows * math.ceil(lanes / LANES) * LANES * dtype.itemsize
