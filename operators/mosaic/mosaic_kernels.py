"""A generation's kernels in Mosaic GPU as an implementation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ...errors import ConfigError
from ...planning import AttentionProblem, Implementation, OperationConfig, PassSizes, Placement
from ...planning.implementations import dequantised_copy
from ...planning.notes import note
from ..call.local import LocalCall, LocalOutput
from ..choices.mask_blocks import block_remarks
from ..flash.flash_candidates import flash_tuned_fields
from ..flash.flash_kernels import FlashKernels
from .kernel.mosaic_sizes import MosaicSizes
from .linker_notes import linker_notes
from .mosaic_rules import is_architecture
from .mosaic_sizes import MOSAIC_FIELDS, Sizing, columns, fields_of, tiles_of
from .run_mosaic import run_mosaic

if TYPE_CHECKING:
    from .kernel.mosaic_attention import PartialMosaic

__all__ = ["WARPS_OF_GROUP", "MosaicKernels"]

WARPS_OF_GROUP = 4


class MosaicKernels(FlashKernels):
    """attnops' kernels for a generation of GPUs, written in Mosaic GPU."""

    generation: ClassVar[str]  # as in the names of its kernels
    architecture: ClassVar[str]
    sizing: ClassVar[Sizing]
    # What a config says for this kernel to run in the interpreter, which knows no generation.
    interpreted_as: ClassVar[str]
    # Warps of a block that don't compute.
    helping: ClassVar[int] = WARPS_OF_GROUP
    # Programs of the warpgroups that compute gradients, where a block may go through its tiles more than once; else 0.
    programs: ClassVar[int] = 0

    def serves(self, problem: Any) -> bool:
        """The generation; and any device whose config asks for this kernel to be interpreted."""
        if self.interpreted(problem.config):
            return self.read(problem.config).kernel == self.interpreted_as
        return is_architecture(problem, self.architecture)

    def variant(self, config: OperationConfig) -> Implementation[Any]:
        """This one: another library's kernels stand behind the ones in Triton."""
        return self

    @staticmethod
    def partial() -> type[PartialMosaic]:
        """The kernels; imports Pallas, so only where they run."""
        raise NotImplementedError

    def __call__(self, call: LocalCall) -> LocalOutput:
        """Run the kernels, forward and backward."""
        output, lse = run_mosaic(call, self.read(call.config), self.partial())
        return LocalOutput(output, None, lse if call.return_lse else None)

    def resolve(self, problem: AttentionProblem, placement: Placement) -> OperationConfig:
        """Every size, by the head dim, the mask and the local lengths."""
        return self.sizing.resolve(problem, placement, self.read(problem.config))

    def passes(self, config: OperationConfig, backward: bool) -> tuple[PassSizes, ...]:
        """One kernel forward, two backward."""
        return tuple(
            PassSizes(
                which,
                sizes.block_q,
                sizes.block_kv,
                self.kernel(which),
                loading=self.helping,
                programs=self.programs if backward else 0,
                part=self.part(which, sizes),
                asks=self.asks(which, sizes),
            )
            for which, sizes in self._tiles(config).items()
            if (which != "forward") == backward and sizes.block_q is not None
        )

    def part(self, which: str, sizes: MosaicSizes) -> tuple[int, int]:
        """Rows and keys of a tile of which a warp decides at once whether it computes them: its own lines, and some of the other
        axis."""
        lines, across = self.sizing.lines // WARPS_OF_GROUP, sizes.block_q if which == "dkv" else sizes.block_kv
        columns = self.columns_of_part(which, across)
        return (columns, lines) if which == "dkv" else (lines, columns)

    def columns_of_part(self, which: str, across: int) -> int:
        """How many of the other axis. Default: all."""
        del which
        return across

    def asks(self, which: str, sizes: MosaicSizes) -> bool:
        """See PassSizes. Default: no."""
        del which, sizes
        return False

    def memory(
        self, problem: AttentionProblem, placement: Placement, config: OperationConfig
    ) -> Mapping[str, Mapping[str, int]]:
        """Shared memory of a block of threads, by what it holds."""
        return {
            self.kernel(which): self.sizing.shared_of(which, problem, sizes)
            for which, sizes in self._tiles(config).items()
            if which == "forward" or (problem.mode == "__train__" and sizes.block_q is not None)
        }

    def tuned_fields(self, problem: AttentionProblem, placement: Placement) -> tuple[str, ...]:
        """The unset sizes."""
        unset = flash_tuned_fields(problem, placement, self.read(problem.config))
        return tuple(name for name in unset if any(name in MOSAIC_FIELDS[which] for which in self.sizing.tiles))

    def candidates(self, problem: AttentionProblem, placement: Placement) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """Sizes around the default choice that fit into shared memory."""
        config, free = self.read(problem.config), self.tuned_fields(problem, placement)
        near = {which: list[dict[str, Any]]() for which in MOSAIC_FIELDS}
        for which, sizes in self._tiles(self.resolve(problem, placement)).items():
            found: dict[tuple[Any, ...], dict[str, Any]] = {}
            for one in () if sizes.block_q is None else self.sizing.near(which, sizes):
                fields = {name: size for name, size in fields_of(which, one).items() if name in free}
                try:
                    self.sizing.resolve(problem, placement, config.with_fields(fields))
                except ConfigError:
                    continue
                found.setdefault(tuple(fields.items()), fields)
            near[which] = list(found.values()) if set(MOSAIC_FIELDS[which]) & set(free) else []
        # The kernels of the gradients don't depend on each other's sizes: one is varied at a time.
        backward = [near[which][0] for which in ("dkv", "dq") if near[which]]
        first = {name: size for fields in backward for name, size in fields.items()}
        varied = itertools.chain(*itertools.zip_longest(near["dkv"][1:], near["dq"][1:]))
        made = {
            "forward": tuple(near["forward"]),
            "backward": (first, *(first | fields for fields in varied if fields is not None)) if first else (),
        }
        return {part: some for part, some in made.items() if some}

    def shipped_choice(self, problem: AttentionProblem, placement: Placement) -> tuple[str, Mapping[str, Any]] | None:
        """None is shipped."""
        return None

    def notes(self, problem: AttentionProblem, placement: Placement, config: OperationConfig) -> tuple[str, ...]:
        """A mask's blocks, what gradients of quantised keys cost, columns that are added, and what makes a kernel's binary."""
        sizes, local = self.read(config), placement.local
        # Each query head has its own tiles, if they aren't folded into one.
        block_q, tables = (local.q_len, local.kv_heads) if sizes.fold else (sizes.block_q or 1, local.q_heads)
        notes = block_remarks(problem, placement, block_q, sizes.block_kv or 1, tables)
        if problem.quantised:
            notes = (*notes, note("memory.dequantised_gradient", **dequantised_copy(problem, placement)))
        dims, padded = (problem.head_dim, problem.value_dim), columns(problem)
        if dims != padded:
            notes = (*notes, note("mosaic.columns", dims=dims, padded=padded))
        return (*notes, *linker_notes())

    def _tiles(self, config: OperationConfig) -> dict[str, MosaicSizes]:
        """The sizes of a filled config, by pass."""
        return tiles_of(self.read(config))._asdict()

    def kernel(self, which: str) -> str:
        """The name of a pass's kernel in a compiled program."""
        return f"attnops_{self.generation}_{which}"
