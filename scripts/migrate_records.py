"""Bring the records under results/ to what this version reads.

    .venv/bin/python scripts/migrate_records.py [results]

Settings that are gone are left out where they had their default. A record that used one keeps its files as they are and
moves to results/made-by-0.1, where no command looks for it.
"""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

from redgrape.reading.suites.description import identity
from redgrape.runs.experiment import Experiment
from redgrape.runs.moved_keys import EXCHANGE, GONE, RENAMED
from redgrape.runs.run import file_digests


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


def migrate(record: Path, results: Path) -> str:
    values = moved(tomllib.loads((record / "experiment.toml").read_text(encoding="utf-8")))
    if values is None:
        place = results / "made-by-0.1" / record.parent.name / record.name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(record, place)
        return f"{record}: made by 0.1 with settings that are gone"
    experiment = Experiment.parse(values)
    summary = (record / "summary.json").read_text(encoding="utf-8")
    before = json.loads(summary)["experiment"]
    if before == experiment.hash():
        return ""
    (record / "experiment.toml").write_text(experiment.to_toml(), encoding="utf-8")
    (record / "summary.json").write_text(summary.replace(before, experiment.hash()), encoding="utf-8")
    stem, _, _ = record.name.rpartition("-")
    record.rename(record.with_name(f"{stem}-{identity(experiment, file_digests(experiment))[:8]}"))
    return f"{record}: migrated"


def main(results: Path) -> None:
    for path in sorted(results.glob("*/*/experiment.toml")):
        if path.parts[-3] != "made-by-0.1" and (said := migrate(path.parent, results)):
            print(said)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "results"))
