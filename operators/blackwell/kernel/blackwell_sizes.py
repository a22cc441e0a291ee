"""The sizes of the Blackwell kernels, and the memory that they take."""

from __future__ import annotations

from ...mosaic.kernel.mosaic_sizes import BARRIER, FLOAT, MosaicSizes, padded_dim, placed

__all__ = [
    "KEYS",
    "PART",
    "ROWS",
    "TENSOR_COLUMNS",
    "apart",
    "asks",
    "places",
    "shared_bytes",
    "tensor_columns",
]

ROWS = 128  # of a product, and of a warpgroup: a thread has a row
KEYS = (32, 64, 128)  # of a tile; a warpgroup widens 64 at once
PART = 32  # keys of which a thread has the logits at once, with those of the tile's other parts
TENSOR_COLUMNS = 512  # of tensor memory, each 32 bits of 128 rows


def asks(sizes: MosaicSizes) -> bool:
    """Whether a warp asks of a tile with a mask what it hides: beside one softmax products take longer."""
    return sizes.block_q == ROWS


def places(sizes: MosaicSizes) -> int:
    """Places for the logits of a warpgroup's rows. With a second warpgroup, the products of its tile run beside the softmax of
    the first one's; alone, those of the next tile do."""
    return 1 if sizes.block_q > ROWS else 2


def apart(sizes: MosaicSizes, value_dim: int) -> bool:
    """Whether the weights have tensor memory of their own, so that the next logits needn't wait for their product."""
    columns = padded_dim(value_dim) + places(sizes) * (sizes.block_kv + sizes.block_kv // 2)
    return sizes.block_q // ROWS * columns <= TENSOR_COLUMNS


def tensor_columns(sizes: MosaicSizes, value_dim: int) -> int:
    """Columns of tensor memory: sums, logits, and weights of 16 bits, unless they take the place of the logits."""
    of_place = sizes.block_kv + (sizes.block_kv // 2 if apart(sizes, value_dim) else 0)
    return sizes.block_q // ROWS * (padded_dim(value_dim) + places(sizes) * of_place)


def shared_bytes(
    sizes: MosaicSizes, dim: int, value_dim: int, *, in_key: bool = False, stored: tuple[str, ...] = ()
) -> dict[str, int]:
    """Bytes of shared memory of a block of threads in the forward pass, by what they hold. Numbers have 16 bits; the output takes
    the place of the query. in_key: values are the first columns of their keys. stored: which of 'key' and 'value' come with 8
    bits a number, and are widened."""
    dim, value_dim = padded_dim(dim), padded_dim(value_dim)
    groups = sizes.block_q // ROWS
    held = {
        "query": 2 * sizes.block_q * max(dim, value_dim),
        "key": 2 * sizes.stages * sizes.block_kv * dim,
        "value": 0 if in_key else 2 * sizes.stages * sizes.block_kv * value_dim,
        "rows": placed(FLOAT * groups * places(sizes) * ROWS) + 2 * placed(FLOAT * groups * ROWS),
    }
    barriers = 4 * sizes.stages + groups * (3 + 4 * places(sizes)) + 2 * sizes.stages * len(stored)
    return held | {f"{name}_raw": held[name] // 2 for name in stored} | {"barriers": BARRIER * barriers}
