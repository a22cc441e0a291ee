"""The sizes of the Hopper kernels, and the shared memory that they take."""

from __future__ import annotations

from ...mosaic.kernel.mosaic_sizes import (
    BARRIER,
    DIM_STEP,
    FLOAT,
    MosaicSizes,
    Sums,
    column_parts,
    latent_sums,
    padded_dim,
    placed,
)

__all__ = ["FEW", "KEYS", "ROWS", "conversions", "divided", "key_warpgroups", "latent_halves", "shared_bytes"]

ROWS = 64  # of a warpgroup: those of a wgmma
KEYS = (
    64,
    128,
    256,
)  # of a tile: a product with values goes through 64 keys at once, one for logits has at most 256 columns
FEW = 32  # rows or keys of a tile of gradients, where 64 take too many registers or too much shared memory
_REDUCTIONS = 2048  # what Mosaic takes for the sum and the maximum of a row
_CONVERTED_APART = 128
_MOST_SUMS = 256  # columns of gradients that a warpgroup can hold beside its tiles


def conversions(names: tuple[str, ...], columns: int) -> tuple[tuple[str, ...], ...]:
    """What each warpgroup converts, of keys and values with 8 bits a number, for an output of so many columns.

    A product with more columns takes more registers than threads of a fourth warpgroup would leave.
    """
    return tuple((name,) for name in names) if columns <= _CONVERTED_APART else (names,) if names else ()


def divided(dim: int, value_dim: int) -> bool:
    """Whether the gradients of key and value are summed by a warpgroup each, because one can't hold both."""
    return padded_dim(dim) + padded_dim(value_dim) > _MOST_SUMS


def latent_halves(dim: int, value_dim: int) -> tuple[tuple[Sums, ...], tuple[Sums, ...]]:
    """Of keys whose first columns are their values: each of two warpgroups has half of the columns."""
    half = -(-dim // (2 * DIM_STEP)) * DIM_STEP
    return latent_sums(0, half, value_dim), latent_sums(half, dim, value_dim)


def key_warpgroups(sizes: MosaicSizes, dim: int, value_dim: int, *, in_key: bool = False) -> int:
    """Warpgroups that compute the gradients of key and value."""
    return 2 if in_key or divided(dim, value_dim) else sizes.block_kv // ROWS


def shared_bytes(
    which: str,
    sizes: MosaicSizes,
    dim: int,
    value_dim: int,
    *,
    in_key: bool = False,
    stored: tuple[str, ...] = (),
) -> dict[str, int]:
    """Bytes of shared memory of a block of threads, by what they hold. which: 'forward', 'dkv' or 'dq'. Numbers have 16 bits; an
    output takes the place of the query. in_key: values are the first columns of their keys. stored: which of 'key' and 'value'
    come with 8 bits a number, and are converted."""
    dim, value_dim = padded_dim(dim), padded_dim(value_dim)
    held = {"query": 2 * sizes.block_q * dim, "key": 2 * sizes.block_kv * dim, "value": 2 * sizes.block_kv * value_dim}
    if which != "forward":
        held["d_output"] = 2 * sizes.block_q * value_dim
    for name in ("query", "d_output") if which == "dkv" else ("key", "value"):
        held[name] *= sizes.stages
    row_groups = sizes.block_q // ROWS
    groups = key_warpgroups(sizes, dim, value_dim, in_key=in_key) if which == "dkv" else row_groups
    held["value"] = 0 if in_key else held["value"]
    if which == "forward":
        held["query"] = max(held["query"], 2 * sizes.block_q * value_dim)
        groups *= column_parts(value_dim)
    elif which == "dq" and in_key:
        groups *= 2
    held["columns"] = placed(FLOAT * groups * (sizes.block_q if which == "dkv" else sizes.block_kv))
    if which == "dkv":
        held["lse"] = 2 * placed(FLOAT * sizes.stages * sizes.block_q)
        barriers = 2 * (sizes.block_kv // ROWS) + 2 * sizes.stages + (in_key or divided(dim, value_dim))
    else:
        held["lse"] = placed(FLOAT * ROWS * groups) if which == "forward" else 0
        shared = dim != value_dim if which == "forward" else in_key
        outputs = groups if which == "forward" else row_groups
        barriers = row_groups + outputs + (2 if in_key else 4) * sizes.stages + shared
    if which == "forward":
        held |= {f"{name}_raw": held[name] // 2 for name in stored}
        barriers += 2 * len(stored) * sizes.stages
        held["reductions"] = _REDUCTIONS
    return held | {"barriers": BARRIER * barriers}
