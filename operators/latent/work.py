"""The operations and bytes of each form of a latent attention, counted from a plan's problem, and which form takes less."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ...devices.gpus import spec_of_kind
from ...devices.tpus import tpu_of
from ...errors import InputError
from ...planning import AttentionProblem
from ...planning.notes import Note, note
from ...registry.latent_dims import FORMS, Form, LatentDims
from ...sharding.modes import canonical_mode

__all__ = [
    "Choice",
    "FormWork",
    "QueryChoice",
    "choose_form",
    "choose_query",
    "form_note",
    "form_work",
    "operations_per_byte",
    "projection_flops",
    "query_note",
    "query_notes",
]

_GRID = 256  # blocks per side in which a mask's visible pairs are counted
# A device of unknown kind counts as one of these; without published figures, as on a CPU, 10 operations are made per byte.
_LIKE = {"tpu": "TPU v5e", "cuda": "NVIDIA H100 80GB HBM3"}
_UNKNOWN = 10.0


@dataclass(frozen=True)
class FormWork:
    """What a form computes and moves, on all devices together: operations, of which a multiply-add is two, and bytes of memory
    written and read between its products. cached_bytes: of one token's keys and values."""

    flops: float
    moved_bytes: float
    cached_bytes: int

    def cost(self, per_byte: float) -> float:
        """Operations, and bytes as the operations that the device could make while it moves them."""
        return self.flops + self.moved_bytes * per_byte


def operations_per_byte(platform: str, device_kind: str) -> float:
    """The operations on bfloat16 that a device makes while it reads a byte, by published figures."""
    for kind in (device_kind, _LIKE.get(platform, "")):
        if (tpu := tpu_of(kind)) is not None:
            return tpu.flops_per_second / tpu.bytes_per_second
        if (gpu := spec_of_kind(kind)) is not None:
            return gpu.flops_float16 / gpu.bytes_per_second
    return _UNKNOWN


