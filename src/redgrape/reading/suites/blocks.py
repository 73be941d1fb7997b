"""The parts of a table of results, and how its figures are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from redgrape.reading.run_tables import SHORT, TITLES, some_of
from redgrape.reading.suites.statistics import Paired
from redgrape.reading.suites.tables import Entry

DASH = "–"


@dataclass(frozen=True)
class Text:
    """One cell of a block."""

    text: str
    bold: bool = False


@dataclass(frozen=True)
class Block:
    """A part of the table that fits on a page, for one value of the first column axis."""

    title: str
    header: list[str]
    rows: list[list[Text]]


@dataclass(frozen=True)
class Style:
    """How figures and titles are written."""

    digits: int = 2
    plus_minus: str = " ± "
    titles: Mapping[str, str] = field(default_factory=lambda: TITLES)
    verdicts: bool = True

    def percent(self, value: float | None) -> str:
        return DASH if value is None else f"{value:.{self.digits}f}"

    def points(self, value: float | None) -> str:
        return DASH if value is None else f"{value:+.{self.digits}f}"


FULL = Style()
NARROW = Style(1, "±", SHORT, verdicts=False)  # for terminals


def figure(entry: Entry, style: Style) -> str:
    if entry.mean is None:
        return DASH
    spread = "" if entry.std is None else style.plus_minus + style.percent(100 * entry.std)
    return f"{style.percent(100 * entry.mean)}{spread}{some_of(entry.values, entry.seeds)}"


def called(row: str) -> str:
    """The row in words. A row labelled 0.1 must not be mistaken for a number."""
    return row if any(map(str.isalpha, row)) else f"row {row}"


def verdict(pair: Paired, style: Style = FULL) -> str:
    if pair.mean is None:
        return DASH
    mean, low, high = (style.points(times100(value)) for value in (pair.mean, pair.low, pair.high))
    if pair.separated is None:
        return f"{mean}, too few seeds ({pair.seeds})"
    interval = f"{mean} [{low}, {high}]"
    return f"{interval}, not separated" if style.verdicts and not pair.separated else interval


def times100(value: float | None) -> float | None:
    return None if value is None else 100 * value
