"""RaggedBatch: which tokens of a step belong to which sequence, and which pages hold each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int32

from ...errors import InputError, shown
from ...masks.int_arrays import known_values
from ...planning.cache.cache_plan import CachePlan
from ...pytree_export import exported
from .batch_checks import batch_problem, int32_arrays, int32_numbers
from .sequence_shards import split_table, table_problem

__all__ = ["RaggedBatch"]


@exported()
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedBatch:
    """A step's batch. If the cache has a `pages_axis`, each array has an additional leading dimension with one entry per shard,
    and page ids count within the shard. If a mesh splits each sequence's pages (`page_sequence_axis`), the page table has one
    more dimension after that, with an entry for each of n devices: its own pages, every n-th of a sequence, by local ids.

    cu_q_lens: the tokens of row s are cu_q_lens[s] to cu_q_lens[s + 1]. kv_lens: a sequence's tokens including these.
    page_table: page ids in the order of the sequence, padded with the number of pages, which also replaces pages outside the
    window. num_seqs: the number of rows in use. group: if the cache's layers are in groups, the one whose pages these are.
    """

    cu_q_lens: Int32[Array, "*shards rows+1"]
    kv_lens: Int32[Array, "*shards rows"]
    page_table: Int32[Array, "*shards_and_sequence_shards rows width"]
    num_seqs: Int32[Array, "*shards"]
    group: int = field(default=0, metadata={"static": True})

    @classmethod
    def make(
        cls,
        plan: CachePlan,
        *,
        cu_q_lens: Any,
        kv_lens: Any,
        page_table: Any,
        num_seqs: int | None = None,
        tokens: int | None = None,
        writes: bool = True,
    ) -> RaggedBatch:
        """A batch of one shard from host values, checked, and padded to the cache's `max_sequences` and `max_length`. For a
        cache with several groups of layers, `plan` is that of a group, plan.groups[n].

        `page_table` is an array, or a list of page ids for each row, with ids from a PagePool. `num_seqs` defaults to the number
        of rows; `tokens` is the length of the token arrays, if it should be checked. `writes` is False for a step of update
        'none', whose rows may share any page. Errors: InputTypeError for values that aren't whole numbers; InputError, naming the
        row, for numbers that don't fit in int32, ids out of range or on a different sequence shard than their page number,
        lengths that exceed the pages or tokens, and writes to a page that another row reads.
        """
        plan.one_group("a batch")
        rows, width, padding, split = plan.local_sequences, plan.table_width, plan.local_pages, plan.sequence_shards
        lens = int32_numbers("kv_lens", kv_lens)
        starts = int32_numbers("cu_q_lens", cu_q_lens)
        table = _table(page_table, len(lens), width, padding)
        if len(lens) > rows:
            raise InputError(f"kv_lens has {len(lens)} rows; wanted at most {rows}, the max_sequences of a shard.")
        if len(starts) != len(lens) + 1:
            raise InputError(f"cu_q_lens has {len(starts)} entries for {len(lens)} rows; wanted one more than rows.")
        if len(table) != len(lens):
            raise InputError(f"page_table has {len(table)} rows and kv_lens {len(lens)}; wanted the same number.")
        count = int(int32_numbers("num_seqs", [len(lens) if num_seqs is None else num_seqs])[0])
        if (
            tokens is not None
            and (max_tokens := plan.cache.max_tokens) is not None
            and tokens > max_tokens // plan.shards
        ):
            per_shard = "" if plan.shards == 1 else f", {max_tokens // plan.shards} on each of {plan.shards} shards"
            raise InputError(
                f"tokens={shown(tokens)}; wanted no more than the cache's max_tokens={max_tokens}{per_shard}."
            )
        missing = rows - len(lens)
        host: Any = (
            np.concatenate([starts, np.full(missing, starts[-1], np.int32)]),
            np.concatenate([lens, np.zeros(missing, np.int32)]),
            np.concatenate([table, np.full((missing, width), padding, np.int32)]),
            np.asarray(count, np.int32),
        )
        batch = cls(host[0], host[1], host[2], host[3], 0 if plan.group is None else plan.group[0])
        batch.check(padding, plan.cache.page_size, tokens, plan.window_tokens, writes)
        if split > 1:
            if problem := table_problem(host[2], split, padding):
                raise InputError(problem)
            table = split_table(host[2], split, padding)
            batch = replace(batch, page_table=table)  # type: ignore[arg-type]
        return batch.stack([batch]) if plan.cache.pages_axis is not None and plan.shards == 1 else batch

    @classmethod
    def stack(cls, batches: Sequence[RaggedBatch]) -> RaggedBatch:
        """Stack the batches of several shards, for a cache with a `pages_axis`: a leading dimension, in the shards' order."""
        if not batches or any(np.ndim(batch.kv_lens) != 1 for batch in batches):
            raise InputError("stack takes the batches of all shards, each without a leading dimension.")
        if len(groups := {batch.group for batch in batches}) > 1:
            raise InputError(f"stack got batches of groups {sorted(groups)}; wanted those of one group of layers.")
        return jax.tree.map(lambda *arrays: np.stack(arrays), *batches)

    @property
    def shards(self) -> int | None:
        """Entries of the leading dimension; None if there is none."""
        return self.kv_lens.shape[0] if len(self.kv_lens.shape) == 2 else None

    @property
    def sequence_shards(self) -> int:
        """Page tables in each batch, one for each device with pages of the same sequences; 1 if one device has them all."""
        return self.page_table.shape[-3] if len(self.page_table.shape) == len(self.kv_lens.shape) + 2 else 1

    def check(
        self,
        pages: int,
        page_size: int,
        tokens: int | None = None,
        window_tokens: int | None = None,
        writes: bool = True,
    ) -> None:
        """Check the known values, for `pages` pages and `tokens` tokens per shard, counting its sequence shards together.
        With a window, pages that no query sees may be padding. If the step writes nothing, rows may share the pages of their
        tokens. Errors: InputError."""
        self.check_form()
        starts, lens, table, count = map(known_values, (self.cu_q_lens, self.kv_lens, self.page_table, self.num_seqs))
        if starts is None or lens is None or table is None or count is None:
            return
        if problem := batch_problem(starts, lens, table, count, pages, page_size, tokens, window_tokens, writes):
            raise InputError(problem)

    def check_form(self) -> None:
        """Check shapes and dtypes, which are always known. Errors: InputError, InputTypeError."""
        arrays = {
            "cu_q_lens": self.cu_q_lens,
            "kv_lens": self.kv_lens,
            "page_table": self.page_table,
            "num_seqs": self.num_seqs,
        }
        int32_arrays("RaggedBatch", arrays)
        lead = self.kv_lens.shape[:-1]
        rows = self.kv_lens.shape[-1] if self.kv_lens.shape else 0
        expected = {"kv_lens": (*lead, rows), "cu_q_lens": (*lead, rows + 1), "num_seqs": lead}
        table = self.page_table.shape
        wrong = [name for name, shape in expected.items() if tuple(arrays[name].shape) != shape]
        tables = table[:-1] == (*lead, rows) or (
            len(table) == len(lead) + 3 and (*table[:-3], table[-2]) == (*lead, rows)
        )
        if wrong or len(lead) > 1 or not tables:
            shapes = ", ".join(f"{name} {tuple(array.shape)}" for name, array in arrays.items())
            raise InputError(
                f"a batch of {shapes}; wanted cu_q_lens [rows + 1], kv_lens [rows], page_table [rows, width] and num_seqs [], or "
                "one more leading dimension for the shards in each; behind that, page_table may have one for sequence shards."
            )


def _table(value: Any, rows: int, width: int, padding: int) -> np.ndarray:
    """int32 [rows, width], padded."""
    if hasattr(value, "ndim") and value.ndim != 2:
        raise InputError(f"page_table has shape {value.shape}; wanted [rows, pages].")
    listed = [int32_numbers(f"page_table[{row}]", ids) for row, ids in enumerate(value)]
    table = np.full((len(listed), width), padding, np.int32)
    for row, ids in enumerate(listed):
        if np.any(ids[width:] != padding):
            raise InputError(f"row {row}: {len(ids)} pages; wanted at most {width}, those of max_length tokens.")
        table[row, : len(ids)] = ids[:width]
    return table
