"""A certificate as a badge in SVG."""

from __future__ import annotations

from ..drawing.markup import escaped
from .certificate import Certificate

__all__ = ["badge"]

_LETTER = 6.6  # widths of 11 px letters differ; text is fitted to its box
_GREEN, _RED, _GREY = "#1b7a3d", "#b3261e", "#39434d"


def badge(certificate: Certificate) -> str:
    """`attention | 35 right, 1 wrong`."""
    right, wrong = certificate.count("right"), certificate.count("wrong")
    label, value = "attention", f"{right} right, {wrong} wrong" if wrong else f"{right} right"
    widths = [round(len(text) * _LETTER) + 12 for text in (label, value)]
    name = f"{certificate.target}: {value} of {len(certificate.features)} features, seed {certificate.seed}"
    colour = _RED if wrong or not right else _GREEN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{sum(widths)}" height="20" role="img" aria-label="{escaped(name)}">',
        f"<title>{escaped(name)}</title>",
        f'<rect width="{widths[0]}" height="20" fill="{_GREY}"/>',
        f'<rect x="{widths[0]}" width="{widths[1]}" height="20" fill="{colour}"/>',
        '<g fill="#ffffff" font-family="Verdana,Geneva,DejaVu Sans,sans-serif" font-size="11">',
    ]
    at = 0
    for text, width in zip((label, value), widths, strict=True):
        parts.append(f'<text x="{at + 6}" y="14" textLength="{width - 12}">{escaped(text)}</text>')
        at += width
    return "".join((*parts, "</g></svg>\n"))
