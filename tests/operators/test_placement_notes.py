"""Arrays that come elsewhere or split otherwise than declared: the plan says so, with the bytes that are sent."""

from __future__ import annotations

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from attnops import InputError, OperationMetadata, OperationRegistry
from attnops.authoring import Operation
from attnops.planning import Plan
from attnops.verify.collectives import collectives

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
NAMES = ("fsdp", "tp", "sp")
SHAPE = (4, 32, 4, 8)  # float32: 16 KiB


def mesh_of(devices: Any = None, kind: AxisType = AUTO, sizes: tuple[int, ...] = (2, 2, 2)) -> Mesh:
    devices = jax.devices() if devices is None else devices
    return Mesh(np.array(devices).reshape(sizes), NAMES, axis_types=(kind,) * 3)


def attend(mesh: Any = None, **metadata: Any) -> Operation:
    return OperationRegistry.create("vanilla", OperationMetadata(mesh=mesh_of() if mesh is None else mesh, **metadata))


def moved(plan: Plan, name: str = "key") -> list[str]:
    return [note for note in plan.notes if note.startswith(f"{name} comes")]


def comes(sharding: Any, shape: tuple[int, ...] = SHAPE) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def bare(shape: tuple[int, ...] = SHAPE) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def lacking(shape: tuple[int, ...], source: Any, target: Any) -> dict[Any, int]:
    """{device: bytes of float32 that it needs and hasn't}, counted element by element."""
    held = source.devices_indices_map(shape)
    found = {}
    for device, index in target.devices_indices_map(shape).items():
        missing = np.zeros(shape, bool)
        missing[index] = True
        if device in held:
            missing[held[device]] = False
        found[device] = 4 * int(missing.sum())
    return found


def said(note: str) -> tuple[int, int]:
    """(the most bytes that are sent to a device, bytes in all or -1) of a note."""

    def count(number: str, unit: str) -> int:
        return round(float(number) * {"B": 1, "KiB": 1024}[unit])

    if "nothing is sent" in note:
        return 0, 0
    if one := re.search(r": ([\d.]+) (B|KiB) sent to each device", note):
        return count(*one.groups()), -1
    two = re.search(r": up to ([\d.]+) (B|KiB) sent to each device, ([\d.]+) (B|KiB) in all", note)
    assert two is not None, note
    return count(*two.groups()[:2]), count(*two.groups()[2:])


SOURCES = {
    "as declared": NamedSharding(mesh_of(), P("fsdp", "sp", "tp")),
    "whole": NamedSharding(mesh_of(), P()),
    "other dims": NamedSharding(mesh_of(), P("tp", "fsdp", "sp")),
    "in part": NamedSharding(mesh_of(), P("fsdp")),
    "other order": NamedSharding(mesh_of(jax.devices()[::-1]), P("fsdp", "sp", "tp")),
    "fewer": NamedSharding(mesh_of(jax.devices()[4:], sizes=(2, 2, 1)), P("fsdp", "sp", "tp")),
    "one": SingleDeviceSharding(jax.devices()[3]),
    "other mesh": NamedSharding(jax.make_mesh((8,), ("x",), axis_types=(AUTO,)), P(None, "x")),
    "explicit": NamedSharding(mesh_of(kind=EXPLICIT), P("tp", "sp", "fsdp")),
}


@pytest.mark.parametrize(("source", "strategy"), list(itertools.product(SOURCES, ["gather", "ring"])))
def test_bytes_against_a_count_of_elements(source: str, strategy: str) -> None:
    operation = attend(sequence_parallel=strategy)
    target = NamedSharding(mesh_of(), P("fsdp", "sp", "tp"))  # where all of the three enter
    plan = operation.plan(*[comes(SOURCES[source])] * 3)
    want = lacking(SHAPE, SOURCES[source], target)
    for name in ("query", "key", "value"):
        notes = moved(plan, name)
        if source == "as declared":
            assert notes == []
            continue
        (note,) = notes
        assert "P(fsdp, sp, tp, -)" in note
        most, total = said(note)
        assert most == max(want.values())
        assert total in (-1, sum(want.values()))
        assert (total == -1) == (len(set(want.values())) == 1 and most > 0)


def test_words() -> None:
    def note(source: str, *shapes: tuple[int, ...]) -> str:
        (one,) = moved(attend().plan(bare(), comes(SOURCES[source]), bare()))
        return one

    into = "P(fsdp, sp, tp, -)"
    # 16 KiB, of which a device needs 2 KiB
    assert (
        note("whole")
        == f"key comes as P(-, -, -, -) and is taken as {into}: nothing is sent, each device holds 16.0 KiB"
    )
    assert (
        note("one")
        == f"key comes on cpu:3 alone and is moved to {into}: up to 2.0 KiB sent to each device, 14.0 KiB in all"
    )
    assert note("other order").startswith(
        f"key comes as {into} on the same devices in another order and is moved to {into}: 2.0 KiB sent to each device"
    )
    assert note("fewer").startswith(
        f"key comes as {into} of mesh fsdp=2,tp=2,sp=1 on 4 devices, 4 of them the mesh's 8 and"
    )
    assert note("other mesh").startswith(f"key comes as P(-, x, -, -) of mesh x=8 and is moved to {into}: ")


