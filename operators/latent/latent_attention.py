"""LatentAttention: a declared multi-head latent attention, ready for a model to call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

import jax

from ...call_arguments import CallArray
from ...errors import ConfigError
from ...planning import Plan
from ...registry.declaration import Declaration
from ...registry.latent_dims import Form, LatentDims
from ...registry.step_declaration import StepDeclaration
from ...sharding.modes import canonical_layout
from ..api.attention import Attention
from ..api.attention_keywords import is_operation_name
from ..call.key_columns import KeyColumns
from ..call.output import AttentionOutput
from .forms import absorbed_inputs, absorbed_output, expanded_inputs
from .latent_operands import LatentArguments, LatentStepArguments, check_arrays, taken
from .latent_plan import LatentPlan
from .latent_query import absorbed, expanded
from .latent_step import check_cache, noted, query_of_step, step_inputs, step_shapes
from .latent_traffic import form_notes
from .work import QueryChoice, choose_form

if TYPE_CHECKING:
    from ...planning.cache.kv_cache import KVCache
    from ...planning.paged.paged_plan import PagedPlan
    from ..paged.step_output import StepOutput
    from ..paged_cache.batch import RaggedBatch
    from ..paged_cache.state import CacheState

__all__ = ["LatentAttention"]

_DIMS = tuple(LatentDims.model_fields)


class LatentAttention:
    """A declared multi-head latent attention: its sizes, and an Attention between its projections. Hashable, as an Attention is.

    declared: the name of the operation that attends, such as 'splash'; or a Declaration with `latent`, its dict, or the path of
    its JSON file. keywords: with a name, heads, nope_dim, rope_dim, value_dim, latent_dim, form, and those of Attention; else
    those of Attention with a declaration. If form is unset, the plan chooses the one that costs less, by counted operations and
    bytes.

    Errors: ConfigError for sizes that are missing or wrong; those of Attention. Source: DeepSeek-AI, "DeepSeek-V2" (2024).
    """

    def __init__(self, declared: Declaration | Mapping[str, Any] | str | Path, **keywords: Any) -> None:
        if isinstance(declared, str) and is_operation_name(declared):
            self.dims = LatentDims(**{name: keywords.pop(name) for name in _DIMS if name in keywords})
        else:
            declared, self.dims = _parts(declared)
        self.attention = Attention(declared, **keywords)
        self._in_pages = self.attention.declaration.in_pages
        if self._in_pages and self.dims.form == "expanded":
            raise ConfigError("form='expanded' over pages, which hold latents; leave form out, or declare 'absorbed'.")

    # -- calls -------------------------------------------------------------------------------------------------------

    @overload
    def __call__(
        self,
        q_nope: jax.Array | None,
        q_rope: jax.Array | None,
        latent: jax.Array,
        rope_key: jax.Array,
        w_uk: jax.Array,
        w_uv: jax.Array,
        **call: Unpack[LatentArguments],
    ) -> AttentionOutput: ...

    @overload
    def __call__(
        self,
        q_nope: jax.Array | None,
        q_rope: jax.Array | None,
        latent: jax.Array | None,
        rope_key: jax.Array | None,
        w_uk: jax.Array,
        w_uv: jax.Array,
        *,
        state: CacheState,
        layer: int,
        batch: RaggedBatch,
        **call: Unpack[LatentStepArguments],
    ) -> StepOutput: ...

    def __call__(
        self,
        q_nope: jax.Array | None,
        q_rope: jax.Array | None,
        latent: jax.Array | None,
        rope_key: jax.Array | None,
        w_uk: jax.Array,
        w_uv: jax.Array,
        **call: Any,
    ) -> Any:
        """Attend. Shapes, in layout bthd: q_nope [batch, q, heads, nope_dim], q_rope [batch, q, heads, rope_dim], latent [batch,
        kv, latent_dim], rope_key [batch, kv, rope_dim], w_uk [latent_dim, heads, nope_dim], w_uv [latent_dim, heads,
        value_dim]; output [batch, q, heads, value_dim]. In packed layouts no array has a batch. Rotary positions are applied.

        If query_latent_dim is declared, q_nope and q_rope are None, and queries are made of query_latent [batch, q,
        query_latent_dim] and w_uq [query_latent_dim, heads, nope_dim + rope_dim], whose rotary part is rotated by q_cos and q_sin
        [batch or 1, q, rope_dim / 2]: the cosine and sine of each pair's angle.

        call: what Attention takes. softmax_scale is (nope_dim + rope_dim)^-0.5 by default, in both forms. The output's plan is
        that of the attention inside, with a note on the form. Over pages: tokens as in a packed layout, with state=, layer= and
        batch=; latents and rotary keys are written, None with update='none'. Errors: InputError for other shapes; those of
        Attention.
        """
        arrays, call = taken(self.dims, (q_nope, q_rope, latent, rope_key, w_uk, w_uv), call)
        layout, options = self._options(call)
        if self._in_pages:
            check_cache(self.dims, getattr(options.get("state"), "cache", None), options.get("layer"))
            choice = None if self.dims.query_latent_dim is None else self._query_of_step(arrays, options)
            stepped = self.attention(*step_inputs(self.dims, arrays, choice), None, **options)
            attended = stepped.attention_outputs
            assert stepped.plan is not None  # the call itself sets it
            attended = None if attended is None else absorbed_output(attended, w_uv, layout="thd")
            return replace(stepped, attention_outputs=attended, plan=noted(self.dims, stepped.plan))
        decided = self._plan(arrays, layout, options)
        if decided.form == "expanded":
            key_arrays = (arrays[name] for name in ("latent", "rope_key", "w_uk", "w_uv"))
            inner = expanded_inputs(*expanded(self.dims, arrays, layout), *key_arrays, layout=layout)
        else:
            query = absorbed(self.dims, arrays, layout, decided.choice.folded)
            inner = (*absorbed_inputs(query, latent, rope_key, layout=layout), KeyColumns(self.dims.latent_dim))
        output = self.attention(*inner, **options)
        attended = output.attention_outputs
        if decided.form == "absorbed":
            attended = absorbed_output(attended, w_uv, layout=layout)
        return replace(output, attention_outputs=attended, plan=decided.inner)

    @overload
    def plan(
        self,
        q_nope: CallArray | None,
        q_rope: CallArray | None,
        latent: CallArray,
        rope_key: CallArray,
        w_uk: CallArray,
        w_uv: CallArray,
        **call: Unpack[LatentArguments],
    ) -> LatentPlan: ...

    @overload
    def plan(
        self,
        q_nope: CallArray | None,
        q_rope: CallArray | None,
        latent: CallArray | None,
        rope_key: CallArray | None,
        w_uk: CallArray,
        w_uv: CallArray,
        *,
        cache: KVCache | CacheState,
        layer: int | None = None,
        batch: RaggedBatch | None = None,
        **call: Unpack[LatentStepArguments],
    ) -> PagedPlan: ...

    def plan(
        self,
        q_nope: CallArray | None,
        q_rope: CallArray | None,
        latent: CallArray | None,
        rope_key: CallArray | None,
        w_uk: CallArray,
        w_uv: CallArray,
        **call: Any,
    ) -> Any:
        """The LatentPlan of the same call, from arrays or ShapeDtypeStructs; nothing runs. Over pages: the PagedPlan of the step
        inside, of cache= in place of a state; default: the file's."""
        arrays, call = taken(self.dims, (q_nope, q_rope, latent, rope_key, w_uk, w_uv), call)
        layout, options = self._options(call)
        if self._in_pages:
            cache = options.get("cache", self.attention.declaration.cache)
            check_cache(self.dims, getattr(cache, "cache", cache), options.get("layer"))
            return noted(self.dims, self.attention.plan(*step_shapes(self.dims, arrays), None, **options))
        return self._plan(arrays, layout, options)

    def _options(self, call: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        options, declaration = dict(call), self.attention.declaration
        declared = (declaration.step or StepDeclaration()) if self._in_pages else declaration.call
        layout = "thd" if self._in_pages else canonical_layout(options.get("layout") or declaration.call.layout)
        scales = (options.get("softmax_scale"), declared.softmax_scale, self.attention.operation.metadata.softmax_scale)
        if all(scale is None for scale in scales):
            options["softmax_scale"] = self.dims.softmax_scale
        return layout, options

    def _query_of_step(self, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> QueryChoice | None:
        cache: Any = options.get("state")
        declared = {name: x for name, x in options.items() if name not in ("state", "batch")}
        query, key = step_shapes(self.dims, arrays)
        return query_of_step(self.dims, self.attention.plan(query, key, None, cache=cache, **declared))

    def _plan(self, arrays: Mapping[str, Any], layout: str, options: Mapping[str, Any]) -> LatentPlan:
        sizes = check_arrays(self.dims, arrays, layout)

        def inner(form: Form) -> Plan:
            query, key, value = _inner_shapes(self.dims, form, arrays, sizes, layout)
            values: Any = value if form == "expanded" else KeyColumns(self.dims.latent_dim)
            return self.attention.plan(query, key, values, **options)

        first = self.dims.form or "expanded"
        planned = inner(first)
        choice = choose_form(self.dims, planned.problem)
        planned = planned if choice.form == first else inner(choice.form)
        planned = replace(planned, notes=(*planned.notes, *form_notes(self.dims, choice, planned)))
        return LatentPlan(self.dims, choice, planned)

    # -- the declaration -----------------------------------------------------------------------------------------------

    def declared(self) -> Declaration:
        """The declaration; a LatentAttention of it equals this one."""
        return Declaration.from_dict({**self.attention.declared().to_dict(), "latent": self.dims.model_dump()})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LatentAttention):
            return NotImplemented
        return self.dims == other.dims and self.attention == other.attention

    def __hash__(self) -> int:
        return hash((self.dims, self.attention))

    def __repr__(self) -> str:
        return f"LatentAttention({self.declared().to_dict()!r})"


def _parts(declared: Any) -> tuple[Declaration, LatentDims]:
    """A declaration without its `latent`, and that."""
    if isinstance(declared, str | Path):
        declared = Declaration.load(declared)
    elif not isinstance(declared, Declaration):
        declared = Declaration.from_dict(declared)
    if declared.latent is None:
        raise ConfigError("the declaration has no latent; declare its sizes, or use Attention.")
    fields = declared.to_dict()
    del fields["latent"]
    return Declaration.from_dict(fields), declared.latent


def _inner_shapes(
    dims: LatentDims, form: Form, arrays: Mapping[str, Any], sizes: Mapping[str, int], layout: str
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Query, key and value of the attention inside."""
    kv_heads, head_dim, value_dim = dims.inner(form)
    of_query = {"b": sizes["batch"], "t": sizes["q_len"], "h": dims.heads, "d": head_dim}
    of_key = of_query | {"t": sizes["kv_len"], "h": kv_heads}
    shapes = (of_query, of_key, of_key | {"d": value_dim})
    query = arrays["q_nope" if dims.query_latent_dim is None else "query_latent"]
    dtypes = (query.dtype, arrays["latent"].dtype, arrays["latent"].dtype)
    return tuple(
        jax.ShapeDtypeStruct(tuple(shape[letter] for letter in layout), dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
