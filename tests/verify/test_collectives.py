"""What programs send, read from their text: head- and batch-split attention nothing, a ring its keys and no more."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attnops import Causal, Mask, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.sharding import virtual_mesh
from attnops.verify.collectives import Collective, collectives, sent_bytes
from attnops.verify.device_groups import axes_along, device_groups
from attnops.verify.topology import described_mesh

LENGTH, HEADS, DIM = 512, 8, 16
CAUSAL: Mask = Causal()
PART = LENGTH // 8 * HEADS * DIM * 4  # bytes of a device's keys over eight devices


def _sent(
    sizes: dict[str, int], gradient: bool, mask: Mask = CAUSAL, on: Any = None, **fields: Any
) -> tuple[Collective, ...]:
    mesh = virtual_mesh(sizes) if on is None else described_mesh(on, sizes)
    attend = OperationRegistry.create("splash", OperationMetadata(mesh=mesh, tuning="off", **fields))
    x = jax.ShapeDtypeStruct((8, LENGTH, HEADS, DIM) if "sp" not in sizes else (1, LENGTH, HEADS, DIM), jnp.float32)
    plan = attend.plan(x, x, x, mask=mask)
    where = jax.sharding.NamedSharding(mesh, plan.placement.call_spec("query", x.shape))

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v, mask=mask).attention_outputs

    def backward(q: jax.Array, k: jax.Array, v: jax.Array, d_output: jax.Array) -> Any:
        return jax.vjp(forward, q, k, v)[1](d_output)

    laid_out = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    program = backward if gradient else forward
    arrays = (laid_out,) * (4 if gradient else 3)
    made = jax.jit(program, out_shardings=(where,) * 3 if gradient else where).lower(*arrays).compile()
    return collectives(made.as_text())


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"tp": 8}, {"fsdp": 4, "tp": 2}])
def test_split_heads_and_batches_send_nothing(sizes: dict[str, int], gradient: bool) -> None:
    assert _sent(sizes, gradient) == ()


@pytest.mark.parametrize("scan", [False, True])
def test_a_ring_moves_seven_eighths_of_keys_and_values(scan: bool) -> None:
    found = _sent({"sp": 8}, False, sequence_parallel="ring", scan_ring_attention=scan, ring_order="contiguous")
    assert found == (Collective("collective-permute", 2 * 7, PART, 2, False),)
    whole = 2 * LENGTH * HEADS * DIM * 4
    assert sent_bytes(found) == whole * 7 / 8


def test_its_gradient_moves_them_again_with_their_gradients() -> None:
    """Forward 7 steps; backward 7, and of the gradients one more, which is home."""
    (found,) = _sent({"sp": 8}, True, sequence_parallel="ring", scan_ring_attention=True, ring_order="contiguous")
    assert (found.kind, found.count, found.result_bytes) == ("collective-permute", 2 * 7 + 2 * 7 + 2 * 8, PART)


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu")
def test_on_tpus_hops_go_on_beside_the_work() -> None:
    """The backward pass's steps aren't those of the forward pass, for which every part would have to be kept."""
    (found,) = _sent({"sp": 8}, True, on="v5e:2x4", sequence_parallel="ring", ring_order="contiguous")
    assert found == Collective("collective-permute", 2 * 7 + 2 * 7 + 2 * 8, PART, 2, True)


def test_a_window_moves_less() -> None:
    found = _sent({"sp": 8}, False, Causal() & SlidingWindow(64, 0), sequence_parallel="ring")
    assert found == (Collective("collective-permute", 2, PART, 2, False),)


def test_ulysses_exchanges_each_tensor_once() -> None:
    (found,) = _sent({"sp": 8}, False, sequence_parallel="ulysses")
    assert (found.kind, found.count * found.result_bytes, found.group) == ("all-to-all", 4 * PART, 8)
    assert found.sent_bytes == 4 * PART * 7 / 8


def test_gather_brings_whole_keys_and_values() -> None:
    found = _sent({"sp": 8}, False)
    assert {c.kind for c in found} == {"all-gather"}
    assert sent_bytes(found) == 2 * 8 * PART * 7 / 8


TEXT = """HloModule m
%body (p: (f32[4])) -> (f32[4]) {
  %x = f32[4]{0} collective-permute(%p), channel_id=1, source_target_pairs={{0,1},{1,0}}
}