def visible_pairs(problem: AttentionProblem) -> float:
    """Pairs of query and key that the mask leaves, per head and batch row, as far as it is known before the run. A block that is
    visible in part counts half."""
    q_len, kv_len = problem.q_len, problem.kv_len
    if problem.dynamic_query_offset:
        return float(q_len * kv_len)
    block_q, block_kv = -(-q_len // _GRID), -(-kv_len // _GRID)
    kinds = problem.mask.live_blocks(
        block_q, block_kv, q_len=q_len, kv_len=kv_len, query_offset=problem.query_offset or 0
    )
    rows = np.minimum(block_q, q_len - block_q * np.arange(kinds.shape[0]))
    keys = np.minimum(block_kv, kv_len - block_kv * np.arange(kinds.shape[1]))
    return float(((kinds / 2) * np.outer(rows, keys)).sum())


class QueryChoice(NamedTuple):
    """Whether the absorbed form multiplies the projections of queries and keys first (True) or applies them in turn (False),
    whether that was declared, and the work of both: that of the nope parts of queries."""

    folded: bool
    declared: bool
    work: Mapping[bool, FormWork]
    operations_per_byte: float

    @property
    def ratio(self) -> float:
        """The cost of the other way as a multiple of this one's."""
        chosen, other = (self.work[way].cost(self.operations_per_byte) for way in (self.folded, not self.folded))
        return other / chosen


def choose_query(dims: LatentDims, tokens: int, itemsize: int, train: bool, per_byte: float) -> QueryChoice | None:
    """How absorbed queries are made of this many latents: as declared, else what costs less. None if they are given."""
    if dims.query_latent_dim is None:
        return None
    q, nope, kv, heads = dims.query_latent_dim, dims.nope_dim, dims.latent_dim, dims.heads
    passes = 3.0 if train else 1.0  # a product's gradient is two products
    written = {False: tokens * heads * nope, True: heads * q * kv}  # between the two products, and read again
    products = {
        False: tokens * heads * nope * (q + kv),
        True: heads * q * kv * (nope + tokens),
    }
    read = {False: heads * nope * (q + kv), True: heads * nope * (q + kv)}
    work = {
        way: FormWork(2 * passes * products[way], passes * itemsize * (read[way] + 2.0 * written[way]), 0)
        for way in (False, True)
    }
    cheaper = work[True].cost(per_byte) < work[False].cost(per_byte)
    declared = dims.fold_query is not None
    return QueryChoice(bool(dims.fold_query) if declared else cheaper, declared, MappingProxyType(work), per_byte)


def _query_of(dims: LatentDims, problem: AttentionProblem) -> QueryChoice | None:
    itemsize, train = np.dtype(problem.runtime_dtype).itemsize, problem.mode == canonical_mode("train")
    per_byte = operations_per_byte(problem.platform, problem.device_kind)
    return choose_query(dims, problem.batch * problem.q_len, itemsize, train, per_byte)


def projection_flops(dims: LatentDims, form: Form, folded: bool, tokens: int, keys: int, heads: int) -> float:
    """Operations of the products before and after the attention, for rows of queries and of keys, and so many heads."""
    both, q = dims.nope_dim + dims.value_dim, dims.query_latent_dim
    rows = tokens if form == "absorbed" else keys
    products = rows * dims.latent_dim * both
    if q is not None:
        products += tokens * q * (dims.nope_dim + dims.rope_dim)
        if folded and form == "absorbed":  # one product of a token by q times latent_dim, and that of the weights
            products += q * dims.latent_dim * (tokens + dims.nope_dim) - tokens * dims.nope_dim * (q + dims.latent_dim)
    return 2.0 * heads * products


def form_work(dims: LatentDims, problem: AttentionProblem) -> Mapping[Form, FormWork]:
    """The work of both forms for a planned call of either, with the queries' projections if they are made of latents. In mode
    'train' the backward pass counts too."""
    batch, q_len, kv_len, heads = problem.batch, problem.q_len, problem.kv_len, dims.heads
    itemsize = np.dtype(problem.runtime_dtype).itemsize
    pairs = batch * heads * visible_pairs(problem)
    train = problem.mode == canonical_mode("train")
    # A projection's gradient is two products; that of attention three of the head dim and two of the value dim.
    of_projections, of_logits, of_values = (3.0, 4.0, 3.0) if train else (1.0, 1.0, 1.0)
    query = _query_of(dims, problem)
    result: dict[Form, FormWork] = {}
    for form in FORMS:
        kv_heads, head_dim, value_dim = dims.inner(form)
        folded = query is not None and query.folded
        flops = of_projections * projection_flops(dims, form, folded, batch * q_len, batch * kv_len, heads)
        flops += 2 * pairs * (of_logits * head_dim + of_values * value_dim)
        # Query and output are written by one product and read by the next; so are keys and values, which absorbed keys contain.
        rows = batch * q_len * heads * (head_dim + value_dim) * itemsize
        token = kv_heads * (head_dim if form == "absorbed" else head_dim + value_dim) * itemsize
        moved = 2.0 * (rows + batch * kv_len * token) * (3.0 if train else 1.0)
        if query is not None and dims.query_latent_dim is not None:
            weights = of_projections * heads * dims.query_latent_dim * dims.nope_dim * itemsize
            moved += query.work[folded].moved_bytes if form == "absorbed" else weights
        result[form] = FormWork(flops, moved, token)
    return MappingProxyType(result)


class Choice(NamedTuple):
    """A form, whether it was declared, the work of both, and the operations per byte that they are compared at. query: how
    queries are made in the absorbed form, if they are made of latents."""

    form: Form
    declared: bool
    work: Mapping[Form, FormWork]
    operations_per_byte: float
    query: QueryChoice | None = None

    @property
    def folded(self) -> bool:
        """Whether the projections of queries and keys are multiplied with each other first."""
        return self.form == "absorbed" and self.query is not None and self.query.folded

    @property
    def other(self) -> Form:
        """The form that wasn't chosen."""
        return next(form for form in FORMS if form != self.form)

    @property
    def ratio(self) -> float:
        """The cost of the other form as a multiple of this one's."""
        chosen, other = (self.work[form].cost(self.operations_per_byte) for form in (self.form, self.other))
        return other / chosen


@functools.lru_cache(maxsize=256)
def choose_form(dims: LatentDims, problem: AttentionProblem) -> Choice:
    """The declared form, else the one that costs less, for a planned call of either. Errors: InputError for symbolic sizes."""
    if problem.symbolic:
        names = ", ".join(sorted(problem.symbolic))
        raise InputError(f"{names} is known only by name, and the work of the forms is counted; export with numbers.")
    work, per_byte = form_work(dims, problem), operations_per_byte(problem.platform, problem.device_kind)
    cheaper = min(FORMS, key=lambda form: work[form].cost(per_byte))
    return Choice(dims.form or cheaper, dims.form is not None, work, per_byte, _query_of(dims, problem))


def form_note(choice: Choice) -> Note:
    """The note on the form, of a plan of the attention inside."""
    chosen = "declared" if choice.declared else "chosen"
    return note("latent.form", form=choice.form, chosen=chosen, other=choice.other, ratio=choice.ratio)


def query_notes(choice: Choice) -> tuple[Note, ...]:
    """What it says of queries that are made of latents."""
    if choice.query is None:
        return ()
    if choice.form == "absorbed":
        return (query_note(choice.query),)
    return (note("latent.query_not_folded"),) if choice.query.declared else ()


def query_note(choice: QueryChoice) -> Note:
    """How absorbed queries are made of their latents."""
    how = {True: "multiplied with each other first", False: "applied in turn"}
    chosen = "declared" if choice.declared else "chosen"
    return note("latent.query", how=how[choice.folded], chosen=chosen, other=how[not choice.folded], ratio=choice.ratio)
