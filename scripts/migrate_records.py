"""Bring records to what this version reads: one file a suite, with today's settings.

    .venv/bin/python scripts/migrate_records.py [FROM [INTO]]

FROM (default: results) holds a folder for each record, FROM/SUITE-SCALE/RECORD, as earlier versions wrote them. It may
be the results of another checkout. INTO (default: FROM) gets INTO/SUITE-SCALE.jsonl; records that it has stay. If both
are the same, the folders are removed once their records can be read.

Settings that are gone are left out where they had their default. A record that used one is kept as it is, in
INTO/made-by-0.1, where no command looks for it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from redgrape.errors import StorageError
from redgrape.reading import records
from redgrape.reading.run_view import RunView
from redgrape.reading.suites.cells import identity
from redgrape.runs.checksums import hash_of
from redgrape.runs.environment import file_digests
from redgrape.runs.experiment import Experiment
from redgrape.runs.moved_keys import EXCHANGE, GONE, RENAMED

FILES = {"experiment.toml", "environment.json", "metrics.jsonl", "summary.json"}  # of a record
OLD = "made-by-0.1"


def moved(values: dict[str, Any]) -> dict[str, Any] | None:
    """The experiment in today's keys; None if it used what is gone."""
    method = dict(values["method"])
    if any(method.pop(key, default) != default for key, default in GONE.items()):
        return None
    exchange = {new: method.pop(old) for old, new in EXCHANGE.items() if old in method}
    for old, new in RENAMED.get(method["name"], {}).items():
        if old in method:
            method[new] = method.pop(old)
    return {**values, "method": method, "exchange": {**values.get("exchange", {}), **exchange}}


def migrated(folder: Path, old: bool) -> tuple[str, records.Record]:
    """The name of this record, and what is kept of it."""
    view = RunView.read(folder)
    if view.summary is None or view.environment is None:
        raise StorageError(f"'{folder}' is not finished")
    name, experiment, summary = folder.name, view.experiment, view.summary
    if not old:
        today = Experiment.parse(moved(view.experiment) or {})
        stem, _, _ = name.rpartition("-")
        name, experiment = f"{stem}-{identity(today, file_digests(today))[:8]}", today.resolved()
        summary = {**summary, "experiment": hash_of(experiment)}
    parts = {"experiment": experiment, "environment": view.environment, "metrics": view.metrics}
    return name, {**parts, "summary": summary, "cost": view.cost}


def main(source: Path, into: Path) -> None:
    files: dict[Path, dict[Path, tuple[str, records.Record]]] = {}
    for path in sorted(source.rglob("experiment.toml")):
        folder = path.parent
        if {file.name for file in folder.iterdir()} != FILES:
            print(f"{folder}: not a record, left alone")
            continue
        old = OLD in folder.parts or moved(RunView.read(folder).experiment) is None
        file = into / (OLD if old else "") / f"{folder.parent.name}.jsonl"
        files.setdefault(file, {})[folder] = migrated(folder, old)
    for file, found in files.items():
        records.add(file, dict(found.values()))
        known = records.read(file)
        if missing := [folder for folder, (name, _) in found.items() if name not in known]:
            raise StorageError(f"{missing} cannot be read from '{file}'")
        print(f"{file}: {len(found)} records migrated, {file.stat().st_size:,} bytes")
        for folder in found if source == into else ():
            shutil.rmtree(folder)
            if not any(folder.parent.iterdir()):
                folder.parent.rmdir()


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:]] or [Path("results")]
    main(given[0], given[-1])
