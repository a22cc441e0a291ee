"""How meshes lie on links, and seconds of collectives, against values worked out by hand and messages counted one by one."""

from __future__ import annotations

import math
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnops.advising.axis_segments import AxisSegment, PhysicalAxis, assign_axes
from attnops.advising.machine import machine_of, with_devices
from attnops.advising.sending import busiest_link, hops, reordered_seconds, ring_hop_seconds, seconds_of
from attnops.errors import ConfigError
from attnops.verify.topology import described_mesh

LINE, RING = AxisSegment(4, 10.0), AxisSegment(4, 10.0, closed=True)
SWITCH = AxisSegment(4, 10.0, switched=True)


def test_links_of_topologies() -> None:
    """v5p: 1200 GB/s both ways over 6 links is 100 GB/s each way; a ring from 4 chips on, if all axes have them."""
    cube = machine_of("v5p:4x4x8")
    assert [(p.size, p.link) for p in cube.physical] == [(4, 1e11), (4, 1e11), (8, 1e11), (1, 6e11)]
    assert [p.closed for p in cube.physical] == [True, True, True, False]
    assert not any(p.closed for p in machine_of("v5p:2x4x4").physical)
    # v5e: 400 GB/s both ways over 4 links; only 16 chips are a ring.
    assert [(p.link, p.closed) for p in machine_of("v5e:8x16").physical[:2]] == [(5e10, False), (5e10, True)]
    # The two devices of a tpu7x chip share its links.
    pair = machine_of("tpu7x:2x2x1")
    assert pair.count == 8
    assert [(p.size, p.link) for p in pair.physical] == [(2, 5e10), (2, 5e10), (1, 5e10), (2, 6e11)]
    hosts = machine_of("h100:2x8")
    assert [(p.size, p.link, p.switched) for p in hosts.physical] == [(2, 5e10, True), (8, 4.5e11, True)]


def test_whole_axes_are_taken_from_the_last() -> None:
    """tp=4 gets the last axes that have 4, sp=16 the two that are left, as one axis with two dimensions of links."""
    lies = assign_axes(machine_of("v5p:4x4x4").physical, {"sp": 16, "tp": 4})
    assert [len(segments) for segments in lies.values()] == [2, 1]
    assert all(segment.closed and segment.stride == 1 for segments in lies.values() for segment in segments)


def test_a_part_of_an_axis_is_no_ring() -> None:
    """Of a ring of 16 chips, counted row by row: tp has 4 neighbours, sp every fourth chip."""
    lies = assign_axes((PhysicalAxis(16, 1.0, closed=True),), {"sp": 4, "tp": 4})
    assert lies == {"sp": (AxisSegment(4, 1.0, 4),), "tp": (AxisSegment(4, 1.0, 1),)}


@given(
    shape=st.lists(st.sampled_from((1, 2, 3, 4, 8)), min_size=1, max_size=3),
    split=st.lists(st.integers(0, 3), min_size=0, max_size=8),
)
def test_spans_make_up_the_mesh(shape: list[int], split: list[int]) -> None:
    """Whatever the sizes, an axis' segments multiply to its size."""
    primes = [p for n in shape for p in {1: (), 2: (2,), 3: (3,), 4: (2, 2), 8: (2, 2, 2)}[n]]
    sizes = dict.fromkeys("abcd", 1)
    for prime, axis in zip(primes, [*split, *[0] * len(primes)], strict=False):
        sizes["abcd"[axis]] *= prime
    lies = assign_axes(tuple(PhysicalAxis(n, 1.0) for n in shape), sizes)
    assert {name: math.prod(segment.size for segment in segments) for name, segments in lies.items()} == sizes


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu")
@pytest.mark.parametrize(
    ("target", "sizes"),
    [
        ("v5e:4x4", {"fsdp": 4, "sp": 4}),
        ("v5p:4x4x4", {"sp": 16, "tp": 4}),
        ("v5p:4x4x4", {"fsdp": 4, "sp": 4, "tp": 4}),
        ("v5p:4x4x8", {"sp": 8, "tp": 16}),
    ],
)
def test_jax_lays_whole_axes_so(target: str, sizes: dict[str, int]) -> None:
    """The described devices of a row of jax's mesh differ in as many physical axes as we say, of the same sizes."""
    places = described_mesh(target, sizes).devices
    for index, segments in enumerate(assign_axes(machine_of(target).physical, sizes).values()):
        row = np.moveaxis(places, index, 0).reshape(places.shape[index], -1)[:, 0]
        coords = np.array([device.coords for device in row])
        found = sorted(len(set(column)) for column in coords.T if len(set(column)) > 1)
        assert found == sorted(segment.size for segment in segments)


