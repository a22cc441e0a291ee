"""A DevicePicture as text: one row per device, then which devices send to which."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

__all__ = ["devices_text", "short_name"]

_WIDTH = 80
_DEVICES = 16  # devices that are listed
_STAYS = "\x00"  # a non-breaking space
_GROUPS, _MEMBERS = 4, 8  # groups and their members that are shown for what is sent
_SHORT = {
    "batch": "b",
    "q_len": "q",
    "kv_len": "kv",
    "heads": "h",
    "kv_heads": "h",
    "head_dim": "d",
    "kv_head_dim": "d",
    "sequence_shards": "parts",
}


def short_name(dim: str) -> str:
    """`kv` for kv_len, so that the parts of a tensor fit in one cell."""
    return _SHORT.get(dim, dim.removeprefix("bias_") or "-")


def devices_text(picture: Any) -> str:
    """See DevicePicture.text."""
    mesh = ", ".join(f"{name}={size}" for name, size in picture.mesh) or "none"
    count = len(picture.ids)
    lines = textwrap.wrap(picture.title, _WIDTH, break_long_words=False)
    lines.append(f"mesh {mesh}: {count} device{'s' if count > 1 else ''}")
    for tensors in _chunks(picture):
        lines += ["", *_table(picture, tensors)]
    if count > _DEVICES:
        lines.append(f"... and {count - _DEVICES} more devices, by the same rule")
    if any(tensor.copies > 1 for tensor in picture.tensors):
        lines += ["", "= n: holds the same part as device n"]
    footnotes = [("dropped", text) for text in dict.fromkeys(_dropped(picture))]
    footnotes += [("repeated", text) for text in picture.repeated]
    footnotes += [("sent", text) for transfer in picture.sent for text in _sent(picture, transfer)]
    if count > 1 and not picture.sent:
        footnotes.append(("sent", "nothing"))
    last = ""
    for label, text in footnotes:
        first = f"{label if label != last else '':<10}"
        lines += [""] if not last else []
        whole = textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=first,
            subsequent_indent=" " * 10,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [line.replace(_STAYS, " ") for line in whole]
        last = label
    return "\n".join(lines)


def _cells(picture: Any, tensor: Any) -> list[str]:
    """A heading of three lines, then what each device holds."""
    cells = [", ".join(tensor.names), tensor.spec, tensor.shapes]
    for device, parts in enumerate(tensor.device_parts[:_DEVICES]):
        dims = [(dim, part) for dim, part in zip(tensor.dims, parts, strict=True) if dim.parts > 1]
        part_text = " ".join(f"{short_name(dim.name)} {dim.range(part)}" for dim, part in dims) or "whole"
        first = tensor.first_holder(device)
        cells.append(part_text + (f" = {picture.ids[first]}" if first != device else ""))
    return cells


def _chunks(picture: Any) -> Iterator[list[list[str]]]:
    """Groups of columns, each for a table that fits the page."""
    left = max(len(row) for row in _device_cells(picture))
    chunk: list[list[str]] = []
    used = left
    for tensor in picture.tensors:
        cells = _cells(picture, tensor)
        width = max(map(len, cells)) + 2
        if chunk and used + width > _WIDTH:
            yield chunk
            chunk, used = [], left
        chunk.append(cells)
        used += width
    if chunk:
        yield chunk


def _device_cells(picture: Any) -> list[str]:
    """The first column: each device's id and its coordinates along the axes."""
    names = [name for name, size in picture.mesh if size > 1]
    sizes = [size for _, size in picture.mesh]
    cells = [" ".join(["device", *names]), "", ""]
    for place, number in enumerate(picture.ids[:_DEVICES]):
        at, rest = [], place
        for size in reversed(sizes):
            rest, index = divmod(rest, size)
            at.append(index)
        along = [index for index, size in zip(reversed(at), sizes, strict=True) if size > 1]
        marks = [f"{index:>{len(name)}}" for index, name in zip(along, names, strict=True)]
        cells.append(" ".join([f"{number:<6}", *marks]))
    return cells


def _table(picture: Any, columns: list[list[str]]) -> Iterator[str]:
    all_columns = [_device_cells(picture), *columns]
    widths = [max(map(len, cells)) for cells in all_columns]
    for row in zip(*all_columns, strict=True):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _dropped(picture: Any) -> Iterator[str]:
    for tensor in picture.tensors:
        for axis, dim, why in tensor.dropped:
            yield f"{axis} of {dim} in {', '.join(tensor.names)}: {why}"


def _sent(picture: Any, transfer: Any) -> Iterator[str]:
    """What is sent and how, and the arrows of the first groups."""
    yield f"{transfer.what}: {transfer.kind} over {'+'.join(transfer.axes)}, {transfer.why}"
    arrow = " -> " if transfer.kind == "ring" else " <-> "
    drawn = []
    for group in transfer.groups[:_GROUPS]:
        ids = [str(picture.ids[place]) for place in group]
        if len(ids) > _MEMBERS:
            ids = [*ids[: _MEMBERS - 2], "...", ids[-1]]
        drawn.append(arrow.join([*ids, ids[0]] if transfer.kind == "ring" else ids).replace(" ", _STAYS))
    more = len(transfer.groups) - _GROUPS
    yield "   ".join(drawn) + (f"   and {more} more groups" if more > 0 else "")
