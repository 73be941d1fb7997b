"""report, serve."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path

from redgrape import durable
from redgrape.errors import StorageError
from redgrape.page.document import document
from redgrape.page.figures import page_data, text
from redgrape.page.reading import Reading
from redgrape.report import find_runs


def report(options: argparse.Namespace) -> None:
    """One self-contained HTML page of the runs at or below these folders."""
    readings: dict[str, Reading] = {}
    damaged: list[tuple[str, str]] = []
    for path in _runs_of(options.folders):
        try:
            readings[str(path)] = Reading.of(path)
        except StorageError as error:  # one damaged run must not hide the others
            damaged.append((str(path), str(error)))
    data = page_data(readings, damaged)
    if not data["runs"]:
        reasons = "; ".join(run["reason"] for run in data["damaged"])
        raise StorageError(f"there is no run that can be read: {reasons}")
    for run in data["damaged"]:
        print(f"note: '{text(run['name'])}' is left out: {run['reason']}", file=sys.stderr)
    titles = ", ".join(setting["title"] for setting in data["settings"][:3])
    durable.replace_file(options.out, document(data, f"redgrape: {titles}").encode())
    if options.json:
        left_out = [run["name"] for run in data["damaged"]]
        print(json.dumps({"page": str(options.out), "runs": list(data["runs"]), "damaged": left_out}))
    else:
        print(f"page of {len(data['runs'])} runs: {text(options.out)} (open it in a browser)")


def _runs_of(folders: list[Path]) -> list[Path]:
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise StorageError(f"there is no folder '{folder}'; `redgrape ls` lists runs")
        runs = find_runs(folder)
        if not runs:
            raise StorageError(f"there is no run in or below '{folder}'; `redgrape ls` lists runs")
        found += [run for run in runs if run not in found]
    return found


def serve(options: argparse.Namespace) -> None:
    """The runs of a folder, live in a browser, until Ctrl-C."""
    from redgrape.page.serve import Server

    if not options.folder.is_dir():
        raise StorageError(f"there is no folder '{options.folder}'; `redgrape run` makes runs, or name another folder")
    with suppress(KeyboardInterrupt), Server(options.folder, options.port) as server:
        shown = f"{server.address} shows the runs of '{text(options.folder)}', to this machine; Ctrl-C ends it"
        print(json.dumps({"address": server.address}) if options.json else shown, flush=True)
        server.serve_forever()