def test_arrays_as_their_shapes() -> None:
    operation = attend()
    x = np.ones(SHAPE, np.float32)
    for source in SOURCES.values():
        put = jax.device_put(x, source)
        real, described = operation.plan(put, put, put), operation.plan(*[comes(source)] * 3)
        assert real.notes == described.notes
        assert real.notes[: len(operation.plan(x, x, x).notes)] == operation.plan(x, x, x).notes


def test_what_has_no_place_yet_is_not_told() -> None:
    operation = attend()
    for x in (np.ones(SHAPE, np.float32), jnp.ones(SHAPE), bare()):
        assert not any("comes" in note for note in operation.plan(x, x, x).notes)
    alone = OperationRegistry.create("vanilla")
    put = jax.device_put(np.ones(SHAPE, np.float32), jax.devices()[3])
    assert not any("comes" in note for note in alone.plan(put, put, put).notes)  # it runs where they are


def test_a_mesh_of_one_device_elsewhere() -> None:
    one = mesh_of(jax.devices()[2:3], sizes=(1, 1, 1))
    (note,) = moved(attend(one).plan(bare(), comes(SOURCES["one"]), bare()))
    assert note == "key comes on cpu:3 alone and is moved to P(-, -, -, -): 16.0 KiB sent to each device"
    assert moved(attend(one).plan(bare(), comes(SingleDeviceSharding(jax.devices()[2])), bare())) == []


def test_a_gathered_cache_goes_at_once_to_where_it_is_wanted() -> None:
    """Declared split over sp, wanted whole along the sequence: the bytes are those of the way that it really takes."""
    mesh, token = mesh_of(), bare((4, 1, 4, 8))
    entry = NamedSharding(mesh, P("fsdp", None, "tp"))
    operation = attend(mesh, sequence_parallel="gather")
    assert moved(operation.plan(token, comes(NamedSharding(mesh, P("fsdp", "sp", "tp"))), bare())) == []
    (note,) = moved(operation.plan(token, comes(entry), bare()))
    assert "is taken as P(fsdp, -, tp, -) (declared P(fsdp, sp, tp, -)): nothing is sent" in note
    source = NamedSharding(mesh, P("fsdp", "tp"))
    (note,) = moved(operation.plan(token, comes(source), bare()))
    assert said(note) == (max(lacking(SHAPE, source, entry).values()), -1)


def test_kv_heads_that_are_repeated_come_whole() -> None:
    mesh, shape = mesh_of(), (4, 32, 1, 8)
    operation = attend(mesh)
    assert moved(operation.plan(bare(), comes(NamedSharding(mesh, P("fsdp", "sp")), shape), bare(shape))) == []
    (note,) = moved(operation.plan(bare(), comes(NamedSharding(mesh, P("sp", "fsdp")), shape), bare(shape)))
    want = lacking(shape, NamedSharding(mesh, P("sp", "fsdp")), NamedSharding(mesh, P("fsdp", "sp")))
    assert said(note) == (max(want.values()), sum(want.values()))


@pytest.mark.parametrize("layout", ["bhtd", "thd"])
def test_layouts(layout: str) -> None:
    mesh = mesh_of()
    shape, fits, given = {
        "bhtd": ((4, 4, 32, 8), P("fsdp", "tp", "sp"), {}),
        "thd": ((32, 4, 8), P("sp", "tp"), {"q_segment_ids": jax.ShapeDtypeStruct((32,), jnp.int32)}),
    }[layout]
    operation = attend(mesh)
    call = {"layout": layout, **given}
    assert moved(operation.plan(bare(shape), comes(NamedSharding(mesh, fits), shape), bare(shape), **call)) == []
    source = NamedSharding(mesh, P(None, "fsdp"))
    (note,) = moved(operation.plan(bare(shape), comes(source, shape), bare(shape), **call))
    want = lacking(shape, source, NamedSharding(mesh, fits))
    assert f"is moved to {({'bhtd': 'P(fsdp, tp, sp, -)', 'thd': 'P(sp, tp, -)'})[layout]}: " in note
    most, total = said(note)
    assert most == max(want.values())
    assert total in (-1, sum(want.values()))


