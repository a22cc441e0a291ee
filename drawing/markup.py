"""Text inside SVG and HTML."""

from __future__ import annotations

import html
import re

__all__ = ["escaped"]

# XML 1.0 can't hold these, not even escaped.
_NOT_IN_XML = re.compile("[^\\t\\n\\r\\u0020-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")


def escaped(text: str) -> str:
    """A text for an element or a quoted attribute. Characters that XML can't hold become U+FFFD."""
    return html.escape(_NOT_IN_XML.sub("\ufffd", text))
