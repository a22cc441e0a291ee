"""HTML as strings: labelled rows, code, pictures side by side; what a notebook shows, and what a report is made of."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from .svg import STYLE

__all__ = ["PAGE_STYLE", "code", "fragment", "heading", "pictures", "rows"]

PAGE_STYLE = (
    STYLE
    + """
.ao-page{color:var(--ao-ink);font-size:14px;line-height:1.45;padding:8px 12px;overflow-wrap:anywhere;box-sizing:border-box}
.ao-page table.ao-rows{border-collapse:collapse;margin:4px 0}
.ao-page .ao-rows td{padding:2px 14px 2px 0;vertical-align:top;text-align:left;border:0;background:none;
color:inherit;font-size:inherit}
.ao-page .ao-rows td:first-child{font-weight:600;white-space:nowrap}
.ao-page pre{white-space:pre-wrap;background:var(--ao-dead);color:var(--ao-ink);padding:8px 10px;margin:6px 0;border-radius:6px;
font-size:12.5px;overflow-x:auto}
.ao-page p.ao-title{font-weight:600;margin:4px 0}
.ao-page .ao-pictures{display:flex;flex-wrap:wrap;gap:12px;align-items:flex-start}
.ao-page .ao-refused,.ao-page .ao-warned{color:var(--ao-warn)}
.ao-page .ao-good{color:var(--ao-good)}
""".strip().replace("\n", "")
)


def fragment(parts: Iterable[str]) -> str:
    """What a notebook puts below a cell; it brings its own style."""
    return f'<div class="ao ao-page"><style>{PAGE_STYLE}</style>{"".join(parts)}</div>'


def heading(text: str) -> str:
    """A line in bold."""
    return f'<p class="ao-title">{escape(text)}</p>'


def rows(told: Iterable[tuple[str, str]]) -> str:
    """Labelled lines; a label that repeats is written once."""
    cells, last = [], ""
    for label, line in told:
        cells.append(f"<tr><td>{escape('' if label == last else label)}</td><td>{escape(line)}</td></tr>")
        last = label
    return f'<table class="ao-rows">{"".join(cells)}</table>'


def code(text: str) -> str:
    """Text as it stands."""
    return f"<pre>{escape(text)}</pre>"


def pictures(svgs: Iterable[str]) -> str:
    """Side by side where there is room, else one below the other."""
    return f'<div class="ao-pictures">{"".join(svgs)}</div>'
