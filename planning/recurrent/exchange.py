"""How devices exchange what their tokens do to a state: by one all-gather, or in rounds of permutes."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ALL_GATHER", "LOG_STEP", "Exchanged", "Maps", "Round", "exchanged", "rounds"]

ALL_GATHER, LOG_STEP = "all_gather", "log_step"


class Maps(NamedTuple):
    """Bytes of a device's map: what multiplies a state, and what is added, which is of a state's size."""

    linear: int
    constant: int


class Round(NamedTuple):
    """The (from, to) pairs of a round of 'log_step', for what is added and for what multiplies; [] if that isn't sent."""

    constant: list[tuple[int, int]]
    linear: list[tuple[int, int]]


def rounds(devices: int) -> list[Round]:
    """The rounds of 'log_step' over that many devices. A map that reaches back to the first device has no linear part."""
    found, distance = list[Round](), 1
    while distance < devices:
        pairs = [(n, n + distance) for n in range(devices - distance)]
        found.append(Round(pairs, pairs[distance:]))
        distance *= 2
    return found


class Exchanged(NamedTuple):
    """What a device sends in one collective of a forward pass; its gradient sends the same the other way. by: how many places on,
    of a permute."""

    kind: str
    what: str
    sent_bytes: float
    by: int = 0


def exchanged(exchange: str, maps: Maps, devices: int) -> list[Exchanged]:
    """The collectives of an exchange over that many devices."""
    if exchange == ALL_GATHER:
        return [Exchanged("all-gather", "the maps of states", float((devices - 1) * sum(maps)))]
    sent = []
    for step in rounds(devices):
        source, target = step.constant[0]
        size = maps.constant + (maps.linear if step.linear else 0)
        sent.append(Exchanged("collective-permute", "the maps of states", float(size), target - source))
    sent.append(Exchanged("collective-permute", "the state before a device's tokens", float(maps.constant), 1))
    after = 2 * maps.constant * (devices - 1) / devices
    return [*sent, Exchanged("all-reduce", "the state after all tokens", after)]
