"""Tables as text: CSV, Parquet, or a DataFrame."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from redgrape.errors import DataError, did_you_mean, needed
from redgrape.runs import durable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]

SUFFIXES = (".csv", ".tsv", ".parquet")
OTHER_SUFFIXES = (".xlsx", ".xls", ".ods", ".feather", ".sav", ".dta", ".sas7bdat")  # not read
MISSING = frozenset({"", "na", "n/a", "nan", "+nan", "-nan", "null", "?"})  # in small letters
TEST, TRAIN = ("test", "true", "1", "yes"), ("train", "false", "0", "no")


@dataclass(frozen=True)
class Cells:
    """A column as text: cell i is values[codes[i]], and "" if it is missing. `lines`: where each row is in its file."""

    values: list[str]
    codes: Rows
    lines: Rows | None = None

    @classmethod
    def of(cls, texts: Iterable[str]) -> Cells:
        known: dict[str, int] = {}
        codes = np.fromiter((known.setdefault(text, len(known)) for text in texts), np.int64)
        return cls.coded(known, codes)

    @classmethod
    def coded(cls, texts: Iterable[str], codes: Any, lines: Rows | None = None) -> Cells:
        """Cell i is the text number codes[i]. All ways to write a missing value become one."""
        known: dict[str, int] = {}
        place = [known.setdefault("" if text.lower() in MISSING else text, len(known)) for text in texts]
        return cls(list(known), np.array(place, np.int64)[np.asarray(codes, np.int64)], lines)

    @cached_property
    def numbers(self) -> list[float | None]:
        """Each value as a number: NaN if it is missing, None if it is text."""
        return [_number(value) if value else math.nan for value in self.values]

    def place_of(self, value: str) -> str:
        """Where this value is first: `line 9` of a file, or `row 8`. Both are counted from 1."""
        row = int(np.flatnonzero(self.codes == self.values.index(value))[0])
        return f"row {row + 1}" if self.lines is None else f"line {self.lines[row]}"


@dataclass(frozen=True)
class Table:
    """Named columns of equal length. `where`: the file, for messages."""

    where: str
    columns: dict[str, Cells]

    def __post_init__(self) -> None:
        lengths = {len(cells.codes): name for name, cells in self.columns.items()}
        if not lengths or 0 in lengths:
            raise DataError(f"{self.where} holds no rows; it needs names of columns and a row for each example")
        if len(lengths) > 1:
            (one, first), (other, second), *_ = lengths.items()
            raise DataError(f"{self.where}: column '{first}' has {one} rows, and '{second}' {other}; they must agree")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())).codes)

    def __getitem__(self, name: str) -> Cells:
        if name not in self.columns:
            hint = did_you_mean(name, self.columns) or f"it has {listed(self.columns)}"
            raise DataError(f"{self.where} has no column '{name}'; {hint}")
        return self.columns[name]

    def complete(self, name: str, what: str) -> Cells:
        """A column in which every row needs a value."""
        cells = self[name]
        if "" in cells.values:
            raise DataError(
                f"{self.where}: {cells.place_of('')} has no {what} in column '{name}'; fill it in or remove the row "
                f"(empty, NA, NaN, null and ? count as missing)"
            )
        return cells

    def names(self, column: str, what: str) -> tuple[list[str], Rows]:
        """The sorted values of a complete column, by size if all are numbers, and the place of each row's value."""
        cells = self.complete(column, what)
        numbers = [number for number in cells.numbers if number is not None]
        key = dict(zip(cells.values, cells.numbers if len(numbers) == len(cells.values) else cells.values, strict=True))
        names = sorted(cells.values, key=lambda value: (key[value], value))
        place = {name: i for i, name in enumerate(names)}
        return names, np.array([place[value] for value in cells.values], np.int64)[cells.codes]

    def test_column(self, test: str) -> str:
        return test if test in self.columns else test.partition("=")[0]

    def test_rows(self, test: str) -> Rows:
        """The rows of the test set. `fold` names a column that says test or train, `fold=3` a value of a column."""
        column = self.test_column(test)
        if column == test:
            cells = self.complete(test, "word test or train")
            for word in cells.values:
                if word.lower() not in TEST + TRAIN:
                    raise DataError(
                        f"{self.where}: {cells.place_of(word)} has '{word}' in column '{test}'; write test or train "
                        f"(or true or false, 1 or 0, yes or no), or choose a value as in --test {test}={word}"
                    )
            chosen = [word.lower() in TEST for word in cells.values]
        else:
            cells, value = self[column], test.removeprefix(f"{column}=")
            chosen = [word == value for word in cells.values]
            if not any(chosen):
                known = listed(filter(None, cells.values))
                raise DataError(f"{self.where}: no row has '{value}' in column '{column}'; it has {known}")
        return np.flatnonzero(np.array(chosen)[cells.codes])


