"""Records: finished runs as lines of one file a suite, `results/SUITE-SCALE.jsonl`, with what tables and charts need.

    {"format": "redgrape records 1"}
    {"shared": DIGEST, "value": {...}}     an environment, or an experiment without seed and method
    {"record": NAME, "seed": 0, "method": {...}, "experiment": DIGEST, "environment": DIGEST, "summary": {...},
     "curves": {"test": {"round": [...], "accuracy": [...], ...}}, "cost": {...}, "sha256": of all this}

A record keeps the results of a run to the last bit. Curves are those of evaluated rounds, to six digits. Confusion
matrices, norms, the lists of clients and the weights are left out. A record has the path `FILE/NAME`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from redgrape.errors import StorageError
from redgrape.reading import judged
from redgrape.runs import durable
from redgrape.runs.checksums import hash_of
from redgrape.runs.figures import FIGURES, OF_MANY_CLASSES, unpacked

FORMAT = {"format": "redgrape records 1"}
CURVES = (*FIGURES, *OF_MANY_CLASSES)
LEFT_OUT = ("last", "confusion", "classifier_norms")  # of the summary
Record: TypeAlias = dict[str, Any]  # experiment, environment, metrics, summary, cost


def files(folder: Path) -> list[Path]:
    """The files with records in this folder."""
    return [path for path in sorted(folder.glob("*.jsonl")) if path.is_file() and _is_ours(path)]


def read(file: Path) -> dict[str, Record]:
    """The records of a file, by name. Raise StorageError if a line is damaged, or if it is another file."""
    with durable.storage_errors("read", file):
        state = durable.ordinary(file).stat()
    return _read(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=64)
def _read(file: Path, changed: int, size: int) -> dict[str, Record]:
    """Read the file, once for each state of it."""
    if not _is_ours(file):
        raise StorageError(f"'{file}' is no file of records; `redgrape ls FOLDER` lists runs and records")
    with durable.storage_errors("read", file):
        lines = file.read_bytes().splitlines()[1:]
    shared: dict[str, Any] = {}
    found: dict[str, Record] = {}
    for number, line in enumerate(lines, 2):
        try:
            values = json.loads(line)
            if "shared" in values:
                shared[values["shared"]] = values["value"]
                whole = values["shared"] == hash_of(values["value"])[: len(values["shared"])]
            else:
                whole = values.pop("sha256") == hash_of(values)
                found[values["record"]] = _opened(values, shared)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            whole = False
        if not whole:
            raise StorageError(f"'{file}' is damaged in line {number}; restore it, or remove it and record again")
    return found


def _opened(line: Mapping[str, Any], shared: Mapping[str, Any]) -> Record:
    curves = {
        on: [dict(zip(c, row, strict=True)) for row in zip(*c.values(), strict=True)]
        for on, c in line["curves"].items()
    }
    rounds: dict[int, dict[str, Any]] = {}
    for on, rows in curves.items():
        for row in rows:
            number = row.pop("round")
            rounds.setdefault(number, {"round": number})[on] = row
    return {
        "experiment": {"seed": line["seed"], **shared[line["experiment"]], "method": line["method"]},
        "environment": shared[line["environment"]],
        "metrics": [rounds[number] for number in sorted(rounds)],
        "summary": line["summary"],
        "cost": line["cost"],
    }


def add(file: Path, records: Mapping[str, Record]) -> None:
    """Add these records to the file, or replace those of the same name."""
    every = {**(read(file) if file.exists() else {}), **records}
    shared: dict[str, Any] = {}
    lines = [_line(name, every[name], shared) for name in sorted(every)]
    parts = [{"shared": digest, "value": shared[digest]} for digest in sorted(shared)]
    text = "".join(json.dumps(values, separators=(",", ":")) + "\n" for values in (FORMAT, *parts, *lines))
    with durable.storage_errors("make", file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
    durable.replace_file(file, text.encode())


def _line(name: str, record: Record, shared: dict[str, Any]) -> dict[str, Any]:
    record = _without_paths(record)
    experiment = dict(record["experiment"])
    seed, method = experiment.pop("seed"), experiment.pop("method")
    summary = {key: value for key, value in record["summary"].items() if key not in LEFT_OUT}
    tested = judged.counts_of(record["environment"], record["summary"])
    environment = {key: value for key, value in record["environment"].items() if key != "input"} | {
        "test_counts": tested
    }
    parts = {}
    for part, value in (("experiment", experiment), ("environment", environment)):
        parts[part] = hash_of(value)[:16]
        shared[parts[part]] = value
    line = {
        "record": name,
        "seed": seed,
        "method": method,
        **parts,
        "summary": {**summary, "per_class": _rounded(unpacked(summary["per_class"]))},
        "curves": {on: columns for on in ("test", "validation") if (columns := _columns(record["metrics"], on))},
        "cost": record["cost"],
    }
    return {**line, "sha256": hash_of(line)}


def _without_paths(record: Record) -> Record:
    """The record with the name of the run that it started from, and not the folder in which that lay."""
    start = record["experiment"].get("start")
    if start is None:
        return record
    name, environment = Path(start).name, record["environment"]
    files = {name if file == start else file: digest for file, digest in environment["files"].items()}
    return {
        **record,
        "experiment": {**record["experiment"], "start": name},
        "environment": {**environment, "files": files},
    }


def _columns(metrics: Iterable[Mapping[str, Any]], on: str) -> dict[str, list[Any]]:
    evaluated = [line for line in metrics if on in line]
    known = [figure for figure in CURVES if any(figure in line[on] for line in evaluated)]
    columns = {figure: _rounded(line[on].get(figure) for line in evaluated) for figure in known}
    return {"round": [line["round"] for line in evaluated], **columns} if evaluated else {}


def _rounded(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 6) for value in values]


def _is_ours(path: Path) -> bool:
    with durable.storage_errors("read", path), path.open("rb") as file:
        first = file.readline(100)
    try:
        return bool(json.loads(first) == FORMAT)
    except ValueError:
        return False
