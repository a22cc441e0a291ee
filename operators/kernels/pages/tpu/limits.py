"""What the kernels don't support, with reasons; what they support at a cost; and default block sizes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from .....devices import MIN_VMEM_BYTES
from .geometry import HBM_ROWS, LANES, Geometry, Options, rows_per_word, sublanes
from .memory import MAX_SCALAR_BYTES, ROOM, scalar_words, several_rows, vmem_parts
from .row_numbers import MAX_DRAFTS
from .work_items import row_alignment

__all__ = ["advice", "chosen_sizes", "max_vmem", "reasons_against"]

MAX_PAGES = 32  # per block: each has a bit of a word
# Per block of pages. Larger blocks spread the fixed cost of a step over more keys: on tpu7x a step takes 0.64 of the time of its
# bytes at 2 MiB, 0.89 at 1 MiB.
_BLOCK_BYTES, _MIN_BLOCK_BYTES = 2 << 20, 1 << 20
_BLOCK_KEYS = 1024
_LATENT_KEYS = 2048  # of latents, whose products with few heads end sooner: 2.5 MiB of 640 numbers
_ROWS = 512  # per kv head in a block of queries
_DTYPES = ("bfloat16", "float32")
_PAGES = (*_DTYPES, "int8", "float8_e4m3fn", "float8_e5m2")


def reasons_against(geometry: Geometry, options: Options) -> list[tuple[str, str, str]]:
    """(code, message, hint) for everything that the kernels don't support, except VMEM, whose size depends on the device."""
    reasons: list[tuple[str, str, str]] = []
    if str(geometry.dtype) not in _DTYPES:
        reasons.append(
            ("dtype", f"the query is {geometry.dtype}, which TPUs don't have", "cast it to bfloat16 or float32")
        )
    if geometry.rope_dtype is not None and str(geometry.rope_dtype) not in _DTYPES:
        reasons.append(("rope_dtype", f"rotary keys are {geometry.rope_dtype}", "allocate them in bfloat16 or float32"))
    for name, dtype in (("keys", geometry.key_dtype), ("values", geometry.value_dtype)):
        if str(dtype) not in _PAGES:
            reasons.append(("dtype", f"{name} are {dtype}", f"allocate the cache in one of {', '.join(_PAGES)}"))
    if options.pages_per_block > MAX_PAGES:
        message = (
            f"pages_per_block={options.pages_per_block} is more than the {MAX_PAGES} that the kernels keep track of"
        )
        reasons.append(("pages_per_block", message, f"ask for at most {MAX_PAGES}, or larger pages"))
    align = row_alignment(geometry)
    if several_rows(geometry, options) and options.queries_per_block % align:
        message = f"queries_per_block={options.queries_per_block} isn't a multiple of {align}, the rows of a tile"
        reasons.append(("queries_per_block", message, f"ask for a multiple of {align}"))
    if options.drafts > MAX_DRAFTS:
        message = f"a tree of {options.drafts} drafts has more than the {MAX_DRAFTS} of which the kernels keep track"
        reasons.append(("draft_tree", message, "give the tree of the step's own drafts"))
    if options.buffers < 2:
        reasons.append(("buffers", "one buffer leaves none for fetching pages", "ask for 2 or more"))
    words = max(sum(parts.values()) for parts in scalar_words(geometry, options).values())
    if 4 * words > MAX_SCALAR_BYTES:
        code, what = "page_table_smem", f"a page table of {geometry.sequences} sequences x {geometry.width} pages"
        hint = "use larger pages, or fewer sequences"
        if geometry.selected:
            code, what = "selected_smem", f"the places of {geometry.selected} keys of two tokens"
            hint = "select fewer keys, or pass fewer tokens"
        message = f"{what} and the units of work are {4 * words} bytes, of {MAX_SCALAR_BYTES} in scalar memory"
        reasons.append((code, message, f"{hint} per step"))
    return reasons


