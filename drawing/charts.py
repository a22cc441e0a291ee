"""Charts for a report: bars for use of a limit, as HTML; a roofline and a curve, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .markup import escaped
from .svg import element, label, picture

__all__ = ["Bar", "Point", "bars", "curve", "roofline"]

_WIDTH, _HEIGHT = 440.0, 270.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 44.0, 44.0


class Bar(NamedTuple):
    """A value relative to its limit, or to the longest bar if there is no limit. `text`: the value."""

    name: str
    value: float
    text: str
    limit: float | None = None
    good: bool = False


class Point(NamedTuple):
    """Work: its operations per byte, its maximum operations per second, and its name."""

    name: str
    intensity: float
    rate: float


def bars(entries: Sequence[Bar]) -> str:
    """Bars, one below the other, each with its text. A bar over its limit is marked, also in its text."""
    longest = max((bar.value for bar in entries), default=0.0) or 1.0
    lines = []
    for bar in entries:
        of = longest if bar.limit is None else bar.limit or 1.0
        over = bar.limit is not None and bar.value > bar.limit
        share = min(bar.value / of, 1.0)
        kind = "ao-over" if over else "ao-ok" if bar.good else "ao-used"
        words = bar.text + (": over the limit" if over else "")
        lines.append(
            f'<div class="ao-bar"><span class="ao-name">{escaped(bar.name)}</span>'
            f'<span class="ao-track"><span class="{kind}" style="width:{100 * share:.1f}%"></span></span>'
            f'<span class="ao-told">{escaped(words)}</span></div>'
        )
    return "".join(lines)


def roofline(flops_per_second: float, bytes_per_second: float, points: Sequence[Point], device: str) -> str:
    """The maximum operations per second at each intensity, on two logarithmic axes, with points for work."""
    knee = flops_per_second / bytes_per_second
    xs = [knee, *(point.intensity for point in points)]
    low, high = math.floor(math.log10(min(xs)) - 0.5), math.ceil(math.log10(max(xs)) + 0.5)
    top = math.log10(flops_per_second) + 0.3
    bottom = min(math.log10(bytes_per_second) + low, *(math.log10(point.rate) for point in points)) - 0.2
    plot = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(intensity: float) -> float:
        return _LEFT + (math.log10(intensity) - low) / (high - low) * plot[0]

    def y(rate: float) -> float:
        return _TOP + (top - math.log10(rate)) / (top - bottom) * plot[1]

    start = 10.0**low
    path = f"M{x(start):.1f} {y(start * bytes_per_second):.1f} L{x(knee):.1f} {y(flops_per_second):.1f} H{_WIDTH - _RIGHT:.1f}"
    parts = [
        label(12, 20, f"Roofline of {device}", class_="ao-strong"),
        label(
            12,
            36,
            f"{_si(flops_per_second)}FLOP/s, {_si(bytes_per_second)}B/s, knee at {knee:.0f} FLOP/B",
            class_="ao-small",
        ),
        *_frame(plot),
        element("path", d=path, class_="ao-curve"),
    ]
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(
            label(at, _HEIGHT - _BOTTOM + 15, f"{10.0**power:g}", "ao-small", "end" if power == high else "middle")
        )
        parts.append(element("path", d=f"M{at:.1f} {_TOP} V{_HEIGHT - _BOTTOM}", class_="ao-line", stroke_opacity=0.5))
    for power in range(math.ceil(bottom), math.floor(top) + 1):
        parts.append(label(_LEFT - 6, y(10.0**power) + 4, _si(10.0**power), "ao-small", "end"))
    parts.append(label(_LEFT + plot[0] / 2, _HEIGHT - 10, "operations per byte", "ao-small", "middle"))
    for number, point in enumerate(points, 1):
        at, height = x(point.intensity), y(point.rate)
        parts.append(element("circle", cx=at, cy=height, r=5.0, class_="ao-head"))
        parts.append(label(at, height - 9, str(number), "ao-small", "middle"))
        # All points lie on the roof, so that the corner below it is free.
        line = _HEIGHT - _BOTTOM - 8 - 14 * (len(points) - number)
        parts.append(label(_WIDTH - _RIGHT - 6, line, f"{number} {point.name}", "ao-small", "end"))
    return picture(_WIDTH, _HEIGHT, f"Roofline of {device}", parts)


def curve(title: str, unit: str, values: Sequence[tuple[str, float]], chosen: int, heuristic: int | None) -> str:
    """The values of candidates from best to worst, as dots on a line. The chosen one and the heuristic's are labelled."""
    plot = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    highest, lowest = max(v for _, v in values), min(v for _, v in values)
    floor = 0.0 if lowest < 0.5 * highest else lowest - (highest - lowest or highest) * 0.3
    span = (highest - floor) or 1.0

    def at(index: int) -> tuple[float, float]:
        share = index / max(len(values) - 1, 1)
        return _LEFT + 12 + share * (plot[0] - 24), _TOP + (1 - (values[index][1] - floor) / span) * (plot[1] - 8) + 4

    places = [at(index) for index in range(len(values))]
    parts = [
        label(12, 20, title, class_="ao-strong"),
        label(12, 36, f"{unit}, best first; from {floor:.3g} up", class_="ao-small"),
        *_frame(plot),
        element("path", d="M" + " L".join(f"{px:.1f} {py:.1f}" for px, py in places), class_="ao-curve"),
    ]
    parts += [element("circle", cx=px, cy=py, r=3.5, class_="ao-full") for px, py in places]
    parts += [
        label(_LEFT - 6, places[i][1] + 4, f"{values[i][1]:.4g}", "ao-small", "end") for i in (0, len(values) - 1)
    ]
    marks = {chosen: "chosen"} | ({} if heuristic is None else {heuristic: "heuristic"})
    if heuristic == chosen:
        marks = {chosen: "chosen, same as the heuristic"}
    for index, word in marks.items():
        px, py = places[index]
        parts.append(element("circle", cx=px, cy=py, r=6.0, class_="ao-good" if index == chosen else "ao-head"))
        right = px > _LEFT + plot[0] / 2
        parts.append(label(px + (-10 if right else 10), py - 8, word, text_anchor="end" if right else "start"))
    parts.append(label(_LEFT + plot[0] / 2, _HEIGHT - 14, f"{len(values)} candidates", "ao-small", "middle"))
    return picture(_WIDTH, _HEIGHT, title, parts)


def _frame(plot: tuple[float, float]) -> Iterator[str]:
    yield element("rect", x=_LEFT, y=_TOP, width=plot[0], height=plot[1], class_="ao-frame")


def _si(value: float) -> str:
    """`1.97e14` as `197 T`."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10.0**power:
            return f"{value / 10.0**power:.3g} {prefix}"
    return f"{value:.3g} "
