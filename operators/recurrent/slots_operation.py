"""SlotsOperation: a step of a recurrence over slots, described, planned, placed and run by its table of operands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import InputError, InputTypeError, a_type, nearest, shown
from ...masks.int_arrays import known_values
from ...planning import plan
from ...planning.recurrent.step_operands import CONV_ROWS, STATE_BATCH, of_step
from ...planning.recurrent.steps import SLOT_STEPS
from ...planning.tables.table_plan import TablePlan
from ...planning.tables.table_problem import TableProblem
from ...sharding import OperandTable
from ..call.arrays import is_array
from ..call.program import Program, attention
from ..paged_cache.batch_checks import longest_row
from ..paged_cache.state_batch import StateBatch
from ..paged_cache.state_checks import check_states_later, state_problem
from .arithmetic import Results
from .checks import check_convolutions, without_gradient
from .implementations import over_slots
from .kernel.over_rows import FEW, Rows
from .local import RecurrentCall
from .operation import RecurrentOperation, alone
from .output import RecurrentOutput
from .step_tpu import StepOnTpu

__all__ = ["STEP_MODES", "SlotsOperation"]

STEP_MODES = ("mixed", "prefill", "autoregressive")
"""Chunks and single tokens together; chunks of prompts; one or a few tokens of each sequence."""

_COPIED = 1 << 16  # numbers of a device's array that are copied to the host for a check


class SlotsOperation(RecurrentOperation):
    """Base class of steps over slots. A subclass has the operation of whole calls as its second base, from which its table, its
    results and its implementations follow."""

    planner = SLOT_STEPS
    convention = "attnops:slots"
    unsized: ClassVar[tuple[str, ...]] = ("batch", "bounds")
    static: ClassVar[tuple[str, ...]] = ("mode", "max_q_len", "debug")

    forward_tpu: ClassVar[Any]
    forward_native: ClassVar[Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if len(cls.__bases__) == 1:  # what several steps have in common, or another name of one
            return
        whole: Any = cls.__bases__[1]
        cls.backend_operation = whole.name
        cls.operands, cls.results = of_step(whole.operands, whole.results)
        convolved = frozenset(row.name for row in cls.operands if row.name.endswith(CONV_ROWS))
        if convolved:
            cls.options, cls.values = (
                whole.options | {"conv_activation": str},
                whole.values | {"conv_activation": ("silu",)},
            )
        cls.forward_native = over_slots(whole.forward_native, convolved)
        if whole.implements("forward_tpu"):
            cls.forward_tpu = StepOnTpu(whole.forward_tpu, convolved)

    @classmethod
    def flops(cls, plan: TablePlan) -> float:
        """Operations on one device, counted from the chunks; rows of few tokens have none."""
        size: dict[str, int] = {}
        for x in plan.tensors:
            size = dict(zip(x.dims, x.local_shape, strict=True)) | size
        longest = plan.problem.option["max_q_len"]
        few = longest is not None and longest <= FEW
        recurrence = cls.token_flops(size, 1 if few else cls.chunk_of(plan.config))
        weights = (math.prod(x.local_shape) for x in plan.tensors if x.tensor.endswith(CONV_ROWS[0]))
        return size["tokens"] * (recurrence + 2.0 * sum(weights))

    @classmethod
    def packed(cls, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a step: arrays of a batch make a StateBatch."""
        batch = StateBatch(**{name: arrays[name] for name in STATE_BATCH.names})
        return {name: x for name, x in arrays.items() if name not in STATE_BATCH} | {"batch": batch}

    @classmethod
    def flat(cls, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a step with its arrays by name, those of the batch among them. Errors: InputTypeError, InputError."""
        batch = keywords.get("batch")
        if not isinstance(batch, StateBatch):
            raise InputTypeError(f"batch is {a_type(batch)}; wanted a StateBatch, as StateBatch.make makes it.")
        batch.check_form()
        return {name: x for name, x in keywords.items() if name != "batch"} | batch.arrays

    # -- calling -----------------------------------------------------------------------------------------------------

    def _run(self, given: Mapping[str, Any], call: Mapping[str, Any]) -> RecurrentOutput:
        debug = _debug(call)
        arrays, problem, mesh = self._described(*self._parted(given, call))
        decided: TablePlan = self._ready(plan(type(self), problem, self.metadata.policy), tuple(arrays.values()), mesh)
        self._check_batch(arrays, problem)
        results = attention(Program(self, decided, mesh, debug), {name: jnp.asarray(x) for name, x in arrays.items()})
        windows = {name: x for name, x in results.items() if name.endswith(CONV_ROWS[2])}
        return RecurrentOutput(results["attention_outputs"], results["state"], windows, plan=decided)

    def _plan(self, given: Mapping[str, Any], call: Mapping[str, Any]) -> TablePlan:
        _debug(call)
        return super()._plan(*self._parted(given, call))

    @classmethod
    def _parted(cls, given: Mapping[str, Any], call: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arrays that every step has, and its other keywords."""
        every = {**given, **cls.flat(call)}
        required = {row.name for row in cls._table().required}
        return {n: x for n, x in every.items() if n in required}, {n: x for n, x in every.items() if n not in required}

    # -- the description of a step -------------------------------------------------------------------------------------

    @classmethod
    def _table(cls) -> OperandTable:
        return OperandTable(*cls.operands, *STATE_BATCH)

    def _form(self, call: Mapping[str, Any]) -> tuple[str, str, str]:
        """Slots stay where they are from step to step, so that in each mode the rules are those of generation."""
        mode = call.get("mode")
        if mode is None:
            mode = "mixed" if call.get("max_q_len") is None else "autoregressive"
        plain = mode.strip("_") if isinstance(mode, str) else mode
        plain = "autoregressive" if plain == "decode" else plain
        if not isinstance(plain, str) or plain not in STEP_MODES:
            raise InputError(
                f"mode={shown(mode)}; a step over slots is one of {', '.join(STEP_MODES)}." + nearest(plain, STEP_MODES)
            )
        return "thd", plain, "autoregressive"

    @classmethod
    def _splits_rows(cls, arrays: Mapping[str, Any]) -> bool:
        return len(arrays["kv_lens"].shape) == 2

    def _options(self, call: Mapping[str, Any], config: Any) -> tuple[tuple[str, Any], ...]:
        longest = longest_row(call.get("max_q_len"))
        if longest is None and self._form(call)[1] == "autoregressive":
            longest = 1
        options = super()._options(call, config)
        if dict(options).get("conv_activation") and not any(name.endswith(CONV_ROWS[0]) for name in call):
            raise InputError(
                f"conv_activation={dict(options)['conv_activation']!r} of {self.name}, and no convolution; pass its weight, or "
                "leave this out."
            )
        return (*options, ("max_q_len", longest))

    def _check(self, arrays: Mapping[str, Any], sizes: Mapping[str, int], config: Any) -> None:
        wanted = getattr(config, "state_dtype", None) or arrays[self.operands.names[0]].dtype.name
        if arrays["state"].dtype != wanted:
            raise InputError(
                f"state is {arrays['state'].dtype}; wanted slots of {wanted}. Declare state_dtype for another dtype."
            )
        shards = _shards(arrays)
        for name in ("tokens", "slots"):
            if sizes[name] % shards:
                raise InputError(f"{sizes[name]} {name} for a batch of {shards} shards; wanted a multiple of them.")
        check_convolutions(arrays, sizes)
        super()._check(_counted_values(self._table(), arrays), sizes, config)

    @staticmethod
    def _check_batch(arrays: Mapping[str, Any], problem: TableProblem) -> None:
        """Refuse a batch of known values that don't fit. Errors: InputError."""
        values = {name: known_values(arrays[name]) for name in STATE_BATCH.names}
        if any(x is None for x in values.values()):
            return
        known: Any = values
        if wrong := state_problem(**known, **_of_shard(problem, _shards(arrays))):
            raise InputError(wrong)

    # -- running -----------------------------------------------------------------------------------------------------

    def run_program(self, program: Program, arrays: dict[str, jax.Array]) -> Results:
        """Run a planned step; traceable. The program's options are whether to check values (debug)."""
        decided: Any = program.plan
        problem = decided.problem
        arrays = dict(arrays)
        if program.options:
            batch = {name: arrays[name] for name in STATE_BATCH.names}
            check_states_later(batch, **_of_shard(problem, _shards(arrays)))
        if alone(program.mesh):
            return self._returned(self._local(decided, arrays), problem)
        return self._by_device(program, arrays)

    def _local(self, decided: Any, arrays: dict[str, jax.Array]) -> Results:
        table, problem = self._table(), decided.problem
        smooth = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        arrays = arrays | without_gradient(smooth)
        tokens = arrays[self.operands.names[0]].shape[0]
        batch = {name: arrays.pop(name) for name in STATE_BATCH.names}
        slots = arrays.pop("state")
        rows = Rows.of(batch, tokens, slots.shape[0], problem.option["max_q_len"])
        valid = rows.counted(tokens)[None]
        standard = {name: x[None] if _of_tokens(table, name, x) else x for name, x in arrays.items()}
        zeroed = {
            name: jnp.where(valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), x, 0)
            if _of_tokens(table, name, arrays[name])
            else x
            for name, x in standard.items()
        }
        call = RecurrentCall(zeroed | {"initial_state": slots}, None, valid, problem, decided.config, rows=rows)
        results: Results = self.forward(decided.method, problem.config)(call)
        return results | {"attention_outputs": results["attention_outputs"][0]}


