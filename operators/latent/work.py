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
from ...planning.notes import note
from ...registry.latent_dims import FORMS, Form, LatentDims
from ...sharding.modes import canonical_mode

__all__ = ["Choice", "FormWork", "choose_form", "form_note", "form_work", "operations_per_byte"]

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


def form_work(dims: LatentDims, problem: AttentionProblem) -> Mapping[Form, FormWork]:
    """The work of both forms for a planned call of either. In mode 'train' the backward pass counts too."""
    batch, q_len, kv_len, heads = problem.batch, problem.q_len, problem.kv_len, dims.heads
    itemsize = np.dtype(problem.runtime_dtype).itemsize
    pairs = batch * heads * visible_pairs(problem)
    both, train = dims.nope_dim + dims.value_dim, problem.mode == canonical_mode("train")
    # A projection's gradient is two products; that of attention three of the head dim and two of the value dim.
    of_projections, of_logits, of_values = (3.0, 4.0, 3.0) if train else (1.0, 1.0, 1.0)
    result: dict[Form, FormWork] = {}
    for form in FORMS:
        kv_heads, head_dim, value_dim = dims.inner(form)
        projected = q_len if form == "absorbed" else kv_len
        flops = of_projections * 2 * batch * projected * heads * dims.latent_dim * both
        flops += 2 * pairs * (of_logits * head_dim + of_values * value_dim)
        # Query and output are written by one product and read by the next; so are keys and values, which absorbed keys contain.
        rows = batch * q_len * heads * (head_dim + value_dim) * itemsize
        token = kv_heads * (head_dim if form == "absorbed" else head_dim + value_dim) * itemsize
        moved = 2.0 * (rows + batch * kv_len * token) * (3.0 if train else 1.0)
        result[form] = FormWork(flops, moved, token)
    return MappingProxyType(result)


class Choice(NamedTuple):
    """A form, whether it was declared, the work of both, and the operations per byte that they are compared at."""

    form: Form
    declared: bool
    work: Mapping[Form, FormWork]
    operations_per_byte: float

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
    return Choice(dims.form or cheaper, dims.form is not None, work, per_byte)


def form_note(choice: Choice) -> str:
    """The note of a plan of the attention inside."""
    chosen = "declared" if choice.declared else "chosen"
    return note("latent.form", form=choice.form, chosen=chosen, other=choice.other, ratio=choice.ratio)