def advice(geometry: Geometry) -> list[tuple[str, str, str]]:
    """(code, message, hint) for what the kernels support, but slowly or with wasted memory."""
    hints: list[tuple[str, str, str]] = []
    rows = {"key_pages": geometry.key_row} if geometry.one_array else {
        "key_pages": geometry.key_row, "value_pages": geometry.value_row
    }  # fmt: skip
    if geometry.rope_dtype is not None:
        rows["rope_pages"] = geometry.rope_row
    odd = {name: row for name, row in rows.items() if row % LANES}
    if odd:
        whole = ", ".join(f"{name} to {math.ceil(row / LANES) * LANES}" for name, row in odd.items())
        joined = (
            ""
            if geometry.one_array or (geometry.dim + geometry.value_dim) % LANES
            else "; layout 'joined' needs no padding"
        )
        hints.append((
            "page_rows",
            f"rows of {', '.join(f'{row} ({name})' for name, row in odd.items())} aren't whole tiles of {LANES}: XLA keeps such "
            "arrays in another order, and copies all of the cache before each call",
            f"pad {whole} when the cache is allocated{joined}",
        ))  # fmt: skip
    if geometry.tokens_first and not all(geometry.in_words(name.removesuffix("_pages")) for name in rows):
        number = rows_per_word(min(geometry.key_dtype, geometry.value_dtype, key=lambda dtype: dtype.itemsize))
        least = [str(n) for n in (1, 2) if n * (1 + geometry.alternating) % number == 0]
        each = 4 if geometry.alternating else 8
        some = [*least, "4"] if each == 8 else least
        other = "'packed'" if geometry.alternating else "'heads' or 'joined'"
        what = f"keys and values of {geometry.kv_heads} heads" if geometry.alternating else f"{geometry.kv_heads} heads"
        hints.append((
            "page_rows",
            f"the rows of a token, {what}, don't fill their tiles: XLA keeps such arrays in another order, and copies all of the "
            "cache before each call",
            f"allocate the cache in layout {other}, or with "
            f"{', '.join(some)} kv heads on each device or a multiple of {each}",
        ))  # fmt: skip
    if geometry.tokens_first:
        if 3 in (geometry.key_scale, geometry.value_scale):
            message = f"scales of {geometry.kv_heads} heads per token take {LANES} numbers of memory"
            hints.append(("scales", message, "layout 'heads' or 'joined', whose scales lie along the page"))
    else:
        stored = max(geometry.key_dtype, geometry.value_dtype, key=sublanes)
        tile = HBM_ROWS if stored.itemsize > 1 else sublanes(stored)
        if geometry.page % tile:
            message = f"pages of {geometry.page} don't fill tiles of {tile} rows"
            hints.append(("page_size", message, f"a page size that is a multiple of {tile}"))
        if 3 in (geometry.key_scale, geometry.value_scale) and geometry.page % LANES:
            message = (
                f"scales of pages of {geometry.page} take the memory of {math.ceil(geometry.page / LANES) * LANES}"
            )
            hints.append(("scales", message, f"a page size that is a multiple of {LANES}"))
    return hints


def max_vmem(geometry: Geometry, options: Options) -> int:
    """Counted bytes of VMEM of a call's larger kernel, with some margin."""
    return math.ceil(ROOM * max(sum(parts.values()) for parts in vmem_parts(geometry, options, at_most=True).values()))


def chosen_sizes(geometry: Geometry, options: Options, room: int | None = None) -> Options:
    """The options with sizes of 0 replaced by default ones, reduced until they fit in `room` bytes of VMEM.

    None: what is requested, or the default of the smallest TPU.
    """
    if room is None:
        room = options.vmem_limit_bytes or MIN_VMEM_BYTES
    bytes_a_page = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in geometry.streams().values())
    latent = geometry.layout == "latent"
    max_pages = min(max(1, (_LATENT_KEYS if latent else _BLOCK_KEYS) // geometry.page), geometry.width, MAX_PAGES)
    pages = max_pages if latent else max(1, min(max_pages, _BLOCK_BYTES // bytes_a_page))
    align = row_alignment(geometry)
    queries = max(align, min(_ROWS // geometry.group, geometry.tokens) // align * align)
    sized = replace(
        options,
        pages_per_block=options.pages_per_block or 1 << (pages.bit_length() - 1),
        queries_per_block=options.queries_per_block or queries,
        buffers=options.buffers or 4,
    )
    while max_vmem(geometry, sized) > room:
        parts = vmem_parts(geometry, sized, at_most=True)
        chunks = parts.get("attnops_paged_chunks", {})
        of_queries = sum(n for name, n in chunks.items() if "queries" in name)
        if not options.pages_per_block and sized.pages_per_block * bytes_a_page > max(_MIN_BLOCK_BYTES, bytes_a_page):
            sized = replace(sized, pages_per_block=sized.pages_per_block // 2)
        elif (
            not options.queries_per_block and sized.queries_per_block > align and 2 * of_queries > sum(chunks.values())
        ):
            sized = replace(sized, queries_per_block=max(align, sized.queries_per_block // 2 // align * align))
        elif not options.pages_per_block and sized.pages_per_block > 1:
            sized = replace(sized, pages_per_block=sized.pages_per_block // 2)
        elif not options.buffers and sized.buffers > 2:
            sized = replace(sized, buffers=sized.buffers - 1)
        elif not options.queries_per_block and sized.queries_per_block > align:
            sized = replace(sized, queries_per_block=max(align, sized.queries_per_block // 2 // align * align))
        else:
            break
    return sized
