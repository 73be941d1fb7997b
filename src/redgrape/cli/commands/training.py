"""The commands run, fit, resume and compare."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from redgrape import methods
from redgrape.cli.progress import Progress
from redgrape.cli.publish import publish
from redgrape.data.prepare import prepare
from redgrape.engines import devices
from redgrape.errors import (
    ConfigError,
    DataError,
    Diverged,
    RedgrapeError,
    StorageError,
    TooFewClients,
    enough_memory,
    unknown,
)
from redgrape.methods import RECOMMENDED, WITHOUT_TRAINING
from redgrape.reading import run_tables, run_view
from redgrape.reading.learned import disclosed
from redgrape.reading.learned_in_words import leak_in_one_line
from redgrape.reading.suites import cost, tables
from redgrape.reading.suites.description import Cell, Suite, text
from redgrape.reading.suites.found_cells import Standing
from redgrape.reading.terminal import lines, printable
from redgrape.runs import durable
from redgrape.runs.environment import REMEDY, Present
from redgrape.runs.experiment import Experiment, NetOptions, override, put, read_toml
from redgrape.runs.figures import FIGURES, OF_MANY_CLASSES
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import Run

if TYPE_CHECKING:
    from redgrape.reading.tensorboard import TensorBoard


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
    method = _method_section(values)
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


def compare(options: argparse.Namespace) -> None:
    """Train several methods on the same split and seeds."""
    if options.recommended:
        options.methods = list(dict.fromkeys([*_recommended(options), *options.methods]))
    if not options.methods:
        raise ConfigError("compare needs methods: name some, or add --recommended; `redgrape methods` lists them")
    cells: list[tuple[str, Experiment, Path]] = []
    for spec in sorted(options.methods, key=lambda spec: "@" in spec):  # baselines last
        for seed in options.seeds or [None]:
            values = described(options)
            where = with_method(values, spec)
            experiment = Experiment.parse(values if seed is None else {**values, "seed": seed})
            for name, each in _at(where, experiment, options):
                path = options.out / f"{_file_name(spec)}{name}-seed{experiment.seed}"
                if any(path == other for *_, other in cells):
                    raise ConfigError(f"'{spec}' would run twice in '{path}'; name every method once")
                cells.append((spec, each, path))
    if options.on == "validation" and any(not experiment.data.validation for _, experiment, _ in cells):
        raise ConfigError("--on validation needs validation examples; hold some out with -c data.validation=10")
    if options.dry_run:
        for spec, experiment, path in cells:
            if options.json:
                print_plan(path, experiment, options)
            else:
                plan = f"{path}  {spec}  seed {experiment.seed}  {experiment.rounds} rounds  {experiment.hash()[:12]}"
                print(printable(plan))
        return
    _check_taken([(experiment, path) for _, experiment, path in cells], options)
    standings = [
        Standing(Cell({"method": spec}, e), run_view.RunView.read(path) if (path / "summary.json").exists() else None)
        for spec, e, path in cells
    ]
    done: list[tuple[str, run_view.RunView]] = []
    failures: list[RedgrapeError] = []
    leaks: list[str] = []
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
        done.append((spec, view))
        standings[i] = replace(standings[i], view=view)
        if has_trained and (line := leak_in_one_line(disclosed(view))) is not None:
            leaks.append(line)
    tell_leaks(leaks, options)
    for path, why in run_view.other_data([view for _, view in done]).items():
        raise StorageError(f"'{path}' cannot be compared: {why}; {REMEDY}")
    results = run_tables.collect(done, options.on)
    if not results:
        raise_first(failures)
    picture = options.out / "per_class.png"
    run_tables.draw_per_class(results, picture)
    specs = list(dict.fromkeys(spec for spec, *_ in cells))
    suite = Suite(
        name=options.out.name,
        title=f"Comparison of {', '.join(specs)}",
        axes={"method": specs},
        rows=["method"],
        columns=[],
        measures=[*FIGURES, *(OF_MANY_CLASSES if run_tables.many_classes(results) else [])],
        references=specs[:1],
    )
    notes = run_tables.notes(results)
    table = tables.build(
        suite,
        standings,
        on=options.on,
        notes=notes,
        command=command_of(options, "compare", *options.methods, "--on", options.on),
    )
    publish(table, options.out, as_json=options.json, more={"picture": str(picture)})
    raise_first(failures)


def raise_first(failures: Sequence[RedgrapeError]) -> None:
    """Raise the first failure, after everything is written."""
    if failures:
        more = f" (and {len(failures) - 1} more failed)" if len(failures) > 1 else ""
        raise type(failures[0])(f"{failures[0]}{more}")


def _recommended(options: argparse.Namespace) -> list[str]:
    net = described(options).get("net", {})
    is_frozen = isinstance(net, dict) and NetOptions.parse(net).is_frozen
    return [*RECOMMENDED, *([WITHOUT_TRAINING] if is_frozen else [])]


def described(options: argparse.Namespace) -> dict[str, Any]:
    """The values of the experiment. Flags override the file, and -c assignments override both."""
    file = options.experiment
    if file is not None and not file.exists() and str(file) in methods.names():
        raise ConfigError(f"'{file}' is a method, and no file of this name is here; write --method {file}")
    values = read_toml(options.experiment) if options.experiment else {}
    for key, value in vars(options).items():
        if key.startswith("set:") and value is not None:
            put(values, key.removeprefix("set:"), value)
    for assignment in options.config:
        override(values, assignment)
    return values


def command_of(options: argparse.Namespace, *words: str) -> str:
    """The command that gives the same table, with all settings of its experiments."""
    more = ["--experiment", str(options.experiment)] if options.experiment else []
    more += ["--seeds", ",".join(map(str, options.seeds))] if options.seeds else []
    flags = [
        f"{k.removeprefix('set:')}={text(v)}"
        for k, v in vars(options).items()
        if k.startswith("set:") and v is not None
    ]
    settings = [word for setting in [*flags, *options.config] for word in ("-c", setting)]
    return shlex.join(["redgrape", *words, *more, *settings])


def with_method(values: dict[str, Any], spec: str) -> str:
    """Put `redgrape:lam=0.2,exchange.preset=private` into the values. A key without a section is a hyper-parameter
    of the method. Other flags apply to all methods. Return where the method is to be trained, `alone` or `pooled` in
    `redgrape@alone`, or an empty string for the federation."""
    name, _, settings = spec.partition(":")
    name, at, where = name.partition("@")
    if at:
        if where not in ("alone", "pooled"):
            raise unknown("baseline", where, ["alone", "pooled"])
        for key in ("clients_per_round", "min_answers", "exchange"):  # nothing is exchanged
            values.pop(key, None)
    _method_section(values)["name"] = name
    for assignment in filter(None, settings.split(",")):
        if assignment.startswith("data."):
            raise ConfigError(
                f"'{assignment}' in '{spec}' is for all methods; pass -c {assignment}, or compare data with `sweep`"
            )
        override(values, assignment if "." in assignment.partition("=")[0] else f"method.{assignment}")
    return where


def _method_section(values: dict[str, Any]) -> dict[str, Any]:
    method = values.setdefault("method", {})
    if not isinstance(method, dict):
        raise ConfigError(f"method is {method!r} in the experiment; it must be a section, [method]")
    return method


def _at(where: str, experiment: Experiment, options: argparse.Namespace) -> list[tuple[str, Experiment]]:
    """The experiments to train, each with what tells its folder apart: one, or one for each client alone."""
    if where != "alone":
        return [("", _with_data(experiment, pooled=True) if where else experiment)]
    federation = prepare(experiment.data, experiment.seed, options.data_root)
    held = [(k, name) for k, name in enumerate(federation.client_names) if federation.size(k)]
    return [(f"-{k}-{_file_name(name)}", _with_data(experiment, alone=name)) for k, name in held]


def _with_data(experiment: Experiment, **changed: Any) -> Experiment:
    values = experiment.resolved()
    return Experiment.parse({**values, "data": {**values["data"], **changed}})


def run_name(experiment: Experiment) -> str:
    method, source = Path(experiment.method.name).stem, Path(experiment.data.source).stem
    return f"{_file_name(f'{method}-{source}')}-seed{experiment.seed}-{experiment.hash()[:8]}"


def _told_apart(experiment: Experiment) -> str:
    alone = "" if experiment.data.alone is None else f"{experiment.data.alone} "
    return f"{alone}seed {experiment.seed}"


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(text).name if text.endswith(".py") else text).strip("-.")[:100]


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


def present_of(options: argparse.Namespace) -> Present:
    return Present(
        options.device, options.precision, options.stack, options.data_root, allow_changes=options.allow_changes
    )


def _why_not_taken(folder: RunFolder, experiment: Experiment, present: Present) -> str:
    method = read_toml(folder.path / "experiment.toml").get("method")
    name = method.get("name") if isinstance(method, dict) else None
    if name != experiment.method.name or folder.experiment().hash() != experiment.hash():  # unknown code is not loaded
        return "holds another experiment"
    if not (folder.path / "environment.json").exists():
        return ""  # it has not begun, or resuming it will fail
    changes = present.changes(experiment, folder.environment())
    return f"does not match the request: {', '.join(changes)}" if changes else ""


def print_plan(folder: Path, experiment: Experiment, options: argparse.Namespace) -> None:
    """Print what would run, and where."""
    if options.json:
        values = run_view.plain(experiment.resolved())
        print(json.dumps({"folder": str(folder), "hash": experiment.hash(), "experiment": values}))
    else:
        print(f"# would run in {printable(folder)}\n# experiment {experiment.hash()}")
        print(lines(experiment.to_toml()), end="")


def carry_out(
    folder: RunFolder,
    options: argparse.Namespace,
    label: str,
    rounds: int | None = None,
    *,
    heading: str = "",
    tell_data: bool = False,
) -> bool:
    """Run the remaining rounds, up to `rounds` if given. Return whether there were any. `tell_data`: print the notes on
    the data too."""
    last = folder.experiment().rounds if rounds is None else rounds
    done = folder.checkpoints.newest_round()
    progress = Progress(label, done, last, heading=heading, as_json=options.json, quiet=options.quiet)
    any_round, this = False, None
    try:
        this = Run(
            folder,
            workers=workers_of(options),
            device=options.device,
            precision=options.precision,
            data_root=options.data_root,
            allow_changes=options.allow_changes,
            deadline=options.deadline,
            stack=options.stack,
            rounds=rounds,
            embedding=progress.embedding,
        )
        with enough_memory(), progress, _tensorboard(folder, options) as log:
            for step in this.steps():
                any_round = True
                progress.step(step)
                if log is not None:
                    log.step(step)
    except (ConfigError, DataError):
        folder.discard()  # an invalid run leaves nothing behind
        raise
    except KeyboardInterrupt as error:
        error.add_note(shlex.quote(str(folder.path)))  # for the line that tells how to continue
        raise
    finally:
        for note in [*(this.data_notes if tell_data else []), *this.notes] if this else []:
            print(f"note: {printable(note)}", file=sys.stderr)
    return any_round


def tell_leak(folder: RunFolder, options: argparse.Namespace) -> None:
    line = leak_in_one_line(disclosed(run_view.RunView.read(folder.path)))
    tell_leaks([] if line is None else [line], options)


def tell_leaks(leaks: Sequence[str], options: argparse.Namespace) -> None:
    """Print one line on what runs disclosed. Each line is of a run whose method has floors against that, all off."""
    if leaks and not options.quiet:
        others = f" (and {len(leaks) - 1} more of these runs)" if len(leaks) > 1 else ""
        print(f"note: {printable(leaks[0] + others)}", file=sys.stderr)


def _tensorboard(folder: RunFolder, options: argparse.Namespace) -> AbstractContextManager[TensorBoard | None]:
    if not options.tensorboard:
        return nullcontext()
    from redgrape.reading.tensorboard import TensorBoard

    return closing(TensorBoard(folder.path))


def run_of(i: int, standings: Sequence[Standing], options: argparse.Namespace, at_once: int = 1) -> str:
    """Text such as `run 2 of 6, about 4 min left: fedavg, seed 1`."""
    workers = workers_of(options)
    left = [s for s in standings[i:] if not s.finished and not s.obstacle]
    measured = cost.measure(options.out, workers)
    seconds = cost.total([cost.seconds_left(s, measured, workers) for s in left], at_once)
    time = "" if seconds is None else f", {cost.in_words(seconds)} left"
    return printable(f"run {i + 1} of {len(standings)}{time}: {standings[i].cell.name}")


def workers_of(options: argparse.Namespace) -> int:
    if options.workers:
        return int(options.workers)
    places = devices.chosen(options.device)
    return cores() if places == [devices.CPU] else len(places)


def cores() -> int:
    """The number of cores that this process may use. The machine may have more."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def finish(folder: RunFolder, options: argparse.Namespace, more: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Print the result of a run, below that of the run it started from. `more`: what the JSON also has."""
    view = run_view.RunView.read(folder.path)
    if options.json:
        print(json.dumps({"folder": str(folder.path), "summary": view.summary, **more}))
        return
    shown = [view]
    if "start" in view.experiment:
        with suppress(StorageError):  # it may have been moved since
            shown = [run_view.RunView.read(Path(view.experiment["start"])), view]
    run_tables.print_table(run_tables.collect((each.label, each) for each in shown))
    print(f"run folder: {printable(folder.path)}")


def _warn_of_schedules(experiment: Experiment) -> None:
    decaying = [k for k, v in experiment.method.resolved().items() if k.endswith("_schedule") and v != "constant"]
    if decaying:
        print(
            f"note: {', '.join(decaying)} decays over all rounds: an extended run differs from a longer one",
            file=sys.stderr,
        )
