"""Names that are printed and written: without control characters, line breaks and halves of surrogate pairs."""

from __future__ import annotations

from .errors import AttnOpsError, ConfigError, shown

__all__ = ["checked_name", "unprintable"]


def unprintable(text: str) -> str | None:
    """The first character of a text that isn't printable, as an escape sequence; None if there is none.

    An escape sequence moves a terminal's cursor, a line break forges lines of a plan, a control character makes SVG ill-formed,
    and half of a surrogate pair can't be written as UTF-8.
    """
    if text.isprintable():
        return None
    return next(repr(character) for character in text if not character.isprintable())


def checked_name(name: str, what: str, error: type[AttnOpsError] = ConfigError) -> str:
    """Return a name that is printable. Errors: `error` for any other; `what` says what it names."""
    if (character := unprintable(name)) is not None:
        raise error(f"{what} {shown(name)} holds {character}; wanted printable characters only.")
    return name
