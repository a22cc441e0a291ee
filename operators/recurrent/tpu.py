"""What runs linear attention on TPUs: the same arithmetic, with the chunks in Pallas kernels."""

from __future__ import annotations

import functools
import math
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
from .kernel.tpu_sizes import (
    BACKWARD,
    FORWARD,
    KEEPING,
    LEAST_CHUNK,
    Sizes,
    chunk_tokens,
    counted_vmem,
    kernels_of,
    schedule,
    vmem_parts,
)
from .local import RecurrentCall

__all__ = ["RecurrentOnTpu", "local_sizes"]


class RecurrentOnTpu(RecurrentOnXla):
    """Pallas kernels with the state of a head in VMEM from chunk to chunk, and for the gradient the state's gradient.

    compute, operands: as of RecurrentOnXla. by_channel: whether there is a log decay for each key channel.
    """

    config: ClassVar[type[OperationConfig] | None] = KernelConfig
    static_clock = True
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
        config: OperationConfig = problem.config
        return config.with_fields({"chunk_size": self._size(problem, config)})

    def tuned_fields(self, problem: Any, placement: Any) -> tuple[str, ...]:
        """chunk_size, unless it is declared."""
        declared = getattr(problem.config, "chunk_size", None) is not None
        return () if declared or problem.size["q_len"] == 1 else ("chunk_size",)

    def candidates(self, problem: Any, placement: Any) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """Chunks with which all kernels of the call have room, nearest to the rule's first. All kernels of a call go by the same
        chunks: in mode train they are measured together, as 'backward'."""
        if not self.tuned_fields(problem, placement):
            return {}
        ruled, trains = self._size(problem, problem.config), problem.mode == "__train__"
        tokens, limit = problem.size["q_len"], _limit(problem)
        ruled = chunk_tokens(tokens, ruled)
        others = [n for n in _powers(chunk_tokens(tokens, 2 * self.chunk)) if n != ruled]
        others = [n for n in others if self._counted(problem, n, FORWARD) <= limit]
        if trains and self._unfit(problem, ruled) is None:
            others = [n for n in others if self._unfit(problem, n) is None]
        others.sort(key=lambda n: abs(math.log2(n / ruled)))
        return {"backward" if trains else "forward": ({}, *({"chunk_size": n} for n in others))}

    def grid_steps(self, problem: Any, placement: Any, config: OperationConfig) -> Mapping[str, int]:
        """The kernels of a call on one device, with its gradient in mode train, and how many steps of its grid each takes."""
        local, size = local_sizes(placement), self._size(problem, config)
        sizes = self._sizes(problem, size, local)
        trains = problem.mode == "__train__" and self._unfit(problem, size) is None
        chunks = local["batch"] * sizes.heads * -(-local["q_len"] // sizes.chunk)
        return {name: chunks // schedule(sizes, name).step for name in kernels_of(trains)}

    def memory(self, problem: Any, placement: Any, config: OperationConfig) -> Mapping[str, Mapping[str, int]]:
        """VMEM of each kernel, by what it holds."""
        size = self._size(problem, config)
        sizes = self._sizes(problem, size, local_sizes(placement))
        trains = problem.mode == "__train__" and self._unfit(problem, size) is None
        return {name: vmem_parts(sizes, name) for name in dict.fromkeys((FORWARD, *kernels_of(trains)))}

    def notes(self, problem: Any, placement: Any, config: OperationConfig) -> tuple[str, ...]:
        """Chunks that are smaller for lack of room, and a gradient that no kernel makes."""
        if problem.size["q_len"] == 1:
            return ()
        notes: list[str] = []
        size, limit = self._size(problem, config), _limit(problem)
        ruled = self._size(problem, problem.config)
        if getattr(problem.config, "chunk_size", None) is None and size == ruled < self.chunk:
            kernel = self._unfit(problem, 2 * size) or FORWARD
            counted = self._counted(problem, 2 * size, kernel)
            notes.append(note("recurrent.smaller_chunks", chunk=size, kernel=kernel, size=counted, limit=limit))
        if problem.mode == "__train__" and (unfit := self._unfit(problem, size)):
            counted = self._counted(problem, size, unfit)
            notes.append(note("recurrent.gradient_on_xla", kernel=unfit, size=counted, limit=limit))
        return tuple(notes)

    def _size(self, problem: Any, config: OperationConfig) -> int:
        """Tokens of a chunk: as declared, or the most with which the call's kernels have room, at least that of the forward
        pass."""
        declared: int | None = getattr(config, "chunk_size", None)
        if declared is not None:
            return declared
        limit = _limit(problem)
        fitting = [n for n in _powers(self.chunk) if self._counted(problem, n, FORWARD) <= limit]
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


def _powers(most: int) -> list[int]:
    """The sizes of chunks up to the most."""
    return [most >> n for n in range(most.bit_length()) if most >> n >= LEAST_CHUNK]


def local_sizes(placement: Any) -> dict[str, int]:
    """The size of each dim on one device."""
    local: dict[str, int] = {}
    for x in placement.tensors:
        local = dict(zip(x.dims, x.local_shape, strict=True)) | local
    return local


def _limit(problem: Any) -> int:
    """Bytes of VMEM that a kernel may take."""
    return vmem_of(problem.device_kind).default
