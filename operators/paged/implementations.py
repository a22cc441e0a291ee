"""What runs a step over pages: Pallas kernels on TPUs, Hopper and Blackwell, plain XLA elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from ...errors import ConfigError
from ...planning import Implementation, OperationConfig, Reason, declares
from ...planning.notes import note
from ...planning.paged.paged_problem import PagedProblem
from ...planning.paged.step_tuning import step_candidates, step_fields
from ..kernels.pages.tpu import reasons_against
from ..mosaic.linker_notes import linker_notes
from ..mosaic.mosaic_rules import is_architecture
from ..paged_cache.paged_call import Attended, PagedCall, on_xla
from .mosaic_kernel import BLACKWELL_PAGES, HOPPER_PAGES, MOSAIC_FEATURES, MosaicPages
from .mosaic_page_rules import page_rules
from .page_visits import KernelTiles, page_visits
from .paged_config import PagedConfig
from .step_reasons import BY_HEAD, DTYPE, POSITIONS, SOFTMAX, TPU_KERNEL, written_first
from .tpu_kernel import on_tpu, tpu_call, tpu_notes, tpu_reasons, tpu_sizes

__all__ = ["PAGES_ON_BLACKWELL", "PAGES_ON_HOPPER", "PAGES_ON_TPU", "PAGES_ON_XLA", "PagedImplementation"]

_FEATURES = frozenset({
    "causal", "sliding_window", "chunked", "logits_soft_cap", "sinks", "return_lse", "gqa", "value_dim", "latent_values",
    "quantized_kv", "draft_tree", "spans", "prefix_lengths", "rope_dtype", "selected",
})  # fmt: skip


class PagedImplementation(Implementation[PagedConfig]):
    """Its problem is a PagedProblem, its call a PagedCall; there is no placement beside the cache's own."""

    operation = "paged"
    config = PagedConfig

    def tuned_fields(self, problem: Any, placement: Any) -> tuple[str, ...]:
        """The unset sizes that the step uses."""
        del placement
        return step_fields(problem)

    def candidates(self, problem: Any, placement: Any) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """Sizes of the blocks; the first candidate declares nothing and is the rule's choice."""
        del placement
        return {"step": step_candidates(problem)}

    def visits(self, problem: PagedProblem, config: OperationConfig, batch: Any) -> Mapping[str, KernelTiles]:
        """GPU kernel -> the tiles of keys that its loops go through for a batch of known values. Default: none."""
        del problem, config, batch
        return {}

    def written_first(self, problem: PagedProblem) -> list[str]:
        """What of a step keeps a method that writes pages from writing them while it attends."""
        return written_first(problem)

    def reasons(self, problem: PagedProblem) -> tuple[Reason, ...]:
        """Reasons against it besides missing features and rules. Default: none."""
        del problem
        return ()


