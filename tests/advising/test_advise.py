"""The search: each candidate is ranked or refused with its reason, the best is written as planned, wrong input is told."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnops
from attnops import ConfigError, Declaration, OperationRegistry, RefusedError
from attnops.advising import Advice, blocks
from attnops.advising.candidates import AXES, meshes
from attnops.advising.compiling import compile_best
from attnops.advising.entries import Entry, Refusals
from attnops.advising.machine import machine_of
from attnops.advising.report import COLUMNS, rows, term_rows
from attnops.advising.search_scope import requested_devices
from attnops.verify.report import PassReport, TargetReport

CALL = {"batch": 4, "q_len": 4096, "q_heads": 16, "kv_heads": 4, "head_dim": 128, "dtype": "bfloat16", "causal": True}


def _given(metadata: dict[str, Any] | None = None, **call: Any) -> dict[str, Any]:
    return {"operation": "splash", "metadata": metadata or {}, "call": CALL | call}


@pytest.fixture(scope="module")
def found() -> Advice:
    return attnops.advise(_given(), "v5e:2x4", operations=["splash"], most_compiled=0)


def test_every_candidate_is_ranked_or_refused(found: Advice) -> None:
    """What is planned runs, or is refused, or runs as another does."""
    kinds = [r for r in found.refused if not r.kind.startswith("mesh axis")]
    assert 0 < len(found.entries) <= found.planned - sum(r.count for r in kinds)
    seconds = [e.seconds_a_row for e in found.entries if not e.estimate.unknown]
    assert (
        seconds == sorted(seconds)[: len(seconds)]
        or max(b / a for a, b in zip(seconds[1:], seconds, strict=False)) < 1.001
    )
    known = [bool(e.estimate.unknown) for e in found.entries]
    assert known == sorted(known)
    assert all(math.prod(e.candidate.mesh.values()) == 8 for e in found.entries)
    assert {e.plan.placement.sequence.strategy for e in found.entries} == {
        "",
        "gather",
        "ring",
        "ulysses",
        "ulysses_ring",
    }
    assert all(r.reason and r.count > 0 for r in found.refused)
    assert any("kv heads" in r.reason for r in found.refused)


def test_batch_and_heads_win_where_they_divide(found: Advice) -> None:
    """Nothing is sent then, and all devices have the same to do: no roofline is below that."""
    best = found.best
    assert best.estimate.sent_bytes == 0
    assert best.candidate.mesh.keys() <= {"fsdp", "tp"}
    assert [one.waiting for one in best.estimate.passes] == [0.0, 0.0]


@pytest.mark.parametrize("place", [0, 7, 20])
def test_a_declaration_plans_as_it_was_planned(found: Advice, place: int) -> None:
    """Written, read and planned again it is the same plan."""
    entry = found.entries[place]
    again = Declaration.from_json(entry.declaration.to_json())
    operation: Any = OperationRegistry.get(again.operation)
    plan = operation(again.operation_metadata()).plan(**again.call_arguments(again.shapes()))
    assert (plan.problem, plan.placement, plan.implementation) == (
        entry.plan.problem,
        entry.plan.placement,
        entry.plan.implementation,
    )


def test_what_is_told(found: Advice) -> None:
    table = rows(found.entries)
    assert table[0][-1] == ""
    assert all(row[-1] for row in table[1:])
    slower = next(row for row in table if "ring" in row[2])
    assert "collective-permute over" in slower[-1]
    labels = [label for label, _ in term_rows(found.best)]
    assert labels == ["forward", "backward", "memory"]
    assert "v5e:2x4" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["entries"][0]["loses"] is None


def test_what_is_declared_is_kept() -> None:
    """A strategy, an order and blocks of the file; its mesh isn't read, and a note says so."""
    sizes = {"block_q": 256, "block_kv": 256}
    metadata = {
        "strict": True,
        "tuning": "tune",
        "sequence_parallel": "ring",
        "ring_order": "contiguous",
        "operation_configs": {"splash": sizes},
        "mesh": {"fsdp": 2},
    }
    advice = attnops.advise(_given(metadata), "v5e:2x2", most_compiled=0, operations=["splash"])
    splits = {e.plan.placement.sequence.strategy for e in advice.entries}
    assert splits == {"", "ring"}
    assert not any(e.plan.placement.sequence.zigzag for e in advice.entries)
    assert all((e.plan.config.block_q, e.plan.config.block_kv) == (256, 256) for e in advice.entries)  # type: ignore[attr-defined]
    assert [note.split()[0] for note in advice.notes] == ["metadata.mesh", "metadata.tuning='tune'"]


