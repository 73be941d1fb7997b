"""The table of a suite: what its runs reached, next to the paper's figures, compared by seed, with notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from redgrape.reading.run_tables import by_seed, mean_std, means
from redgrape.reading.run_view import RunView, machines, other_data
from redgrape.reading.suites.cells import Suite, label_text
from redgrape.reading.suites.found_cells import Standing
from redgrape.reading.suites.statistics import FEWEST_SEEDS, Paired, paired
from redgrape.runs.figures import LAST

TOO_SHORT = 2 * LAST  # shorter runs have no LAST rounds after their warm-up
RISE = 0.01  # a run is still learning if its accuracy rose by more than this in the last rounds
FALL = 0.03  # methods go up and down by a point or two; this is more


@dataclass(frozen=True)
class Entry:
    """One entry of the table."""

    row: str
    column: tuple[str, ...]
    measure: str
    values: Mapping[int, float]  # by seed
    seeds: int  # number requested
    paper: float | None  # in percent
    extra_data: bool
    comparisons: Mapping[str, Paired]  # by reference

    @property
    def mean(self) -> float | None:
        return mean_std(list(self.values.values()))[0] if self.values else None

    @property
    def std(self) -> float | None:
        return mean_std(list(self.values.values()))[1] if self.values else None

    @property
    def difference(self) -> float | None:
        """Our figure minus that of the paper, in points."""
        return None if self.mean is None or self.paper is None else 100 * self.mean - self.paper


@dataclass(frozen=True)
class Table:
    suite: Suite
    scale: str | None
    on: str
    standings: Sequence[Standing]
    entries: Sequence[Entry]
    cuts: Sequence[str]
    departures: Sequence[str]
    notes: Sequence[str]
    command: str

    def at(self, row: str, column: tuple[str, ...], measure: str) -> Entry:
        """The entry at this place. It is empty if the selection of cells excludes it."""
        found = (e for e in self.entries if (e.row, e.column, e.measure) == (row, column, measure))
        return next(found, Entry(row, column, measure, {}, 0, None, False, {}))

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(entry.row for entry in self.entries))

    @property
    def columns(self) -> list[tuple[str, ...]]:
        return list(dict.fromkeys(entry.column for entry in self.entries))


def build(
    suite: Suite,
    standings: Sequence[Standing],
    *,
    scale: str | None = None,
    cuts: Sequence[str] = (),
    departures: Sequence[str] = (),
    on: str = "test",
    command: str = "",
    notes: Sequence[str] = (),
) -> Table:
    standings = _of_one_split(standings)
    places: dict[tuple[str, tuple[str, ...]], list[Standing]] = {}
    for standing in standings:
        labels = standing.cell.labels
        places.setdefault((suite.row(labels), suite.column(labels)), []).append(standing)
    values = {
        (*place, measure): by_seed(
            (s.cell.seed, s.client, means(s.view, on).get(measure) if s.view is not None and s.finished else None)
            for s in group
        )
        for place, group in places.items()
        for measure in suite.measures
    }
    entries = []
    for (row, column), group in places.items():
        for measure in suite.measures:
            ours = values[row, column, measure]
            others = {ref: values.get((ref, column, measure), {}) for ref in suite.references if ref != row}
            entries.append(
                Entry(
                    row=row,
                    column=column,
                    measure=measure,
                    values=ours,
                    seeds=len({standing.cell.seed for standing in group}),
                    paper=suite.paper_value(row, column, measure) if on == "test" else None,
                    extra_data=any(s.view is not None and s.view.uses_extra_data for s in group),
                    comparisons={reference: paired(ours, theirs) for reference, theirs in others.items()},
                )
            )
    all_notes = [*notes, *_notes(standings, on)]
    return Table(suite, scale, on, standings, entries, cuts, departures, all_notes, command)


def _of_one_split(standings: Sequence[Standing]) -> list[Standing]:
    """The standings, without runs whose data differs from others with the same seed and data options."""
    other = other_data([s.view for s in standings if s.view is not None and s.finished])
    return [
        replace(s, view=None, obstacle=f"cannot be compared: '{s.view.path}': {other[s.view.path]}")
        if s.view is not None and s.view.path in other
        else s
        for s in standings
    ]


def _notes(standings: Sequence[Standing], on: str) -> list[str]:
    """Notes that a reader needs before comparing rows."""
    finished = [s for s in standings if s.finished]
    notes = []
    if finished:
        rounds = {s.cell.experiment.rounds for s in finished}
        # A head from sums is complete after one round, or after two if it is chosen on held-out examples.
        trained = {number for number in rounds if number > 2} or rounds - {1} or rounds
        short = sorted(number for number in trained if number < TOO_SHORT)
        if short:
            notes.append(f"too short to compare methods: {_list(short)} rounds")
        else:
            varying = _varying_axes(finished)
            changes = [(s, _change(s.view, on)) for s in finished if s.view is not None]
            for words, moved in (
                ("still learning at the end, up by more than a point", [s for s, by in changes if by > RISE]),
                (f"worse at the end, down by more than {100 * FALL:g} points", [s for s, by in changes if by < -FALL]),
            ):
                names = list(dict.fromkeys(_name(s, varying) for s in moved))
                who = f" ({'; '.join(names)})" if varying and len(moved) < len(finished) else ""
                if moved:
                    notes.append(f"{words} in the last rounds: {len(moved)} of {len(finished)} runs{who}")
        seeds: dict[str, set[int]] = {}
        for s in finished:
            seeds.setdefault(_name(s, s.cell.labels), set()).add(s.cell.seed)
        numbers = sorted(set(map(len, seeds.values())))
        if numbers[0] < FEWEST_SEEDS:
            notes.append(
                f"too few seeds to compare methods: {_list(numbers)} a cell, and chance alone "
                f"moves figures; {FEWEST_SEEDS} or more can be compared"
            )
    notes += machines([(s.cell.name, s.view) for s in finished if s.view is not None])
    notes += [f"a record is not taken: {s.not_taken}" for s in standings if s.not_taken]
    missing: dict[str, list[str]] = {}
    for s in standings:
        if not s.finished:
            missing.setdefault(s.state, []).append(s.cell.name)
    for state, cells in missing.items():
        notes.append(f"not run{'' if state == 'to run' else f' ({state})'}: {len(cells)} of {len(standings)} cells")
    return notes


def _varying_axes(standings: Sequence[Standing]) -> list[str]:
    """The axes that distinguish the cells."""
    labels = [s.cell.labels for s in standings]
    return [axis for axis in labels[0] if any(other[axis] != labels[0][axis] for other in labels)]


def _name(standing: Standing, axes: Iterable[str]) -> str:
    """The name of a cell on these axes, without its seed."""
    return ", ".join(label_text(axis, standing.cell.labels[axis]) for axis in axes)


def _change(view: RunView, on: str) -> float:
    """How the accuracy of the last rounds differs from that of the twenty before them, without the first rounds, which
    are a warm-up. If there are no others, the last rounds are halved."""
    evaluated = [(r["round"], r[on]["accuracy"]) for r in view.metrics if on in r and r["round"] > LAST]
    last, before = evaluated[-LAST:], [pair for pair in evaluated[:-LAST] if pair[0] >= evaluated[-LAST][0] - 2 * LAST]
    if not before:
        before, last = last[: len(last) // 2], last[len(last) // 2 :]
    return mean_std([a for _, a in last])[0] - mean_std([a for _, a in before])[0] if before else 0.0


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