%counting (p: (s32[])) -> pred[] {
  %limit.3 = s32[]{:T(128)} constant(7), metadata={op_name="x"}
  ROOT %lt = pred[]{:T(512)} compare(%counter, %limit.3), direction=LT
}

%other_body (p: (s32[])) -> (s32[]) {
  %y = (f32[6]{0}, f32[6]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
}

%first_of_two (p: bf16[4]) -> bf16[24] {
  %u = bf16[24]{0} all-gather(%p), channel_id=12, replica_groups=[1,8]<=[8], dimensions={0}
}

%second_of_two (p: bf16[4]) -> bf16[24] {
  %u.1 = bf16[24]{0} all-gather(%p), channel_id=12, replica_groups=[1,8]<=[8], dimensions={0}
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %u.2 = bf16[24]{0} fusion(%a), kind=kCustom, calls=%first_of_two
  %u.3 = bf16[24]{0} fusion(%u.2), kind=kCustom, calls=%second_of_two
  %v = (s32[]{:T(128)}) while(%t), condition=%counting, body=%other_body
  %w = (f32[4]{0}) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %g = bf16[16,2]{1,0} all-gather(%a), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}
  %r = (f32[3]{0}, f32[5]{0}) all-reduce(%a, %b), channel_id=3, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %s = (bf16[8]{0}, bf16[32]{0}, u32[], u32[]) all-gather-start(%a), replica_groups=mesh['a'=2,'b'=4] {'b'}
  %o = f32[7]{0} all-reduce(%a), replica_groups={{0},{1}}, to_apply=%add
}
"""


def test_forms_of_the_text() -> None:
    assert collectives(TEXT) == (
        Collective("all-gather", 1, 64, 4, False),
        Collective("all-gather", 1, 64, 4, True),
        Collective("all-gather", 1, 48, 8, True),
        Collective("all-reduce", 1, 32, 4, False),
        Collective("collective-permute", 7, 24, 2, True),
        Collective("collective-permute", 5, 16, 2, False),
    )
    assert collectives("") == ()


# Devices 0 to 7 of a mesh a=2, b=4: those of one b are n and n + 4.
ALONG_A, ALONG_B = ((0, 4), (1, 5), (2, 6), (3, 7)), ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("line", "groups", "axes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add", ALONG_B, ("b",)),
        ("replica_groups=[2,4]<=[8], dimensions={0}", ALONG_B, ("b",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", ALONG_A, ("a",)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", ALONG_B, ("b",)),
        ("replica_groups=mesh['x'=2,'y'=4] {'x'}", ALONG_A, ("a",)),
        ("replica_groups=mesh['all'=8] {'all'}", (tuple(range(8)),), ("a", "b")),
        ("replica_groups=mesh['x'=8] {'x':(2)4}", ALONG_B, ("b",)),  # of an axis a part, after 2 others
        ("replica_groups=mesh['x'=8] {'x':(1)2}", ALONG_A, ("a",)),
        (
            "replica_groups=mesh['x'=4,'w'=1,'y'=2], device_ids=([2,2,2]T(1,0,2)) {'y'}, to_apply=%add",
            ((0, 1), (4, 5), (2, 3), (6, 7)),
            ("b",),
        ),
        ("replica_groups=mesh['x'=4,'y'=2], device_ids=([8]) {'y'}", ((0, 1), (2, 3), (4, 5), (6, 7)), ("b",)),
        ("replica_groups=mesh['x'=4,'y'=2], device_ids=(0,4,1,5,2,6,3,7) {'y'}", ALONG_A, ("a",)),
        ("replica_groups={}, to_apply=%add", (tuple(range(8)),), ("a", "b")),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,4}}", ((0, 1), (1, 2), (2, 3), (3, 0)), ("b",)),
        ("source_target_pairs={{0,4},{4,0}}", ((0, 4), (4, 0)), ("a",)),
        ("source_target_pairs={{0,0},{1,1}}", (), ()),
    ],
)
def test_who_takes_part_and_along_which_axes(line: str, groups: Any, axes: Any) -> None:
    assert device_groups(line, 8) == groups
    assert axes_along(groups, {"a": 2, "b": 4}) == axes


def test_a_form_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ValueError, match="no groups of devices can be read from 'replica_groups=new'"):
        device_groups("replica_groups=new", 8)