def test_the_other_arrays_of_a_call() -> None:
    mesh = mesh_of()
    away, here = SingleDeviceSharding(jax.devices()[3]), NamedSharding(mesh, P("tp"))

    def given(sharding: Any) -> dict[str, Any]:
        of = {
            "bias": ((4, 4, 32, 32), jnp.float32),
            "kv_lengths": ((4,), jnp.int32),
            "q_segment_ids": ((4, 32), jnp.int32),
        }
        return {name: jax.ShapeDtypeStruct(*what, sharding=sharding) for name, what in of.items()} | {
            "mask": jax.ShapeDtypeStruct((4, 1, 32, 32), jnp.bool_, sharding=sharding)
        }

    notes = attend(mesh).plan(*[bare()] * 3, **given(away)).notes
    for name in ("bias", "kv_lengths", "q_segment_ids", "mask (mask)"):
        assert any(note.startswith(f"{name} comes on cpu:3 alone") for note in notes), name
    notes = attend(mesh).plan(*[bare()] * 3, **given(here)).notes
    # Lengths have no declared place, so there is none that they aren't in.
    assert [note.split(" comes")[0] for note in notes if " comes" in note] == ["bias", "q_segment_ids", "mask (mask)"]


def test_a_mesh_without_devices_is_compared_by_position() -> None:
    mesh = mesh_of().abstract_mesh
    (note,) = moved(attend(mesh).plan(bare(), comes(NamedSharding(mesh, P("tp"))), bare()))
    real = lacking(SHAPE, NamedSharding(mesh_of(), P("tp")), NamedSharding(mesh_of(), P("fsdp", "sp", "tp")))
    assert said(note) == (max(real.values()), sum(real.values()))
    (note,) = moved(attend(mesh).plan(bare(), comes(SOURCES["one"]), bare()))
    assert note.endswith("on the plan's mesh isn't known")


def test_explicit_axes_tell_under_jit() -> None:
    mesh = mesh_of(kind=EXPLICIT)
    operation, found = OperationRegistry.create("vanilla"), []

    def model(x: jax.Array) -> jax.Array:
        found.append(operation.plan(x, x, x))
        return x

    with jax.set_mesh(mesh):
        for spec in (P("fsdp", "sp", "tp"), P("tp")):
            jax.eval_shape(jax.jit(model), comes(NamedSharding(mesh, spec)))
    assert [len(moved(plan)) for plan in found] == [0, 1]


def test_a_sharding_that_does_not_divide() -> None:
    source = NamedSharding(mesh_of(), P(("fsdp", "tp", "sp")))
    with pytest.raises(
        InputError, match=r"key comes as P\(fsdp\+tp\+sp, -, -, -\), which doesn't divide its shape \(4, 32"
    ):
        attend().plan(bare(), comes(source), bare())


def test_the_program_sends_as_much() -> None:
    """Keys that come split along the sequence, and are declared whole: gathered, by the compiled program's own words."""
    mesh = mesh_of(sizes=(8, 1, 1))
    operation = attend(mesh)
    shape = (8, 32, 4, 8)
    here, source = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P(None, "fsdp"))
    arrays = comes(here, shape), comes(source, shape), comes(here, shape)
    (note,) = moved(operation.plan(*arrays))
    text = jax.jit(lambda q, k, v: operation(q, k, v).attention_outputs).lower(*arrays).compile().as_text()
    sent = collectives(text, {"fsdp": 8})
    assert [one.kind for one in sent] == ["all-to-all"]
    assert said(note) == (round(sum(one.sent_bytes for one in sent)), -1)


def test_the_plan_of_a_call_tells_what_it_moved() -> None:
    mesh = mesh_of()
    operation = attend(mesh)
    declared, other = (jax.device_put(jnp.ones(SHAPE), SOURCES[name]) for name in ("as declared", "whole"))
    alone = jax.device_put(jnp.ones(SHAPE), jax.devices()[1])
    for key in (declared, other, alone, declared):  # one after the other: what is kept of a call depends on it
        plan = operation(declared, key, declared).plan
        assert plan is not None
        assert moved(plan) == moved(operation.plan(declared, key, declared))
        assert len(moved(plan)) == (key is not declared)


def test_a_mask_from_elsewhere_is_put_where_it_is_declared() -> None:
    mask = jax.device_put(np.tril(np.ones((4, 1, 32, 32), bool)), jax.devices()[3])
    x = jnp.ones(SHAPE)
    operation = attend(mesh_of())
    (note,) = moved(operation.plan(x, x, x, mask=mask), "mask (mask)")
    wanted = NamedSharding(mesh_of(), P("fsdp", None, "sp"))
    sent = {device: count // 4 for device, count in lacking(mask.shape, mask.sharding, wanted).items()}  # booleans
    assert said(note) == (max(sent.values()), sum(sent.values()))
    out = operation(x, x, x, mask=mask).attention_outputs
    assert jnp.allclose(out, operation(x, x, x, mask=np.asarray(mask)).attention_outputs)
