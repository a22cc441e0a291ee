"""StateBatch: which tokens of a step belong to which sequence, and which slots hold each sequence's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int32

from ...errors import InputError, InputTypeError, a_type, is_whole, shown
from ...masks.int_arrays import known_values
from ...pytree_export import exported
from .batch_checks import int32_arrays, int32_numbers
from .state_checks import state_problem

__all__ = ["StateBatch"]


@exported()
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateBatch:
    """A step's batch of a layer with a state. If slots are split over shards, each array has an additional leading dimension with
    one entry per shard, and slot ids count within the shard.

    cu_q_lens: the tokens of row s are cu_q_lens[s] to cu_q_lens[s + 1]. kv_lens: a sequence's tokens including these; a row
    without others starts from zeros, whatever its slot holds. num_seqs: the number of rows in use. read_slots: the slot of the
    state before a row's first token. write_slots: column j is the slot that gets the state without the row's last j tokens. The
    number of slots is the id of padding: nothing is read, and nothing is written.
    """

    cu_q_lens: Int32[Array, "*shards rows+1"]
    kv_lens: Int32[Array, "*shards rows"]
    num_seqs: Int32[Array, "*shards"]
    read_slots: Int32[Array, "*shards rows"]
    write_slots: Int32[Array, "*shards rows columns"]

    @classmethod
    def make(
        cls,
        slots: int,
        *,
        cu_q_lens: Any,
        kv_lens: Any,
        read_slots: Any,
        write_slots: Any,
        max_sequences: int | None = None,
        drafts: int | None = None,
        num_seqs: int | None = None,
        tokens: int | None = None,
    ) -> StateBatch:
        """A batch of one shard with `slots` slots from host values, checked, and padded to `max_sequences` rows and 1 + `drafts`
        columns; default: as many as are given.

        `write_slots` has a slot for each row, or a list of them: the first for the state after all of its tokens. `num_seqs`
        defaults to the number of rows; `tokens` is the length of the token arrays, if it should be checked. Errors:
        InputTypeError for values that aren't whole numbers; InputError, naming the row, for those that don't fit, slots that are
        out of range or written twice, and those that one row reads and another writes.
        """
        if not is_whole(slots, 1, numpy=True):
            raise InputError(f"slots={shown(slots)}; wanted the number of slots, from 1 on.")
        for name, size, least in (("max_sequences", max_sequences, 1), ("drafts", drafts, 0)):
            if size is not None and not is_whole(size, least, numpy=True):
                raise InputError(f"{name}={shown(size)}; wanted a whole number from {least} on, or None.")
        lens, starts = int32_numbers("kv_lens", kv_lens), int32_numbers("cu_q_lens", cu_q_lens)
        read = int32_numbers("read_slots", read_slots)
        if not np.iterable(write_slots) or isinstance(write_slots, str):
            raise InputTypeError(
                f"write_slots is {a_type(write_slots)}; wanted a slot, or a list of them, for each row."
            )
        listed = [
            int32_numbers(f"write_slots[{row}]", [ids] if np.ndim(ids) == 0 else ids)
            for row, ids in enumerate(write_slots)
        ]
        rows = len(lens) if max_sequences is None else max_sequences
        columns = max((len(ids) for ids in listed), default=1) if drafts is None else 1 + drafts
        if len(lens) > rows:
            raise InputError(f"kv_lens has {len(lens)} rows; wanted at most {rows}, the max_sequences of a shard.")
        if len(starts) != len(lens) + 1:
            raise InputError(f"cu_q_lens has {len(starts)} entries for {len(lens)} rows; wanted one more than rows.")
        for name, given in (("read_slots", read), ("write_slots", listed)):
            if len(given) != len(lens):
                raise InputError(f"{name} has {len(given)} rows and kv_lens {len(lens)}; wanted the same number.")
        write, missing = np.full((rows, columns), slots, np.int32), rows - len(lens)
        for row, ids in enumerate(listed):
            if len(ids) > columns:
                raise InputError(f"row {row}: {len(ids)} slots to write; wanted at most {columns}, 1 + drafts.")
            write[row, : len(ids)] = ids
        count = int(int32_numbers("num_seqs", [len(lens) if num_seqs is None else num_seqs])[0])
        host: Any = (
            np.concatenate([starts, np.full(missing, starts[-1], np.int32)]),
            np.concatenate([lens, np.zeros(missing, np.int32)]),
            np.asarray(count, np.int32),
            np.concatenate([read, np.full(missing, slots, np.int32)]),
            write,
        )
        batch = cls(*host)
        batch.check(slots, tokens)
        return batch

    @classmethod
    def stack(cls, batches: Sequence[StateBatch]) -> StateBatch:
        """Stack the batches of several shards: a leading dimension, in the shards' order."""
        if not batches or any(np.ndim(batch.kv_lens) != 1 for batch in batches):
            raise InputError("stack takes the batches of all shards, each without a leading dimension.")
        return jax.tree.map(lambda *arrays: np.stack(arrays), *batches)

    @property
    def shards(self) -> int | None:
        """Entries of the leading dimension; None if there is none."""
        return self.kv_lens.shape[0] if len(self.kv_lens.shape) == 2 else None

    def check(self, slots: int, tokens: int | None = None) -> None:
        """Check the known values, for `slots` slots and `tokens` tokens per shard. Errors: InputError."""
        self.check_form()
        values = [known_values(x) for x in self.arrays.values()]
        if any(x is None for x in values):
            return
        known: Any = values
        if problem := state_problem(*known, slots=slots, tokens=tokens):
            raise InputError(problem)

    def check_form(self) -> None:
        """Check shapes and dtypes, which are always known. Errors: InputError, InputTypeError."""
        int32_arrays("StateBatch", self.arrays)
        lead = self.kv_lens.shape[:-1]
        rows = self.kv_lens.shape[-1] if self.kv_lens.shape else 0
        wanted: dict[str, tuple[int, ...]] = {"kv_lens": (*lead, rows), "cu_q_lens": (*lead, rows + 1)}
        wanted |= {"num_seqs": lead, "read_slots": (*lead, rows)}
        wrong = [name for name, shape in wanted.items() if tuple(self.arrays[name].shape) != shape]
        columns = self.write_slots.shape
        if wrong or len(lead) > 1 or columns[:-1] != (*lead, rows) or columns[-1] < 1:
            shapes = ", ".join(f"{name} {tuple(array.shape)}" for name, array in self.arrays.items())
            raise InputError(
                f"a batch of {shapes}; wanted cu_q_lens [rows + 1], kv_lens and read_slots [rows], write_slots [rows, columns] "
                "and num_seqs [], or one more leading dimension for the shards in each."
            )

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays by name."""
        names = "cu_q_lens", "kv_lens", "num_seqs", "read_slots", "write_slots"
        return {name: getattr(self, name) for name in names}
