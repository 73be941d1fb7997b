"""The commands reproduce and sweep."""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from redgrape.cli.execution import carry_out, command_of, described, present_of, raise_first, run_of, workers_of
from redgrape.cli.main import ending_at_signals
from redgrape.cli.publish import publish
from redgrape.errors import BusyError, ConfigError, DataError, Diverged, RedgrapeError, StorageError, TooFewClients
from redgrape.reading import run_tables
from redgrape.reading.run_view import RunView, find_runs, view
from redgrape.reading.suites import cost, description, formats, found_cells, grid, search, side_by_side, tables
from redgrape.reading.suites.cells import Cell, Label, Suite, label_text, text
from redgrape.reading.suites.found_cells import Standing
from redgrape.reading.terminal import printable
from redgrape.runs import durable
from redgrape.runs.environment import Present
from redgrape.runs.folder import RunFolder

BUSY = "in use by another process"


def reproduce(options: argparse.Namespace) -> None:
    suite = description.load(options.name)
    cells = suite.cells(options.scale, options.seeds, options.only)
    page = None
    if options.into is not None:
        with durable.storage_errors("read", options.into):
            page = durable.ordinary(options.into).read_text(encoding="utf-8")
        formats.marks(suite.name, options.scale, page)
    _tell_damaged_records(options.results, required=page is not None)
    standings = _standings(cells, options, None if options.no_run else present_of(options))
    if options.plan or options.dry_run:
        _print_plan(standings, options)
        return
    folder = options.out / f"{suite.name}-{options.scale}"
    home = options.out / f"{suite.home}-{options.scale}"
    failures: list[RedgrapeError] = []
    if options.no_run:
        # it does not matter whether they could run
        standings = [s if s.is_refused else replace(s, obstacle="") for s in standings]
    else:
        standings, failures = _run(standings, home, options)
    if options.record:
        with found_cells.choosing(options.out):
            _record(standings, options.results, home.name)
    words = ["redgrape", "reproduce", options.name, "--scale", options.scale]
    words += ["--only", *options.only] if options.only else []
    words += ["--seeds", ",".join(map(str, options.seeds))] if options.seeds else []
    table = tables.build(
        suite,
        standings,
        scale=options.scale,
        cuts=suite.cuts(options.scale, options.seeds, options.only),
        departures=suite.departures(options.scale, options.only),
        on=suite.on,
        command=shlex.join(words),
    )
    publish(table, folder, as_json=options.json)
    if page is not None:
        durable.replace_file(options.into, formats.insert(table, page).encode())
    raise_first(failures)


def sweep(options: argparse.Namespace) -> None:
    values = described(options)
    seeds = options.seeds or [values.get("seed", 0)]  # the axes may hold what the method needs
    if options.search is not None:
        _search(values, seeds, options)
        return
    suite = grid.suite(options.name, values, options.grid, seeds, options.reference)
    _tell_damaged_records(options.results)
    standings = _standings(suite.cells("sweep"), options, present_of(options))
    if options.on == "validation":
        _require_validation(standings)
    if options.plan or options.dry_run:
        _print_plan(standings, options)
        return
    standings, failures = _run(standings, options.out / options.name, options)
    notes = grid.tuning(suite.axes) if options.on == "test" else []
    notes += _notes_by_data(standings, options.on)
    table = tables.build(suite, standings, on=options.on, command=_sweep_command(options), notes=notes)
    publish(table, options.out / options.name, as_json=options.json)
    raise_first(failures)


def _notes_by_data(standings: Sequence[Standing], on: str) -> list[str]:
    """The notes on the finished cells. One that does not hold for all data says for which."""
    by_data: dict[str, list[tuple[str, RunView]]] = {}
    for s in standings:
        if s.view is not None and s.finished:
            axes = [label_text(axis, label) for axis, label in s.cell.labels.items() if axis.startswith("data.")]
            by_data.setdefault(", ".join(axes), []).append(("", s.view))
    found: dict[str, list[str]] = {}
    for data, runs in by_data.items():
        for note in run_tables.notes(run_tables.collect(runs, on)):
            found.setdefault(note, []).append(data)
    return [note if len(of) == len(by_data) else f"{'; '.join(of)}: {note}" for note, of in found.items()]


def _sweep_command(options: argparse.Namespace) -> str:
    how = ["--search", str(options.search)] if options.search else ["--on", options.on]
    how += ["--reference", options.reference] if options.reference is not None else []
    return command_of(options, "sweep", *options.grid, *how)


