"""A DevicePicture as SVG: each tensor as a grid of parts with the devices that hold them, then arrows for what is sent."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from .devices_text import short_name
from .markup import escaped
from .svg import element, label, picture, rectangle

__all__ = ["devices_svg"]

_WIDTH, _LEFT = 440.0, 100.0
_PANELS = 2  # panels for parts along further dimensions
_MAX = 8  # parts of a dimension that are drawn
_CELL = 40.0, 26.0  # at least
_LETTER, _SMALL = 7.6, 6.8  # widths of a letter
_LINE = 66  # characters of a small line
_MEMBERS = 8  # devices of a group that are drawn


def devices_svg(figure: Any) -> str:
    """See DevicePicture.svg."""
    mesh = ", ".join(f"{name}={size}" for name, size in figure.mesh) or "none"
    parts, y = list[str](), 20.0
    count = f"{len(figure.ids)} device{'s' if len(figure.ids) > 1 else ''}"
    parts.append(label(12, y, f"Mesh {mesh}: {count}", class_="ao-strong"))
    for tensor in figure.tensors:
        y += 26
        drawn, y = _tensor(figure, tensor, y)
        parts += drawn
    if any(tensor.copies > 1 for tensor in figure.tensors):
        parts += [rectangle(12, y + 8, 12, 12, class_="ao-part"), label(30, y + 18, "held by several devices")]
        y += 22
    for text in figure.repeated:
        drawn, y = _lines(text, y + 6, "ao-small ao-warned")
        parts += drawn
    if len(figure.ids) > 1:
        y += 28
        parts.append(label(12, y, "Sent" if figure.sent else "Nothing is sent", class_="ao-strong"))
    for transfer in figure.sent:
        drawn, y = _sent(figure, transfer, y)
        parts += drawn
    return picture(_WIDTH, y + 16, f"Tensors on mesh {mesh}", parts)


def _lines(text: str, y: float, class_: str) -> tuple[list[str], float]:
    """Small lines of text below y, and the y at which they end."""
    drawn, line = list[str](), ""
    for word in text.split():
        if line and len(line) + len(word) + 1 > _LINE:
            y += 15
            drawn.append(label(12, y, line, class_=class_))
            line = ""
        line = f"{line} {word}".strip()
    y += 15
    return [*drawn, label(12, y, line, class_=class_)], y


def _tensor(figure: Any, tensor: Any, y: float) -> tuple[list[str], float]:
    """A tensor's name and spec, what was dropped, and a grid for each part along dimensions that aren't the grid's sides."""
    parts = [
        label(12, y, ", ".join(tensor.names), class_="ao-strong"),
        label(12, y + 16, f"{tensor.spec}   {tensor.shapes}", class_="ao-small"),
    ]
    y += 16
    for axis, dim, why in tensor.dropped:
        y += 15
        struck = element("tspan", escaped(axis), text_decoration="line-through")
        parts.append(
            element(
                "text",
                f"{struck} {escaped(_short(f'of {dim} dropped: {why}'))}",
                x=12,
                y=y,
                class_="ao-small ao-warned",
            )
        )
    holders = defaultdict(list)
    for number, device_parts in zip(figure.ids, tensor.device_parts, strict=True):
        holders[device_parts].append(number)
    split = [index for index, dim in enumerate(tensor.dims) if dim.parts > 1]
    across, down, rest = (split[-1:], split[-2:-1], split[:-2])
    drawn_rest = list(itertools.islice(itertools.product(*(range(tensor.dims[i].parts) for i in rest)), _PANELS))
    for outer in drawn_rest:
        y += 16
        if rest:
            words = ", ".join(
                f"{tensor.dims[i].name} {tensor.dims[i].range(part)}" for i, part in zip(rest, outer, strict=True)
            )
            parts.append(label(_LEFT, y, words, class_="ao-small"))
            y += 14
        drawn, y = _grid(tensor, holders, dict(zip(rest, outer, strict=True)), across, down, y)
        parts += drawn
    if (left := math.prod(tensor.dims[i].parts for i in rest) - len(drawn_rest)) > 0:
        y += 15
        parts.append(label(_LEFT, y, f"and {left} more like these", class_="ao-small"))
    return parts, y


