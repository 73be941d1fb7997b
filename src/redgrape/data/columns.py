"""Columns of a table become inputs of a net.

What the inputs need to know of the training rows is a sum over sites: `Sums`. No row leaves a site for it, and no test
row is part of it.

    numbers      (v - mean) / std;  a missing value is 0, the mean
    categories   a 0 or 1 for each category of the training rows;  another category, or a missing value, is all zeros
    both         one more 0 or 1 for `is missing`, if a training row lacks a value
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Self

import numpy as np
from pydantic import Field

from redgrape.data.table import Cells, Table, listed
from redgrape.errors import ConfigError, DataError
from redgrape.validation import Strict

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]

MOST_CATEGORIES = 1000
LARGEST = 1e30  # of a number: its square is one too, also in the sum over all rows
CONSTANT = 1e-14  # a variance below this share of the mean square is rounding, which is up to 4e-16 of it
DATE = re.compile(  # 2021-03-04, 2021/3/4, 4.3.21, 04-03-2021, 4 March 2021 and 04MAR2021, perhaps with a time
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})"
    r"|\d{1,2}[-. ]?(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*[-. ]?(\d{4}|\d{2}))([T ].*)?",
    re.IGNORECASE,
)
LOCAL = re.compile(r"[-+]?(\d+,\d+|\d{1,3}(,\d{3})+(\.\d+)?|\d{1,3}([. ]\d{3})+,\d+)")  # 0,5  1,000.5  1.000,5


@dataclass(frozen=True)
class Sums:
    """What a site would send about one column of its training rows: sums, and nothing else."""

    rows: int
    known: int  # rows with a value
    total: Fraction  # of the values, if they are numbers; exact, so that the order of the sites changes nothing
    squares: Fraction
    counts: Counter[str]  # rows with each category, if they are categories

    @classmethod
    def of(cls, cells: Cells, rows: Rows, is_number: bool) -> Sums:
        counts = np.bincount(cells.codes[rows], minlength=len(cells.values))
        present = np.array([bool(value) for value in cells.values])
        if not is_number:
            named = Counter({v: int(n) for v, n in zip(cells.values, counts, strict=True) if v and n})
            return cls(len(rows), int(counts[present].sum()), Fraction(), Fraction(), named)
        codes = cells.codes[rows]
        v = np.array(cells.numbers, np.float64)[codes[present[codes]]]
        return cls(len(rows), len(v), Fraction(math.fsum(v)), Fraction(math.fsum(v * v)), Counter())

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.rows + other.rows,
            self.known + other.known,
            self.total + other.total,
            self.squares + other.squares,
            self.counts + other.counts,
        )


class Column(Strict):
    """How the values of one column become inputs. It has a mean and a deviation, or categories."""

    name: str
    can_be_missing: bool
    categories: list[str] | None = None
    mean: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    std: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    @classmethod
    def fit(cls, name: str, sums: Sums, is_number: bool) -> Column:
        can_be_missing = sums.known < sums.rows
        if not is_number:
            return cls(name=name, can_be_missing=can_be_missing, categories=sorted(sums.counts))
        return cls(name=name, can_be_missing=can_be_missing).scaled(sums.known, sums.total, sums.squares)

    def scaled(self, known: int, total: Fraction, squares: Fraction) -> Column:
        """The same column, scaled by these sums over its known values."""
        mean, square = total / known, squares / known
        variance = square - mean**2
        std = math.sqrt(variance) if variance > CONSTANT * square else 1.0
        return self.model_copy(update={"mean": float(mean), "std": std})

    @property
    def width(self) -> int:
        return (1 if self.categories is None else len(self.categories)) + self.can_be_missing

    def fill(self, inputs: NDArray[Any], cells: Cells, where: str) -> None:
        """Write the inputs [rows, width] of these cells. They are zero before."""
        missing = np.array([not value for value in cells.values])
        if self.can_be_missing:
            inputs[:, -1] = missing[cells.codes]
        if self.categories is None:
            for value, number in zip(cells.values, cells.numbers, strict=True):
                if number is not None and abs(number) > LARGEST:
                    _too_large(cells, value, self.name, where)
                if number is None:
                    raise DataError(
                        f"{where}: {cells.place_of(value)} has '{value[:40]}' in column '{self.name}', which holds "
                        "numbers; write a number, or leave the cell empty"
                    )
            scaled = (np.array(cells.numbers, np.float64) - self.mean) / self.std
            inputs[:, 0] = np.where(missing, 0.0, scaled)[cells.codes]
            return
        place = {category: i for i, category in enumerate(self.categories)}
        codes = np.array([place.get(value, -1) for value in cells.values])[cells.codes]
        known = np.flatnonzero(codes >= 0)
        inputs[known, codes[known]] = 1


class Columns(Strict):
    """From rows of a table to inputs. It is fitted to the training rows and stored with the run and its model."""

    label: str
    test: str | None = None
    columns: list[Column] = Field(min_length=1)

    @classmethod
    def fit(cls, raw: Raw, sites: Sequence[Rows]) -> Self:
        """Fitted to the rows of these sites, by the sums that each would send."""
        columns = []
        for name, is_number in raw.is_number.items():
            first, *others = (Sums.of(raw.table[name], rows, is_number) for rows in sites)
            sums = sum(others, start=first)
            if sums.known:  # a column without a value in the training rows tells nothing
                columns.append(Column.fit(name, sums, is_number))
        if not columns:
            raise DataError(f"{raw.table.where}: no column has a value in the training rows")
        return cls(label=raw.label, test=raw.test, columns=columns)

    @property
    def width(self) -> int:
        return sum(column.width for column in self.columns)

    def places(self) -> Iterator[tuple[Column, int]]:
        """Each column, and the place of its first input."""
        start = 0
        for column in self.columns:
            yield column, start
            start += column.width

    def inputs(self, table: Table, dtype: type[np.floating[Any]] = np.float32) -> NDArray[Any]:
        """The inputs [rows, width] of a table, which may hold other columns too."""
        inputs = np.zeros((len(table), self.width), dtype)
        for column, start in self.places():
            column.fill(inputs[:, start : start + column.width], table[column.name], table.where)
        return inputs


@dataclass(frozen=True)
class Roles:
    """What the columns of a table are for. Those without a role are inputs."""

    label: str | None = None
    site: str | None = None
    test: str | None = None
    drop: Sequence[str] = ()
    categorical: Sequence[str] = ()


@dataclass(frozen=True)
class Raw:
    """A table with its label, and which of its columns are inputs: of numbers (true) or of categories."""

    table: Table
    label: str
    test: str | None
    is_number: dict[str, bool]


def raw(table: Table, roles: Roles) -> Raw:
    """The table with the inputs that these roles leave."""
    if roles.label is None:
        raise ConfigError(
            f"{table.where} is a table; name its column of classes with --label (it has {listed(table.columns)})"
        )
    test = roles.test and table.test_column(roles.test)
    for name in filter(None, (roles.label, roles.site, test, *roles.drop, *roles.categorical)):
        _ = table[name]  # it must be there
    for other, what, flag in ((roles.site, "sites", "--site"), (test, "test set", "--test")):
        if roles.label == other:
            raise ConfigError(
                f"{table.where}: column '{roles.label}' cannot hold both the classes and the {what}; name another as "
                f"--label or as {flag}"
            )
    inputs = [name for name in table.columns if name not in {roles.label, roles.site, test, *roles.drop}]
    if not inputs:
        raise DataError(f"{table.where} has no column left for inputs; it has {listed(table.columns)}")
    is_number = {name: name not in roles.categorical and _is_number(name, table) for name in inputs}
    for name in (name for name in inputs if not is_number[name]):
        kinds = sum(map(bool, table[name].values))
        dates = [value for value in table[name].values if DATE.fullmatch(value)]
        if name not in roles.categorical and len(dates) > kinds / 2:
            raise DataError(
                f"{table.where}: column '{name}' holds dates, such as '{dates[0][:40]}'; leave it out with --drop "
                f"'{name}', write it as a number, such as days, or keep the dates as categories with "
                f"-c data.categorical='[\"{name}\"]'"
            )
        if kinds > MOST_CATEGORIES or (kinds > 50 and kinds > len(table) / 2):
            raise DataError(
                f"{table.where}: column '{name}' has {kinds} different texts in {len(table)} rows, as names have; "
                f"leave it out with --drop '{name}'"
            )
    return Raw(table, roles.label, roles.test, is_number)


def _is_number(name: str, table: Table) -> bool:
    """Whether all values are numbers. Raise DataError if only some are."""
    cells = table[name]
    texts = [v for v, number in zip(cells.values, cells.numbers, strict=True) if number is None]
    if not texts:
        large = [v for v, n in zip(cells.values, cells.numbers, strict=True) if n is not None and abs(n) > LARGEST]
        if large:
            _too_large(cells, large[0], name, table.where)
        return True
    if len(texts) + cells.values.count("") < len(cells.values) or any(map(LOCAL.fullmatch, texts)):
        _no_number(cells, texts[0], name, table.where)
    return False


def _no_number(cells: Cells, value: str, name: str, where: str) -> NoReturn:
    raise DataError(
        f"{where}: {cells.place_of(value)} has '{value[:40]}' in column '{name}', among numbers; write it as 1234.5, "
        f"leave the cell empty, or make the column one of categories with -c data.categorical='[\"{name}\"]'"
    )


def _too_large(cells: Cells, value: str, name: str, where: str) -> NoReturn:
    raise DataError(
        f"{where}: {cells.place_of(value)} has '{value[:40]}' in column '{name}', which is too large; write a number "
        f"up to {LARGEST:g}, or leave the cell empty"
    )