def _search(values: dict[str, object], seeds: Sequence[int], options: argparse.Namespace) -> None:
    """Score proposals of Optuna by class-balanced validation accuracy, averaged over seeds."""
    if options.plan or options.dry_run:
        raise ConfigError("--plan cannot predict the proposals of --search; leave one of them out")
    choices = search.space(options.grid)
    found: list[Standing] = []
    trials = itertools.count(1)

    def score(proposal: Mapping[str, Label]) -> float | None:
        axes = {key: [value] for key, value in proposal.items()}
        suite = replace(_search_suite(choices, values, options.name), axes=axes)
        cells = suite.cells("search", seeds)
        _require_validation([Standing(cell) for cell in cells])
        chosen = ", ".join(f"{key} {text(value)}" for key, value in proposal.items())
        print(f"trial {next(trials)} of {options.search}: {chosen}", file=sys.stderr)
        before = _standings(cells, options, present_of(options))
        standings, failures = _run(before, options.out / options.name, options)
        for failure in failures:
            if not isinstance(failure, Diverged):
                raise failure
        if obstacle := next((s.obstacle for s in standings if s.obstacle and not failures), None):
            raise DataError(f"the search cannot continue: {obstacle}")
        new = [s for s in standings if s.cell.identity not in {f.cell.identity for f in found}]
        found.extend(new)
        scores = [s.view.summary["validation"]["balanced"] for s in standings if s.view and s.view.summary]
        return run_tables.mean_std(scores)[0] if len(scores) == len(seeds) else None

    for _ in search.proposals(choices, options.search, score):
        pass
    suite = _search_suite(choices, values, options.name)
    table = tables.build(suite, found, on="validation", command=_sweep_command(options))
    publish(table, options.out / options.name, as_json=options.json)
    _print_best(table)


def _search_suite(choices: search.Space, values: Mapping[str, object], name: str) -> Suite:
    return Suite(
        name=name,
        title=f"Search over {', '.join(choices)}",
        axes={key: [] for key in choices},
        rows=list(choices),
        columns=[],
        measures=["balanced", "accuracy", "head", "middle", "tail"],
        home=name,
        experiment=values,
        keys={key: key for key in choices},
    )


def _print_best(table: tables.Table) -> None:
    scored = [e for e in table.entries if e.measure == "balanced" and e.mean is not None]
    if scored:
        best = max(scored, key=lambda e: e.mean or 0.0)
        settings = next(s.cell.labels for s in table.standings if table.suite.row(s.cell.labels) == best.row)
        flags = " ".join(f"-c {shlex.quote(f'{key}={text(value)}')}" for key, value in settings.items())
        print(f"best on validation: {flags}", file=sys.stderr)


def _require_validation(standings: Sequence[Standing]) -> None:
    if any(standing.cell.experiment.data.validation == 0 for standing in standings):
        raise ConfigError(
            "data.validation is 0, but hyper-parameters must not be chosen on the test set; "
            "hold out a set with -c data.validation=10"
        )


def _standings(cells: Sequence[Cell], options: argparse.Namespace, present: Present | None) -> list[Standing]:
    """The progress of the cells. With --overwrite, an unusable run is no obstacle."""
    found = found_cells.standings(cells, options.out, options.results, options.data_root, present)
    return [replace(s, obstacle="") if options.overwrite and s.is_refused else s for s in found]


def _tell_damaged_records(folder: Path, *, required: bool = False) -> None:
    """Name damaged files of records: their cells count as not run. `required`: a page of results must not lose them."""
    for file in filter(Path.is_file, find_runs(folder)):
        try:
            view(file)
        except StorageError as error:
            if required:
                raise
            print(f"note: {printable(error)}", file=sys.stderr)


def _run(
    standings: Sequence[Standing], home: Path, options: argparse.Namespace
) -> tuple[list[Standing], list[RedgrapeError]]:
    """Run the unfinished cells, several at once if that is faster."""
    verbose = not options.quiet and not options.json
    cells, workers = side_by_side.shares(standings, workers_of(options), options.side_by_side)
    if cells > 1:
        if verbose:
            print(f"{cells} cells side by side, with {workers} workers each", file=sys.stderr)
        kept = {
            name: value for name, value in vars(options).items() if name != "command"
        }  # a local function, which cannot be pickled
        theirs = argparse.Namespace(**{**kept, "workers": workers, "quiet": True})
        side_by_side.carry_out(_run_beside, (standings, home, theirs, verbose, cells), cells)
    return _run_in_turn(standings, home, options, verbose)


def _run_beside(*arguments: Any) -> None:
    """Do the same in a separate process. Signals end it as they end a command."""
    with ending_at_signals():
        _run_in_turn(*arguments)


