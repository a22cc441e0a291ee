"""What runs linear attention on TPUs: the same arithmetic, with the chunks in a Pallas kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from ...devices import vmem_of
from ...planning import OperationConfig, Rule, declares
from ...planning.notes import note
from ...planning.text import bytes_text
from .arithmetic import Results
from .config import KernelConfig
from .implementations import TOLERANCE, RecurrentOnXla
from .kernel.tpu_sizes import LEAST_CHUNK, NAME, Sizes, chunk_tokens, counted_vmem, vmem_parts
from .local import RecurrentCall

__all__ = ["RecurrentOnTpu"]


class RecurrentOnTpu(RecurrentOnXla):
    """A Pallas kernel with the state of a head in VMEM from chunk to chunk; the gradient is made on XLA.

    compute, operands: as of RecurrentOnXla. by_channel: whether there is a log decay for each key channel.
    """

    config: ClassVar[type[OperationConfig] | None] = KernelConfig
    chunk: ClassVar[int] = 128  # fewer cycles per token than 64 by the schedules of v5e, v6e and tpu7x

    def __init__(
        self, compute: Callable[[RecurrentCall], Results], operands: frozenset[str], *, by_channel: bool = False
    ) -> None:
        super().__init__(compute, operands)
        self.by_channel = by_channel
        least = Rule(
            "recurrent.chunk",
            "chunk_size",
            lambda p, c: (getattr(c, "chunk_size", None) or LEAST_CHUNK) >= LEAST_CHUNK,
            f"chunk_size={{c.chunk_size}}, but the TPU kernel takes chunks of at least {LEAST_CHUNK} tokens",
            f"Declare chunk_size={self.chunk}, or leave it out.",
        )
        room = Rule(
            "recurrent.vmem",
            "chunk_size",
            lambda p, c: self._counted(p, c) <= vmem_of(p.device_kind).default,
            lambda p, c: (
                f"a chunk of one head takes {bytes_text(self._counted(p, c))} of VMEM, but a kernel may take "
                f"{bytes_text(vmem_of(p.device_kind).default)}"
            ),
            "Declare a smaller chunk_size.",
        )
        self.capability = declares((), rules=(least, room), tolerance=TOLERANCE, operands=operands)

    def __call__(self, call: RecurrentCall) -> Results:
        """Run one device's part of a call."""
        from .kernel.tpu import chunked_tpu  # imports Pallas, so only where the kernel runs

        interpret = bool(getattr(call.config, "interpret", False))
        return self.compute(replace(call, chunked=functools.partial(chunked_tpu, interpret=interpret)))

    def memory(self, problem: Any, placement: Any, config: OperationConfig) -> Mapping[str, Mapping[str, int]]:
        """VMEM, by what it holds."""
        local: dict[str, int] = {}
        for x in placement.tensors:
            local = dict(zip(x.dims, x.local_shape, strict=True)) | local
        return {NAME: vmem_parts(self._sizes(problem, config, local))}

    def notes(self, problem: Any, placement: Any, config: OperationConfig) -> tuple[str, ...]:
        """What makes the gradient."""
        del placement, config
        return (note("recurrent.gradient_on_xla"),) if problem.mode == "__train__" else ()

    def _counted(self, problem: Any, config: OperationConfig) -> int:
        """The least bytes of VMEM with which it compiles: one head at a time; with states passed on, values have more columns."""
        sizes = self._sizes(problem, config, problem.size)
        wide = sizes.dim if sizes.delta and any(axis.size > 1 for axis in problem.mesh) else 0
        return counted_vmem(sizes._replace(heads=1, group=1, value_dim=sizes.value_dim + wide))

    def _sizes(self, problem: Any, config: OperationConfig, size: Mapping[str, int]) -> Sizes:
        given = {x.operand.name: jnp.dtype(x.dtype) for x in problem.operands}
        # Mamba-2's factors are in float32.
        narrow = all(given.get(name) == jnp.bfloat16 for name in ("query", "key", "value"))
        return Sizes(
            heads=size["heads"],
            group=max(size["heads"] // size["kv_heads"], 1),
            dim=size["head_dim"],
            value_dim=size["value_dim"],
            chunk=chunk_tokens(size["q_len"], getattr(config, "chunk_size", None) or self.chunk),
            dtype=np.dtype(jnp.bfloat16 if narrow else np.float32),
            by_channel=self.by_channel,
            delta="beta" in self.capability.operands,
            initial="initial_state" in given or any(axis.size > 1 for axis in problem.mesh),
        )
