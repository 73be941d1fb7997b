"""The commands report and serve."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from redgrape.errors import StorageError
from redgrape.reading.page import suite
from redgrape.reading.page.document import document
from redgrape.reading.page.figures import page_data, text
from redgrape.reading.page.reading import Reading
from redgrape.reading.run_view import find_runs
from redgrape.runs import durable


def report(options: argparse.Namespace) -> None:
    """Write one self-contained HTML page about these suites, and the runs at or below these folders."""
    readings: dict[str, Reading] = {}
    damaged: list[tuple[str, str]] = []
    suites: list[suite.Suite] = []
    paths: list[Path] = []
    for folder in _folders(options.folders):
        if suite.is_suite(folder):
            suites.append(suite.read(folder))
            damaged += [(run, "the table of a suite names it, but it does not exist") for run in suites[-1].gone]
            paths += suites[-1].runs
            if not suites[-1].runs:
                raise StorageError(f"no cell of '{folder}' has been run, or all runs were moved")
        elif found := find_runs(folder):
            paths += found
        else:
            raise StorageError(f"there is no run in or below '{folder}'; `redgrape ls` lists runs")
    for path in dict.fromkeys(paths):
        try:
            readings[str(path)] = Reading.of(path)
        except StorageError as error:  # one damaged run must not hide the others
            damaged.append((str(path), str(error)))
    data = page_data(readings, damaged, [each.shown for each in suites])
    if not data["runs"]:
        reasons = "; ".join(run["reason"] for run in data["damaged"])
        raise StorageError(f"no run can be read: {reasons}")
    for run in data["damaged"]:
        print(f"note: '{text(run['name'])}' is left out: {run['reason']}", file=sys.stderr)
    titles = ", ".join(named["title"] for named in (data["suites"] or data["settings"])[:3])
    durable.replace_file(options.out, document(data, f"redgrape: {titles}").encode())
    if options.json:
        left_out = [run["name"] for run in data["damaged"]]
        print(json.dumps({"page": str(options.out), "runs": list(data["runs"]), "damaged": left_out}))
    else:
        runs = len(data["runs"])
        print(f"page of {runs} run{'s' * (runs > 1)}: {text(options.out)} (open it in a browser)")


def _folders(named: list[Path]) -> Iterator[Path]:
    """The folders. The name of a suite stands for its folders below runs/."""
    for path in dict.fromkeys(named):
        if path.is_dir():
            yield path
            continue
        from redgrape.reading.suites import description, files

        if str(path) not in files.names():
            raise StorageError(f"there is no folder '{path}'; `redgrape ls` lists runs, `redgrape reproduce` suites")
        places = [Path("runs") / f"{path}-{scale}" for scale in description.SCALES]
        if not any(map(suite.is_suite, places)):
            raise StorageError(
                f"'{path}' was not reproduced below 'runs'; run `redgrape reproduce {path}`, or name its folder"
            )
        yield from filter(suite.is_suite, places)


def serve(options: argparse.Namespace) -> None:
    """Show the runs of a folder live in a browser, until Ctrl-C."""
    from redgrape.reading.page.serve import Server

    if not options.folder.is_dir():
        raise StorageError(
            f"there is no folder '{options.folder}'; create a run with `redgrape run`, or choose another folder"
        )
    with suppress(KeyboardInterrupt), Server(options.folder, options.port) as server:
        shown = f"{server.address} shows the runs of '{text(options.folder)}' to this machine; press Ctrl-C to stop"
        print(json.dumps({"address": server.address}) if options.json else shown, flush=True)
        server.serve_forever()
