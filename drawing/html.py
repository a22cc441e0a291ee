"""HTML as strings, for notebooks and reports: labelled rows, code, pictures side by side."""

from __future__ import annotations

from collections.abc import Iterable

from .markup import escaped
from .svg import STYLE

__all__ = [
    "code",
    "document",
    "folded",
    "fragment",
    "heading",
    "paragraph",
    "pictures",
    "rows",
    "section",
    "subsection",
    "table",
    "title",
]

_PAGE_STYLE = (
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
.ao-page .ao-bar{display:grid;grid-template-columns:minmax(90px,220px) minmax(80px,1fr) minmax(110px,240px);gap:4px 12px;
align-items:center;margin:5px 0}
.ao-page .ao-track{background:var(--ao-dead);border:1px solid var(--ao-line);height:14px;display:block}
.ao-page .ao-track span{display:block;height:100%}
.ao-page .ao-used{background:var(--ao-full)}
.ao-page .ao-ok{background:var(--ao-good)}
.ao-page .ao-over{background:var(--ao-warn)}
.ao-page .ao-told,.ao-page .ao-rows td.ao-told{color:var(--ao-faint);font-size:13px}
.ao-page .ao-refused,.ao-page .ao-warned,.ao-page .ao-rows td.ao-warned{color:var(--ao-warn)}
.ao-page .ao-good,.ao-page .ao-rows td.ao-good{color:var(--ao-good)}
""".strip().replace("\n", "")
)

_DOCUMENT_STYLE = """
html{color-scheme:light dark}
body.ao-page{max-width:960px;margin:0 auto;padding:16px}
.ao-page h1{font-size:20px;margin:8px 0}
.ao-page h2{font-size:17px;margin:28px 0 8px;padding-top:10px;border-top:1px solid var(--ao-line)}
.ao-page h3{font-size:15px;margin:18px 0 6px}
.ao-page nav a{color:var(--ao-full);margin-right:14px;display:inline-block;padding:3px 0}
.ao-page summary{cursor:pointer;padding:4px 0}
@media (max-width:600px){body.ao-page{padding:10px}.ao-page .ao-bar{grid-template-columns:1fr}.ao-page .ao-rows td{display:block;
padding-right:0}.ao-page .ao-rows td:first-child:empty{display:none}.ao-page .ao-rows td+td{padding-bottom:6px}}
@media print{html,body{background:#fff}}
""".strip().replace("\n", "")


def fragment(parts: Iterable[str]) -> str:
    """The HTML that a notebook shows below a cell, with its own style."""
    return f'<div class="ao ao-page"><style>{_PAGE_STYLE}</style>{"".join(parts)}</div>'


def document(name: str, body: str) -> str:
    """A whole page in one file, which loads nothing from elsewhere and runs no scripts."""
    return (
        f'<!doctype html><html lang="en" class="ao"><head><meta charset="utf-8"><meta name="viewport" content="'
        f'width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark"><title>{escaped(name)}</title>'
        f'<style>{_PAGE_STYLE}{_DOCUMENT_STYLE}</style></head><body class="ao ao-page">{body}</body></html>\n'
    )


def title(text: str, links: Iterable[tuple[str, str]]) -> str:
    """The title of a document, with links to its sections, given as (name, heading)."""
    navigation = "".join(f'<a href="#{escaped(name)}">{escaped(heading)}</a>' for name, heading in links)
    return f"<h1>{escaped(text)}</h1><nav>{navigation}</nav>"


def section(heading: str, parts: Iterable[str], name: str = "") -> str:
    """A section of a document with its heading; `name` is the target of links to it."""
    at = f' id="{escaped(name)}"' if name else ""
    return f"<section{at}><h2>{escaped(heading)}</h2>{''.join(parts)}</section>"


def subsection(heading: str) -> str:
    """A heading within a section."""
    return f"<h3>{escaped(heading)}</h3>"


def folded(summary: str, inner: str) -> str:
    """Content that the reader can unfold."""
    return f"<details><summary>{escaped(summary)}</summary>{inner}</details>"


def paragraph(text: str, *, warns: bool = False) -> str:
    """A paragraph of plain text."""
    return f'<p class="ao-warned">{escaped(text)}</p>' if warns else f"<p>{escaped(text)}</p>"


def heading(text: str) -> str:
    """A line in bold."""
    return f'<p class="ao-title">{escaped(text)}</p>'


def rows(lines: Iterable[tuple[str, str]]) -> str:
    """Labelled lines. A repeated label is shown once."""
    cells, last = [], ""
    for label, line in lines:
        cells.append(f"<tr><td>{escaped('' if label == last else label)}</td><td>{escaped(line)}</td></tr>")
        last = label
    return f'<table class="ao-rows">{"".join(cells)}</table>'


def table(heads: Iterable[str], lines: Iterable[Iterable[tuple[str, str]]]) -> str:
    """A table with a header. A cell is its text and its class, '' for none."""
    head = "".join(f"<td>{escaped(text)}</td>" for text in heads)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{name}">{escaped(text)}</td>' if name else f"<td>{escaped(text)}</td>" for text, name in line
        )
        + "</tr>"
        for line in lines
    )
    return f'<table class="ao-rows"><tr>{head}</tr>{body}</table>'


def code(text: str) -> str:
    """Preformatted text."""
    return f"<pre>{escaped(text)}</pre>"


def pictures(svgs: Iterable[str]) -> str:
    """Pictures side by side if there is room, else one below the other."""
    return f'<div class="ao-pictures">{"".join(svgs)}</div>'
