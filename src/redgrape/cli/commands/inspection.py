"""The commands ls, show and methods."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import tomli_w
from rich.console import Console
from rich.table import Table
from rich.text import Text

from redgrape.cli.progress import percent
from redgrape.errors import StorageError
from redgrape.reading import judged, run_tables
from redgrape.reading.terminal import cell, lines, printable
from redgrape.runs.figures import LONGEST


def ls(options: argparse.Namespace) -> None:
    """List the runs below a folder."""
    if not options.folder.is_dir():
        raise StorageError(
            f"there is no folder '{options.folder}'; create a run with `redgrape run`, or choose another folder"
        )
    runs = []
    for path in run_tables.find_runs(options.folder):
        try:
            runs.append(run_tables.RunView.read(path))
        except StorageError as error:  # one damaged run must not hide the others
            print(f"note: {printable(error)}", file=sys.stderr)
    other = run_tables.other_data(runs)
    for path, why in other.items():
        print(f"note: '{printable(path)}' cannot be compared: {printable(why)}", file=sys.stderr)
    if options.json:
        print(json.dumps([run.row() | ({"other_data": other[p]} if (p := run.path) in other else {}) for run in runs]))
        return
    table = Table()
    for title in ("run", "method", "data", "seed", "rounds", "overall %", "tail %"):
        justify: Any = "right" if "%" in title or title in {"seed", "rounds"} else "left"
        table.add_column(title, justify=justify, overflow="fold")
    for run in runs:
        row = run.row()
        table.add_row(
            *[
                cell(value)
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
        console.width = 1000  # one line per run with its full path, for tools like grep
    console.print(table)


def show(options: argparse.Namespace) -> None:
    """Show one run: its experiment, progress and result."""
    run = run_tables.RunView.read(options.run)
    if options.json:
        tested = {"test_counts": judged.counts_of(run.environment, run.summary)}
        experiment = run_tables.plain(run.experiment)
        print(json.dumps({**run.row(), **tested, "experiment": experiment, "summary": run.summary}))
        return
    console = Console()
    console.print(Text(lines(tomli_w.dumps(run.experiment).strip())))
    console.print(f"\nrounds done: {run.rounds_done} of {run.experiment['rounds']}", highlight=False)
    if run.environment is not None:
        console.print(cell(f"split: {run.environment['split']}"))
    if run.summary is None:
        console.print(cell(f"not finished; continue it with `redgrape resume {options.run}`"))
        return
    run_tables.print_table(run_tables.collect([(run.label, run)], options.on))
    if run.environment is not None:
        table = Table(title="accuracy per class, %")
        for title in ("class", "training examples", "test examples", "accuracy"):
            table.add_column(title, justify="left" if title == "class" else "right")
        names, tested = run.environment["class_names"], judged.counts_of(run.environment, run.summary)
        counts = run.environment["class_counts"]  # None if only the sites of a deployment know
        order = sorted(range(len(names)), key=lambda c: (-counts[c] if counts else 0, c))
        between = len(order) - 2 * judged.EITHER_END if len(order) > LONGEST else 0
        for c in [*order[: judged.EITHER_END], *order[-judged.EITHER_END :]] if between else order:
            of_class = [str(known[c]) if known else "–" for known in (counts, tested)]
            table.add_row(cell(names[c]), *of_class, percent(run.summary["per_class"][c]))
        console.print(table)
        if between:
            console.print(f"{between} classes between the first and the last {judged.EITHER_END} are in `--json`")


def methods(options: argparse.Namespace) -> None:
    """List all methods, or show one with its hyper-parameters."""
    from redgrape import methods as found

    if options.name is None:
        _list_methods(options)
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
        facts = {"name": options.name, "fidelity": method.fidelity, "hyper_parameters": fields, "presets": presets}
        print(json.dumps(run_tables.plain(facts)))
        return
    print(lines((sys.modules[method.__module__].__doc__ or "").strip()))
    table = Table(title="hyper-parameters")
    for title in ("name", "default", "meaning"):
        table.add_column(title)
    for name, entry in fields.items():
        table.add_row(cell(name), cell(_shown(entry["default"])), cell(entry["meaning"]))
    console = Console()
    console.print(table)
    for name, values in method.presets.items():
        settings = ", ".join(f"{key}={_shown(value)}" for key, value in values.items()) or "the defaults"
        console.print(cell(f"preset {name}: {settings}"))
    console.print(cell(f"fidelity: {method.fidelity or 'not stated'}"))


def _list_methods(options: argparse.Namespace) -> None:
    """List every method: what it does, its message sizes with this net, what it assumes, and its source."""
    from redgrape import methods as found
    from redgrape.runs.message_sizes import payload

    rows: list[dict[str, Any]] = []
    for name in found.names():
        method = found.load(name)
        size = payload(method(), options.net, options.shape, options.classes)
        assumes = [
            *(["class presence may be seen"] if size.names_classes else []),
            *(["single updates"] if method().needs_single() else []),
            *(["balanced data at the server"] if method.uses_auxiliary else []),
            *(["state at the clients"] if size.kept else []),
            *(["the clients' summed class counts"] if size.surveyed else []),
        ]
        rows.append(
            {
                "method": name,
                "what": _first_line(method),
                "down": size.down,
                "up": size.up,
                "assumes": ", ".join(assumes) or "nothing",
                "source": method.fidelity.partition(";")[0],
            }
        )
    if options.json:
        print(json.dumps(rows))
        return
    shape = "x".join(map(str, options.shape))
    caption = f"MB that a client receives and sends in a round with {options.net}, {shape}, {options.classes} classes"
    table = Table(caption=caption, caption_justify="left")
    for title in ("method", "what it does", "down", "up", "assumes", "written from"):
        table.add_column(title, justify="right" if title in {"down", "up"} else "left")
    for row in rows:
        megabytes = [f"{row[key] / 1e6:.2f}" for key in ("down", "up")]
        table.add_row(row["method"], row["what"], *megabytes, row["assumes"], row["source"])
    Console().print(table)


def _first_line(method: type[Any]) -> str:
    return (method.__doc__ or "").strip().partition("\n")[0]


def _shown(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
