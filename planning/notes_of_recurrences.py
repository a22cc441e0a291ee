"""What plans note about recurrences: the rows of notes.NOTES, as (code, field, text) and, after them, a severity."""

from __future__ import annotations

from typing import Literal

__all__ = ["NOTES_OF_RECURRENCES"]

NOTES_OF_RECURRENCES: tuple[tuple[str, str, str] | tuple[str, str, str, Literal["info", "note"]], ...] = (
    ("recurrent.passed", "sequence_parallel",
     "each device sends what its tokens do to a state over {axes:plus}: {size:bytes} per device, whatever the length; gathering "
     "the tokens would send {other:bytes}"),
    ("recurrent.exchange", "exchange",
     "exchange={name!r}: {size:bytes} per device with the state after all tokens, where {other!r} sends {other_size:bytes}",
     "info"),
    ("recurrent.plain_order", "ring_order",
     "ring_order={value!r} has no effect on a recurrence: tokens are in plain order outside a ring, and states are passed on in "
     "that order"),
    ("recurrent.no_exchange", "exchange",
     "exchange={value!r} has no effect: no states are passed along the sequence of this call"),
    ("recurrent.gathered", "sequence_parallel",
     "every device has all tokens: they are gathered over {axes:plus}, {size:bytes} per device; sequence_parallel='state' would "
     "send {other:bytes}"),
    ("recurrent.manual", "sequence_parallel",
     "the tokens of this call count as all tokens: {axes:plus} is Manual here; if they are parts of a sequence, declare "
     "sequence_parallel='state', which counts this axis in"),
    ("recurrent.repeated_keys", "partition_axis",
     "the mesh splits heads further than the heads of queries and keys: these are repeated for each head, then split over "
     "{axes:plus}"),
    ("recurrent.gradient_on_xla", "implementation",
     "the gradient is made on XLA, which computes the forward pass again: {kernel} would take {size:bytes} of VMEM for a chunk "
     "of one head, and a kernel may take {limit:bytes}"),
    ("recurrent.slots_copied", "state",
     "{name}: slots of {shape} per device are copied before and after the kernel, {size:bytes} each time: a program keeps them "
     "along other dimensions, where they take less; states whose head_dim or value_dim is a multiple of 128 stay in place"),
    ("recurrent.smaller_chunks", "chunk_size",
     "chunks of {chunk} tokens: of twice as many {kernel} would take {size:bytes} of VMEM for one head, and a kernel may take "
     "{limit:bytes}", "info"),
)  # fmt: skip