def test_sizes_are_declared_only_where_the_estimate_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger blocks of keys save starts and ends of tiles, by less than an estimate can be off."""
    kept = attnops.advise(_given(), "v6e:2x2", operations=["splash"], mesh={"fsdp": 4}, most_compiled=0).best
    assert "operation_configs" not in kept.declaration.metadata
    assert not kept.notes
    monkeypatch.setattr(blocks, "_GAIN", 0.999)
    gained = attnops.advise(_given(), "v6e:2x2", operations=["splash"], mesh={"fsdp": 4}, most_compiled=0).best
    assert gained.estimate.seconds < kept.estimate.seconds
    declared = gained.declaration.metadata["operation_configs"]["splash"]
    assert declared["block_kv"] > kept.plan.config.block_kv  # type: ignore[attr-defined]
    assert {name: getattr(gained.plan.config, name) for name in declared} == declared
    changed = {name: value for name, value in declared.items() if value != getattr(kept.plan.config, name)}
    assert (
        gained.notes[-1]
        == ", ".join(f"{n}={v}" for n, v in changed.items()) + ": estimated faster than the default sizes"
    )


def test_a_window_gets_the_blocks_that_compile_longer() -> None:
    """By default a window without a whole tile has short code; larger tiles have half the starts and ends for the same work."""
    one = {"fsdp": 1}
    given = _given(batch=1, q_len=32768, mode="prefill", sliding_window=[1023, 0])
    found = attnops.advise(given, "v6e:1x1", operations=["splash"], mesh=one, most_compiled=0).best
    assert found.notes == ("block_q=2048, block_kv=2048: estimated faster than the default sizes",)
    declared = found.declaration.metadata["operation_configs"]["splash"]
    assert {name: getattr(found.plan.config, name) for name in declared} == declared


def test_held_axes_devices_and_batches() -> None:
    asked: dict[str, Any] = {"mesh": {"tp": 2}, "devices": "2..4", "batches": (2, 4), "operations": ["splash"]}
    advice = attnops.advise(_given(q_len=1024), "v5e:2x4", most_compiled=0, **asked)
    assert {e.candidate.mesh["tp"] for e in advice.entries} == {2}
    assert {e.candidate.target for e in advice.entries} == {"v5e:2x2", "v5e:1x2"}
    assert {e.candidate.batch for e in advice.entries} == {2, 4}


def test_what_isnt_known_doesnt_win() -> None:
    """Four kv heads over eight devices are copied, and XLA chooses how their gradients come together."""
    advice = attnops.advise(_given(batch=1, kv_heads=4), "v5e:2x4", operations=["splash"], most_compiled=0)
    copied = [e for e in advice.entries if e.candidate.mesh == {"tp": 8}]
    assert copied
    assert all(e.estimate.unknown for e in copied)
    assert "its traffic isn't known" in rows(advice.entries, len(advice.entries))[-1][-1]


def test_no_candidate_is_left() -> None:
    """Seven rows of seven heads at a prime length: each kind is told with its reason. And what no device holds."""
    odd = attnops.advise(_given(batch=7, q_heads=7, kv_heads=7, q_len=509), "v5e:2x2", most_compiled=0)
    assert odd.entries == ()
    assert {r.kind for r in odd.refused} >= {"mesh axis fsdp", "mesh axis tp", "mesh axis sp"}
    with pytest.raises(RefusedError, match=r"7 batch rows can't be divided"):
        _ = odd.best
    large = attnops.advise(_given(batch=4096, q_len=65536), "v5e:2x2", operations=["splash"], most_compiled=0)
    assert large.entries == ()
    assert "a device needs at least" in large.refusal()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target": "v9:2x2"}, "target 'v9:2x2'"),
        ({"devices": "9..15"}, "no part of that size"),
        ({"devices": "8..4"}, "no part of that size"),
        ({"devices": "many"}, "wanted a number, or a range"),
        ({"mesh": {"ep": 2}}, "isn't searched"),
        ({"mesh": {"tp": 0}}, "tp=0; wanted"),
        ({"mesh": {"tp": "2"}}, "wanted a number of devices"),
        ({"batches": [0]}, "batch"),
        ({"operations": ["splsh"]}, "splsh"),
        ({"declaration": {"operation": "paged"}}, "declares none"),
        ({"declaration": _given({"partition_axis": {"head_axis": "x"}})}, "partition_axis"),
        ({"mode": "sleep"}, "mode"),
        ({"declaration": {"operation": "splash", "call": {"q_len": 5}}}, "missing"),
    ],
)
def test_wrong_input(change: dict[str, Any], words: str) -> None:
    asked = {"declaration": _given(), "target": "v5e:2x4", "most_compiled": 0} | change
    with pytest.raises(attnops.AttnOpsError, match=words.replace("(", r"\(")):
        attnops.advise(**asked)


@given(st.integers(1, 512), st.dictionaries(st.sampled_from(AXES), st.integers(1, 8), max_size=2))
def test_meshes_multiply_to_the_devices(devices: int, held: dict[str, int]) -> None:
    """Each once, with what is held, and all of them: as many as ways to write the number as a product of the free axes."""
    every = list(meshes(devices, held))
    assert len({tuple(sorted(m.items())) for m in every}) == len(every)
    for mesh in every:
        assert math.prod(mesh.values()) == devices
        assert all(mesh.get(name, 1) == size for name, size in held.items())
    rest, over = divmod(devices, math.prod(held.values()))
    free = len(AXES) - len(held)
    count = 0 if over else math.prod(math.comb(power + free - 1, power) for power in _powers(rest).values())
    assert len(every) == count


def _powers(n: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for p in range(2, n + 1):
        while n % p == 0:
            found[p] = found.get(p, 0) + 1
            n //= p
    return found


@given(st.one_of(st.text(max_size=8), st.integers(-5, 99), st.floats(), st.booleans()))
def test_devices_are_understood_or_refused(devices: Any) -> None:
    found: tuple[int, ...] = ()
    with contextlib.suppress(ConfigError):
        found = requested_devices(machine_of("v5e:4x4"), devices)
        assert found
    assert all(16 % n == 0 for n in found)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu")
def test_the_best_are_compiled() -> None:
    """Their program sends what was estimated, to the byte; the compiler's peak is no less than the least."""
    told: list[tuple[int, int, str]] = []
    advice = attnops.advise(
        _given(q_len=1024), "v5e:2x2", operations=["splash"], most_compiled=2, progress=lambda *what: told.append(what)
    )
    compiled = [e for e in advice.entries if e.compiled is not None]
    assert len(compiled) == 2
    assert advice.entries[0] is compiled[0]
    for entry in compiled:
        assert entry.compiled is not None
        sent = sum(one.sent_bytes for one in entry.compiled.passes[-1].collectives or ())
        assert sent == entry.estimate.sent_bytes
        assert (entry.peak_bytes or 0) >= entry.estimate.least_bytes
    assert any("compile" in what for _, _, what in told)


