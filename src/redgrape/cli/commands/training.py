"""The commands run, fit, resume and compare."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from redgrape import methods
from redgrape.cli.execution import (
    carry_out,
    command_of,
    described,
    file_name,
    finish,
    method_section,
    present_of,
    print_plan,
    raise_first,
    run_name,
    run_of,
    tell_leak,
    tell_leaks,
    with_method,
)
from redgrape.cli.publish import publish
from redgrape.data.prepare import prepare
from redgrape.errors import ConfigError, Diverged, RedgrapeError, StorageError, TooFewClients
from redgrape.methods import RECOMMENDED, WITHOUT_TRAINING
from redgrape.reading import pictures, run_tables, run_view
from redgrape.reading.learned import disclosed
from redgrape.reading.learned_in_words import leak_in_one_line
from redgrape.reading.suites import tables
from redgrape.reading.suites.cells import Cell, Suite
from redgrape.reading.suites.found_cells import Standing
from redgrape.reading.terminal import printable
from redgrape.runs import durable
from redgrape.runs.environment import REMEDY, Present
from redgrape.runs.experiment import Experiment, NetOptions
from redgrape.runs.figures import FIGURES, OF_MANY_CLASSES
from redgrape.runs.folder import RunFolder
from redgrape.runs.values import override, read_toml


def run(options: argparse.Namespace) -> None:
    if folder := _new_run(Experiment.parse(described(options)), options):
        finish(folder, options)


def _new_run(experiment: Experiment, options: argparse.Namespace) -> RunFolder | None:
    """The folder of a run of this experiment, when it is finished; None if it is only planned."""
    out = options.out or Path("runs") / run_name(experiment)
    if options.dry_run:
        print_plan(out, experiment, options)
        return None
    if options.overwrite and RunFolder.is_only_begun(out):
        RunFolder.open(out).remove()
    folder = RunFolder.create(out, experiment)
    if carry_out(folder, options, run_view.run_label(experiment.method.resolved()), tell_data=True):
        tell_leak(folder, options)
    return folder


def fit(options: argparse.Namespace) -> None:
    """A run of one round, of the method that needs no training."""
    from redgrape.exported.export import export

    if options.export is not None:
        durable.check_free(options.export)
    if folder := _new_run(Experiment.parse(described(options)), options):
        model = None if options.export is None else export(folder.path, options.export)
        finish(folder, options, {} if model is None else {"model": str(model)})
        if not options.json:
            run = printable(folder.path)
            print(f"page: redgrape report {run}")
            print(f"model: redgrape export {run} MODEL" if model is None else f"model folder: {printable(model)}")


def adjust(options: argparse.Namespace) -> None:
    """A run of one round that starts from the model of a finished run. All clients are asked, and none trains."""
    before = RunFolder.open(options.run).experiment().resolved()
    changed = {"rounds": 1, "clients_per_round": "none", "start": str(options.run), "method": {"epochs": 0}}
    values = {**before, **changed}
    if with_method(values, options.method):
        raise ConfigError(f"'{options.method}' names a baseline, and only the model of a run can be adjusted")
    for assignment in options.config:
        override(values, assignment)
    method = method_section(values)
    if method.get("epochs") == 0:  # else it trains on
        name = str(method.get("name"))
        if not methods.post_hoc(name):
            able = ", ".join(name for name in methods.names() if methods.post_hoc(name))
            raise ConfigError(
                f"'{name}' trains, and so it changes nothing in a finished run; choose {able}, or train on with "
                "-c method.epochs=1"
            )
        values["method"] = {**methods.load(name).presets["post_hoc"], **method}
    if folder := _new_run(Experiment.parse(values), options):
        finish(folder, options)


def resume(options: argparse.Namespace) -> None:
    folder = RunFolder.open(options.run)
    experiment = folder.experiment()
    if options.rounds is not None:
        if options.rounds < experiment.rounds:
            raise ConfigError(f"--rounds is {options.rounds}, but the run has {experiment.rounds}; choose more")
        if options.rounds > experiment.rounds:
            _warn_of_schedules(experiment)
        experiment = experiment.with_rounds(options.rounds)
    if options.dry_run:
        print_plan(folder.path, experiment, options)
        return
    if carry_out(folder, options, run_view.run_label(experiment.method.resolved()), options.rounds):
        tell_leak(folder, options)
    finish(folder, options)


_Cell: TypeAlias = tuple[str, Experiment, Path]  # the method as it was given, what is trained, and the run folder


def compare(options: argparse.Namespace) -> None:
    """Train several methods on the same split and seeds."""
    cells = _cells(options)
    if options.dry_run:
        _print_cells(cells, options)
        return
    _check_taken([(experiment, path) for _, experiment, path in cells], options)
    standings, failures = _train_all(cells, options)
    trained = [(spec, s.view) for (spec, *_), s in zip(cells, standings, strict=True) if s.view and not s.obstacle]
    for path, why in run_view.other_data([view for _, view in trained]).items():
        raise StorageError(f"'{path}' cannot be compared: {why}; {REMEDY}")
    results = run_tables.collect(trained, options.on)
    if results:
        _publish(list(dict.fromkeys(spec for spec, *_ in cells)), standings, results, options)
    raise_first(failures)


def _cells(options: argparse.Namespace) -> list[_Cell]:
    if options.recommended:
        options.methods = list(dict.fromkeys([*_recommended(options), *options.methods]))
    if not options.methods:
        raise ConfigError("compare needs methods: name some, or add --recommended; `redgrape methods` lists them")
    cells: list[_Cell] = []
    for spec in sorted(options.methods, key=lambda spec: "@" in spec):  # baselines last
        for seed in options.seeds or [None]:
            values = described(options)
            where = with_method(values, spec)
            experiment = Experiment.parse(values if seed is None else {**values, "seed": seed})
            for name, each in _at(where, experiment, options):
                path = options.out / f"{file_name(spec)}{name}-seed{experiment.seed}"
                if any(path == other for *_, other in cells):
                    raise ConfigError(f"'{spec}' would run twice in '{path}'; name every method once")
                cells.append((spec, each, path))
    if options.on == "validation" and any(not experiment.data.validation for _, experiment, _ in cells):
        raise ConfigError("--on validation needs validation examples; hold some out with -c data.validation=10")
    return cells


def _print_cells(cells: Sequence[_Cell], options: argparse.Namespace) -> None:
    for spec, experiment, path in cells:
        if options.json:
            print_plan(path, experiment, options)
        else:
            plan = f"{path}  {spec}  seed {experiment.seed}  {experiment.rounds} rounds  {experiment.hash()[:12]}"
            print(printable(plan))


def _train_all(cells: Sequence[_Cell], options: argparse.Namespace) -> tuple[list[Standing], list[RedgrapeError]]:
    """How each cell stands after its training, and the failures of those that the others need not wait for."""
    standings = [
        Standing(Cell({"method": spec}, e), run_view.RunView.read(path) if (path / "summary.json").exists() else None)
        for spec, e, path in cells
    ]
    failures: list[RedgrapeError] = []
    leaks: dict[str, str] = {}  # of each method, that of its first run
    for i, (spec, experiment, path) in enumerate(cells):
        is_new = not (path / "experiment.toml").is_file()
        folder = RunFolder.create(path, experiment) if is_new else RunFolder.open(path)
        label = spec if len(cells) == len(options.methods) else f"{spec} {_told_apart(experiment)}"
        heading = run_of(i, standings, options) if len(cells) > 1 and not standings[i].finished else ""
        try:
            has_trained = carry_out(folder, options, label, heading=heading, tell_data=i == 0)
        except (Diverged, TooFewClients) as error:  # the others can still be compared
            failures.append(type(error)(f"{label}: {error}"))
            standings[i] = replace(standings[i], obstacle=str(error))
            continue
        view = run_view.RunView.read(path)
        standings[i] = replace(standings[i], view=view)
        if has_trained and (line := leak_in_one_line(disclosed(view))) is not None:
            leaks.setdefault(spec, line)
    tell_leaks(leaks, options)
    return standings, failures


def _publish(
    specs: list[str], standings: Sequence[Standing], results: list[run_tables.Result], options: argparse.Namespace
) -> None:
    """Write and print the table, and draw the picture."""
    picture = options.out / "per_class.png"
    pictures.draw_per_class(results, picture)
    suite = Suite(
        name=options.out.name,
        title=f"Comparison of {', '.join(specs)}",
        axes={"method": specs},
        rows=["method"],
        columns=[],
        measures=[*FIGURES, *(OF_MANY_CLASSES if run_tables.many_classes(results) else [])],
        references=specs[:1],
    )
    table = tables.build(
        suite,
        standings,
        on=options.on,
        notes=run_tables.notes(results),
        command=command_of(options, "compare", *options.methods, "--on", options.on),
    )
    publish(table, options.out, as_json=options.json, more={"picture": str(picture)})


def _recommended(options: argparse.Namespace) -> list[str]:
    net = described(options).get("net", {})
    is_frozen = isinstance(net, dict) and NetOptions.parse(net).is_frozen
    return [*RECOMMENDED, *([WITHOUT_TRAINING] if is_frozen else [])]


def _at(where: str, experiment: Experiment, options: argparse.Namespace) -> list[tuple[str, Experiment]]:
    """The experiments to train, each with what tells its folder apart: one, or one for each client alone."""
    if where != "alone":
        return [("", _with_data(experiment, pooled=True) if where else experiment)]
    federation = prepare(experiment.data, experiment.seed, options.data_root)
    held = [(k, name) for k, name in enumerate(federation.client_names) if federation.size(k)]
    return [(f"-{k}-{file_name(name)}", _with_data(experiment, alone=name)) for k, name in held]


def _with_data(experiment: Experiment, **changed: Any) -> Experiment:
    values = experiment.resolved()
    return Experiment.parse({**values, "data": {**values["data"], **changed}})


def _told_apart(experiment: Experiment) -> str:
    alone = "" if experiment.data.alone is None else f"{experiment.data.alone} "
    return f"{alone}seed {experiment.seed}"


def _check_taken(cells: Sequence[tuple[Experiment, Path]], options: argparse.Namespace) -> None:
    """Raise ConfigError if an existing run has another experiment, other data or files, or comes from another machine.
    With --overwrite, remove all such runs instead. Every run is checked before the first is removed."""
    present = present_of(options)
    begun = [(experiment, path) for experiment, path in cells if (path / "experiment.toml").is_file()]
    wrong = {path: reason for e, path in begun if (reason := _why_not_taken(RunFolder.open(path), e, present))}
    for path, reason in wrong.items():
        if not options.overwrite:
            raise ConfigError(f"'{path}' {reason}; {REMEDY}")
    for path in wrong:
        RunFolder.open(path).remove()


def _why_not_taken(folder: RunFolder, experiment: Experiment, present: Present) -> str:
    method = read_toml(folder.path / "experiment.toml").get("method")
    name = method.get("name") if isinstance(method, dict) else None
    if name != experiment.method.name or folder.experiment().hash() != experiment.hash():  # unknown code is not loaded
        return "holds another experiment"
    if not (folder.path / "environment.json").exists():
        return ""  # it has not begun, or resuming it will fail
    changes = present.changes(experiment, folder.environment())
    return f"does not match the request: {', '.join(changes)}" if changes else ""


def _warn_of_schedules(experiment: Experiment) -> None:
    decaying = [k for k, v in experiment.method.resolved().items() if k.endswith("_schedule") and v != "constant"]
    if decaying:
        print(
            f"note: {', '.join(decaying)} decays over all rounds: an extended run differs from a longer one",
            file=sys.stderr,
        )
