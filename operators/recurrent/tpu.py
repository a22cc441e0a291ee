"""What runs linear attention on TPUs: the same arithmetic, with the chunks in Pallas kernels."""

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
from .kernel.tpu_sizes import BACKWARD, FORWARD, KEEPING, LEAST_CHUNK, Sizes, chunk_tokens, counted_vmem, vmem_parts
from .local import RecurrentCall

__all__ = ["RecurrentOnTpu"]


class RecurrentOnTpu(RecurrentOnXla):
    """Pallas kernels with the state of a head in VMEM from chunk to chunk, and for the gradient the state's gradient.

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
            lambda p, c: self._counted(p, self._size(p, c), FORWARD) <= _limit(p),
            lambda p, c: (
                f"a chunk of one head takes {bytes_text(self._counted(p, self._size(p, c), FORWARD))} of VMEM, but a kernel may "
                f"take {bytes_text(_limit(p))}"
            ),
            "Declare a smaller chunk_size.",
        )
        self.capability = declares((), rules=(least, room), tolerance=TOLERANCE, operands=operands)

    def __call__(self, call: RecurrentCall) -> Results:
        """Run one device's part of a call."""
        from .kernel.tpu import chunked_tpu  # imports Pallas, so only where the kernel runs

        run = functools.partial(
            chunked_tpu,
            gradient_on_xla=self._unfit(call.problem, call.config.chunk_size) is not None,
            interpret=bool(getattr(call.config, "interpret", False)),
        )
        return self.compute(replace(call, chunked=run))

    def resolve(self, problem: Any, placement: Any) -> OperationConfig:
        """The config with its chunk size: the largest with which all kernels of the call have room in VMEM."""
        del placement
        config: OperationConfig = problem.config
        return config.with_fields({"chunk_size": self._size(problem, config)})

    def memory(self, problem: Any, placement: Any, config: OperationConfig) -> Mapping[str, Mapping[str, int]]:
        """VMEM of each kernel, by what it holds."""
        local: dict[str, int] = {}
        for x in placement.tensors:
            local = dict(zip(x.dims, x.local_shape, strict=True)) | local
        size = self._size(problem, config)
        sizes = self._sizes(problem, size, local)
        trains = problem.mode == "__train__" and self._unfit(problem, size) is None
        return {name: vmem_parts(sizes, name) for name in (FORWARD, *((KEEPING, BACKWARD) if trains else ()))}

    def notes(self, problem: Any, placement: Any, config: OperationConfig) -> tuple[str, ...]:
        """Chunks that are smaller for lack of room, and a gradient that no kernel makes."""
        del placement
        if problem.size["q_len"] == 1:
            return ()
        notes: list[str] = []
        size, limit = self._size(problem, config), _limit(problem)
        if getattr(problem.config, "chunk_size", None) is None and size < self.chunk:
            kernel = self._unfit(problem, 2 * size) or FORWARD
            counted = self._counted(problem, 2 * size, kernel)
            notes.append(note("recurrent.smaller_chunks", chunk=size, kernel=kernel, size=counted, limit=limit))
        if problem.mode == "__train__" and (kernel := self._unfit(problem, size)):
            counted = self._counted(problem, size, kernel)
            notes.append(note("recurrent.gradient_on_xla", kernel=kernel, size=counted, limit=limit))
        return tuple(notes)

    def _size(self, problem: Any, config: OperationConfig) -> int:
        """Tokens of a chunk: as declared, or the most with which the call's kernels have room, at least that of the forward
        pass."""
        declared: int | None = getattr(config, "chunk_size", None)
        if declared is not None:
            return declared
        options = [self.chunk >> n for n in range(self.chunk.bit_length()) if self.chunk >> n >= LEAST_CHUNK]
        limit = _limit(problem)
        fitting = [n for n in options if self._counted(problem, n, FORWARD) <= limit]
        trained = [n for n in fitting if self._unfit(problem, n) is None]
        wanted = trained if problem.mode == "__train__" else fitting
        return next(iter(wanted or fitting), self.chunk)

    def _unfit(self, problem: Any, size: int) -> str | None:
        """The kernel that the gradient needs and that has no room with chunks of that size."""
        limit = _limit(problem)
        return next((name for name in (KEEPING, BACKWARD) if self._counted(problem, size, name) > limit), None)

    def _counted(self, problem: Any, size: int, kernel: str) -> int:
        """The least bytes of VMEM with which it compiles: one head at a time; with states passed on, values have more columns."""
        sizes = self._sizes(problem, size, problem.size)
        wide = sizes.dim if sizes.delta and any(axis.size > 1 for axis in problem.mesh) else 0
        return counted_vmem(sizes._replace(heads=1, group=1, value_dim=sizes.value_dim + wide), kernel)

    def _sizes(self, problem: Any, chunk: int, size: Mapping[str, int]) -> Sizes:
        given = {x.operand.name: jnp.dtype(x.dtype) for x in problem.operands}
        # Mamba-2's factors are in float32.
        narrow = all(given.get(name) == jnp.bfloat16 for name in ("query", "key", "value"))
        return Sizes(
            heads=size["heads"],
            group=max(size["heads"] // size["kv_heads"], 1),
            dim=size["head_dim"],
            value_dim=size["value_dim"],
            chunk=chunk_tokens(size["q_len"], chunk),
            dtype=np.dtype(jnp.bfloat16 if narrow else np.float32),
            by_channel=self.by_channel,
            delta="beta" in self.capability.operands,
            initial="initial_state" in given or any(axis.size > 1 for axis in problem.mesh),
        )


def _limit(problem: Any) -> int:
    """Bytes of VMEM that a kernel may take."""
    return vmem_of(problem.device_kind).default
