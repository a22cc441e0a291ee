"""The kernels in Mosaic GPU behind `paged`: their sizes, what they write, and the call itself."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ...devices import GpuVariant, gpu_specs, gpu_variant
from ...errors import ConfigError
from ...page_layouts import LAYOUTS
from ...planning import OperationConfig
from ...planning.paged.paged_problem import PagedProblem
from ..kernels.pages.mosaic.page_sizes import BLACKWELL_SIZING, HOPPER_SIZING
from ..kernels.pages.mosaic.page_tiles import (
    KEYS,
    PageSizing,
    PageStep,
    PageTiles,
    StepShape,
    head_tiles,
    own_columns,
    writable,
)  # fmt: skip
from ..kernels.pages.page_layout import page_shape
from ..paged_cache.layer_arrays import LayerPages
from ..paged_cache.paged_call import Attended, PagedCall
from .step_reasons import written_first

__all__ = ["BLACKWELL_PAGES", "HOPPER_PAGES", "MOSAIC_FEATURES", "MosaicPages", "is_quantised", "pages_of_tile"]

MOSAIC_FEATURES = frozenset({
    "causal", "sliding_window", "chunked", "logits_soft_cap", "sinks", "return_lse", "gqa", "value_dim", "latent_values",
    "draft_tree", "spans", "prefix_lengths", "score", "positions", "quantized_kv",
})  # fmt: skip

_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class MosaicPages:
    """A generation's kernel over pages. title: its GPUs."""

    sizing: PageSizing
    title: str

    @property
    def name(self) -> str:
        """In codes, and as a config says it."""
        return self.sizing.generation

    def step_shape(self, problem: PagedProblem) -> StepShape:
        """What the kernel's sizes depend on, of one device."""
        writes = problem.update == "fused" and not self.written_first(problem)
        return self._shape(problem, _own_columns(problem) if writes else ())

    def _shape(self, problem: PagedProblem, own: tuple[tuple[int, int], ...]) -> StepShape:
        """own: what the kernel writes of a token, as in `own_columns`."""
        dims, latent = (problem.head_dim, problem.value_dim), LAYOUTS[problem.layout].values_in_keys
        rows = tuple(numbers for _, numbers in own)
        return StepShape(
            problem.local_tokens, *problem.local_heads, dims, problem.page_size, latent, is_quantised(problem), rows
        )

    def written_first(self, problem: PagedProblem) -> list[str]:
        """What of a step has the keys of rows of one token written before: see `written_first`; scales of tokens, which XLA
        gathers; query heads or columns of values that several blocks of threads have, of which each would write; and sizes that
        no copy by TMA has."""
        heads, kv_heads = problem.local_heads
        group, own = heads // kv_heads, _own_columns(problem)
        quantised, size = problem.cache.cache.quantised, jnp.dtype(problem.stored_dtype).itemsize
        return (
            written_first(problem)
            + ["a scale for each token"] * (quantised is not None and quantised.scale == "token_head")
            + [f"{group} query heads of a kv head"] * (head_tiles(group, self.sizing.lines) > 1)
            + [f"value_dim={problem.value_dim}"]
            * (self.sizing.decode(self._shape(problem, own), None).column_blocks > 1)
            + [f"head_dim={problem.head_dim}"] * (not writable(own, size))
        )

    def step_tiles(self, problem: PagedProblem, config: OperationConfig) -> PageStep:
        """Every size of one device's call, by rule where the config has none."""
        names = ("pages_per_block", "queries_per_block", "kv_splits")
        given = (getattr(config, name, None) for name in names)
        return self.sizing.step(self.step_shape(problem), self._gpu(problem).cores, *given)

    def several_rows(self, problem: PagedProblem) -> bool:
        """Whether rows may have more tokens than fit into a tile of few."""
        return problem.max_q_len is None or problem.max_q_len > self.sizing.block_tokens(self.step_shape(problem))[0]

    def resolve(self, problem: PagedProblem) -> OperationConfig:
        """The config with the sizes filled in. Pages of a tile stay unset where decoding rows and chunks differ in them, or a
        page has more tokens than a tile."""
        config, step, several = problem.config, self.step_tiles(problem, problem.config), self.several_rows(problem)
        fields: dict[str, int] = {"kv_splits": step.splits}
        keys = {step.decode.block_kv, *((step.chunks.block_kv,) if several else ())}
        if getattr(config, "pages_per_block", None) is None and len(keys) == 1 and min(keys) >= problem.page_size:
            fields["pages_per_block"] = min(keys) // problem.page_size
        if several and getattr(config, "queries_per_block", None) is None:
            tokens = self.sizing.block_tokens(self.step_shape(problem))
            fields["queries_per_block"] = tokens[step.chunks.row_groups - 1]
        return config.with_fields(fields)

    def attend(self, call: PagedCall) -> Attended:
        """Attend with the kernel; see kernels/pages/mosaic."""
        # Imports Mosaic GPU, so only where the kernel runs.
        from ..kernels.pages.mosaic.attend import PageRows, paged_attention_mosaic

        tokens, heads, dim = call.query.shape
        form, pages, sizes = LAYOUTS[call.layout], call.pages, call.sizes
        shape = page_shape(call.layout, pages.key, pages.value, dim, call.value_dim)
        dims, quantised = (dim, call.value_dim), pages.key.dtype.itemsize == 1
        stored = pages.key.shape[-1], (pages.key if pages.value is None else pages.value).shape[-1]
        own = () if call.rows is None else tuple(numbers for _, numbers in own_columns(form, dim, stored))
        given = StepShape(tokens, heads, shape.kv_heads, dims, shape.page, form.values_in_keys, quantised, own)
        step = self.sizing.step(given, 1, sizes.pages_per_block, sizes.queries_per_block, sizes.kv_splits)
        arguments = call.kernel_arguments()
        beyond = {"selected": call.selected}
        beyond["rope_pages"] = arguments.pop("rope_pages")
        if names := [name for name, x in beyond.items() if x is not None]:
            raise ConfigError(
                f"{' and '.join(names)} over pages: the {self.title} kernel has none of it; wanted plain XLA."
            )
        output, lse, after = paged_attention_mosaic(
            call.query,
            **arguments,
            layout=call.layout,
            page_stride=call.sequence_shards,
            page_shard=call.shard_index,
            score=call.score,
            captures=call.captures,
            head_start=call.head_start,
            q_positions=call.q_positions,
            rows=None if call.rows is None else PageRows(call.rows.key, call.rows.value),
            step=step,
            generation=self.name,
            interpret=sizes.interpret,
        )
        return Attended(output, lse, None if after is None else LayerPages(*after))

    def candidates(self, problem: PagedProblem, names: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
        """What a search tries of these fields; the first declares nothing and is the rule's choice."""
        ruled = self.step_tiles(problem, problem.config).splits
        sizes: dict[str, tuple[int, ...]] = {
            "pages_per_block": pages_of_tile(problem),
            "queries_per_block": self.sizing.block_tokens(self.step_shape(problem)),
            "kv_splits": tuple(dict.fromkeys((ruled, ruled // 2, 2 * ruled))),
        }
        options = itertools.product(*(sizes[name] for name in names if sizes[name]))
        made = (dict(zip((name for name in names if sizes[name]), option, strict=True)) for option in options)
        return ({}, *(fields for fields in made if self.fits(problem, problem.config.with_fields(fields))))

    def dims_fit(self, problem: PagedProblem, config: OperationConfig) -> bool:
        """Whether heads are small enough for any tile."""
        del config
        return problem.head_dim <= self.sizing.most[0] and problem.value_dim <= self.sizing.most[1]

    def fits(self, problem: PagedProblem, config: OperationConfig) -> bool:
        """Whether the tiles of heads that are small enough fit."""
        return not self.dims_fit(problem, config) or not self.taken(problem, config)

    def taken(self, problem: PagedProblem, config: OperationConfig) -> str:
        """What tiles take that don't fit; '' where they do."""
        shape = self.step_shape(problem)
        unfit = (tiles for tiles in self._used(problem, config) if not self.sizing.fits(shape, tiles))
        return next((f"a tile of {x.block_kv} keys takes {self.sizing.taken(shape, x)}" for x in unfit), "")

    def _used(self, problem: PagedProblem, config: OperationConfig) -> tuple[PageTiles, ...]:
        step = self.step_tiles(problem, config)
        return (step.decode, step.chunks) if self.several_rows(problem) else (step.decode,)

    def _gpu(self, problem: PagedProblem) -> GpuVariant:
        """The device's figures; those of a GPU of the generation, if it isn't known, in the interpreter."""
        gpu = gpu_variant(problem.device_kind) or gpu_variant(gpu_specs()[self.sizing.target].kind)
        assert gpu is not None
        return gpu


HOPPER_PAGES, BLACKWELL_PAGES = MosaicPages(HOPPER_SIZING, "Hopper"), MosaicPages(BLACKWELL_SIZING, "Blackwell")


def pages_of_tile(problem: PagedProblem) -> tuple[int, ...]:
    """How many pages a tile can have."""
    return tuple(keys // problem.page_size for keys in KEYS if keys % problem.page_size == 0)


def is_quantised(problem: PagedProblem) -> bool:
    """Whether pages hold 8-bit numbers."""
    return problem.cache.cache.quantised is not None


def _own_columns(problem: PagedProblem) -> tuple[tuple[int, int], ...]:
    """What a token's key and its value have of a page's rows."""
    cache, kv_heads = problem.cache.cache, problem.local_heads[1]
    key, value = (cache.pages_shape(1, kv_heads, dim)[-1] for dim in (problem.head_dim, problem.value_dim))
    return own_columns(LAYOUTS[problem.layout], problem.head_dim, (key, value))
