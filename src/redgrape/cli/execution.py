"""What commands share: the experiment that flags describe, a run that is carried out, and what is said of it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from redgrape import methods
from redgrape.cli.progress import Progress
from redgrape.data.table import is_table
from redgrape.engines import devices
from redgrape.errors import ConfigError, DataError, RedgrapeError, StorageError, enough_memory, unknown
from redgrape.reading import run_tables, run_view
from redgrape.reading.learned import disclosed
from redgrape.reading.learned_in_words import leak_in_one_line
from redgrape.reading.suites import cost
from redgrape.reading.suites.cells import text
from redgrape.reading.suites.found_cells import Standing
from redgrape.reading.terminal import lines, printable
from redgrape.runs.environment import Present
from redgrape.runs.experiment import Experiment
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import Run
from redgrape.runs.values import override, put, read_toml

if TYPE_CHECKING:
    from redgrape.reading.tensorboard import TensorBoard


def described(options: argparse.Namespace) -> dict[str, Any]:
    """The values of the experiment. Flags override the file, and -c assignments override both."""
    file = options.experiment
    if file is not None and not file.exists() and str(file) in methods.names():
        raise ConfigError(f"'{file}' is a method, and no file of this name is here; write --method {file}")
    if file is not None and (file.is_dir() or file.suffix == ".npz" or is_table(file.name)):  # as `fit` takes data
        raise ConfigError(f"'{file}' is no experiment file (TOML); name data as --data {file}")
    values = read_toml(file) if file else {}
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
    method_section(values)["name"] = name
    for assignment in filter(None, settings.split(",")):
        if assignment.startswith("data."):
            raise ConfigError(
                f"'{assignment}' in '{spec}' is for all methods; pass -c {assignment}, or compare data with `sweep`"
            )
        override(values, assignment if "." in assignment.partition("=")[0] else f"method.{assignment}")
    return where


def method_section(values: dict[str, Any]) -> dict[str, Any]:
    method = values.setdefault("method", {})
    if not isinstance(method, dict):
        raise ConfigError(f"method is {method!r} in the experiment; it must be a section, [method]")
    return method


def run_name(experiment: Experiment) -> str:
    method, source = Path(experiment.method.name).stem, Path(experiment.data.source).stem
    return f"{file_name(f'{method}-{source}')}-seed{experiment.seed}-{experiment.hash()[:8]}"


def file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(text).name if text.endswith(".py") else text).strip("-.")[:100]


def present_of(options: argparse.Namespace) -> Present:
    return Present(
        options.device, options.precision, options.stack, options.data_root, allow_changes=options.allow_changes
    )


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
    tell_leaks({} if line is None else {"": line}, options)


def tell_leaks(leaks: Mapping[str, str], options: argparse.Namespace) -> None:
    """Print one line on what runs disclosed. Each line is of a method with floors against that, all off."""
    if leaks and not options.quiet:
        _, *others = leaks
        line = next(iter(leaks.values())) + (f"; likewise {', '.join(others)}" if others else "")
        print(f"note: {printable(line)}", file=sys.stderr)


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


def raise_first(failures: Sequence[RedgrapeError]) -> None:
    """Raise the first failure, after everything is written."""
    if failures:
        more = f" (and {len(failures) - 1} more failed)" if len(failures) > 1 else ""
        raise type(failures[0])(f"{failures[0]}{more}")
