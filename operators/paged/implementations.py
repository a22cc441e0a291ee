"""What runs a step over pages: Pallas kernels on TPUs, plain XLA elsewhere."""

from __future__ import annotations

from typing import Any

from ...planning import Implementation, OperationConfig, Reason, declares
from ...planning.paged.paged_problem import PagedProblem
from ..paged_cache.paged_call import Attended, PagedCall, on_xla
from .paged_config import PagedConfig
from .step_reasons import DTYPE, SOFTMAX
from .tpu_kernel import on_tpu, tpu_notes, tpu_reasons, tpu_sizes

__all__ = ["PAGES_ON_TPU", "PAGES_ON_XLA", "PagedImplementation"]

_FEATURES = frozenset(
    {"causal", "sliding_window", "logits_soft_cap", "sinks", "return_lse", "gqa", "value_dim", "quantized_kv"}
)


class PagedImplementation(Implementation[PagedConfig]):
    """Its problem is a PagedProblem, its call a PagedCall; there is no placement beside the cache's own."""

    operation = "paged"
    config = PagedConfig

    def reasons(self, problem: PagedProblem) -> tuple[Reason, ...]:
        """Reasons against it besides missing features and rules. Default: none."""
        del problem
        return ()


class PagesOnTpu(PagedImplementation):
    """Pallas kernels: pages come by DMA, several blocks at a time; dead pages aren't fetched. If the update is 'fused', rows of one
    token are written by the kernel too."""

    capability = declares(
        consumes=_FEATURES,
        rules=(SOFTMAX,),
        tolerance={"float32": (4e-6, None), "bfloat16": (1.5e-2, None)},
        check_vma=False,
        writes_pages=True,
    )

    def __call__(self, call: PagedCall) -> Attended:
        """Attend."""
        return on_tpu(call)

    def reasons(self, problem: PagedProblem) -> tuple[Reason, ...]:
        """What the kernels' geometry and VMEM don't allow."""
        return tpu_reasons(problem)

    def resolve(self, problem: Any, placement: Any) -> OperationConfig:
        """The config with the kernels' sizes filled in."""
        del placement
        return tpu_sizes(problem)

    def notes(self, problem: Any, placement: Any, config: OperationConfig) -> tuple[str, ...]:
        """What could be laid out better, and which rows a fused update writes first."""
        del placement, config
        notes = tpu_notes(problem)
        if problem.update == "fused" and problem.mode != "insert" and problem.max_q_len != 1:
            notes += ("update='fused': the kernel writes rows of one token; the keys of longer rows are written first",)
        return notes


class PagesOnXla(PagedImplementation):
    """Plain XLA: decoding rows by a list of live pages, chunks block by block; dead pages aren't read."""

    capability = declares(
        consumes=_FEATURES,
        rules=(SOFTMAX, DTYPE),
        tolerance={"float32": (4e-6, None), "bfloat16": (1.5e-2, None), "float16": (2e-3, None)},
    )

    def __call__(self, call: PagedCall) -> Attended:
        """Attend."""
        return on_xla(call)

    def notes(self, problem: Any, placement: Any, config: OperationConfig) -> tuple[str, ...]:
        """A limit of VMEM that isn't read, and a fused update, which there is none of."""
        del placement
        notes: tuple[str, ...] = ()
        if config.is_set("vmem_limit_bytes"):
            notes += ("forward_native doesn't read the config's vmem_limit_bytes",)
        if problem.update == "fused" and problem.mode != "insert":
            notes += (
                "update='fused': forward_native writes no pages, so keys are written first; the result is the same",
            )
        return notes


PAGES_ON_TPU, PAGES_ON_XLA = PagesOnTpu(), PagesOnXla()
