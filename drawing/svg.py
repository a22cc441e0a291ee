"""SVG as strings: elements, a style for light and dark pages, and escaped text."""

from __future__ import annotations

from collections.abc import Iterable

from .markup import escaped

__all__ = ["STYLE", "element", "label", "picture", "rectangle"]

# Class names begin with `ao-`, as a style inside a page applies to the whole page. Text has a contrast of at least 4.5 with its
# background in both schemes. A legend or a label repeats what colours show.
STYLE = """
.ao{--ao-ground:#ffffff;--ao-ink:#1f2933;--ao-faint:#5a6673;--ao-line:#c6ced6;--ao-full:#1f5fa8;--ao-part:#9cc4ec;
--ao-dead:#eef1f4;--ao-warn:#b3261e;--ao-move:#8a4b08;--ao-good:#1b7a3d;--ao-on:#ffffff;background:var(--ao-ground);
font-family:system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
@media (prefers-color-scheme:dark){.ao{--ao-ground:#14181d;--ao-ink:#e6ebf0;--ao-faint:#a3b0bd;--ao-line:#46525f;
--ao-full:#7db4f2;--ao-part:#2f5f94;--ao-dead:#222a33;--ao-warn:#ff8a80;--ao-move:#f0b060;--ao-good:#7fd19b;--ao-on:#10151a}}
.ao text{fill:var(--ao-ink);font-size:13px}
.ao .ao-small{font-size:12px;fill:var(--ao-faint)}
.ao .ao-strong{font-weight:600}
.ao .ao-warned{fill:var(--ao-warn)}
.ao .ao-moved{fill:var(--ao-move)}
.ao .ao-ground{fill:var(--ao-ground)}
.ao .ao-full{fill:var(--ao-full)}
.ao .ao-part{fill:var(--ao-part)}
.ao .ao-dead{fill:var(--ao-dead)}
.ao .ao-warn{fill:var(--ao-warn)}
.ao .ao-good{fill:var(--ao-good)}
.ao .ao-less{fill:var(--ao-full)}
.ao .ao-more{fill:var(--ao-move)}
.ao rect{shape-rendering:crispEdges}
.ao .ao-frame{fill:none;stroke:var(--ao-line)}
.ao .ao-box{fill:var(--ao-dead);stroke:var(--ao-line)}
.ao .ao-line{fill:none;stroke:var(--ao-line)}
.ao .ao-curve{fill:none;stroke:var(--ao-full);stroke-width:2}
.ao .ao-arrow{fill:none;stroke:var(--ao-move);stroke-width:1.5}
.ao .ao-head{fill:var(--ao-move)}
""".strip().replace("\n", "")


def element(name: str, inner: str = "", **attributes: object) -> str:
    """`<name a="1">inner</name>`; `_` in a name becomes `-`, and a trailing one is removed (class_)."""
    attributes_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items()
    )
    return f"<{name}{attributes_text}>{inner}</{name}>" if inner else f"<{name}{attributes_text}/>"


def label(x: float, y: float, text: str, class_: str = "", text_anchor: str = "start") -> str:
    """A line of text whose baseline begins (or ends, or is centred, by text_anchor) at x, y."""
    return element("text", escaped(text), x=x, y=y, class_=class_, text_anchor=text_anchor)


def rectangle(x: float, y: float, width: float, height: float, class_: str) -> str:
    """A rectangle."""
    return element("rect", x=x, y=y, width=width, height=height, class_=class_)


def picture(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A whole SVG with its own background, no wider than its page. `title` is for screen readers."""
    ground = rectangle(0, 0, width, height, class_="ao-ground")
    inner = f"<title>{escaped(title)}</title><style>{STYLE}</style>{ground}{''.join(parts)}"
    return element(
        "svg", inner, xmlns="http://www.w3.org/2000/svg", class_="ao", role="img", width=width, height=height,
        viewBox=f"0 0 {_value(width)} {_value(height)}", style="max-width:100%;height:auto",
    )  # fmt: skip


def _value(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else escaped(str(value))