def test_seconds_by_hand() -> None:
    """120 bytes a device sends at 10 a second: both ways around a ring, one way along a line, over two rings at once."""
    assert seconds_of("all-gather", 120.0, (LINE,)) == 12.0
    assert seconds_of("all-gather", 120.0, (RING,)) == 6.0
    assert seconds_of("reduce-scatter", 120.0, (RING, RING)) == 3.0
    assert seconds_of("all-gather", 120.0, (SWITCH,)) == 12.0
    assert seconds_of("all-gather", 120.0, (AxisSegment(4, 10.0, stride=3),)) == 36.0
    # Two hosts of four, 1 a second to the network each: together as fast as 4, which is slower than 10.
    assert seconds_of("all-gather", 120.0, (AxisSegment(2, 1.0, switched=True), SWITCH)) == 30.0
    assert seconds_of("all-gather", 0.0, (LINE,)) == seconds_of("all-gather", 5.0, ()) == 0.0
    assert [hops("all-gather", (segment,)) for segment in (LINE, RING, SWITCH)] == [3, 2, 1]
    assert hops("all-reduce", (RING, LINE)) == 10


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("closed", [False, True])
def test_exchange_is_the_busiest_link(size: int, closed: bool) -> None:
    """All pairs' messages counted one by one. On an even ring half of what is opposite goes each way."""
    segment = AxisSegment(size, 10.0, closed=closed)
    messages = [(a, b, 1.0) for a in range(size) for b in range(size) if a != b]
    counted = busiest_link((segment,), messages)
    if closed and size % 2 == 0:
        near = busiest_link((segment,), [(a, b, 1.0) for a, b, _ in messages if (b - a) % size != size // 2])
        counted = near + size / 2 / 2 / 10.0  # size messages of size / 2 hops over 2 x size links
    assert seconds_of("all-to-all", size - 1.0, (segment,)) == pytest.approx(counted)


def test_exchange_over_two_axes() -> None:
    """On a 4 x 4 torus each axis carries what goes to the 12 devices elsewhere along it: 4 x the messages of one ring."""
    alone = seconds_of("all-to-all", 3.0, (RING,))
    assert seconds_of("all-to-all", 15.0, (RING, RING)) == pytest.approx(4 * alone)


def test_ring_hops() -> None:
    """To the neighbour: one link each; on a line the last one's message goes back the whole way, over the other directions.
    Three on is one back."""
    assert ring_hop_seconds(20.0, (RING,), 1) == ring_hop_seconds(20.0, (LINE,), 1) == 2.0
    assert ring_hop_seconds(20.0, (RING,), 3) == 2.0
    assert ring_hop_seconds(20.0, (RING,), 2) == 4.0
    assert ring_hop_seconds(20.0, (AxisSegment(4, 10.0, stride=2),), 1) == 4.0


def test_zigzag_order_by_hand() -> None:
    """Four on a line, pieces 01 23 45 67 become 07 16 25 34: 1 and 7 pass the first link, 1 2 ahead and 5 back the second ..."""
    # piece: from -> to: 1: 0->1, 2: 1->2, 3: 1->3, 4: 2->3, 5: 2->2 stays, 6: 3->1, 7: 3->0. Ahead over the links: 1, 2, 2.
    # Back: 7 over all three, 6 over the last two. A device sends two pieces, so each is half of 20 bytes.
    assert reordered_seconds(20.0, (LINE,)) == 2 * 10.0 / 10.0
    # Two devices: 01 23 become 03 12: one piece each way.
    assert reordered_seconds(20.0, (AxisSegment(2, 10.0),)) == 2.0


def test_parts_of_a_target() -> None:
    assert with_devices("v5p:4x4x8", 16) == "v5p:2x2x4"
    assert with_devices("v5e:4x4", 4) == "v5e:2x2"
    assert with_devices("h100:2x8", 8) == "h100:8"
    assert with_devices("h100:2x8", 4) == "h100:4"
    assert with_devices("h100:2x8", 12) is None
    assert with_devices("cpu:8", 2) == "cpu:2"
    assert with_devices("v5e:4x4", 3) is None


@pytest.mark.parametrize("target", ["v9:2x2", "cpu", "cpu:0", "cpu:999", "h100:", "", "v5e", "v5e:0x2"])
def test_unknown_targets(target: str) -> None:
    with pytest.raises(ConfigError, match="target"):
        machine_of(target)