class PagesOnTpu(PagedImplementation):
    """Pallas kernels: pages come by DMA, several blocks at a time; dead pages aren't fetched.

    If the update is 'fused', rows of one token are written by the kernel too.
    """

    capability = declares(
        consumes=_FEATURES,
        rules=(SOFTMAX, TPU_KERNEL),
        tolerance={"float32": (4e-6, None), "bfloat16": (1.5e-2, None)},
        check_vma=False,
        writes_pages=True,
    )

    static_clock = True
    memory_field = "vmem_limit_bytes"

    def interpreted(self, config: OperationConfig) -> bool:
        """Whether the config asks for these kernels to be interpreted."""
        return super().interpreted(config) and self.read(config).kernel in (None, "tpu")

    def __call__(self, call: PagedCall) -> Attended:
        """Attend."""
        return on_tpu(call)

    def candidates(self, problem: Any, placement: Any) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """Those that the kernels accept, nearest to the rule's choice first."""
        ruled = tpu_sizes(problem)

        def distance(fields: Mapping[str, int]) -> float:
            return sum(abs(math.log2(size / getattr(ruled, name))) for name, size in fields.items())

        def accepted(fields: Mapping[str, int]) -> bool:
            return not reasons_against(*tpu_call(problem, problem.config.with_fields(fields)))

        every = super().candidates(problem, placement)
        return {part: tuple(sorted(filter(accepted, candidates), key=distance)) for part, candidates in every.items()}

    def reasons(self, problem: PagedProblem) -> tuple[Reason, ...]:
        """What the kernels' geometry and VMEM don't allow."""
        return tpu_reasons(problem)

    def resolve(self, problem: Any, placement: Any) -> OperationConfig:
        """The config with the kernels' sizes filled in. Errors: ConfigError for sizes that they don't take."""
        del placement
        if against := self.reasons(problem):
            raise ConfigError(f"{type(problem.config).__name__}: {against[0].message}.")
        return tpu_sizes(problem)

    def notes(self, problem: Any, placement: Any, config: OperationConfig) -> tuple[str, ...]:
        """What could be laid out better, which rows a fused update writes first, and the parts of keys that aren't read."""
        del placement
        notes = tpu_notes(problem)
        if config.is_set("kv_splits"):
            notes += (note("config.unread", method="forward_tpu", fields=["kv_splits"]),)
        return notes + _fused_notes(problem, self.written_first(problem))


class PagesInMosaic(PagedImplementation):
    """One kernel in Pallas' Mosaic GPU flavour, for rows of few tokens and for chunks: page numbers drive TMA, dead pages aren't
    loaded, and long rows' keys are divided over blocks of threads.

    If the update is 'fused', rows of one token are written by the kernel too.
    """

    static_clock = True
    of: ClassVar[MosaicPages]

    def serves(self, problem: Any) -> bool:
        """Its generation of GPUs; and any device whose config asks for this kernel to be interpreted."""
        others = (PAGES_ON_TPU, PAGES_ON_HOPPER, PAGES_ON_BLACKWELL)
        return self.interpreted(problem.config) or (
            is_architecture(problem, self.of.name) and not any(x.interpreted(problem.config) for x in others)
        )

    def interpreted(self, config: OperationConfig) -> bool:
        """Whether the config asks for this kernel to be interpreted."""
        return super().interpreted(config) and self.read(config).kernel == self.of.name

    def __call__(self, call: PagedCall) -> Attended:
        """Attend."""
        return self.of.attend(call)

    def tuned_fields(self, problem: Any, placement: Any) -> tuple[str, ...]:
        """The unset sizes that the step uses."""
        names = tuple(
            x
            for x in super().tuned_fields(problem, placement)
            if x != "queries_per_block" or self.of.several_rows(problem)
        )
        return (*names, "kv_splits") if problem.mode != "insert" and not problem.config.is_set("kv_splits") else names

    def candidates(self, problem: Any, placement: Any) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """The rule's choice, and others of the tiles and of the parts of all keys."""
        names = self.tuned_fields(problem, placement)
        return {"step": self.of.candidates(problem, names)} if names else {}

    def visits(self, problem: PagedProblem, config: OperationConfig, batch: Any) -> Mapping[str, KernelTiles]:
        """Of each of its two kernels that runs."""
        return page_visits(self.of, problem, config, batch)

    def resolve(self, problem: Any, placement: Any) -> OperationConfig:
        """The config with the kernel's sizes filled in."""
        del placement
        return self.of.resolve(problem)

    def notes(self, problem: Any, placement: Any, config: OperationConfig) -> tuple[str, ...]:
        """A limit of VMEM that isn't read, which rows a fused update writes first, and what makes the kernel's binary."""
        del placement
        notes = _unread_notes(config, f"forward_{self.of.name}", ("vmem_limit_bytes",))
        return notes + _fused_notes(problem, self.written_first(problem)) + linker_notes()

    def written_first(self, problem: PagedProblem) -> list[str]:
        """What several blocks of threads would write, and what XLA reads of the pages."""
        return self.of.written_first(problem)


