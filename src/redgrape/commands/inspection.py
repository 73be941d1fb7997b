"""ls, show, methods."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from redgrape import report
from redgrape.errors import StorageError
from redgrape.progress import percent


def ls(options: argparse.Namespace) -> None:
    """The runs below a folder."""
    if not options.folder.is_dir():
        raise StorageError(f"there is no folder '{options.folder}'; `redgrape run` makes runs, or name another folder")
    runs = []
    for path in report.find_runs(options.folder):
        try:
            runs.append(report.RunView.read(path))
        except StorageError as error:  # one damaged run must not hide the others
            print(f"note: {error}", file=sys.stderr)
    if options.json:
        print(json.dumps([run.row() for run in runs]))
        return
    table = Table()
    for title in ("run", "method", "data", "seed", "rounds", "overall %", "tail %"):
        justify: Any = "right" if "%" in title or title in {"seed", "rounds"} else "left"
        table.add_column(title, justify=justify, overflow="fold")
    for run in runs:
        row = run.row()
        table.add_row(
            *[
                Text(str(value))
                for value in (
                    row["run"],
                    row["method"],
                    row["data"],
                    row["seed"],
                    f"{row['done']}/{row['rounds']}",
                    percent(row["accuracy"]),
                    percent(row["tail"]),
                )
            ]
        )
    console = Console()
    if not console.is_terminal:
        console.width = 1000  # a line a run, with its whole path, for grep and the like
    console.print(table)


def show(options: argparse.Namespace) -> None:
    """One run: what it is, how far it is, its result."""
    run = report.RunView.read(options.run)
    if options.json:
        print(json.dumps({**run.row(), "experiment": report.plain(run.experiment), "summary": run.summary}))
        return
    console = Console()
    console.print(Text((options.run / "experiment.toml").read_text(encoding="utf-8").strip()))
    console.print(f"\nrounds done: {run.rounds_done} of {run.experiment['rounds']}", highlight=False)
    if run.environment is not None:
        console.print(f"split: {run.environment['split']}", highlight=False)
    if run.summary is None:
        console.print(Text(f"not finished; `redgrape resume {options.run}` continues it"))
        return
    report.print_table(report.collect([(run.label, run)], options.on))
    if run.environment is not None:
        table = Table(title="accuracy per class, %")
        for title in ("class", "training examples", "accuracy"):
            table.add_column(title, justify="left" if title == "class" else "right")
        counts = run.environment["class_counts"]
        for c in sorted(range(len(counts)), key=lambda c: (-counts[c], c)):
            name = Text(run.environment["class_names"][c])
            table.add_row(name, str(counts[c]), percent(run.summary["per_class"][c]))
        console.print(table)


def methods(options: argparse.Namespace) -> None:
    """All methods with a line each, or one with its hyper-parameters."""
    from redgrape import methods as found

    if options.name is None:
        lines = {name: _first_line(found.load(name)) for name in found.names()}
        if options.json:
            print(json.dumps(lines))
            return
        table = Table()
        table.add_column("method")
        table.add_column("what it does")
        for name, line in lines.items():
            table.add_row(name, line)
        Console().print(table)
        return
    method = found.load(options.name)
    fields = {
        name: {
            "default": None if field.is_required() else field.get_default(call_default_factory=True),
            "meaning": field.description,
        }
        for name, field in method.model_fields.items()
    }
    if options.json:
        presets = {name: dict(values) for name, values in method.presets.items()}
        print(json.dumps(report.plain({"name": options.name, "hyper_parameters": fields, "presets": presets})))
        return
    print((sys.modules[method.__module__].__doc__ or "").strip())
    table = Table(title="hyper-parameters")
    for title in ("name", "default", "meaning"):
        table.add_column(title)
    for name, entry in fields.items():
        table.add_row(Text(name), Text(_shown(entry["default"])), Text(str(entry["meaning"])))
    console = Console()
    console.print(table)
    for name, values in method.presets.items():
        settings = ", ".join(f"{key}={_shown(value)}" for key, value in values.items()) or "the defaults"
        console.print(Text(f"preset {name}: {settings}"))


def _first_line(method: type[Any]) -> str:
    return (method.__doc__ or "").strip().partition("\n")[0]


def _shown(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
