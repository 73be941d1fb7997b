"""Safe terminal output. Class names, paths and labels are untrusted and may contain escape sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text


def printable(words: object) -> str:
    """One line of text. Unprintable characters are replaced, such as terminal escapes and bidirectional marks."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(words))


def lines(words: str) -> str:
    """The same for text with several lines."""
    return "\n".join(map(printable, words.split("\n")))


def cell(words: object) -> Text:
    """A table cell: plain text, not markup."""
    from rich.text import Text

    return Text(printable(words))