class PagesOnHopper(PagesInMosaic):
    """Products by wgmma, sums in registers."""

    devices = "Hopper"
    of: ClassVar[MosaicPages] = HOPPER_PAGES
    capability = declares(
        consumes=MOSAIC_FEATURES,
        rules=(SOFTMAX, *page_rules(HOPPER_PAGES)),
        tolerance={"bfloat16": (1.5e-2, None), "float16": (2e-3, None)},  # in the interpreter on CPU
        check_vma=False,
        writes_pages=True,
    )


class PagesOnBlackwell(PagesInMosaic):
    """Products by tcgen05, logits and sums in tensor memory."""

    devices = "Blackwell"
    of: ClassVar[MosaicPages] = BLACKWELL_PAGES
    capability = declares(
        consumes=MOSAIC_FEATURES,
        rules=(SOFTMAX, *page_rules(BLACKWELL_PAGES)),
        tolerance={"bfloat16": (1.5e-2, None), "float16": (2e-3, None)},  # in the interpreter on CPU
        check_vma=False,
        writes_pages=True,
    )


class PagesOnXla(PagedImplementation):
    """Plain XLA: decoding rows by a list of live pages, chunks block by block; dead pages aren't read."""

    capability = declares(
        consumes=_FEATURES | {"score", "positions"},
        rules=(SOFTMAX, DTYPE, BY_HEAD, POSITIONS),
        tolerance={"float32": (4e-6, None), "bfloat16": (1.5e-2, None), "float16": (2e-3, None)},
    )

    def __call__(self, call: PagedCall) -> Attended:
        """Attend."""
        return on_xla(call)

    def tuned_fields(self, problem: Any, placement: Any) -> tuple[str, ...]:
        """None where selected keys are gathered."""
        return () if _gathers(problem) else super().tuned_fields(problem, placement)

    def candidates(self, problem: Any, placement: Any) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """None where selected keys are gathered."""
        return {"step": ()} if _gathers(problem) else super().candidates(problem, placement)

    def notes(self, problem: Any, placement: Any, config: OperationConfig) -> tuple[str, ...]:
        """Sizes that aren't read, and a fused update, which there is none of."""
        del placement
        blocks = ("pages_per_block", "queries_per_block") if _gathers(problem) else ()
        unread = ("kernel", "kv_splits", "vmem_limit_bytes", *blocks)
        return _unread_notes(config, "forward_native", unread) + _unfused(problem, "forward_native")


def _unread_notes(config: OperationConfig, method: str, fields: tuple[str, ...]) -> tuple[str, ...]:
    """Declared fields that a method doesn't read."""
    declared = [name for name in fields if config.is_set(name)]
    return (note("config.unread", method=method, fields=declared),) if declared else ()


def _unfused(problem: PagedProblem, method: str) -> tuple[str, ...]:
    """That a method has no fused update."""
    fused = problem.update == "fused" and problem.mode != "insert"
    return (note("paged.fused_unsupported", method=method),) if fused else ()


def _fused_notes(problem: PagedProblem, first: list[str]) -> tuple[str, ...]:
    """Which rows a fused update writes first. first: what all of them are for."""
    if problem.update != "fused" or problem.mode == "insert":
        return ()
    if first:
        return (note("paged.fused_spans", names=" and ".join(first)),)
    return () if problem.max_q_len == 1 else (note("paged.fused_long_rows"),)


def _gathers(problem: PagedProblem) -> bool:
    """Whether only selected keys are read, in blocks of tokens that their number gives."""
    return "selected" in problem.features


PAGES_ON_TPU, PAGES_ON_XLA = PagesOnTpu(), PagesOnXla()
PAGES_ON_HOPPER, PAGES_ON_BLACKWELL = PagesOnHopper(), PagesOnBlackwell()