class _Compiled:
    """A compiler that accepts everything, except that a program's memory is larger the earlier it is compiled."""

    def __init__(self, differing: int = 0) -> None:
        self.count, self.differing = 0, differing

    def __call__(self, entry: Entry) -> TargetReport:
        self.count += 1
        differences = ("all-gather: 1 byte too much",) if self.count <= self.differing else ()
        made = PassReport("forward", True, None, peak_bytes=(100 - self.count) << 30, differences=differences)
        return TargetReport(entry.candidate.target, entry.plan, None, 0, 0, (made,), (), ("forward",))


def _compiled_of(
    found: Advice, monkeypatch: pytest.MonkeyPatch, compiler: Callable[[Entry], TargetReport], most: int
) -> tuple[Entry, ...]:
    monkeypatch.setattr("attnops.verify.targets.has_libtpu", lambda: True)
    monkeypatch.setattr("attnops.advising.compiling._compile", compiler)
    return tuple(compile_best(list(found.entries), Refusals(), most, lambda *what: None, []))


@pytest.mark.parametrize("differing", [0, 2])
def test_how_many_are_compiled_does_not_change_what_is_best(
    found: Advice, monkeypatch: pytest.MonkeyPatch, differing: int
) -> None:
    """The first candidates are equally fast. What sends something else than estimated comes last, and doesn't count."""
    assert found.entries[0].ranked_seconds == found.entries[1].ranked_seconds
    estimated = [entry.candidate for entry in found.entries]
    for most in range(1, 6):
        made = _Compiled(differing)
        ordered = [entry.candidate for entry in _compiled_of(found, monkeypatch, made, most)]
        assert made.count == most + differing
        assert ordered == estimated[differing:] + estimated[:differing]
    assert _compiled_of(found, monkeypatch, _Compiled(), 0) == found.entries


