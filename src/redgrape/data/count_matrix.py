"""Count matrices: how many examples of each class each client of a real federation holds. See the partition `like`.

A matrix is a CSV file. Its first line is `client` and the names of the classes; then come a line for each client, its
name and its counts. Lines that begin with # say where the numbers are from.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from redgrape.errors import DataError, unknown
from redgrape.runs import durable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LIKE = "like:"  # the partition of a matrix: this, and its name or file
FOLDER = Path(__file__).with_name("matrices")


@dataclass(frozen=True)
class CountMatrix:
    clients: list[str]
    counts: NDArray[np.int64]  # clients x classes


def brings_clients(partition: str) -> bool:
    """Whether the partition says how many clients there are."""
    return partition == "natural" or partition.startswith(LIKE)


def names() -> list[str]:
    """The matrices that come with redgrape."""
    return sorted(path.stem for path in FOLDER.glob("*.csv"))


def check_name(name: str) -> None:
    """Raise ConfigError if this is neither a matrix of redgrape nor the name of a CSV file."""
    if name not in names() and not name.endswith(".csv"):
        raise unknown("count matrix", name, [*names(), "a .csv file"])


def read(name: str) -> CountMatrix:
    """The matrix of this name, or of this CSV file."""
    import numpy as np  # here: readers of runs do without

    check_name(name)
    path = Path(name) if name.endswith(".csv") else FOLDER / f"{name}.csv"
    try:
        with durable.ordinary(path, DataError).open(encoding="utf-8", newline="") as file:
            (_, *classes), *rows = csv.reader(line for line in file if line.strip() and not line.startswith("#"))
        counts = np.array([[int(cell) for cell in cells] for _, *cells in rows], dtype=np.int64)
        clients = [client for client, *_ in rows]
    except OSError as error:
        raise DataError(f"cannot read the count matrix '{path}': {error.strerror or error}") from error
    except (ValueError, csv.Error, OverflowError) as error:
        raise DataError(f"'{path}' is no count matrix, a line of whole numbers for each client: {error}") from error
    if not classes or counts.shape != (len(clients), len(classes)) or len(set(clients)) < len(clients):
        raise DataError(f"'{path}' must name each client once, with a count for each of {len(classes)} classes")
    if (counts < 0).any() or not counts.sum(axis=0).all():
        raise DataError(f"'{path}' has a count below 0, or a class that nobody holds")
    return CountMatrix(clients, counts)
