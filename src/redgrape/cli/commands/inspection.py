"""The commands ls, show and methods."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import tomli_w

from redgrape.cli.progress import percent
from redgrape.errors import ConfigError, StorageError
from redgrape.reading import judged, run_tables, run_view
from redgrape.reading.terminal import lines, listed, paragraph, printable, prose, table
from redgrape.runs.figures import LONGEST

if TYPE_CHECKING:
    from redgrape.reading.method_index import Line
    from redgrape.reading.run_view import RunView


def ls(options: argparse.Namespace) -> None:
    """List the runs below a folder."""
    if not options.folder.is_dir():
        raise StorageError(
            f"there is no folder '{options.folder}'; create a run with `redgrape run`, or choose another folder"
        )
    runs = []
    for path in run_view.find_runs(options.folder):
        try:
            runs.append(run_view.view(path))
        except StorageError as error:  # one damaged run must not hide the others
            print(f"note: {printable(error)}", file=sys.stderr)
    other = run_view.other_data(runs)
    for path, why in other.items():
        print(f"note: '{printable(path)}' cannot be compared: {printable(why)}", file=sys.stderr)
    if options.json:
        print(json.dumps([run.row() | ({"other_data": other[p]} if (p := run.path) in other else {}) for run in runs]))
        return
    titles = ("run", "method", "data", "seed", "rounds", "overall %", "tail %")
    rows = [
        (
            row["run"],
            row["method"],
            row["data"],
            row["seed"],
            f"{row['done']}/{row['rounds']}",
            percent(row["accuracy"]),
            percent(row["tail"]),
        )
        for row in (run.row() for run in runs)
    ]
    print(table(titles, rows))


def show(options: argparse.Namespace) -> None:
    """Show one run: its progress, result and settings."""
    run = run_view.view(options.run)
    if options.json:
        tested = {"test_counts": judged.counts_of(run.environment, run.summary)}
        experiment = run_view.plain(run.experiment)
        print(json.dumps({**run.row(), **tested, "experiment": experiment, "summary": run.summary}))
        return
    print(f"rounds done: {run.rounds_done} of {run.experiment['rounds']}")
    if run.environment is not None:
        print(printable(f"split: {run.environment['split']}"))
    if run.summary is None:
        from redgrape.data.prepare import AT_SITES

        again = "deploy run" if run.experiment["data"]["source"] == AT_SITES else f"resume {options.run}"
        print(printable(f"not finished; continue it with `redgrape {again}`"))
    else:
        _show_result(run, options.on)
    print(f"\nsettings, also those that do not apply to this data\n\n{lines(tomli_w.dumps(run.experiment).strip())}")


def _show_result(run: RunView, on: str) -> None:
    """The figures of a finished run, and those of each class."""
    assert run.summary is not None
    print()
    run_tables.print_table(run_tables.collect([(run.label, run)], on))
    if run.environment is not None:
        names, tested = run.environment["class_names"], judged.counts_of(run.environment, run.summary)
        counts = run.environment["class_counts"]  # None if only the sites of a deployment know
        order = sorted(range(len(names)), key=lambda c: (-counts[c] if counts else 0, c))
        between = len(order) - 2 * judged.EITHER_END if len(order) > LONGEST else 0
        rows = []
        for c in [*order[: judged.EITHER_END], *order[-judged.EITHER_END :]] if between else order:
            of_class = [str(known[c]) if known else "–" for known in (counts, tested)]
            rows.append([names[c], *of_class, percent(run.summary["per_class"][c])])
        titles = ("class", "training examples", "test examples", "accuracy")
        print(f"\n{table(titles, rows, 'accuracy per class, %')}")
        if between:
            print(f"{between} classes between the first and the last {judged.EITHER_END} are in `--json`")


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
    fidelity = vars(method).get("fidelity", "")  # that of a base is not about this method
    if options.json:
        presets = {name: dict(values) for name, values in method.presets.items()}
        facts = {"name": options.name, "fidelity": fidelity, "hyper_parameters": fields, "presets": presets}
        print(json.dumps(run_view.plain(facts)))
        return
    about = method.__doc__ if "+" in options.name else sys.modules[method.__module__].__doc__
    print(_hanging(prose((about or "").strip())))
    print("\nhyper-parameters")
    print(listed([(f"{name}={_shown(entry['default'])}", entry["meaning"] or "") for name, entry in fields.items()]))
    print()
    for name, values in method.presets.items():
        settings = ", ".join(f"{key}={_shown(value)}" for key, value in values.items()) or "the defaults"
        print(paragraph(f"preset {name}: {settings}", "  "))
    print(paragraph(f"fidelity: {fidelity or 'not stated'}", "  "))


def _hanging(text: str) -> str:
    """Lines that are too long, such as equations, go on below and further right."""
    return "\n".join(paragraph(line, " " * (len(line) - len(line.lstrip()) + 4)) for line in text.split("\n"))


def _list_methods(options: argparse.Namespace) -> None:
    """List the methods: what each does, needs and discloses, and its message sizes with this net."""
    from redgrape.methods import RECOMMENDED
    from redgrape.reading import method_index

    found = method_index.lines(options.net, options.shape, options.classes)
    wanted = options.needs
    chosen = [
        line
        for line in found
        if (wanted is None or wanted in (", ".join(line.needs) or "nothing"))
        and (line.is_summable or not options.summable)
    ]
    if options.json:
        print(json.dumps([{**asdict(line), "recommended": line.method in RECOMMENDED} for line in chosen]))
        return
    if wanted is not None and not chosen:
        known = ", ".join(dict.fromkeys(words for line in found for words in line.needs))
        raise ConfigError(f"no method needs '{wanted}'; choose from nothing, {known}")
    if len(chosen) == len(found):
        print(
            paragraph("Begin with these (`redgrape compare --recommended`; docs/choose.md says when to take others):")
        )
        print(f"{listed(list(RECOMMENDED.items()))}\n")
    print(listed([(line.method, _in_words(line)) for line in chosen]))
    shape = "x".join(map(str, options.shape))
    sizes = f"MB per client and round with {options.net}, {shape}, {options.classes} classes"
    print(f"\n{paragraph(f'{sizes}; `redgrape methods NAME` shows the hyper-parameters of one')}")


def _in_words(line: Line) -> str:
    needs = ", ".join(line.needs) or "nothing"
    sizes = f"{line.down / 1e6:.2f} MB down, {line.up / 1e6:.2f} up"
    return f"{line.what} Needs {needs}. The server sees {line.discloses}. {sizes}."


def _shown(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