def is_table(source: str) -> bool:
    return source.lower().endswith(SUFFIXES) and Path(source).name != "manifest.csv"  # it lists images


def not_read(source: str) -> str:
    """What to do with a file of this kind. Empty if it is read, or if nothing is known."""
    kind = Path(source).suffix.lower()
    instead = {".npy": ".npz with x and y", **dict.fromkeys(OTHER_SUFFIXES, ".csv (UTF-8) or .parquet")}.get(kind)
    return f"{source}: '{kind}' is not read; save it as {instead}" if instead else ""


def read(path: Path) -> Table:
    """The table in a CSV or Parquet file. A CSV file has a line of names first; its cells are divided by commas,
    semicolons or tabs."""
    durable.ordinary(path, DataError)
    return _parquet(path) if path.suffix.lower() == ".parquet" else _csv(path)


def of_frame(frame: Any, where: str = "the table") -> Table:
    """The table of a DataFrame of pandas or polars, or of any mapping from names to columns."""
    keys = list(getattr(frame, "columns", frame))
    names = _checked_names(map(str, keys), where)
    return Table(where, {name: Cells.of(map(_text, frame[key])) for name, key in zip(names, keys, strict=True)})


def _csv(path: Path) -> Table:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            lines = csv.reader(file, delimiter=max(",;\t", key=first.count), strict=True)
            return of_rows([name.strip() for name in next(lines, [])], lines, str(path), lambda: lines.line_num)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason}); save it as CSV in UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{path} cannot be read as CSV ({error})") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def of_rows(
    names: Sequence[str], rows: Iterable[Sequence[str]], where: str, line: Callable[[], int] | None = None
) -> Table:
    """The table of these rows of text. Empty rows are skipped. `line`: tells the line of the row that was read last."""
    names = _checked_names(names, where)
    known: list[dict[str, int]] = [{} for _ in names]
    codes: list[list[int]] = [[] for _ in names]
    lines: list[int] = []
    for number, row in enumerate(filter(None, rows), start=1):
        lines.append(number if line is None else line())
        if len(row) != len(names):
            unit = "row" if line is None else "line"
            raise DataError(f"{where}: {unit} {lines[-1]} has {len(row)} cells for {len(names)} columns")
        for cell, values, column in zip(row, known, codes, strict=True):
            column.append(values.setdefault(cell.strip(), len(values)))
    columns = zip(names, known, codes, strict=True)
    places = None if line is None else np.array(lines)
    return Table(where, {name: Cells.coded(values, column, places) for name, values, column in columns})


def _checked_names(names: Iterable[str], where: str) -> list[str]:
    found: list[str] = []
    for name in names:
        if not name:
            raise DataError(
                f"{where}: column {len(found) + 1} has no name; name it, or leave it out (pandas: to_csv(..., "
                "index=False))"
            )
        if name in found:
            raise DataError(f"{where}: two columns are named '{name}'; give each a name of its own")
        found.append(name)
    return found


def _parquet(path: Path) -> Table:
    parquet = needed("pyarrow.parquet", "reading Parquet needs pyarrow", "table")
    try:
        arrow = parquet.read_table(path)
        columns = {name: arrow.column(name).to_pylist() for name in arrow.column_names}
    except Exception as error:  # a damaged file can raise nearly anything
        raise DataError(f"{path} cannot be read as Parquet ({' '.join(str(error).split())})") from error
    return of_frame(columns, str(path))


def _text(value: Any) -> str:
    """A cell as a CSV file would hold it. Whole numbers have no point: pandas makes floats of whole numbers if one is
    missing."""
    if value is None or str(value) in ("<NA>", "NaT", "nan"):
        return ""
    if isinstance(value, float | np.floating):
        return str(int(value)) if float(value).is_integer() else repr(float(value))
    return str(value).strip()


def _number(text: str) -> float | None:
    try:
        return float(text) if "_" not in text else None
    except ValueError:
        return None


def listed(names: Iterable[str], most: int = 12) -> str:
    first = list(itertools.islice(names, most + 1))
    return ", ".join(first[:most]) + (", ..." if len(first) > most else "")
