"""Safe terminal output. Class names, paths and labels are untrusted and may contain escape sequences."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence

GAP = "  "  # between columns
_FIGURE = re.compile(r"[-+]?\.?\d|[–.]$|$")  # entries that are aligned to the right


def printable(words: object) -> str:
    """One line of text. Unprintable characters are replaced, such as terminal escapes and bidirectional marks."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(words))


def lines(words: str) -> str:
    """The same for text with several lines."""
    return "\n".join(map(printable, words.split("\n")))


def duration(seconds: float, step: int = 1) -> str:
    """Text such as `40 s`, `3 min` or `5 h`. Seconds are multiples of `step`."""
    if seconds < 90:
        return f"{max(step, step * round(seconds / step))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{round(seconds / 3600)} h" if seconds < 48 * 3600 else f"{round(seconds / 86400)} days"


def width() -> int:
    """The columns of the terminal. A pipe has no limit: tools like grep need one line per row."""
    return shutil.get_terminal_size((10**4, 0)).columns


def paragraph(words: object, indent: str = "") -> str:
    """A sentence for people, wrapped at the end of the line. Lines after the first are indented."""
    text = printable(words)
    return textwrap.fill(text, width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def prose(words: str) -> str:
    """Text with several lines, wrapped if one of them is too long. Indented lines, such as equations, stay."""
    if max(map(len, words.split("\n"))) <= width():
        return lines(words)
    parts = words.split("\n\n")
    return "\n\n".join(lines(part) if part.startswith(" ") else paragraph(" ".join(part.split())) for part in parts)


def listed(entries: Sequence[tuple[str, str]]) -> str:
    """Names with sentences beside them."""
    longest = max((_columns(printable(name)) for name, _ in entries), default=0)
    indent = " " * (longest + len(GAP))
    return "\n".join(paragraph(_padded(name, longest) + GAP + words, indent).rstrip() for name, words in entries)


def table(header: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> str:
    """Aligned columns without a box. No entry is cut or split. In a narrow terminal, the entries of the first column
    stand above their rows. If that is too wide as well, rows and columns are exchanged, or printed in several parts."""
    entries = [[printable(entry) for entry in row] for row in (header, *rows)]
    turned = [list(column) for column in zip(*entries, strict=True)]
    room = width()
    if _total(turned) <= room:
        lines = _aligned(turned)
    elif len(GAP) + _total(turned[1:]) <= room:
        lines = [
            line
            for row, rest in zip(entries, _aligned(turned[1:], left=0), strict=True)
            for line in (row[0], GAP + rest)
        ]
    elif _total(entries) <= room:
        lines = _aligned(entries)
    else:
        lines = [line for part in _parts(turned, room) for line in ("", *_aligned(part))][1:]
    return "\n".join([title, *lines] if title else lines)


def _aligned(columns: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of these columns. After the first `left` columns, figures are aligned to the right."""
    padded = []
    for i, column in enumerate(columns):
        right = i >= left and all(map(_FIGURE.match, column[1:]))
        padded.append([_padded(entry, _widest(column), right=right) for entry in column])
    return [GAP.join(row).rstrip() for row in zip(*padded, strict=True)]


def _parts(columns: Sequence[Sequence[str]], room: int) -> Iterator[list[Sequence[str]]]:
    """As many columns as fit, each time with the first column."""
    part = [columns[0]]
    for column in columns[1:]:
        if len(part) > 1 and _total([*part, column]) > room:
            yield part
            part = [columns[0]]
        part.append(column)
    yield part


def _total(columns: Sequence[Sequence[str]]) -> int:
    return sum(map(_widest, columns)) + len(GAP) * (len(columns) - 1)


def _widest(column: Sequence[str]) -> int:
    return max(map(_columns, column))


def _columns(words: str) -> int:
    """The columns that a terminal needs for these words."""
    from rich.cells import cell_len

    return cell_len(words)


def _padded(words: str, columns: int, *, right: bool = False) -> str:
    space = " " * (columns - _columns(words))
    return space + words if right else words + space
