"""Words of strangers on a terminal: class names, paths and labels may hold escapes that would steer it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text


def printable(words: object) -> str:
    """On one line, without what is not printed: escapes of a terminal, marks that turn the direction of writing."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(words))


def lines(words: str) -> str:
    """The same for a text of several lines."""
    return "\n".join(map(printable, words.split("\n")))


def cell(words: object) -> Text:
    """For a table: text, not markup."""
    from rich.text import Text

    return Text(printable(words))