def _grid(
    tensor: Any, holders: dict[Any, list[int]], fixed: dict[int, int], across: list[int], down: list[int], y: float
) -> tuple[list[str], float]:
    """The parts along two dimensions, each with its devices; an ellipsis after the first eight."""
    parts = list[str]()
    columns, rows = (min(tensor.dims[d[0]].parts, _MAX) if d else 1 for d in (across, down))
    cells = {
        (row, column): holders[
            tuple(
                (fixed | dict.fromkeys(across, column) | dict.fromkeys(down, row)).get(i, 0)
                for i in range(len(tensor.dims))
            )
        ]
        for row, column in itertools.product(range(rows), range(columns))
    }
    width, height = _CELL
    max_width = (_WIDTH - _LEFT - 20) / columns
    width = min(max(width, *(len(_ids(members, max_width)) * _LETTER + 8 for members in cells.values())), max_width)
    if across:
        dim = tensor.dims[across[0]]
        parts.append(label(12, y, short_name(dim.name) + " →", class_="ao-small"))
        ranges = [dim.range(column) for column in range(columns)]
        if max(map(len, ranges)) * _SMALL > width:  # wider than a column: where each part starts
            ranges = [text.partition(":")[0] for text in ranges]
        for column, text in enumerate(ranges):
            parts.append(label(_LEFT + column * width + 2, y, text, class_="ao-small"))
    y += 5
    for (row, column), devices in cells.items():
        x, top = _LEFT + column * width, y + row * height
        parts.append(rectangle(x, top, width, height, class_="ao-part" if len(devices) > 1 else "ao-dead"))
        parts.append(rectangle(x, top, width, height, class_="ao-frame"))
        parts.append(label(x + width / 2, top + 17, _ids(devices, width), text_anchor="middle"))
        if down and column == 0:
            dim = tensor.dims[down[0]]
            parts.append(label(_LEFT - 6, top + 17, f"{short_name(dim.name)} {dim.range(row)}", "ao-small", "end"))
    if across and tensor.dims[across[0]].parts > columns:
        parts.append(label(_LEFT + columns * width + 4, y + 17, "..."))
    if down and tensor.dims[down[0]].parts > rows:
        parts.append(label(_LEFT + 4, y + rows * height + 14, "..."))
        y += 16
    return parts, y + rows * height


def _ids(devices: list[int], room: float) -> str:
    """As many ids as fit, and how many more there are."""
    texts = [",".join(map(str, devices))] if len(devices) <= 3 else [f"{devices[0]},{devices[1]} +{len(devices) - 2}"]
    texts.append(f"{devices[0]} +{len(devices) - 1}")
    return next((text for text in texts if len(text) * _LETTER + 8 <= room), texts[-1])


def _sent(figure: Any, transfer: Any, y: float) -> tuple[list[str], float]:
    """A line of text, and the arrows of the first group."""
    parts, y = _lines(
        f"{transfer.what}: {transfer.kind} over {'+'.join(transfer.axes)}, {transfer.why}", y + 4, "ao-small"
    )
    group, step = transfer.groups[0], 46.0
    ids = [str(figure.ids[place]) for place in group]
    shown = ids if len(ids) <= _MEMBERS else [*ids[: _MEMBERS - 2], "...", ids[-1]]
    all_to_all = transfer.kind not in ("ring", "permute") and len(shown) > 2
    top = y + 12 + (14 if all_to_all else 0)
    for index, text in enumerate(shown):
        x = 12 + index * step
        parts += [rectangle(x, top, 28, 22, class_="ao-box"), label(x + 14, top + 15, text, text_anchor="middle")]
        if index:
            parts += _arrow(x - step + 30, x - 2, top + 11, both=transfer.kind != "ring")
    last = 12 + (len(shown) - 1) * step + 14
    bottom = top + 22
    if transfer.kind == "ring" and len(shown) > 1:
        path = f"M{last} {bottom} v10 H26 v-6"
        parts += [element("path", d=path, class_="ao-arrow"), _head(26, bottom + 1, up=True)]
        bottom += 12
    elif all_to_all:
        parts.append(element("path", d=f"M26 {top} v-8 H{last} v8", class_="ao-arrow"))
        parts.append(label((26 + last) / 2, top - 11, "each with each", class_="ao-small", text_anchor="middle"))
    if (more := len(transfer.groups) - 1) > 0:
        bottom += 14
        parts.append(label(12, bottom, f"and {more} more group{'s' if more > 1 else ''}, likewise", class_="ao-small"))
    return parts, bottom


def _arrow(x: float, end: float, y: float, *, both: bool) -> Iterator[str]:
    yield element("path", d=f"M{x} {y} H{end}", class_="ao-arrow")
    yield element("path", d=f"M{end} {y} l-6 -3.5 v7 z", class_="ao-head")
    if both:
        yield element("path", d=f"M{x} {y} l6 -3.5 v7 z", class_="ao-head")


def _head(x: float, y: float, *, up: bool) -> str:
    return element("path", d=f"M{x} {y} l-3.5 {6 if up else -6} h7 z", class_="ao-head")


def _short(text: str) -> str:
    return text if len(text) <= _LINE else text[: _LINE - 3] + "..."
