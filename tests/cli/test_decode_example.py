"""The decode step of `make run`: its cache stays where it lies, and it takes no more memory than jax.nn's program."""

from __future__ import annotations

from pathlib import Path

from attnops.cli.baseline import Baseline, baseline
from attnops.cli.call_arrays import call_arrays
from attnops.cli.run_call import compile_call, compile_declared, on_devices
from attnops.cli.target import run_metadata
from attnops.registry import OperationRegistry
from attnops.registry.declaration import Declaration
from attnops.verify.collectives import collectives, sent_bytes

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama3_8b_decode.json"
CACHE = 4 * 2048 * 8 * 128 * 4  # bytes of the keys, and of the values


def test_the_cache_stays_where_it_lies() -> None:
    declaration = Declaration.load(EXAMPLE)
    operation = OperationRegistry.get(declaration.operation)(run_metadata(declaration, mesh="fsdp=2,tp=2,sp=2"))
    arrays, _, _ = call_arrays(declaration, None, 0)
    plan = operation.plan(**declaration.call_arguments(arrays, mode="autoregressive"))
    assert (plan.placement.sequence.strategy, plan.route.name) == ("split_kv", "decode_rows")
    placed = on_devices(arrays, plan, operation.metadata.mesh)
    ours = compile_declared(operation, declaration, placed, "autoregressive")
    other = baseline(plan, placed)
    assert isinstance(other, Baseline)
    theirs = compile_call(other.function, other.arguments)
    found = collectives(ours.call.as_text())
    assert {c.kind for c in found} == {"all-reduce"}
    assert sent_bytes(found) <= sent_bytes(collectives(theirs.call.as_text()))
    # Nothing as large as a device's part of the keys is held beside it: no copy, no wider one, no mask of that size.
    assert ours.temp_bytes < CACHE // 8 // 4
    assert ours.temp_bytes <= theirs.temp_bytes
