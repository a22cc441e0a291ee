"""How attention to selected keys is computed: gathered or in tiles, by counted work, and in blocks of which size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ....errors import InputError, is_whole, shown

__all__ = ["Path", "Sizes", "choose"]

Path = Literal["gather", "tiles"]

# What moving a number of a key costs, in multiply-adds: copied for one query, and read for a block of queries. By jaxlib 0.10.2
# on a CPU; of the order of a TPU's and a GPU's ratio of products to bytes.
_COPIED, _READ = 100, 25
_GATHERED_BYTES = 16 << 20
_ROWS, _KEYS = 1024, 512  # of a tile


@dataclass(frozen=True)
class Sizes:
    """The path, and how many queries and keys are worked on together."""

    path: Path
    block_q: int
    block_kv: int


def choose(
    q_len: int,
    kv_len: int,
    k: int,
    *,
    group: int,
    dim: int,
    together: int = 1,
    path: Path | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
) -> Sizes:
    """The sizes for k of kv_len keys. group: query heads of a kv head; dim: numbers of a key that are copied, with its value;
    together: kv heads that are worked on together.

    Errors: InputError for a path or a size that isn't one.
    """
    if path is not None and path not in get_args(Path):
        raise InputError(f"path is {shown(path)}; wanted 'gather', 'tiles', or None to take what is less work.")
    for name, size in (("block_q", block_q), ("block_kv", block_kv)):
        if size is not None and not is_whole(size, 1):
            raise InputError(f"{name} is {shown(size)}; wanted an int of at least 1, or None to choose it.")
    rows = min(q_len, 128, max(8, _ROWS // (group * together)))
    if path is None:
        gathered = k * (_COPIED + group)
        path = "gather" if gathered * rows < kv_len * (_READ + group * rows) else "tiles"
    if path == "gather":
        copies = max(1, _GATHERED_BYTES // (4 * k * max(dim, group) * together))
        return Sizes(path, block_q or min(q_len, 128, copies), kv_len)
    return Sizes(path, block_q or rows, block_kv or min(kv_len, _KEYS))