def _of_tokens(table: OperandTable, name: str, x: Any) -> bool:
    """Whether an array is one by token: a decay may be one by head."""
    dims = table[name].dims
    return "tokens" in dims and len(dims) == x.ndim


def _debug(call: Mapping[str, Any]) -> bool:
    debug = call.get("debug")
    if not isinstance(debug, bool | None):
        raise InputTypeError(f"debug={shown(debug)}; wanted True or False.")
    return bool(debug)


def _shards(arrays: Mapping[str, Any]) -> int:
    shape = arrays["kv_lens"].shape
    return int(shape[0]) if len(shape) == 2 else 1


def _of_shard(problem: TableProblem, shards: int) -> dict[str, Any]:
    size = problem.size
    return {
        "slots": size["slots"] // shards,
        "tokens": size["tokens"] // shards,
        "longest": problem.option["max_q_len"],
    }


def _counted_values(table: OperandTable, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays for a check of their values: those by token without the tokens of no row, which may hold anything; None where
    values aren't known, or are many on a device."""
    bounds, count = known_values(arrays["cu_q_lens"]), known_values(arrays["num_seqs"])
    found: dict[str, Any] = {}
    for name, x in arrays.items():
        if name in STATE_BATCH or not _of_tokens(table, name, x):
            found[name] = x
            continue
        few = is_array(x) and not (isinstance(x, jax.Array) and x.size > _COPIED)
        values = known_values(x) if few and bounds is not None and count is not None else None
        if values is not None and bounds is not None and count is not None:
            shards = _shards(arrays)
            ends = np.take_along_axis(
                bounds.reshape(shards, -1), np.clip(count.reshape(shards, 1), 0, bounds.shape[-1] - 1), 1
            )
            by_shard = values.reshape(shards, -1, *values.shape[1:])
            values = np.concatenate([part[: max(end[0], 0)] for part, end in zip(by_shard, ends, strict=True)])
        found[name] = values
    return found