def _run_in_turn(
    standings: Sequence[Standing], home: Path, options: argparse.Namespace, verbose: bool, at_once: int = 1
) -> tuple[list[Standing], list[RedgrapeError]]:
    """Run one cell after another. A cell that fails does not stop the others."""
    failures: list[RedgrapeError] = []
    after = list(standings)
    present = present_of(options)
    for i, standing in enumerate(standings):
        name = standing.cell.name
        current = next((s for s in after[:i] if s.cell.identity == standing.cell.identity and s.finished), None)
        if current is not None:
            after[i] = replace(current, cell=standing.cell)
        elif not standing.finished and (not standing.obstacle or standing.is_refused):
            try:
                after[i], folder = _begin(standing.cell, home, options, present)
                if folder is not None:
                    heading = run_of(i, after, options, at_once) if verbose else ""
                    if at_once > 1 and verbose:  # one of several processes, of which another may have the cell
                        with folder.locked():
                            print(heading, file=sys.stderr)
                    carry_out(folder, options, label=name, heading=heading)
                    after[i] = replace(after[i], view=RunView.read(folder.path))
                elif after[i].is_refused:
                    kind = StorageError if after[i].obstacle.startswith(found_cells.DAMAGED) else ConfigError
                    failures.append(kind(f"{name}: {after[i].obstacle}"))
            except BusyError:
                after[i] = replace(standing, obstacle=BUSY)
                if verbose and at_once == 1:
                    print(f"skipped: {name}: {BUSY}", file=sys.stderr)
            except (ConfigError, DataError, Diverged, StorageError, TooFewClients) as error:
                after[i] = replace(standing, obstacle=str(error))
                failures.append(type(error)(f"{name}: {error}"))
    busy = [s.cell for s in after if s.obstacle == BUSY]
    since = {s.cell.name: s for s in _standings(busy, options, present) if s.finished}
    return [since.get(s.cell.name, s) for s in after], failures


def _begin(cell: Cell, home: Path, options: argparse.Namespace, present: Present) -> tuple[Standing, RunFolder | None]:
    """The current progress of the cell, which another process may have changed, and its run folder if it can be run or
    continued."""
    with found_cells.choosing(options.out):
        (now,) = _standings([cell], options, present)
        cell = now.cell  # it may know by now from which run it starts
        if cell.after is not None and cell.experiment.start is None and not now.finished and not now.obstacle:
            now = replace(now, obstacle=f"starts from the model of '{cell.after.name}', which was not run")
        if now.finished or now.obstacle:
            return now, None
        if now.view is not None:
            return now, RunFolder.open(now.view.path)
        path = home / cell.folder
        if options.overwrite and (path / "experiment.toml").is_file():
            RunFolder.open(path).remove()
        is_new = not (path / "experiment.toml").is_file()
        return now, RunFolder.create(path, cell.experiment) if is_new else RunFolder.open(path)


def _print_plan(standings: Sequence[Standing], options: argparse.Namespace) -> None:
    """Print the cells with their state and estimated time. Nothing is run."""
    at_once, workers = side_by_side.shares(standings, workers_of(options), options.side_by_side)
    measured = cost.measure(options.out, workers)
    estimates = [0.0 if s.obstacle else cost.seconds_left(s, measured, workers) for s in standings]
    total = cost.total(estimates, at_once)
    if options.json:
        cells = [
            {**found_cells.described(s), "seconds": seconds} for s, seconds in zip(standings, estimates, strict=True)
        ]
        print(json.dumps({"cells": cells, "side_by_side": at_once, "workers": workers, "seconds": total}))
        return
    width = max((len(s.cell.name) for s in standings), default=0)
    for s, seconds in zip(standings, estimates, strict=True):
        expected = "" if s.finished or s.obstacle else f"  {s.rounds_left} rounds, {cost.in_words(seconds)}"
        print(f"{s.cell.name:<{width}}  {s.state}{expected}")
    kinds: dict[str, int] = {}
    for s in standings:
        kind = "begun" if s.state.startswith("begun") else s.state
        kinds[kind] = kinds.get(kind, 0) + 1
    print(f"{len(standings)} cells: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}")
    if all(s.finished or s.obstacle for s in standings):
        print("nothing to run")
    else:
        basis = (
            f"based on times in '{options.out}'"
            if measured
            else "by a rough model, because nothing has been run here yet"
        )
        each = f"{at_once} cells side by side, {workers} workers each" if at_once > 1 else f"{workers} workers"
        print(f"{cost.in_words(total)} with {each}, {basis}")


def _record(standings: Sequence[Standing], records: Path, name: str) -> None:
    """Record the finished cells that have no record yet, from this suite or another."""
    known = found_cells.recorded([standing.cell for standing in standings], records)
    new = {s.cell.identity: s for s in reversed(standings) if s.finished and s.cell.identity not in known}
    if new:
        for path in found_cells.record([*reversed(new.values())], records / f"{name}.jsonl"):
            print(f"recorded: {path}", file=sys.stderr)