def test_all_rows_have_memory_of_one_kind(found: Advice, monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate, whether compiled or not; the compiler's peak stands apart. Times are marked as estimates too."""
    entries = _compiled_of(found, monkeypatch, _Compiled(), 1)
    table = [dict(zip(COLUMNS, row, strict=True)) for row in rows(entries)]
    assert [bool(row["compiled peak"]) for row in table] == [True] + [False] * (len(table) - 1)
    assert table[0]["compiled peak"] == "99.0 GiB"
    for row in table:
        assert all(row[name].startswith("~") for name in ("forward", "backward", "memory"))
        assert row["binds"].startswith(("forward ", "backward "))
    (best,) = [line for label, line in term_rows(entries[0]) if label == "memory"]
    assert best.startswith(f"{table[0]['memory']} per device = of both passes operands")


def test_what_a_program_sends_is_only_confirmed_if_it_was_read(found: Advice, monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(entry: Entry) -> TargetReport:
        made = PassReport("forward", True, None, peak_bytes=1 << 30, kernels=None, collectives=None)
        return TargetReport(entry.candidate.target, entry.plan, None, 0, 0, (made,), (), ("forward",))

    best = _compiled_of(found, monkeypatch, unread, 1)[0]
    (line,) = [line for label, line in term_rows(best) if label == "compiled"]
    assert "exactly" not in line
    assert "isn't known" in line


def test_gpus_and_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned without the plugin; the note says what would compile."""
    monkeypatch.setattr("attnops.verify.targets.has_cuda_plugin", lambda: False)
    gpus = attnops.advise(_given(q_len=1024), "h100:4", mesh={"tp": 1})
    assert gpus.notes == (
        "jax's CUDA plugin isn't installed, so nothing was compiled; pip install 'attnops[cuda-compile]' (Linux) compiles it",
    )
    assert {e.plan.problem.platform for e in gpus.entries} == {"cuda"}
    assert {e.candidate.operation for e in gpus.entries} >= {"splash", "vanilla"}
    cpus = attnops.advise(_given(q_len=1024), "cpu:4", most_compiled=1)
    assert any("virtual CPU devices" in note for note in cpus.notes)
    assert jax.default_backend() == "cpu"
